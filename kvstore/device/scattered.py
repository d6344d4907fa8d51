"""Several reads, scattered over the drive, as one operation: one object and one completion for all of them.

A small record costs more in Python than on the drive, and what it costs is objects and calls for each operation. So
reads that are wanted together go through the dispatch queue and the device as one, which counts there as what it is:
`extent_count` operations of the drive. Each extent has a result of its own.
"""

from __future__ import annotations

from typing import Any, Final

from kvstore.device.base import IoKind, IoOp
from kvstore.types.flow import FlowClass

# Bound once: reading a member of an enum costs as much as ten other attribute reads, and each operation needs it.
_READ: Final = IoKind.READ


class ScatteredRead(IoOp):
    """A READ of several extents into one stretch of memory, which they fill one behind the other.

    Attributes:
        offsets, lengths: in bytes, of each extent; multiples of `Device.alignment_bytes`, no length 0. `offset` is the
            first one's. Neither list may be changed before the completion.
        buffers: the one stretch, as long as all extents together.
        done_bytes: of all extents, after completion.
        error: always None.
        faults: (bytes that came, error or None) by number of each extent that did not come whole, after completion;
            None without any.
        whole: what this is a part of, see `cut`; `first` is the number of its first extent there.
        begun, begun_bytes: extents that were cut off so far, and their bytes.
    """

    __slots__ = ("_parts", "begun", "begun_bytes", "extent_count", "faults", "first", "lengths", "offsets", "whole")

    def __init__(
        self,
        offsets: list[int],
        lengths: list[int],
        memory: memoryview,
        *,
        flow: FlowClass = FlowClass.BACKGROUND,
        owner: Any = None,
    ) -> None:
        # what IoOp's constructor does, in line: one is made for a few records only
        self.kind = _READ
        self.offset = offsets[0]
        self.buffers = [memory]
        self.length_bytes = len(memory)
        self.flow = flow
        self.owner = owner
        self.error = None
        self.done_bytes = self.submitted_ns = 0
        self.offsets = offsets
        self.lengths = lengths
        self.extent_count = len(offsets)
        self.faults = None
        self.whole: ScatteredRead | None = None
        self.first = self.begun = self.begun_bytes = self._parts = 0

    def fitting(self, count_max: int, bytes_room: int) -> int:
        """How many of the extents that were not cut off fit: all but the last of them end below `bytes_room`."""
        lengths = self.lengths
        if not self.begun and self.extent_count <= count_max and self.length_bytes - lengths[-1] < bytes_room:
            return self.extent_count
        count = 0
        for length in lengths[self.begun : self.begun + count_max]:
            if bytes_room <= 0:
                break
            bytes_room -= length
            count += 1
        return count

    def cut(self, count: int) -> ScatteredRead:
        """The next `count` extents as an operation of their own, for what has no room for all of them.

        From the first cut on the whole is only what its parts are joined to: it goes to no drive itself.
        """
        at, start = self.begun, self.begun_bytes
        if not at:
            self.done_bytes = 0
            self.faults = None
        lengths = self.lengths[at : at + count]
        end = start + sum(lengths)
        part = ScatteredRead(
            self.offsets[at : at + count], lengths, self.buffers[0][start:end], flow=self.flow, owner=self.owner
        )
        part.whole = self
        part.first = at
        self.begun = at + count
        self.begun_bytes = end
        self._parts += 1
        return part

    def join(self, part: ScatteredRead) -> bool:
        """A part has completed; True when the whole has with it, and may be submitted again."""
        self.done_bytes += part.done_bytes
        for extent, (came_bytes, error) in (part.faults or {}).items():
            self._note(part.first + extent, came_bytes, error)
        self._parts -= 1
        if self._parts or self.begun < self.extent_count:
            return False
        self.submitted_ns = part.submitted_ns
        self.begun = self.begun_bytes = 0
        return True

    def extent(self, number: int) -> IoOp:
        """One extent as a plain read, which whoever carries it out reports with `settled`."""
        start = sum(self.lengths[:number])
        memory = self.buffers[0][start : start + self.lengths[number]]
        return IoOp(_READ, self.offsets[number], (memory,), flow=self.flow)

    def extents(self) -> list[IoOp]:
        """All of them; the results of an earlier use are gone then."""
        self.done_bytes = 0
        self.faults = None
        memory = self.buffers[0]
        ops: list[IoOp] = []
        at = 0
        for offset, length in zip(self.offsets, self.lengths, strict=True):
            ops.append(IoOp(_READ, offset, (memory[at : at + length],), flow=self.flow))
            at += length
        return ops

    def settled(self, number: int, op: IoOp) -> None:
        """What came of one extent."""
        self.done_bytes += op.done_bytes
        if op.error is not None or op.done_bytes < op.length_bytes:
            self._note(number, op.done_bytes, op.error)

    def _note(self, number: int, came_bytes: int, error: OSError | None) -> None:
        if self.faults is None:
            self.faults = {}
        self.faults[number] = came_bytes, error
