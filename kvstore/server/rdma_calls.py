"""What only clients that use RDMA ask for: PAIR, PROBE, REGIONS. See docs/protocol.md, "RDMA"."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kvstore.errors import InvalidRequest
from kvstore.limits import PAIR_PROBE_NS_MAX
from kvstore.server.call import Answer
from kvstore.server.rdma import Holding, RdmaService
from kvstore.telemetry.metrics import Verb
from kvstore.transport.rdma.marks import lane_of
from kvstore.transport.rdma.node_channel import RdmaNodeChannel
from kvstore.transport.rdma.pair_offer import PairOffer
from kvstore.wire.frames import Frame
from kvstore.wire.header import FrameType
from kvstore.wire.messages import End, Feature
from kvstore.wire.pairs import Paired, PairRequest, Regions, decode_regions

if TYPE_CHECKING:
    from kvstore.server.connection import Connection


def agree(connection: Connection, features: Feature, service: RdmaService | None) -> None:
    """HELLO was accepted with these features: the connection's calls may name places where RDMA is among them."""
    channel = connection.channel
    if Feature.RDMA in features and service is not None and isinstance(channel, RdmaNodeChannel):
        channel.serve_for(Holding(service, connection))
        connection.placing = channel


def pair(connection: Connection, frame: Frame) -> None:
    """PAIR."""
    service = _service(connection)
    offer = PairOffer.decode(PairRequest.decode(frame.body).offer)
    assert connection.client is not None, "the session admits no request before HELLO"
    ours = service.pairs.open(connection.client.id, lane_of(connection.flow), offer, connection.now_ns)
    connection.answer(Paired(offer=ours.encode()))


def probe(connection: Connection, _: Frame) -> None:
    """PROBE."""
    service = _service(connection)
    now_ns = connection.now_ns
    call = Answer(connection, Verb.OTHER, count=0, now_ns=now_ns, deadline_ns=now_ns + PAIR_PROBE_NS_MAX)
    assert connection.client is not None, "the session admits no request before HELLO"
    connection.call = call
    service.pairs.probe(connection.client.id, lane_of(connection.flow), lambda status: call.done(bytes([status])))


def regions(connection: Connection, frame: Frame) -> None:
    """REGIONS."""
    _service(connection)
    channel = connection.channel
    assert isinstance(channel, RdmaNodeChannel), "it was agreed on over another one"
    channel.tell_of(decode_regions(Regions.decode(frame.body).descriptors))
    connection.answer(End())


def _service(connection: Connection) -> RdmaService:
    service = connection.rdma
    if service is None or connection.placing is None or not isinstance(connection.channel, RdmaNodeChannel):
        raise InvalidRequest("RDMA was not agreed on over this connection: see Feature.RDMA")
    service.check()
    return service


HANDLERS: Final[dict[FrameType, Callable[[Connection, Frame], None]]] = {
    FrameType.PAIR: pair,
    FrameType.PROBE: probe,
    FrameType.REGIONS: regions,
}
