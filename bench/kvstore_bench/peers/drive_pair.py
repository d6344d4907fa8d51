"""The bare pair with a drive: what a store of this shape cannot leave out, and nothing else.

Two processes and one loopback TCP connection, like the raw pair, but the far side keeps the bytes on a file: both sides
sum every block (CRC32C), the far side writes a batch past the page cache and then a commit page, or reads scattered
records. There are no keys, no index, no frames, no eviction, no cache and no second client. It shows how far a target
can be reached on the machine at hand, and is no target itself: it drives the drive in one order, by our own binding.

Run as a program (`python -m kvstore_bench.peers.drive_pair FILE BYTES`) this is the far side. A request is 24 bytes:
command, item count, item size; a READ is followed by the offsets, 8 bytes each.
"""

from __future__ import annotations

import os
import random
import select
import socket
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from kvstore.device.base import Device, IoKind, IoOp
from kvstore.device.probe import open_device
from kvstore.device.scattered import ScatteredRead
from kvstore.limits import KiB, MiB
from kvstore.types.checksum import crc32c, crc_table_far, crcs_match_far
from kvstore_bench.peers.sockets import NearSide, receive_exactly, touched

_REQUEST = struct.Struct("<QQQ")
_READ, _WRITE = 1, 2
_HEADER_BYTES = 4 * KiB  # each record lies behind one, and so does each write
_PIECE_BYTES = 256 * KiB  # summed while the cache still has it, by either side
_WRITE_BYTES = 4 * MiB
_FIRST_WRITE_BYTES = 1 * MiB  # so that the drive begins early
_READ_BYTES = 1 * MiB
_READS_IN_FLIGHT = 4
_POOL_BYTES = 96 * MiB
_SEND_BUFFER_BYTES = 384 * KiB


class _FarSide:
    """Serves one connection."""

    def __init__(self, sock: socket.socket, device: Device) -> None:
        self._sock = sock
        self._device = device
        self._pool = touched(_POOL_BYTES)
        device.register(self._pool)
        self._page = touched(_HEADER_BYTES)
        self._events = select.epoll()
        self._events.register(device.fileno(), select.EPOLLIN)
        self._place = 0
        self._landing = 0

    def serve(self) -> None:
        """Until the other side closes."""
        request = memoryview(bytearray(_REQUEST.size))
        self._sock.sendall(b"ready")
        while True:
            try:
                receive_exactly(self._sock, request)
            except ConnectionError:
                return
            command, count, size = _REQUEST.unpack(request)
            if command == _WRITE:
                self._write(count * size)
            else:
                offsets = memoryview(bytearray(8 * count))
                receive_exactly(self._sock, offsets)
                self._read(struct.unpack(f"<{count}Q", offsets), size)

    def _write(self, length_bytes: int) -> None:
        """Receives a batch, writes it as it comes, then a commit page; a byte says that both are on the drive."""
        device, left, at = self._device, length_bytes, self._landing
        self._landing = (at + length_bytes) % (_POOL_BYTES - length_bytes)
        in_flight = 0
        while left:
            some = min(left, _WRITE_BYTES if left < length_bytes else _FIRST_WRITE_BYTES)
            view = self._pool[at : at + some]
            for begin in range(0, some, _PIECE_BYTES):
                piece = view[begin : begin + _PIECE_BYTES]
                _receive_whole(self._sock, piece)
                crc32c(piece)
            device.submit([IoOp(IoKind.WRITE, self._take_place(some), [self._page, view])])
            in_flight += 1 - len(device.poll())
            at += some
            left -= some
        self._wait(in_flight)
        device.submit([IoOp(IoKind.WRITE, self._take_place(0), [self._page])])
        self._wait(1)
        self._sock.sendall(b"k")

    def _take_place(self, length_bytes: int) -> int:
        length_bytes += _HEADER_BYTES
        if self._place + length_bytes > self._device.size_bytes:
            self._place = 0
        self._place += length_bytes
        return self._place - length_bytes

    def _wait(self, count: int) -> list[IoOp]:
        done: list[IoOp] = []
        while len(done) < count:
            if some := self._device.poll():
                done += some
                continue
            self._events.poll()
        if failed := [op for op in done if op.error is not None]:
            raise OSError(f"the drive failed: {failed[0].error}")
        return done

    def _read(self, offsets: Sequence[int], size: int) -> None:
        """Reads records of `size` behind a header each, sums them, and sends what has landed while the next is read."""
        step = _HEADER_BYTES + size
        count = max(1, _READ_BYTES // size)
        ops: deque[IoOp] = deque()
        for first in range(0, len(offsets), count):
            some = sorted(offsets[first : first + count])
            view = self._pool[first * step : (first + len(some)) * step]
            ops.append(ScatteredRead(some, [step] * len(some), view))
        self._device.submit([ops.popleft()])  # alone: a virtual drive tells of nothing before it has done all
        in_flight = 1
        while in_flight:
            landed = self._wait(1)
            more = [ops.popleft() for _ in range(min(len(ops), _READS_IN_FLIGHT - in_flight + len(landed)))]
            in_flight += len(more) - len(landed)
            if more:
                self._device.submit(more)
            for op in landed:
                (view,) = op.buffers
                records = [view[at : at + size] for at in range(_HEADER_BYTES, len(view), step)]
                for record in records:
                    crcs_match_far(record, size // 4, b"")
                self._send(records)

    def _send(self, views: Sequence[memoryview]) -> None:
        views = list(views)
        while views:
            sent = self._sock.sendmsg(views)
            while views and sent >= len(views[0]):
                sent -= len(views.pop(0))
            if sent:
                views[0] = views[0][sent:]


class DrivePair(NearSide):
    """The near side. Owns the child process, and uses all of the file: others may write over it between batches."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        """Makes a file of so many bytes, all of them written once."""
        self.path = path
        self._size_bytes = size_bytes
        self._child = subprocess.Popen(
            [sys.executable, "-m", __name__, str(path), str(size_bytes)],
            stdout=subprocess.PIPE,
            text=True,
            env=dict(os.environ),
        )
        assert self._child.stdout is not None
        port = int(self._child.stdout.readline())
        self._sock = socket.create_connection(("127.0.0.1", port))
        _tune(self._sock)
        receive_exactly(self._sock, memoryview(bytearray(5)))
        self._random = random.Random(size_bytes)

    def put(self, buffers: Sequence[memoryview]) -> None:
        """One batch onto the drive. All buffers have one length, a multiple of 4 KiB."""
        self._sock.sendall(_REQUEST.pack(_WRITE, len(buffers), len(buffers[0])))
        for buffer in buffers:
            crc_table_far(buffer, _PIECE_BYTES)
            self._sock.sendall(buffer)
        self._sock.recv(1)

    def get(self, buffers: Sequence[memoryview]) -> None:
        """One batch of records from random places of the drive."""
        size = len(buffers[0])
        step = size + _HEADER_BYTES
        places = self._random.sample(range(self._size_bytes // step), len(buffers))
        self._sock.sendall(
            _REQUEST.pack(_READ, len(buffers), size)
            + struct.pack(f"<{len(places)}Q", *(place * step for place in places))
        )
        for buffer in buffers:
            _receive_whole(self._sock, buffer)
            crc32c(buffer)


def _receive_whole(sock: socket.socket, into: memoryview) -> None:
    """Fill `into`, and sleep until then: a wake-up costs as much as receiving 50 KiB."""
    got = 0
    while got < len(into):  # the kernel may still give less
        count = sock.recv_into(into[got:], len(into) - got, socket.MSG_WAITALL)
        if count == 0:
            raise ConnectionError(f"peer closed after {got} of {len(into)} bytes")
        got += count


def _tune(sock: socket.socket) -> None:
    """As client and node do on loopback."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
    except OSError:
        pass  # some other one will do


def _main() -> None:
    device = open_device(sys.argv[1], size_bytes=int(sys.argv[2]))
    device.allocate(0, device.size_bytes)
    page = touched(_WRITE_BYTES)
    for at in range(0, device.size_bytes, _WRITE_BYTES):
        device.submit([IoOp(IoKind.WRITE, at, [page[: min(_WRITE_BYTES, device.size_bytes - at)]])])
        while not device.poll():
            select.select([device.fileno()], [], [], 1)
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    sock, _ = listener.accept()
    _tune(sock)
    _FarSide(sock, device).serve()
    device.close()


if __name__ == "__main__":
    _main()
