"""The data plane over the real engine, with one drive and with two: right bytes, and all memory given back."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest

from kvstore.engine.api import Engine
from kvstore.engine.engine import DriveEngine, EngineSettings
from kvstore.engine.parcels import Parcel, Parcels
from kvstore.engine.ready import ReadyRecord
from kvstore.engine.request import Request
from kvstore.limits import SECOND_NS, MiB
from kvstore.server.batch import pack_u32, unpack_u32
from kvstore.server.drive_set import DriveSet
from kvstore.server.piece_call import PieceCall
from kvstore.testing.plane_lab import LabClient, PlaneLab, results_of
from kvstore.types.checksum import crc_table
from kvstore.types.content_id import content_id
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore.types.results import ItemStatus, MissReason, RefusedReason
from kvstore.wire.header import FrameType
from kvstore.wire.messages import (
    Cancel,
    Delete,
    Drop,
    End,
    Feature,
    Grant,
    Match,
    MatchReply,
    Ping,
    Pong,
    Prefetch,
    Result,
    Unpin,
    Wait,
    WriterCommit,
    WriterOpen,
    WriterOpened,
)
from kvstore.wire.ranges import encode_ranges
from kvstore.wire.slices import NO_CONTENT_ID, Slice

NAMESPACE = Namespace(
    tenant="default", model="m", weights="w", layout=KVLayout.opaque(chunk_bytes=8 * MiB, chunk_tokens=16)
)
NS = NAMESPACE.digest
STORED = (ItemStatus.STORED, "")
EXISTS = (ItemStatus.EXISTS, "")


@dataclass(slots=True)
class Node:
    """A data plane over real drives."""

    lab: PlaneLab
    drives: list[DriveEngine]
    engine: Engine

    def staged_bytes(self) -> int:
        """Memory of transfers in progress, over all drives."""
        for drive in self.drives:
            drive.update_gauges(time.monotonic_ns())
        return sum(drive.metrics.staging_bytes for drive in self.drives)

    def settle(self) -> None:
        """Until nothing is on its way to or from a drive, and all memory is back."""
        self.lab.turn_until(lambda: all(drive.idle for drive in self.drives) and not self.staged_bytes())


def open_drive(folder: Path, *, cache_bytes: int = 8 * MiB) -> DriveEngine:
    folder.mkdir(exist_ok=True)
    settings = EngineSettings(
        capacity_bytes=128 * MiB,
        segment_bytes=8 * MiB,
        cache_bytes=cache_bytes,
        staging_bytes=48 * MiB,
        device="threads",
        prefault=False,
    )
    return DriveEngine.open(folder, settings, now_ns=time.monotonic_ns())


def open_node(folder: Path, *, count: int, cache_bytes: int = 8 * MiB) -> Node:
    drives = [open_drive(folder / f"drive{number}", cache_bytes=cache_bytes) for number in range(count)]
    names = [drive.store.superblock.disk_id.hex() for drive in drives]
    engine: Engine = drives[0] if count == 1 else DriveSet(list(zip(names, drives, strict=True)))
    return Node(lab=PlaneLab(engine), drives=drives, engine=engine)


def close_node(node: Node) -> None:
    node.lab.close()
    for drive in node.drives:
        drive.close()


@pytest.fixture(params=[1, 2], ids=["one drive", "two drives"])
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Node]:
    made = open_node(tmp_path, count=request.param)
    yield made
    made.lab.plane.close()
    made.settle()
    close_node(made)


@pytest.fixture
def client(node: Node) -> LabClient:
    made = node.lab.client()
    made.register(NAMESPACE.manifest())
    return made


def key_of(number: int) -> bytes:
    return bytes([number % 251]) * 16 + number.to_bytes(16, "little")


def test_records_of_every_size_round_trip(node: Node, client: LabClient) -> None:
    values = [os.urandom(size) for size in (0, 1, 511, 4095, 4096, 4097, 65537, MiB, MiB + 1, 3 * MiB + 5)]
    keys = [key_of(number) for number in range(len(values))]
    assert client.put(NS, keys, values) == dict.fromkeys(range(len(values)), STORED)
    assert client.put(NS, keys, values) == dict.fromkeys(range(len(values)), EXISTS)
    for _ in range(2):
        statuses, data = client.get(NS, keys)
        assert statuses == bytes(len(keys))
        assert data == dict(enumerate(values))
    node.settle()


def test_everything_is_there_after_a_restart(tmp_path: Path) -> None:
    values = [os.urandom(200_000 + number) for number in range(30)]
    keys = [key_of(number) for number in range(30)]
    for count in (2, 2):
        node = open_node(tmp_path, count=count)
        client = node.lab.client()
        client.register(NAMESPACE.manifest())
        ended = client.put(NS, keys, values)
        assert set(ended.values()) <= {STORED, EXISTS}
        assert client.get(NS, keys) == (bytes(30), dict(enumerate(values)))
        close_node(node)
    assert set(ended.values()) == {EXISTS}


def test_what_was_dropped_while_a_drive_was_away_does_not_return_with_it(tmp_path: Path) -> None:
    keys = [key_of(number) for number in range(30)]
    expected = dict.fromkeys(range(30), b"old")
    for count in (2, 1, 2, 2):
        node = open_node(tmp_path, count=count)
        client = node.lab.client()
        client.register(NAMESPACE.manifest())
        if count == 1:
            client.call(Drop(namespace=NS), End)
            client.call(Drop(namespace=NS), End)
            expected = {}
        elif expected:
            client.put(NS, keys, [b"old"] * 30)
            assert all(len(drive.catalog.index) for drive in node.drives)
        assert client.get(NS, keys)[1] == expected
        if not expected and count == 2:
            client.put(NS, keys, [b"new"] * 30)
            expected = dict.fromkeys(range(30), b"new")
        close_node(node)
    assert expected == dict.fromkeys(range(30), b"new")


def test_both_drives_are_used_and_runs_stay_together(tmp_path: Path) -> None:
    node = open_node(tmp_path, count=2)
    client = node.lab.client()
    client.register(NAMESPACE.manifest())
    heads = [key_of(1000 + number) for number in range(8)]
    keys = [key_of(number) for number in range(32)]
    values = [bytes([number]) * 5000 for number in range(32)]
    client.put(NS, keys, values, run_heads=b"".join(heads[number // 4] for number in range(32)))
    refs = [drive.namespace(NS) for drive in node.drives]
    homes = []
    for key in keys:
        found = [
            drive.match(ref, key, now_ns=drive.now_ns, touch=False).statuses == b"\0"
            for drive, ref in zip(node.drives, refs, strict=True)
            if ref is not None
        ]
        assert found.count(True) == 1
        homes.append(found.index(True))
    assert set(homes) == {0, 1}
    assert all(len(set(homes[at : at + 4])) == 1 for at in range(0, 32, 4))
    close_node(node)


def test_a_drive_that_was_added_takes_new_runs_and_old_ones_are_still_found(tmp_path: Path) -> None:
    keys = [key_of(number) for number in range(40)]
    values = [bytes([number]) * 3000 for number in range(40)]
    alone = open_node(tmp_path, count=1)
    client = alone.lab.client()
    client.register(NAMESPACE.manifest())
    client.put(NS, keys[:20], values[:20])
    close_node(alone)
    both = open_node(tmp_path, count=2)
    client = both.lab.client()
    assert client.get(NS, keys[:20]) == (bytes(20), dict(enumerate(values[:20])))
    ended = client.put(NS, keys, values)
    assert [status for status, _ in (ended[item] for item in range(40))] == [ItemStatus.EXISTS] * 20 + [
        ItemStatus.STORED
    ] * 20
    assert client.get(NS, keys) == (bytes(40), dict(enumerate(values)))
    close_node(both)


def test_what_exists_is_synced_before_a_put_for_a_power_cut_or_a_writer_hears_of_it(tmp_path: Path) -> None:
    keys = [key_of(number) for number in range(20)]
    values = [bytes([number]) * 3000 for number in range(20)]
    alone = open_node(tmp_path, count=1)
    client = alone.lab.client()
    client.register(NAMESPACE.manifest())
    client.put(NS, keys, values)
    close_node(alone)
    both = open_node(tmp_path, count=2)
    client = both.lab.client()
    metrics = both.drives[0].device_metrics
    opening = WriterOpen(
        namespace=NS, keys=b"", lengths=pack_u32([3000]), block_bytes=pack_u32([4096]), deadline_ns=5 * SECOND_NS
    )
    for key, value in zip(keys, values, strict=True):
        before = metrics.syncs
        assert client.put(NS, [key], [value]) == {0: EXISTS}
        assert metrics.syncs == before, "on whichever drive it would lie today"
        assert client.put(NS, [key], [value], durability=1) == {0: EXISTS}
        assert metrics.syncs == before + 1
        opened = client.call(replace(opening, keys=key), WriterOpened)
        assert opened.statuses == bytes([ItemStatus.EXISTS])
        assert metrics.syncs == before + 2
    close_node(both)


def test_ranges_of_a_large_record(node: Node, client: LabClient) -> None:
    value = os.urandom(3 * MiB + 100)
    client.put(NS, [key_of(1), key_of(2)], [value, value[:5000]], block_bytes=65536)
    ranges = [[(0, 10), (2 * MiB + 5, 70_000)], [(4000, 1000)]]
    counts, blob = encode_ranges(ranges)
    statuses, data = client.get(NS, [key_of(1), key_of(2)], range_counts=counts, ranges=blob)
    assert statuses == bytes(2)
    for item, whole in enumerate((value, value[:5000])):
        for offset, length in ranges[item]:
            assert data[item][offset : offset + length] == whole[offset : offset + length]
    brought = sum(one.length_bytes for one in client.pieces)
    assert brought < 400_000, "only the blocks that cover the ranges travel"


def test_batches_with_duplicates_bad_and_inline_items(node: Node, client: LabClient) -> None:
    a, b, c = (key_of(number) for number in range(3))
    client.put(NS, [b], [b"b"])
    values = [b"a" * 100, b"b", b"a" * 100, b"c" * 50]
    tables = [crc_table(value, 65536) for value in values]
    tables[3] = b"\0\0\0\0"
    for inline in (True, False):
        ended = client.put(NS, [a, b, a, c], values, inline=inline, crc_tables=b"".join(tables))
        statuses = [ended[item][0] for item in range(4)]
        first = ItemStatus.STORED if inline else ItemStatus.EXISTS
        assert statuses == [first, ItemStatus.EXISTS, ItemStatus.EXISTS, RefusedReason.INVALID]
    assert client.get(NS, [a, b, c])[0] == bytes([0, 0, MissReason.ABSENT])
    node.settle()


def test_lookups_pins_wait_delete_prefetch_drop(node: Node, client: LabClient) -> None:
    keys = [key_of(number) for number in range(10)]
    client.put(NS, keys, [bytes([number]) * 9000 for number in range(10)])
    blob = b"".join(keys)
    found = client.call(Match(namespace=NS, keys=blob + key_of(99), pin_ttl_ns=30 * SECOND_NS), MatchReply)
    assert found.statuses == bytes(10) + bytes([MissReason.ABSENT])
    assert found.pinned
    assert found.load_ns > 0
    stranger = node.lab.client(client_id=b"S" * 16)
    stranger.call(Unpin(pin_id=found.pin_id), End)
    assert sum(drive.catalog.pinned_bytes for drive in node.drives), "a pin is its client's"
    client.call(Unpin(pin_id=found.pin_id), End)
    assert not sum(drive.catalog.pinned_bytes for drive in node.drives)
    assert client.call(Wait(namespace=NS, keys=blob, deadline_ns=SECOND_NS), End).statuses == bytes(10)
    client.call(Prefetch(namespace=NS, keys=blob), End)
    deleted = client.call(Delete(namespace=NS, keys=keys[3] + key_of(99)), End).statuses
    assert deleted == bytes([0, MissReason.ABSENT])
    assert client.get(NS, keys)[0] == bytes([0, 0, 0, MissReason.ABSENT, 0, 0, 0, 0, 0, 0])
    client.call(Drop(namespace=NS), End)
    assert client.get(NS, keys)[1] == {}
    assert set(client.put(NS, keys, [b"new"] * 10).values()) == {STORED}
    assert client.get(NS, keys)[1] == dict.fromkeys(range(10), b"new")


def test_layer_by_layer(node: Node, client: LabClient) -> None:
    value = os.urandom(5 * 65536 + 77)
    opened = client.call(
        WriterOpen(
            namespace=NS,
            keys=key_of(1) + key_of(2),
            lengths=pack_u32([len(value)] * 2),
            block_bytes=pack_u32([65536]),
            deadline_ns=5 * SECOND_NS,
        ),
        WriterOpened,
    )
    assert opened.statuses == bytes([ItemStatus.GRANTED] * 2)
    first, second = unpack_u32(opened.writer_ids)
    for at in reversed(range(0, len(value), 65536)):
        piece = value[at : at + 65536]
        client.session.start(FrameType.WRITER_WRITE)
        one = Slice(first, at, len(piece), 0, False, NO_CONTENT_ID, len(value), 65536, crc_table(piece, 65536))
        client.send_slices([one], piece, frame_type=FrameType.WRITER_WRITE)
        assert client.expect(End).statuses == bytes([ItemStatus.RECEIVED])
    assert client.get(NS, [key_of(1)])[0] == bytes([MissReason.PENDING])
    table = crc_table(value, 65536)
    client.start(WriterCommit(writer_ids=pack_u32([first, second]), crc_tables=table * 2, deadline_ns=5 * SECOND_NS))
    ended = []
    while (frame := client.receive()).type is FrameType.RESULT:
        ended += results_of(Result.decode(frame.body))
    statuses = {item: status for item, status, _ in ended}
    assert statuses == {0: ItemStatus.STORED, 1: RefusedReason.INVALID}
    assert client.get(NS, [key_of(1), key_of(2)]) == (bytes([0, MissReason.ABSENT]), {0: value})
    node.settle()


def test_a_writer_keeps_the_content_id_that_it_is_committed_with(node: Node, client: LabClient) -> None:
    value = os.urandom(65536 + 77)
    table = crc_table(value, 65536)
    chosen = content_id(len(value), table, b"nonce...")
    opened = client.call(
        WriterOpen(
            namespace=NS,
            keys=key_of(1) + key_of(2),
            lengths=pack_u32([len(value)] * 2),
            block_bytes=pack_u32([65536]),
            deadline_ns=5 * SECOND_NS,
        ),
        WriterOpened,
    )
    writers = unpack_u32(opened.writer_ids)
    for writer_id in writers:
        client.session.start(FrameType.WRITER_WRITE)
        one = Slice(writer_id, 0, len(value), 0, False, NO_CONTENT_ID, len(value), 65536, table)
        client.send_slices([one], value, frame_type=FrameType.WRITER_WRITE)
        client.expect(End)
    wrong = content_id(len(value) - 1, table, b"nonce...")
    commit = WriterCommit(
        writer_ids=opened.writer_ids, crc_tables=table * 2, deadline_ns=5 * SECOND_NS, content_ids=chosen + wrong
    )
    client.start(commit)
    ended = []
    while (frame := client.receive()).type is FrameType.RESULT:
        ended += results_of(Result.decode(frame.body))
    assert {item: status for item, status, _ in ended} == {0: ItemStatus.STORED, 1: RefusedReason.INVALID}
    assert client.get(NS, [key_of(1)], content_ids=chosen) == (bytes([0]), {0: value})
    assert client.get(NS, [key_of(1)], content_ids=wrong)[0] == bytes([MissReason.ABSENT])
    node.settle()


def test_received_is_readable_by_who_accepts_pending_and_durable_comes(node: Node, client: LabClient) -> None:
    value = os.urandom(MiB)
    assert client.put(NS, [key_of(1)], [value], wait=0) == {0: (ItemStatus.RECEIVED, "")}
    assert client.get(NS, [key_of(1)], accept_pending=True)[1] == {0: value}
    assert client.call(Wait(namespace=NS, keys=key_of(1), deadline_ns=5 * SECOND_NS), End).statuses == b"\0"
    assert client.get(NS, [key_of(1)])[1] == {0: value}


@pytest.mark.parametrize("turns", [0, 1, 3, 10, 40])
def test_reads_that_are_cancelled_or_left_give_memory_back(node: Node, client: LabClient, turns: int) -> None:
    keys = [key_of(number) for number in range(12)]
    client.put(NS, keys, [os.urandom(2 * MiB) for _ in keys])
    leaving = node.lab.client(client_id=b"L" * 16)
    request_id = client.start_get(NS, keys)
    leaving.start_get(NS, keys)
    for _ in range(turns):
        node.lab.turn()
    client.session.send(FrameType.CANCEL)
    client.send(Cancel(), request_id)
    leaving.close()
    client.end_get()
    node.settle()
    statuses, _ = client.get(NS, keys)
    assert statuses == bytes(12)


@pytest.mark.parametrize("sent_bytes", [0, 60, 500_000])
def test_puts_that_are_left_in_the_middle_give_memory_back(node: Node, client: LabClient, sent_bytes: int) -> None:
    value = os.urandom(2 * MiB)
    leaving = node.lab.client(client_id=b"L" * 16)
    leaving.start(leaving.offer(NS, [key_of(1), key_of(2)], [value, value]))
    leaving.expect(Grant)
    one = Slice(0, 0, MiB, 0, False, NO_CONTENT_ID, len(value), 65536, b"")
    leaving.send_torn([one], value[:MiB], sent_bytes)
    leaving.close()
    node.lab.turn_until(lambda: node.lab.metrics.connections == 1)
    node.settle()
    assert client.put(NS, [key_of(1), key_of(2)], [value, value]) == {0: STORED, 1: STORED}
    assert client.get(NS, [key_of(1), key_of(2)])[1] == {0: value, 1: value}


def test_more_than_memory_holds_is_put_and_read_without_a_cache(tmp_path: Path) -> None:
    node = open_node(tmp_path, count=1, cache_bytes=0)
    client = node.lab.client()
    client.register(NAMESPACE.manifest())
    keys = [key_of(number) for number in range(24)]
    values = [os.urandom(2 * MiB) for _ in keys]
    assert set(client.put(NS, keys, values).values()) == {STORED}
    assert client.get(NS, keys) == (bytes(24), dict(enumerate(values)))
    node.settle()
    close_node(node)


@pytest.mark.parametrize("length", [0, 5000, 60_000])
def test_without_a_cache_records_of_several_drives_come_in_parcels(tmp_path: Path, length: int) -> None:
    """Those of each drive, all under the items of the batch; what is absent or asked for twice is answered as ever."""
    node = open_node(tmp_path, count=2, cache_bytes=0)
    client = node.lab.client()
    client.register(NAMESPACE.manifest())
    keys = [key_of(number) for number in range(60)]
    values = [os.urandom(length) for _ in keys]
    assert set(client.put(NS, keys, values).values()) == {STORED}
    opened: list[Parcels] = []

    def noted(parcels: Parcels, parcel: Parcel) -> bool:
        opened.append(parcels)
        return parcels.open(parcel)

    for drive in node.drives:
        drive._reader.open_parcel = partial(noted, drive._reader._parcels)
    assert client.get(NS, keys) == (bytes(60), dict(enumerate(values)))
    assert len(set(opened)) == 2, "both drives"
    order = [59, 3, 44, 17, 0, 28]
    assert client.get(NS, [keys[at] for at in order])[1] == {n: values[at] for n, at in enumerate(order)}
    absent = [keys[5], key_of(999), keys[6], key_of(998), *keys[40:50]]
    statuses, data = client.get(NS, absent)
    assert statuses == bytes([0, MissReason.ABSENT, 0, MissReason.ABSENT]) + bytes(10)
    assert data == {0: values[5], 2: values[6], **{4 + at: values[40 + at] for at in range(10)}}
    twice = [*keys[:20], keys[3], keys[7]]
    assert client.get(NS, twice) == (bytes(22), dict(enumerate([*values[:20], values[3], values[7]])))
    node.settle()
    close_node(node)


@pytest.mark.parametrize("count", [1, 2])
def test_only_who_has_said_that_he_sums_gets_what_was_not_summed(tmp_path: Path, count: int) -> None:
    node = open_node(tmp_path, count=count, cache_bytes=0)
    client = node.lab.client(features=Feature.FINAL_DATA)
    client.register(NAMESPACE.manifest())
    keys = [key_of(number) for number in range(6)]
    values = [os.urandom(60_000) for _ in keys]
    assert set(client.put(NS, keys, values).values()) == {STORED}
    for number in (1, 4):
        flip(tmp_path, values[number], 12_345)
    trusting = node.lab.client(client_id=b"D" * 16, features=Feature.FINAL_DATA | Feature.READER_CHECKS)
    with pytest.raises(AssertionError, match="wrong bytes"):
        trusting.get(NS, keys[:3])
    told = node.lab.client(client_id=b"D" * 16, features=Feature.FINAL_DATA | Feature.READER_CHECKS)
    assert told.get(NS, keys[1:2], verify=True)[0] == bytes([MissReason.CORRUPT])
    statuses, data = client.get(NS, keys)
    assert statuses == bytes([0, MissReason.CORRUPT, 0, 0, MissReason.CORRUPT, 0])
    assert data == {at: values[at] for at in (0, 2, 3, 5)}
    assert sum(drive.metrics.quarantined_records for drive in node.drives) == 2
    trusting.channel.close()
    node.settle()
    close_node(node)


def flip(folder: Path, value: bytes, offset: int) -> None:
    """Change a bit of what lies on one of the drives below `folder`."""
    for path in folder.glob("*/kvstore.data"):
        at = path.read_bytes().find(value)
        if at >= 0:
            with path.open("r+b", buffering=0) as drive:
                drive.seek(at + offset)
                drive.write(bytes([value[offset] ^ 8]))


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("cache_bytes", [0, 8 * MiB])
def test_a_read_leaves_no_cycle_to_be_collected(tmp_path: Path, count: int, cache_bytes: int) -> None:
    """What one was made of is there for the next one, whatever it ended with."""
    node = open_node(tmp_path, count=count, cache_bytes=cache_bytes)
    client = node.lab.client()
    client.register(NAMESPACE.manifest())
    keys = [key_of(number) for number in range(40)]
    client.put(NS, keys, [os.urandom(60_000) for _ in keys])
    node.settle()
    gc.collect()
    gc.disable()
    try:
        for asked in (keys, keys[:5], [*keys[:7], key_of(999)], keys[:1], [key_of(998)], [keys[3], keys[4], keys[3]]):
            client.get(NS, asked)
            counts, blob = encode_ranges([[(0, 100)]] * len(asked))
            client.get(NS, asked, range_counts=counts, ranges=blob)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found = {
            type(one).__name__ for one in gc.garbage if isinstance(one, PieceCall | Request | Parcel | ReadyRecord)
        }
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not found
    node.settle()
    close_node(node)


def open_writer(client: LabClient, length: int, **fields: int) -> int:
    """The id of a writer of one record."""
    opening = WriterOpen(
        namespace=NS,
        keys=key_of(1),
        lengths=pack_u32([length]),
        block_bytes=pack_u32([65536]),
        deadline_ns=5 * SECOND_NS,
    )
    return unpack_u32(client.call(replace(opening, **fields), WriterOpened).writer_ids)[0]  # type: ignore[arg-type]


def write_block(client: LabClient, writer_id: int, value: bytes, at: int) -> int:
    """Status of writing one block."""
    piece = value[at : at + 65536]
    client.session.start(FrameType.WRITER_WRITE)
    one = Slice(writer_id, at, len(piece), 0, False, NO_CONTENT_ID, len(value), 65536, crc_table(piece, 65536))
    client.send_slices([one], piece, frame_type=FrameType.WRITER_WRITE)
    return client.expect(End).statuses[0]


def test_a_block_that_is_written_with_other_bytes_ends_its_writer_and_nothing_else(
    node: Node, client: LabClient
) -> None:
    value = os.urandom(2 * 65536)
    writer_id = open_writer(client, len(value))
    assert write_block(client, writer_id, value, 0) == ItemStatus.RECEIVED
    assert write_block(client, writer_id, value, 0) == ItemStatus.RECEIVED, "sent again, it may be by another rail"
    assert write_block(client, writer_id, os.urandom(2 * 65536), 0) == RefusedReason.INVALID
    assert write_block(client, writer_id, value, 65536) == RefusedReason.DEADLINE
    assert [one.writers for one in node.lab.plane._clients] == [{}]
    node.settle()


def test_a_writer_outlives_the_deadline_of_its_opening(node: Node, client: LabClient) -> None:
    value = os.urandom(3 * 65536)
    writer_id = open_writer(client, len(value), ttl_ns=300 * SECOND_NS)
    for at, wait_s in ((0, 10), (65536, 60), (2 * 65536, 200)):
        node.lab.clock_ns += wait_s * SECOND_NS  # past the deadline, then past the default time to live
        client.call(Ping(), Pong)
        node.lab.turn()
        assert write_block(client, writer_id, value, at) == ItemStatus.RECEIVED
    table = crc_table(value, 65536)
    client.start(WriterCommit(writer_ids=pack_u32([writer_id]), crc_tables=table, deadline_ns=5 * SECOND_NS))
    assert results_of(client.expect(Result)) == [(0, ItemStatus.STORED, "")]
    client.expect(End)
    assert client.get(NS, [key_of(1)])[1] == {0: value}
    node.settle()
