"""Reading records from one target: requests of at most the node's batch size, slices into the caller's memory."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from kvstore.cluster.view import TargetId
from kvstore.errors import DeadlineExceeded, Overloaded, Unavailable
from kvstore.limits import DIGEST_BYTES, FRAME_BODY_BYTES_MAX, READ_RETRIES_MAX
from kvstore.types.flow import FlowClass
from kvstore.wire.frames import Frame
from kvstore.wire.header import FrameType
from kvstore.wire.messages import ID_BYTES, RANGE_BYTES, End, Get
from kvstore.wire.ranges import encode_ranges
from kvstore.wire.shared import GetInto, get_into
from kvstore.wire.slices import NO_CONTENT_ID, Slice
from kvstore_client.connection import READ, WRITE, Connection, Steps
from kvstore_client.incoming import HIT, OPEN, IncomingRecord
from kvstore_client.planner import split_by_weight
from kvstore_client.ranges import Spans
from kvstore_client.rounds import Job
from kvstore_client.shm_bounce import bounced_bytes, copy_out
from kvstore_client.shm_places import ConnectionRegions, Places
from kvstore_client.target import TargetLink

_BODY_BYTES = FRAME_BODY_BYTES_MAX - 4096  # room for the fields that do not grow with the batch
_PLAIN_ITEMS_MAX = _BODY_BYTES // (DIGEST_BYTES + ID_BYTES)
_NODE_MARGIN_NS_MAX = 50_000_000
_END_OF_HITS = bytes([HIT])


class Begun(NamedTuple):
    """A read that was begun the straight way (straight.py), and must be finished.

    Attributes:
        target: that was asked, for all of it.
        connection: with its link: the request is on its way, the answer is another one than expected. None when over.
        slices: what has come to where it belongs, when some of it was garbled.
        deadline_ns: of the call.
        done: content id of each item that has come whole, verified, in frames before.
        begun: as `done`, of each item of which so many bytes from its start have come.
        places: of all items, in shared memory, where the node puts them: to be settled.
    """

    target: TargetId
    connection: tuple[TargetLink, Connection] | None
    slices: Sequence[Slice]
    deadline_ns: int
    done: Mapping[int, bytes] = MappingProxyType({})
    begun: Mapping[int, tuple[bytes, int]] = MappingProxyType({})
    places: Places | None = None


class LoadJob(Job):
    """Reads the records of one target. What is not a HIT or a miss at the end is still OPEN.

    A record whose bytes did not match is asked for once more, on a fresh connection, and the node is told to check its
    own copy first: nobody knows yet whether memory there or something on the way has garbled it.

    Attributes:
        records: As given.
        received_bytes: Payload that came, garbled or not.
    """

    __slots__ = (
        "_accept_pending",
        "_asked",
        "_begun_places",
        "_bounced",
        "_checked_slices",
        "_checked_until",
        "_has_run",
        "_is_asked",
        "_keys",
        "_landing",
        "_may_re_ask",
        "_namespace",
        "_shared_spans",
        "_spans",
        "_waste",
        "received_bytes",
        "records",
    )

    def __init__(
        self,
        *,
        target: TargetId,
        flow: FlowClass,
        deadline_ns: int,
        namespace: bytes,
        keys: bytes,
        records: Sequence[IncomingRecord],
        shared_spans: Spans | None,
        spans: Sequence[Spans] | None,
        accept_pending: bool,
    ) -> None:
        """
        Args:
            namespace: Digest.
            keys: Record keys, 32 bytes for each of `records`.
            records: Where each goes.
            shared_spans: What to read of each record; None is all of it.
            spans: What to read of each record, one by one, instead of `shared_spans`.
            accept_pending: Also take records that are received but not durable.
        """
        super().__init__(target=target, flow=flow, deadline_ns=deadline_ns, retries_max=READ_RETRIES_MAX)
        self._namespace = namespace
        self._keys = keys
        self.records = records
        self._shared_spans = shared_spans
        self._spans = spans
        self._accept_pending = accept_pending
        self.received_bytes = 0
        self._has_run = False
        self._is_asked = False
        self._begun_places: Places | None = None
        self._bounced: Sequence[memoryview] = ()  # of the request in progress: places to copy from
        self._may_re_ask = True
        self._asked: Sequence[IncomingRecord] = ()
        self._landing: deque[list[list[memoryview]]] = deque()
        self._checked_slices = 0  # of the frame that is arriving
        self._checked_until = 0
        self._waste = memoryview(b"")

    def wants_another_try(self) -> bool:
        """After a break, while records are open; after a mismatch once."""
        if isinstance(self.failure, Unavailable | Overloaded):
            return any(record.status == OPEN for record in self.records)
        return self.failure is None and self._may_re_ask and any(record.is_doubtful for record in self.records)

    def run(self, connection: Connection) -> Steps:
        """Asks for what is open or doubtful."""
        self._landing.clear()
        self._checked_slices = self._checked_until = 0
        self._waste = connection.waste
        if self._is_asked:
            self._is_asked = False
            self._asked = self.records
            connection.belongs_to(self)
            places, self._begun_places = self._begun_places, None
            yield from self._receive(connection) if places is None else self._receive_into(connection, places)
            self._close_if_doubtful(connection)
            return
        chosen: Sequence[int] = range(len(self.records))
        if self._has_run:
            chosen = self._rest()
        self._has_run = True
        while connection.regions is not None and not self._has_spans and chosen:
            places, chosen = yield from connection.regions.split(connection, self.records, chosen)
            if not places.items and isinstance(connection.regions, ConnectionRegions):
                rooms = [bounced_bytes(self.records[at].memory, self.records[at].room_bytes) for at in chosen]
                places, chosen = yield from connection.regions.split_bounced(connection, rooms, chosen)
            if not places.items:
                break
            yield from self._ask_into(connection, places)
        if not chosen:
            self._close_if_doubtful(connection)
            return
        assert connection.welcome is not None
        items_max = connection.welcome.batch_items_max
        if not self._has_spans and len(chosen) <= min(items_max, _PLAIN_ITEMS_MAX):
            yield from self._ask(connection, chosen)
        else:
            for part in split_by_weight(self._weights(chosen), items_max=items_max, weight_max=_BODY_BYTES):
                yield from self._ask(connection, chosen[part.start : part.stop])
        self._close_if_doubtful(connection)

    def _close_if_doubtful(self, connection: Connection) -> None:
        if self._may_re_ask and any(record.is_doubtful for record in self.records):
            connection.close()  # whatever garbles bytes there shall not do it to the second try

    def is_asked_on(self, link: TargetLink, connection: Connection) -> None:
        """Before the first run: the request was sent on this connection already, which the job holds from now on."""
        self.begun_on = (link, connection)
        self._is_asked = self._has_run = True

    def keep(self, begun: Begun) -> None:
        """Before the first run: what of the records has come and matched its checksums."""
        self._begun_places = begun.places
        for item, content_id in begun.done.items():
            self.records[item].has_come(content_id)
        for item, (content_id, until) in begun.begun.items():
            self.records[item].has_come_until(content_id, until)

    def take_over(self, frame_slices: Sequence[Slice]) -> None:
        """Before the first run: these slices have come, one for each record, to where the records belong; some were
        garbled, and are asked for again."""
        self._has_run = True
        for record, piece in zip(self.records, frame_slices, strict=True):
            record.arrived(piece, list(record.land(piece, self._waste)))

    def place(self, frame: Frame) -> Sequence[memoryview]:
        """Where the payload of a DATA frame lands."""
        landing = self._land(frame)
        self._landing.append(landing)
        if len(landing) == 1:
            return landing[0]
        return [view for views in landing for view in views]

    def arriving(self, frame: Frame, arrived_bytes: int) -> None:
        """Checks what has come of a frame's payload: its whole slices, and the blocks of a large one."""
        landing, slices = self._landing[-1], frame.slices
        at, until = self._checked_slices, self._checked_until
        while at < len(slices) and until + slices[at].length_bytes <= arrived_bytes:
            piece = slices[at]
            self._asked[piece.item].arrived(piece, landing[at])
            until += piece.length_bytes
            at += 1
        self._checked_slices, self._checked_until = at, until
        if at < len(slices) and len(landing[at]) == 1:
            self._asked[slices[at].item].arriving(slices[at], landing[at][0], arrived_bytes - until)

    def _rest(self) -> list[int]:
        """What a repeated try asks for: its records, made ready."""
        chosen = [at for at, one in enumerate(self.records) if one.status == OPEN or one.is_doubtful]
        for at in chosen:
            if self.records[at].is_doubtful:
                self._may_re_ask = False
            self.records[at].restart()
        return chosen

    def _ask(self, connection: Connection, chosen: Sequence[int]) -> Steps:
        records = self.records
        self._asked = records if len(chosen) == len(records) else [records[at] for at in chosen]
        connection.begin(self._request(chosen), owner=self)
        while not connection.try_flush():
            yield WRITE
        yield from self._receive(connection)

    def _ask_into(self, connection: Connection, places: Places) -> Steps:
        """Lets the node write records to where they belong."""
        self._asked = [self.records[at] for at in places.items]
        request = get_into(self._request(places.items), places.blob)
        yield from self._receive_into(connection, places, request)

    def _receive_into(self, connection: Connection, places: Places, request: GetInto | None = None) -> Steps:
        """Receives the answer to a `request` that has named places, once it is sent, and settles them."""
        regions, asked = connection.regions, self._asked
        assert regions is not None
        self._bounced = list(places.found) if places.is_bounced else ()
        before, has_ended = self.received_bytes, False
        try:
            if request is not None:
                yield from connection.start(request, owner=self)
            yield from self._receive(connection)
            has_ended = True
        finally:
            if places.is_bounced and isinstance(regions, ConnectionRegions):
                regions.bounce.copied(self.received_bytes - before)
            self._bounced = ()
            regions.settle(places, asked, has_ended=has_ended)

    def _receive(self, connection: Connection) -> Steps:
        asked = self._asked
        while True:
            frames = connection.try_receive()
            if frames is None:
                yield READ
                continue
            for frame in frames:
                if frame.type is FrameType.PLACED:
                    self._take_placed(frame)
                elif frame.type is FrameType.DATA:
                    self._take_data(frame)
                else:
                    self._end(connection.decode(End, frame).statuses, connection)
                    return
                if frame.is_final:
                    self._end(_END_OF_HITS * len(asked), connection)
                    return

    def _land(self, frame: Frame) -> list[list[memoryview]]:
        asked, waste = self._asked, self._waste
        try:
            return [asked[piece.item].land(piece, waste) for piece in frame.slices]
        except IndexError:
            raise Unavailable(f"the node sent an item that was not asked for; there are {len(asked)}") from None

    def _take_data(self, frame: Frame) -> None:
        """Checks what has come with a DATA frame."""
        asked, slices = self._asked, frame.slices
        if not frame.payload_bytes:
            for piece, views in zip(slices, self._land(frame), strict=True):
                asked[piece.item].arrived(piece, views)
            return
        self.received_bytes += frame.payload_bytes
        landing = self._landing.popleft()
        for at in range(self._checked_slices, len(slices)):
            piece = slices[at]
            asked[piece.item].arrived(piece, landing[at])
        self._checked_slices = self._checked_until = 0

    def _take_placed(self, frame: Frame) -> None:
        """Checks what the node says it has put where it belongs, or where we can copy it from."""
        asked, slices, bounced = self._asked, frame.slices, self._bounced
        for piece, views in zip(slices, self._land(frame), strict=True):
            if bounced and asked[piece.item].status == OPEN:
                copy_out(bounced[piece.item], piece.offset, views)
            asked[piece.item].arrived(piece, views)
            self.received_bytes += piece.length_bytes

    def _end(self, statuses: bytes, connection: Connection) -> None:
        """Takes over the misses that END tells. A record that END calls a hit must have come whole."""
        if len(statuses) != len(self._asked):
            raise Unavailable(f"node at {connection.address} ended {len(self._asked)} items with {len(statuses)}")
        for record, status in zip(self._asked, statuses, strict=True):
            if record.status == status:
                continue
            if record.status == OPEN:
                if status == HIT:
                    raise Unavailable(f"node at {connection.address} ended a read before all of it was sent")
                record.status = status
            elif record.status == HIT and status != HIT:
                record.status = status

    def _request(self, chosen: Sequence[int]) -> Get:
        whole = len(chosen) == len(self.records)
        keys = self._keys if whole else _pick(self._keys, chosen)
        counts, ranges = encode_ranges(self._ranges_of(chosen))
        left_ns = self.deadline_ns - time.monotonic_ns()
        if left_ns <= 0:
            raise DeadlineExceeded("the call's deadline passed before the request was sent")
        return Get(
            namespace=self._namespace,
            keys=keys,
            deadline_ns=node_deadline_ns(left_ns),
            range_counts=counts,
            ranges=ranges,
            content_ids=self._content_ids(),
            accept_pending=self._accept_pending,
            verify=not self._may_re_ask,
        )

    def _ranges_of(self, chosen: Sequence[int]) -> list[list[tuple[int, int]]] | None:
        if self._spans is not None:
            return [_as_ranges(self._spans[at]) for at in chosen]
        return None if self._shared_spans is None else [_as_ranges(self._shared_spans)]

    def _content_ids(self) -> bytes:
        if all(record.content_id is NO_CONTENT_ID for record in self._asked):
            return b""
        return b"".join([record.content_id for record in self._asked])

    @property
    def _has_spans(self) -> bool:
        return self._spans is not None or self._shared_spans is not None

    def _weights(self, chosen: Sequence[int]) -> Sequence[int]:
        """Bytes that each record takes in the request; ranges that all share count for each: RANGES_PER_CALL_MAX."""
        fixed = DIGEST_BYTES + ID_BYTES
        spans = self._spans
        if spans is None:
            shared = self._shared_spans
            return [fixed if shared is None else fixed + 4 + RANGE_BYTES * len(shared)] * len(chosen)
        return [fixed + 4 + RANGE_BYTES * len(spans[at]) for at in chosen]


def node_deadline_ns(left_ns: int) -> int:
    """What the node is told: it answers what it has just before we would give up, so that the connection survives."""
    return left_ns - min(left_ns // 20, _NODE_MARGIN_NS_MAX)


def _as_ranges(spans: Spans) -> list[tuple[int, int]]:
    return [(first, behind - first) for first, behind in spans]


def _pick(keys: bytes, chosen: Sequence[int]) -> bytes:
    return b"".join([keys[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES] for at in chosen])
