"""Segments: the state of each, how much of it is alive, and the open one that records are appended to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from kvstore.engine.format import ENTRY_BYTES, ENTRY_DTYPE, Entries, Superblock, index_block_count
from kvstore.engine.usage import TenantUse
from kvstore.limits import PAGE_BYTES


class SegmentState(IntEnum):
    """Life of a segment: UNALLOCATED -> FREE -> OPEN -> CLOSING -> SEALED -> EVICTING -> FREE."""

    UNALLOCATED = 0
    """No space on the drive yet, or given back."""
    FREE = 1
    """Has space, holds nothing valid."""
    OPEN = 2
    """Records are appended to it. At most one is."""
    CLOSING = 3
    """Takes no more records; waits for those in progress, then its index is written."""
    SEALED = 4
    """Its index is on the drive."""
    EVICTING = 5
    """Its records are being moved or forgotten."""
    BAD = 6
    """Its records are gone, and the drive would not erase it: not used until that has been done, or the next start."""


class OpenSegment:
    """A segment that is being filled, or is closing.

    Attributes:
        segment, generation: which.
        next_page: where the next record goes; room is handed out in ascending order and never taken back, so
            (generation, page) orders records by the time they got their room.
        outstanding: records that have room here but are neither complete nor given up.
        entry_count: complete records.
        unlisted: records whose commit is, or may be, in the log and that are none of those: its outcome was not known,
            or the index was full. After a restart they count, so the segment's own index must have room for them.
        ready: the header page is on the drive; commits are logged only from then on.
        failed: the drive failed here; nothing more is placed.
    """

    __slots__ = (
        "_entries",
        "_parked",
        "entry_count",
        "failed",
        "generation",
        "next_page",
        "outstanding",
        "ready",
        "segment",
        "unlisted",
    )

    def __init__(self, segment: int, generation: int, *, next_page: int = 1) -> None:
        self.segment = segment
        self.generation = generation
        self.next_page = next_page
        self.outstanding = 0
        self.entry_count = 0
        self.unlisted = 0
        self.ready = False
        self.failed = False
        self._entries = bytearray()
        self._parked: list[Callable[[], None]] = []

    @property
    def untouched(self) -> bool:
        """No record has room here yet."""
        return self.next_page == 1

    def room_pages(self, segment_pages: int, count: int = 1) -> int:
        """Pages that so many more records may have: what is left beside the index and footer that sealing writes."""
        index = index_block_count(self.entry_count + self.unlisted + self.outstanding + count)
        return segment_pages - 1 - index - self.next_page

    def add(self, entries: bytes) -> None:
        """Records are complete, ENTRY_BYTES for each."""
        self._entries += entries
        self.entry_count += len(entries) // ENTRY_BYTES

    def entries(self) -> Entries:
        """All complete records, in the order of completion. A copy."""
        return np.frombuffer(bytes(self._entries), dtype=ENTRY_DTYPE)

    def entry_bytes(self) -> list[bytes]:
        """The same as one `bytes` each, for the log."""
        data = bytes(self._entries)
        return [data[at : at + ENTRY_BYTES] for at in range(0, len(data), ENTRY_BYTES)]

    def when_ready(self, action: Callable[[], None]) -> None:
        """Do something once the header page is on the drive; at once if it is."""
        if self.ready:
            action()
        else:
            self._parked.append(action)

    def header_written(self) -> None:
        """The header page is on the drive, or failed to get there (`failed` is set before)."""
        self.ready = True
        parked, self._parked = self._parked, []
        for action in parked:
            action()


class SegmentTable:
    """All segments of a drive.

    Attributes:
        count: segments within the capacity.
        segment_bytes, segment_pages: size of each.
        state, generation: per segment; SegmentState values (written by `set_state` only), and the generation of its
            present use (0: none).
        in_state_count: how many segments are in each state.
    """

    def __init__(self, superblock: Superblock) -> None:
        self.count = superblock.segment_count
        self.segment_bytes = superblock.segment_bytes
        self.segment_pages = superblock.segment_bytes // PAGE_BYTES
        self.first_byte = superblock.segments_offset
        self.state: npt.NDArray[np.uint8] = np.zeros(self.count, dtype=np.uint8)
        self.generation: npt.NDArray[np.uint64] = np.zeros(self.count, dtype=np.uint64)
        self._generations = self.generation.data  # scalar access through it costs a third of numpy's
        self.in_state_count = [0] * len(SegmentState)
        self.in_state_count[SegmentState.UNALLOCATED] = self.count
        self._holds = [0] * self.count
        self._groups: list[Sequence[int]] = []  # held all at once, by `hold_all`
        self._when_unheld: dict[int, list[Callable[[], None]]] = {}
        self.live: list[dict[int, LiveCount]] = [{} for _ in range(self.count)]

    def offset(self, segment: int, page: int = 0) -> int:
        """Byte offset of a page of a segment on the drive."""
        return self.first_byte + segment * self.segment_bytes + page * PAGE_BYTES

    def generations_of(self, segments: Sequence[int]) -> dict[int, int]:
        """By number, the generation of each; one may stand there several times."""
        return dict(zip(segments, map(self._generations.__getitem__, segments), strict=True))

    def set_state(self, segment: int, state: SegmentState) -> None:
        """A segment enters another state."""
        self.in_state_count[self.state[segment]] -= 1
        self.in_state_count[state] += 1
        self.state[segment] = state

    def in_state(self, *states: SegmentState) -> npt.NDArray[np.int64]:
        """Numbers of the segments in any of these states, in order of generation: the oldest use first."""
        # numpy's isin takes 20 us even for a few segments, and this is asked in every turn
        wanted = self.state == states[0]
        for state in states[1:]:
            wanted |= self.state == state
        found = np.flatnonzero(wanted)
        return found[np.argsort(self.generation[found], kind="stable")]

    def hold(self, segment: int) -> None:
        """Keep the bytes of a segment in place, for a read in flight."""
        self._holds[segment] += 1

    def is_held(self, segment: int) -> bool:
        """Whether a read is in flight in the segment."""
        return self._holds[segment] > 0 or any(segment in group for group in self._groups)

    def held(self) -> npt.NDArray[np.bool_]:
        """`is_held` of all segments."""
        held: npt.NDArray[np.bool_] = np.array(self._holds) > 0
        for group in self._groups:
            held[group] = True
        return held

    def release(self, segment: int) -> None:
        """Ends one `hold`."""
        holds = self._holds[segment] = self._holds[segment] - 1
        assert holds >= 0, "a segment was released more often than it was held"
        if holds == 0 and self._when_unheld:
            self._tell_unheld(segment)

    def hold_all(self, segments: Sequence[int]) -> None:
        """`hold` of each, as a group that is released at once; one may stand there several times.

        The group is only noted: reads begin and end by the thousand, and who asks for holds is an eviction. The
        sequence may not be changed before it is released.
        """
        self._groups.append(segments)

    def release_all(self, segments: Sequence[int]) -> None:
        """Ends a `hold_all` of these."""
        self._groups.remove(segments)
        if self._when_unheld:
            for segment in dict.fromkeys(segments):
                self._tell_unheld(segment)

    def hold_apart(self, segments: Sequence[int]) -> None:
        """What `hold_all` holds is released one by one from here on."""
        self._groups.remove(segments)
        for segment in segments:
            self._holds[segment] += 1

    def _tell_unheld(self, segment: int) -> None:
        if segment in self._when_unheld and not self.is_held(segment):
            for action in self._when_unheld.pop(segment):
                action()

    def when_unheld(self, segment: int, action: Callable[[], None]) -> None:
        """Do something once no read holds the segment; now if none does. New holds must not come any more."""
        if not self.is_held(segment):
            action()
        else:
            self._when_unheld.setdefault(segment, []).append(action)


class LiveCount:
    """Live pages and records of one namespace generation in one segment, of which `use` counts all segments."""

    __slots__ = ("pages", "records", "use")

    def __init__(self, use: TenantUse) -> None:
        self.use = use
        self.pages = 0
        self.records = 0

    def leave(self) -> None:
        """What was counted here is gone."""
        self.use.pages -= self.pages
        self.use.records -= self.records


def namespace_key(namespace: int, generation: int) -> int:
    """Key of `SegmentTable.live`: a namespace in one of its generations."""
    return namespace << 32 | generation
