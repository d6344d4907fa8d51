"""Nodes that garble or lie: a miss is legal, a wrong byte or an exception never."""

from __future__ import annotations

import random
import struct
import time

import pytest

from kvstore.types.checksum import crc_table
from kvstore.types.results import MissReason
from kvstore.wire import messages as m
from kvstore.wire.header import FrameType, encode_head
from kvstore.wire.slices import Slice
from kvstore_client import Hit, KVClient, Miss, Stored
from tests.client.stored_chunks import SIZE, TOKENS, check, memories, prefix

BLOCK = 65_536


def flip_item(item: int, times: list[int]):
    def garble(slices, payloads) -> None:
        if slices[0].item == item and payloads and times[0] > 0:
            times[0] -= 1
            payloads[0] = payloads[0][:-1] + bytes([payloads[0][-1] ^ 1])

    return garble


def test_one_garbled_block_is_asked_for_again_and_is_right(client, node, stored) -> None:
    ns, keys, payloads = stored
    node.garble = flip_item(5, [1])
    opened = len(node.hellos)
    memory = memories()
    results = ns.get_into(keys, memory)
    assert prefix(results) == 8
    check(results, memory, payloads)
    assert node.count(FrameType.GET) == 2
    assert len(node.hellos) == opened + 2, "the second try takes a fresh connection"
    assert client.stats()["corrupt_blocks"] == 1
    assert client.stats()["corrupt_recovered"] == 1


def test_a_block_that_stays_garbled_is_a_counted_miss(client, node, stored) -> None:
    ns, keys, payloads = stored
    node.garble = lambda slices, payloads: flip_item(0, [1])(slices, payloads) if len(payloads[0]) == 34_464 else None
    memory = memories()
    results = ns.get_into(keys[:1], memory[:1])
    assert isinstance(results[0], Hit), "the last slice is garbled only when slices are that small"
    node.slice_bytes = BLOCK
    results = ns.get_into(keys[:1], memory[:1])
    assert results == [Miss(MissReason.CORRUPT)]
    assert client.stats()["corrupt_blocks"] == 2
    assert client.stats()["load_misses.corrupt"] == 1
    node.garble = None
    assert isinstance(ns.get_into(keys[:1], memory[:1])[0], Hit)
    check([Hit(length_bytes=SIZE)], memory[:1], payloads[:1])


def answer_item_5_with(status: int):
    def script(link, frame) -> bool:
        if frame.type is not FrameType.GET:
            return False
        node, get = link.node, m.Get.decode(frame.body)
        statuses = bytearray(len(get.keys) // 32)
        for item in range(len(statuses)):
            record = node.records[get.namespace, get.keys[item * 32 : item * 32 + 32]]
            if item == 5:
                statuses[item] = status
                link.send_data(frame, [Slice(item, 0, 0, status, True, bytes(16), 0, 0, b"")], [])
            else:
                link._send_record(frame, item, record, [(0, SIZE)])
        link.send(frame, m.End(statuses=bytes(statuses)))
        return True

    return script


@pytest.mark.parametrize("reason", list(MissReason))
def test_a_failed_chunk_has_its_reason_and_the_prefix_ends_before_it(node, stored, reason) -> None:
    ns, keys, payloads = stored
    node.script = answer_item_5_with(reason)
    memory = memories()
    results = ns.get_into(keys, memory)
    assert prefix(results) == 5
    assert results[5] == Miss(reason)
    assert [isinstance(one, Hit) for one in results[6:]] == [True, True]
    check(results, memory, payloads)


def lie(kind: str):
    """An answer to GET that is well formed and wrong."""

    def script(link, frame) -> bool:
        if frame.type is not FrameType.GET:
            return False
        get = m.Get.decode(frame.body)
        count = len(get.keys) // 32
        record = link.node.records[get.namespace, get.keys[:32]]
        payload, total, ident = record.payload, SIZE, record.content_id

        def send(
            item: int, low: int, high: int, *, last: bool, content_id: bytes = ident, crcs: bytes | None = None
        ) -> None:
            data = payload[low:high]
            table = crc_table(data, BLOCK) if crcs is None else crcs
            one = Slice(item, low, high - low, 0, last, content_id, total, BLOCK, table)
            link.send_data(frame, [one], [data])

        ends = True
        if kind == "other record length":
            total, payload = SIZE + 5000, payload + bytes(5000)
            send(0, 0, total, last=True)
        elif kind == "two copies":
            send(0, 0, BLOCK, last=False)
            send(0, BLOCK, SIZE, last=True, content_id=bytes(range(16)))
        elif kind == "hole":
            send(0, BLOCK, SIZE, last=True)
        elif kind == "the same slice twice":
            send(0, 0, BLOCK, last=False)
            send(0, 0, BLOCK, last=True)
        elif kind == "a slice after the last":
            slices = [
                Slice(0, 0, SIZE, 0, True, ident, SIZE, BLOCK, crc_table(payload, BLOCK)),
                Slice(0, 0, BLOCK, 0, False, ident, SIZE, BLOCK, crc_table(bytes(BLOCK), BLOCK)),
            ]
            link.send_data(frame, slices, [payload, bytes(BLOCK)])
        elif kind == "no checksums":
            send(0, 0, SIZE, last=True, crcs=b"")
        elif kind == "item out of range":
            send(count, 0, SIZE, last=True)
        elif kind == "end without data":
            pass
        elif kind == "end of too few":
            link.send(frame, m.End(statuses=b""))
            return True
        elif kind == "slice inside a block":
            send(0, 0, 100, last=False)
        elif kind == "wrong frame":
            link.send(frame, m.MatchReply(statuses=b"", pin_id=0, pinned=False, hit_bytes=0, load_ns=0))
            return True
        elif kind == "garbage":
            link.socket.sendall(random.Random(1).randbytes(5000))
            ends = False
        elif kind == "http":
            link.socket.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10)
            ends = False
        elif kind == "bad header checksum":
            head = bytearray(encode_head(FrameType.END, frame.request_id, m.End(statuses=bytes(count)).encode()))
            head[-1] ^= 1
            link.socket.sendall(head)
            ends = False
        elif kind == "huge body":
            link.socket.sendall(struct.pack("<2sBBIIIQII", b"KV", 1, 13, frame.request_id, 1 << 31, 0, 0, 0, 0))
            ends = False
        elif kind == "unknown status":
            link.send(frame, m.End(statuses=bytes([200]) * count))
            return True
        if ends:
            link.send(frame, m.End(statuses=bytes(count)))
        return True

    return script


LIES = {
    "two copies": MissReason.CORRUPT,
    "hole": MissReason.UNAVAILABLE,
    "the same slice twice": MissReason.UNAVAILABLE,
    "a slice after the last": MissReason.UNAVAILABLE,
    "no checksums": MissReason.UNAVAILABLE,
    "item out of range": MissReason.UNAVAILABLE,
    "end without data": MissReason.UNAVAILABLE,
    "end of too few": MissReason.UNAVAILABLE,
    "slice inside a block": MissReason.UNAVAILABLE,
    "wrong frame": MissReason.UNAVAILABLE,
    "garbage": MissReason.UNAVAILABLE,
    "http": MissReason.UNAVAILABLE,
    "bad header checksum": MissReason.UNAVAILABLE,
    "huge body": MissReason.UNAVAILABLE,
    "unknown status": MissReason.UNAVAILABLE,
}


@pytest.mark.parametrize("kind", LIES)
def test_a_lying_node_gives_misses_never_hits(node, stored, kind) -> None:
    ns, keys, payloads = stored
    node.script = lie(kind)
    memory = memories()
    assert ns.get_into(keys[:1], memory[:1], deadline=5) == [Miss(LIES[kind])]
    node.script = None
    node.restart(forget_manifests=False)
    results = eventually_hits(ns, keys, memory)
    check(results, memory, payloads)


def eventually_hits(ns, keys, memory):
    """The breaker may be open for a moment after so many broken answers."""
    until = time.monotonic() + 20
    while True:
        results = ns.get_into(keys, memory)
        if prefix(results) == len(results) or time.monotonic() > until:
            assert prefix(results) == len(results)
            return results
        time.sleep(0.02)


def test_another_record_length_is_a_layout_miss(client, node) -> None:
    from kvstore.types.layout import KVLayout
    from kvstore.types.namespace import Namespace
    from kvstore.types.part import Part

    layout = KVLayout(chunk_tokens=16, dtype="x", layers=1, parts=(Part(name="kv", entry_bytes=SIZE // 16),))
    ns = client.namespace(Namespace(tenant="t", model="m", weights="w", layout=layout))
    keys = ns.keys(TOKENS[:16])
    assert layout.chunk_bytes == SIZE
    assert isinstance(ns.put(keys, [bytes(SIZE)])[0], Stored)
    node.script = lie("other record length")
    assert ns.get_into(keys, [bytearray(SIZE)]) == [Miss(MissReason.LAYOUT)]
    assert ns.get_into(keys, [bytearray(10)], ranges=[(0, 10)]) == [Miss(MissReason.LAYOUT)]


class Recorder:
    """Stands in for a socket and keeps what is sent."""

    def __init__(self, whole: bytearray) -> None:
        self._whole = whole

    def sendall(self, data: bytes) -> None:
        self._whole += data


@pytest.mark.parametrize("kind", ["flip", "cut", "insert"])
def test_no_damage_of_the_stream_gives_a_wrong_byte(node, opaque, kind) -> None:
    """One byte of a whole answer is changed, lost or added, anywhere in headers, bodies or payload."""
    with KVClient.connect(node.address) as writer:
        ns = writer.namespace(opaque)
        keys = ns.keys(TOKENS[:64])
        payloads = [random.Random(at).randbytes(9000 * at) for at in range(4)]
        assert all(isinstance(one, Stored) for one in ns.put(keys, payloads))
    dice = random.Random(kind)
    damaged = [0]

    def script(link, frame) -> bool:
        if frame.type is not FrameType.GET or damaged[0] <= 0:
            return False
        damaged[0] -= 1
        whole = bytearray()
        real, link.socket = link.socket, Recorder(whole)
        link.answer(frame)
        link.socket = real
        at = dice.choice([dice.randrange(len(whole)), dice.randrange(200)])
        if kind == "flip":
            whole[at] ^= 1 << dice.randrange(8)
        elif kind == "cut":
            del whole[at]
        else:
            whole.insert(at, dice.randrange(256))
        real.sendall(whole)
        return True

    node.script = script
    for _ in range(60):
        with KVClient.connect(node.address) as client:
            damaged[0] = dice.choice([1, 1, 3])
            memory = [bytearray(9000 * at) for at in range(4)]
            results = client.namespace(opaque).get_into(keys, memory, deadline=1)
            for result, got, payload in zip(results, memory, payloads, strict=True):
                if isinstance(result, Hit):
                    assert bytes(got) == payload
                else:
                    assert result.reason in (MissReason.UNAVAILABLE, MissReason.CORRUPT, MissReason.DEADLINE)
