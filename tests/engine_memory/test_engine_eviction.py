"""Eviction as its users see it: who goes first, what stays, what a start finds, and what it costs."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.device.memory import MemoryDevice
from kvstore.engine.engine import DriveEngine, EngineSettings
from kvstore.limits import ACCESS_TICK_NS, PAGE_BYTES, SECOND_NS, KiB, MiB
from kvstore.testing.engine_driver import Driver
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore.types.results import MissReason, Stored

FRONT = 640 * KiB  # superblocks and log of a small drive
CHUNK = 900 * KiB  # one record fills one segment of 1 MiB


def manifest() -> bytes:
    layout = KVLayout.opaque(chunk_bytes=MiB, chunk_tokens=16)
    return Namespace(tenant="t", model="m", weights="w", layout=layout).manifest()


def key(chain: str, position: int) -> bytes:
    return (chain.encode() + position.to_bytes(4, "big")).ljust(32, b"\1")


def payload(chain: str, position: int, length: int) -> bytes:
    seed = f"{chain}{position}/".encode()
    return (seed * (length // len(seed) + 1))[:length]


class Lab:
    """A drive of so many segments of 1 MiB."""

    def __init__(self, segments: int, *, cache: int = 0, amplification_max: float = 1.3) -> None:
        self.device = MemoryDevice(size_bytes=FRONT + segments * MiB)
        self.settings = EngineSettings(
            cache_bytes=cache,
            staging_bytes=16 * MiB,
            segment_bytes=MiB,
            amplification_max=amplification_max,
            prefault=False,
        )
        self.engine = DriveEngine(self.device, self.settings, now_ns=1)
        assert self.engine.store.table.count == segments
        self.driver = Driver(self.engine)
        self.ref = self.driver.namespace(manifest())

    def put(self, chain: str, positions: range, *, length: int = CHUNK, apart_ns: int = 0) -> None:
        """Put chunks one after the other, each behind its parent."""
        for position in positions:
            parent = key(chain, position - 1) if position > 1 else bytes(32)
            record = (key(chain, position), payload(chain, position, length))
            outcome = self.driver.put(self.ref, [record], chain=True, first_position=position, parent=parent)[0]
            assert isinstance(outcome, Stored)
            self.driver.run_until(lambda: self.engine.idle)
            self.driver.advance(apart_ns)

    def keys(self, chain: str, positions: range) -> list[bytes]:
        return [key(chain, position) for position in positions]

    def there(self, chain: str, positions: range) -> list[int]:
        """Which chunks are there; looking does not touch them."""
        statuses = self.driver.match(self.ref, self.keys(chain, positions), touch=False).statuses
        return [position for position, status in zip(positions, statuses, strict=True) if status == 0]


@pytest.mark.parametrize("apart_ns", [0, 3 * ACCESS_TICK_NS], ids=["one tick", "ticks apart"])
@pytest.mark.parametrize("batches", [[range(1, 9)], [range(1, 3), range(3, 5), range(5, 9)]], ids=["whole", "chunked"])
def test_victims_are_the_tail_of_the_coldest_chain(batches: list[range], apart_ns: int) -> None:
    lab = Lab(9)
    for batch in batches:
        lab.put("k", batch, apart_ns=apart_ns)
    assert lab.there("k", range(1, 9)) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert lab.driver.get(lab.ref, lab.keys("k", range(1, 3))) == [payload("k", n, CHUNK) for n in (1, 2)]
    gone: list[int] = []
    for position in range(1, 5):
        lab.put("j", range(position, position + 1), apart_ns=apart_ns)
        left = lab.there("k", range(1, 9))
        gone += [n for n in range(8, 0, -1) if n not in left and n not in gone]
    assert gone == [8, 7, 6, 5]
    assert lab.driver.prefix(lab.ref, lab.keys("k", range(1, 9))) == 4
    assert lab.driver.prefix(lab.ref, lab.keys("j", range(1, 5))) == 4
    statuses = lab.driver.match(lab.ref, lab.keys("k", range(5, 9))).statuses
    assert statuses == bytes([MissReason.EVICTED]) * 4
    assert "evicted about" in lab.engine.explain(lab.ref, key("k", 8))[0].text


def test_what_is_asked_for_outlives_what_is_not() -> None:
    lab = Lab(24)
    for position in range(1, 33):
        lab.put("hot", range(position, position + 1), length=20 * KiB)
        lab.put(f"cold{position}-", range(1, 3), length=50 * KiB)
    hot = lab.keys("hot", range(1, 33))
    for round_number in range(60):
        lab.put(f"later{round_number}-", range(1, 13), length=50 * KiB)
        lab.driver.advance(SECOND_NS)
        assert lab.driver.prefix(lab.ref, hot) == 32
    metrics = lab.engine.metrics
    lab.engine.update_gauges(lab.driver.now_ns)
    assert metrics.evicted_records > 100
    assert metrics.reinserted_records > 0
    assert metrics.write_amplification <= 1.3
    assert lab.driver.get(lab.ref, hot) == [payload("hot", n, 20 * KiB) for n in range(1, 33)]


def test_pinned_records_stay_until_their_pin_ends() -> None:
    lab = Lab(24)
    for position in range(1, 17):
        lab.put("k", range(position, position + 1), length=48 * KiB)
        lab.put(f"first{position}-", range(1, 2), length=48 * KiB)
    outcome = lab.driver.match(lab.ref, lab.keys("k", range(1, 17)), touch=False, pin_ns=500 * SECOND_NS)
    assert outcome.pinned
    for round_number in range(40):
        lab.put(f"cold{round_number}-", range(1, 21), length=48 * KiB)
        lab.driver.advance(SECOND_NS)
    assert lab.there("k", range(1, 17)) == list(range(1, 17))
    assert lab.engine.catalog.pinned_bytes == 16 * (48 * KiB + PAGE_BYTES)
    lab.engine.unpin(outcome.pin_id, client_id=b"another")
    assert lab.engine.catalog.pinned_bytes
    for _ in range(2):
        lab.engine.unpin(outcome.pin_id, client_id=lab.driver.client_id)
    for round_number in range(40, 80):
        lab.put(f"cold{round_number}-", range(1, 21), length=48 * KiB)
        lab.driver.advance(SECOND_NS)
    assert lab.there("k", range(1, 17)) == []


def test_a_match_over_the_bound_of_pins_is_answered_without_one() -> None:
    lab = Lab(20)
    lab.put("k", range(1, 13))
    assert lab.driver.match(lab.ref, lab.keys("k", range(1, 5)), pin_ns=SECOND_NS).pinned
    outcome = lab.driver.match(lab.ref, lab.keys("k", range(5, 11)), pin_ns=SECOND_NS)
    assert (outcome.pinned, outcome.pin_id) == (False, 0)
    assert outcome.statuses == bytes(6)
    assert lab.engine.metrics.pins_refused == 1
    lab.driver.advance(2 * SECOND_NS)
    assert lab.engine.catalog.pinned_bytes == 0
    lab.engine.match(
        lab.ref,
        b"".join(lab.keys("k", range(1, 5))),
        now_ns=lab.driver.now_ns,
        touch=True,
        pin_ttl_ns=SECOND_NS,
        client_id=b"gone",
    )
    lab.engine.client_gone(b"gone")
    assert lab.engine.catalog.pinned_bytes == 0


def test_orphans_are_gone_after_one_turnover_even_if_their_chain_is_asked_for() -> None:
    lab = Lab(16)
    lab.put("k", range(1, 13), length=20 * KiB)
    lab.driver.delete(lab.ref, [key("k", 3)])
    for round_number in range(40):
        lab.put(f"cold{round_number}-", range(1, 17), length=50 * KiB)
        lab.driver.advance(SECOND_NS)
        assert lab.driver.prefix(lab.ref, lab.keys("k", range(1, 13))) == 2
    assert lab.there("k", range(1, 13)) == [1, 2]


def test_ticks_go_on_after_a_restart() -> None:
    lab = Lab(24)
    lab.put("a", range(1, 9), length=200 * KiB, apart_ns=ACCESS_TICK_NS)
    ticks = lab.engine.catalog.index.access[lab.engine.catalog.index.taken_slots()]
    lab.engine.drain()
    lab.driver.run_until(lambda: lab.engine.idle)
    again = DriveEngine(lab.device, lab.settings, now_ns=5)
    assert again.recovered.records == 8
    found = again.catalog.index.access[again.catalog.index.taken_slots()]
    assert found.min() > 1
    assert found.max() <= ticks.max()
    driver = Driver(again)
    ref = again.namespace(lab.ref.digest)
    assert ref is not None
    driver.put(ref, [(key("c", 1), payload("c", 1, 5000))])
    newest = int(again.catalog.index.access[again.catalog.index.taken_slots()].max())
    assert newest > int(np.max(ticks)), "whatever the clock of the new process says"


def test_gauges_add_up() -> None:
    lab = Lab(12, cache=4 * MiB)
    for round_number in range(6):
        lab.put(f"x{round_number}-", range(1, 7), length=400 * KiB, apart_ns=ACCESS_TICK_NS)
    lab.driver.match(lab.ref, lab.keys("x5-", range(1, 3)), pin_ns=SECOND_NS)
    lab.engine.update_gauges(lab.driver.now_ns)
    metrics = lab.engine.metrics
    index = lab.engine.catalog.index
    assert metrics.records == len(index.taken_slots())
    assert 0 < metrics.live_bytes <= metrics.allocated_bytes <= metrics.capacity_bytes
    assert metrics.allocated_bytes == lab.device.allocated_bytes()
    assert metrics.eviction_age_ns > 0
    assert metrics.pins == [1, 0, 0, 0]
    assert metrics.pinned_bytes == 2 * (400 * KiB + PAGE_BYTES)
    assert 0 < metrics.cache_bytes <= metrics.cache_capacity_bytes == 4 * MiB
    assert metrics.index_bytes > 0
    assert metrics.write_amplification >= 1
    assert metrics.written_bytes_day > 0
    lab.engine.close()
    lab.engine.close()
