"""PAIR, PROBE, REGIONS and calls that name places, frame by frame: what is answered, and what is refused."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvstore.engine.engine import DriveEngine, EngineSettings
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.limits import REGIONS_PER_CONNECTION_MAX, SECOND_NS, KiB, MiB
from kvstore.server.batch import pack_u32
from kvstore.server.rdma import RdmaService
from kvstore.telemetry.metrics import RdmaMetrics
from kvstore.testing.fake_verbs import FakeFabric, FakeHardware
from kvstore.testing.plane_lab import LabClient, PlaneLab
from kvstore.testing.rdma_lab import client_rail, node_rail
from kvstore.testing.rdma_town import GID_INDEX, gid
from kvstore.transport.base import Landing
from kvstore.transport.rdma import node_channel
from kvstore.transport.rdma.client_lane import ClientLane
from kvstore.transport.rdma.marks import Lane
from kvstore.transport.rdma.pair_offer import PairOffer
from kvstore.transport.rdma.regions import address_of
from kvstore.transport.rdma.statuses import Status
from kvstore.transport.rdma.verbs import SUCCESS, Access, MemoryRegion, VerbsFailure
from kvstore.transport.tcp_node import TcpNodeChannel
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore.wire.header import FrameType, encode_head
from kvstore.wire.messages import Cancel, End, Feature, Get
from kvstore.wire.pairs import Lost, Paired, PairRequest, Probe, RegionDescriptor, Regions, encode_regions
from kvstore.wire.shared import PLACE_GOES_ON, Place, RegionDrop, encode_places, get_into, offer_from

NAMESPACE = Namespace(tenant="default", model="m", weights="w", layout=KVLayout.opaque(chunk_bytes=MiB))
NS = NAMESPACE.digest
KEY = bytes([7]) * 32
VALUE = os.urandom(300 * KiB)


class Bench:
    """A node with RDMA and one raw client whose memory is one region, number 1."""

    def __init__(self, folder: Path) -> None:
        self.fabric = FakeFabric({"node0": FakeHardware(gids={3: gid(1)}), "client0": FakeHardware(gids={3: gid(2)})})
        settings = EngineSettings(capacity_bytes=128 * MiB, cache_bytes=8 * MiB, staging_bytes=32 * MiB)
        self.engine = DriveEngine.open(folder, settings, now_ns=0)
        self.lab = PlaneLab(self.engine)
        self.metrics = RdmaMetrics()
        rail = node_rail(self.fabric, "node0", GID_INDEX)
        self.service = RdmaService(rail, self.metrics, lambda: self.lab.plane.now_ns)
        self.service.register([self.engine.cache.arena.memory])
        self.lab.plane.use_rdma(self.service)
        self.rail = client_rail(self.fabric, "client0", GID_INDEX)
        self.lane = ClientLane(self.rail, Lane.FOREGROUND)
        self.memory = memoryview(bytearray(MiB))
        access = Access.LOCAL_WRITE | Access.REMOTE_READ | Access.REMOTE_WRITE
        self.region: MemoryRegion = self.rail.register(address_of(self.memory), len(self.memory), access)
        self.client = self.greet()
        self.client.register(NAMESPACE.manifest())
        self.client.put(NS, [KEY], [VALUE])

    def greet(self, features: Feature = Feature.RDMA) -> LabClient:
        return self.lab.client(features=features)

    def pair(self) -> None:
        """The handshake, and the region."""
        answer = self.client.call(PairRequest(offer=self.lane.begin(0).encode()), Paired)
        self.lane.answer(PairOffer.decode(answer.offer), 0)
        [status] = self.client.call(Probe(), End).statuses
        assert status == SUCCESS
        self.lane.probed(status, 0)
        self.describe()

    def describe(self, **changes: int) -> None:
        region = self.region
        one = RegionDescriptor(1, region.address, region.length_bytes, region.remote_key)._replace(**changes)
        self.client.call(Regions(descriptors=encode_regions([one])), End)

    def start_get(self, *places: Place) -> None:
        get = Get(namespace=NS, keys=KEY, deadline_ns=5 * SECOND_NS)
        self.client.data, self.client.pieces = {}, []
        self.client.start(get_into(get, encode_places(places)))

    def close(self) -> None:
        self.client.close()
        self.lane.close()
        self.region.close()
        self.rail.close()
        self.lab.close()
        self.service.close()
        self.engine.close(within_ns=SECOND_NS)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.close()


def test_a_record_is_placed_in_pieces_and_then_told(bench: Bench) -> None:
    bench.pair()
    cut = 100_001
    bench.start_get(Place(1 | PLACE_GOES_ON, 7, cut), Place(1, 600 * KiB, len(VALUE) - cut))
    frame = bench.client.receive()
    assert frame.type is FrameType.PLACED
    assert sum(one.length_bytes for one in frame.slices) == len(VALUE)
    assert bench.client.expect(End).statuses == b"\0"
    assert bench.memory[7 : 7 + cut].tobytes() == VALUE[:cut]
    assert bench.memory[600 * KiB : 600 * KiB + len(VALUE) - cut].tobytes() == VALUE[cut:]
    assert not any(bench.memory[:7])


def test_a_put_is_fetched_out_of_places(bench: Bench) -> None:
    bench.pair()
    bench.memory[5 : 5 + len(VALUE)] = VALUE[::-1]
    key = bytes([8]) * 32
    offer = bench.client.offer(NS, [key], [VALUE[::-1]])
    bench.client.start(offer_from(offer, encode_places([Place(1, 5, len(VALUE))])))
    assert bench.client.end_put([VALUE[::-1]])[0][0] == 16
    assert bench.client.get(NS, [key]) == (b"\0", {0: VALUE[::-1]})


def test_without_a_pair_the_call_comes_in_frames(bench: Bench) -> None:
    bench.describe()
    bench.start_get(Place(1, 0, len(VALUE)))
    assert bench.client.expect(Lost).status == Status.FLUSHED
    assert bench.client.end_get() == (b"\0", {0: VALUE})
    offer = bench.client.offer(NS, [KEY[::-1]], [VALUE])
    bench.client.start(offer_from(offer, encode_places([Place(1, 0, len(VALUE))])))
    assert bench.client.expect(Lost).status == Status.FLUSHED
    bench.client.end_put([VALUE])


def test_a_wrong_key_is_told_with_its_reason(bench: Bench) -> None:
    bench.pair()
    bench.describe(remote_key=99)
    bench.start_get(Place(1, 0, len(VALUE)))
    assert bench.client.expect(Lost).status == Status.REMOTE_ACCESS
    assert bench.client.end_get() == (b"\0", {0: VALUE})
    assert not any(bench.memory)


def test_a_cancelled_read_moves_nothing_behind_its_end(bench: Bench) -> None:
    bench.pair()
    bench.fabric.hold()
    bench.start_get(Place(1, 0, len(VALUE)))
    for _ in range(20):
        bench.lab.turn()
    bench.client.session.send(FrameType.CANCEL)
    bench.client.send_raw(_head(FrameType.CANCEL, bench.client.session.request_id))
    assert bench.client.expect(Lost).status == Status.FLUSHED
    assert bench.client.expect(End).statuses == b"\x06", "DEADLINE: it has not come"
    bench.fabric.release()
    for _ in range(20):
        bench.lab.turn()
    assert not any(bench.memory)
    assert bench.engine.cache.arena.used_bytes == bench.engine.cache.used_bytes, "its memory was given back"


def test_what_makes_no_sense_is_refused_and_the_connection_lives(bench: Bench) -> None:
    client = bench.client
    with pytest.raises(InvalidRequest, match="open it first"):
        client.call(Probe(), End)
    with pytest.raises(InvalidRequest, match="offer of a queue pair"):
        client.call(PairRequest(offer=b"nothing"), Paired)
    bench.pair()
    for places, words in (
        ((Place(9, 0, len(VALUE)),), "region 9 is not open"),
        ((Place(1, MiB, 1),), "places lie inside"),
        ((Place(1 | PLACE_GOES_ON, 0, 5),), "belong to 1 records"),
        ((Place(1, 0, 5), Place(1, 5, 5)), "belong to 2 records"),
    ):
        bench.start_get(*places)
        with pytest.raises(InvalidRequest, match=words):
            client.receive()
    many = [RegionDescriptor(number, 4096, 1, 0) for number in range(2, REGIONS_PER_CONNECTION_MAX + 1)]
    client.call(Regions(descriptors=encode_regions(many)), End)
    client.call(RegionDrop(regions=pack_u32([one.region for one in many])), End)
    bench.start_get(Place(1, 0, len(VALUE)))
    assert client.receive().type is FrameType.PLACED


def test_who_has_not_agreed_on_it_may_not(bench: Bench) -> None:
    other = bench.greet(Feature.NONE)
    for message, answer in ((Probe(), End), (PairRequest(offer=bytes(57)), Paired), (Regions(descriptors=b""), End)):
        with pytest.raises(InvalidRequest, match=r"Feature\.RDMA"):
            other.call(message, answer)
    other.close()


def test_a_device_that_goes_costs_speed_only(bench: Bench) -> None:
    bench.pair()
    bench.service._fail(_failure())
    bench.start_get(Place(1, 0, len(VALUE)))
    assert bench.client.expect(Lost).status == Status.FLUSHED
    assert bench.client.end_get() == (b"\0", {0: VALUE})
    with pytest.raises(Unavailable, match="device is gone"):
        bench.client.call(PairRequest(offer=bytes(57)), Paired)
    assert bench.metrics.choice.startswith("TCP: the RDMA device is gone")


def test_a_call_goes_on_in_frames_when_the_device_goes(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it moves ends at once, and its descriptor, which is readable for ever then, wakes nobody."""
    bench.pair()
    bench.fabric.hold()
    bench.start_get(Place(1, 0, len(VALUE)))
    for _ in range(20):
        bench.lab.turn()

    def gone() -> None:
        raise _failure()

    completions = bench.service._rail._completions
    monkeypatch.setattr(completions, "take_events", gone)
    os.eventfd_write(completions.fileno(), 1)
    assert bench.client.expect(Lost).status == Status.FLUSHED
    assert bench.client.end_get() == (b"\0", {0: VALUE})
    assert not bench.service.has_ended
    assert not select.select([bench.service.fileno()], [], [], 0)[0]


def one_through_and_one_on_its_way(bench: Bench) -> tuple[LabClient, LabClient]:
    """Two connections of one pair: the first waits for a get, and the second's has ended."""
    bench.pair()
    first, second = bench.client, bench.greet()
    bench.client = second
    bench.describe()
    bench.start_get(Place(1, 512 * KiB, len(VALUE)))
    assert second.receive().type is FrameType.PLACED
    assert second.expect(End).statuses == b"\0"
    bench.fabric.hold()
    bench.client = first
    bench.start_get(Place(1, 0, len(VALUE)))
    for _ in range(20):
        bench.lab.turn()
    return first, second


def test_a_cancel_that_comes_behind_the_end_frees_the_other_calls_as_well(bench: Bench) -> None:
    """Who gave up has closed its end, from which the others would wait for answers."""
    first, second = one_through_and_one_on_its_way(bench)
    second.send_raw(_head(FrameType.CANCEL, second.session.request_id))
    assert first.expect(Lost).status == Status.FLUSHED
    assert first.end_get() == (b"\0", {0: VALUE})
    bench.client = second
    bench.start_get(Place(1, 0, len(VALUE)))  # the connection lives
    assert second.expect(Lost).status == Status.FLUSHED
    assert second.end_get() == (b"\0", {0: VALUE})
    second.close()


def test_a_connection_that_ends_behind_the_end_frees_the_other_calls_as_well(bench: Bench) -> None:
    """Its client may have given up a call whose END it has not read, and closed its end of the pair."""
    first, second = one_through_and_one_on_its_way(bench)
    second.close()
    assert first.expect(Lost).status == Status.FLUSHED
    assert first.end_get() == (b"\0", {0: VALUE})


def test_a_connection_that_ends_long_after_its_calls_leaves_the_pair(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.pair()
    second = bench.greet()
    first, bench.client = bench.client, second
    bench.describe()
    bench.start_get(Place(1, 512 * KiB, len(VALUE)))
    assert second.receive().type is FrameType.PLACED
    assert second.expect(End).statuses == b"\0"
    monkeypatch.setattr(node_channel, "PAIR_UNANSWERED_NS", 0)
    second.close()
    for _ in range(20):
        bench.lab.turn()
    bench.client = first
    bench.start_get(Place(1, 0, len(VALUE)))
    assert first.receive().type is FrameType.PLACED
    assert first.expect(End).statuses == b"\0"


def test_a_put_in_frames_is_checked_in_one_go(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """As over TCP without RDMA: the channel is told how long the blocks are whose checksums come with the data."""
    other = bench.greet(Feature.RDMA | Feature.DATA_CRCS)
    told: list[int] = []
    expect = TcpNodeChannel._expect

    def record(channel: TcpNodeChannel, landings: Sequence[Landing], block_bytes: int) -> bool:
        told.append(block_bytes)
        return expect(channel, landings, block_bytes)

    monkeypatch.setattr(TcpNodeChannel, "_expect", record)
    keys = [bytes([number]) * 32 for number in range(40, 48)]
    offer = other.offer(NS, keys, [VALUE] * 8, crc_tables=b"")
    other.start(offer)
    other.end_put([VALUE] * 8, with_crcs=True)
    assert told
    assert all(told), told
    other.close()


def _head(kind: FrameType, request_id: int) -> bytes:
    return encode_head(kind, request_id, Cancel().encode())


def _failure() -> VerbsFailure:
    return VerbsFailure("poll_cq", 5, "a completion queue")


def test_a_cancel_frees_the_other_calls_of_the_pair_at_once(bench: Bench) -> None:
    bench.pair()
    first, second = bench.client, bench.greet()
    bench.client = second
    bench.describe()
    bench.fabric.hold()
    for client, at in ((first, 0), (second, 512 * KiB)):
        bench.client = client
        bench.start_get(Place(1, at, len(VALUE)))
    second.session.send(FrameType.CANCEL)
    second.send_raw(_head(FrameType.CANCEL, second.session.request_id))
    assert first.expect(Lost).status == Status.FLUSHED
    assert first.end_get() == (b"\0", {0: VALUE})
    assert second.expect(Lost).status == Status.FLUSHED
    assert second.expect(End).statuses == b"\x06"
    second.close()
    bench.client = first
