"""A drive that moves 4 MiB a second (case 50): callers get what came by the soft deadline, and are told beforehand."""

from __future__ import annotations

import time

from kvstore.types.results import Hit, Miss, MissReason
from kvstore_client import KVClient
from tests.faults.hurt_device import Order
from tests.faults.node import HurtNode
from tests.faults.shelf import Shelf, reasons

COUNT = 64
CHUNK_BYTES = 256 * 1024
SLOW_BYTES_PER_S = 4 << 20


def test_soft_deadline_gives_the_valid_prefix_so_far(node: HurtNode) -> None:
    with KVClient.connect(node.start()) as client:
        shelf = Shelf(client, count=COUNT, chunk_bytes=CHUNK_BYTES)
        assert reasons(shelf.put()) == {"Stored"}
        node.order(Order(bytes_per_s=SLOW_BYTES_PER_S))

        began = time.monotonic()
        results, buffers = shelf.get(soft_deadline_s=1.0, deadline_s=20.0)
        elapsed_s = time.monotonic() - began
        hits = [isinstance(result, Hit) for result in results]
        prefix = hits.index(False)
        assert 0 < prefix < COUNT, f"{sum(hits)} hits"
        late = [result.reason for result in results if isinstance(result, Miss)]
        assert set(late) == {MissReason.DEADLINE}
        assert elapsed_s < 4.0, "the load of 4 s was awaited in spite of its soft deadline of 1 s"

        for buffer, hit in zip(buffers, hits, strict=True):
            if not hit:
                buffer[:] = b"\x55" * len(buffer)
        node.withdraw()
        assert shelf.hits() == list(range(COUNT))
        assert all(buffer == b"\x55" * len(buffer) for buffer, hit in zip(buffers, hits, strict=True) if not hit)


def test_the_estimate_of_a_slow_load_says_so(node: HurtNode) -> None:
    with KVClient.connect(node.start()) as client:
        shelf = Shelf(client, count=COUNT, chunk_bytes=CHUNK_BYTES)
        assert reasons(shelf.put()) == {"Stored"}
        assert shelf.hits() == list(range(COUNT))
        with shelf.store.match(shelf.keys) as match:
            quick_s = match.load_seconds_estimate
        node.order(Order(bytes_per_s=SLOW_BYTES_PER_S))
        for _ in range(6):  # the estimate is a moving average: it has to see enough of the slow drive
            shelf.get(0, 16)
        with shelf.store.match(shelf.keys) as match:
            slow_s = match.load_seconds_estimate
        assert match.chunks == COUNT
        assert slow_s > 4 * quick_s, f"{slow_s} s estimated on the slow drive, {quick_s} s before"
        assert slow_s > 1.0, f"{slow_s} s estimated for a load of 4 s"


def test_a_hard_deadline_holds_on_a_slow_drive(node: HurtNode) -> None:
    with KVClient.connect(node.start()) as client:
        shelf = Shelf(client, count=COUNT, chunk_bytes=CHUNK_BYTES)
        assert reasons(shelf.put(0, 32)) == {"Stored"}
        node.order(Order(bytes_per_s=SLOW_BYTES_PER_S))
        began = time.monotonic()
        assert reasons(shelf.put(32, 64, deadline_s=0.5)) <= {
            "Stored",
            "Refused DEADLINE",
            "Refused OVERLOADED",
            "Refused OUTCOME_UNKNOWN",
        }
        assert reasons(shelf.get(0, 32, deadline_s=0.5)[0]) <= {"Hit", "Miss DEADLINE"}
        assert time.monotonic() - began < 4.0
        node.withdraw()
        assert shelf.hits(0, 32) == list(range(32))
