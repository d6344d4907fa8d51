"""What may happen to a cluster of `ClusterLab`: how it is done, how one sees that it has come to its full effect, and
how it is undone. Tests prove with them that nothing is lost but time; the scenario `cluster` measures that time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from kvstore.cluster.view import TargetState
from kvstore.testing.cluster_lab import ClusterLab

Act: TypeAlias = Callable[[ClusterLab, str], None]
"""Done to a cluster, or to the node of that name in it."""

_AWAY: Final = (TargetState.DOWN, TargetState.RECOVERING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One kind.

    Attributes:
        strike: Makes it happen.
        sink_in: Waits until the cluster has taken notice, or may be trusted to have had the time.
        mend: Takes it back.
        loses: Whether what the node held is out of reach in the meantime.
        fences_all: Whether in the end no node takes writes any more.
    """

    name: str
    strike: Act
    sink_in: Act
    mend: Act
    loses: bool = True
    fences_all: bool = False


def faults() -> list[Fault]:
    """All of them. Those with partitions need a lab with networks, etcd ones a lab with three members."""
    return [
        Fault(name="kill -9", strike=ClusterLab.kill, sink_in=_gone, mend=ClusterLab.start),
        Fault(name="SIGSTOP", strike=ClusterLab.stop, sink_in=_gone, mend=ClusterLab.cont),
        Fault(name="restart on the same port", strike=_restart, sink_in=_nothing, mend=_nothing),
        Fault(
            name="node cut off from etcd",
            strike=lambda lab, name: lab.partition(name, "etcd"),
            sink_in=_gone,
            mend=lambda lab, name: lab.heal(name, "etcd"),
        ),
        Fault(
            name="node cut off from clients",
            strike=lambda lab, name: lab.partition(name, "clients"),
            sink_in=_nothing,
            mend=lambda lab, name: lab.heal(name, "clients"),
        ),
        Fault(name="cable pulled", strike=ClusterLab.pull_cable, sink_in=_gone, mend=ClusterLab.plug_in),
        Fault(name="etcd leader killed", strike=_kill_leader, sink_in=_led, mend=_restart_etcd, loses=False),
        Fault(name="etcd leader stopped", strike=_stop_leader, sink_in=_led, mend=_thaw_etcd, loses=False),
        Fault(
            name="etcd lost, back empty",
            strike=_lose_etcd,
            sink_in=_nothing,
            mend=_wipe_etcd,
            loses=False,
            fences_all=True,
        ),
    ]


def _nothing(lab: ClusterLab, name: str) -> None:
    pass


def _gone(lab: ClusterLab, name: str) -> None:
    lab.wait_state(name, *_AWAY)


def _restart(lab: ClusterLab, name: str) -> None:
    lab.kill(name)
    lab.start(name)


def _kill_leader(lab: ClusterLab, name: str) -> None:
    assert lab.etcd is not None
    lab.etcd.kill(lab.etcd.leader())


def _stop_leader(lab: ClusterLab, name: str) -> None:
    assert lab.etcd is not None
    lab.etcd.freeze(lab.etcd.leader())


def _led(lab: ClusterLab, name: str) -> None:
    """The members that are left have chosen another leader."""
    assert lab.etcd is not None
    lab.etcd.wait_led()


def _restart_etcd(lab: ClusterLab, name: str) -> None:
    assert lab.etcd is not None
    lab.etcd.restart_all()


def _thaw_etcd(lab: ClusterLab, name: str) -> None:
    assert lab.etcd is not None
    for member in range(len(lab.etcd.ports)):
        if lab.etcd.is_frozen(member):
            lab.etcd.thaw(member)


def _lose_etcd(lab: ClusterLab, name: str) -> None:
    assert lab.etcd is not None
    lab.etcd.kill_all()


def _wipe_etcd(lab: ClusterLab, name: str) -> None:
    assert lab.etcd is not None
    lab.etcd.wipe()
