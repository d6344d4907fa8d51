"""The straight way of reads against a node that answers with one frame, as expected or not."""

from __future__ import annotations

import random
import struct
import threading
from dataclasses import FrozenInstanceError

import pytest

from kvstore.limits import BATCH_ITEMS_MAX, REQUEST_NS_MAX, SLICES_PER_FRAME_MAX
from kvstore.types.checksum import crc_table
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore.types.results import MissReason, hits_of
from kvstore.wire import messages as m
from kvstore.wire.codec import pack_fields
from kvstore.wire.expected import epoch_of, get_body, plain_get, whole_records
from kvstore.wire.header import FrameType, encode_head
from kvstore.wire.messages import Get
from kvstore.wire.slices import FLAG_FINAL, Slice, encode_slices
from kvstore_client import Hit, KVClient, Miss, Stored

TOKENS = list(range(16 * 8))
SIZE = 100_000
BLOCK = 65_536


@pytest.fixture
def client(node):
    node.is_brief = True
    with KVClient.connect(node.address, deadline=20) as made:
        yield made


@pytest.fixture
def stored(client, node, opaque):
    ns = client.namespace(opaque)
    keys = ns.keys(TOKENS)
    payloads = [random.Random(at).randbytes(SIZE) for at in range(8)]
    assert all(isinstance(one, Stored) for one in ns.put(keys, payloads))
    assert read(ns, keys[:1])[1] == payloads[:1], "this one opens the connection"
    node.calls.clear()
    node.hellos.clear()
    return ns, keys, payloads


def read(ns, keys, size: int = SIZE, **arguments):
    """Results, and what is in the memory of the hits."""
    memory = [bytearray(b"\xaa" * size) for _ in range(len(keys))]
    results = ns.get_into(keys, memory, **arguments)
    return results, [
        bytes(got[: one.length_bytes]) if isinstance(one, Hit) else None
        for one, got in zip(results, memory, strict=True)
    ]


def test_hits_take_one_request_and_are_counted(client, node, stored) -> None:
    ns, keys, payloads = stored
    for count in (1, 3, 8):
        before = client.stats()
        results, data = read(ns, keys[:count])
        assert data == payloads[:count]
        records = list(node.records.values())
        assert [one.content_id for one in results] == [record.content_id for record in records[:count]]
        after = client.stats()
        assert after["load_hits"] - before.get("load_hits", 0) == count
        assert after["load_bytes"] - before.get("load_bytes", 0) == count * SIZE
    assert node.count(FrameType.GET) == 3
    assert not node.hellos


def test_a_miss_among_hits_is_told_and_costs_no_second_request(node, stored) -> None:
    ns, keys, payloads = stored
    gone = list(node.records)[2]
    del node.records[gone]
    results, data = read(ns, keys)
    assert results[2] == Miss(MissReason.ABSENT)
    assert [one for at, one in enumerate(data) if at != 2] == [one for at, one in enumerate(payloads) if at != 2]
    assert node.count(FrameType.GET) == 1
    assert read(ns, keys[:2])[1] == payloads[:2], "the connection is good for the next"
    assert not node.hellos


@pytest.mark.parametrize("change", ["block", "length", "order"])
def test_another_frame_than_expected_is_read_all_the_same(node, stored, change) -> None:
    ns, keys, payloads = stored
    expected = list(payloads)
    if change == "block":
        for record in node.records.values():
            record.block_bytes = 8192
    elif change == "length":
        first = next(iter(node.records.values()))
        first.payload = expected[0] = first.payload[:70_000]
    else:

        def turn(slices, parts) -> None:
            slices.reverse()
            parts.reverse()

        node.garble = turn
    results, data = read(ns, keys)
    assert data == expected
    assert all(isinstance(one, Hit) for one in results)
    assert node.count(FrameType.GET) == 1


def garble_once(node, item: int) -> None:
    def garble(slices, parts) -> None:
        at = next((at for at, one in enumerate(slices) if one.item == item), None)
        if at is not None:
            node.garble = None
            parts[at] = parts[at][:-1] + bytes([parts[at][-1] ^ 1])

    node.garble = garble


@pytest.mark.parametrize("item", [0, 5])
def test_a_garbled_record_is_asked_for_again_on_a_fresh_connection(client, node, stored, item) -> None:
    ns, keys, payloads = stored
    garble_once(node, item)
    results, data = read(ns, keys)
    assert data == payloads
    assert all(isinstance(one, Hit) for one in results)
    assert node.count(FrameType.GET) == 2
    assert len(node.hellos) == 1
    assert (client.stats()["corrupt_blocks"], client.stats()["corrupt_recovered"]) == (1, 1)


def test_a_record_that_stays_garbled_is_a_miss(client, node, stored) -> None:
    ns, keys, payloads = stored
    node.garble = lambda slices, parts: parts.__setitem__(0, b"\0" + parts[0][1:])
    results, data = read(ns, keys[:3])
    assert results[0] == Miss(MissReason.CORRUPT)
    assert data[1:] == payloads[1:3]


def send_changed(link, frame, change) -> None:
    """The right answer with bytes of the frame's head changed and its checksum mended or not."""
    get = m.Get.decode(frame.body)
    records = [link.node.records[get.namespace, get.keys[at : at + 32]] for at in range(0, len(get.keys), 32)]
    slices = [
        Slice(item, 0, SIZE, 0, True, one.content_id, SIZE, BLOCK, crc_table(one.payload, BLOCK))
        for item, one in enumerate(records)
    ]
    payload = b"".join(one.payload for one in records)
    flags = len(slices) | FLAG_FINAL
    head = encode_head(FrameType.DATA, frame.request_id, encode_slices(slices), payload_bytes=len(payload), flags=flags)
    link.socket.sendall(change(bytearray(head)) + payload)


@pytest.mark.parametrize("at", [16, 28, 32, 40, 55, 70, 80, 100, 130])
def test_a_head_changed_on_the_way_is_never_believed(node, stored, at) -> None:
    ns, keys, payloads = stored
    lies = [1]

    def script(link, frame) -> bool:
        if frame.type is not FrameType.GET or not lies:
            return False
        lies.pop()

        def change(head: bytearray) -> bytearray:
            head[at] ^= 0x40
            return head

        send_changed(link, frame, change)
        return True

    node.script = script
    assert read(ns, keys)[1] == payloads


@pytest.mark.parametrize("sent", [0, 1, 31, 32, 33, 200, 600, SIZE, 3 * SIZE + 1000, 8 * SIZE + 300])
@pytest.mark.parametrize("then", ["break", "stall"])
def test_an_answer_that_does_not_come_whole(client, node, stored, sent, then) -> None:
    ns, keys, payloads = stored
    go_on = threading.Event()
    lies = [1]

    def script(link, frame) -> bool:
        if frame.type is not FrameType.GET or not lies:
            return False
        lies.pop()
        real, out = link.socket, Cut(sent)
        link.socket = out
        link.answer(frame)
        link.socket = real
        real.sendall(out.kept)
        if then == "break":
            link.kill()
        else:
            go_on.wait(20)
        return True

    node.script = script
    if then == "break":
        assert read(ns, keys)[1] == payloads
        assert client.stats()["connections_broken"] == 1
        return
    results, data = read(ns, keys, deadline=0.2)
    arrived = next((at for at, one in enumerate(results) if not isinstance(one, Hit)), 8)
    assert arrived == max(0, min(7, (sent - 480) // SIZE))
    assert data[:arrived] == payloads[:arrived]
    assert results[arrived:] == [Miss(MissReason.DEADLINE)] * (8 - arrived)
    go_on.set()
    assert read(ns, keys)[1] == payloads


class Cut:
    """Keeps the first bytes of what is sent."""

    def __init__(self, left: int) -> None:
        self.left = left
        self.kept = b""

    def sendall(self, data: bytes) -> None:
        self.kept += data[: self.left - len(self.kept)]


def test_a_restarted_node_is_asked_on_a_fresh_connection(client, node, stored) -> None:
    ns, keys, payloads = stored
    assert read(ns, keys[:1])[1] == payloads[:1]
    node.restart()
    assert read(ns, keys[:1])[1] == payloads[:1]
    assert client.stats()["restarts_noticed"] == 1


def test_an_error_is_a_miss_and_the_connection_lives(node, stored) -> None:
    ns, keys, payloads = stored

    def script(link, frame) -> bool:
        if frame.type is FrameType.GET:
            link.send(frame, m.ErrorReply(code=15, text="no", closing=False))
        return frame.type is FrameType.GET

    node.script = script
    assert read(ns, keys[:2])[0] == [Miss(MissReason.UNAVAILABLE)] * 2
    node.script = None
    assert read(ns, keys[:2])[1] == payloads[:2]
    assert not node.hellos


def test_more_records_than_a_frame_takes(client, node) -> None:
    layout = KVLayout.opaque(chunk_bytes=64, chunk_tokens=1)
    ns = client.namespace(Namespace(tenant="default", model="tiny", weights="w", layout=layout))
    count = SLICES_PER_FRAME_MAX + 1
    keys = ns.keys(list(range(count)))
    payloads = [random.Random(at).randbytes(64) for at in range(count)]
    node.is_brief = True
    assert all(isinstance(one, Stored) for one in ns.put(keys, payloads))
    assert read(ns, keys[:-1], 64)[1] == payloads[:-1]
    node.is_brief = False
    assert read(ns, keys[:7], 64)[1] == payloads[:7], "a node that named the feature need not use it"


def test_threads_share_a_client(node, stored) -> None:
    ns, keys, payloads = stored
    wrong: list[object] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(60):
            first = rng.randrange(8)
            count = rng.randrange(1, 9 - first)
            if read(ns, keys[first : first + count])[1] != payloads[first : first + count]:
                wrong.append((seed, first, count))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_quick_body_is_that_of_the_message() -> None:
    keys = bytes(range(64))
    body = get_body(b"n" * 32, keys, 12345)
    assert body == Get(namespace=b"n" * 32, keys=keys, deadline_ns=12345).encode()
    assert plain_get(body) == (b"n" * 32, keys, 12345)


PLAIN = (b"n" * 32, b"k" * 64, 5, b"", b"", b"", 0, False, False)


@pytest.mark.parametrize(
    ("at", "value"),
    [
        *((0, bad) for bad in (b"n" * 31, b"", "n" * 32, 5)),
        *((1, bad) for bad in (b"k" * 63, "k" * 64, 7, bytes(32 * (BATCH_ITEMS_MAX + 1)))),
        *((2, bad) for bad in (-1, REQUEST_NS_MAX + 1, True, b"")),
        (3, bytes(4)),
        (4, bytes(16)),
        (5, bytes(16)),
        (6, 1),
        (6, False),
        (7, True),
        (7, 0),
        (8, True),
        (8, 0),
    ],
)
def test_the_quick_reader_takes_nothing_that_the_careful_one_would_refuse_or_read_otherwise(at, value) -> None:
    assert plain_get(pack_fields(PLAIN)) is not None
    assert plain_get(pack_fields((*PLAIN[:at], value, *PLAIN[at + 1 :]))) is None
    assert plain_get(pack_fields(PLAIN[:-1])) is None
    assert plain_get(pack_fields((*PLAIN, 1))) is None


@pytest.mark.parametrize(
    ("items", "size", "block"),
    [([0], 1, 4096), ([7], 65536, 65536), ([2, 0, 1], 10_000, 4096), (list(range(960)), 64, 4096)],
)
def test_what_is_expected_is_what_a_reader_reads(items, size, block) -> None:
    payloads = {at: random.Random(at).randbytes(size) for at in items}
    slices = [
        Slice(at, 0, size, 0, True, at.to_bytes(16, "big"), size, block, crc_table(one, block))
        for at, one in payloads.items()
    ]
    count, body = len(items), encode_slices(slices)
    frame = encode_head(FrameType.DATA, 9, body, payload_bytes=count * size, epoch=4, flags=count | FLAG_FINAL)
    head = bytearray(frame[:32])
    records = whole_records(size, block)
    assert records.begin(head, 9) == (count, len(body), True)
    assert records.begin(head, 8) is None
    assert epoch_of(head) == 4
    words = [word for one in slices for word in struct.unpack(f"<{len(one.crcs) // 4}I", one.crcs)]
    assert records.open(head, bytearray(body), count) == (
        tuple(items),
        tuple(one.content_id for one in slices),
        words,
    )
    assert [len(payloads[items[0]][cut]) for cut in records.cuts] in ([], [4096, 4096, 1808])
    for bit in random.Random(1).sample(range(8 * len(body)), 8):
        changed = bytearray(body)
        changed[bit // 8] ^= 1 << bit % 8
        assert records.open(head, changed, count) is None
    if size > 1:
        assert whole_records(size - 1, block).begin(head, 9) is None


@pytest.mark.parametrize(
    "change",
    [
        {"offset": 4096, "record_bytes": 14_096},
        {"length_bytes": 9_999},
        {"status": 3},
        {"last": False},
        {"record_bytes": 10_001},
        {"block_bytes": 8192},
    ],
)
def test_a_slice_that_differs_in_one_field_is_not_what_is_expected(change) -> None:
    good = Slice(1, 0, 10_000, 0, True, bytes(16), 10_000, 4096, bytes(12))
    for at in (0, 1):
        body = encode_slices([good._replace(**change) if one == at else good._replace(item=one) for one in (0, 1)])
        head = encode_head(FrameType.DATA, 9, body, payload_bytes=20_000, flags=2)[:32]
        assert whole_records(10_000, 4096).open(bytearray(head), bytearray(body), 2) is None


def test_many_hits_are_as_if_made_one_by_one() -> None:
    ids = [bytes([at]) * 16 for at in range(5)]
    assert hits_of(7, ids) == [Hit(length_bytes=7, content_id=one) for one in ids]
    assert repr(hits_of(7, ids)[0]) == repr(Hit(length_bytes=7, content_id=ids[0]))
    with pytest.raises(FrozenInstanceError):
        hits_of(7, ids)[0].length_bytes = 8
