"""The supervisor's end of a worker's admin socket: calls of the wire protocol, one at a time, on the asyncio loop."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping
from typing import TypeVar

from kvstore.errors import (
    ChecksumMismatch,
    DeadlineExceeded,
    FormatUnsupported,
    Internal,
    InvalidRequest,
    Unavailable,
)
from kvstore.limits import MS_NS, SECOND_NS
from kvstore.types.flow import FlowClass
from kvstore.wire.codec import Plain, pack_plain, unpack_plain
from kvstore.wire.failures import error_of
from kvstore.wire.frames import Frame, FrameReader
from kvstore.wire.header import VERSION, FrameType, encode_head
from kvstore.wire.messages import Admin, AdminReply, ErrorReply, Feature, Hello, Welcome
from kvstore.wire.schema import Message
from kvstore.wire.session import ClientSession, State, Verdict

_M = TypeVar("_M", bound=Message)


class AdminChannel:
    """One connection to one worker; it owns the socket. Calls queue behind each other.

    Every call raises Unavailable once the worker is gone or the channel closed. A call that overruns its deadline
    leaves the channel open, since closing it ends the worker: the next call first waits for the late answer.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._reader = FrameReader()
        self._session = ClientSession()
        self._frames: list[Frame] = []
        self._turn = asyncio.Lock()
        self._closed = False
        self._half_sent = False
        self.heard = 0  # frames that have come

    @property
    def closed(self) -> bool:
        """True once nothing more can come."""
        return self._closed

    async def hello(self, *, deadline_ns: int, token: bytes = b"") -> Welcome:
        """Greet; the first call. `deadline_ns` is the time that it may take; `token` is for the workers of others."""
        message = Hello(
            version_min=VERSION,
            version_max=VERSION,
            features=Feature.NONE,
            client_id=os.urandom(16),
            boot_id=bytes(16),
            token=token,
            flow=FlowClass.BACKGROUND,
        )
        return await self._exchange(message, Welcome, deadline_ns)

    async def admin(self, verb: str, arguments: Mapping[str, Plain], *, deadline_ns: int) -> Mapping[str, Plain]:
        """Carry out one verb of `kvstore.server.launch`.

        Raises:
            KVStoreError: what the worker answered, or Unavailable, or DeadlineExceeded.
        """
        reply = await self.call(Admin(verb=verb, arguments=pack_plain(arguments)), AdminReply, deadline_ns=deadline_ns)
        value = unpack_plain(reply.value, what=f"the worker's answer to {verb}")
        if not isinstance(value, Mapping):
            raise Internal(f"the worker's answer to {verb} is {type(value).__name__}, not a map")
        return value

    async def call(self, message: Message, answer: type[_M], *, deadline_ns: int) -> _M:
        """One call of the wire protocol that is answered by one message of type `answer`."""
        return await self._exchange(message, answer, deadline_ns)

    def close(self) -> None:
        """Idempotent. A worker whose socket is closed ends."""
        if not self._closed:
            self._closed = True
            self._sock.close()

    async def _exchange(self, message: Message, answer: type[_M], deadline_ns: int) -> _M:
        try:
            async with asyncio.timeout(deadline_ns / SECOND_NS), self._turn:
                await self._send(message)
                frame = await self._receive()
        except TimeoutError:
            raise DeadlineExceeded(
                f"the worker did not answer {message.TYPE.name} in {deadline_ns // MS_NS} ms; it may be busy or stuck"
            ) from None
        except OSError as error:
            self.close()
            raise Unavailable(f"the worker's admin socket failed: {error}") from None
        except (FormatUnsupported, ChecksumMismatch, InvalidRequest) as error:
            self.close()
            raise Internal(f"the worker broke the protocol of its admin socket: {error}") from None
        finally:
            if self._half_sent:
                self.close()
        return _decoded(frame, answer)

    async def _send(self, message: Message) -> None:
        if self._closed:
            raise Unavailable("the worker is not connected; it is down or starting again")
        if self._session.state not in (State.NEW, State.IDLE):
            await self._receive()  # the late answer to a call that ran out of time
        hello = message.TYPE is FrameType.HELLO
        request_id = self._session.hello() if hello else self._session.start(message.TYPE)
        self._half_sent = True
        head = encode_head(message.TYPE, request_id, message.encode())
        await asyncio.get_running_loop().sock_sendall(self._sock, head)
        self._half_sent = False

    async def _receive(self) -> Frame:
        """The next frame of the call in progress."""
        loop = asyncio.get_running_loop()
        while True:
            while self._frames:
                frame = self._frames.pop(0)
                if self._session.receive(frame.type, frame.request_id) is Verdict.ACCEPT:
                    return frame
            count = await loop.sock_recv_into(self._sock, self._reader.buffers()[0])
            if count == 0:
                self._reader.end_of_stream()
                raise ConnectionResetError("the worker has closed it")
            frames = self._reader.advance(count)
            self.heard += len(frames)
            self._frames += frames


def _decoded(frame: Frame, answer: type[_M]) -> _M:
    if frame.type is FrameType.ERROR:
        reply = ErrorReply.decode(frame.body)
        raise error_of(reply.code, reply.text)
    if frame.type is not answer.TYPE:
        raise Internal(f"the worker answered with {frame.type.name} instead of {answer.TYPE.name}")
    return answer.decode(frame.body)


def text_of(value: Mapping[str, Plain], name: str) -> str:
    """Text field `name` of a worker's answer, "" where it is missing."""
    found = value.get(name, "")
    return found if isinstance(found, str) else ""


def maps_of(value: Mapping[str, Plain], name: str) -> list[Mapping[str, Plain]]:
    """List-of-maps field `name` of a worker's answer, empty where it is missing. Raises Internal for another kind."""
    found = value.get(name, [])
    if not isinstance(found, list) or not all(isinstance(item, Mapping) for item in found):
        raise Internal(f"{name} in the worker's answer is not a list of maps")
    return found
