"""Clients that stop in the middle of their puts, and those that need the memory which they hold."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from kvstore.limits import FRAME_BODY_BYTES_MAX, MiB
from kvstore.server.batch import pack_u32
from kvstore.testing.serve_process import ServeProcess
from kvstore.transport.tcp import TcpChannel
from kvstore.types.checksum import crc_table
from kvstore.types.flow import FlowClass
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore.types.results import Stored
from kvstore.wire.frames import FrameReader
from kvstore.wire.header import VERSION, FrameType
from kvstore.wire.messages import Feature, Hello, Offer
from kvstore_client import KVClient

RECORD_BYTES = MiB
RECORDS = 32
STALLED = 3
"""Of 32 MiB each, which a node with 64 MiB of staging memory can grant to two at a time."""


def stop_after_the_grant(address: str, namespace: bytes) -> TcpChannel:
    """A client that offers records, is granted some, and does nothing more."""
    host, port = address.split(":")
    channel = TcpChannel(socket.create_connection((host, int(port))), FrameReader(body_bytes_max=FRAME_BODY_BYTES_MAX))
    hello = Hello(
        version_min=VERSION,
        version_max=VERSION,
        features=Feature.NONE,
        client_id=os.urandom(16),
        boot_id=bytes(16),
        token=b"",
        flow=FlowClass.WRITEBACK,
    )
    offer = Offer(
        namespace=namespace,
        keys=os.urandom(32 * RECORDS),
        lengths=pack_u32([RECORD_BYTES] * RECORDS),
        block_bytes=pack_u32([65536]),
        crc_tables=crc_table(bytes(RECORD_BYTES), 65536) * RECORDS,
        deadline_ns=600 * 10**9,
    )
    for request_id, message in enumerate((hello, offer)):
        channel.send(message, request_id)
        while not channel.on_writable():
            pass
        if request_id == 0:
            wait_for(channel, FrameType.WELCOME)
    return channel


def wait_for(channel: TcpChannel, kind: FrameType) -> None:
    while True:
        if any(frame.type is kind for frame in channel.on_readable()):
            return


def test_clients_that_stop_give_their_memory_to_puts_that_wait_for_it(tmp_path: Path) -> None:
    layout = KVLayout.opaque(chunk_bytes=RECORD_BYTES, chunk_tokens=1)
    with ServeProcess(tmp_path, "--capacity", "256MiB", "--staging", "64MiB") as process:
        ready = process.wait_ready()
        with KVClient.connect(ready.data[0]) as client:
            ns = client.namespace(Namespace(tenant="default", model="m", weights="w", layout=layout))
            payloads = [bytes([number]) * RECORD_BYTES for number in range(4)]
            assert all(isinstance(one, Stored) for one in ns.put(ns.keys(range(2)), payloads[:2]))
            stalled = [stop_after_the_grant(ready.data[0], ns.namespace.digest) for _ in range(STALLED)]
            wait_for(stalled[0], FrameType.GRANT)
            outcomes = ns.put(ns.keys(range(10, 14)), payloads, deadline=25)
            assert all(isinstance(one, Stored) for one in outcomes), outcomes
            for channel in stalled:
                channel.close()
