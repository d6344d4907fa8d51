"""Which channel an accepted socket gets."""

from __future__ import annotations

import socket

from kvstore.server.rdma import RdmaService
from kvstore.transport.shm_node import ShmNodeChannel
from kvstore.transport.shm_regions import MappedMemory
from kvstore.transport.tcp_node import OtherPayload, TcpNodeChannel
from kvstore.wire.body import MemoryBudget


def node_channel(
    accepted: socket.socket,
    other: OtherPayload,
    *,
    body_bytes_max: int,
    budget: MemoryBudget | None,
    memory: MappedMemory | None,
    rdma: RdmaService | None,
) -> TcpNodeChannel:
    """The channel of an accepted socket.

    Args:
        memory: What may be mapped for clients; None for a socket over which no memory is shared.
        rdma: Where there is RDMA; None for a socket whose client shall not use it.
    """
    if accepted.family == socket.AF_UNIX:
        if memory is not None:
            return ShmNodeChannel(accepted, other, body_bytes_max=body_bytes_max, budget=budget, memory=memory)
    elif rdma is not None:
        return rdma.channel(accepted, other, body_bytes_max=body_bytes_max, budget=budget)
    return TcpNodeChannel(accepted, other, body_bytes_max=body_bytes_max, budget=budget)
