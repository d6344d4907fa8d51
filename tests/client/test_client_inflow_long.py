"""The straight way of reads of records that are longer than a slice, and where it hands over."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvstore.types.checksum import crc_table
from kvstore.types.layout import KVLayout
from kvstore.types.results import MissReason
from kvstore.wire import messages as m
from kvstore.wire.header import FrameType, encode_head
from kvstore.wire.slices import FLAG_FINAL, Slice, encode_slices
from kvstore_client import Hit, KVClient, Miss, Stored, read_verbs

COUNT = 3
SIZE = 2_500_000
BLOCK = 65_536
STEP = 15 * BLOCK
CUTS = [(at, min(at + STEP, SIZE)) for at in range(0, SIZE, STEP)]


@pytest.fixture
def client(node):
    node.is_brief = True
    with KVClient.connect(node.address, deadline=20) as made:
        yield made


@pytest.fixture
def stored(client, node, opaque):
    layout = KVLayout.opaque(chunk_bytes=3_000_000, chunk_tokens=16)
    ns = client.namespace(replace(opaque, layout=layout))
    keys = ns.keys(list(range(16 * COUNT)))
    payloads = [random.Random(at).randbytes(SIZE) for at in range(COUNT)]
    assert all(isinstance(one, Stored) for one in ns.put(keys, payloads))
    assert all(ns.contains(keys)), "this one opens the connection"
    node.is_brief = False  # it answers with slices and END, if it isn't told what to do
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


def frame_of(link, request, pieces, *, is_final: bool = False, change=None) -> bytes:
    """A DATA frame of (item, low, high) pieces."""
    get = m.Get.decode(request.body)
    slices, payloads = [], []
    for item, low, high in pieces:
        record = link.node.records[get.namespace, get.keys[32 * item : 32 * item + 32]]
        part, total = record.payload[low:high], len(record.payload)
        crcs = crc_table(part, record.block_bytes)
        slices.append(
            Slice(item, low, high - low, 0, high == total, record.content_id, total, record.block_bytes, crcs)
        )
        payloads.append(part)
    if change is not None:
        change(slices, payloads)
    payload = b"".join(payloads)
    flags = len(slices) | (FLAG_FINAL if is_final else 0)
    body = encode_slices(slices)
    return encode_head(FrameType.DATA, request.request_id, body, payload_bytes=len(payload), flags=flags) + payload


def answer_with(node, *steps) -> list[bytes]:
    """The first GET is answered by frames, made by each of `steps`; the keys of each GET from now on."""
    asked: list[bytes] = []

    def script(link, frame) -> bool:
        if frame.type is not FrameType.GET:
            return False
        asked.append(m.Get.decode(frame.body).keys)
        if len(asked) > 1:
            return False
        for step in steps:
            data = step(link, frame)
            if data is None:
                link.socket.close()
            else:
                link.socket.sendall(data)
        return True

    node.script = script
    return asked


def pieces_of(*items: int) -> list[tuple[int, int, int]]:
    return [(item, low, high) for item in items for low, high in CUTS]


def frames(pieces, *, per_frame: int = 1, is_whole: bool = True, change=None):
    groups = [pieces[at : at + per_frame] for at in range(0, len(pieces), per_frame)]

    def step(link, get) -> bytes:
        return b"".join(
            frame_of(link, get, group, is_final=is_whole and group is groups[-1], change=change) for group in groups
        )

    return step


IN_TURNS = [(item, low, high) for low, high in CUTS for item in range(COUNT)]


@pytest.mark.parametrize("pieces", [pieces_of(0, 1, 2), pieces_of(2, 0, 1), IN_TURNS])
@pytest.mark.parametrize("per_frame", [1, 2])
def test_slices_in_any_cut_and_order_of_records(node, stored, monkeypatch, pieces, per_frame) -> None:
    ns, keys, payloads = stored
    monkeypatch.setattr(read_verbs, "load", None)
    asked = answer_with(node, frames(pieces, per_frame=per_frame))
    results, data = read(ns, keys)
    assert data == payloads
    assert [one.content_id for one in results] == [record.content_id for record in node.records.values()]
    assert len(asked) == 1


@pytest.mark.parametrize("whole", [0, 1, 2, 4, 7, 8])
def test_a_connection_that_breaks_keeps_the_records_that_are_whole(client, node, stored, whole) -> None:
    ns, keys, payloads = stored
    asked = answer_with(node, frames(pieces_of(1, 0, 2)[:whole], is_whole=False), lambda *_: None)
    assert read(ns, keys)[1] == payloads
    kept = [1, 0, 2][: whole // len(CUTS)]
    assert asked[1] == b"".join(keys.digests[32 * at : 32 * at + 32] for at in range(COUNT) if at not in kept)
    assert client.stats()["connections_broken"] == 1


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_garbled_slice_costs_its_record_alone(client, node, stored, at) -> None:
    ns, keys, payloads = stored

    def garble(slices, parts) -> None:
        if slices[0].item == 1 and slices[0].offset == CUTS[at][0]:
            parts[0] = parts[0][:-1] + bytes([parts[0][-1] ^ 1])

    asked = answer_with(node, frames(IN_TURNS, change=garble))
    assert read(ns, keys)[1] == payloads
    assert asked[1:] == [keys.digests[32:64]]
    assert (client.stats()["corrupt_blocks"], client.stats()["corrupt_recovered"]) == (1, 1)


def test_a_miss_in_the_middle_of_a_record(node, stored) -> None:
    """The node could not read on: END says so, and the first slices were for nothing."""
    ns, keys, payloads = stored

    def end(_, get) -> bytes:
        body = m.End(statuses=bytes([0, MissReason.IO, 0])).encode()
        return encode_head(FrameType.END, get.request_id, body)

    pieces = [one for one in IN_TURNS if one[0] != 1 or one[1] == 0]
    asked = answer_with(node, frames(pieces, is_whole=False), end)
    results, data = read(ns, keys)
    assert results[1] == Miss(MissReason.IO)
    assert (data[0], data[2]) == (payloads[0], payloads[2])
    assert len(asked) == 1
    node.script = None
    assert read(ns, keys)[1] == payloads
    assert not node.hellos


def test_a_record_goes_on_the_general_way_from_where_it_stands(node, stored) -> None:
    """A slice with another record length stops the straight way; that of record 0 is taken on from its third slice."""
    ns, keys, payloads = stored
    odd = list(node.records.values())[2]
    odd.payload = payloads[2][:2_000_000]
    pieces = [*pieces_of(0)[:2], (2, 0, STEP), *pieces_of(0)[2:], *pieces_of(1), (2, STEP, 2 * STEP)]
    asked = answer_with(node, frames([*pieces, (2, 2 * STEP, 2_000_000)]))
    assert read(ns, keys)[1] == [*payloads[:2], odd.payload]
    assert len(asked) == 1


@pytest.mark.parametrize("change", ["copy", "offset", "gap", "last", "again"])
def test_slices_that_do_not_fit_together_are_never_a_hit(node, stored, change) -> None:
    ns, keys, payloads = stored

    def lie(slices, parts) -> None:
        one = slices[0]
        if one.item == 1 and one.offset == STEP:
            if change == "copy":
                slices[0] = one._replace(content_id=bytes(16))
            elif change == "last":
                slices[0] = one._replace(last=True)
            elif change == "offset":
                slices[0] = one._replace(offset=0)
            else:
                at = 2 * STEP if change == "gap" else 0
                end = min(at + STEP, SIZE)
                parts[0] = payloads[1][at:end]
                slices[0] = one._replace(
                    offset=at, length_bytes=end - at, crcs=crc_table(parts[0], BLOCK), last=end == SIZE
                )

    answer_with(node, frames(pieces_of(0, 1, 2), change=lie), lambda *_: None)
    for result, got, right in zip(*read(ns, keys), payloads, strict=True):
        assert not isinstance(result, Hit) or got == right
    node.script = None
    assert read(ns, keys)[1] == payloads
