"""Messages of clients whose memory the node reaches by RDMA: Feature.RDMA. See docs/protocol.md, "RDMA".

PAIR and PAIRED tell each other the ends of a queue pair, PROBE lets the node read across it once. REGIONS names
registered memory; GET_INTO and OFFER_FROM (wire/shared.py) name places in it. LOST says that the pair is no more, and
that the rest of the call comes in frames.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final, NamedTuple

from kvstore.limits import PAIR_OFFER_BYTES_MAX, REGIONS_PER_CONNECTION_MAX
from kvstore.wire.header import FrameType
from kvstore.wire.messages import U8
from kvstore.wire.schema import Blob, Message, message

_DESCRIPTOR: Final = struct.Struct("<IQQI")
REGION_BYTES: Final = _DESCRIPTOR.size
_Offer = Annotated[bytes, Blob(count_min=1, count_max=PAIR_OFFER_BYTES_MAX)]
_Descriptors = Annotated[bytes, Blob(unit=REGION_BYTES, count_max=REGIONS_PER_CONNECTION_MAX)]


class RegionDescriptor(NamedTuple):
    """A region as the other side must know it.

    Attributes:
        region: how the client calls it in places; below 2**31.
        address: of its first byte, as work requests name it.
        length_bytes: of it.
        remote_key: for the other side's work requests.
    """

    region: int
    address: int
    length_bytes: int
    remote_key: int


@message(FrameType.PAIR)
@dataclass(frozen=True, slots=True, kw_only=True)
class PairRequest(Message):
    """A client's end of a queue pair for its flow class' lane at this worker, in place of the one that was there.

    Attributes:
        offer: transport.rdma.pair_offer.PairOffer.
    """

    offer: _Offer


@message(FrameType.PAIRED)
@dataclass(frozen=True, slots=True, kw_only=True)
class Paired(Message):
    """The node's end, which is connected: connect yours, then PROBE."""

    offer: _Offer


@message(FrameType.PROBE)
@dataclass(frozen=True, slots=True, kw_only=True)
class Probe(Message):
    """Both ends are connected: END has one status, that of a READ across (IBV_WC_*); 0 and the pair is in use."""


@message(FrameType.REGIONS)
@dataclass(frozen=True, slots=True, kw_only=True)
class Regions(Message):
    """Registered memory that this connection's calls may name.

    Attributes:
        descriptors: RegionDescriptor one after the other; known numbers are told anew.
    """

    descriptors: _Descriptors


@message(FrameType.LOST)
@dataclass(frozen=True, slots=True, kw_only=True)
class Lost(Message):
    """The node has no queue pair for the call in progress any more. Close your end before you read on.

    Attributes:
        status: why, as a completion says it (IBV_WC_*); 5 (flushed) when it was closed on purpose, or never there.
    """

    status: U8


def encode_regions(descriptors: Sequence[RegionDescriptor]) -> bytes:
    """The blob of REGIONS."""
    return b"".join([_DESCRIPTOR.pack(*one) for one in descriptors])


def decode_regions(blob: bytes) -> list[RegionDescriptor]:
    """The descriptors in a blob; what they say is the client's device's to check."""
    return [RegionDescriptor(*fields) for fields in _DESCRIPTOR.iter_unpack(blob)]


PAIR_MESSAGES: Final[dict[FrameType, type[Message]]] = {
    kind.TYPE: kind for kind in (PairRequest, Paired, Probe, Regions, Lost)
}
"""The messages of this module, by frame type."""
