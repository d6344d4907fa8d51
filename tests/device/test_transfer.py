"""What a result means, and what is left of a vector: pure code."""

from __future__ import annotations

import errno

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.device.base import IoKind, IoOp
from kvstore.device.transfer import Step, bounce, check_op, remaining, rest_of, settle, unbounce

PAGE = 4096


@given(lengths=st.lists(st.integers(0, 50), max_size=8), done=st.integers(0, 400))
def test_what_remains_of_a_vector(lengths: list[int], done: int) -> None:
    whole = bytes(range(256)) * 2
    views, at = [], 0
    for length in lengths:
        views.append(memoryview(whole)[at : at + length])
        at += length
    done = min(done, at)
    assert b"".join(remaining(views, done)) == whole[done:at]


@given(results=st.lists(st.integers(1, 5 * PAGE), min_size=1, max_size=30), pages=st.integers(1, 8))
def test_short_transfers_end_and_cover_every_byte(results: list[int], pages: int) -> None:
    """Feed any short results: each step goes on from a page edge at or before what was done, and it ends."""
    op = IoOp(IoKind.READ, 0, [memoryview(bytearray(pages * PAGE))])
    for result in results:
        before = op.done_bytes
        moved = min(result, op.length_bytes - before)
        step = settle(op, moved)
        if step is Step.DONE:
            assert op.done_bytes == before + moved
            assert op.done_bytes == op.length_bytes or moved < PAGE
            return
        assert step is Step.MORE
        assert before < op.done_bytes <= before + moved
        assert op.done_bytes % PAGE == 0


@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN])
def test_interruptions_are_repeated(code: int) -> None:
    op = IoOp(IoKind.WRITE, 0, [memoryview(bytes(PAGE))])
    assert settle(op, -code) is Step.RETRY
    assert op.error is None
    assert settle(op, PAGE) is Step.DONE


def test_any_other_error_names_the_operation() -> None:
    op = IoOp(IoKind.WRITE, 8 * PAGE, [memoryview(bytes(PAGE))])
    assert settle(op, -errno.EIO) is Step.DONE
    assert op.error is not None
    assert op.error.errno == errno.EIO
    assert "write of 4096 bytes at 32768" in str(op.error)


def test_a_write_that_moves_nothing_fails() -> None:
    op = IoOp(IoKind.WRITE, 0, [memoryview(bytes(PAGE))])
    assert settle(op, 0) is Step.DONE
    assert op.error is not None


def test_a_sync_is_done_at_once() -> None:
    assert settle(IoOp(IoKind.SYNC, 0, []), 0) is Step.DONE


def test_the_rest_continues_where_the_operation_stopped() -> None:
    data = memoryview(bytearray(3 * PAGE))
    op = IoOp(IoKind.READ, PAGE, [data[:PAGE], data[PAGE:]])
    settle(op, 2 * PAGE)
    rest = rest_of(op)
    assert (rest.offset, rest.length_bytes, rest.start_bytes) == (3 * PAGE, PAGE, 2 * PAGE)


def test_a_bounced_read_lands_in_the_callers_memory() -> None:
    memory = bytearray(PAGE + 5)
    op = IoOp(IoKind.READ, 0, [memoryview(memory)[5:100], memoryview(memory)[100:]])
    op.length_bytes = PAGE
    part = bounce(op)
    part.buffers[0][:] = b"\x17" * PAGE
    unbounce(part)
    assert memory == bytes(5) + b"\x17" * PAGE


@pytest.mark.parametrize(
    ("kind", "offset", "pages", "code"),
    [
        (IoKind.READ, 0, 1, None),
        (IoKind.READ, 1, 1, errno.EINVAL),
        (IoKind.READ, -PAGE, 1, errno.EINVAL),
        (IoKind.READ, 4 * PAGE, 4, None),  # short, not wrong
        (IoKind.WRITE, 3 * PAGE, 1, None),
        (IoKind.WRITE, 3 * PAGE, 2, errno.ENOSPC),
        (IoKind.SYNC, 3, 0, None),
    ],
)
def test_what_can_never_work(kind: IoKind, offset: int, pages: int, code: int | None) -> None:
    error = check_op(IoOp(kind, offset, [memoryview(bytes(pages * PAGE))]), 4 * PAGE)
    assert (error and error.errno) == code
