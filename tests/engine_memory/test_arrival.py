"""Payload is checked as it arrives, in whatever pieces: all of it once, and nothing wrong passes."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.engine.arrival import Arrival
from kvstore.types.checksum import crc_table

BLOCK = 1024


@st.composite
def cuts(draw: st.DrawFn) -> tuple[int, list[tuple[int, int, list[int]]]]:
    """A payload's length; its slices, each with the byte counts that are told of it, rising up to its end."""
    length = draw(st.integers(0, 9 * BLOCK))
    slices = []
    at = 0
    while at < length:
        size = min(draw(st.integers(1, 4)) * BLOCK, length - at)
        told = sorted(draw(st.lists(st.integers(1, size), max_size=4)))
        slices.append((at, size, [*told, size]))
        at += size
    return length, slices


@given(cut=cuts(), with_slices=st.booleans(), flipped=st.integers(-1, 9 * BLOCK), early=st.booleans())
def test_a_payload_in_pieces_is_judged_as_a_whole(
    cut: tuple[int, list[tuple[int, int, list[int]]]], with_slices: bool, flipped: int, early: bool
) -> None:
    length, slices = cut
    sent = os.urandom(length)
    table = crc_table(sent, BLOCK)
    memory = memoryview(bytearray(length))
    arrival = Arrival(memory, block_bytes=BLOCK, crc_table=None if with_slices else table)
    for at, size, told in slices:
        crcs = crc_table(sent[at : at + size], BLOCK) if with_slices else b""
        if early:  # of the next slice may be told before the last one was as a whole
            arrival.arrived(at + BLOCK, 1, crcs)
        done = 0
        for count in told:
            memory[at + done : at + count] = sent[at + done : at + count]
            if at <= flipped < at + count and at + done <= flipped:
                memory[flipped] ^= 0x40
            arrival.arrived(at, count, crcs)
            done = count
    assert arrival.table() == (None if 0 <= flipped < length else table)


def test_words_that_did_not_come_are_missed() -> None:
    memory = memoryview(bytearray(3 * BLOCK))
    assert Arrival(memory, block_bytes=BLOCK, crc_table=None).table() is None
    arrival = Arrival(memory, block_bytes=BLOCK, crc_table=None)
    arrival.arrived(0, 3 * BLOCK, b"")
    assert arrival.table() is None


@pytest.mark.parametrize("offset", [1, BLOCK + 1, 2 * BLOCK])
def test_slices_that_skip_something_do_not_pass(offset: int) -> None:
    memory = memoryview(bytearray(3 * BLOCK))
    arrival = Arrival(memory, block_bytes=BLOCK, crc_table=None)
    arrival.arrived(offset, 3 * BLOCK - offset, crc_table(memory[offset:], BLOCK))
    assert arrival.table() is None
