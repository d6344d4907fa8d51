"""The compiled binding by itself: it holds what the kernel uses, and misuse is an exception, never a crash."""

from __future__ import annotations

import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.device import _uring
from kvstore.device.base import IoKind, IoOp
from kvstore.device.scattered import ScatteredRead
from kvstore.device.transfer import PartOp

PAGE = 4096
FILE_BYTES = 64 * PAGE
ALL_VARIANTS = (0, _uring.VARIANT_PLAIN, _uring.VARIANT_FIXED, _uring.VARIANT_VECTOR_FIXED, 7)


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path / "data", os.O_RDWR | os.O_CREAT)
    os.pwrite(descriptor, b"".join(bytes([index]) * PAGE for index in range(64)), 0)
    yield descriptor
    os.close(descriptor)


def make(fd: int, depth: int = 8, **changes: Any) -> _uring.Ring:
    arguments: dict[str, Any] = {
        "size_bytes": FILE_BYTES,
        "alignment_bytes": 1,
        "read": IoKind.READ,
        "write": IoKind.WRITE,
        "sync": IoKind.SYNC,
        "part_type": PartOp,
        "scattered_type": ScatteredRead,
    }
    return _uring.Ring(fd, depth, **{**arguments, **changes})


def memory(pages: int) -> memoryview:
    return memoryview(mmap.mmap(-1, pages * PAGE))


def run(ring: _uring.Ring, ops: list[IoOp]) -> tuple[list[IoOp], list[tuple[IoOp, int]]]:
    odd: list[IoOp] = []
    assert ring.submit(ops, 0, odd) == len(ops)
    assert not odd
    done: list[IoOp] = []
    strange: list[tuple[IoOp, int]] = []
    while ring.in_flight:
        ring.wait()
        more, other, _ = ring.reap()
        done += more
        strange += other
    return done, strange


@pytest.mark.parametrize("variants", ALL_VARIANTS)
@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("file_registered", [False, True])
def test_every_variant_moves_the_same_bytes(fd: int, variants: int, registered: bool, file_registered: bool) -> None:
    ring = make(fd)
    area = memory(32)
    if registered:
        ring.register_memory(area, 8 * PAGE)  # four pieces: some operations cross an edge
    if file_registered:
        ring.register_file()
    ring.variants = variants
    vectors = [
        [area[:PAGE]],
        [area[7 * PAGE : 9 * PAGE]],  # over the edge of a piece
        [area[10 * PAGE : 11 * PAGE], area[12 * PAGE : 13 * PAGE]],
        [area[14 * PAGE : 15 * PAGE], area[17 * PAGE : 18 * PAGE]],  # two pieces
        [area[20 * PAGE : 21 * PAGE], area[21 * PAGE : 22 * PAGE]],  # neighbours
        [area[25 * PAGE : 26 * PAGE], memory(1)],  # partly outside
    ]
    for start, buffers in enumerate(vectors):
        op = IoOp(IoKind.READ, start * PAGE, buffers)
        done, strange = run(ring, [op])
        assert (done, strange) == ([op], [])
        assert b"".join(buffers) == b"".join(bytes([start + i]) * PAGE for i in range(op.length_bytes // PAGE))
        assert op.done_bytes == op.length_bytes
        target = IoOp(IoKind.WRITE, 40 * PAGE, buffers)
        run(ring, [target])
        assert os.pread(fd, op.length_bytes, 40 * PAGE) == b"".join(buffers)
    ring.close()


def test_part_operations_and_short_ones_come_back_apart(fd: int) -> None:
    ring = make(fd)
    whole = IoOp(IoKind.READ, 0, [memory(1)])
    part = PartOp(whole, offset=0, buffers=[memory(1)], start_bytes=0)
    short = IoOp(IoKind.READ, 63 * PAGE, [memory(2)])
    sync = IoOp(IoKind.SYNC, 0, [])
    done, strange = run(ring, [whole, part, short, sync])
    assert {id(op) for op in done} == {id(whole), id(sync)}
    assert {(id(op), result) for op, result in strange} == {(id(part), PAGE), (id(short), PAGE)}
    ring.close()


def test_what_the_kernel_must_not_get_is_handed_back(fd: int) -> None:
    ring = make(fd, alignment_bytes=PAGE)
    area = memory(4)
    bad = [
        IoOp(IoKind.READ, 1, [area[:PAGE]]),
        IoOp(IoKind.READ, 0, [area[:100]]),
        IoOp(IoKind.READ, 0, [area[512 : PAGE + 512]]),
        IoOp(IoKind.READ, 0, [area[:100], area[100:PAGE]]),
        IoOp(IoKind.READ, -PAGE, [area[:PAGE]]),
        IoOp(IoKind.READ, 1 << 70, [area[:PAGE]]),
        IoOp(IoKind.WRITE, FILE_BYTES, [area[:PAGE]]),
        IoOp(IoKind.WRITE, (1 << 63) - PAGE, [area[:PAGE]]),
        IoOp(IoKind.READ, 0, []),
    ]
    odd: list[IoOp] = []
    assert ring.submit(bad, 0, odd) == len(bad)
    assert odd == bad
    assert ring.in_flight == 0
    ring.close()


def test_the_depth_is_kept(fd: int) -> None:
    ring = make(fd, depth=4)
    ops = [IoOp(IoKind.READ, 0, [memory(1)]) for _ in range(10)]
    assert ring.submit(ops, 0, []) == 4
    assert ring.submit(ops, 4, []) == 0
    ring.wait()
    ring.reap()
    assert ring.submit(ops, 4, []) > 0
    ring.close()


def test_a_scattered_read_whose_short_extent_could_not_be_noted_is_never_told_as_whole() -> None:
    testcapi = pytest.importorskip("_testcapi", reason="this Python cannot make allocations fail")
    noted, unsure = 0, 0
    for spared in range(24):  # which allocation of the first reap fails
        reading, writing = os.pipe()
        ring = make(reading)
        op = ScatteredRead([0, PAGE], [PAGE, PAGE], memory(2))
        assert ring.submit([op], 0, []) == 1
        os.write(writing, b"x" * 100)
        ring.wait()
        testcapi.set_nomemory(spared, spared + 1)
        try:
            ring.reap()
        except MemoryError:
            pass
        finally:
            testcapi.remove_mem_hooks()
        os.write(writing, b"y" * PAGE)
        told: list[Any] = []
        while ring.in_flight:
            ring.wait()
            done, odd, scattered = ring.reap()
            assert not done, "an extent of it had come short"
            assert not odd
            told += scattered
        ((found, results),) = told
        assert found is op
        assert results in (None, [(0, 100)], [(1, 100)])
        noted, unsure = noted + (results is not None), unsure + (results is None)
        ring.close()
        os.close(reading)
        os.close(writing)
    assert noted, "the first allocations are not those of the note"
    assert unsure, "some allocation is that of the note"


def test_a_scattered_read_is_taken_whole_or_not_at_all(fd: int) -> None:
    ring = make(fd, depth=4)
    single = IoOp(IoKind.READ, 0, [memory(1)])
    three = ScatteredRead([9 * PAGE, 5 * PAGE, 7 * PAGE], [PAGE, 2 * PAGE, PAGE], memory(4))
    two = ScatteredRead([0, PAGE], [PAGE, PAGE], memory(2))
    five = ScatteredRead([PAGE] * 5, [PAGE] * 5, memory(5))
    odd: list[IoOp] = []
    ops = [five, single, three, two]
    assert ring.submit(ops, 0, odd) == 3
    assert odd == [five], "more extents than the depth"
    assert ring.in_flight == 4
    assert ring.submit(ops, 3, odd) == 0
    done: list[IoOp] = []
    while ring.in_flight:
        ring.wait()
        done += ring.reap()[0]
    assert {id(op) for op in done} == {id(single), id(three)}
    assert bytes(three.buffers[0][::PAGE]) == bytes([9, 5, 6, 7])
    assert (three.done_bytes, three.faults) == (4 * PAGE, None)
    assert run(ring, [two])[0] == [two]
    ring.close()


@pytest.mark.parametrize("variants", ALL_VARIANTS)
def test_extents_that_did_not_come_whole_are_told(fd: int, variants: int) -> None:
    ring = make(fd)
    area = memory(32)
    ring.register_memory(area, 8 * PAGE)
    ring.variants = variants
    op = ScatteredRead(
        [3 * PAGE, 63 * PAGE, 4 * PAGE, 80 * PAGE], [PAGE, 2 * PAGE, PAGE, PAGE], area[6 * PAGE : 11 * PAGE]
    )
    assert ring.submit([op], 0, []) == 1
    scattered = []
    while ring.in_flight:
        ring.wait()
        done, strange, more = ring.reap()
        assert (done, strange) == ([], [])
        scattered += more
    ((found, results),) = scattered
    assert found is op
    assert results is not None
    assert sorted(results) == [(1, PAGE), (3, 0)]
    assert bytes(area[6 * PAGE : 9 * PAGE : PAGE]) == bytes([3, 63, 0])
    assert area[9 * PAGE] == 4
    ring.close()


@pytest.mark.parametrize(
    ("changes", "is_refused"),
    [
        ({"offsets": (0, PAGE)}, True),
        ({"lengths": None}, True),
        ({"buffers": []}, True),
        ({"offsets": [0]}, True),
        ({"buffers": [memoryview(bytes(2 * PAGE))]}, True),
        ({"lengths": [PAGE, 2 * PAGE]}, False),
        ({"lengths": [PAGE, 1 << 80]}, False),
        ({"lengths": [2 * PAGE, 0]}, False),
        ({"offsets": [0, 5]}, False),
        ({"offsets": [0, -PAGE]}, False),
        ({"offsets": [0, "x"]}, False),
        ({"offsets": [], "lengths": []}, False),
    ],
)
def test_a_scattered_read_that_is_none(fd: int, changes: dict[str, Any], is_refused: bool) -> None:
    """What could not be told by a device is an error, what is only not for the kernel is handed back."""
    ring = make(fd)
    op = ScatteredRead([0, PAGE], [PAGE, PAGE], memory(2))
    for name, value in changes.items():
        setattr(op, name, value)
    odd: list[IoOp] = []
    if is_refused:
        with pytest.raises((TypeError, BufferError)):
            ring.submit([op], 0, odd)
    else:
        assert ring.submit([op], 0, odd) == 1
        assert odd == [op]
    assert ring.in_flight == 0
    good = ScatteredRead([0, PAGE], [PAGE, PAGE], memory(2))
    for _ in range(20):
        assert run(ring, [good])[0] == [good]
    ring.close()


def test_memory_in_flight_cannot_go_away(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    ring = make(reader)
    area = mmap.mmap(-1, PAGE)
    view = memoryview(area)
    op = IoOp(IoKind.READ, 0, [view])
    before = sys.getrefcount(op)
    ring.submit([op], 0, [])  # nothing to read yet: stays in flight
    assert sys.getrefcount(op) == before + 1
    with pytest.raises(BufferError):
        view.release()
    del op.buffers[:]
    with pytest.raises(BufferError):
        area.close()
    os.write(writer, b"x" * PAGE)
    ring.wait()
    ring.reap()
    assert sys.getrefcount(op) == before
    view.release()
    area.close()
    ring.close()
    os.close(reader)
    os.close(writer)


def test_registered_memory_is_held_until_close(fd: int) -> None:
    ring = make(fd)
    view = memory(2)
    ring.register_memory(view, PAGE)
    with pytest.raises(BufferError):
        view.release()
    with pytest.raises(ValueError, match="once"):
        ring.register_memory(memory(1), PAGE)
    ring.close()
    view.release()


def test_a_ring_that_is_dropped_in_flight_waits(fd: int) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        ring = make(fd)
        view = memory(4)
        ring.submit([IoOp(IoKind.READ, 0, [view]) for _ in range(8)], 0, [])
        del ring
        assert view[:PAGE] == bytes(PAGE)
        view.release()
    assert len(os.listdir("/proc/self/fd")) == before


def operation(kind: Any, offset: Any, buffers: Any) -> IoOp:
    """An operation of any types at all."""
    return IoOp(kind, offset, buffers)


class Wicked:
    """An operation whose attributes run code."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act

    @property
    def kind(self) -> IoKind:
        self._act()
        return IoKind.READ


@pytest.mark.parametrize(
    ("misuse", "error"),
    [
        (lambda ring: ring.submit([3], 0, []), AttributeError),
        (lambda ring: ring.submit([operation("read", 0, [memory(1)])], 0, []), TypeError),
        (lambda ring: ring.submit([operation(IoKind.READ, "0", [memory(1)])], 0, []), TypeError),
        (lambda ring: ring.submit([operation(IoKind.READ, 0, ["text"])], 0, []), TypeError),
        (lambda ring: ring.submit([operation(IoKind.READ, 0, [bytes(PAGE)])], 0, []), BufferError),
        (lambda ring: ring.submit([IoOp(IoKind.READ, 0, [memory(4)[::2]])], 0, []), BufferError),
        (lambda ring: ring.submit(None, 0, []), TypeError),
        (lambda ring: ring.submit([], 0, None), TypeError),
        (lambda ring: ring.submit([], "0", []), TypeError),
        (lambda ring: ring.submit([], -1, []), ValueError),
        (lambda ring: ring.submit([]), TypeError),
        (lambda ring: ring.register_memory(bytes(PAGE), PAGE), BufferError),
        (lambda ring: ring.register_memory(memory(1), 0), ValueError),
        (lambda ring: ring.register_memory(7, PAGE), TypeError),
        (lambda ring: ring.supports("x"), TypeError),
        (lambda ring: ring.__init__(0, 8), RuntimeError),
        (lambda ring: ring.submit([Wicked(ring.reap)], 0, []), RuntimeError),
        (lambda ring: ring.submit([Wicked(ring.close)], 0, []), RuntimeError),
        (lambda ring: make(0, depth=0), ValueError),
        (lambda ring: make(0, depth=1 << 20), ValueError),
        (lambda ring: make(0, alignment_bytes=3), ValueError),
        (lambda ring: _uring.Ring(0, 8), TypeError),  # type: ignore[call-arg]
    ],
)
def test_misuse_is_an_exception(fd: int, misuse: Callable[[Any], object], error: type[Exception]) -> None:
    ring = make(fd)
    with pytest.raises(error):
        misuse(ring)
    op = IoOp(IoKind.READ, 0, [memory(1)])
    assert run(ring, [op])[0] == [op]  # it works on
    ring.close()


def test_operations_before_a_wrong_one_have_started(fd: int) -> None:
    ring = make(fd)
    good = IoOp(IoKind.READ, PAGE, [memory(1)])
    wrong: Any = object()
    with pytest.raises(AttributeError):
        ring.submit([good, wrong], 0, [])
    ring.wait()
    assert ring.reap() == ([good], [], [])
    assert good.buffers[0][0] == 1
    ring.close()


def test_a_closed_ring_says_so(fd: int) -> None:
    ring = make(fd)
    ring.close()
    ring.close()
    for call in (ring.reap, ring.wait, ring.fileno, ring.register_file, lambda: ring.submit([], 0, [])):
        with pytest.raises(ValueError, match="closed"):
            call()
    with pytest.raises(ValueError, match="closed"):
        _uring.Ring.__new__(_uring.Ring).reap()


def test_two_threads_at_once_are_refused_or_served(fd: int) -> None:
    ring = make(fd, depth=64)
    area = memory(64 * 16)
    stop = threading.Event()
    unexpected: list[BaseException] = []

    def meddle() -> None:
        while not stop.is_set():
            try:
                ring.reap()
                ring.submit([IoOp(IoKind.READ, 0, [area[:PAGE]])], 0, [])
            except RuntimeError:
                pass
            except (TypeError, ValueError, OSError) as error:
                unexpected.append(error)
                return

    thread = threading.Thread(target=meddle)
    thread.start()
    for _ in range(300):
        try:
            ring.submit([IoOp(IoKind.READ, 0, [area[i * PAGE : (i + 16) * PAGE]]) for i in range(32)], 0, [])
            ring.reap()
        except RuntimeError:
            continue
    stop.set()
    thread.join()
    ring.close()
    assert not unexpected


def test_a_forked_child_leaves_the_ring_alone(fd: int) -> None:
    ring = make(fd)
    ring.submit([IoOp(IoKind.READ, index * PAGE, [memory(1)]) for index in range(4)], 0, [])
    child = os.fork()
    if child == 0:
        status = 1
        try:
            ring.reap()
        except RuntimeError:
            del ring  # must not wait for, or take, the parent's completions
            status = 0
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    done: list[IoOp] = []
    while ring.in_flight:
        ring.wait()
        done += ring.reap()[0]
    assert len(done) == 4
    ring.close()
