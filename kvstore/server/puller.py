"""Records fetched from another worker: a batch at a time, into memory of the engine, checked, stored with their ids.

The bytes come as to any client: HEADS say what the records are, then GET brings them, in class background. Nothing of
what a source says is believed: a record is stored when every block matches its checksum and all checksums the content
id, so that a copy is what its first writer wrote, or is not there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from kvstore.cluster.view import Target
from kvstore.engine.api import Engine, NamespaceRef, PutSpec, PutTicket
from kvstore.engine.format import content_id
from kvstore.errors import ChecksumMismatch, InvalidRequest, KVStoreError, Unavailable
from kvstore.limits import (
    CHECKSUM_BYTES_MAX,
    CHECKSUM_BYTES_MIN,
    DIGEST_BYTES,
    PARTS_MAX,
    PAYLOAD_BYTES_MAX,
    PULL_GET_NS,
    PULL_WINDOW_BYTES,
)
from kvstore.server.batch import unpack_u32
from kvstore.server.peer import PeerCall
from kvstore.server.repair import Batch
from kvstore.telemetry.metrics import PullEnd
from kvstore.types.checksum import block_count
from kvstore.types.digest import digest
from kvstore.types.flow import FlowClass
from kvstore.types.results import Exists, MissReason, Refused, RefusedReason, Stored
from kvstore.wire.frames import Frame
from kvstore.wire.header import FrameType
from kvstore.wire.messages import ID_BYTES, End, Get
from kvstore.wire.replicas import Heads, HeadsReply
from kvstore.wire.schema import Message

log = logging.getLogger(__name__)

_GONE: Final = frozenset({MissReason.ABSENT, MissReason.EVICTED})
_PREFIX: Final = 8
"""Of a content id: what follows from the payload (FORMAT.md, section 4)."""


class Home(Protocol):
    """What a fetch needs of the worker that it fetches for."""

    @property
    def engine(self) -> Engine: ...

    @property
    def now_ns(self) -> int:
        """The time of this turn."""

    def wake(self) -> None:
        """The engine has work."""

    def ask(self, target: Target, call: PeerCall) -> None:
        """Carry out a call at another worker."""

    def namespace_of(self, reply: HeadsReply, namespace: bytes, then: Callable[[NamespaceRef | None], None]) -> None:
        """The namespace here, in the generation that the source has; None where that is older than ours."""

    def was_deleted(self, namespace: NamespaceRef, key: bytes) -> bool:
        """Whether the record was deleted here not long ago."""

    def moved(self, length_bytes: int) -> None:
        """So much payload has come."""

    def ended(self, how: PullEnd, count: int = 1) -> None:
        """Records have ended."""


@dataclass(slots=True)
class _Item:
    """One record on its way.

    Attributes:
        ticket: None before and after its put.
        placed_bytes: of its slices that have come or are coming.
        landed_bytes: of those that are there.
    """

    key: bytes
    payload_bytes: int
    block_bytes: int
    position: int
    part: int
    run_head: bytes
    parent: bytes
    content_id: bytes
    ticket: PutTicket | None = None
    placed_bytes: int = 0
    landed_bytes: int = 0
    crcs: list[bytes] = field(default_factory=list)

    def spec(self, namespace: NamespaceRef, *, deadline_ns: int, client_id: bytes) -> PutSpec:
        """The put that stores it as it was."""
        return PutSpec(
            namespace=namespace,
            key=self.key,
            payload_bytes=self.payload_bytes,
            block_bytes=self.block_bytes,
            crc_table=None,
            flow=FlowClass.BACKGROUND,
            deadline_ns=deadline_ns,
            client_id=client_id,
            position=self.position,
            run_head=self.run_head,
            parent=self.parent,
            part=self.part,
            content_id=self.content_id,
        )


class Fetch:
    """One batch from one source. Ends once, by `on_end(again, error)`: what may be tried again, or why it failed.

    Attributes:
        source: whom it asks.
        waits: it has come to a point where the byte budget is to be asked before `go_on`.
        progress_ns: when something happened last.
    """

    def __init__(
        self,
        home: Home,
        source: Target,
        batch: Batch,
        *,
        client_id: bytes,
        on_end: Callable[[Fetch, Sequence[bytes], KVStoreError | None], None],
    ) -> None:
        self.batch = batch
        self.waits = False
        self.progress_ns = home.now_ns
        self._home = home
        self.source = source
        self._client_id = client_id
        self._on_end = on_end
        self._namespace: NamespaceRef | None = None
        self._left: list[_Item] = []
        self._window: list[_Item] = []
        self._open = 0  # puts of the window that have no ticket or no outcome yet
        self._again: list[bytes] = []
        self._is_over = False

    def start(self) -> None:
        """Ask the source what the records are."""
        keys = self._lacking(self.batch.keys)
        if not keys:
            self._end(None)
            return
        heads = Heads(namespace=self.batch.namespace, keys=b"".join(keys))
        self._home.ask(self.source, _HeadsCall(heads, self._headed, self._failed))

    def _lacking(self, keys: Sequence[bytes]) -> list[bytes]:
        """Those that are not here: some may have come since they were named."""
        engine = self._home.engine
        ref = engine.namespace(self.batch.namespace)
        if ref is None:
            return list(keys)
        statuses = engine.match(ref, b"".join(keys), now_ns=self._home.now_ns, touch=False).statuses
        gone = [self._home.was_deleted(ref, key) for key in keys]
        self._home.ended(PullEnd.DELETED, sum(gone))
        self._home.ended(PullEnd.HELD, sum(not status for status in statuses))
        return [key for key, status, is_gone in zip(keys, statuses, gone, strict=True) if status and not is_gone]

    def _headed(self, asked: Heads, reply: HeadsReply) -> None:
        keys = [asked.keys[at : at + DIGEST_BYTES] for at in range(0, len(asked.keys), DIGEST_BYTES)]
        if len(reply.statuses) != len(keys):
            raise InvalidRequest(f"HEADS_REPLY has {len(reply.statuses)} entries for {len(keys)} keys")
        if not reply.manifest:
            self._home.ended(PullEnd.ABSENT, len(keys))
            self._end(None)
            return
        if digest(reply.manifest) != self.batch.namespace:
            raise InvalidRequest("HEADS_REPLY names another namespace than was asked for")
        self._left = self._items_of(keys, reply)
        self._home.namespace_of(reply, self.batch.namespace, self._named)

    def _named(self, namespace: NamespaceRef | None) -> None:
        if self._is_over:
            return
        self._namespace = namespace
        if namespace is None:
            self._home.ended(PullEnd.DELETED, len(self._left))
            self._left = []
        self._next_window()

    def _items_of(self, keys: Sequence[bytes], reply: HeadsReply) -> list[_Item]:
        lengths, blocks, positions = map(unpack_u32, (reply.lengths, reply.block_bytes, reply.positions))
        items = []
        for at, key in enumerate(keys):
            status = reply.statuses[at]
            if status:
                self._missed(key, status)
                continue
            wide = slice(at * DIGEST_BYTES, (at + 1) * DIGEST_BYTES)
            one = _Item(
                key=key,
                payload_bytes=lengths[at],
                block_bytes=blocks[at],
                position=positions[at],
                part=reply.parts[at],
                run_head=reply.run_heads[wide],
                parent=reply.parents[wide],
                content_id=reply.content_ids[at * ID_BYTES : (at + 1) * ID_BYTES],
            )
            if _is_possible(one):
                items.append(one)
            else:
                self._home.ended(PullEnd.FAILED)
        return items

    def _missed(self, key: bytes, status: int) -> None:
        """The source has not got it, or not now."""
        if status in _GONE:
            self._home.ended(PullEnd.ABSENT)
        else:
            self._again.append(key)

    # --- a window -----------------------------------------------------------------------------------------------------
    def _next_window(self) -> None:
        if not self._left:
            self._end(None)
        else:
            self.waits = True
            self._home.wake()

    def go_on(self) -> None:
        """The budget allows another window."""
        self.waits = False
        self.progress_ns = self._home.now_ns
        namespace = self._namespace
        assert namespace is not None, "a window has records, and they a namespace"
        total = 0
        while self._left and (not total or total + self._left[0].payload_bytes <= PULL_WINDOW_BYTES):
            total += self._left[0].payload_bytes
            self._window.append(self._left.pop(0))
        deadline_ns = self._home.now_ns + PULL_GET_NS
        self._open = len(self._window)
        for item in list(self._window):
            spec = item.spec(namespace, deadline_ns=deadline_ns, client_id=self._client_id)
            self._home.engine.open_put(spec, lambda answer, item=item: self._granted(item, answer))  # type: ignore[misc]
        self._home.wake()

    def _granted(self, item: _Item, answer: PutTicket | Exists | Refused) -> None:
        self._open -= 1
        if self._is_over:
            if not isinstance(answer, Exists | Refused):
                answer.abort()
            return
        if isinstance(answer, Exists):
            self._home.ended(PullEnd.HELD)
            self._window.remove(item)
        elif isinstance(answer, Refused):
            self._home.ended(PullEnd.REFUSED)
            self._window.remove(item)
            if answer.reason is RefusedReason.OVERLOADED:
                self._again.append(item.key)
        else:
            item.ticket = answer
        if not self._open:
            self._get()

    def _get(self) -> None:
        if not self._window:
            self._next_window()
            return
        get = Get(
            namespace=self.batch.namespace,
            keys=b"".join([item.key for item in self._window]),
            deadline_ns=PULL_GET_NS,
            content_ids=b"".join([item.content_id for item in self._window]),
        )
        self._open = len(self._window)
        self._home.ask(self.source, _GetCall(get, self))

    def place(self, frame: Frame) -> list[memoryview]:
        """Where the payload of a DATA frame belongs. Raises InvalidRequest for what was not asked for."""
        views = []
        for one in frame.slices:
            if one.status:
                continue  # END says it too
            item = self._window[one.item] if one.item < len(self._window) else None
            if (
                item is None
                or item.ticket is None
                or one.offset != item.placed_bytes
                or one.length_bytes > item.payload_bytes - item.placed_bytes
                or (one.record_bytes, one.block_bytes) != (item.payload_bytes, item.block_bytes)
                or one.content_id != item.content_id
                or len(one.crcs) != 4 * block_count(one.length_bytes, item.block_bytes)
            ):
                raise InvalidRequest(f"slice {one.item} at {one.offset} is not of a record that HEADS told of")
            if one.length_bytes:
                assert item.ticket.buffer is not None, "not a streaming put"
                views.append(item.ticket.buffer[one.offset : one.offset + one.length_bytes])
            item.placed_bytes += one.length_bytes
        return views

    def landed(self, frame: Frame) -> None:
        """The payload of a DATA frame is there."""
        if not frame.payload_bytes:
            self.place(frame)  # nobody has asked where it belongs
        self._home.moved(frame.payload_bytes)
        self.progress_ns = self._home.now_ns
        for one in frame.slices:
            if one.status:
                continue
            item = self._window[one.item]
            ticket = item.ticket
            if ticket is None:
                raise InvalidRequest(f"slice {one.item} at {one.offset} is of a record that had come whole before it")
            ticket.arrived(one.offset, one.length_bytes, one.crcs)
            item.landed_bytes += one.length_bytes
            item.crcs.append(one.crcs)
            if item.landed_bytes == item.payload_bytes:
                self._complete(item, ticket)
        self._home.wake()

    def _complete(self, item: _Item, ticket: PutTicket) -> None:
        """All bytes of a record are there: store it if they are what they should be."""
        item.ticket = None
        table = b"".join(item.crcs)
        namespace = self._namespace
        assert namespace is not None
        if self._home.was_deleted(namespace, item.key):
            ticket.abort()
            self._home.ended(PullEnd.DELETED)
            self._put_ended()
            return
        try:
            if content_id(item.payload_bytes, table, b"")[:_PREFIX] != item.content_id[:_PREFIX]:
                raise ChecksumMismatch(f"record {item.key.hex()}: its checksums are not those of its content id")
            ticket.filled()
        except ChecksumMismatch as error:
            ticket.abort()
            log.warning("a copy from target %s is not stored: %s", self.source.id, error)
            self._home.ended(PullEnd.FAILED)
            self._again.append(item.key)
            self._put_ended()
            return
        ticket.commit(on_done=self._stored)

    def _stored(self, outcome: Stored | Exists | Refused) -> None:
        how = {Stored: PullEnd.PULLED, Exists: PullEnd.HELD}.get(type(outcome), PullEnd.REFUSED)
        self._home.ended(how)
        self._put_ended()

    def _put_ended(self) -> None:
        self._open -= 1
        self._window_ended()

    def got(self, statuses: bytes) -> None:
        """The source has sent what it had."""
        if len(statuses) != len(self._window):
            raise InvalidRequest(f"END has {len(statuses)} statuses for {len(self._window)} keys")
        for item, status in zip(self._window, statuses, strict=True):
            ticket, item.ticket = item.ticket, None
            if ticket is not None:
                ticket.abort()
                self._open -= 1
                self._missed(item.key, status or MissReason.IO)
        self._home.wake()
        self._window_ended(is_answered=True)

    def _window_ended(self, *, is_answered: bool = False) -> None:
        """The window is over when the source has answered and each of its puts has its outcome."""
        if is_answered:
            self._window = []
        if not self._window and not self._open and not self._is_over:
            self._next_window()

    # --- the end ------------------------------------------------------------------------------------------------------
    def _failed(self, error: KVStoreError) -> None:
        self.abandon()
        self._end(error)

    def failed(self, error: KVStoreError) -> None:
        """The source has not answered, or not as it should."""
        self._failed(error)

    def abandon(self) -> None:
        """Give back what is held of the engine."""
        for item in self._window:
            ticket, item.ticket = item.ticket, None
            if ticket is not None:
                ticket.abort()
        self._window = []
        self._home.wake()

    def _end(self, error: KVStoreError | None) -> None:
        if not self._is_over:
            self._is_over = True
            self._on_end(self, self._again, error)


def _is_possible(one: _Item) -> bool:
    """Whether a record can be as its source says."""
    return (
        one.payload_bytes <= PAYLOAD_BYTES_MAX
        and CHECKSUM_BYTES_MIN <= one.block_bytes <= CHECKSUM_BYTES_MAX
        and one.part <= PARTS_MAX
        and one.content_id != bytes(ID_BYTES)
    )


class _HeadsCall:
    """HEADS of a fetch: a `PeerCall`."""

    def __init__(
        self,
        message: Heads,
        on_reply: Callable[[Heads, HeadsReply], None],
        on_failed: Callable[[KVStoreError], None],
    ) -> None:
        self.message: Heads = message
        self._on_reply = on_reply
        self.failed = on_failed

    def place(self, frame: Frame) -> Sequence[memoryview]:
        """Raises InvalidRequest: there is no payload in the answer."""
        raise InvalidRequest(f"{frame.type.name} in the answer to HEADS")

    def arrived(self, frame: Frame) -> bool:
        """See `PeerCall.arrived`."""
        if frame.type is not FrameType.HEADS_REPLY:
            raise Unavailable(f"HEADS was answered with {frame.type.name}")
        self._on_reply(self.message, HeadsReply.decode(frame.body))
        return True


class _GetCall:
    """GET of a fetch: a `PeerCall`."""

    def __init__(self, message: Get, fetch: Fetch) -> None:
        self.message: Message = message
        self._fetch = fetch
        self.place = fetch.place
        self.failed = fetch.failed

    def arrived(self, frame: Frame) -> bool:
        """See `PeerCall.arrived`."""
        if frame.type is FrameType.END:
            self._fetch.got(End.decode(frame.body).statuses)
            return True
        self._fetch.landed(frame)
        return False
