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
WAIT_ALL_BYTES_MIN: Final = 128 * 1024
"""From this much missing payload on, one waiting receive is cheaper than several early ones. Less is mostly there at
once, and what follows it as well, which a waiting receive would leave for another one."""
WAIT_ALL_BYTES_MAX: Final = 256 * 1024
"""At most so much payload is waited for at a time, so that it is checked while the CPU's cache has it: 0.03 s/GB for
the checksums instead of 0.07 with 1 MiB at a time; receiving costs the same (2 MiB of L2 per core, busy machine)."""


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


def fill(buffers: Sequence[memoryview], unread: memoryview) -> int:
    """Copies as much of `unread` into the buffers as they take, in order; how much that is."""
    count = 0
    for view in buffers:
        piece = unread[count : count + len(view)]
        view[: len(piece)] = piece
        count += len(piece)
    return count
