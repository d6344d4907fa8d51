"""Whom a connection works for: the call that owns it, and the target that it greets in the name of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvstore.wire.frames import Frame
from kvstore.wire.messages import Feature, Welcome
from kvstore_client.rdma import RdmaWay
from kvstore_client.shm_ways import LocalWay


class PayloadOwner(Protocol):
    """The call in progress, which knows where payload belongs."""

    def place(self, frame: Frame) -> Sequence[memoryview]:
        """Destination of the payload of a DATA frame. Raises FormatUnsupported when the node broke the protocol."""

    def arriving(self, frame: Frame, arrived_bytes: int) -> None:
        """So much of the payload of the frame that was placed last has arrived, but not all. Raises as `place`."""


class Greeting(Protocol):
    """Who we are, for HELLO; and what the node said of itself."""

    client_id: bytes
    token: bytes

    view_epoch: int
    local: LocalWay
    rdma: RdmaWay

    @property
    def features(self) -> Feature:
        """What we want to agree on because of the ways that are allowed."""

    def seen_boot_id(self) -> bytes:
        """Boot id of the last WELCOME of this target, zeros if never."""

    def check(self, welcome: Welcome, address: str) -> None:
        """Raises Unavailable when it is not who was expected there."""

    def welcomed(self, welcome: Welcome) -> None:
        """A connection is open."""

    def saw_epoch(self, epoch: int) -> None:
        """The node's view had this epoch when it sent a frame."""
