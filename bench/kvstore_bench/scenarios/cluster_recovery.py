"""How long a cluster takes to be whole again after each kind of fault (`kvstore_bench.cluster_faults`).

Three nodes and a three-member etcd in networks of their own, one client that is never restarted, and traffic all the
while. Two times are told for each fault: from the blow until reads wait for nothing any more, and from the moment that
it is taken back until everything that was stored is read and every node takes writes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Final

from kvstore.testing.cluster_lab import ClusterLab, LabOptions, until
from kvstore.types.results import Exists, Stored
from kvstore_bench.chains import Chains, ChainShape
from kvstore_bench.cluster_faults import Fault, faults
from kvstore_bench.measure import Row
from kvstore_bench.traffic import Traffic
from kvstore_client import KVClient

_SEED: Final = 9
_DEADLINE_S: Final = 2.0
_QUICK_S: Final = 0.25
_QUICK_CALLS: Final = 10
_LEASE: Final = "10s"  # the default of a node
_QUICK_LEASE: Final = "2s"
_SPREAD: Final = ChainShape(tokens=4_096, runs=32)
_SHAPE: Final = ChainShape(tokens=8_192, runs=8)


def run(*, quick: bool, folder: Path, only: str = "") -> Iterator[Row]:
    """One row for each fault whose name contains `only`; `quick` strikes once with a short lease, else each time is
    the median of three strikes at different nodes."""
    lab_folder = folder / "recovery"
    lab_folder.mkdir()
    options = LabOptions(capacity="256MiB", lease_ttl=_QUICK_LEASE if quick else _LEASE)
    with ClusterLab(lab_folder, nodes=3, etcd_members=3, in_namespaces=True, options=options) as lab:
        lab.wait_settled()
        with KVClient.connect(lab.data_addresses()) as client:
            chains = Chains(count=6, seed=_SEED, shape=_SHAPE)
            chains.put_all(client)
            for at, fault in enumerate(faults()):
                if only in fault.name:
                    yield _median(
                        [_strike(lab, client, chains, fault, at * 100 + turn) for turn in range(1 if quick else 3)]
                    )


def _median(rounds: Sequence[Row]) -> Row:
    """Each time by itself, the longest call of all of them."""
    details = {
        name: (max if name == "longest_call_s" else median)([row.details[name] for row in rounds])
        for name in rounds[0].details
    }
    return replace(rounds[0], value=median([row.value for row in rounds]), details=details)


def _strike(lab: ClusterLab, client: KVClient, chains: Chains, fault: Fault, turn: int) -> Row:
    victim = f"n{turn % 3}"
    lab.wait_settled()
    with Traffic(client, chains, seed=_SEED + 10 * turn, deadline_s=_DEADLINE_S) as traffic:
        until(lambda: len(traffic.calls) > _QUICK_CALLS, "traffic runs")
        struck_s = time.monotonic()
        fault.strike(lab, victim)
        until(lambda: _is_quick(traffic, struck_s), "reads wait for nothing")
        quick_s = _last_slow_s(traffic, struck_s) - struck_s
        fault.sink_in(lab, victim)
        noticed_s = time.monotonic() - struck_s
        mended_s = time.monotonic()
        fault.mend(lab, victim)
        until(lambda: chains.usable(client).share == 1.0, "all is there again")
        until(_writer(client, _SEED + turn), "every node takes writes")
        whole_s = time.monotonic() - mended_s
    return Row(
        name=f"recovery: {fault.name}",
        unit="s",
        value=whole_s,
        higher_is_better=False,
        details={"reads_waited_s": quick_s, "noticed_s": noticed_s, "longest_call_s": traffic.longest_s()},
    )


def _writer(client: KVClient, seed: int) -> Callable[[], bool]:
    """Whether a chain of so many runs, which goes to every node, is stored."""
    fresh = Chains(count=1, seed=seed, shape=_SPREAD, model="spread")
    return lambda: all(isinstance(one, Stored | Exists) for one in fresh.put(client, deadline=_DEADLINE_S))


def _is_quick(traffic: Traffic, since_s: float) -> bool:
    """Whether the newest reads were all quick."""
    reads = traffic.ended_since(since_s, "get", "match")[-_QUICK_CALLS:]
    return len(reads) == _QUICK_CALLS and all(call.seconds < _QUICK_S for call in reads)


def _last_slow_s(traffic: Traffic, since_s: float) -> float:
    """When the last read ended that was not quick; `since_s` when there was none."""
    slow = [call for call in traffic.ended_since(since_s, "get", "match") if call.seconds >= _QUICK_S]
    return max((call.began_s + call.seconds for call in slow), default=since_s)
