"""Sending while the loop waits: everything goes out once and in order, and all else is told as epoll tells it."""

from __future__ import annotations

import random
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from kvstore.limits import MS_NS, SECOND_NS, KiB, MiB
from kvstore.transport import outflow as module
from kvstore.transport.outflow import Outflow, outflow_of


class Bench:
    """An epoll with an outflow, and a pair of sockets of which one is to be lent."""

    def __init__(self) -> None:
        self.epoll = select.epoll()
        made = outflow_of(self.epoll.fileno())
        assert made is not None, module.HOW
        self.outflow: Outflow = made
        self.ours, self.theirs = self.pair()
        self.fd = self.ours.fileno()

    def pair(self) -> tuple[socket.socket, socket.socket]:
        ours, theirs = socket.socketpair()
        for one in (ours, theirs):
            one.setblocking(False)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 * KiB)
        self.epoll.register(ours.fileno(), select.EPOLLIN | select.EPOLLOUT)
        return ours, theirs

    def close(self) -> None:
        self.outflow.take_back(self.fd)
        for one in (self.ours, self.theirs):
            one.close()
        self.epoll.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


def everything(received: socket.socket, into: bytearray) -> None:
    """Takes what has come."""
    while True:
        try:
            got = received.recv(MiB)
        except BlockingIOError:
            return
        if not got:
            return
        into += got


@pytest.mark.parametrize("seed", range(8))
def test_all_of_it_goes_out_once_and_in_order(bench: Bench, seed: int) -> None:
    rng = random.Random(seed)
    buffers = [rng.randbytes(rng.choice([0, 1, 7, 4 * KiB, 100 * KiB])) for _ in range(rng.choice([1, 3, 60, 1024]))]
    whole = b"".join(buffers)
    leave = rng.choice([0, 1, len(whole) // 2])
    if len(whole) <= leave:
        leave = 0
    bench.outflow.lend(bench.fd, [memoryview(one) for one in buffers], leave)
    came = bytearray()
    while not (told := bench.outflow.wait(0)):
        everything(bench.theirs, came)
    assert told == [(bench.fd, select.EPOLLOUT)]
    everything(bench.theirs, came)
    sent = bench.outflow.sent_bytes(bench.fd)
    assert bench.outflow.take_back(bench.fd) == sent == len(came) >= len(whole) - leave
    assert came == whole[:sent]


def test_it_tells_of_a_lent_socket_only_once_little_is_left(bench: Bench) -> None:
    bench.outflow.lend(bench.fd, [bytes(MiB)], 0)
    for _ in range(20):
        assert bench.outflow.wait(0) == [], "the peer reads nothing"
    assert 0 < bench.outflow.sent_bytes(bench.fd) < MiB
    sent = bench.outflow.take_back(bench.fd)
    assert bench.outflow.sent_bytes(bench.fd) == bench.outflow.take_back(bench.fd) == 0
    everything(bench.theirs, came := bytearray())
    assert len(came) == sent
    assert bench.outflow.wait(0) == [(bench.fd, select.EPOLLOUT)], "it is not lent, so it is told"


def test_what_else_is_ready_is_told_at_once(bench: Bench) -> None:
    other, peer = bench.pair()
    bench.epoll.modify(other.fileno(), select.EPOLLIN)
    bench.outflow.lend(bench.fd, [bytes(MiB)], 0)
    peer.send(b"x")
    assert bench.outflow.wait(SECOND_NS) == [(other.fileno(), select.EPOLLIN)]
    other.recv(1)
    everything(bench.theirs, bytearray())
    bench.theirs.send(b"a request")
    ((told, events),) = bench.outflow.wait(SECOND_NS)
    assert told == bench.fd
    assert events & select.EPOLLIN, "of a lent socket, too"
    other.close()
    peer.close()


def test_a_peer_that_reads_all_the_time_does_not_keep_it_from_ending(bench: Bench) -> None:
    bench.outflow.lend(bench.fd, [bytes(64 * MiB)] * 16, 0)
    ends = threading.Event()

    def read() -> None:
        while not ends.is_set():
            everything(bench.theirs, bytearray())

    reader = threading.Thread(target=read)
    reader.start()
    try:
        start = time.monotonic()
        assert bench.outflow.wait(50 * MS_NS) == []
        assert time.monotonic() - start < 5, "1 GiB would take longer, and other turns wait"
        assert bench.outflow.sent_bytes(bench.fd) > 0
    finally:
        ends.set()
        reader.join()


def test_a_peer_that_is_gone_is_told(bench: Bench) -> None:
    bench.outflow.lend(bench.fd, [bytes(MiB)], 0)
    assert bench.outflow.wait(0) == []
    sent = bench.outflow.sent_bytes(bench.fd)
    bench.theirs.close()
    ((told, events),) = bench.outflow.wait(SECOND_NS)
    assert told == bench.fd
    assert events & (select.EPOLLHUP | select.EPOLLERR)
    assert bench.outflow.take_back(bench.fd) == sent


def test_sending_that_fails_is_told(bench: Bench) -> None:
    bench.outflow.lend(bench.fd, [bytes(MiB)], 0)
    bench.ours.shutdown(socket.SHUT_WR)
    bench.epoll.modify(bench.fd, select.EPOLLOUT)
    ((told, _),) = bench.outflow.wait(SECOND_NS)
    assert told == bench.fd
    assert bench.outflow.take_back(bench.fd) == 0


def test_buffers_are_held_until_they_are_taken_back(bench: Bench) -> None:
    data = bytearray(MiB)
    bench.outflow.lend(bench.fd, [data], 0)
    with pytest.raises(BufferError):
        data.clear()
    bench.outflow.take_back(bench.fd)
    data.clear()
    made = Bench()
    more = bytearray(MiB)
    made.outflow.lend(made.fd, [more], 0)
    made.outflow = bench.outflow  # the last name of it
    more.clear()
    made.close()


def test_what_is_wrong_is_refused_and_nothing_is_lent(bench: Bench) -> None:
    data = bytearray(8)
    for bad in ((-1, [data], 0), (bench.fd, [data], -1), (bench.fd, [data] * 1025, 0)):
        with pytest.raises(ValueError, match="at most 1024 buffers"):
            bench.outflow.lend(*bad)
    for odd in ((bench.fd, [data, "text"], 0), (bench.fd, (data,), 0)):
        with pytest.raises(TypeError):
            bench.outflow.lend(*odd)  # type: ignore[arg-type]
    data.clear()
    bench.outflow.lend(bench.fd, [b"x"], 0)
    with pytest.raises(RuntimeError, match="lent already"):
        bench.outflow.lend(bench.fd, [b"x"], 0)
    closed = select.epoll()
    broken = outflow_of(closed.fileno())
    assert broken is not None
    closed.close()
    with pytest.raises(OSError, match="descriptor"):
        broken.wait(0)


def test_another_thread_cannot_lend_or_take_back_meanwhile(bench: Bench) -> None:
    bench.epoll.modify(bench.fd, select.EPOLLIN)
    waiting = threading.Thread(target=bench.outflow.wait, args=(SECOND_NS,))
    waiting.start()
    time.sleep(0.1)
    for call in (
        lambda: bench.outflow.take_back(bench.fd),
        lambda: bench.outflow.lend(bench.fd, [b"x"], 0),
        lambda: bench.outflow.wait(0),
    ):
        with pytest.raises(RuntimeError, match="another thread waits"):
            call()
    bench.theirs.send(b"x")
    waiting.join()


def test_a_signal_is_handled_and_the_wait_goes_on(bench: Bench) -> None:
    bench.epoll.modify(bench.fd, select.EPOLLIN)
    handled: list[int] = []

    def handle(number: int, _: object) -> None:
        handled.append(number)
        if len(handled) == 2:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, handle)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        start = time.monotonic()
        assert bench.outflow.wait(200 * MS_NS) == []
        assert time.monotonic() - start >= 0.19
        assert len(handled) == 1
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            bench.outflow.wait(10 * SECOND_NS)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert bench.outflow.wait(0) == [], "it waits again"
