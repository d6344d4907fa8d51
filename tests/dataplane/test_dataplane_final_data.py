"""GETs that end with their last DATA frame: right bytes, memory given back, and END where anything else is the case."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.engine.api import NamespaceRef
from kvstore.engine.engine import DriveEngine, EngineSettings
from kvstore.errors import InvalidRequest
from kvstore.limits import FRAME_AIM_BYTES, MEMORY_READ_BYTES_MAX, SECOND_NS, KiB, MiB
from kvstore.server.connection import Connection
from kvstore.server.loop import Loop
from kvstore.server.reads import MemoryCall
from kvstore.testing.plane_lab import LabClient, PlaneLab
from kvstore.transport import outflow
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore.types.results import MissReason
from kvstore.wire.header import FrameType, encode_head
from kvstore.wire.messages import Cancel, Drop, End, Feature
from kvstore.wire.ranges import encode_ranges
from kvstore.wire.slices import FLAG_FINAL, NO_CONTENT_ID, Slice, encode_slices

NAMESPACE = Namespace(
    tenant="default", model="m", weights="w", layout=KVLayout.opaque(chunk_bytes=2 * MiB, chunk_tokens=16)
)
NS = NAMESPACE.digest


def key_of(number: int) -> bytes:
    return bytes([number % 251]) * 8 + number.to_bytes(8, "little") * 3


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
    made.turn_until(lambda: engine.idle and not staged_bytes(engine))
    made.close()


def staged_bytes(engine: DriveEngine) -> int:
    engine.update_gauges(time.monotonic_ns())
    return engine.metrics.staging_bytes


def stored(lab: PlaneLab, sizes: list[int]) -> tuple[LabClient, list[bytes], list[bytes]]:
    """A client that takes final DATA, and records that lie in the node's memory."""
    client = lab.client(features=Feature.FINAL_DATA)
    client.register(NAMESPACE.manifest())
    keys = [key_of(number) for number in range(len(sizes))]
    values = [os.urandom(size) for size in sizes]
    client.put(NS, keys, values)
    for key in keys:
        client.get(NS, [key])
    return client, keys, values


@pytest.mark.parametrize("sizes", [[1], [0], [65536], [MiB, MiB], [0, 5, 4096, 65537, 0], [1000] * 960])
def test_hits_in_memory_end_with_one_frame(lab: PlaneLab, sizes: list[int]) -> None:
    client, keys, values = stored(lab, sizes)
    loaded = lab.metrics.loaded_records
    client.start_get(NS, keys)
    frame = client.receive()
    assert (frame.type, frame.is_final) == (FrameType.DATA, True)
    assert [bytes(client.data[item]) for item in range(len(keys))] == values
    assert lab.metrics.loaded_records == loaded + len(keys)
    assert client.get(NS, keys) == (bytes(len(keys)), dict(enumerate(values))), "the connection goes on"


def test_whoever_has_not_named_the_feature_gets_end(lab: PlaneLab) -> None:
    _, keys, values = stored(lab, [1000, 2000])
    other = lab.client()
    other.start_get(NS, keys)
    assert not other.receive().is_final
    assert other.expect(End).statuses == bytes(2)
    assert [bytes(other.data[item]) for item in range(2)] == values


@pytest.mark.parametrize("sizes", [[1000] * 961, [MiB, MiB, 1], [700_000] * 3, [MiB + 1]])
def test_what_does_not_fit_one_frame_ends_with_the_last_of_several(lab: PlaneLab, sizes: list[int]) -> None:
    client, keys, values = stored(lab, sizes)
    loaded = lab.metrics.loaded_records
    client.start_get(NS, keys)
    frames = [client.receive()]
    while not frames[-1].is_final:
        frames.append(client.receive())
    assert {frame.type for frame in frames} == {FrameType.DATA}
    assert len(frames) > 1
    assert [bytes(client.data[item]) for item in range(len(keys))] == values
    assert lab.metrics.loaded_records == loaded + len(keys)
    assert client.get(NS, keys) == (bytes(len(keys)), dict(enumerate(values))), "the connection goes on"


def test_misses_ranges_and_pinned_copies_end_with_end(lab: PlaneLab) -> None:
    client, keys, values = stored(lab, [1000, 2000])
    assert client.get(NS, [*keys, key_of(9)])[0] == bytes([0, 0, MissReason.ABSENT])
    counts, ranges = encode_ranges([[(0, 10)]])
    assert client.get(NS, keys, range_counts=counts, ranges=ranges)[0] == bytes(2)
    assert client.get(NS, keys, content_ids=b"X" * 32)[0] == bytes([MissReason.ABSENT] * 2)
    assert client.get(NS, keys, deadline_ns=0)[0] == bytes([MissReason.DEADLINE] * 2)
    assert client.get(bytes(32), keys)[0] == bytes([MissReason.ABSENT] * 2)
    assert client.get(NS, keys) == (bytes(2), dict(enumerate(values)))


def test_a_socket_that_takes_little_gets_the_rest_later(lab: PlaneLab, engine: DriveEngine) -> None:
    client, keys, values = stored(lab, [MiB])
    (held,) = [one for one in lab.plane._connections if one.client is not None]
    held.channel._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    client.start_get(NS, keys)
    lab.turn_until(lambda: held.channel.pending_bytes > 0)
    assert staged_bytes(engine) == 0, "it is sent from where it is cached"
    assert client.end_get() == (b"\0", {0: values[0]})
    assert not held.channel.pending_bytes


def test_a_client_that_leaves_in_the_middle_lets_go_of_the_memory(lab: PlaneLab, engine: DriveEngine) -> None:
    client, keys, _ = stored(lab, [MiB])
    (held,) = [one for one in lab.plane._connections if one.client is not None]
    held.channel._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    client.start_get(NS, keys)
    lab.turn_until(lambda: held.channel.pending_bytes > 0)
    record = next(iter(engine.cache.at.values()))
    assert record.piece is not None
    assert record.piece.holders == 2
    client.channel.close()
    lab.turn_until(lambda: held.is_closed)
    assert record.piece.holders == 1


COUNT = 12


def begun(lab: PlaneLab, engine: DriveEngine) -> tuple[LabClient, list[bytes], list[bytes], Connection]:
    """A GET of 12 MiB from memory, over a socket that takes little, after its first frames were made."""
    client, keys, values = stored(lab, [MiB] * COUNT)
    assert all(engine.cache.find(ref_of(engine).salt, key) for key in keys)
    (held,) = [one for one in lab.plane._connections if one.client is not None]
    held.channel._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 * KiB)
    client.start_get(NS, keys, deadline_ns=10 * SECOND_NS)
    lab.turn_until(lambda: held.channel.pending_bytes > 0)
    assert isinstance(held.call, MemoryCall)
    return client, keys, values, held


def ref_of(engine: DriveEngine) -> NamespaceRef:
    ref = engine.namespace(NS)
    assert ref is not None
    return ref


def holders(engine: DriveEngine) -> list[int]:
    return [one.piece.holders for one in engine.cache.at.values() if one.piece is not None]


def test_a_long_read_from_memory_holds_no_more_than_its_frames(lab: PlaneLab, engine: DriveEngine) -> None:
    client, _, values, held = begun(lab, engine)
    assert holders(engine).count(2) <= MEMORY_READ_BYTES_MAX // MiB < COUNT
    assert client.end_get() == (bytes(COUNT), dict(enumerate(values)))
    assert holders(engine) == [1] * COUNT
    assert held.call is None


def test_what_left_memory_meanwhile_comes_from_the_drive(lab: PlaneLab, engine: DriveEngine) -> None:
    client, keys, values, _ = begun(lab, engine)
    salt = ref_of(engine).salt
    for key in keys[9:11]:
        engine.cache.forget(salt, key)
    reads = engine.metrics.read_records
    assert client.end_get() == (bytes(COUNT), dict(enumerate(values)))
    assert engine.metrics.read_records == reads + 2
    assert client.get(NS, keys) == (bytes(COUNT), dict(enumerate(values))), "the connection goes on"


def test_what_was_dropped_meanwhile_is_a_miss(lab: PlaneLab, engine: DriveEngine) -> None:
    client, _, values, _ = begun(lab, engine)
    lab.client(client_id=b"D" * 16).call(Drop(namespace=NS), End)
    statuses, found = client.end_get()
    sent = statuses.count(0)
    assert 2 <= sent < COUNT
    assert statuses == bytes(sent) + bytes([MissReason.ABSENT]) * (COUNT - sent)
    assert found == dict(enumerate(values[:sent]))


@pytest.mark.parametrize("how", ["leaves", "cancels", "is late"])
def test_a_long_read_from_memory_that_ends_early_gives_all_back(lab: PlaneLab, engine: DriveEngine, how: str) -> None:
    client, keys, values, held = begun(lab, engine)
    if how == "leaves":
        client.channel.close()
        lab.turn_until(lambda: held.is_closed)
    else:
        if how == "cancels":
            client.send(Cancel(), held.session.request_id)
        else:
            lab.clock_ns = 11 * SECOND_NS
        statuses, found = client.end_get()
        sent = statuses.count(0)
        assert statuses == bytes(sent) + bytes([MissReason.DEADLINE]) * (COUNT - sent)
        assert found == dict(enumerate(values[:sent]))
        lab.clock_ns = 0
        assert client.get(NS, keys) == (bytes(COUNT), dict(enumerate(values))), "the connection goes on"
    assert holders(engine) == [1] * COUNT


# --- sending while the loop waits -----------------------------------------------------------------------------------
@pytest.fixture(params=["lent", "a turn for each part"])
def kind(request: pytest.FixtureRequest, lab: PlaneLab, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of a loop."""
    if request.param != "lent":
        monkeypatch.setattr(outflow, "IS_COMPILED", False)
        assert Loop().outflow is None
        lab.loop.outflow = None
    return str(request.param)


@pytest.mark.parametrize("sizes", [[MiB] * 12, [64 * KiB] * 180, [MiB, 5, 900 * KiB, 0, MiB, 2 * MiB]])
def test_reads_are_answered_alike(lab: PlaneLab, kind: str, sizes: list[int]) -> None:
    client, keys, values = stored(lab, sizes)
    (held,) = [one for one in lab.plane._connections if one.client is not None]
    held.channel._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 * KiB)
    for _ in range(2):
        assert client.get(NS, keys) == (bytes(len(keys)), dict(enumerate(values)))
    assert not held.is_blocked
    assert held.channel.pending_bytes == 0
    assert not any(lab.loop.outflow.sent_bytes(held.channel.fileno()) for _ in "1" if lab.loop.outflow)


def test_what_has_gone_out_is_counted_while_it_is_lent(lab: PlaneLab, kind: str) -> None:
    client, keys, _ = stored(lab, [MiB] * 12)
    (held,) = [one for one in lab.plane._connections if one.client is not None]
    client.start_get(NS, keys)
    lab.turn_until(lambda: held.is_blocked)
    seen = {held.channel.pending_bytes}
    moved = held.channel.progress
    assert moved is not None
    total = 0
    while total < 3 * MiB:
        total += len(client.channel.connected.recv(256 * KiB))
        lab.turn()
        seen.add(held.channel.pending_bytes)
    after = held.channel.progress
    assert after is not None
    assert after - moved > MiB, "the peer is seen to read"
    assert len(seen) > 3
    assert (held.channel._outflow is not None) is (kind == "lent")


@pytest.mark.parametrize("reads", [True, False], ids=["reads on", "reads nothing"])
def test_a_read_past_its_deadline_ends_behind_what_is_queued_for_who_reads_on(
    lab: PlaneLab, engine: DriveEngine, kind: str, reads: bool
) -> None:
    client, keys, _ = stored(lab, [MiB] * 12)
    (held,) = [one for one in lab.plane._connections if one.client is not None]
    client.start_get(NS, keys, deadline_ns=SECOND_NS)
    lab.turn_until(lambda: held.is_blocked)
    start, came = time.monotonic(), 0
    connected = client.channel.connected
    while held.call is not None and not held.is_closed:
        lab.clock_ns += SECOND_NS // 20
        lab.turn()
        if reads:
            with contextlib.suppress(BlockingIOError):
                came += len(connected.recv(16 * KiB))
        assert time.monotonic() - start < 20
    assert held.is_closed is not reads
    if reads:
        assert came < 4 * MiB, "the deadline ended it, not its last byte"
        assert held.channel.pending_bytes > 0, "END stands behind what is queued"
    else:
        assert all(one.piece is None or one.piece.holders == 1 for one in engine.cache.at.values())


@pytest.mark.parametrize("how", ["leaves", "cancels"])
def test_who_goes_while_it_is_lent_gets_nothing_more_and_all_is_given_back(
    lab: PlaneLab, engine: DriveEngine, kind: str, how: str
) -> None:
    client, keys, values = stored(lab, [MiB] * 12)
    (held,) = [one for one in lab.plane._connections if one.client is not None]
    client.start_get(NS, keys)
    lab.turn_until(lambda: held.is_blocked)
    assert held.channel.pending_bytes > FRAME_AIM_BYTES
    if how == "leaves":
        client.channel.close()
        lab.turn_until(lambda: held.is_closed)
    else:
        client.send(Cancel(), held.session.request_id)
        statuses, found = client.end_get()
        assert 0 < statuses.count(0) < 12
        assert found == {at: values[at] for at in range(statuses.count(0))}
        assert client.get(NS, keys) == (bytes(12), dict(enumerate(values)))
    assert all(one.piece is None or one.piece.holders == 1 for one in engine.cache.at.values())


def test_a_client_may_not_end_its_put_that_way(lab: PlaneLab) -> None:
    client, _, _ = stored(lab, [10])
    client.start(client.offer(NS, [key_of(7)], [b"value"]))
    assert client.receive().type is FrameType.GRANT
    one = Slice(0, 0, 5, 0, True, NO_CONTENT_ID, 5, 65536, b"")
    request_id = client.session.request_id
    head = encode_head(FrameType.DATA, request_id, encode_slices([one]), payload_bytes=5, flags=1 | FLAG_FINAL)
    client.send_raw(head + b"value")
    with pytest.raises(InvalidRequest, match="slices"):
        client.receive()
