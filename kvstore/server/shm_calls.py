"""What only clients that share memory with us ask for: LOCAL, REGION. See docs/protocol.md, "Places"."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.errors import InvalidRequest
from kvstore.transport.rdma.node_channel import RdmaNodeChannel
from kvstore.transport.shm_node import ShmNodeChannel
from kvstore.wire.messages import End, Feature
from kvstore.wire.shared import LocalReply, Region

if TYPE_CHECKING:
    from kvstore.server.connection import Connection


def features_of(connection: Connection, features: Feature, local: LocalReply) -> Feature:
    """What can be agreed on over this connection. Raises Denied when the peer is not one to share memory with."""
    channel = connection.channel
    if isinstance(channel, RdmaNodeChannel):
        features |= Feature.RDMA
    if isinstance(channel, ShmNodeChannel):
        channel.check_peer()
        return features | Feature.SHARED_MEMORY
    return features | Feature.SHARED_MEMORY if local.host else features


def add_region(connection: Connection, body: bytes | bytearray) -> None:
    """REGION."""
    channel = _shared(connection)
    try:
        request = Region.decode(body)
    except InvalidRequest:
        channel.refuse_region()
        raise
    channel.add_region(request)
    connection.answer(End())


def _shared(connection: Connection) -> ShmNodeChannel:
    channel = connection.channel
    if not isinstance(channel, ShmNodeChannel) or not connection.shares_memory:
        raise InvalidRequest("shared memory was not agreed on over this connection: see Feature.SHARED_MEMORY")
    return channel
