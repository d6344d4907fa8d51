"""How a client reaches a worker: by TCP, or on the same host by its Unix socket, where memory can be shared.

The first connection is TCP. A worker with a socket says so with its features; the client asks where, and goes over
when both run on one kernel, the path is there, and the process behind it is this user's or root's.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from enum import Enum
from typing import Final

from kvstore.errors import Unavailable
from kvstore.transport.shm import Peer, host_id, is_trusted, peer_of
from kvstore.wire.shared import LocalReply
from kvstore_client.shm import SharedMemory
from kvstore_client.stats import Counters

log = logging.getLogger(__name__)


class Transport(Enum):
    """What the caller wants."""

    AUTO = "auto"
    TCP = "tcp"
    SHM = "shm"
    RDMA = "rdma"


TRANSPORT_VARIABLE: Final = "KVSTORE_CLIENT_TRANSPORT"
"""Environment variable that says what `connect(transport=None)` means."""


class LocalWay:
    """The way to one worker, as far as it is known. Guarded like its `TargetLink`.

    Attributes:
        transport: wanted.
        memory: what can be shared; None when nothing shall be.
        counters: of the client.
        path: of the Unix socket; "" while it is not known or of no use.
        reason: why it is TCP, for people; "" when it is not, or not known yet.
        is_known: whether a worker has been asked.
    """

    __slots__ = ("counters", "is_known", "memory", "path", "reason", "transport")

    def __init__(self, transport: Transport, memory: SharedMemory, counters: Counters) -> None:
        self.transport = transport
        self.memory = memory
        self.counters = counters
        self.path = ""
        self.reason = "" if self.is_wanted else f"transport {transport.value} is set"
        self.is_known = not self.is_wanted

    @property
    def is_wanted(self) -> bool:
        """Whether to ask a worker for its socket."""
        return self.transport in (Transport.AUTO, Transport.SHM)

    def learn(self, reply: LocalReply | None) -> None:
        """What a worker said of its socket; None: it has none."""
        self.is_known = True
        self.path = ""
        if reply is None or not reply.host:
            self._fall_back("the node has no socket for its own host (it was started with --transport tcp)")
        elif reply.host != host_id():
            self.reason = "the node runs on another host"  # as most do: nothing is missing there
        else:
            self.path, self.reason = reply.path, ""

    def connect(self) -> socket.socket | None:
        """A connected socket; or None, without a path, or with `reason` said and the path forgotten."""
        if not self.path:
            return None
        held = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            held.connect(self.path)  # of a Unix socket: at once, or not now (EAGAIN: its backlog is full)
            peer = peer_of(held)
        except OSError as error:
            held.close()
            self._fall_back(f"its socket {self.path} cannot be reached: {error.strerror or error}")
            return None
        if not is_trusted(peer) and peer.uid != _owner(self.path):
            held.close()
            self._fall_back(f"its socket {self.path} is served by user {peer.uid}, we are {os.geteuid()}")
            return None
        if not _is_served_by(peer):
            held.close()
            self._fall_back(f"the node shares memory with its user {peer.uid} and root alone, we are {os.geteuid()}")
            return None
        held.setblocking(True)
        return held

    def _fall_back(self, reason: str) -> None:
        """It is TCP, and why: said once, until something else is the matter."""
        if reason != self.reason:
            log.info("payload goes without shared memory: %s", reason)
        self.counters.shm_fallbacks += 1
        self.path, self.reason = "", reason

    def words(self) -> str:
        """For people: "shm", or "tcp" and why."""
        return "shm" if self.path else f"tcp: {self.reason}"

    def words_of_need(self) -> str:
        """As `TargetLink.words_of_need`."""
        is_missed = self.transport is Transport.SHM and not self.path and self.reason
        return f"; transport shm cannot be used: {self.reason}" if is_missed else ""

    def check(self, give_up: Callable[[], None]) -> None:
        """After `give_up` raises Unavailable, when shared memory was asked for by name and cannot be."""
        if self.transport is Transport.SHM and not self.path:
            give_up()
            raise Unavailable(f"transport shm cannot be used: {self.reason}; use auto to fall back to TCP")


def _is_served_by(peer: Peer) -> bool:
    """Whether a node of that user shares memory with us; it would refuse the HELLO otherwise."""
    return os.geteuid() in (peer.uid, 0)


def _owner(path: str) -> int:
    try:
        return os.stat(path).st_uid
    except OSError:
        return -1
