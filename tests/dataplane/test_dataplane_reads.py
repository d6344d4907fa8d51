"""GET over real sockets: right bytes in every shape, misses with reasons, fairness, bounds, local failures."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.engine.api import NamespaceRef
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.limits import FRAME_PAYLOAD_BYTES_MAX, MiB
from kvstore.testing.dict_engine import DictEngine
from kvstore.testing.plane_lab import PlaneLab
from kvstore.types.results import MissReason
from kvstore.wire.header import FrameType
from kvstore.wire.messages import Cancel
from kvstore.wire.ranges import encode_ranges


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "little")


@pytest.fixture
def engine() -> Iterator[DictEngine]:
    made = DictEngine()
    yield made
    assert made.held_bytes == 0, "memory of pieces was not given back"
    made.close()


SIZES = [0, 1, 4095, 4096, 4097, 65536, 65537, MiB - 1, MiB, MiB + 1, FRAME_PAYLOAD_BYTES_MAX, 5 * MiB + 3]


@pytest.mark.parametrize("block_bytes", [4096, 65536, 100_000, MiB])
def test_records_of_every_size_arrive_whole(
    lab: PlaneLab, engine: DictEngine, namespace: NamespaceRef, block_bytes: int
) -> None:
    values = [os.urandom(size) for size in SIZES]
    for number, value in enumerate(values):
        engine.put_now(namespace, key_of(number), value, block_bytes)
    client = lab.client()
    keys = [key_of(number) for number in range(len(values))]
    statuses, data = client.get(namespace.digest, keys)
    assert statuses == bytes(len(values))
    assert data == dict(enumerate(values))
    for number, value in enumerate(values):
        assert client.get(namespace.digest, [key_of(number)]) == (b"\0", {0: value})
    assert lab.metrics.get_ns.total_ns > 0
    lasts = [one.item for one in client.pieces if one.last]
    assert sorted(lasts) == sorted(set(lasts))


def test_small_records_share_a_frame(lab: PlaneLab, engine: DictEngine, namespace: NamespaceRef) -> None:
    keys = [key_of(number) for number in range(64)]
    for key in keys:
        engine.put_now(namespace, key, key * 2048)
    client = lab.client()
    client.start_get(namespace.digest, keys)
    frames = []
    while (frame := client.receive()).type is FrameType.DATA:
        frames.append(frame)
    assert [len(frame.slices) for frame in frames] == [16, 16, 16, 16]


def test_thousands_of_tiny_records_fit_frames(lab: PlaneLab, engine: DictEngine, namespace: NamespaceRef) -> None:
    keys = [key_of(number) for number in range(3000)]
    for number, key in enumerate(keys):
        if number % 3:
            engine.put_now(namespace, key, key[: number % 32])
    statuses, data = lab.client().get(namespace.digest, keys)
    assert list(statuses) == [0 if number % 3 else MissReason.ABSENT for number in range(3000)]
    assert data == {number: keys[number][: number % 32] for number in range(3000) if number % 3}


def test_misses_say_why(lab: PlaneLab, engine: DictEngine, namespace: NamespaceRef) -> None:
    client = lab.client()
    unknown = bytes(32)
    assert client.get(unknown, [key_of(1), key_of(2)]) == (bytes([MissReason.ABSENT] * 2), {})
    assert client.get(namespace.digest, []) == (b"", {})
    engine.put_now(namespace, key_of(1), b"value")
    other = client.get(namespace.digest, [key_of(1), key_of(2)], content_ids=b"X" * 16 + bytes(16))
    assert other == (bytes([MissReason.ABSENT] * 2), {})
    content_id = engine.records[(namespace.id, 0, key_of(1))].content_id
    assert client.get(namespace.digest, [key_of(1)], content_ids=content_id) == (b"\0", {0: b"value"})
    metrics = lab.metrics
    assert (metrics.loaded_records, metrics.failed_records) == (1, 4)
    assert metrics.misses[MissReason.ABSENT] == 4


def test_pending_records_are_for_those_who_accept_them(
    lab: PlaneLab, engine: DictEngine, namespace: NamespaceRef
) -> None:
    engine.put_now(namespace, key_of(1), b"value")
    engine.records[(namespace.id, 0, key_of(1))].durable = False
    client = lab.client()
    assert client.get(namespace.digest, [key_of(1)])[0] == bytes([MissReason.PENDING])
    assert client.get(namespace.digest, [key_of(1)], accept_pending=True)[1] == {0: b"value"}


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 200_000), st.integers(1, 90_000)), min_size=1, max_size=3),
        min_size=1,
        max_size=4,
    )
)
def test_ranges_bring_the_blocks_that_cover_them(ranges: list[list[tuple[int, int]]]) -> None:
    engine = DictEngine()
    lab = PlaneLab(engine)
    namespace = engine.add_namespace(b"manifest")
    value = os.urandom(300_000)
    keys = [key_of(number) for number in range(len(ranges))]
    for key in keys:
        engine.put_now(namespace, key, value, 8192)
    counts, blob = encode_ranges(ranges)
    client = lab.client()
    statuses, data = client.get(namespace.digest, keys, range_counts=counts, ranges=blob)
    assert statuses == bytes(len(keys))
    for item, wanted in enumerate(ranges):
        for offset, length in wanted:
            stop = min(offset + length, len(value))
            assert data[item][offset:stop] == value[offset:stop]
    lab.close()
    engine.close()


def test_reads_wait_for_the_client_within_the_engines_window(namespace: NamespaceRef, engine: DictEngine) -> None:
    engine.read_window_bytes = 2 * MiB
    lab = PlaneLab(engine)
    keys = [key_of(number) for number in range(40)]
    for key in keys:
        engine.put_now(namespace, key, key * (MiB // 32))
    client = lab.client()
    client.start_get(namespace.digest, keys)
    for _ in range(200):
        lab.turn()
        assert engine.held_bytes <= 3 * MiB
    assert engine.held_bytes, "the client reads nothing, so something must wait"
    statuses, data = client.end_get()
    assert statuses == bytes(40)
    assert data == {item: key * (MiB // 32) for item, key in enumerate(keys)}
    lab.close()


def test_two_clients_get_turns(lab: PlaneLab, engine: DictEngine, namespace: NamespaceRef) -> None:
    keys = [key_of(number) for number in range(30)]
    for key in keys:
        engine.put_now(namespace, key, key * (MiB // 32))
    engine.put_now(namespace, key_of(99), b"small")
    big, small = lab.client(), lab.client(client_id=b"D" * 16)
    big.start_get(namespace.digest, keys)
    lab.turn()
    small.start_get(namespace.digest, [key_of(99)])
    turns = 0
    while not small._arrived():
        lab.turn()
        turns += 1
        assert turns < 10, "a small read waited for a large one of somebody else"
    assert small.end_get() == (b"\0", {0: b"small"})
    assert big.end_get()[0] == bytes(30)


def test_cancel_ends_a_read_and_the_connection_serves_the_next(
    lab: PlaneLab, engine: DictEngine, namespace: NamespaceRef
) -> None:
    keys = [key_of(number) for number in range(20)]
    for key in keys:
        engine.put_now(namespace, key, key * (5 * MiB // 32), 4096)
    client = lab.client()
    request_id = client.start_get(namespace.digest, keys)
    for _ in range(5):
        lab.turn()
    client.session.send(FrameType.CANCEL)
    client.send(Cancel(), request_id)
    statuses, data = client.end_get()
    assert MissReason.DEADLINE in statuses
    assert all(data[item] == keys[item] * (5 * MiB // 32) for item in data)
    assert client.get(namespace.digest, keys[:1]) == (b"\0", {0: keys[0] * (5 * MiB // 32)})
    client.send(Cancel(), request_id)  # late: ignored
    assert client.get(namespace.digest, keys[:1])[0] == b"\0"


def test_a_client_that_leaves_in_the_middle_gives_everything_back(
    lab: PlaneLab, engine: DictEngine, namespace: NamespaceRef
) -> None:
    keys = [key_of(number) for number in range(20)]
    for key in keys:
        engine.put_now(namespace, key, key * (5 * MiB // 32))
    client = lab.client()
    client.start_get(namespace.digest, keys)
    for _ in range(5):
        lab.turn()
    assert engine.held_bytes
    client.close()
    lab.turn_until(lambda: not lab.metrics.connections)
    assert engine.held_bytes == 0
    assert engine.gone == [b"C" * 16]


def test_a_client_that_never_reads_is_closed_after_the_deadline(
    lab: PlaneLab, engine: DictEngine, namespace: NamespaceRef
) -> None:
    keys = [key_of(number) for number in range(20)]
    for key in keys:
        engine.put_now(namespace, key, key * (5 * MiB // 32))
    client = lab.client()
    client.start_get(namespace.digest, keys)
    for _ in range(20):
        lab.turn()
    lab.clock_ns += 6 * 10**9
    lab.turn()
    assert lab.metrics.connections == 1, "it gets some time after the deadline"
    lab.clock_ns += 6 * 10**9
    lab.turn_until(lambda: not lab.metrics.connections)
    assert engine.held_bytes == 0


def test_held_reads_deliver_when_the_drive_answers(lab: PlaneLab, engine: DictEngine, namespace: NamespaceRef) -> None:
    engine.put_now(namespace, key_of(1), b"value")
    engine.hold_reads = True
    client = lab.client()
    client.start_get(namespace.digest, [key_of(1)])
    for _ in range(5):
        lab.turn()
    assert not client._arrived()
    engine.let_go()
    assert client.end_get() == (b"\0", {0: b"value"})


def test_contradictory_ranges_fail_the_call_only(lab: PlaneLab, namespace: NamespaceRef) -> None:
    client = lab.client()
    with pytest.raises(InvalidRequest, match="range_counts"):
        client.get(namespace.digest, [key_of(1)], range_counts=b"\2\0\0\0", ranges=bytes(16))
    assert not client.is_closed
    assert client.get(namespace.digest, [key_of(1)])[0] == bytes([MissReason.ABSENT])


def test_a_defect_in_one_request_costs_one_connection(
    lab: PlaneLab, engine: DictEngine, namespace: NamespaceRef, caplog: pytest.LogCaptureFixture
) -> None:
    engine.put_now(namespace, key_of(1), b"value")
    broken, healthy = lab.client(), lab.client()
    whole, engine._pieces = engine._pieces, None  # type: ignore[method-assign, assignment]
    broken.start_get(namespace.digest, [key_of(1)])
    with pytest.raises(Exception, match="defect"):
        broken.receive()
    engine._pieces = whole  # type: ignore[method-assign]
    with pytest.raises(Unavailable):
        broken.receive()
    assert healthy.get(namespace.digest, [key_of(1)]) == (b"\0", {0: b"value"})
    assert [record.levelname for record in caplog.records] == ["ERROR"]
