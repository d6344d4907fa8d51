"""A node that is started again on its ports, between calls and in the middle of them (case 35)."""

from __future__ import annotations

import threading
import time

from kvstore.testing.cluster_lab import until
from kvstore.types.results import Hit
from kvstore_client import KVClient
from tests.faults.audit import audit
from tests.faults.ledger import Ledger
from tests.faults.load import Load, LoadPlan
from tests.faults.node import HurtNode
from tests.faults.shelf import Shelf, reasons

COUNT = 32


def test_a_restart_between_two_calls_goes_unnoticed(node: HurtNode) -> None:
    with KVClient.connect(node.start()) as client:
        shelf = Shelf(client, count=COUNT, chunk_bytes=64 * 1024)
        assert reasons(shelf.put(0, 16)) == {"Stored"}
        match = shelf.store.match(shelf.keys[:16])
        assert match.pinned
        node.kill()
        node.start()
        assert shelf.hits(0, 16) == list(range(16))
        assert reasons(shelf.put(16, 32, deadline_s=2.0)) == {"Stored"}
        assert not match.pinned, "the pins died with the node, and the client has heard of its new boot"
        match.release()
        assert shelf.hits() == list(range(COUNT))


def test_a_restart_in_the_middle_of_calls_loses_nothing_acknowledged(node: HurtNode) -> None:
    ledger = Ledger()
    load = Load(node.start(), LoadPlan(seed=5, put_bytes_max=10 << 20, deadline_s=10.0), ledger.apply)
    load.start()
    time.sleep(0.3)
    node.kill()
    node.start()
    before = load.counts.copy()

    def succeeded() -> bool:
        return all(load.counts[what] > before[what] for what in ("put Stored", "get Hit"))

    until(succeeded, "calls succeed again", seconds=10)  # the breaker may rest for BREAKER_OPEN_NS_MAX first
    load.stop()
    assert load.faults == []
    found = audit(node.address, ledger)
    assert (found.wrong, found.observation.lost, found.observation.resurrected) == ([], [], [])


def test_a_call_that_waits_through_a_restart_is_answered(node: HurtNode) -> None:
    """A put and a get are under way when the node dies; with time left, both end well on the next life."""
    with KVClient.connect(node.start()) as client:
        shelf = Shelf(client, count=COUNT, chunk_bytes=64 * 1024)
        assert reasons(shelf.put(0, 16)) == {"Stored"}
        node.kill()
        answers: dict[str, object] = {}

        def get() -> None:
            answers["get"] = reasons(shelf.get(0, 16, deadline_s=20.0)[0])

        def put() -> None:
            answers["put"] = reasons(shelf.put(16, 32, deadline_s=20.0))

        threads = [threading.Thread(target=call) for call in (get, put)]
        for thread in threads:
            thread.start()
        node.start()
        for thread in threads:
            thread.join(30)
        assert set(answers) == {"get", "put"}
        # what a client may give up early is its retry budget's choice; what it must not do is hang or lie
        assert answers["get"] <= {"Hit", "Miss UNAVAILABLE"}  # type: ignore[operator]
        assert answers["put"] <= {"Stored", "Exists", "Refused OUTCOME_UNKNOWN", "Refused OVERLOADED"}  # type: ignore[operator]
        assert all(isinstance(result, Hit) for result in shelf.get(0, 16)[0])
