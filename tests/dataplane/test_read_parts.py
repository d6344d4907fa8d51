"""A GET of one record, tens of thousands of times: right bytes, part by part, and others have their turns between."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.device.memory import MemoryDevice
from kvstore.engine.api import NamespaceRef, ReadHandle, ReadSink, ReadSpec
from kvstore.engine.engine import DriveEngine, EngineSettings
from kvstore.limits import BATCH_ITEMS_MAX, READ_PART_KEYS, READ_PART_RANGES, READ_PART_REPEATS, MiB
from kvstore.server.read_parts import has_parts, parts_of
from kvstore.testing.plane_lab import LabClient, PlaneLab
from kvstore.types.flow import FlowClass
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore.types.results import MissReason
from kvstore.wire.messages import Cancel, Ping, Pong
from kvstore.wire.ranges import encode_ranges

NAMESPACE = Namespace(
    tenant="default", model="m", weights="w", layout=KVLayout.opaque(chunk_bytes=1 * MiB, chunk_tokens=16)
)
NS = NAMESPACE.digest
REF = NamespaceRef(id=1, digest=NS, generation=1, salt=bytes(16), tenant="default")
KEY, OTHER, ABSENT = b"k" * 32, b"o" * 32, b"a" * 32
VALUE, OTHER_VALUE = b"v" * 600, b"w" * 500
MANY = BATCH_ITEMS_MAX


@dataclass(slots=True)
class Town:
    """A data plane over an engine, and how many ranges that was asked for at one time."""

    lab: PlaneLab
    engine: DriveEngine
    asked: list[int] = field(default_factory=list)

    def read(self, spec: ReadSpec, sink: ReadSink, *, now_ns: int) -> ReadHandle:
        count = len(spec.keys) // 32
        ranges = spec.ranges
        self.asked.append(
            count if ranges is None else count * len(ranges[0]) if len(ranges) == 1 else sum(map(len, ranges))
        )
        return DriveEngine.read(self.engine, spec, sink, now_ns=now_ns)

    def staged_bytes(self) -> int:
        self.engine.update_gauges(time.monotonic_ns())
        return self.engine.metrics.staging_bytes


@pytest.fixture(params=[0, 64 * MiB], ids=["cold", "cached"])
def town(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Town]:
    settings = EngineSettings(
        cache_bytes=request.param, staging_bytes=64 * MiB, segment_bytes=0, queue_depth=32, prefault=False
    )
    engine = DriveEngine(MemoryDevice(size_bytes=128 * MiB), settings, now_ns=time.monotonic_ns())
    made = Town(PlaneLab(engine), engine)
    monkeypatch.setattr(engine, "read", made.read, raising=True)
    yield made
    made.lab.close()
    engine.close()


@pytest.fixture
def client(town: Town) -> LabClient:
    made = town.lab.client()
    made.register(NAMESPACE.manifest())
    made.put(NS, [KEY, OTHER], [VALUE, OTHER_VALUE])
    return made


@pytest.mark.parametrize("range_", [(0, 1), (0, 0), None])
def test_one_record_many_times_comes_right_and_others_have_their_turns(
    town: Town, client: LabClient, range_: tuple[int, int] | None
) -> None:
    counts, ranges = encode_ranges([[range_]] if range_ else None)
    other = town.lab.client(client_id=b"D" * 16)
    client.start_get(NS, [KEY] * MANY, range_counts=counts, ranges=ranges)
    town.lab.turn_until(lambda: bool(town.asked))
    assert other.call(Ping(), Pong)
    assert len(town.asked) < MANY // READ_PART_REPEATS // 2, "between the parts"
    statuses, data = client.end_get()
    assert statuses == bytes(MANY)
    assert set(data.values()) == {VALUE if range_ != (0, 0) else bytes(600)}
    assert len(data) == MANY
    assert max(town.asked) <= READ_PART_REPEATS
    assert sum(town.asked) == MANY
    town.lab.turn_until(lambda: not town.staged_bytes())


def test_each_item_has_its_own_ranges_copy_and_miss(town: Town, client: LabClient) -> None:
    keys = [KEY, OTHER, ABSENT] * READ_PART_RANGES
    counts, ranges = encode_ranges([[(0, 10), (100, 10)], [(0, 1)], [(0, 1)]] * READ_PART_RANGES)
    statuses, data = client.get(NS, keys, range_counts=counts, ranges=ranges)
    assert statuses == bytes([0, 0, MissReason.ABSENT]) * READ_PART_RANGES
    assert [data[item] for item in range(3, 5)] == [VALUE, OTHER_VALUE]
    assert [data[item] for item in range(len(keys) - 3, len(keys) - 1)] == [VALUE, OTHER_VALUE]
    assert len(town.asked) > 3
    wrong = b"x" * 16
    statuses, _ = client.get(
        NS, [KEY] * 3 * READ_PART_RANGES, content_ids=(bytes(16) * (3 * READ_PART_RANGES - 1)) + wrong
    )
    assert statuses == bytes(3 * READ_PART_RANGES - 1) + bytes([MissReason.ABSENT])


def test_a_cancel_between_parts_ends_it_and_gives_all_memory_back(town: Town, client: LabClient) -> None:
    counts, ranges = encode_ranges([[(0, 1)]])
    request_id = client.start_get(NS, [KEY] * MANY, range_counts=counts, ranges=ranges)
    while len(town.asked) < 2:
        client.receive()
    client.send(Cancel(), request_id)
    statuses, _ = client.end_get()
    assert statuses.count(0) < MANY
    assert statuses.endswith(bytes([MissReason.DEADLINE]))
    asked = len(town.asked)
    assert client.call(Ping(), Pong)
    assert len(town.asked) == asked
    town.lab.turn_until(lambda: not town.staged_bytes())


def test_records_that_are_not_there_are_missed_part_by_part(town: Town, client: LabClient) -> None:
    """A part in each turn of the loop: all at once kept it for 80 ms."""
    keys = [number.to_bytes(32, "big") for number in range(MANY)]
    there = READ_PART_KEYS + 5
    keys[there], keys[MANY - 1] = KEY, OTHER
    turns: list[int] = []
    town.lab.plane.woke, woke = lambda: (woke(), turns.append(len(town.asked)))[0], town.lab.plane.woke  # type: ignore[method-assign]
    statuses, data = client.get(NS, keys)
    expected = bytearray([MissReason.ABSENT]) * MANY
    expected[there] = expected[MANY - 1] = 0
    assert statuses == expected
    assert data == {there: VALUE, MANY - 1: OTHER_VALUE}
    assert town.asked == [READ_PART_KEYS] * (MANY // READ_PART_KEYS)
    assert {after - before for before, after in pairwise(turns)} == {0, 1}


def test_the_usual_read_goes_in_one_part(town: Town, client: LabClient) -> None:
    different = [number.to_bytes(32, "big") for number in range(READ_PART_KEYS)]
    counts, ranges = encode_ranges([[(0, 1)]])
    client.get(NS, different[:READ_PART_RANGES], range_counts=counts, ranges=ranges)
    client.get(NS, different)
    client.get(NS, [KEY] * READ_PART_REPEATS)
    assert town.asked == [READ_PART_RANGES, READ_PART_KEYS, READ_PART_REPEATS]


@pytest.mark.parametrize("ranges", [None, [[(0, 1)]]])
def test_a_part_is_short_from_where_a_record_comes_again(ranges: list[list[tuple[int, int]]] | None) -> None:
    different = [number.to_bytes(32, "big") for number in range(3 * READ_PART_REPEATS)]
    for again, first in ((different[7], 700), (different[600], 700), (KEY, 3 * READ_PART_REPEATS)):
        keys = [*different[:700], again, *different[700:]]
        spec = ReadSpec(namespace=REF, keys=b"".join(keys), flow=FlowClass.DECODE_READ, deadline_ns=1, ranges=ranges)
        parts = [len(part.keys) // 32 for _, part in parts_of(spec)]
        assert (parts[0] if len(parts) > 1 else len(different)) == first
        assert sum(parts) == len(keys)


@given(
    st.lists(st.integers(1, 4096), min_size=1, max_size=60),
    st.sampled_from(["own", "one", "none"]),
    st.booleans(),
    st.integers(1, 60),
)
def test_the_parts_are_the_whole(counts: list[int], of: str, has_ids: bool, records: int) -> None:
    ranges = [[(at, number) for at in range(count)] for number, count in enumerate(counts)]
    keys = b"".join((number % records).to_bytes(32, "big") for number in range(len(counts)))
    ids = bytes(range(16)) * len(counts) if has_ids else None
    given_ranges = {"own": ranges, "one": ranges[:1], "none": None}[of]
    spec = ReadSpec(
        namespace=REF, keys=keys, flow=FlowClass.DECODE_READ, deadline_ns=1, ranges=given_ranges, content_ids=ids
    )
    parts = list(parts_of(spec))
    assert b"".join(bytes(part.keys) for _, part in parts) == keys
    at = 0
    for first, part in parts:
        count = len(part.keys) // 32
        assert first == at
        if of == "own":
            assert part.ranges == ranges[at : at + count]
        else:
            assert part.ranges == given_ranges
        asked = sum(counts[at : at + count]) if of == "own" else count * (counts[0] if of == "one" else 1)
        repeats = len({part.keys[one * 32 : one * 32 + 32] for one in range(count)}) < count
        assert count == 1 or asked <= (READ_PART_REPEATS if repeats else READ_PART_RANGES)
        assert part.content_ids == (None if ids is None else ids[:16] * count)
        at += count
    assert at == len(counts)
    assert not has_parts(spec) or len(parts) > 1 or len(counts) == 1
    assert has_parts(spec) or len(parts) == 1
