"""The node's lane of single reads: the same answers as the general way, byte for byte, and only for what is its own."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.engine.engine import DriveEngine, EngineSettings
from kvstore.errors import ChecksumMismatch, FormatUnsupported, InvalidRequest, KVStoreError, Unavailable
from kvstore.limits import REQUEST_NS_MAX, MiB
from kvstore.server import dataplane
from kvstore.telemetry.metrics import Verb
from kvstore.testing.plane_lab import LabClient, PlaneLab
from kvstore.transport import exchange
from kvstore.types.checksum import crc_table
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore.types.results import MissReason
from kvstore.wire.header import FrameType, encode_head
from kvstore.wire.messages import Feature, Get, Unpin
from kvstore.wire.plain import PLAIN_GETS, data_head, record_head
from kvstore.wire.slices import FLAG_FINAL, Slice, encode_slices

NAMESPACE = Namespace(
    tenant="default", model="m", weights="w", layout=KVLayout.opaque(chunk_bytes=2 * MiB, chunk_tokens=16)
)
NS = NAMESPACE.digest
SECOND = 1_000_000_000


def key_of(number: int) -> bytes:
    return bytes([number + 1]) * 32


@pytest.fixture(params=["compiled", "in Python"], autouse=True)
def exchanges(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both halves of `kvstore.transport.exchange`."""
    assert exchange.IS_COMPILED, exchange.HOW
    monkeypatch.setattr(exchange, "IS_COMPILED", request.param == "compiled")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[DriveEngine]:
    settings = EngineSettings(
        capacity_bytes=64 * MiB,
        segment_bytes=8 * MiB,
        cache_bytes=16 * MiB,
        staging_bytes=32 * MiB,
        device="threads",
        prefault=False,
    )
    made = DriveEngine.open(tmp_path, settings, now_ns=time.monotonic_ns())
    yield made
    made.close()


@pytest.fixture
def lab(engine: DriveEngine) -> Iterator[PlaneLab]:
    made = PlaneLab(engine)
    yield made
    made.plane.close()
    made.turn_until(lambda: engine.idle)
    made.close()


@pytest.fixture
def client(lab: PlaneLab) -> LabClient:
    made = lab.client(features=Feature.FINAL_DATA)
    made.register(NAMESPACE.manifest())
    made.put(NS, [key_of(at) for at in range(4)], VALUES)
    for at in range(4):
        made.get(NS, [key_of(at)])
    return made


VALUES = [os.urandom(size) for size in (65_536, 1, 200_000, MiB)]


@pytest.fixture
def lane_only(client: LabClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> bool:
        raise AssertionError("this GET should not have left the lane")

    monkeypatch.setattr(dataplane, "start_get", fail)


def get_frame(request_id: int, key: bytes, *, deadline_ns: int = 30 * SECOND, namespace: bytes = NS) -> bytes:
    body = Get(namespace=namespace, keys=key, deadline_ns=deadline_ns).encode()
    return encode_head(FrameType.GET, request_id, body)


@pytest.mark.parametrize("deadline_ns", [1 << 16, 1 << 31, 30 * SECOND, REQUEST_NS_MAX])
def test_records_in_memory_take_the_lane_and_are_counted(
    lab: PlaneLab, engine: DriveEngine, client: LabClient, lane_only: None, deadline_ns: int
) -> None:
    metrics = lab.metrics
    before = (
        metrics.calls[Verb.GET],
        metrics.loaded_records,
        sum(metrics.sent_bytes),
        sum(metrics.get_ns.counts),
        engine.metrics.cache_hits,
    )
    for at in (0, 1, 2, 3, 0):
        assert client.get(NS, [key_of(at)], deadline_ns=deadline_ns) == (b"\0", {0: VALUES[at]})
    total = sum(map(len, VALUES)) + len(VALUES[0])
    after = (
        metrics.calls[Verb.GET],
        metrics.loaded_records,
        sum(metrics.sent_bytes),
        sum(metrics.get_ns.counts),
        engine.metrics.cache_hits,
    )
    assert [now - then for now, then in zip(after, before, strict=True)] == [5, 5, total, 5, 5]


def test_the_answer_has_the_bytes_of_the_general_one(lab: PlaneLab, engine: DriveEngine, client: LabClient) -> None:
    lab.plane.set_view(7, b"")
    for record in engine.cache.at.values():
        facts = record.facts
        length = facts.record_bytes
        one = Slice(0, 0, length, 0, True, facts.content_id, length, facts.block_bytes, facts.crcs)
        assert facts.crcs == crc_table(record.view, facts.block_bytes)
        assert data_head(record_head(facts), 9, 7) == encode_head(
            FrameType.DATA, 9, encode_slices([one]), payload_bytes=length, epoch=7, flags=1 | FLAG_FINAL
        )


def test_what_is_not_for_the_lane_is_answered_all_the_same(lab: PlaneLab, client: LabClient) -> None:
    assert client.get(NS, [key_of(0)])[0] == b"\0"
    assert client.get(NS, [key_of(9)])[0] == bytes([MissReason.ABSENT])
    assert client.get(bytes(32), [key_of(0)])[0] == bytes([MissReason.ABSENT])
    assert client.get(NS, [key_of(0)], deadline_ns=0)[0] == bytes([MissReason.DEADLINE])
    assert client.get(NS, [key_of(0)], accept_pending=True) == (b"\0", {0: VALUES[0]})
    assert client.get(NS, [key_of(0)], verify=True) == (b"\0", {0: VALUES[0]})
    assert client.get(NS, [key_of(0)], content_ids=b"X" * 16)[0] == bytes([MissReason.ABSENT])
    assert client.get(NS, [key_of(0), key_of(1)]) == (bytes(2), {0: VALUES[0], 1: VALUES[1]})
    with pytest.raises(InvalidRequest):
        client.get(NS, [key_of(0)], deadline_ns=REQUEST_NS_MAX + 1)
    assert client.get(NS, [key_of(0)]) == (b"\0", {0: VALUES[0]})


def test_a_dropped_namespace_is_a_miss(lab: PlaneLab, engine: DriveEngine, client: LabClient) -> None:
    done: list[bool] = []
    ref = engine.namespace(NS)
    assert ref is not None
    engine.drop_namespace(ref, lambda: done.append(True))
    lab.plane.wake_engine()
    assert client.get(NS, [key_of(0)])[0] == bytes([MissReason.ABSENT])
    lab.turn_until(lambda: bool(done))


@pytest.mark.parametrize("cut", [1, 31, 32, 33, 100])
def test_a_request_in_two_pieces(lab: PlaneLab, client: LabClient, cut: int) -> None:
    request_id = client.session.start(FrameType.GET)
    frame = get_frame(request_id, key_of(2))
    client.data.clear()
    client.send_raw(frame[:cut])
    for _ in range(3):
        lab.turn()
    client.send_raw(frame[cut:])
    assert client.end_get() == (b"\0", {0: VALUES[2]})


@pytest.mark.parametrize("width", [0, 1])
def test_a_request_changed_on_the_way_is_refused(lab: PlaneLab, client: LabClient, width: int) -> None:
    deadline_ns = (SECOND, 30 * SECOND)[width]
    size = PLAIN_GETS[width].frame_bytes
    for at in range(0, size, 7):
        other = lab.client(features=Feature.FINAL_DATA)
        assert other.get(NS, [key_of(0)], deadline_ns=deadline_ns)[0] == b"\0"
        request_id = other.session.start(FrameType.GET)
        frame = bytearray(get_frame(request_id, key_of(0), deadline_ns=deadline_ns))
        assert len(frame) == size
        frame[at] ^= 0x10
        other.send_raw(bytes(frame))
        other.channel._socket.shutdown(socket.SHUT_WR)  # what waits for more bytes must not wait for ever
        with pytest.raises((ChecksumMismatch, FormatUnsupported, InvalidRequest, Unavailable)) as caught:
            other.receive()
        assert isinstance(caught.value, KVStoreError)


def test_a_socket_that_takes_little_gets_the_rest_later(
    lab: PlaneLab, engine: DriveEngine, client: LabClient, lane_only: None
) -> None:
    (held,) = [one for one in lab.plane._connections if one.client is not None]
    held.channel._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    record = next(one for one in engine.cache.at.values() if one.facts.record_bytes == MiB)
    assert record.piece is not None
    client.start_get(NS, [key_of(3)])
    lab.turn_until(lambda: held.channel.pending_bytes > 0)
    assert record.piece.holders == 2
    assert client.end_get() == (b"\0", {0: VALUES[3]})
    assert record.piece.holders == 1
    assert client.get(NS, [key_of(0)]) == (b"\0", {0: VALUES[0]})
    client.start_get(NS, [key_of(3)])
    lab.turn_until(lambda: held.channel.pending_bytes > 0)
    client.channel.close()
    lab.turn_until(lambda: held.is_closed)
    assert record.piece.holders == 1


def test_a_node_that_stops_takes_no_more(lab: PlaneLab, client: LabClient) -> None:
    lab.plane.stop()
    with pytest.raises(Unavailable, match="shutting down"):
        client.get(NS, [key_of(0)])


def test_a_second_request_behind_the_first_is_refused_or_answered_in_order(lab: PlaneLab, client: LabClient) -> None:
    """Two frames in one piece are none of the lane's business."""
    first = get_frame(client.session.start(FrameType.GET), key_of(0))
    client.data.clear()
    client.send_raw(first + encode_head(FrameType.UNPIN, 77, Unpin(pin_id=5).encode()))
    assert client.end_get() == (b"\0", {0: VALUES[0]})


def test_a_peer_that_leaves_between_requests_is_noticed(lab: PlaneLab, client: LabClient) -> None:
    (held,) = [one for one in lab.plane._connections if one.client is not None]
    client.channel.close()
    lab.turn_until(lambda: held.is_closed)
    assert not lab.metrics.protocol_errors
