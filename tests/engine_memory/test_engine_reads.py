"""What the assembled engine reads: hits from RAM and drive, joined, shared, verified, within its bounds."""

from __future__ import annotations

import pytest

from kvstore.device.memory import MemoryDevice
from kvstore.engine.engine import DriveEngine, EngineSettings
from kvstore.limits import KiB, MiB
from kvstore.testing.engine_driver import Collector, Driver
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore.types.results import Exists, MissReason, Stored


def manifest(name: str = "m") -> bytes:
    layout = KVLayout.opaque(chunk_bytes=8 * MiB, chunk_tokens=16)
    return Namespace(tenant="t", model=name, weights="w", layout=layout).manifest()


def key(number: int, *, chain: int = 0) -> bytes:
    return number.to_bytes(8, "little") * 2 + chain.to_bytes(16, "little")


def payload(number: int, length: int) -> bytes:
    return (number.to_bytes(8, "little") * (length // 8 + 1))[:length]


def make_driver(
    *, size: int = 64 * MiB, cache: int = 0, staging: int = 32 * MiB, device: MemoryDevice | None = None
) -> Driver:
    device = device or MemoryDevice(size_bytes=size)
    settings = EngineSettings(cache_bytes=cache, staging_bytes=staging, prefault=False)
    return Driver(DriveEngine(device, settings, now_ns=1))


@pytest.mark.parametrize("cache", [0, 8 * MiB])
def test_what_was_put_is_read(cache: int) -> None:
    driver = make_driver(cache=cache)
    ref = driver.namespace(manifest())
    lengths = [0, 1, 4095, 4096, 4097, 60_000, 300_000, 700_001]
    records = [(key(n), payload(n, length)) for n, length in enumerate(lengths)]
    assert all(isinstance(one, Stored) for one in driver.put(ref, records, chain=True))
    assert driver.get(ref, [k for k, _ in records]) == [p for _, p in records]
    assert driver.match(ref, [k for k, _ in records] + [key(99)]).statuses == bytes(8) + bytes([MissReason.ABSENT])
    assert driver.get(ref, [key(99)]) == [MissReason.ABSENT]
    assert [type(one) for one in driver.put(ref, records[:2])] == [Exists, Exists]
