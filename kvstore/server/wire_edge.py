"""The gRPC port: two protocols on one port, told apart by the first two bytes.

Inference workers have neither grpcio nor protobuf, yet they are given the gRPC address: a connection that begins with
"KV" is answered here, HELLO and VIEW only. Anything else (HTTP/2 begins with "PRI") is relayed, byte for byte, to the
gRPC server on its private Unix socket.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Sequence
from typing import Final

from kvstore.cluster.view import View
from kvstore.errors import FormatUnsupported, InvalidRequest, KVStoreError
from kvstore.limits import (
    BATCH_ITEMS_MAX,
    EDGE_CONNECTIONS_MAX,
    EDGE_FIRST_BYTES_NS,
    EDGE_IDLE_NS,
    EDGE_RELAY_BYTES,
    FRAME_PAYLOAD_BYTES_MAX,
    IDLE_WAIT_NS,
    INLINE_PUT_BYTES_MAX,
    LINGER_NS,
    SECOND_NS,
)
from kvstore.server.access import NodeAccess
from kvstore.server.fleet import Fleet
from kvstore.telemetry.metrics import SupervisorMetrics
from kvstore.wire.codec import pack_plain
from kvstore.wire.failures import code_of, text_of
from kvstore.wire.frames import Frame, FrameReader, FrameWriter
from kvstore.wire.header import MAGIC, VERSION, FrameType
from kvstore.wire.messages import ErrorReply, Feature, Hello, Ping, Pong, ViewReply, ViewRequest, Welcome
from kvstore.wire.schema import Message
from kvstore.wire.session import ServerSession, Verdict

log = logging.getLogger(__name__)

_BODY_BYTES_MAX: Final = 4096
"""HELLO and VIEW are small; nobody may make the supervisor hold more."""


class WireEdge:
    """Accepts on the gRPC port. Owns the listening sockets; runs on the supervisor's loop."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        access: NodeAccess | None = None,
        grpc_socket: str,
        metrics: SupervisorMetrics,
        idle_ns: int = EDGE_IDLE_NS,
    ) -> None:
        """
        Args:
            access: The node's tenants; None is an open node.
            idle_ns: After so long without a byte either way a relayed connection ends.
        """
        self._idle_s = idle_ns / SECOND_NS
        self._fleet = fleet
        self._access = access or NodeAccess(None)
        self._grpc_socket = grpc_socket
        self._metrics = metrics
        self._boot_id = os.urandom(16)
        self._servers: list[asyncio.Server] = []

    async def start(self, listeners: Sequence[socket.socket]) -> None:
        """Take connections from these sockets, from now on."""
        for listener in listeners:
            self._servers.append(await asyncio.start_server(self._connected, sock=listener, limit=EDGE_RELAY_BYTES))

    def stop(self) -> None:
        """Take no new connections; those that are open go on."""
        for server in self._servers:
            server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._metrics.edge_connections >= EDGE_CONNECTIONS_MAX:
            writer.close()  # gRPC clients back off and try again
            return
        self._metrics.edge_connections += 1
        try:
            await self._serve(reader, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            log.debug("connection on the gRPC port ended: %s", error)
        except asyncio.CancelledError:  # the loop ends; asyncio would log a trace of a cancelled handler
            log.debug("connection on the gRPC port ends with the node")
        finally:
            self._metrics.edge_connections -= 1
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(EDGE_FIRST_BYTES_NS / SECOND_NS):
            first = await reader.readexactly(len(MAGIC))
        if first == MAGIC:
            await _WireResponder(self._fleet, self._access, self._boot_id, self._metrics).serve(first, reader, writer)
        else:
            await self._relay(first, reader, writer)

    async def _relay(self, first: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_unix_connection(self._grpc_socket, limit=EDGE_RELAY_BYTES)
        clock = asyncio.get_running_loop().time

        def heard() -> None:
            quiet.reschedule(clock() + self._idle_s)

        async def answers() -> None:
            await _pump(inner_reader, writer, heard)
            quiet.reschedule(clock() + min(self._idle_s, LINGER_NS / SECOND_NS))  # the server has ended it

        try:
            inner_writer.write(first)
            async with asyncio.timeout(self._idle_s) as quiet, asyncio.TaskGroup() as both:
                both.create_task(_pump(reader, inner_writer, heard))
                both.create_task(answers())
        except* OSError as errors:
            log.debug("relayed connection ended: %s", errors.exceptions[0])
        finally:
            inner_writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, heard: Callable[[], None]) -> None:
    """Bytes from one side to the other until the end of the stream, which is passed on; `heard` at each piece."""
    while piece := await reader.read(EDGE_RELAY_BYTES):
        heard()
        writer.write(piece)
        await writer.drain()
    if writer.can_write_eof() and not writer.is_closing():
        writer.write_eof()


class _WireResponder:
    """One connection of the wire protocol that only asks who serves."""

    def __init__(self, fleet: Fleet, access: NodeAccess, boot_id: bytes, metrics: SupervisorMetrics) -> None:
        self._fleet = fleet
        self._access = access
        self._boot_id = boot_id
        self._metrics = metrics
        self._session = ServerSession()
        self._token = b""
        self._out = FrameWriter()

    async def serve(self, first: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer until the peer closes, or breaks the protocol."""
        frames = FrameReader(body_bytes_max=_BODY_BYTES_MAX)
        piece, going_on = first, True
        while piece and going_on:
            going_on = self._take(frames, piece)
            while self._out.pending_bytes:
                buffers = self._out.buffers()  # some of many
                writer.writelines(buffers)
                self._out.advance(sum(map(len, buffers)))
            await writer.drain()
            if going_on:
                async with asyncio.timeout(IDLE_WAIT_NS / SECOND_NS):
                    piece = await reader.read(EDGE_RELAY_BYTES)

    def _take(self, frames: FrameReader, piece: bytes) -> bool:
        """Feed bytes in and queue the answers; False when the connection must be closed."""
        rest = memoryview(piece)
        try:
            while rest:
                room = frames.buffers()[0]
                count = min(len(room), len(rest))
                room[:count] = rest[:count]
                rest = rest[count:]
                for frame in frames.advance(count):
                    self._answer(frame)
        except KVStoreError as error:
            self._out.push_message(ErrorReply(code=code_of(error), text=text_of(error), closing=True), 0)
            return False
        return True

    def _answer(self, frame: Frame) -> None:
        if self._session.receive(frame.type, frame.request_id) is not Verdict.ACCEPT:
            return
        self._metrics.edge_wire_calls += 1
        reply = self._reply(frame)
        self._session.send(reply.TYPE)
        self._out.push_message(reply, frame.request_id, epoch=self._fleet.view.epoch)

    def _reply(self, frame: Frame) -> Message:
        match frame.type:
            case FrameType.HELLO:
                return self._welcome(Hello.decode(frame.body))
            case FrameType.VIEW:
                self._access.permit_of(self._token)  # which may have been taken back since HELLO
                return _view_reply(self._fleet.view, ViewRequest.decode(frame.body))
            case FrameType.PING:
                Ping.decode(frame.body)
                return Pong()
        where = (
            ", ".join(address for target in self._fleet.view.targets for address in target.data) or "(not serving yet)"
        )
        error = InvalidRequest(f"{frame.type.name} is not served on the gRPC port; the data plane is at {where}")
        return ErrorReply(code=code_of(error), text=text_of(error), closing=False)

    def _welcome(self, hello: Hello) -> Welcome:
        if not hello.version_min <= VERSION <= hello.version_max:
            raise FormatUnsupported(
                f"client speaks protocol versions {hello.version_min} to {hello.version_max}, this node {VERSION}; "
                "upgrade the older side"
            )
        self._access.permit_of(hello.token)
        self._token = hello.token
        view = self._fleet.view
        return Welcome(
            version=VERSION,
            features=Feature.NONE,
            node_id=self._fleet.node_id,
            boot_id=self._boot_id,
            epoch=view.epoch,
            body_bytes_max=_BODY_BYTES_MAX,
            payload_bytes_max=FRAME_PAYLOAD_BYTES_MAX,
            batch_items_max=BATCH_ITEMS_MAX,
            inline_put_bytes_max=INLINE_PUT_BYTES_MAX,
            put_credit_bytes=0,
        )


def _view_reply(view: View, request: ViewRequest) -> ViewReply:
    encoded = pack_plain(view.to_plain()) if view.epoch > request.known_epoch else b""
    return ViewReply(epoch=view.epoch, view=encoded)
