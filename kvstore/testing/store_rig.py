"""The disk side of the engine on any device, driven step by step with its own clock: no cache, no sockets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvstore.device.base import Device
from kvstore.device.queue import DispatchQueue
from kvstore.engine.api import Durability, NamespaceRef, PutColumns, PutSpec, PutTicket
from kvstore.engine.arena import Arena
from kvstore.engine.blocking import BlockingIo
from kvstore.engine.catalog import Catalog
from kvstore.engine.drive import prepare_drive
from kvstore.engine.format import CONTENT_ID_BYTES, decode_record_header, page_count
from kvstore.engine.ledger import Ledger
from kvstore.engine.location import U64, location_page, location_pages, location_segment
from kvstore.engine.namespaces import index_key, index_keys
from kvstore.engine.put import Outcome, Ticket
from kvstore.engine.put_parcel import GrantedParcel
from kvstore.engine.store import Store
from kvstore.limits import MS_NS, PAGE_BYTES, MiB
from kvstore.telemetry.metrics import EngineMetrics
from kvstore.types.checksum import crc_table
from kvstore.types.flow import FlowClass
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore.types.results import Exists, Refused

POLLS_MAX = 20_000
DEADLINE_NS = 1 << 60


class NoCache:
    """A memory side that caches nothing, and remembers what it was told."""

    def __init__(self) -> None:
        self.stored_keys: list[tuple[int, int]] = []
        self.moved_count = 0
        self.removed_count = 0

    def stored(self, ticket: Ticket) -> None:
        """Nothing is kept."""
        self.stored_keys.append(ticket.key)

    def stored_parcel(self, parcel: GrantedParcel, locations: Sequence[int], stored: Sequence[bool]) -> None:
        """Nothing is kept."""
        keys = [int.from_bytes(key16, "little") for key16 in parcel.keys16]
        self.stored_keys += [
            (key & (1 << 64) - 1, key >> 64) for key, is_stored in zip(keys, stored, strict=True) if is_stored
        ]

    def reclaim_memory(self, length_bytes: int) -> bool:
        """There is nothing to drop."""
        return False

    def stored_content(self, key0: int, key1: int) -> bytes:
        """Nothing is known."""
        return b""

    def moved(self, keys: U64, old: U64, new: U64) -> None:
        """Counted."""
        self.moved_count += len(keys)

    def removed(self, keys: U64, locations: U64) -> None:
        """Counted."""
        self.removed_count += len(keys)


def rig_manifest(name: str) -> bytes:
    """The manifest of a namespace of plain bytes."""
    layout = KVLayout.opaque(chunk_bytes=1 * MiB)
    return Namespace(tenant="default", model=f"test/{name}", weights="sha256:0", layout=layout).manifest()


@dataclass(slots=True)
class PutResult:
    """What became of one put."""

    outcomes: list[Outcome] = field(default_factory=list)
    ticket: PutTicket | None = None
    received: bool = False

    @property
    def outcome(self) -> Outcome | None:
        """Its outcome, None while it is in progress."""
        return self.outcomes[0] if self.outcomes else None


class StoreRig:
    """A store on a device."""

    def __init__(
        self,
        device: Device,
        *,
        capacity_bytes: int = 0,
        segment_bytes: int = 0,
        arena_bytes: int = 8 * MiB,
        entries_max: int = 65_536,
        depth: int = 8,
        now_ns: int = 0,
        last_tick: int = 0,
    ) -> None:
        self.device = device
        self.now_ns = now_ns
        self.metrics = EngineMetrics()
        self.superblock = prepare_drive(
            device, name="rig", capacity_bytes=capacity_bytes, segment_bytes=segment_bytes, metrics=self.metrics
        )
        self.arena = Arena(arena_bytes, prefault=False, huge_pages=False)
        self.catalog = Catalog(entries_max=entries_max, segment_count=self.superblock.segment_count, seed=1)
        self.memory = NoCache()
        self.queue = DispatchQueue(device, depth)
        self.store = Store(
            queue=self.queue,
            superblock=self.superblock,
            arena=self.arena,
            catalog=self.catalog,
            memory=self.memory,
            metrics=self.metrics,
        )
        self.ledger.tick = max(last_tick, self.store.recovered.tick_max) + 1

    @property
    def ledger(self) -> Ledger:
        """The store's ledger."""
        return self.store.ledger

    # --- time -----------------------------------------------------------------------------------------------------
    def poll(self) -> None:
        """One turn, 1 ms later."""
        self.now_ns += MS_NS
        self.store.poll(self.now_ns)

    def settle(self, done: Callable[[], bool] | None = None) -> None:
        """Poll until `done`, or until nothing is on its way."""
        for _ in range(POLLS_MAX):
            self.poll()
            if done() if done is not None else self._quiet():
                return
        raise AssertionError("the store does not come to rest")

    def _quiet(self) -> bool:
        return self.store.idle and not self.queue.in_flight and not self.queue.queued

    # --- verbs ----------------------------------------------------------------------------------------------------
    def namespace(self, name: str = "rig") -> NamespaceRef:
        """Register a namespace."""
        return self.ledger.add_namespace(rig_manifest(name))

    def begin_put(
        self,
        ref: NamespaceRef,
        key: bytes,
        payload: bytes,
        *,
        block_bytes: int = 16 * 1024,
        durability: Durability = Durability.COMMIT,
        position: int = 0,
        run_head: bytes = bytes(32),
        commit: bool = True,
        deadline_ns: int = DEADLINE_NS,
        client_id: bytes = b"rig",
        arriving: bytes | None = None,
    ) -> PutResult:
        """Open a put; once granted its bytes arrive at once (others with `arriving`), and it is committed."""
        result = PutResult()
        spec = PutSpec(
            namespace=ref,
            key=key,
            payload_bytes=len(payload),
            block_bytes=block_bytes,
            crc_table=crc_table(payload, block_bytes),
            flow=FlowClass.WRITEBACK,
            deadline_ns=deadline_ns,
            client_id=client_id,
            position=position,
            run_head=run_head,
            durability=durability,
        )

        def granted(answer: PutTicket | Exists | Refused) -> None:
            if isinstance(answer, Exists | Refused):
                result.outcomes.append(answer)
                return
            result.ticket = answer
            assert answer.buffer is not None
            answer.buffer[:] = payload if arriving is None else arriving
            answer.filled()
            if commit:
                answer.commit(on_received=lambda: setattr(result, "received", True), on_done=result.outcomes.append)

        self.store.writer.open_put(spec, granted)
        return result

    def columns(
        self,
        ref: NamespaceRef,
        keys: Sequence[bytes],
        payload_bytes: int,
        *,
        block_bytes: int = 16 * 1024,
        positions: Sequence[int] = (),
        run_heads: bytes = b"",
        parents: bytes = b"",
    ) -> PutColumns:
        """Records of one shape to put together."""
        return PutColumns(
            namespace=ref,
            keys=b"".join(keys),
            payload_bytes=payload_bytes,
            block_bytes=block_bytes,
            flow=FlowClass.WRITEBACK,
            deadline_ns=DEADLINE_NS,
            client_id=b"rig",
            positions=positions,
            run_heads=run_heads,
            parents=parents,
        )

    def begin_parcels(self, columns: PutColumns, payloads: Sequence[bytes]) -> dict[int, list[bytes | Refused]]:
        """Put in parcels as many of these as get memory: their bytes arrive at once. Content ids or refusals by index,
        empty while they are in progress."""
        outcomes: dict[int, list[bytes | Refused]] = {}
        for parcel in self.store.writer.open_parcels(columns, 0, len(payloads)):
            for at, buffer in enumerate(parcel.buffers):
                index = parcel.first + at
                outcomes[index] = []
                buffer[:] = payloads[index]
                parcel.arrived(index, 0, len(buffer), crc_table(payloads[index], columns.block_bytes))
            assert parcel.filled()
            parcel.commit(on_received=None, on_done=lambda *ended: parcel_ended(outcomes, *ended))
        return outcomes

    def put(self, ref: NamespaceRef, key: bytes, payload: bytes, **options: object) -> Outcome:
        """Put and wait for the outcome."""
        result = self.begin_put(ref, key, payload, **options)  # type: ignore[arg-type]
        self.settle(lambda: result.outcome is not None)
        assert result.outcome is not None
        return result.outcome

    def delete(self, ref: NamespaceRef, keys: list[bytes]) -> bytes:
        """Delete and wait for it to be synced."""
        answers: list[bytes] = []
        self.ledger.delete(ref, index_keys(ref, b"".join(keys)), answers.append)
        self.settle(lambda: bool(answers))
        return answers[0]

    def location(self, ref: NamespaceRef, key: bytes) -> int:
        """Where the index says a record lies, 0 where absent."""
        key16 = index_key(ref, key)
        return self.catalog.index.get(int.from_bytes(key16[:8], "little"), int.from_bytes(key16[8:], "little"))

    def get(self, ref: NamespaceRef, key: bytes) -> bytes | None:
        """The payload, None for a miss: absent, or not what the header and checksums say."""
        location = self.location(ref, key)
        if not location:
            return None
        return read_record(BlockingIo(self.device), self.store, ref, key, location)

    # --- truth ----------------------------------------------------------------------------------------------------
    def recount_bytes(self) -> int:
        """Padded bytes of all records in the index whose bytes on the drive are sound, counted one by one."""
        index = self.catalog.index
        total = 0
        io = BlockingIo(self.device)
        for location in index.locations[index.taken_slots()].tolist():
            offset = self.store.table.offset(location_segment(location), location_page(location))
            data = io.read(offset, location_pages(location) * PAGE_BYTES)
            header = decode_record_header(data)
            if header is None or not _payload_sound(data, header.header_pages, header.payload_bytes, header.crc_table):
                continue
            if self.store.namespaces.by_digest(header.namespace) is None:
                continue
            total += location_pages(location) * PAGE_BYTES
        return total

    def check_accounts(self) -> None:
        """Live counts of all kinds agree with the index."""
        index, table = self.catalog.index, self.store.table
        locations = index.locations[index.taken_slots()]
        segments = (locations >> np.uint64(44)).astype(np.int64)
        pages = ((locations >> np.uint64(11)) & np.uint64(0x7FFF)).astype(np.int64)
        counted = np.zeros(table.count, dtype=np.int64)
        np.add.at(counted, segments, pages)
        by_space = [sum(count.pages for count in live.values()) for live in table.live]
        assert by_space == self.catalog.scores.live_pages.tolist()
        dropped = sum(known.ref.generation > 1 for known in self.store.namespaces)
        if not dropped:
            assert counted.tolist() == by_space


def parcel_ended(outcomes: dict[int, list[bytes | Refused]], index: int, count: int, outcome: bytes | Refused) -> None:
    """Notes how some records of a parcel have ended."""
    for at in range(count):
        one = outcome if isinstance(outcome, Refused) else outcome[at * CONTENT_ID_BYTES : (at + 1) * CONTENT_ID_BYTES]
        outcomes[index + at].append(one)


def read_record(io: BlockingIo, store: Store, ref: NamespaceRef, key: bytes, location: int) -> bytes | None:
    """Read one record as a reader does: nothing is believed before its checksums and names are right."""
    segment = location_segment(location)
    data = io.read(store.table.offset(segment, location_page(location)), location_pages(location) * PAGE_BYTES)
    header = decode_record_header(data)
    if header is None or header.key != key or header.namespace != ref.digest:
        return None
    if header.namespace_generation != ref.generation or header.segment_generation != int(
        store.table.generation[segment]
    ):
        return None
    if page_count(header.header_pages * PAGE_BYTES + header.payload_bytes) != location_pages(location):
        return None
    start = header.header_pages * PAGE_BYTES
    payload = bytes(data[start : start + header.payload_bytes])
    return payload if crc_table(payload, header.block_bytes) == header.crc_table else None


def _payload_sound(data: memoryview, header_pages: int, payload_bytes: int, table: bytes) -> bool:
    header = decode_record_header(data)
    assert header is not None
    start = header_pages * PAGE_BYTES
    return crc_table(data[start : start + payload_bytes], header.block_bytes) == table
