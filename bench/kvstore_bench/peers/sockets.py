"""The raw pair: two Python processes and one loopback TCP connection that move the same bytes and do nothing else.

Run as a program (`python -m kvstore_bench.peers.sockets`) this is the far side; it prints its port and serves one
connection. A request is 24 bytes: command, item count, item size.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence

from kvstore_bench.processes import cpu_ns_of

_REQUEST = struct.Struct("<QQQ")
_SEND, _RECEIVE = 1, 2
_POOL_BYTES = 256 << 20
_RECEIVE_POOL_BYTES = 64 << 20


def touched(size_bytes: int) -> memoryview:
    """Page-aligned memory, every page written once so that no first-touch fault falls into a measurement."""
    area = mmap.mmap(-1, size_bytes)
    for offset in range(0, size_bytes, mmap.PAGESIZE):
        area[offset] = 1
    return memoryview(area)


def receive_exactly(sock: socket.socket, into: memoryview) -> None:
    """Fill `into`. Raises ConnectionError when the peer closes first."""
    got = 0
    while got < len(into):
        count = sock.recv_into(into[got:], len(into) - got)
        if count == 0:
            raise ConnectionError(f"peer closed after {got} of {len(into)} bytes")
        got += count


def _serve(sock: socket.socket) -> None:
    pool = touched(_POOL_BYTES)
    landing = touched(_RECEIVE_POOL_BYTES)
    request = memoryview(bytearray(_REQUEST.size))
    cursor = 0
    sock.sendall(b"ready")
    while True:
        try:
            receive_exactly(sock, request)
        except ConnectionError:
            return
        command, count, size = _REQUEST.unpack(request)
        for _ in range(count):
            if command == _SEND:
                cursor = 0 if cursor + size > _POOL_BYTES else cursor
                sock.sendall(pool[cursor : cursor + size])
            else:
                cursor = 0 if cursor + size > _RECEIVE_POOL_BYTES else cursor
                receive_exactly(sock, landing[cursor : cursor + size])
            cursor += size
        if command == _RECEIVE:
            sock.sendall(b"k")


class NearSide:
    """Our side of a pair: a connection to a child process, both made by who inherits."""

    _sock: socket.socket
    _child: subprocess.Popen[str]

    @property
    def pid(self) -> int:
        """Of the far side."""
        return self._child.pid

    def cpu_ns(self) -> int:
        """CPU time of the far side so far."""
        return cpu_ns_of(self._child.pid)

    def close(self) -> None:
        """End the child."""
        self._sock.close()
        self._child.wait(timeout=10)


class RawPair(NearSide):
    """The near side of the raw pair. Owns the child process."""

    def __init__(self) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-m", __name__], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
        )
        assert self._child.stdout is not None
        port = int(self._child.stdout.readline())
        self._sock = socket.create_connection(("127.0.0.1", port))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        receive_exactly(self._sock, memoryview(bytearray(5)))

    def get(self, buffers: Sequence[memoryview]) -> None:
        """One batch towards us: request, then every buffer filled. All buffers have one length."""
        self._sock.sendall(_REQUEST.pack(_SEND, len(buffers), len(buffers[0])))
        for buffer in buffers:
            receive_exactly(self._sock, buffer)

    def put(self, buffers: Sequence[memoryview]) -> None:
        """One batch away from us, acknowledged once by a byte."""
        self._sock.sendall(_REQUEST.pack(_RECEIVE, len(buffers), len(buffers[0])))
        for buffer in buffers:
            self._sock.sendall(buffer)
        self._sock.recv(1)

    def ping_ns(self, buffer: memoryview) -> int:
        """Time of one request and one answer of `len(buffer)` bytes."""
        start = time.perf_counter_ns()
        self.get((buffer,))
        return time.perf_counter_ns() - start


def _main() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _serve(sock)


if __name__ == "__main__":
    _main()
