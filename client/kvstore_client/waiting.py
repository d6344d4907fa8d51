"""Waiting for a socket: what generators yield, the kernel's timeouts, and how much to wait for at a time."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Generator, Sequence
from typing import Final, Protocol, TypeAlias

from kvstore.limits import SECOND_NS
from kvstore.transport.exchange import Handle

READ: Final = 1
WRITE: Final = 2
Steps: TypeAlias = Generator[int, None, None]
"""Does I/O and yields READ or WRITE when it must wait for its socket."""

_TIMEVAL = struct.Struct("@ll")
_TIMEOUT_NS_MIN: Final = 1_000_000  # a timeout of 0 would mean none


class Receive(Protocol):
    """`socket.recvmsg_into` of a connection: the number of bytes first."""

    def __call__(
        self, buffers: Sequence[memoryview | bytearray], ancillary_bytes: int = 0, flags: int = 0, /
    ) -> tuple[int, object, int, object]: ...


Quick: TypeAlias = tuple[Handle, Receive, Callable[[], int]]
"""The socket for an exchange, how to receive, and how to get the next request id, in as few steps as there can be."""


def set_timeout(held: socket.socket, option: int, wait_ns: int) -> int:
    """Sets SO_RCVTIMEO or SO_SNDTIMEO, to 1 ms at least; returns what was set, in ns."""
    wait_ns = max(wait_ns, _TIMEOUT_NS_MIN)
    held.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(wait_ns // SECOND_NS, wait_ns % SECOND_NS // 1000))
    return wait_ns


def first_bytes(buffers: Sequence[memoryview], length_bytes: int) -> list[memoryview]:
    """The first `length_bytes` of the buffers, which have as many."""
    first: list[memoryview] = []
    for view in buffers:
        first.append(view[:length_bytes] if len(view) > length_bytes else view)
        length_bytes -= len(first[-1])
        if not length_bytes:
            break
    return first
