"""Layer-wise puts: slices in any order and alignment, bounded, and nothing of them is left when they die."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.device.memory import MemoryDevice
from kvstore.engine.api import NamespaceRef, PutSpec, PutTicket
from kvstore.errors import ChecksumMismatch, InvalidRequest
from kvstore.limits import WRITER_TTL_NS, WRITERS_PER_CLIENT_MAX, KiB, MiB
from kvstore.testing.store_rig import DEADLINE_NS, StoreRig
from kvstore.types.checksum import crc_table
from kvstore.types.flow import FlowClass
from kvstore.types.results import Exists, Refused, RefusedReason, Stored


def spec_of(
    ref: NamespaceRef, payload_bytes: int, block_bytes: int, *, key: bytes = b"k" * 32, client_id: bytes = b"writer"
) -> PutSpec:
    return PutSpec(
        namespace=ref,
        key=key,
        payload_bytes=payload_bytes,
        block_bytes=block_bytes,
        crc_table=None,
        flow=FlowClass.WRITEBACK,
        deadline_ns=DEADLINE_NS,
        client_id=client_id,
    )


def opened(rig: StoreRig, spec: PutSpec) -> PutTicket:
    answers: list[PutTicket | Exists | Refused] = []
    rig.store.writer.open_put(spec, answers.append, streaming=True)
    ticket = answers[0]
    assert not isinstance(ticket, Exists | Refused)
    assert ticket.buffer is None
    return ticket


def write(ticket: PutTicket, offset: int, piece: bytes, block_bytes: int) -> None:
    def filled(memory: memoryview | None) -> None:
        assert memory is not None
        memory[:] = piece
        ticket.slice_filled(offset, memory, crc_table(piece, block_bytes))

    ticket.slice_buffer(len(piece), filled)


@given(
    payload_bytes=st.integers(0, 60_000),
    block_bytes=st.sampled_from([4 * KiB, 5_000, 6_560, 8 * KiB]),
    blocks_per_slice=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_slices_in_any_order_make_the_record(
    payload_bytes: int, block_bytes: int, blocks_per_slice: int, seed: int
) -> None:
    rng = random.Random(seed)
    rig = StoreRig(MemoryDevice(size_bytes=8 * MiB), arena_bytes=1 * MiB)
    ref = rig.namespace()
    payload = rng.randbytes(payload_bytes)
    ticket = opened(rig, spec_of(ref, payload_bytes, block_bytes))
    step = block_bytes * blocks_per_slice
    starts = list(range(0, payload_bytes, step))
    rng.shuffle(starts)
    for start in starts:
        write(ticket, start, payload[start : start + step], block_bytes)
        if rng.random() < 0.5:
            rig.poll()
    outcomes: list[object] = []
    received: list[int] = []
    ticket.commit(
        crc_table=crc_table(payload, block_bytes),
        on_received=lambda: received.append(1),
        on_done=outcomes.append,
    )
    rig.settle(lambda: bool(outcomes))
    rig.settle()
    assert isinstance(outcomes[0], Stored)
    assert received == [1]
    assert rig.get(ref, b"k" * 32) == payload
    assert StoreRig(rig.device).get(ref, b"k" * 32) == payload
    assert rig.arena.free_bytes == rig.arena.size_bytes


def test_a_hole_is_refused_and_stores_nothing() -> None:
    rig = StoreRig(MemoryDevice(size_bytes=8 * MiB))
    ref = rig.namespace()
    ticket = opened(rig, spec_of(ref, 12_288, 4096))
    write(ticket, 4096, b"a" * 4096, 4096)
    outcomes: list[object] = []
    ticket.commit(on_done=outcomes.append)
    rig.settle()
    assert isinstance(outcomes[0], Refused)
    assert rig.get(ref, b"k" * 32) is None
    assert rig.arena.free_bytes == rig.arena.size_bytes
    assert not rig.store.writer.writers


def test_wrong_checksums_and_blocks_that_came_before_end_the_writer() -> None:
    rig = StoreRig(MemoryDevice(size_bytes=8 * MiB))
    ref = rig.namespace()
    ticket = opened(rig, spec_of(ref, 12_288, 4096))

    def wrong(memory: memoryview | None) -> None:
        assert memory is not None
        memory[:] = b"a" * 4096
        with pytest.raises(ChecksumMismatch):
            ticket.slice_filled(0, memory, b"\0\0\0\0")

    ticket.slice_buffer(4096, wrong)
    assert not rig.store.writer.pending
    other = opened(rig, spec_of(ref, 12_288, 4096))
    write(other, 0, b"a" * 4096, 4096)
    with pytest.raises(InvalidRequest, match="written before"):
        write(other, 0, b"b" * 4096, 4096)
    rig.settle()
    assert rig.arena.free_bytes == rig.arena.size_bytes
    assert rig.store.allocator.open is not None
    assert rig.store.allocator.open.outstanding == 0


def test_a_slice_that_is_repeated_because_its_answer_got_lost_is_taken_once() -> None:
    rig = StoreRig(MemoryDevice(size_bytes=8 * MiB), arena_bytes=1 * MiB)
    ref = rig.namespace()
    payload = random.Random(7).randbytes(20_000)
    ticket = opened(rig, spec_of(ref, len(payload), 4096))
    for start, stop in ((0, 8192), (0, 8192), (4096, 8192), (8192, 20_000), (16_384, 20_000)):
        write(ticket, start, payload[start:stop], 4096)
    outcomes: list[object] = []
    ticket.commit(crc_table=crc_table(payload, 4096), on_done=outcomes.append)
    rig.settle(lambda: bool(outcomes))
    assert isinstance(outcomes[0], Stored)
    assert rig.get(ref, b"k" * 32) == payload
    assert rig.arena.free_bytes == rig.arena.size_bytes


def test_a_wrong_slice_leaves_the_memory_of_those_on_their_way_alone() -> None:
    rig = StoreRig(MemoryDevice(size_bytes=8 * MiB))
    ticket = opened(rig, spec_of(rig.namespace(), 12_288, 4096))
    lent: list[memoryview] = []
    for _ in range(2):
        ticket.slice_buffer(4096, lambda memory: lent.append(memory) if memory is not None else None)
    bad, late = lent
    with pytest.raises(ChecksumMismatch):
        ticket.slice_filled(0, bad, b"\0\0\0\0")
    rig.settle()
    assert rig.arena.free_bytes == rig.arena.size_bytes - len(late), "a socket may still write there"
    ticket.slice_filled(4096, late, crc_table(late, 4096))
    ticket.abort()
    rig.settle()
    assert rig.arena.free_bytes == rig.arena.size_bytes


def test_a_dead_owner_gives_the_key_back_within_the_ttl() -> None:
    rig = StoreRig(MemoryDevice(size_bytes=8 * MiB))
    ref = rig.namespace()
    ticket = opened(rig, spec_of(ref, 12_288, 4096))
    write(ticket, 0, b"a" * 4096, 4096)
    second = rig.begin_put(ref, b"k" * 32, b"b" * 100, block_bytes=4096)
    rig.settle()
    assert second.outcome is None
    rig.store.writer.client_gone(b"writer")
    rig.now_ns += WRITER_TTL_NS // 2
    rig.settle()
    assert second.outcome is None
    rig.now_ns += WRITER_TTL_NS
    rig.settle(lambda: second.outcome is not None)
    assert isinstance(second.outcome, Stored)
    assert rig.metrics.orphan_puts == 1
    assert rig.get(ref, b"k" * 32) == b"b" * 100
    outcomes: list[object] = []
    ticket.commit(on_done=outcomes.append)
    assert isinstance(outcomes[0], Refused)
    rig.settle()
    assert rig.arena.free_bytes == rig.arena.size_bytes


def test_a_thousand_orphans_leave_nothing() -> None:
    rig = StoreRig(MemoryDevice(size_bytes=64 * MiB))
    ref = rig.namespace()
    for number in range(1000):
        key = number.to_bytes(32, "little")
        ticket = opened(rig, spec_of(ref, 4096, 4096, key=key, client_id=key))
        write(ticket, 0, b"a" * 4096, 4096)
        rig.store.writer.client_gone(key)
        if number % 100 == 99:
            rig.poll()
    rig.now_ns += 2 * WRITER_TTL_NS
    rig.poll()
    rig.settle()
    assert rig.metrics.orphan_puts == 1000
    assert rig.metrics.open_writers == 0
    assert rig.arena.free_bytes == rig.arena.size_bytes
    assert rig.ledger.live_bytes == 0
    assert StoreRig(rig.device).store.recovered.records == 0


def test_slow_writers_do_not_stop_other_puts() -> None:
    rig = StoreRig(MemoryDevice(size_bytes=24 * MiB))
    ref = rig.namespace()
    slow: list[PutTicket] = []
    for number in range(600):
        if number % 10 == 0 and len(slow) < WRITERS_PER_CLIENT_MAX:
            slow.append(opened(rig, spec_of(ref, 4096, 4096, key=b"slow" + number.to_bytes(28, "little"))))
        outcome = rig.put(ref, random.Random(-number).randbytes(32), random.Random(number).randbytes(60_000))
        assert isinstance(outcome, Stored)
    assert 0 < rig.metrics.orphan_puts <= len(slow)
    outcomes: list[object] = []
    for ticket in slow:
        ticket.commit(on_done=outcomes.append)
    rig.settle()
    assert all(isinstance(outcome, Refused) for outcome in outcomes)
    assert rig.arena.free_bytes == rig.arena.size_bytes
    assert rig.recount_bytes() == rig.ledger.live_bytes


def test_writers_of_one_client_are_bounded() -> None:
    rig = StoreRig(MemoryDevice(size_bytes=32 * MiB))
    ref = rig.namespace()
    for number in range(WRITERS_PER_CLIENT_MAX):
        opened(rig, spec_of(ref, 4096, 4096, key=number.to_bytes(32, "little")))
    answers: list[object] = []
    rig.store.writer.open_put(spec_of(ref, 4096, 4096), answers.append, streaming=True)
    assert isinstance(answers[0], Refused)
    assert answers[0].reason is RefusedReason.OVERLOADED
    opened(rig, spec_of(ref, 4096, 4096, client_id=b"other"))


def test_a_segment_is_sealed_only_when_its_writers_are_done() -> None:
    rig = StoreRig(MemoryDevice(size_bytes=8 * MiB))
    ref = rig.namespace()
    ticket = opened(rig, spec_of(ref, 4096, 4096))
    for number in range(30):
        rig.put(ref, random.Random(-number).randbytes(32), random.Random(number).randbytes(60_000))
    assert rig.store.allocator.closing
    write(ticket, 0, b"z" * 4096, 4096)
    outcomes: list[object] = []
    ticket.commit(on_done=outcomes.append)
    rig.settle()
    assert isinstance(outcomes[0], Stored)
    assert not rig.store.allocator.closing
    again = StoreRig(rig.device)
    assert again.get(ref, b"k" * 32) == b"z" * 4096
