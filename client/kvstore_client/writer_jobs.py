"""The jobs of a layer-wise writer: open, write, commit and abort, each about the records of one target."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence

from kvstore.cluster.view import TargetId
from kvstore.errors import Unavailable, UnknownNamespace
from kvstore.limits import SLICE_BYTES_MAX, SLICES_PER_FRAME_MAX
from kvstore.types.flow import FlowClass
from kvstore.types.results import ItemStatus, RefusedReason
from kvstore.wire.header import FrameType
from kvstore.wire.messages import ID_BYTES, End, Manifest, Result, WriterAbort, WriterCommit, WriterOpen, WriterOpened
from kvstore.wire.slices import NO_CONTENT_ID, Slice, encode_slices
from kvstore_client.assembly import Piece, WrittenCopy
from kvstore_client.connection import Connection, Steps
from kvstore_client.core import ClientCore
from kvstore_client.incoming import OPEN
from kvstore_client.lookups import left_ns
from kvstore_client.record_facts import ChainFacts, PartFacts
from kvstore_client.rounds import Job

_U32 = struct.Struct("<I")
_GRANTED = int(ItemStatus.GRANTED)
_GONE = int(RefusedReason.DEADLINE)  # what a node says of a writer that is not open


class CopiesJob(Job):
    """A job about the copies of a writer's records on one target.

    Nothing is repeated on another connection once the node heard of it.

    Attributes:
        copies: Those that are open.
    """

    __slots__ = ("copies",)

    def __init__(
        self, *, target: TargetId, flow: FlowClass, deadline_ns: int, copies: list[WrittenCopy] | None = None
    ) -> None:
        super().__init__(target=target, flow=flow, deadline_ns=deadline_ns, retries_max=0)
        self.copies: list[WrittenCopy] = copies or []

    def _fail_forgotten(self, connection: Connection, reason: RefusedReason = RefusedReason.OVERLOADED) -> None:
        """Refuses copies that another worker has granted than the one that would be told of them now: it was started
        again, and writers of its own may have their numbers."""
        assert connection.welcome is not None
        boot_id = connection.welcome.boot_id
        for copy in [one for one in self.copies if one.boot_id != boot_id]:
            copy.finish(int(reason), detail="the node was started again and has forgotten the writer")
            self.copies.remove(copy)


class OpenJob(CopiesJob):
    """WRITER_OPEN; the manifest first when the node asks for it."""

    __slots__ = ("_facts", "_id", "_keys", "_kind", "_manifest", "_namespace", "_ttl_ns")

    def __init__(
        self,
        *,
        target: TargetId,
        flow: FlowClass,
        deadline_ns: int,
        namespace: bytes,
        manifest: Manifest,
        keys: bytes,
        copies: list[WrittenCopy],
        facts: ChainFacts,
        kind: PartFacts,
        ttl_ns: int,
    ) -> None:
        super().__init__(target=target, flow=flow, deadline_ns=deadline_ns, copies=copies)
        self._namespace = namespace
        self._manifest = manifest
        self._keys = keys
        self._facts = facts
        self._kind = kind
        self._ttl_ns = ttl_ns
        self._id = os.urandom(ID_BYTES)  # a try by another way must not find what the first has opened in its way

    def run(self, connection: Connection) -> Steps:
        """Opens all of them at once."""
        try:
            opened = yield from connection.ask(self._request(), WriterOpened)
            known = RefusedReason.UNKNOWN_NAMESPACE not in opened.statuses
        except UnknownNamespace:
            known = False
        if not known:
            yield from connection.ask(self._manifest, End)
            opened = yield from connection.ask(self._request(), WriterOpened)
        count = len(self.copies)
        if len(opened.statuses) != count or len(opened.writer_ids) != 4 * count:
            raise Unavailable(f"node at {connection.address} opened {len(opened.statuses)} of {count} writers")
        details = opened.details.split("\n") if opened.details else []
        for at, copy in enumerate(self.copies):
            (copy.writer_id,) = _U32.unpack_from(opened.writer_ids, 4 * at)
            assert connection.welcome is not None
            copy.boot_id = connection.welcome.boot_id
            if opened.statuses[at] != _GRANTED:
                copy.finish(opened.statuses[at], detail=details[at] if at < len(details) else "")

    def _request(self) -> WriterOpen:
        facts, items = self._facts, [copy.record.item for copy in self.copies]
        return WriterOpen(
            namespace=self._namespace,
            keys=self._keys,
            lengths=_pack([copy.record.length_bytes for copy in self.copies]),
            block_bytes=_pack([self._kind.block_bytes]),
            deadline_ns=left_ns(self),
            ttl_ns=self._ttl_ns,
            run_heads=b"".join([facts.run_head(item) for item in items]),
            parents=b"".join([facts.parent(item) for item in items]),
            positions=b"" if facts.first_position is None else _pack([facts.position(item) for item in items]),
            parts=bytes([self._kind.code]) * len(items) if self._kind.code else b"",
            volatile_ttl_ns=self._kind.volatile_ttl_ns,
            opening_id=self._id,
        )


class WriteJob(CopiesJob):
    """WRITER_WRITE frames of about SLICE_BYTES_MAX, one after the other."""

    __slots__ = ("pieces",)

    def __init__(self, *, target: TargetId, flow: FlowClass, deadline_ns: int) -> None:
        super().__init__(target=target, flow=flow, deadline_ns=deadline_ns)
        self.pieces: list[tuple[WrittenCopy, Piece]] = []

    def run(self, connection: Connection) -> Steps:
        """Sends each frame from the caller's memory and waits until the node has it."""
        self._fail_forgotten(connection)
        pieces = [(copy, piece) for copy, piece in self.pieces if copy.status == OPEN]
        for number, group in enumerate(_frames(pieces)):
            if number:
                self.arm(connection)
            slices = [
                Slice(
                    copy.writer_id,
                    piece.offset,
                    piece.length_bytes,
                    0,
                    False,
                    NO_CONTENT_ID,
                    copy.record.length_bytes,
                    copy.record.block_bytes,
                    piece.crcs,
                )
                for copy, piece in group
            ]
            yield from connection.start_raw(
                FrameType.WRITER_WRITE,
                encode_slices(slices),
                flags=len(slices),
                payload=[view for _, piece in group for view in piece.views],
                payload_bytes=sum(piece.length_bytes for _, piece in group),
            )
            frames = yield from connection.receive()
            connection.decode(End, frames[0])


class CommitJob(CopiesJob):
    """WRITER_COMMIT and its results.

    A connection may break before anything of them has come. Then it is told once more, and what the node has forgotten
    meanwhile may have been committed.
    """

    __slots__ = ("_durability", "_is_told", "_wait")

    def __init__(
        self,
        *,
        target: TargetId,
        flow: FlowClass,
        deadline_ns: int,
        copies: list[WrittenCopy],
        durability: int,
        wait: int,
    ) -> None:
        super().__init__(target=target, flow=flow, deadline_ns=deadline_ns, copies=copies)
        self._durability = durability
        self._wait = wait
        self._is_told = False

    def run(self, connection: Connection) -> Steps:
        """Commits all of them at once."""
        was_told, self._is_told = self._is_told, True
        self._fail_forgotten(connection, RefusedReason.OUTCOME_UNKNOWN if was_told else RefusedReason.OVERLOADED)
        copies = self.copies
        if not copies:
            return
        ids = b"".join([copy.record.content_id() for copy in copies])
        message = WriterCommit(
            writer_ids=_pack([copy.writer_id for copy in copies]),
            crc_tables=b"".join([copy.record.crc_table for copy in copies]),
            deadline_ns=left_ns(self),
            durability=self._durability,
            wait=self._wait,
            content_ids=ids if any(ids) else b"",
        )
        yield from connection.start(message)
        while True:
            for frame in (yield from connection.receive()):
                if frame.type is not FrameType.RESULT:
                    connection.decode(End, frame)
                    return
                result = connection.decode(Result, frame)
                details = result.details.split("\n") if result.details else []
                for index, (at,) in enumerate(_U32.iter_unpack(result.items)):
                    if at >= len(copies):
                        raise Unavailable(f"node at {connection.address} told the outcome of writer {at}")
                    status = result.statuses[index]
                    copies[at].finish(
                        int(RefusedReason.OUTCOME_UNKNOWN) if was_told and status == _GONE else status,
                        content_id=result.content_ids[index * ID_BYTES : (index + 1) * ID_BYTES] or NO_CONTENT_ID,
                        detail=details[index] if index < len(details) else "",
                    )


class AbortJob(CopiesJob):
    """WRITER_ABORT."""

    __slots__ = ()

    def __init__(self, core: ClientCore, target: TargetId, copies: list[WrittenCopy], deadline_ns: int) -> None:
        super().__init__(target=target, flow=core.options.write_flow, deadline_ns=deadline_ns, copies=copies)

    def run(self, connection: Connection) -> Steps:
        """Tells the node to forget them."""
        self._fail_forgotten(connection)
        if not self.copies:
            return
        yield from connection.ask(WriterAbort(writer_ids=_pack([copy.writer_id for copy in self.copies])), End)


def _frames(pieces: Sequence[tuple[WrittenCopy, Piece]]) -> Iterator[list[tuple[WrittenCopy, Piece]]]:
    """Pieces in groups that fit one frame."""
    group: list[tuple[WrittenCopy, Piece]] = []
    total = 0
    for one in pieces:
        if group and (total + one[1].length_bytes > SLICE_BYTES_MAX or len(group) == SLICES_PER_FRAME_MAX):
            yield group
            group, total = [], 0
        group.append(one)
        total += one[1].length_bytes
    if group:
        yield group


def _pack(numbers: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(numbers)}I", *numbers)
