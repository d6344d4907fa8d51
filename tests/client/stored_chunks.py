"""What the tests of a misbehaving node share: eight chunks that are stored, and answers that break off."""

from __future__ import annotations

import socket

from kvstore.wire.header import FrameType
from kvstore_client import Hit

TOKENS = list(range(16 * 8))
SIZE = 100_000


def memories() -> list[bytearray]:
    return [bytearray(b"\xaa" * SIZE) for _ in range(8)]


def check(results, memory, payloads) -> None:
    """Every hit is right."""
    for result, got, payload in zip(results, memory, payloads, strict=True):
        if isinstance(result, Hit):
            assert bytes(got) == payload


def prefix(results) -> int:
    return next((at for at, one in enumerate(results) if not isinstance(one, Hit)), len(results))


def break_after(bytes_sent: int, *, times: int, then=lambda link: link.kill()):
    """Sends the first bytes of the right answer to GET, then does something else."""
    left = [times]

    def script(link, frame) -> bool:
        if frame.type is not FrameType.GET or left[0] == 0:
            return False
        left[0] -= 1
        out = Limited(link.socket, bytes_sent)
        real, link.socket = link.socket, out
        link.answer(frame)
        link.socket = real
        then(link)
        return True

    return script


class Limited:
    """A socket that sends its first bytes only."""

    def __init__(self, real: socket.socket, left: int) -> None:
        self._real = real
        self._left = left

    def sendall(self, data: bytes) -> None:
        self._real.sendall(data[: self._left])
        self._left -= min(self._left, len(data))

    def __getattr__(self, name: str):
        return getattr(self._real, name)
