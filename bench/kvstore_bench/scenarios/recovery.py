"""Start of a full drive: how long until every chunk is known again, and what the index costs in RAM.

The engine runs in this process on a real file; chunks are of zero bytes, so that a million fit 4 GiB: what is read at
start, the segments' indexes, is the same for chunks of any size.
"""

from __future__ import annotations

import random
import select
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from kvstore.engine.api import PutSpec, PutTicket
from kvstore.engine.engine import DriveEngine, EngineSettings
from kvstore.limits import SECOND_NS, KiB, MiB
from kvstore.server.private_folder import private_folder
from kvstore.types.flow import FlowClass
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore.types.results import Exists, Refused, Stored
from kvstore_bench.measure import Row

_IN_FLIGHT = 2_048
_STARTS = 5


class _Filler:
    """Puts zero-length chunks until `count` are durable."""

    def __init__(self, engine: DriveEngine, count: int) -> None:
        manifest = Namespace(
            tenant="bench", model="recovery", weights="sha256:none", layout=KVLayout.opaque(chunk_bytes=4 * KiB)
        ).manifest()
        self._engine = engine
        self._ref = engine.add_namespace(manifest)
        self._left = count
        self._open = 0
        self._rng = random.Random(23)
        self.refused: Refused | None = None

    def run(self) -> None:
        """Raises RuntimeError when a put is refused."""
        while (self._left or self._open) and self.refused is None:
            while self._left and self._open < _IN_FLIGHT:
                self._put()
            select.select(self._engine.filenos(), [], [], 0.01)
            self._engine.poll(time.monotonic_ns())
        if self.refused is not None:
            raise RuntimeError(f"filling for recovery was refused: {self.refused}")

    def _put(self) -> None:
        self._left -= 1
        self._open += 1
        spec = PutSpec(
            namespace=self._ref,
            key=self._rng.randbytes(32),
            payload_bytes=0,
            block_bytes=64 * KiB,
            crc_table=b"",
            flow=FlowClass.WRITEBACK,
            deadline_ns=time.monotonic_ns() + 60 * SECOND_NS,
            client_id=bytes(16),
        )
        self._engine.open_put(spec, self._granted)

    def _granted(self, grant: PutTicket | Exists | Refused) -> None:
        if isinstance(grant, (Exists, Refused)):
            self._done(grant)
            return
        grant.filled()
        grant.commit(on_done=self._done)

    def _done(self, outcome: Stored | Exists | Refused) -> None:
        self._open -= 1
        if isinstance(outcome, Refused):
            self.refused = outcome


def _opened(data_dir: Path, settings: EngineSettings) -> tuple[DriveEngine, float]:
    """The engine, and the seconds until it was ready: the median of several starts."""
    took: list[float] = []
    while True:
        start = time.perf_counter()
        engine = DriveEngine.open(data_dir, settings, now_ns=time.monotonic_ns())
        took.append(time.perf_counter() - start)
        if len(took) == _STARTS:
            return engine, statistics.median(took)
        engine.close()


def run(*, chunks: int, folder: Path) -> Iterator[Row]:
    """Fill, close, open again. Raises RuntimeError when a put is refused or chunks are missing afterwards."""
    # with fewer chunks smaller segments: the share of the open one, which is read from the log, stays what it is
    segment_bytes = max(MiB, chunks * 64 * MiB // 1_000_000 // MiB * MiB)
    settings = EngineSettings(
        capacity_bytes=max(64 * MiB, chunks * 4608),
        segment_bytes=segment_bytes,
        cache_bytes=0,
        staging_bytes=64 * MiB,
    )
    with private_folder(folder, purpose="recovery") as data_dir:
        engine = DriveEngine.open(data_dir, settings, now_ns=time.monotonic_ns())
        _Filler(engine, chunks).run()
        per_chunk = engine.catalog.index.memory_bytes / chunks
        engine.close()
        engine, took_s = _opened(data_dir, settings)
        found = engine.recovered.records
        peak = engine.catalog.index.memory_bytes / chunks
        engine.close()
    if found != chunks:
        raise RuntimeError(f"recovery found {found} of {chunks} chunks")
    scale = 1_000_000 / chunks
    yield Row(
        name="recovery of 1 million chunks",
        unit="s",
        value=took_s * scale,
        must=5,
        aim=2,
        higher_is_better=False,
        details={"chunks": chunks, "took_s": took_s},
        note="" if scale == 1 else "  (scaled up from fewer chunks, constant costs included)",
    )
    yield Row(
        name="index per chunk",
        unit="bytes",
        value=max(per_chunk, peak),
        must=75,
        aim=64,
        higher_is_better=False,
        details={"chunks": chunks},
    )
