"""Calls that name places in the client's memory: GET_INTO, OFFER_FROM. See docs/protocol.md, "Places".

They are a read and a put like any other; the channel moves their payload by itself: through memory that is shared,
where the engine reads from the drive straight into it if it can, or by RDMA.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.engine.api import Engine, ReadSpec
from kvstore.errors import InvalidRequest
from kvstore.limits import DIGEST_BYTES, FRAME_PAYLOAD_BYTES_MAX
from kvstore.server.batch import unpack_u32
from kvstore.server.call import end_absent
from kvstore.server.place_reads import PlaceCall, PlacedMemoryCall
from kvstore.server.puts import start_offer
from kvstore.server.reads import release_all
from kvstore.telemetry.metrics import Verb
from kvstore.transport.base import PlaceChannel
from kvstore.transport.shm_node import ShmNodeChannel
from kvstore.types.results import Refused
from kvstore.wire.expected import plain_get_into
from kvstore.wire.messages import End
from kvstore.wire.shared import GetInto, OfferFrom, RegionDrop, decode_places, grouped

if TYPE_CHECKING:
    from kvstore.server.connection import Connection


def drop_regions(connection: Connection, body: bytes | bytearray) -> None:
    """REGION_DROP."""
    _channel_of(connection).drop_regions(unpack_u32(RegionDrop.decode(body).regions))
    connection.answer(End())


def start_get_into(connection: Connection, body: bytes | bytearray, engine: Engine, *, now_ns: int) -> bool:
    """Begins a GET_INTO; True when the engine has something left to do. Raises InvalidRequest."""
    channel = _channel_of(connection)
    if isinstance(channel, ShmNodeChannel) and connection.ends_with_data:
        plain = plain_get_into(body)
        if plain is not None and _place_from_memory(connection, channel, engine, *plain, now_ns=now_ns):
            connection.metrics.calls[Verb.GET] += 1
            return False
    get = GetInto.decode(body)
    connection.metrics.calls[Verb.GET] += 1
    count = len(get.keys) // DIGEST_BYTES
    places = channel.place_into(decode_places(get.places), connection.session.request_id, count=count)
    namespace = engine.namespace(get.namespace)
    deadline_ns = now_ns + get.deadline_ns
    call = PlaceCall(connection, channel, count=count, now_ns=now_ns, deadline_ns=deadline_ns)
    connection.call = call
    if namespace is None:
        end_absent(call, count)
        return False
    spec = ReadSpec(
        namespace=namespace,
        keys=get.keys,
        flow=connection.flow,
        deadline_ns=deadline_ns,
        content_ids=get.content_ids or None,
        accept_pending=get.accept_pending,
        verify=get.verify,
        places=None if get.verify else places,
    )
    return not call.start(engine, spec, now_ns)


def _place_from_memory(
    connection: Connection,
    channel: ShmNodeChannel,
    engine: Engine,
    asked: tuple[bytes, bytes, int],
    places: bytes,
    *,
    now_ns: int,
) -> bool:
    """Answers a GET_INTO of shared memory when all of it lies in ours and the connection is free; else False."""
    digest, keys, deadline_ns = asked
    namespace = engine.namespace(digest)
    if namespace is None or not keys or not deadline_ns or not connection.can_answer_at_once:
        return False
    records = engine.take_cached(namespace, keys, now_ns=now_ns, bytes_max=FRAME_PAYLOAD_BYTES_MAX)
    if records is None:
        return False
    count = len(keys) // DIGEST_BYTES
    try:
        views = channel.place_into(decode_places(places), connection.session.request_id, count=count)
    except InvalidRequest:
        release_all(records)
        raise
    connection.call = PlacedMemoryCall(
        connection,
        engine,
        namespace,
        keys,
        records,
        channel=channel,
        places=views,
        now_ns=now_ns,
        deadline_ns=now_ns + deadline_ns,
    )
    connection.send_now()
    return True


def start_offer_from(
    connection: Connection, body: bytes | bytearray, engine: Engine, *, refusal: Refused | None, now_ns: int
) -> None:
    """Begins an OFFER_FROM; with `refusal` every item ends so. Raises InvalidRequest."""
    channel = _channel_of(connection)
    offer = OfferFrom.decode(body)
    lengths = unpack_u32(offer.lengths)
    places = decode_places(offer.places)
    for item, (length_bytes, own) in enumerate(zip(lengths, grouped(places, len(lengths)), strict=True)):
        room_bytes = sum(place.length_bytes for place in own)
        if length_bytes != room_bytes:
            raise InvalidRequest(
                f"item {item} of OFFER_FROM has {length_bytes} bytes, its places {room_bytes}: make them equal"
            )
    channel.take_from(places, connection.session.request_id, count=len(lengths))
    start_offer(connection, offer, (), engine, refusal=refusal, now_ns=now_ns)


def _channel_of(connection: Connection) -> PlaceChannel:
    channel = connection.placing
    if channel is None:
        raise InvalidRequest(
            "places were not agreed on over this connection: see Feature.SHARED_MEMORY and Feature.RDMA"
        )
    return channel
