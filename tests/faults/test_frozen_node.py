"""A worker that does not run for two seconds, as under a debugger, a full cgroup or a stuck machine."""

from __future__ import annotations

import signal
import time

from kvstore.types.results import Hit
from kvstore_client import KVClient
from tests.faults.audit import audit
from tests.faults.ledger import Ledger
from tests.faults.load import Load, LoadPlan
from tests.faults.node import HurtNode
from tests.faults.shelf import Shelf, reasons

FROZEN_S = 2.0
DEADLINE_S = 0.5
LATE_S_MAX = 1.0  # calls end at their deadline; two busy cores may wake a thread late


def freeze(node: HurtNode) -> None:
    assert node.signal_worker(signal.SIGSTOP) is not None


def thaw(node: HurtNode) -> None:
    assert node.signal_worker(signal.SIGCONT) is not None


def test_calls_end_by_their_deadline_and_all_goes_on_afterwards(node: HurtNode) -> None:
    ledger = Ledger()
    load = Load(node.start(), LoadPlan(seed=1, deadline_s=DEADLINE_S, put_bytes_max=12 << 20), ledger.apply)
    load.start()
    time.sleep(0.3)
    freeze(node)
    time.sleep(FROZEN_S)
    before = load.counts.copy()
    thaw(node)
    time.sleep(0.7)
    load.stop()
    after = load.counts - before

    assert load.faults == []
    assert load.late_s < LATE_S_MAX
    refusals = {name.split()[-1] for name in before if "Miss" in name or "Refused" in name}
    assert refusals <= {"ABSENT", "PENDING", "DEADLINE", "UNAVAILABLE", "OVERLOADED", "OUTCOME_UNKNOWN"}
    assert "DEADLINE" in refusals, f"nothing met the frozen worker: {before}"
    assert after["get Hit"], f"no hit after the thaw: {after}"
    found = audit(node.address, ledger)
    assert found.wrong == []
    assert found.observation.lost == []
    assert found.observation.lost_synced == []
    assert found.observation.resurrected == []


def test_no_byte_lands_in_a_buffer_that_was_given_back(node: HurtNode) -> None:
    with KVClient.connect(node.start()) as client:
        shelf = Shelf(client, count=32, chunk_bytes=256 * 1024)
        assert reasons(shelf.put()) == {"Stored"}
        freeze(node)
        results, buffers = shelf.get(deadline_s=0.3)
        assert reasons(results) == {"Miss DEADLINE"}
        for buffer in buffers:
            buffer[:] = b"\x55" * len(buffer)
        thaw(node)
        for at in range(32):  # the worker goes through what it was asked before, and then these
            assert isinstance(shelf.get(at, at + 1)[0][0], Hit)
        assert all(buffer == b"\x55" * len(buffer) for buffer in buffers)
