"""A store in a dict behind the engine's contract, for tests of what stands above it.

It keeps nothing over a restart and has no drive; but it calls back late as the real one does, and a test can hold back
grants, reads and commits, or make them fail, at will. `held_bytes` shows what was handed out and not given back.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.engine.api import (
    Durability,
    MatchOutcome,
    NamespaceRef,
    PutColumns,
    PutParcel,
    PutSpec,
    PutTicket,
    ReadHandle,
    ReadSink,
    ReadSpec,
)
from kvstore.errors import ChecksumMismatch, InvalidRequest
from kvstore.limits import DIGEST_BYTES
from kvstore.types.checksum import crc_table
from kvstore.types.digest import digest
from kvstore.types.results import Exists, MissReason, Refused, RefusedReason, Stored
from kvstore.wire.messages import ID_BYTES

_HIT = 0
_ANY = bytes(ID_BYTES)


@dataclass(slots=True)
class Record:
    """One stored record; `durable` turns True when its commit is on the drive that is not there."""

    data: memoryview
    crcs: bytes
    block_bytes: int
    content_id: bytes
    durable: bool = False


@dataclass(slots=True)
class Piece:
    """A `ReadyItem`."""

    index: int
    record_bytes: int
    block_bytes: int
    offset: int
    data: memoryview
    crcs: bytes
    content_id: bytes
    last: bool
    on_release: Callable[[int], None]
    is_released: bool = False

    def release(self) -> None:
        """Gives the memory back; a second time is a defect of the caller."""
        assert not self.is_released, "released twice"
        self.is_released = True
        self.on_release(len(self.data))


@dataclass(slots=True)
class Read:
    """A `ReadHandle`."""

    sink: ReadSink
    pieces: deque[Piece] = field(default_factory=deque)
    cancelled: bool = False
    ended: bool = False
    staged_bytes: int = 0

    def cancel(self) -> None:
        """No more calls of the sink."""
        self.cancelled = True


class DictEngine:
    """Implements `kvstore.engine.api.Engine`.

    Attributes:
        hold_reads, hold_grants, hold_commits: while True, nothing of the kind moves on; `poll` moves it afterwards.
        read_window_bytes: how much is handed out at most and not released.
        refuse: when set, every put is refused so.
        gone: ids of clients that were reported gone.
        aborted: how many tickets were aborted.
    """

    def __init__(self, *, read_window_bytes: int = 1 << 40) -> None:
        self.read_window_bytes = read_window_bytes
        self.hold_reads = self.hold_grants = self.hold_commits = False
        self.refuse: Refused | None = None
        self.gone: list[bytes] = []
        self.aborted = 0
        self.held_bytes = 0
        self.unpinned: list[int] = []
        self.records: dict[tuple[int, int, bytes], Record] = {}
        self.pending: dict[tuple[int, int, bytes], list[Callable[[], None]]] = {}
        self._namespaces: dict[bytes, NamespaceRef] = {}
        self._generations: dict[bytes, int] = {}
        self._reads: list[Read] = []
        self._grants: deque[tuple[int, Callable[[], None], Callable[[], None]]] = deque()
        self._commits: deque[Callable[[], None]] = deque()
        self._waits: list[tuple[int, Callable[[], bool]]] = []
        self._later: deque[Callable[[], None]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._pins = 0
        self._ids = 0

    # --- namespaces -------------------------------------------------------------------------------------------------
    def namespace(self, digest: bytes) -> NamespaceRef | None:
        """See `Engine.namespace`."""
        return self._namespaces.get(digest)

    def add_namespace(self, manifest: bytes, *, copies: int = 0) -> NamespaceRef:
        """The digest is BLAKE3 of the manifest, as for real ones; any non-empty manifest will do."""
        if not manifest:
            raise InvalidRequest("manifest is empty")
        name = digest(manifest)
        known = self._namespaces.get(name)
        if known is None:
            generation = self._generations.setdefault(name, 0)
            known = NamespaceRef(
                id=len(self._namespaces), digest=name, generation=generation, salt=bytes(16), tenant="default"
            )
            self._namespaces[name] = known
        return known

    def drop_namespace(self, ref: NamespaceRef, on_done: Callable[[], None], *, generation: int = 0) -> None:
        """See `Engine.drop_namespace`."""
        if not 0 < generation <= ref.generation:
            fresh = max(ref.generation + 1, generation)
            self._generations[ref.digest] = fresh
            self._namespaces[ref.digest] = NamespaceRef(
                id=ref.id, digest=ref.digest, generation=fresh, salt=bytes(16), tenant=ref.tenant
            )
        self._soon(on_done)

    # --- lookups ----------------------------------------------------------------------------------------------------
    def match(
        self,
        ref: NamespaceRef,
        keys: bytes | memoryview,
        *,
        now_ns: int,
        touch: bool,
        pin_ttl_ns: int = 0,
        client_id: bytes = b"",
    ) -> MatchOutcome:
        """See `Engine.match`."""
        statuses = bytes(self._status(ref, key) for key in _split(keys))
        hits = [self._find(ref, key) for key in _split(keys)]
        self._pins += bool(pin_ttl_ns)
        return MatchOutcome(
            statuses=statuses,
            pin_id=self._pins if pin_ttl_ns else 0,
            pinned=bool(pin_ttl_ns),
            hit_bytes=sum(len(record.data) for record in hits if record is not None and record.durable),
            load_ns=1000,
        )

    def unpin(self, pin_id: int, *, client_id: bytes) -> None:
        """See `Engine.unpin`."""
        self.unpinned.append(pin_id)

    def wait(
        self, ref: NamespaceRef, keys: bytes, deadline_ns: int, on_done: Callable[[bytes], None]
    ) -> Callable[[], None]:
        """See `Engine.wait`."""
        ended: list[bool] = []

        def is_over() -> bool:
            statuses = bytes(self._status(ref, key) for key in _split(keys))
            if not ended and MissReason.PENDING in statuses and time.monotonic_ns() < deadline_ns:
                return False
            on_done(statuses)
            return True

        if not is_over():
            self._waits.append((deadline_ns, is_over))
        return lambda: ended.append(True)

    def delete(self, ref: NamespaceRef, keys: bytes, on_done: Callable[[bytes], None]) -> None:
        """See `Engine.delete`."""
        found = [self.records.pop((ref.id, ref.generation, key), None) for key in _split(keys)]
        statuses = bytes(MissReason.ABSENT if record is None else _HIT for record in found)
        self._soon(lambda: on_done(statuses))

    def prefetch(self, ref: NamespaceRef, keys: bytes, *, now_ns: int) -> int:
        """See `Engine.prefetch`."""
        return sum(self._find(ref, key) is not None for key in _split(keys))

    # --- reads ------------------------------------------------------------------------------------------------------
    def take_cached(self, ref: NamespaceRef, keys: bytes, *, now_ns: int, bytes_max: int) -> None:
        """See `Engine.take_cached`: nothing is given this way."""

    def look_cached(self, digest: bytes, key: bytes, *, now_ns: int) -> None:
        """See `Engine.look_cached`: nothing is given this way."""

    def read(self, spec: ReadSpec, sink: ReadSink, *, now_ns: int) -> ReadHandle:
        """See `Engine.read`."""
        read = Read(sink)
        for index, key in enumerate(_split(spec.keys)):
            record = self._find(spec.namespace, key)
            wanted = spec.content_ids[index * ID_BYTES : (index + 1) * ID_BYTES] if spec.content_ids else _ANY
            if record is None or (wanted not in (_ANY, record.content_id)):
                sink.missed(index, MissReason.ABSENT)
            elif not record.durable and not spec.accept_pending:
                sink.missed(index, MissReason.PENDING)
            else:
                ranges = None
                if spec.ranges is not None:
                    ranges = spec.ranges[index if len(spec.ranges) > 1 else 0]
                if any(offset + length > len(record.data) for offset, length in ranges or ()):
                    sink.missed(index, MissReason.LAYOUT)
                    continue
                read.pieces.extend(self._pieces(index, record, ranges))
        self._reads.append(read)
        self._move_reads()
        return read

    def _pieces(self, index: int, record: Record, ranges: Sequence[tuple[int, int]] | None) -> list[Piece]:
        block = record.block_bytes
        total = len(record.data)
        spans = []
        for offset, length in ranges or [(0, total)]:
            start = min(offset, total) // block * block
            spans.append((start, min(total, -(-(offset + length) // block) * block)))
        return [
            Piece(
                index=index,
                record_bytes=total,
                block_bytes=block,
                offset=start,
                data=record.data[start:stop],
                crcs=record.crcs[start // block * 4 : -(-stop // block) * 4],
                content_id=record.content_id,
                last=number == len(spans) - 1,
                on_release=self._released,
            )
            for number, (start, stop) in enumerate(spans)
        ]

    def _move_reads(self) -> None:
        if self.hold_reads:
            return
        for read in self._reads:
            while read.pieces and not read.cancelled and self.held_bytes < self.read_window_bytes:
                piece = read.pieces.popleft()
                self.held_bytes += len(piece.data)
                read.sink.ready(piece)
            if not read.pieces and not read.cancelled:
                read.ended = True
                read.sink.finished()
        self._reads = [read for read in self._reads if not read.cancelled and not read.ended]

    def _released(self, length_bytes: int) -> None:
        self.held_bytes -= length_bytes
        if self._reads:
            self._notify()

    # --- writes -----------------------------------------------------------------------------------------------------
    def open_put(
        self,
        spec: PutSpec,
        on_grant: Callable[[PutTicket | Exists | Refused], None],
        *,
        streaming: bool = False,
    ) -> None:
        """See `Engine.open_put`."""
        place = (spec.namespace.id, spec.namespace.generation, spec.key)
        if self.refuse is not None:
            on_grant(self.refuse)
        elif place in self.records:
            on_grant(Exists())
        elif place in self.pending:
            self.pending[place].append(lambda: self.open_put(spec, on_grant, streaming=streaming))
        elif self.hold_grants:
            refuse = Refused(RefusedReason.DEADLINE, "no memory before the deadline")
            again = lambda: self.open_put(spec, on_grant, streaming=streaming)  # noqa: E731
            self._grants.append((spec.deadline_ns, again, lambda: on_grant(refuse)))
        else:
            self.pending[place] = []
            on_grant(DictTicket(self, spec, place, streaming=streaming))

    def open_parcels(self, columns: PutColumns, first: int, stop: int) -> Sequence[PutParcel]:
        """See `Engine.open_parcels`: none."""
        return ()

    def client_gone(self, client_id: bytes) -> None:
        """See `Engine.client_gone`."""
        self.gone.append(client_id)

    # --- the loop ---------------------------------------------------------------------------------------------------
    def poll(self, now_ns: int) -> None:
        """See `Engine.poll`."""
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            pass
        self._move_reads()
        for _ in range(len(self._grants)):
            deadline_ns, again, refuse = self._grants.popleft()
            if deadline_ns <= now_ns:
                refuse()
            elif self.hold_grants:
                self._grants.append((deadline_ns, again, refuse))
            else:
                again()
        if not self.hold_commits:
            commits, self._commits = self._commits, deque()
            for commit in commits:
                commit()
        later, self._later = self._later, deque()
        for call in later:
            call()
        self._waits = [(deadline_ns, is_over) for deadline_ns, is_over in self._waits if not is_over()]

    def filenos(self) -> Sequence[int]:
        """See `Engine.filenos`."""
        return [self._wake]

    def next_timer_ns(self) -> int | None:
        """See `Engine.next_timer_ns`."""
        due = [deadline_ns for deadline_ns, _ in self._waits] + [deadline_ns for deadline_ns, *_ in self._grants]
        return min(due, default=None)

    def close(self) -> None:
        """Closes the event descriptor."""
        os.close(self._wake)

    # --- for tests --------------------------------------------------------------------------------------------------
    def put_now(self, ref: NamespaceRef, key: bytes, data: bytes | bytearray, block_bytes: int = 65536) -> None:
        """Stores a record at once."""
        view = memoryview(data)
        self.records[(ref.id, ref.generation, key)] = Record(
            view, crc_table(view, block_bytes), block_bytes, self.next_content_id(), durable=True
        )

    def let_go(self) -> None:
        """Ends every hold."""
        self.hold_reads = self.hold_grants = self.hold_commits = False
        self._notify()

    def next_content_id(self) -> bytes:
        """Another one each time."""
        self._ids += 1
        return self._ids.to_bytes(ID_BYTES, "little")

    # --- inside -----------------------------------------------------------------------------------------------------
    def commit_later(self, commit: Callable[[], None]) -> None:
        """Runs `commit` from a later `poll`, as a drive would."""
        self._commits.append(commit)
        self._notify()

    def end_pending(self, place: tuple[int, int, bytes]) -> None:
        """A put of a key is over: the puts that waited for it go on."""
        for go_on in self.pending.pop(place, []):
            go_on()

    def _soon(self, call: Callable[[], None]) -> None:
        self._later.append(call)
        self._notify()

    def _notify(self) -> None:
        os.eventfd_write(self._wake, 1)

    def _find(self, ref: NamespaceRef, key: bytes) -> Record | None:
        return self.records.get((ref.id, ref.generation, key))

    def _status(self, ref: NamespaceRef, key: bytes) -> int:
        record = self._find(ref, key)
        if record is not None and record.durable:
            return _HIT
        return MissReason.PENDING if record is not None or self._is_pending(ref, key) else MissReason.ABSENT

    def _is_pending(self, ref: NamespaceRef, key: bytes) -> bool:
        return (ref.id, ref.generation, key) in self.pending


class DictTicket:
    """Implements `kvstore.engine.api.PutTicket`."""

    def __init__(self, engine: DictEngine, spec: PutSpec, place: tuple[int, int, bytes], *, streaming: bool) -> None:
        self._engine = engine
        self._spec = spec
        self._place = place
        self._data = memoryview(bytearray(spec.payload_bytes))
        self._crcs = spec.crc_table or b""
        self._arrived_crcs: dict[int, bytes] = {}
        self._written = 0
        self._is_over = False
        self.buffer: memoryview | None = None if streaming else self._data

    def arrived(self, offset: int, length_bytes: int, crcs: bytes) -> None:
        """See `PutTicket.arrived`."""
        assert offset + length_bytes <= len(self._data)
        self._arrived_crcs[offset] = crcs

    def filled(self) -> None:
        """See `PutTicket.filled`."""
        if self._spec.crc_table is None:
            self._crcs = b"".join(crcs for _, crcs in sorted(self._arrived_crcs.items()))
        if crc_table(self._data, self._spec.block_bytes) != self._crcs:
            self.abort()
            raise ChecksumMismatch(f"payload of key {self._spec.key.hex()[:16]} does not match its checksums")

    def slice_buffer(self, length_bytes: int, on_memory: Callable[[memoryview | None], None]) -> None:
        """See `PutTicket.slice_buffer`."""
        if self._engine.hold_grants:
            give: Any = lambda: on_memory(memoryview(bytearray(length_bytes)))  # noqa: E731
            self._engine._grants.append((self._spec.deadline_ns, give, lambda: on_memory(None)))
        else:
            on_memory(memoryview(bytearray(length_bytes)))

    def slice_filled(self, offset: int, data: memoryview, crcs: bytes) -> None:
        """See `PutTicket.slice_filled`."""
        if crc_table(data, self._spec.block_bytes) != crcs:
            raise ChecksumMismatch(f"slice at {offset} does not match its checksums")
        self._data[offset : offset + len(data)] = data
        self._written += len(data)

    def commit(
        self,
        *,
        crc_table: bytes | None = None,
        content_id: bytes | None = None,
        durability: Durability | None = None,
        on_received: Callable[[], None] | None = None,
        on_done: Callable[[Stored | Exists | Refused], None],
    ) -> None:
        """See `PutTicket.commit`."""
        if self._is_over:
            on_done(Refused(RefusedReason.DEADLINE, "the ticket was aborted"))
            return
        self._is_over = True
        if crc_table is not None:
            self._crcs = crc_table
            if self._written != len(self._data):
                self._engine.end_pending(self._place)
                on_done(Refused(RefusedReason.INVALID, f"{self._written} of {len(self._data)} bytes were written"))
                return
        named = content_id or self._spec.content_id
        chosen = named if any(named) else self._engine.next_content_id()
        record = Record(self._data, self._crcs, self._spec.block_bytes, chosen)
        self._engine.records[self._place] = record
        if on_received is not None:
            on_received()

        def durable() -> None:
            record.durable = True
            self._engine.end_pending(self._place)
            on_done(Stored(durable=True, content_id=chosen))

        self._engine.commit_later(durable)

    def abort(self, *, orphaned: bool = False) -> None:
        """See `PutTicket.abort`."""
        if not self._is_over:
            self._is_over = True
            self._engine.aborted += 1
            self._engine.end_pending(self._place)


def _split(keys: bytes | memoryview) -> list[bytes]:
    raw = bytes(keys)
    return [raw[at : at + DIGEST_BYTES] for at in range(0, len(raw), DIGEST_BYTES)]
