"""The compiled inflow by itself: its checksum, what it refuses, timeouts, signals and bytes behind the answer."""

from __future__ import annotations

import os
import random
import signal
import socket
import struct
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.transport import _inflow, inflow
from kvstore.types.checksum import crc_table
from kvstore.wire.expected import WholeRecords
from kvstore.wire.header import FrameType, encode_head
from kvstore.wire.slices import FLAG_FINAL, Slice, encode_slices

FAR_NS = 1 << 62
ID = 7


class Rig:
    """A receiver, the socket that feeds it, and the memory that it fills."""

    def __init__(self, count: int, size: int, block: int, piece_bytes: int = 1 << 18) -> None:
        self.near, self.far = socket.socketpair()
        self.near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 20, 0))
        self.size, self.block = size, block
        self.memory = [bytearray(size) for _ in range(count)]
        self.payloads = [random.Random(at).randbytes(size) for at in range(count)]
        self.ids = [bytes([at]) * 16 for at in range(count)]
        self.receiver = inflow.WholeReceiver(
            self.near.fileno(),
            WholeRecords(size, block),
            [memoryview(one) for one in self.memory],
            ID,
            piece_bytes=piece_bytes,
        )

    def frame(self, items: list[int], *, is_final: bool) -> bytes:
        size, block = self.size, self.block
        body = encode_slices(
            [
                Slice(at, 0, size, 0, True, self.ids[at], size, block, crc_table(self.payloads[at], block))
                for at in items
            ]
        )
        flags = len(items) | (FLAG_FINAL if is_final else 0)
        head = encode_head(FrameType.DATA, ID, body, payload_bytes=size * len(items), epoch=5, flags=flags)
        return head + b"".join(self.payloads[at] for at in items)

    def send(self, data: bytes) -> threading.Thread:
        thread = threading.Thread(target=self.far.sendall, args=(data,))
        thread.start()
        return thread

    def close(self) -> None:
        self.near.close()
        self.far.close()


@given(
    size=st.integers(1, 20_000),
    block=st.sampled_from([4096, 8192, 65536]),
    piece_bytes=st.sampled_from([1, 1000, 4096, 1 << 18]),
    groups=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    seed=st.integers(0, 99),
)
def test_any_grouping_and_piece(size: int, block: int, piece_bytes: int, groups: list[int], seed: int) -> None:
    rig = Rig(sum(groups), size, block, piece_bytes)
    items = list(range(sum(groups)))
    random.Random(seed).shuffle(items)
    data, at = b"", 0
    for number, count in enumerate(groups, 1):
        data += rig.frame(items[at : at + count], is_final=number == len(groups))
        at += count
    thread = rig.send(data)
    assert rig.receiver.receive(FAR_NS) is True
    thread.join()
    assert [bytes(one) for one in rig.memory] == rig.payloads
    assert rig.receiver.content_ids() == rig.ids
    assert (rig.receiver.epoch, rig.receiver.rest()) == (5, b"")
    rig.close()


@given(at=st.integers(0, 3 * 6000), seed=st.integers(0, 99))
def test_a_changed_byte_is_handed_over_and_never_done(at: int, seed: int) -> None:
    rig = Rig(3, 5000, 4096)
    frames = [rig.frame([one], is_final=one == 2) for one in range(3)]
    data = bytearray(b"".join(frames))
    at %= len(data)
    data[at] ^= 1 << seed % 8
    thread = rig.send(bytes(data))
    thread.join()
    rig.far.close()
    assert rig.receiver.receive(FAR_NS) is False
    bad = at // len(frames[0])
    assert rig.receiver.done() == {one: rig.ids[one] for one in range(bad)}
    rest, start = rig.receiver.rest(), bad * len(frames[0])
    assert rest == bytes(data[start : start + len(rest)])
    assert at < start + len(rest)
    rig.close()


def test_it_goes_on_where_it_was_when_the_timeout_is_set_anew() -> None:
    rig = Rig(2, 5000, 4096)
    data = rig.frame([0, 1], is_final=True)
    assert rig.receiver.receive(0) is None
    thread = rig.send(data)
    assert rig.receiver.receive(time.monotonic_ns() + 10**10) is True
    thread.join()
    rig.close()


def test_the_sockets_timeout_hands_over_what_has_come() -> None:
    rig = Rig(2, 5000, 4096)
    rig.near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 0, 1000))
    data = rig.frame([0, 1], is_final=True)
    rig.far.sendall(data[:7000])
    assert rig.receiver.receive(FAR_NS) is False
    assert rig.receiver.rest() == data[:7000]
    assert rig.receiver.done() == {}
    rig.close()


def test_what_stands_behind_a_whole_answer_is_kept() -> None:
    rig = Rig(1, 50, 4096)
    rig.far.sendall(rig.frame([0], is_final=True) + b"more")
    assert rig.receiver.receive(FAR_NS) is True
    more = rig.receiver.rest()
    rest = b"more"[len(more) :]
    assert more + (rig.near.recv(len(rest)) if rest else b"") == b"more"
    rig.close()


def test_a_signal_is_handled_while_it_waits() -> None:
    rig = Rig(1, 5000, 4096)
    seen: list[int] = []

    def handle(number: int, _frame: object) -> None:
        seen.append(number)
        rig.far.sendall(rig.frame([0], is_final=True))

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1))
        timer.start()
        assert rig.receiver.receive(FAR_NS) is True
        timer.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen
    rig.close()


@pytest.mark.parametrize(
    "bad",
    [{"start": b"x"}, {"record_bytes": 0}, {"block_bytes": 0}, {"views": []}, {"record_bytes": 9}, {"after": b""}],
)
def test_it_refuses_what_cannot_be(bad: dict[str, object]) -> None:
    records = WholeRecords(8, 4096)
    good: dict[str, object] = {
        "handle": 0,
        "views": [memoryview(bytearray(8))],
        "request_id": 1,
        "start": b"KVST",
        "before": records.before_id,
        "after": records.after_id,
        "final_flag": FLAG_FINAL,
        "block_bytes": 4096,
        "record_bytes": 8,
        "slices_max": 8,
        "payload_max": 1 << 20,
        "piece_bytes": 1 << 18,
    }
    made = _inflow.Inflow(**good)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not all have come"):
        made.content_ids()
    with pytest.raises(ValueError):
        _inflow.Inflow(**(good | bad))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not made"):
        _inflow.Inflow.__new__(_inflow.Inflow).rest()


def test_what_was_made_in_half_is_not_usable() -> None:
    """The second view is of another length: its first one is there, and the object is kept by whoever caught that."""
    records = WholeRecords(8, 4096)
    made = _inflow.Inflow.__new__(_inflow.Inflow)
    with pytest.raises(ValueError, match="another length"):
        made.__init__(  # type: ignore[misc]
            handle=0,
            views=[memoryview(bytearray(8)), memoryview(bytearray(9))],
            request_id=1,
            start=b"KVST",
            before=records.before_id,
            after=records.after_id,
            final_flag=FLAG_FINAL,
            block_bytes=4096,
            record_bytes=8,
            slices_max=8,
            payload_max=1 << 20,
            piece_bytes=1 << 18,
        )
    for use in (made.rest, made.done, made.content_ids, lambda: made.receive(FAR_NS)):
        with pytest.raises(ValueError, match="not made"):
            use()
