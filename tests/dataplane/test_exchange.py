"""The two ends of a single read, compiled and in Python, in every pairing: the same frames, the same judgement."""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from kvstore.transport import _exchange, exchange
from kvstore.types.checksum import crc_table
from kvstore.wire.header import FrameType, encode_head
from kvstore.wire.messages import Get
from kvstore.wire.plain import PLAIN_GETS, PLAIN_GETS_INTO, data_head, placed_head, record_head
from kvstore.wire.shared import PLACE_BYTES, encode_place, get_into
from kvstore.wire.slices import FLAG_FINAL, Slice, encode_slices

SIZE, BLOCK, NS, DEADLINE_NS = 70_000, 4096, b"n" * 32, 30_000_000_000
PAYLOAD = os.urandom(SIZE)
KEYS = [os.urandom(32) for _ in range(3)]


@dataclass(frozen=True)
class Facts:
    record_bytes: int = SIZE
    block_bytes: int = BLOCK
    crcs: bytes = crc_table(PAYLOAD, BLOCK)
    content_id: bytes = b"c" * 16


class Ends:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, client: bool, node: bool) -> None:
        self.near, self.far = socket.socketpair()
        self.far.setblocking(False)
        monkeypatch.setattr(exchange, "IS_COMPILED", client)
        self.handle = exchange.handle_of(self.near)
        self.client = exchange.read_exchange(NS, DEADLINE_NS, record_bytes=SIZE, block_bytes=BLOCK)
        self.placed = exchange.read_exchange(NS, DEADLINE_NS, record_bytes=SIZE, block_bytes=BLOCK, is_placed=True)
        monkeypatch.setattr(exchange, "IS_COMPILED", node)
        self.view = memoryview(bytearray(8192))
        self.node = exchange.answer_exchange(self.far, self.view)

    def ask(self, key: bytes, request_id: int, epoch: int = 3) -> tuple[int, int, bytes, bytes] | int:
        assert self.client.send(self.handle, request_id, epoch, key, b"")
        return self.node.receive()

    def ask_whole(self, request_id: int, place: bytes, wait_ns: int = DEADLINE_NS) -> object:
        seconds, rest_ns = divmod(wait_ns, 1_000_000_000)
        self.near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", seconds, rest_ns // 1000))
        return self.placed.ask(self.handle, request_id, 3, KEYS[0], place, wait_ns)

    def ask_into(self, key: bytes, request_id: int, place: bytes) -> tuple[int, int, bytes, bytes] | int:
        assert self.placed.send(self.handle, request_id, 3, key, place)
        return self.node.receive()


@pytest.fixture(params=[(a, b) for a in (True, False) for b in (True, False)], ids=str)
def ends(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    made = Ends(monkeypatch, *request.param)
    yield made
    made.near.close()
    made.far.close()


def test_a_request_is_known_once_it_was_learned(ends: Ends) -> None:
    size = PLAIN_GETS[1].frame_bytes
    assert ends.ask(KEYS[0], 7) == size
    body = Get(namespace=NS, keys=KEYS[0], deadline_ns=DEADLINE_NS).encode()
    assert ends.view[:size] == encode_head(FrameType.GET, 7, body, epoch=3)
    ends.node.learn(size, 0)
    for request_id, key in zip((8, 0xFFFF_FFFF, 1), KEYS, strict=True):
        assert ends.ask(key, request_id) == (size, request_id, key, b"")
    assert ends.ask(KEYS[0], 9, epoch=4) == size, "another view is for somebody else to judge"
    frame = bytes(ends.view[:size])
    ends.node.learn(size, 0)
    for at in range(size):
        ends.near.sendall(frame[:at] + bytes([frame[at] ^ 8]) + frame[at + 1 :])
        assert ends.node.receive() == size, at
    ends.near.sendall(frame + b"!")
    assert ends.node.receive() == size + 1
    ends.near.sendall(frame[:-1])
    assert ends.node.receive() == size - 1
    with pytest.raises(BlockingIOError):
        ends.node.receive()
    ends.near.shutdown(socket.SHUT_WR)
    assert ends.node.receive() == 0


def test_a_request_with_a_place_is_known_whatever_the_place(ends: Ends) -> None:
    size = PLAIN_GETS_INTO[1].frame_bytes
    place = encode_place(1, 4096, SIZE)
    assert ends.ask_into(KEYS[0], 7, place) == size
    get = Get(namespace=NS, keys=KEYS[0], deadline_ns=DEADLINE_NS)
    assert ends.view[:size] == encode_head(FrameType.GET_INTO, 7, get_into(get, place).encode(), epoch=3)
    ends.node.learn(size, PLACE_BYTES)
    ends.ask(KEYS[0], 8)
    ends.node.learn(PLAIN_GETS[1].frame_bytes, 0)
    for request_id, key in zip((8, 0xFFFF_FFFF, 1), KEYS, strict=True):
        place = os.urandom(PLACE_BYTES)
        assert ends.ask_into(key, request_id, place) == (size, request_id, key, place)
        assert ends.ask(key, request_id) == (PLAIN_GETS[1].frame_bytes, request_id, key, b"")
    ends.ask_into(KEYS[0], 9, place)
    frame = bytes(ends.view[:size])
    for at in range(size):
        ends.near.sendall(frame[:at] + bytes([frame[at] ^ 8]) + frame[at + 1 :])
        assert ends.node.receive() == size, at


def test_an_answer_without_its_payload_is_judged_as_one_with_it(ends: Ends) -> None:
    head, nothing = placed_head(record_head(Facts())), memoryview(bytearray(0))
    assert ends.node.answer(head, memoryview(b""), 5, 9) == len(head)
    assert ends.placed.receive(ends.handle, 5, nothing) == (0, 9, Facts.content_id, Facts.crcs)
    one = Slice(0, 0, SIZE, 0, True, Facts.content_id, SIZE, BLOCK, Facts.crcs)
    sent = encode_head(FrameType.PLACED, 5, encode_slices([one]), epoch=9, flags=1 | FLAG_FINAL)
    assert sent == data_head(head, 5, 9)
    for at in range(len(sent)):
        changed = sent[:at] + bytes([sent[at] ^ 8]) + sent[at + 1 :]
        ends.far.sendall(changed)
        is_field = not (16 <= at < 24 or 28 <= at < 32 or 52 <= at < 68 or at >= 80)
        assert ends.placed.receive(ends.handle, 5, nothing) == (changed if is_field else None), at
    for length in (1, 31, 32, len(sent) - 1):
        ends.far.sendall(sent[:length])
        ends.far.shutdown(socket.SHUT_WR) if length == len(sent) - 1 else None
        assert ends.placed.receive(ends.handle, 5, nothing) == sent[:length]
    assert ends.placed.receive(ends.handle, 5, nothing) == b""


def test_a_record_is_copied_to_its_place_before_it_is_told_of(ends: Ends) -> None:
    into, place = memoryview(bytearray(SIZE)), encode_place(1, 4096, SIZE)
    asked = []

    def answer() -> None:
        while not select.select([ends.far], [], [], 0.01)[0]:
            pass
        asked.append(ends.node.receive())
        assert ends.node.place(record_head(Facts()), memoryview(PAYLOAD), into, 5, 9) == len(record_head(Facts()))

    node = threading.Thread(target=answer)
    node.start()
    assert ends.ask_whole(5, place) == (0, 9, Facts.content_id, Facts.crcs)
    node.join()
    assert into == PAYLOAD
    assert asked == [PLAIN_GETS_INTO[1].frame_bytes]
    with pytest.raises(ValueError):
        ends.node.place(record_head(Facts()), memoryview(PAYLOAD), into[1:], 5, 9)


def test_what_is_asked_for_in_one_step_is_judged_as_in_two(ends: Ends) -> None:
    place = encode_place(1, 4096, SIZE)
    sent = data_head(placed_head(record_head(Facts())), 5, 9)
    for answer in (sent, sent[:-1], b"!" + sent[1:], sent[:-1] + bytes([sent[-1] ^ 1])):
        ends.far.sendall(answer)
        found = ends.ask_whole(5, place)
        ends.far.sendall(answer)
        assert found == ends.placed.receive(ends.handle, 5, memoryview(bytearray(0)))
    with pytest.raises(BlockingIOError):
        ends.ask_whole(5, place, wait_ns=1_000_000)
    ends.far.shutdown(socket.SHUT_WR)
    assert ends.ask_whole(5, place) == b""
    ends.near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    found = None
    while found is None or found == b"":
        found = ends.ask_whole(5, place)
    assert found is False, "nobody reads the requests any more"
    ends.far.close()
    with pytest.raises(OSError):
        ends.ask_whole(5, place)


def test_a_signal_ends_the_wait_for_an_answer(ends: Ends) -> None:
    def raise_it(_: int, __: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, raise_it)
    try:
        main = threading.main_thread().ident
        assert main is not None
        for wait_s in (0.0, 0.02):  # while it looks, and while it sleeps
            with pytest.raises(KeyboardInterrupt):  # noqa: PT012 -- it may come before the call
                threading.Timer(wait_s, signal.pthread_kill, (main, signal.SIGUSR1)).start()
                ends.ask_whole(5, encode_place(1, 4096, SIZE), wait_ns=60_000_000_000)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_an_answer_is_taken_whole_or_handed_back_as_it_came(ends: Ends) -> None:
    head, memory = record_head(Facts()), bytearray(SIZE)
    assert ends.node.answer(head, memoryview(PAYLOAD), 5, 9) == len(head) + SIZE
    found = ends.client.receive(ends.handle, 5, memoryview(memory))
    assert isinstance(found, tuple)
    assert found[1:] == (9, Facts.content_id, Facts.crcs)
    received = found[0]
    while received < SIZE:  # a pair of sockets may pass it in pieces
        received += ends.near.recv_into(memoryview(memory)[received:])
    assert memory == PAYLOAD

    facts = Facts()
    one = Slice(0, 0, SIZE, 0, True, facts.content_id, SIZE, BLOCK, facts.crcs)
    sent = encode_head(FrameType.DATA, 5, encode_slices([one]), payload_bytes=SIZE, epoch=9, flags=1 | FLAG_FINAL)
    for at in range(len(sent)):
        changed = sent[:at] + bytes([sent[at] ^ 8]) + sent[at + 1 :]
        ends.far.sendall(changed + b"12345")
        answer = ends.client.receive(ends.handle, 5, memoryview(memory))
        is_field = not (16 <= at < 24 or 28 <= at < 32 or 52 <= at < 68 or at >= 80)
        assert answer == (changed + b"12345" if is_field else None), at
    for length in (1, 31, 32, len(sent) - 1):
        ends.far.sendall(sent[:length])
        assert ends.client.receive(ends.handle, 5, memoryview(memory)) == sent[:length]
    ends.far.shutdown(socket.SHUT_WR)
    assert ends.client.receive(ends.handle, 5, memoryview(memory)) == b""


def test_sockets_that_take_nothing_give_nothing_or_are_gone(ends: Ends) -> None:
    ends.near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 0, 1000))
    with pytest.raises(BlockingIOError):
        ends.client.receive(ends.handle, 1, memoryview(bytearray(SIZE)))
    big = memoryview(bytearray(4 << 20))
    assert 0 < ends.node.answer(record_head(Facts()), big, 1, 0) < len(big)
    with pytest.raises(BlockingIOError):
        [ends.node.answer(record_head(Facts()), big, 1, 0) for _ in range(1000)]
    ends.far.close()
    with pytest.raises(OSError):
        ends.client.send(ends.handle, 1, 0, KEYS[0], b"")


def test_the_compiled_part_refuses_what_it_has_no_room_for() -> None:
    head, frame, view = record_head(Facts()), bytes(200), memoryview(bytearray(4096))
    for bad in (
        {"frame": frame, "head": head[:80], "key_at": 67, "place_bytes": 0, "record_bytes": 1, "look_ns": 0},
        {"frame": frame, "head": bytes(5000), "key_at": 67, "place_bytes": 0, "record_bytes": 1, "look_ns": 0},
        {"frame": bytes(90), "head": head, "key_at": 67, "place_bytes": 0, "record_bytes": 1, "look_ns": 0},
        {"frame": frame, "head": head, "key_at": 8, "place_bytes": 0, "record_bytes": 1, "look_ns": 0},
        {"frame": frame, "head": head, "key_at": 67, "place_bytes": 0, "record_bytes": 0, "look_ns": 0},
        {"frame": frame, "head": head, "key_at": 67, "place_bytes": -1, "record_bytes": 0, "look_ns": 0},
        {"frame": frame, "head": head, "key_at": 67, "place_bytes": 102, "record_bytes": 0, "look_ns": 0},
    ):
        with pytest.raises(ValueError, match="frames of one record"):
            _exchange.ReadExchange(**bad)
    made = _exchange.ReadExchange(frame=frame, head=head, key_at=67, place_bytes=0, record_bytes=8, look_ns=0)
    with pytest.raises(ValueError, match="another length"):
        made.receive(0, 1, memoryview(bytearray(9)))
    with pytest.raises(ValueError, match="32 bytes"):
        made.send(0, 1, 2, b"short", b"")
    with pytest.raises(ValueError, match="behind the answer"):
        made.ask(0, 1, 2, KEYS[0], b"", 1)
    with pytest.raises(ValueError, match="a place"):
        made.send(0, 1, 2, KEYS[0], b"place")
    with pytest.raises(BufferError):
        made.receive(0, 1, memoryview(bytes(8)))
    node = _exchange.AnswerExchange(handle=0, view=view, key_at=67, on_descriptors=None)
    for length in (-1, 10, 98, 300, 9000):
        with pytest.raises(ValueError, match="no GET"):
            node.learn(length, 0)
    with pytest.raises(ValueError, match="no GET"):
        node.learn(120, 40)
    with pytest.raises(ValueError, match="no head"):
        node.answer(b"", view, 1, 1)
    with pytest.raises(ValueError, match="no head"):
        node.place(b"", view, view, 1, 1)
    with pytest.raises(ValueError, match="another length"):
        node.place(record_head(Facts()), view, view[1:], 1, 1)
    reading = _exchange.ReadExchange.__new__(_exchange.ReadExchange)
    with pytest.raises(ValueError, match="not made"):
        reading.receive(0, 1, view)
    with pytest.raises(ValueError):
        reading.send(0, 1, 1, KEYS[0], b"")
    with pytest.raises(ValueError, match="not made"):
        _exchange.AnswerExchange.__new__(_exchange.AnswerExchange).receive()


@pytest.mark.parametrize(
    ("sent", "kept"), [(1, 1), (_exchange.DESCRIPTORS_MAX, 16), (_exchange.DESCRIPTORS_MAX + 1, 16)]
)
def test_descriptors_that_come_with_a_request_are_handed_over(sent: int, kept: int) -> None:
    """A REGION brings one over a Unix socket: bytes that were received without them would lose them for good."""
    found: list[tuple[list[int], bool]] = []
    near, far = socket.socketpair()
    with near, far:
        node = exchange.answer_exchange(
            far, memoryview(bytearray(8192)), lambda some, has_lost: found.append((some, has_lost))
        )
        socket.send_fds(near, [b"request"], [near.fileno()] * sent)
        assert node.receive() == len(b"request")
        near.send(b"another")
        assert node.receive() == len(b"another")
    ((descriptors, has_lost),) = found
    assert (len(descriptors), bool(has_lost)) == (kept, sent > kept)
    for one in descriptors:
        assert not os.get_inheritable(one)
        os.close(one)
