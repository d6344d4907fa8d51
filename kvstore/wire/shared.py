"""Messages that name places in a client's memory, and of clients that share memory with their node: same host, Unix
socket, Feature.SHARED_MEMORY. By RDMA other messages tell of the memory (wire/pairs.py), the calls are the same.

A client gives the node a sealed memfd with REGION, and names places in it from then on: GET_INTO says where each record
belongs, OFFER_FROM where it lies. Payload then does not travel. What the node has put into its place it tells with
PLACED, a frame like DATA but without payload. See docs/protocol.md, "Shared memory".
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final, NamedTuple

from kvstore.errors import InvalidRequest
from kvstore.limits import (
    DIGEST_BYTES,
    LOCAL_NAME_BYTES_MAX,
    PAGE_BYTES,
    PLACES_PER_CALL_MAX,
    REGION_BYTES_PER_CLIENT_MAX,
)
from kvstore.wire.header import FrameType
from kvstore.wire.messages import U32, Get, Items, Offer
from kvstore.wire.schema import Blob, Message, Text, Uint, expect_count, message

_PLACE: Final = struct.Struct("<IQI")
PLACE_BYTES: Final = _PLACE.size
Places = Annotated[bytes, Blob(unit=PLACE_BYTES, count_max=PLACES_PER_CALL_MAX)]


PLACE_GOES_ON: Final = 1 << 31
"""In `region` of a place: its record goes on in the next place. By RDMA only."""


class Place(NamedTuple):
    """Where in the client's memory one record, or a part of it, lies or belongs.

    Attributes:
        region: as the client called it in REGION or REGIONS, below 2**31.
        offset: of its first byte; in shared memory a multiple of PAGE_BYTES.
        length_bytes: of GET_INTO the room there is, of OFFER_FROM the record's length.
    """

    region: int
    offset: int
    length_bytes: int


@message(FrameType.LOCAL)
@dataclass(frozen=True, slots=True, kw_only=True)
class Local(Message):
    """Where do clients on your host find you?"""


@message(FrameType.LOCAL_REPLY)
@dataclass(frozen=True, slots=True, kw_only=True)
class LocalReply(Message):
    """The answer to LOCAL.

    Attributes:
        host: what processes on that host know it by (transport.shm.host_id); "" when there is no socket.
        path: of the worker's Unix socket.
    """

    host: Annotated[str, Text(LOCAL_NAME_BYTES_MAX)] = ""
    path: Annotated[str, Text(LOCAL_NAME_BYTES_MAX)] = ""


@message(FrameType.REGION)
@dataclass(frozen=True, slots=True, kw_only=True)
class Region(Message):
    """Memory that this connection's calls may name. One descriptor comes with the frame's bytes (SCM_RIGHTS).

    It must be a memfd of 4 KiB pages, all of it allocated, sealed against shrinking and growing.

    Attributes:
        region: how the client will call it; one that is in use is refused.
        length_bytes: of the memory, a multiple of PAGE_BYTES, at most the file's.
    """

    region: U32
    length_bytes: Annotated[int, Uint(REGION_BYTES_PER_CLIENT_MAX)]

    def validate(self) -> None:
        if not self.length_bytes or self.length_bytes % PAGE_BYTES:
            raise InvalidRequest(f"REGION of {self.length_bytes} bytes; use a multiple of {PAGE_BYTES} above 0")


@message(FrameType.REGION_DROP)
@dataclass(frozen=True, slots=True, kw_only=True)
class RegionDrop(Message):
    """The client does not name these regions (u32 each) any more; unknown ones are passed over."""

    regions: Items


@message(FrameType.GET_INTO)
@dataclass(frozen=True, slots=True, kw_only=True)
class GetInto(Get):
    """A GET of whole records whose bytes the node writes to where they belong: PLACED frames, END if none is final.

    Once END says anything but DEADLINE of an item, nothing of it is written any more. After DEADLINE, after a cancel
    and after the end of the connection a read from the drive may still land in the item's place.

    Attributes:
        places: one Place per key, or more that follow each other (PLACE_GOES_ON), see `encode_places`.
    """

    places: Places = b""

    def validate(self) -> None:
        super(GetInto, self).validate()
        if self.ranges or self.range_counts:
            raise InvalidRequest("GET_INTO reads whole records; ask for ranges with GET")
        _expect_places("GET_INTO.places", self.places, len(self.keys) // DIGEST_BYTES)


@message(FrameType.OFFER_FROM)
@dataclass(frozen=True, slots=True, kw_only=True)
class OfferFrom(Offer):
    """An OFFER whose payloads the node fetches out of shared memory: there is no GRANT and no DATA.

    The bytes that are stored are those that the node found there when it copied them, if they match the CRC table.

    Attributes:
        places: as of GET_INTO.
    """

    places: Places = b""

    def validate(self) -> None:
        super(OfferFrom, self).validate()
        if self.inline:
            raise InvalidRequest("OFFER_FROM carries no payload; use OFFER")
        _expect_places("OFFER_FROM.places", self.places, len(self.keys) // DIGEST_BYTES)


def get_into(get: Get, places: bytes) -> GetInto:
    """The GET of whole records with a place for each."""
    return GetInto(
        namespace=get.namespace,
        keys=get.keys,
        deadline_ns=get.deadline_ns,
        content_ids=get.content_ids,
        accept_pending=get.accept_pending,
        verify=get.verify,
        places=places,
    )


def offer_from(offer: Offer, places: bytes) -> OfferFrom:
    """The OFFER with a place for each of its records, and no payload."""
    return OfferFrom(
        namespace=offer.namespace,
        keys=offer.keys,
        lengths=offer.lengths,
        block_bytes=offer.block_bytes,
        crc_tables=offer.crc_tables,
        deadline_ns=offer.deadline_ns,
        durability=offer.durability,
        wait=offer.wait,
        run_heads=offer.run_heads,
        parents=offer.parents,
        positions=offer.positions,
        parts=offer.parts,
        content_ids=offer.content_ids,
        volatile_ttl_ns=offer.volatile_ttl_ns,
        places=places,
    )


def encode_places(places: Sequence[tuple[int, int, int]]) -> bytes:
    """The blob of a message."""
    return b"".join([_PLACE.pack(*place) for place in places])


encode_place: Final = _PLACE.pack
"""The blob of one place: region, offset, length."""


def decode_place(blob: bytes) -> Place:
    """The one place in a blob of PLACE_BYTES."""
    return Place(*_PLACE.unpack(blob))


def _expect_places(what: str, blob: bytes, count: int) -> None:
    if len(blob) // PLACE_BYTES <= count:
        expect_count(what, blob, PLACE_BYTES, count)


def grouped(places: Sequence[Place], count: int) -> list[list[Place]]:
    """The places of each of `count` records, without PLACE_GOES_ON. Raises InvalidRequest: they are not so many."""
    groups: list[list[Place]] = []
    goes_on = False
    for region, offset, length_bytes in places:
        if not goes_on:
            groups.append([])
        goes_on = region >= PLACE_GOES_ON
        groups[-1].append(Place(region & ~PLACE_GOES_ON, offset, length_bytes))
    if goes_on or len(groups) != count:
        raise InvalidRequest(f"{len(places)} places belong to {len(groups)} records, the request has {count}")
    return groups


def decode_places(blob: bytes) -> list[Place]:
    """The places in a blob; whether they lie inside their regions is for the node to check."""
    return [Place(*fields) for fields in _PLACE.iter_unpack(blob)]


SHARED_MESSAGES: Final[dict[FrameType, type[Message]]] = {
    kind.TYPE: kind for kind in (Region, RegionDrop, GetInto, OfferFrom, Local, LocalReply)
}
"""The messages of this module, by frame type; PLACED has slices instead."""
