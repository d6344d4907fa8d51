"""Driving an engine from a test, one step after the other: every call here returns with its answer.

The clock is the test's: it moves only by `advance`, and a little with each turn.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.engine.api import (
    POSITION_NONE,
    Durability,
    Engine,
    MatchOutcome,
    NamespaceRef,
    Parcel,
    ParcelSource,
    PutSpec,
    PutTicket,
    ReadSpec,
    ReadyItem,
)
from kvstore.limits import DIGEST_BYTES, MS_NS, SECOND_NS, SPACE_RETRY_NS_MIN
from kvstore.types.checksum import crc_table
from kvstore.types.flow import FlowClass
from kvstore.types.results import Exists, MissReason, Refused, Stored
from kvstore.wire.slices import Slice, decode_slices

BLOCK_BYTES = 4096
_TURN_NS = MS_NS // 100
_TURNS_MAX = 5_000
_TURNS_STALLED = 200
_IDLE_WAIT_MS = 5
_DROPS_MAX = 10

Outcome = Stored | Exists | Refused


class Collector:
    """A `ReadSink` that verifies and copies what arrives, and checks the contract while it does.

    Attributes:
        answers: per record its bytes (the pieces joined by offset), a MissReason, or None while it is open.
        pieces: (offset, bytes) per record as they came.
        content_ids: per record.
        done: `finished` was called.
        held: items kept back when `hold` is set; `let_go` releases them.
        doubtful: records that came with wrong bytes, with `checks`: they end as a client's would.
    """

    def __init__(self, count: int, *, hold: bool = False, checks: bool = False) -> None:
        """`checks`: of a read with `ReadSpec.reader_checks`."""
        self.answers: list[bytes | MissReason | None] = [None] * count
        self.pieces: list[list[tuple[int, bytes]]] = [[] for _ in range(count)]
        self.content_ids: list[bytes] = [b""] * count
        self.record_bytes: list[int] = [-1] * count
        self.done = False
        self.cancelled = False
        self.hold = hold
        self.held: list[ReadyItem | Parcel] = []
        self.checks = checks
        self.doubtful: list[int] = []
        self._in_take = self._finished_in_take = False

    def ready(self, item: ReadyItem) -> None:
        """Check the piece against its checksums and keep a copy."""
        assert not self.done, "ready after finished"
        assert not self.cancelled, "ready after cancel"
        assert self.answers[item.index] is None, "ready after the record's last answer"
        assert item.offset % item.block_bytes == 0
        assert item.offset + len(item.data) <= item.record_bytes
        self._check(item.index, item.data, item.block_bytes, item.crcs)
        data = bytes(item.data)
        self.pieces[item.index].append((item.offset, data))
        self.content_ids[item.index] = item.content_id
        self.record_bytes[item.index] = item.record_bytes
        if item.last:
            self.answers[item.index] = b"".join(piece for _, piece in sorted(self.pieces[item.index]))
        if self.hold:
            self.held.append(item)
        else:
            item.release()

    def landed(self, source: ParcelSource) -> None:
        """Take a parcel apart: what it says of its records is what `ready` would have been told."""
        while (parcel := self._take(source)) is not None:
            at = 0
            payload = memoryview(b"".join(parcel.payload))
            slices = decode_slices(parcel.body, count=parcel.count, payload_bytes=parcel.payload_bytes)
            assert [one.item for one in slices] == list(parcel.indices)
            for one in slices:
                self._keep(one, payload[at : at + one.length_bytes])
                at += one.length_bytes
            if self.hold:
                self.held.append(parcel)
            else:
                parcel.release()
            if self._finished_in_take:
                self.finished()

    def _take(self, source: ParcelSource) -> Parcel | None:
        self._in_take = True
        parcel = source.take()
        self._in_take = False
        if parcel is None and self._finished_in_take:
            self.finished()
        return parcel

    def _keep(self, one: Slice, data: memoryview) -> None:
        assert self.answers[one.item] is None, "a parcel with a record that has ended"
        assert one.last
        assert one.length_bytes == one.record_bytes
        self._check(one.item, data, one.block_bytes, one.crcs)
        self.content_ids[one.item] = one.content_id
        self.record_bytes[one.item] = one.record_bytes
        self.answers[one.item] = bytes(data)
        self.pieces[one.item].append((0, bytes(data)))

    def _check(self, index: int, data: memoryview, block_bytes: int, crcs: bytes) -> None:
        if crc_table(data, block_bytes) != crcs:
            assert self.checks, "unverified bytes were delivered"
            self.doubtful.append(index)

    def missed(self, index: int, reason: MissReason) -> None:
        """Note the miss."""
        assert not self.done, "missed after finished"
        assert not self.cancelled, "missed after cancel"
        assert self.answers[index] is None, "missed after the record's last answer"
        self.answers[index] = reason

    def finished(self) -> None:
        """Every record must have had its answer."""
        if self._in_take:
            self._finished_in_take = True
            return
        self._finished_in_take = False
        assert not self.done, "finished twice"
        assert not self.cancelled, "finished after cancel"
        assert None not in self.answers, "finished with open records"
        self.done = True

    @property
    def held_bytes(self) -> int:
        """Payload in what was kept back."""
        return sum(len(one.data) if hasattr(one, "data") else one.payload_bytes for one in self.held)

    def let_go(self) -> None:
        """Release what was kept back, and keep nothing from now on."""
        self.hold = False
        held, self.held = self.held, []
        for item in held:
            item.release()


@dataclass(slots=True)
class Driver:
    """An engine and a clock.

    Attributes:
        client_id: of all calls.
        block_bytes: checksum block of all puts.
        on_stall: called now and then while nothing moves: the test may hold what the engine waits for.
    """

    engine: Engine
    now_ns: int = 1_000 * SECOND_NS
    client_id: bytes = b"driver" + bytes(10)
    block_bytes: int = BLOCK_BYTES
    timeout_ns: int = 3600 * SECOND_NS
    on_stall: Callable[[], None] | None = None

    # --- time ---------------------------------------------------------------------------------------------------------
    def advance(self, duration_ns: int) -> None:
        """Let time pass."""
        self.now_ns += duration_ns
        self.engine.poll(self.now_ns)

    def run_until(self, condition: Callable[[], bool]) -> None:
        """Poll until the condition holds. Fails after many turns in which it did not."""
        if not self.reaches(condition, turns=_TURNS_MAX):
            raise AssertionError("the engine did not get there")

    def reaches(self, condition: Callable[[], bool], *, turns: int) -> bool:
        """Poll until the condition holds, for at most so many turns; says whether it does."""
        poller = select.poll()
        for fileno in self.engine.filenos():
            poller.register(fileno, select.POLLIN)
        for turn in range(1, turns):
            if condition():
                return True
            if turn % _TURNS_STALLED == 0 and self.on_stall is not None:
                self.on_stall()
            self.now_ns += _TURN_NS
            self.engine.poll(self.now_ns)
            if not condition():
                poller.poll(_IDLE_WAIT_MS)
        return condition()

    # --- verbs --------------------------------------------------------------------------------------------------------
    def namespace(self, manifest: bytes) -> NamespaceRef:
        """Register a namespace."""
        return self.engine.add_namespace(manifest)

    def spec(self, ref: NamespaceRef, key: bytes, payload: bytes, **changes: object) -> PutSpec:
        """A put of these bytes; `changes` are fields of PutSpec."""
        fields: dict[str, object] = {
            "namespace": ref,
            "key": key,
            "payload_bytes": len(payload),
            "block_bytes": self.block_bytes,
            "crc_table": crc_table(payload, self.block_bytes),
            "flow": FlowClass.WRITEBACK,
            "deadline_ns": self.now_ns + self.timeout_ns,
            "client_id": self.client_id,
            "position": POSITION_NONE,
        }
        fields.update(changes)
        return PutSpec(**fields)  # type: ignore[arg-type]

    def start_put(self, spec: PutSpec, payload: bytes) -> list[Outcome]:
        """Begin a put; the list gets its outcome when that is known."""
        outcome: list[Outcome] = []

        def granted(ticket: PutTicket | Exists | Refused) -> None:
            if isinstance(ticket, Exists | Refused):
                outcome.append(ticket)
                return
            assert ticket.buffer is not None
            assert len(ticket.buffer) == len(payload)
            ticket.buffer[:] = payload
            ticket.filled()
            ticket.commit(on_done=outcome.append)

        self.engine.open_put(spec, granted)
        return outcome

    def put_specs(self, items: Sequence[tuple[PutSpec, bytes]]) -> list[Outcome]:
        """Put records together and wait for all."""
        outcomes = [self.start_put(spec, payload) for spec, payload in items]
        self.run_until(lambda: all(outcomes))
        return [outcome[0] for outcome in outcomes]

    def put(
        self,
        ref: NamespaceRef,
        records: Sequence[tuple[bytes, bytes]],
        *,
        durability: Durability = Durability.COMMIT,
        chain: bool = False,
        first_position: int = 0,
        parent: bytes = bytes(DIGEST_BYTES),
    ) -> list[Outcome]:
        """Put (key, payload) pairs together and wait for all.

        Args:
            chain: they are consecutive chunks from `first_position` on, behind `parent`, and one run.
        """
        items = []
        for number, (key, payload) in enumerate(records):
            changes: dict[str, object] = {"durability": durability}
            if chain:
                changes |= {"position": first_position + number, "parent": parent, "run_head": records[0][0]}
                parent = key
            items.append((self.spec(ref, key, payload, **changes), payload))
        return self.put_specs(items)

    def read_spec(self, ref: NamespaceRef, keys: Sequence[bytes], **changes: object) -> ReadSpec:
        """A read of these keys; `changes` are fields of ReadSpec."""
        fields: dict[str, object] = {
            "namespace": ref,
            "keys": b"".join(keys),
            "flow": FlowClass.DECODE_READ,
            "deadline_ns": self.now_ns + self.timeout_ns,
        }
        fields.update(changes)
        return ReadSpec(**fields)  # type: ignore[arg-type]

    def get(self, ref: NamespaceRef, keys: Sequence[bytes], **changes: object) -> list[bytes | MissReason | None]:
        """Read records and wait for all: bytes, or why not."""
        sink = Collector(len(keys))
        self.engine.read(self.read_spec(ref, keys, **changes), sink, now_ns=self.now_ns)
        self.run_until(lambda: sink.done)
        return sink.answers

    def match(self, ref: NamespaceRef, keys: Sequence[bytes], *, touch: bool = True, pin_ns: int = 0) -> MatchOutcome:
        """Look keys up."""
        return self.engine.match(
            ref, b"".join(keys), now_ns=self.now_ns, touch=touch, pin_ttl_ns=pin_ns, client_id=self.client_id
        )

    def prefix(self, ref: NamespaceRef, keys: Sequence[bytes]) -> int:
        """How many keys from the first on are there."""
        statuses = self.match(ref, keys).statuses
        return len(statuses) - len(statuses.lstrip(b"\0"))

    def delete(self, ref: NamespaceRef, keys: Sequence[bytes]) -> bytes:
        """Delete, and wait until that is durable."""
        statuses: list[bytes] = []
        self.engine.delete(ref, b"".join(keys), statuses.append)
        self.run_until(lambda: bool(statuses))
        return statuses[0]

    def drop(self, ref: NamespaceRef) -> NamespaceRef:
        """Drop a namespace; answers its new reference.

        A drop that the drive refused is never answered, as nobody knows what a restart finds: it is asked for again.
        """
        done: list[bool] = []
        for _ in range(_DROPS_MAX):
            self.engine.drop_namespace(ref, lambda: done.append(True))
            if self.reaches(lambda: bool(done), turns=2 * _TURNS_STALLED):
                break
            self.advance(SPACE_RETRY_NS_MIN + 1)
        assert done, f"{_DROPS_MAX} drops, and none was answered"
        fresh = self.engine.namespace(ref.digest)
        assert fresh is not None
        return fresh
