"""The log: the one truth about segments that are not sealed yet, and about what died in those that are.

Two halves take turns. Records are packed into 4 KiB blocks, each written once, in batches: whatever arrives while a
batch is being written forms the next (group commit). When a half is full, the live state is written to the other one
(a checkpoint), synced, and the log goes on there; the half counts from the first block behind its checkpoint.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain

from kvstore.device.base import IoKind, IoOp, UrgentWrite
from kvstore.engine.blocking import pages
from kvstore.engine.format import Superblock
from kvstore.engine.job import IoQueue, Steps, Syncer, io, start
from kvstore.engine.logrecord import BLOCK_HEADER_BYTES, BLOCK_RECORD_BYTES, BlockHeader, encode_block
from kvstore.limits import DEVICE_IO_BYTES_MAX, LOG_BATCH_BYTES_MAX, LOG_SHARE_BATCH, LOG_WRITE_ATTEMPTS_MAX, PAGE_BYTES
from kvstore.telemetry.metrics import EngineMetrics
from kvstore.types.flow import FlowClass

Done = Callable[[OSError | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPlace:
    """Where the log goes on: found by recovery, or the start of a new drive.

    Attributes:
        generation: of the half in use.
        highest_generation: of any block in either half. A checkpoint that a power cut interrupted leaves blocks of a
            generation that must not be used again, or they would be taken for blocks of the next one.
    """

    half: int
    generation: int
    highest_generation: int
    checkpoint_blocks: int
    next_block: int


class Log:
    """Appends records; calls back when they are on the drive, and synced where asked.

    Attributes:
        failed: the error that stopped it, None while it works. A failed log answers every append with that error,
            until `revive`.
    """

    def __init__(
        self,
        queue: IoQueue,
        syncer: Syncer,
        superblock: Superblock,
        place: LogPlace,
        *,
        snapshot: Callable[[], Iterable[bytes]],
        segment_generation: Callable[[], int],
        metrics: EngineMetrics,
    ) -> None:
        """Go on at `place`.

        Args:
            snapshot: the records of the whole live state, for a checkpoint.
            segment_generation: the highest generation given to a segment so far.
        """
        self._queue = queue
        self._syncer = syncer
        self._superblock = superblock
        self._place = place
        self._snapshot = snapshot
        self._segment_generation = segment_generation
        self._metrics = metrics
        self._blocks = superblock.log_half_bytes // PAGE_BYTES
        self._batch_blocks_max = max(1, min(int(self._blocks * LOG_SHARE_BATCH), LOG_BATCH_BYTES_MAX // PAGE_BYTES))
        self._buffer = pages(self._batch_blocks_max * PAGE_BYTES)
        self._pending: deque[tuple[bytes, Done, bool]] = deque()
        self._busy = False
        self._switch_synced = True
        self._checkpoint_wanted = False
        self._switch_syncing = False
        self._unsynced: list[list[bytes]] = []
        self.failed: OSError | None = None
        self.checkpoints = 0

    @property
    def place(self) -> LogPlace:
        """Where the next block goes."""
        return self._place

    @property
    def idle(self) -> bool:
        """Nothing is waiting or being written."""
        return not self._busy and not self._pending

    def append(self, record: bytes, on_done: Done, *, sync: bool = False) -> None:
        """Queue a record; it is written by the next `pump` that finds no batch being written.

        `on_done` gets None when the record survives the end of the process, with `sync` also a power cut; else the
        error that kept it from the drive.
        """
        if self.failed is not None:
            on_done(self.failed)
            return
        self._pending.append((record, on_done, sync))

    def checkpoint(self) -> None:
        """Ask for a checkpoint before the next batch, e.g. to let go of records that no longer matter."""
        self._checkpoint_wanted = True

    def revive(self) -> None:
        """Try again after a failure: the whole live state goes to the other half first."""
        if self.failed is not None and not self._busy:
            self.failed = None
            self._checkpoint_wanted = True

    def pump(self) -> None:
        """Write what has been appended, unless a batch is being written already.

        Once in each turn, when all that has completed is told: what a drive tells together then shares a batch.
        """
        if not self._busy and (self._pending or self._checkpoint_wanted) and self.failed is None:
            self._busy = True
            start(self._write(), self._idle)

    def _idle(self) -> None:
        self._busy = False

    # --- a batch ----------------------------------------------------------------------------------------------------
    def _write(self) -> Steps[None]:
        batch, blocks = self._pack(self._batch_blocks_max)
        error: OSError | None = None
        for _ in range(LOG_WRITE_ATTEMPTS_MAX):
            if self._checkpoint_wanted or self._place.next_block + len(blocks) > self._blocks:
                error = yield from self._switch()
                if error is not None:
                    break
            if self._place.next_block + len(blocks) > self._blocks:
                error = OSError(errno.ENOSPC, "the checkpoint fills the log")
                break
            error = yield from self._put(blocks)
            if error is None:
                break
        if error is not None:
            self._fail(error, batch)
            return
        self._metrics.log_bytes += len(blocks) * PAGE_BYTES
        self._answer(batch)

    def _pack(self, blocks_max: int) -> tuple[list[tuple[bytes, Done, bool]], list[int]]:
        """Move pending records into the buffer; answers them and the used bytes of each block."""
        batch: list[tuple[bytes, Done, bool]] = []
        used: list[int] = [0]
        pending, buffer = self._pending, self._buffer
        at = BLOCK_HEADER_BYTES
        while pending:
            record = pending[0][0]
            if used[-1] + len(record) > BLOCK_RECORD_BYTES:
                if len(used) == blocks_max:
                    break
                used.append(0)
                at = (len(used) - 1) * PAGE_BYTES + BLOCK_HEADER_BYTES
            buffer[at : at + len(record)] = record
            at += len(record)
            used[-1] += len(record)
            batch.append(pending.popleft())
        return batch, used

    def _put(self, used: list[int]) -> Steps[OSError | None]:
        """Write the packed blocks at the log's place. Advances the place even on an error: the next try goes behind."""
        place = self._place
        generation = self._segment_generation()
        for at, used_bytes in enumerate(used):
            header = BlockHeader(
                generation=place.generation,
                number=place.next_block + at,
                checkpoint_blocks=place.checkpoint_blocks,
                used_bytes=used_bytes,
                segment_generation=generation,
            )
            page = self._buffer[at * PAGE_BYTES : (at + 1) * PAGE_BYTES]
            encode_block(header, self._superblock.disk_id, page)
        op = UrgentWrite(
            self._superblock.half_offset(place.half) + place.next_block * PAGE_BYTES,
            [self._buffer[: len(used) * PAGE_BYTES]],
            flow=FlowClass.WRITEBACK,
        )
        self._place = LogPlace(
            half=place.half,
            generation=place.generation,
            highest_generation=place.highest_generation,
            checkpoint_blocks=place.checkpoint_blocks,
            next_block=place.next_block + len(used),
        )
        error: OSError | None = yield io(self._queue, [op])
        return error

    def _answer(self, batch: list[tuple[bytes, Done, bool]]) -> None:
        if not self._switch_synced and not self._switch_syncing:
            self._sync_switch()
        synced = [on_done for _, on_done, sync in batch if sync]
        if synced:
            # Its owner learns of these later than of the block, so a checkpoint in between must carry them along.
            records = [record for record, _, sync in batch if sync]
            self._unsynced.append(records)

            def done(error: OSError | None) -> None:
                self._unsynced = [others for others in self._unsynced if others is not records]
                for on_done in synced:
                    on_done(error)

            self._syncer.sync(done)
        for _, on_done, sync in batch:
            if not sync:
                on_done(None)

    def _fail(self, error: OSError, batch: list[tuple[bytes, Done, bool]]) -> None:
        self.failed = error
        waiting = list(self._pending)
        self._pending.clear()
        for _, on_done, _ in [*batch, *waiting]:
            on_done(error)

    # --- checkpoint ---------------------------------------------------------------------------------------------------
    def _switch(self) -> Steps[OSError | None]:
        """Write the live state to the other half and go on there. Answers an error or None."""
        self._checkpoint_wanted = False
        if not self._switch_synced:
            # The half to be overwritten is the fallback until the present one is known to be on stable storage.
            error: OSError | None = yield self._syncer.sync
            if error is not None:
                return error
            self._switch_synced = True
        half, generation = 1 - self._place.half, self._place.highest_generation + 1
        image, count = self._image(generation)
        if count >= self._blocks:
            return OSError(errno.ENOSPC, f"live state takes {count} log blocks, a half has {self._blocks}")
        offset = self._superblock.half_offset(half)
        ops = [
            IoOp(IoKind.WRITE, offset + at, [image[at : at + DEVICE_IO_BYTES_MAX]], flow=FlowClass.WRITEBACK)
            for at in range(0, count * PAGE_BYTES, DEVICE_IO_BYTES_MAX)
        ]
        error = yield io(self._queue, ops)
        if error is None:
            error = yield self._syncer.sync
        if error is not None:
            return error
        self._metrics.log_bytes += count * PAGE_BYTES
        self.checkpoints += 1
        self._switch_synced = False
        self._place = LogPlace(
            half=half,
            generation=generation,
            highest_generation=generation,
            checkpoint_blocks=count,
            next_block=count,
        )
        return None

    def _image(self, generation: int) -> tuple[memoryview, int]:
        """The live state as blocks of the next half, and how many."""
        groups: list[list[bytes]] = [[]]
        used = 0
        for record in chain(self._snapshot(), chain.from_iterable(self._unsynced)):
            if used + len(record) > BLOCK_RECORD_BYTES:
                groups.append([])
                used = 0
            groups[-1].append(record)
            used += len(record)
        image = pages(len(groups) * PAGE_BYTES)
        highest = self._segment_generation()
        for number, group in enumerate(groups):
            page = image[number * PAGE_BYTES : (number + 1) * PAGE_BYTES]
            body = b"".join(group)
            page[BLOCK_HEADER_BYTES : BLOCK_HEADER_BYTES + len(body)] = body
            header = BlockHeader(
                generation=generation,
                number=number,
                checkpoint_blocks=len(groups),
                used_bytes=len(body),
                segment_generation=highest,
            )
            encode_block(header, self._superblock.disk_id, page)
        return image, len(groups)

    def _sync_switch(self) -> None:
        """Off the path of latency: make the new half stable, so that the next checkpoint need not wait for it."""
        generation = self._place.generation
        self._switch_syncing = True

        def done(error: OSError | None) -> None:
            self._switch_syncing = False
            if error is None and self._place.generation == generation:
                self._switch_synced = True

        self._syncer.sync(done)
