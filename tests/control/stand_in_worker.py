"""A worker that only speaks the admin socket, and can be told to misbehave: what its supervisor makes of it is tested.

Run with a way to behave as its first argument, then the launch argument.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Mapping

from kvstore import errors
from kvstore.server.launch import WorkerLaunch
from kvstore.wire.codec import Plain, pack_plain, unpack_plain
from kvstore.wire.failures import code_of
from kvstore.wire.frames import Frame, FrameReader, FrameWriter
from kvstore.wire.header import FrameType
from kvstore.wire.messages import Admin, AdminReply, ErrorReply, Welcome
from kvstore.wire.schema import Message
from kvstore.wire.session import ServerSession


def welcome(launch: WorkerLaunch) -> Welcome:
    """The answer to HELLO."""
    return Welcome(
        version=1,
        features=0,
        node_id=launch.node_id,
        boot_id=bytes(16),
        epoch=0,
        body_bytes_max=4096,
        payload_bytes_max=4096,
        batch_items_max=1,
        inline_put_bytes_max=0,
        put_credit_bytes=0,
    )


DRAINS: list[Plain] = []
"""`resume` of each drain that came."""


def carry_out(way: str, launch: WorkerLaunch, verb: str, arguments: Mapping[str, Plain]) -> dict[str, Plain]:
    """One verb, in the given way."""
    match way, verb:
        case "refuses", "ready":
            raise errors.Unavailable("drive /dev/x is in use by process 7; stop it")
        case "dies", "ready":
            sys.exit(9)
        case "never_ready", "ready":
            signal.pause()
        case "nonsense", "ready":
            return {"data": [], "boot_id": "?", "targets": 7}
        case "slow_stats", "stats":
            time.sleep(0.3)  # longer than the deadline of the test that asks
        case "deaf", "shutdown":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.pause()
        case _, "explode":
            os.kill(os.getpid(), signal.SIGKILL)
    if verb == "ready":
        target: dict[str, Plain] = {"id": "t", "path": "/p", "capacity_bytes": launch.capacity_bytes}
        return {"data": ["127.0.0.1:7777"], "boot_id": bytes(16), "targets": [target]}
    if verb == "drain":
        DRAINS.append(arguments["resume"])
    if verb == "handover":
        if way == "mute":
            raise errors.Unavailable("no answer")
        return {"done": True, "handed_on": 0, "left_behind": 0}
    if verb == "drains":
        return {"resume": DRAINS}
    return {"verb": verb, "given": dict(arguments)}


def answer(way: str, launch: WorkerLaunch, frame: Frame) -> Message:
    """The message that answers a frame."""
    if frame.type is FrameType.HELLO:
        return welcome(launch)
    request = Admin.decode(frame.body)
    arguments = unpack_plain(request.arguments, what="arguments")
    assert isinstance(arguments, Mapping)
    try:
        return AdminReply(value=pack_plain(carry_out(way, launch, request.verb, arguments)))
    except errors.KVStoreError as error:
        return ErrorReply(code=code_of(error), text=str(error), closing=False)


def main() -> None:
    """Serve until the supervisor closes its end, or `shutdown`."""
    way, launch = sys.argv[1], WorkerLaunch.from_argument(sys.argv[2])
    sock = socket.socket(fileno=launch.admin_fd)
    reader, writer, session = FrameReader(), FrameWriter(), ServerSession()
    while count := sock.recv_into(reader.buffers()[0]):
        for frame in reader.advance(count):
            session.receive(frame.type, frame.request_id)
            message = answer(way, launch, frame)
            session.send(message.TYPE)
            writer.push_message(message, frame.request_id)
            sock.sendall(b"".join(writer.buffers()))
            writer.advance(writer.pending_bytes)
            if frame.type is FrameType.ADMIN and Admin.decode(frame.body).verb == "shutdown":
                sys.exit(0)


if __name__ == "__main__":
    main()
