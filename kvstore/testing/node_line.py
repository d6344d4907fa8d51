"""One connection to a real node that does what a test says, frame by frame: `LabClient` without a lab."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable
from typing import Final, cast

from kvstore.cluster.view import View
from kvstore.limits import SECOND_NS
from kvstore.testing.plane_lab import LabClient, PlaneLab
from kvstore.types.namespace import Namespace
from kvstore.wire.codec import unpack_plain
from kvstore.wire.header import FrameType
from kvstore.wire.messages import End, Get, ViewReply, ViewRequest

_SILENCE_SECONDS: Final = 20.0


class NodeLine:
    """See the module. A context manager.

    Attributes:
        client: for any other frame.
    """

    def __init__(self, address: str, namespace: Namespace, *, token: bytes = b"") -> None:
        """Greets the node at "host:port" and registers the namespace. Raises Denied."""
        host, _, port = address.rpartition(":")
        self._namespace = namespace
        self._socket = socket.create_connection((host, int(port)))
        self.client = LabClient(cast(PlaneLab, self), self._socket)
        self.client.hello(token=token)
        self.client.register(namespace.manifest())

    def turn_until(self, is_done: Callable[[], bool]) -> None:
        """What a `LabClient` asks of its lab."""
        while not is_done():
            assert select.select([self._socket], [], [], _SILENCE_SECONDS)[0], "the node does not answer"

    def view(self) -> View:
        """As the node serves it."""
        reply = self.client.call(ViewRequest(known_epoch=0), ViewReply)
        return View.from_plain(unpack_plain(reply.view, what="view"))

    def put(self, key: bytes, value: bytes, *, epoch: int = 0) -> tuple[int, str]:
        """Status and detail. Raises StaleView."""
        self.client.start(self.client.offer(self._namespace.digest, [key], [value]), epoch=epoch)
        return self.client.end_put([value])[0]

    def get(self, key: bytes, *, epoch: int = 0) -> tuple[int, int]:
        """The status (0 is a hit, its bytes are checked), and the epoch in the last frame."""
        request = Get(namespace=self._namespace.digest, keys=key, deadline_ns=10 * SECOND_NS)
        self.client.start(request, epoch=epoch)
        while (frame := self.client.receive()).type is not FrameType.END:
            pass
        return End.decode(frame.body).statuses[0], frame.epoch

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()
