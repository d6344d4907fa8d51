"""The lane of single reads against a node that answers as expected or not: right bytes or a miss."""

from __future__ import annotations

import os
import random
import threading

import pytest

from kvstore.errors import Closed, InvalidRequest
from kvstore.limits import DIGEST_BYTES
from kvstore.transport import exchange
from kvstore.types.checksum import crc32c, crc_table
from kvstore.types.results import MissReason
from kvstore.wire import messages as m
from kvstore.wire.header import FrameType, encode_head
from kvstore.wire.plain import GetFrames
from kvstore.wire.slices import FLAG_FINAL, Slice, encode_slices
from kvstore_client import Hit, KVClient, Miss, Stored, namespace_handle

TOKENS = list(range(16 * 4))
SIZES = [50_000, 65_536, 100_000, 300_000]  # one checksum block, one full one, several, long enough to be timed
BLOCK = 65_536


@pytest.fixture(params=["compiled", "in Python"], autouse=True)
def exchanges(request, monkeypatch) -> None:
    """Both halves of `kvstore.transport.exchange`."""
    assert exchange.IS_COMPILED, exchange.HOW
    monkeypatch.setattr(exchange, "IS_COMPILED", request.param == "compiled")


@pytest.fixture
def client(node, exchanges):
    node.is_brief = True
    with KVClient.connect(node.address, deadline=20) as made:
        yield made


@pytest.fixture(params=SIZES)
def stored(request, client, node, opaque, monkeypatch):
    ns = client.namespace(opaque)
    keys = ns.keys(TOKENS)
    payloads = [random.Random(at).randbytes(request.param) for at in range(4)]
    assert all(isinstance(one, Stored) for one in ns.put(keys, payloads))
    assert read(ns, keys, request.param) == payloads[0], "this one opens the connection"
    node.calls.clear()
    node.hellos.clear()
    return ns, keys, payloads


@pytest.fixture
def lane_only(monkeypatch):
    """The general ways are closed."""

    def fail(*_, **__):
        raise AssertionError("this read should not have left the lane")

    monkeypatch.setattr(namespace_handle, "read_straight", fail)
    monkeypatch.setattr(namespace_handle.read_verbs, "load", fail)


def read(ns, keys, size, at=0, **arguments):
    """The bytes of a hit, or the miss."""
    memory = bytearray(b"\xaa" * size)
    (result,) = ns.get_into(keys[at : at + 1], [memory], **arguments)
    return bytes(memory[: result.length_bytes]) if isinstance(result, Hit) else result


def test_hits_take_the_lane_and_are_counted(client, node, stored, lane_only) -> None:
    ns, keys, payloads = stored
    size = len(payloads[0])
    before = client.stats()
    for at in (0, 1, 2, 3, 0):
        assert read(ns, keys, size, at) == payloads[at]
    assert read(ns, keys, size, 1, deadline=2.5) == payloads[1]
    memory = bytearray(size)
    (hit,) = ns.get_into(keys[:1], (memoryview(memory),))
    memory.append(0)  # nobody holds on to it
    assert hit == Hit(length_bytes=size, content_id=next(iter(node.records.values())).content_id)
    after = client.stats()
    assert after["load_items"] - before["load_items"] == after["load_hits"] - before["load_hits"] == 7
    assert after["load_bytes"] - before["load_bytes"] == 7 * size
    assert node.count(FrameType.GET) == 7
    assert not node.hellos


def test_memory_of_every_kind(stored) -> None:
    ns, keys, payloads = stored
    size = len(payloads[0])
    parts = [bytearray(100), bytearray(size - 100)]
    assert isinstance(ns.get_into(keys[:1], [parts])[0], Hit)
    assert b"".join(parts) == payloads[0]
    wide = memoryview(bytearray(2 * size))
    assert isinstance(ns.get_into(keys[1:2], [wide[size:]])[0], Hit)
    assert wide[size:] == payloads[1]
    for bad in (bytes(size), memoryview(bytes(size)), memoryview(bytearray(2 * size))[::2], 5):
        with pytest.raises(InvalidRequest, match="item 0"):
            ns.get_into(keys[:1], [bad])
    for deadline in (float("nan"), float("-inf")):
        with pytest.raises(InvalidRequest):
            read(ns, keys, size, deadline=deadline)
    assert read(ns, keys, size, deadline=0) == Miss(MissReason.DEADLINE)


def test_a_miss_costs_no_second_request(node, stored) -> None:
    ns, keys, payloads = stored
    node.records.pop(list(node.records)[2])
    assert read(ns, keys, len(payloads[0]), 2) == Miss(MissReason.ABSENT)
    assert node.count(FrameType.GET) == 1
    assert read(ns, keys, len(payloads[0]), 1) == payloads[1]
    assert not node.hellos


@pytest.mark.parametrize("change", ["block", "shorter", "longer"])
def test_another_answer_than_expected(client, node, stored, change) -> None:
    ns, keys, payloads = stored
    size = len(payloads[0])
    record = next(iter(node.records.values()))
    expected = payloads[0]
    if change == "block":
        record.block_bytes = 8192
    elif change == "shorter":
        record.payload = expected = payloads[0][:40_000]
    else:
        record.payload = payloads[0] + b"!"
        expected = Miss(MissReason.LAYOUT)
    assert read(ns, keys, size) == expected
    assert node.count(FrameType.GET) == 1
    assert read(ns, keys, size, 1) == payloads[1]


def test_a_garbled_record_is_asked_for_again_on_a_fresh_connection(client, node, stored) -> None:
    ns, keys, payloads = stored

    def garble(slices, parts) -> None:
        node.garble = None
        parts[0] = parts[0][:-1] + bytes([parts[0][-1] ^ 1])

    node.garble = garble
    assert read(ns, keys, len(payloads[0])) == payloads[0]
    assert node.count(FrameType.GET) == 2
    assert len(node.hellos) == 1
    assert (client.stats()["corrupt_blocks"], client.stats()["corrupt_recovered"]) == (1, 1)


@pytest.mark.parametrize("stored", [65_536], indirect=True)
def test_a_newer_view_is_noticed(node, stored) -> None:
    ns, keys, payloads = stored

    def script(link, frame) -> bool:
        if frame.type is FrameType.GET:
            head, payload = answer_of(link, frame)
            head[16:24] = (9).to_bytes(8, "little")
            mend(head)
            link.socket.sendall(head + payload)
        return frame.type is FrameType.GET

    node.script = script
    node.epoch = 9
    assert read(ns, keys, 65_536) == payloads[0]
    assert not node.count(FrameType.VIEW)
    assert read(ns, keys, 65_536, 1) == payloads[1]
    assert node.count(FrameType.VIEW) == 1


def answer_of(link, frame) -> tuple[bytearray, bytes]:
    get = m.Get.decode(frame.body)
    record = link.node.records[get.namespace, get.keys]
    size = len(record.payload)
    one = Slice(0, 0, size, 0, True, record.content_id, size, BLOCK, crc_table(record.payload, BLOCK))
    head = encode_head(FrameType.DATA, frame.request_id, encode_slices([one]), payload_bytes=size, flags=1 | FLAG_FINAL)
    return bytearray(head), record.payload


def mend(head: bytearray) -> None:
    head[28:32] = crc32c(bytes(head[32:]), crc32c(bytes(head[:28]))).to_bytes(4, "little")


@pytest.mark.parametrize("stored", [65_536], indirect=True)
@pytest.mark.parametrize("at", range(84))
@pytest.mark.parametrize("mended", [False, True])
def test_a_changed_head_is_never_believed(node, stored, at, mended) -> None:
    """Every byte of header, slice and CRC table: what is not the truth is a miss, asked for again, or still right."""
    ns, keys, payloads = stored
    lies = [1]

    def script(link, frame) -> bool:
        if frame.type is not FrameType.GET or not lies:
            return False
        lies.pop()
        head, payload = answer_of(link, frame)
        head[at] ^= 0x40
        if mended and not 28 <= at < 32:
            mend(head)
        link.socket.sendall(head + payload)
        link.kill()
        return True

    node.script = script
    found = read(ns, keys, 65_536, deadline=5)
    assert found == payloads[0] or isinstance(found, Miss)


@pytest.mark.parametrize("then", ["break", "stall"])
@pytest.mark.parametrize("sent", [0, 1, 31, 32, 33, 83, 84, 85, 10_000])
def test_an_answer_that_does_not_come_whole(client, node, stored, sent, then) -> None:
    ns, keys, payloads = stored
    go_on = threading.Event()
    lies = [1]

    def script(link, frame) -> bool:
        if frame.type is not FrameType.GET or not lies:
            return False
        lies.pop()
        head, payload = answer_of(link, frame)
        link.socket.sendall((head + payload)[:sent])
        if then == "break":
            link.kill()
        else:
            go_on.wait(20)
        return True

    node.script = script
    if then == "break":
        assert read(ns, keys, len(payloads[0])) == payloads[0]
        assert client.stats()["connections_broken"] == 1
        return
    assert read(ns, keys, len(payloads[0]), deadline=0.2) == Miss(MissReason.DEADLINE)
    go_on.set()
    assert read(ns, keys, len(payloads[0])) == payloads[0]


@pytest.mark.parametrize("stored", [65_536], indirect=True)
def test_an_answer_in_drops(node, stored, lane_only) -> None:
    ns, keys, payloads = stored

    def script(link, frame) -> bool:
        if frame.type is FrameType.GET:
            head, payload = answer_of(link, frame)
            data = bytes(head + payload)
            for at in range(0, len(data), 20_000):
                link.socket.sendall(data[at : at + 20_000])
        return frame.type is FrameType.GET

    node.script = script
    assert [read(ns, keys, 65_536, at) for at in range(4)] == payloads


@pytest.mark.parametrize("stored", [65_536], indirect=True)
def test_errors_restarts_and_the_end(client, node, stored) -> None:
    ns, keys, payloads = stored

    def script(link, frame) -> bool:
        if frame.type is FrameType.GET:
            link.send(frame, m.ErrorReply(code=15, text="no", closing=False))
        return frame.type is FrameType.GET

    node.script = script
    assert read(ns, keys, 65_536) == Miss(MissReason.UNAVAILABLE)
    node.script = None
    assert read(ns, keys, 65_536) == payloads[0]
    assert not node.hellos
    node.restart()
    assert read(ns, keys, 65_536) == payloads[0]
    assert client.stats()["restarts_noticed"] == 1
    client.close()
    with pytest.raises(Closed):
        read(ns, keys, 65_536)


@pytest.mark.parametrize("stored", [65_536], indirect=True)
def test_a_forked_child_has_a_connection_of_its_own(node, stored) -> None:
    ns, keys, payloads = stored
    pid = os.fork()
    if pid == 0:
        os._exit(0 if read(ns, keys, 65_536) == payloads[0] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert len(node.hellos) >= 1
    assert read(ns, keys, 65_536) == payloads[0]


@pytest.mark.parametrize("stored", [65_536], indirect=True)
def test_threads_share_the_lane(node, stored) -> None:
    ns, keys, payloads = stored
    wrong: list[int] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(100):
            at = rng.randrange(4)
            if read(ns, keys, 65_536, at) != payloads[at]:
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("stored", [65_536], indirect=True)
def test_closing_the_client_ends_a_read_that_waits(client, node, stored) -> None:
    ns, keys, _ = stored
    asked, go_on = threading.Event(), threading.Event()
    ends: list[BaseException] = []

    def script(link, frame) -> bool:
        if frame.type is FrameType.GET:
            asked.set()
            go_on.wait(20)
        return frame.type is FrameType.GET

    def work() -> None:
        try:
            read(ns, keys, 65_536)
        except Closed as error:
            ends.append(error)

    node.script = script
    thread = threading.Thread(target=work)
    thread.start()
    assert asked.wait(20)
    client.close()
    thread.join(20)
    go_on.set()
    assert ends


def test_the_quick_request_is_that_of_the_message() -> None:
    for deadline_ns in (1, 70_000, 1 << 20, 1 << 31, 1 << 33, 30_000_000_000):
        frames = GetFrames(b"n" * 32, deadline_ns)
        for request_id, epoch in ((1, 0), (0xFFFF_FFFF, 1 << 40)):
            key = os.urandom(DIGEST_BYTES)
            body = m.Get(namespace=b"n" * 32, keys=key, deadline_ns=deadline_ns).encode()
            assert frames.encode(key, request_id, epoch) == encode_head(FrameType.GET, request_id, body, epoch=epoch)
