"""One end of a node and a client on two machines: python -m tests.rdma.guest.two_machines node | client BACKEND

They meet over TCP on the same wire. The node pulls what the client offers and compares; then it places bytes and the
client compares; the client leaves in the middle, comes back, and all works again.
"""

from __future__ import annotations

import random
import socket
import sys
import time
from collections.abc import Sequence
from typing import Final

from kvstore.errors import Unavailable
from kvstore.testing.rdma_lab import LabClient, LabNode, client_rail, node_rail, turn_until
from kvstore.transport.base import Landing
from kvstore.transport.rdma.backends import Backend, open_verbs
from kvstore.transport.rdma.rail import Rail
from kvstore.transport.tcp import listen_tcp
from kvstore.wire.slices import NO_CONTENT_ID, Slice
from tests.rdma.network import ADDRESSES, GID_INDEX

PORT: Final = 7401
CONNECT_S: Final = 120
SIZES: Final = (1, 4095, 65_537, 1 << 20)
DEVICE: Final = "rxe0"


def content(item: int) -> bytes:
    """What both sides know an item to be."""
    return random.Random(item).randbytes(SIZES[item % len(SIZES)])


def slice_of(item: int, data: bytes) -> Slice:
    return Slice(item, 0, len(data), 0, True, NO_CONTENT_ID, len(data), 4096, b"")


class Seen:
    """`FetchEvents`."""

    def __init__(self) -> None:
        self.items: list[int] = []

    def arrived(self, one: Slice, arrived_bytes: int) -> None:
        pass

    def fetched(self, item: int) -> None:
        self.items.append(item)


def serve(rail: Rail, listening: socket.socket) -> LabNode:
    connected, _ = listening.accept()
    lab = LabNode(connected, rail)
    count = len(SIZES)
    turn_until([lab], lambda: lab.messages.count("F") == 2 * count and "C" in lab.messages)
    turn_until([lab], lambda: lab.pairs.ready(b"client of a lab.", 0, 0) is not None)  # type: ignore[arg-type]
    return lab


def exchange(lab: LabNode) -> None:
    memory = [memoryview(bytearray(size)) for size in SIZES]
    seen = Seen()
    lab.fetch([Landing(item=item, buffer=view) for item, view in enumerate(memory)], 1, seen)
    turn_until([lab], lambda: len(seen.items) == len(SIZES))
    for item, view in enumerate(memory):
        assert view == content(item), f"item {item} was read wrong"
    sent: list[int] = []
    for item in range(len(SIZES), 2 * len(SIZES)):
        data = memoryview(bytearray(content(item)))
        one = slice_of(item, bytes(data))
        lab.deliver([one], [data], 1, payload_bytes=len(data), on_sent=lambda: sent.append(1))
    turn_until([lab], lambda: len(sent) == len(SIZES) and not lab.pending_bytes)
    assert lab.pulled_bytes == lab.placed_bytes == sum(SIZES)
    assert lab.fallback_bytes == 0


def node(backend: Backend) -> None:
    rail = node_rail(open_verbs(backend), DEVICE, GID_INDEX)
    listening = listen_tcp(ADDRESSES[0], PORT)
    listening.setblocking(True)
    lab = serve(rail, listening)
    exchange(lab)
    # the client is killed: what is on its way ends, and the memory comes back
    sent: list[int] = []
    data = memoryview(bytearray(content(7)))
    for _ in range(8):
        lab.deliver([slice_of(7, bytes(data))], [data], 1, payload_bytes=len(data), on_sent=lambda: sent.append(1))
    reason = ""
    try:
        turn_until([lab], lambda: False)
    except Unavailable as error:
        reason = str(error)
    assert "connection" in reason, reason
    lab.close()
    assert len(sent) == 8
    lab.pairs.close()
    lab.staging.close()
    second = serve(rail, listening)
    begin = time.monotonic()
    exchange(second)
    print(f"measured: two machines, {backend.value}: {2 * sum(SIZES) / (time.monotonic() - begin) / 1e6:.1f} MB/s")
    listening.close()
    second.shut()


def join(rail: Rail) -> tuple[LabClient, list[memoryview]]:
    end = time.monotonic() + CONNECT_S
    while True:
        try:
            connected = socket.create_connection((ADDRESSES[0], PORT), 2)
            break
        except OSError:
            assert time.monotonic() < end, "the node never listened"
            time.sleep(0.2)
    client = LabClient(connected, rail)
    count = len(SIZES)
    outs = [memoryview(bytearray(content(item))) for item in range(count)]
    ins = [memoryview(bytearray(size)) for size in SIZES]
    for item, view in enumerate([*outs, *ins]):
        client.name_item(item, [view])
    client.open_pair()
    turn_until([client], lambda: client.lane.is_ready)
    return client, ins


def receive(client: LabClient, ins: Sequence[memoryview]) -> None:
    turn_until([client], lambda: len(client.arrived) >= len(SIZES))
    for at, view in enumerate(ins):
        assert view == content(len(SIZES) + at), f"item {len(SIZES) + at} was written wrong"


def client(backend: Backend) -> None:
    verbs = open_verbs(backend)
    first, ins = join(client_rail(verbs, DEVICE, GID_INDEX))
    receive(first, ins)
    first.shut()  # in the middle of the next delivery
    quiet = [bytes(view) for view in ins]
    second, again = join(client_rail(verbs, DEVICE, GID_INDEX))
    receive(second, again)
    assert [bytes(view) for view in ins] == quiet, "memory of the first was written after it had left"
    second.shut()


if __name__ == "__main__":
    chosen = Backend(sys.argv[2])
    node(chosen) if sys.argv[1] == "node" else client(chosen)
    print(f"{sys.argv[1]}: all as it should be")
