"""What a read costs the reader while its window is full."""

from __future__ import annotations

import pytest

from kvstore.device.memory import MemoryDevice
from kvstore.engine.engine import DriveEngine, EngineSettings
from kvstore.engine.request import Request
from kvstore.limits import READ_WINDOW_BYTES, MiB
from kvstore.testing.engine_driver import Collector, Driver
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore.types.results import Stored

RECORDS = 20
RECORD_BYTES = 1_000_000
TIMES = 50


def test_headers_that_come_while_the_window_is_full_cost_the_same_each(monkeypatch: pytest.MonkeyPatch) -> None:
    drive = MemoryDevice(size_bytes=64 * MiB)
    settings = EngineSettings(cache_bytes=0, staging_bytes=64 * MiB, segment_bytes=0, queue_depth=32, prefault=False)
    engine = DriveEngine(drive, settings, now_ns=1)
    driver = Driver(engine)
    layout = KVLayout.opaque(chunk_bytes=MiB, chunk_tokens=16)
    ref = driver.namespace(Namespace(tenant="t", model="m", weights="w", layout=layout).manifest())
    keys = [bytes([number]) * 32 for number in range(RECORDS)]
    outcomes = driver.put(ref, [(key, key[:1] * RECORD_BYTES) for key in keys], chain=True)
    assert all(isinstance(one, Stored) for one in outcomes)
    looks = 0
    limit = Request.window_opens_bytes.fget
    assert limit is not None

    def counted(request: Request) -> int:
        nonlocal looks
        looks += 1
        return int(limit(request))

    monkeypatch.setattr(Request, "window_opens_bytes", property(counted))
    sink = Collector(RECORDS * TIMES, hold=True)
    spec = driver.read_spec(ref, keys * TIMES, ranges=[[(0, RECORD_BYTES)]])
    engine.read(spec, sink, now_ns=driver.now_ns)
    driver.run_until(lambda: sink.held_bytes > READ_WINDOW_BYTES // 2)
    for _ in range(50):
        driver.advance(1000)
    assert looks < 10 * RECORDS * TIMES
    sink.let_go()
    driver.run_until(lambda: sink.done)
    assert sink.answers == [key[:1] * RECORD_BYTES for key in keys * TIMES]
