"""Sending while the loop waits: sockets that are full are lent, and what is queued for them goes out as they take more.

Without it the loop takes a turn for each part that a socket takes, 40 of them for a batch of 32 MiB, each after a copy
that has emptied the processor's cache. Compiled only (`_outflow.c`): in Python it would be those turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvstore.limits import IO_VECTORS_MAX
from kvstore.types.buffers import Buffer
from kvstore.types.compiled import require_interface

try:
    from kvstore.transport import _outflow

    require_interface(_outflow)
except ImportError as missing:
    IS_COMPILED = False
    HOW = f"a turn for each part: kvstore.transport._outflow cannot be used ({missing})"
else:
    IS_COMPILED = True
    HOW = "compiled"
    assert IO_VECTORS_MAX <= _outflow.VECTORS_MAX


class Outflow(Protocol):
    """The sockets that are lent, and the wait of the loop whose epoll watches them. For one thread."""

    def lend(self, socket: int, buffers: Sequence[Buffer], leave_bytes: int, /) -> None:
        """From now on `wait` sends `buffers`, in order, until at most `leave_bytes` of them are left.

        Args:
            socket: a non-blocking descriptor, watched for EPOLLOUT. It stays the caller's, who takes it back before
                anything else is sent over it, and before it is closed.
            buffers: at most IO_VECTORS_MAX, a list; held until they are taken back.
            leave_bytes: so few are left that more should be queued.
        """

    def sent_bytes(self, socket: int, /) -> int:
        """How much has gone out since it was lent; 0 for one that is not."""

    def take_back(self, socket: int, /) -> int:
        """It is no longer lent; returns `sent_bytes`."""

    def wait(self, timeout_ns: int, /) -> list[tuple[int, int]]:
        """As `select.epoll.poll`: descriptors and their events, none once the time is over (negative: never).

        A lent socket that only takes more is told when no more than `leave_bytes` are left, or when sending failed.
        """


def outflow_of(epoll: int) -> Outflow | None:
    """That of a loop with this epoll descriptor; None where there is none."""
    return _outflow.Outflow(epoll) if IS_COMPILED else None
