"""A read that outlives its pin while the drive is overwritten many times: the right bytes, however it was asked for."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import fields

import pytest

from kvstore.device.base import IoKind, IoOp
from kvstore.device.memory import MemoryDevice
from kvstore.engine.api import ReadSpec
from kvstore.engine.engine import DriveEngine, EngineSettings
from kvstore.engine.location import location_segment
from kvstore.engine.namespaces import index_key
from kvstore.limits import SECOND_NS, KiB, MiB
from kvstore.testing.engine_driver import Collector, Driver
from kvstore.testing.faulty_device import FaultyDevice
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore.types.results import Stored

LENGTH = 300 * KiB
COUNT = 4
WINDOW = [(5_000, 10_000), (200_000, 4_096)]

# What a read may be asked with, and which fields of ReadSpec that tries.
WAYS: dict[str, dict[str, object]] = {
    "whole": {},
    "ranges": {"ranges": [WINDOW]},
    "one copy": {"content_ids": bytes(16 * COUNT)},
    "pending too": {"accept_pending": True},
    "verified": {"verify": True},
    "checked by the reader": {"reader_checks": True},
    "into shared memory": {"places": COUNT},
    "a share of a batch": {"items": list(range(COUNT))},
}
SAME_IN_ALL = {"namespace", "keys", "flow", "deadline_ns"}


class SlowReads(FaultyDevice):
    """Begins no read from `stop` to `take`: what a reader asked for, and nothing that eviction reads later."""

    stopped: list[IoOp] | None = None

    def submit(self, ops: Sequence[IoOp]) -> None:
        if self.stopped is not None:
            self.stopped += [op for op in ops if op.kind is IoKind.READ]
            ops = [op for op in ops if op.kind is not IoKind.READ]
        super().submit(ops)

    def stop(self) -> None:
        self.stopped = []

    def take(self) -> list[IoOp]:
        """What was held so far; later reads pass."""
        held, self.stopped = self.stopped or [], None
        return held


def test_every_way_of_reading_is_tried() -> None:
    tried = {name for way in WAYS.values() for name in way}
    assert tried | SAME_IN_ALL == {one.name for one in fields(ReadSpec)}


def key(number: int) -> bytes:
    return number.to_bytes(16, "little") + number.to_bytes(16, "little")


def payload(number: int) -> bytes:
    return (number.to_bytes(8, "little") * (LENGTH // 8 + 1))[:LENGTH]


@pytest.mark.parametrize("length_of_cache", [0, MiB], ids=["no cache", "small cache"])
@pytest.mark.parametrize("way", WAYS)
def test_a_slow_read_outlives_its_pin_and_eviction(way: str, length_of_cache: int) -> None:
    drive = SlowReads(MemoryDevice(size_bytes=24 * MiB))
    settings = EngineSettings(cache_bytes=length_of_cache, staging_bytes=16 * MiB, segment_bytes=MiB, prefault=False)
    engine = DriveEngine(drive, settings, now_ns=1)
    driver = Driver(engine)
    layout = KVLayout.opaque(chunk_bytes=MiB, chunk_tokens=16)
    ref = driver.namespace(Namespace(tenant="t", model="m", weights="w", layout=layout).manifest())
    keys = [key(number) for number in range(1, COUNT + 1)]
    assert all(isinstance(one, Stored) for one in driver.put(ref, [(k, payload(n)) for n, k in enumerate(keys, 1)]))
    engine.cache.clear()
    assert driver.match(ref, keys, pin_ns=SECOND_NS // 2).pinned
    table = engine.store.table

    def use_of(k: bytes) -> tuple[int, int]:
        key16 = index_key(ref, k)
        index = engine.catalog.index
        location = index.get(int.from_bytes(key16[:8], "little"), int.from_bytes(key16[8:], "little"))
        return location_segment(location), int(table.generation[location_segment(location)])

    uses = {use_of(k) for k in keys}
    changes = dict(WAYS[way])
    if "places" in changes:
        changes["places"] = [memoryview(mmap.mmap(-1, LENGTH + -LENGTH % mmap.PAGESIZE))[:LENGTH] for _ in keys]
    drive.stop()
    sink = Collector(COUNT)
    engine.read(driver.read_spec(ref, keys, **changes), sink, now_ns=driver.now_ns)
    for _ in range(20):
        driver.advance(1000)
    held = drive.take()
    assert held
    assert sink.answers == [None] * COUNT

    driver.advance(2 * SECOND_NS)  # the pin is over, nobody has asked for these keys since
    assert engine.catalog.pinned_bytes == 0
    outcomes = [driver.start_put(driver.spec(ref, key(n), payload(n)), payload(n)) for n in range(1000, 1300)]
    for _ in range(20_000):
        driver.advance(1000)
        if all(outcomes):
            break
    assert engine.metrics.evicted_segments > 20, "the drive was not overwritten: nothing was proved"
    assert all(int(table.generation[segment]) == generation for segment, generation in uses)

    FaultyDevice.submit(drive, held)
    driver.run_until(lambda: sink.done and all(outcomes))
    for number, answer in enumerate(sink.answers, 1):
        wanted = payload(number)
        if way == "ranges":
            for begin, piece in sink.pieces[number - 1]:
                assert wanted[begin : begin + len(piece)] == piece
            assert sum(len(piece) for _, piece in sink.pieces[number - 1]) >= sum(size for _, size in WINDOW)
        else:
            assert answer == wanted
    engine.close()
