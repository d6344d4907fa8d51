"""An engine on a drive in memory that fails on demand, and records to read from it."""

from __future__ import annotations

from kvstore.device.memory import MemoryDevice
from kvstore.engine.engine import DriveEngine, EngineSettings
from kvstore.engine.location import location_page, location_segment
from kvstore.engine.namespaces import index_key
from kvstore.limits import QUEUE_DEPTH_DEFAULT, MiB
from kvstore.testing.engine_driver import Collector, Driver
from kvstore.testing.faulty_device import FaultyDevice
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore.types.results import MissReason, Stored


def manifest(name: str = "m") -> bytes:
    layout = KVLayout.opaque(chunk_bytes=8 * MiB, chunk_tokens=16)
    return Namespace(tenant="t", model=name, weights="w", layout=layout).manifest()


def key(number: int, *, prefix: int | None = None) -> bytes:
    """A record key; equal `prefix`es make keys that the index cannot tell apart."""
    first = number if prefix is None else prefix
    return first.to_bytes(16, "little") + number.to_bytes(16, "little")


def payload(number: int, length: int) -> bytes:
    return (number.to_bytes(8, "little") * (length // 8 + 1))[:length]


class Lab:
    """An engine on a drive in memory that fails on demand."""

    def __init__(
        self,
        *,
        size: int = 64 * MiB,
        cache: int = 0,
        staging: int = 32 * MiB,
        segment_bytes: int = 0,
        queue_depth: int = QUEUE_DEPTH_DEFAULT,
    ) -> None:
        self.drive = FaultyDevice(MemoryDevice(size_bytes=size))
        self.settings = EngineSettings(
            cache_bytes=cache,
            staging_bytes=staging,
            segment_bytes=segment_bytes,
            queue_depth=queue_depth,
            prefault=False,
        )
        self.engine = DriveEngine(self.drive, self.settings, now_ns=1)
        self.driver = Driver(self.engine)
        self.ref = self.driver.namespace(manifest())

    def put(self, count: int, length: int, *, first: int = 1) -> list[bytes]:
        """Put a chain of records one after the other on the drive; their keys."""
        records = [(key(n), payload(n, length)) for n in range(first, first + count)]
        outcomes = self.driver.put(self.ref, records, chain=True)
        assert all(isinstance(one, Stored) for one in outcomes)
        return [k for k, _ in records]

    def get(self, keys: list[bytes], **changes: object) -> list[bytes | MissReason | None]:
        return self.driver.get(self.ref, keys, **changes)

    def start(self, keys: list[bytes], *, hold: bool = False, **changes: object) -> Collector:
        sink = Collector(len(keys), hold=hold)
        self.engine.read(self.driver.read_spec(self.ref, keys, **changes), sink, now_ns=self.driver.now_ns)
        return sink

    def place(self, k: bytes) -> int:
        """Byte offset of a record on the drive."""
        key16 = index_key(self.ref, k)
        location = self.engine.catalog.index.get(
            int.from_bytes(key16[:8], "little"), int.from_bytes(key16[8:], "little")
        )
        return self.engine.store.table.offset(location_segment(location), location_page(location))

    def check_memory(self) -> None:
        """Everything that is not cached has come back to the arena."""
        self.driver.run_until(lambda: self.engine.idle)
        cached = (self.engine.cache.space(self.ref.salt) or {}).values()
        held = sum(record.piece.length for record in cached if record.piece is not None)
        assert self.engine.cache.arena.used_bytes == held


def numbers(first: int, count: int, length: int) -> list[bytes]:
    return [payload(n, length) for n in range(first, first + count)]
