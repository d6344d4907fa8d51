"""Redis as a peer: a server that keeps values in memory, and a client as short as its protocol allows.

The client reads each value straight into the caller's memory, as the native clients of inference engines do, and sums
nothing. Long values are asked for one after the other and short ones all at once: the faster way for each. The wire is
RESP2 (redis.io, "Redis serialization protocol specification").
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvstore.limits import IO_VECTORS_MAX, KiB
from kvstore_bench.peers.sockets import receive_exactly
from kvstore_bench.processes import cpu_ns_of

_START_S: Final = 10.0
_TOGETHER_BYTES_MAX: Final = 128 * KiB
_END: Final = b"\r\n"
_OK: Final = b"+OK\r\n"


def available() -> bool:
    """Whether the redis-server program is installed."""
    return shutil.which("redis-server") is not None


class Redis:
    """A server of our own on loopback, and one connection to it.

    Args:
        folder: for its append-only file.
        keeps: append to that file, so that values survive the process (`appendfsync everysec`); else memory only.
    """

    def __init__(self, folder: Path, *, keeps: bool = False) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self._child = subprocess.Popen(
            [
                "redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", "",
                "--appendonly", "yes" if keeps else "no", "--auto-aof-rewrite-percentage", "0",
            ],
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            self._sock = self._connect(port)
        except BaseException:
            self._child.kill()
            self._child.wait()
            raise
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _connect(self, port: int) -> socket.socket:
        end = time.monotonic() + _START_S
        while True:
            try:
                return socket.create_connection(("127.0.0.1", port))
            except ConnectionRefusedError:
                if self._child.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"redis-server did not listen on port {port} within {_START_S} s") from None
                time.sleep(0.02)

    def cpu_ns(self) -> int:
        """CPU time of the server so far."""
        return cpu_ns_of(self._child.pid)

    def put(self, keys: Sequence[bytes], values: Sequence[memoryview]) -> None:
        """SET each, all sent before the first answer is looked at. Raises RuntimeError when one is refused."""
        pieces: list[bytes | memoryview] = []
        for key, value in zip(keys, values, strict=True):
            pieces += (b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(key), key, len(value)), value, _END)
        self._send(pieces)
        answers = bytearray(len(_OK) * len(keys))
        receive_exactly(self._sock, memoryview(answers))
        if answers != _OK * len(keys):
            raise RuntimeError(f"redis-server refused a SET: {bytes(answers[:80])!r}")

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> None:
        """GET each into memory of its very length. Raises RuntimeError when one is not there at that length."""
        requests = [b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(key), key) for key in keys]
        step = 1 if len(into[0]) > _TOGETHER_BYTES_MAX else len(keys)
        for first in range(0, len(keys), step):
            self._sock.sendall(b"".join(requests[first : first + step]))
            self._receive(into[first : first + step])

    def _receive(self, into: Sequence[memoryview]) -> None:
        """Values one behind the other; the head of each comes with the value before it."""
        heads = [b"$%d\r\n" % len(value) for value in into]
        head = memoryview(bytearray(len(heads[0])))
        receive_exactly(self._sock, head)
        _expect(head, heads[0])
        for value, following in zip(into, [*heads[1:], b""], strict=True):
            behind = memoryview(bytearray(len(_END) + len(following)))
            got, size = 0, len(value)
            while got < size + len(behind):
                if got < size:
                    got += self._some(self._sock.recvmsg_into([value[got:], behind])[0])
                else:
                    got += self._some(self._sock.recv_into(behind[got - size :]))
            _expect(behind, _END + following)

    @staticmethod
    def _some(count: int) -> int:
        if not count:
            raise RuntimeError("redis-server closed the connection")
        return count

    def _send(self, pieces: Sequence[bytes | memoryview]) -> None:
        left = [memoryview(piece) for piece in pieces]
        at = 0
        while at < len(left):
            count = self._sock.sendmsg(left[at : at + IO_VECTORS_MAX])
            while at < len(left) and count >= len(left[at]):
                count -= len(left[at])
                at += 1
            if count:
                left[at] = left[at][count:]

    def close(self) -> None:
        """End the server."""
        self._sock.close()
        self._child.terminate()
        self._child.wait(timeout=_START_S)


def _expect(got: memoryview, wanted: bytes) -> None:
    if got != wanted:
        raise RuntimeError(f"redis-server answered {bytes(got)!r} where {wanted!r} was expected")
