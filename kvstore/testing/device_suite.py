"""The conformance suite of drives: what every `Device` must do, whatever moves its bytes.

A test class inherits `DeviceSuite` and gives `open`; pytest runs the rest. The suite needs no fixtures of its own, so
that any implementation, also one outside this project, can inherit it.
"""

from __future__ import annotations

import errno
import mmap
import random
import select
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from kvstore.device.base import Device, IoKind, IoOp
from kvstore.device.scattered import ScatteredRead
from kvstore.errors import Closed, Unavailable
from kvstore.types.flow import FlowClass

PAGE: Final = 4096
MIB: Final = 1024 * 1024
DEVICE_BYTES: Final = 8 * MIB
PAYLOAD_BYTES: Final = (1, 511, 512, 513, 4095, 4096, 4097, 65536, MIB + 28)
"""Payload lengths; the caller of a device rounds them up to pages (case: O_DIRECT and odd sizes)."""
SKEWS: Final = (0, 1, 512)
"""Where a buffer begins in its page."""
WAIT_SECONDS: Final = 30


def aligned(length_bytes: int) -> memoryview:
    """Page-aligned memory, as an arena hands it out."""
    return memoryview(mmap.mmap(-1, length_bytes))


def skewed(length_bytes: int, skew: int) -> memoryview:
    """Memory that begins `skew` bytes into a page."""
    return memoryview(mmap.mmap(-1, length_bytes + PAGE))[skew : skew + length_bytes]


def rounded(length_bytes: int) -> int:
    """A payload's length in whole pages."""
    return -(-length_bytes // PAGE) * PAGE


def random_bytes(length_bytes: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(length_bytes)


def run(device: Device, ops: Sequence[IoOp]) -> list[IoOp]:
    """Submit operations and wait for all of them; returns them in the order of their completion."""
    device.submit(ops)
    return finish(device, len(ops))


def finish(device: Device, count: int) -> list[IoOp]:
    """Wait, through the descriptor alone, until `count` operations have completed."""
    poller = select.poll()
    poller.register(device.fileno(), select.POLLIN)
    done: list[IoOp] = []
    while len(done) < count:
        assert poller.poll(WAIT_SECONDS * 1000), f"only {len(done)} of {count} operations completed"
        done.extend(device.poll())
    assert len(done) == count
    return done


def write(device: Device, offset: int, *buffers: memoryview) -> None:
    """Write and expect success."""
    (op,) = run(device, [IoOp(IoKind.WRITE, offset, buffers)])
    assert op.error is None, op.error
    assert op.done_bytes == op.length_bytes


def read(device: Device, offset: int, *buffers: memoryview) -> int:
    """Read and expect no error; returns the bytes that came."""
    (op,) = run(device, [IoOp(IoKind.READ, offset, buffers)])
    assert op.error is None, op.error
    return op.done_bytes


def sync(device: Device) -> None:
    (op,) = run(device, [IoOp(IoKind.SYNC, 0, [])])
    assert op.error is None, op.error


def split(view: memoryview, count: int) -> list[memoryview]:
    """One buffer as `count` page-multiple pieces, far apart in no particular order of size."""
    pages = len(view) // PAGE
    cuts = sorted({pages * index // count for index in range(1, count)} - {0, pages})
    edges = [0, *(cut * PAGE for cut in cuts), len(view)]
    return [view[start:end] for start, end in pairwise(edges)]


class DeviceSuite:
    """Inherit it as `class TestMine(DeviceSuite)` and give `open`.

    `open` is called once per test, and again by tests that reopen; it opens the same drive of DEVICE_BYTES with room
    for `depth` operations. A drive is empty (reads as zeros) at the first open of a test.
    """

    keeps_bytes: bool = True
    """Bytes outlive close, and only one process may have the drive."""
    gives_space_back: bool = True
    """`allocated_bytes` follows allocate and discard."""
    expected_mode: str | None = None
    """Name that `mode` must have: proof that a forced way is really taken."""
    depth: int = 8

    _devices: list[Device]

    def open(self) -> Device:
        raise NotImplementedError

    def opened(self) -> Device:
        """Open and close at the end of the test, also when it fails."""
        device = self.open()
        self._devices.append(device)
        return device

    def setup_method(self) -> None:
        self._devices = []

    def teardown_method(self) -> None:
        for device in self._devices:
            device.close()

    # ---- what it says of itself -------------------------------------------------------------------------------

    def test_it_says_what_it_is(self) -> None:
        device = self.opened()
        assert device.size_bytes == DEVICE_BYTES
        assert device.alignment_bytes == PAGE
        assert device.mode.reason
        assert self.expected_mode in (None, device.mode.name), device.mode

    # ---- bytes ------------------------------------------------------------------------------------------------

    def test_any_payload_at_any_skew_comes_back(self) -> None:
        device = self.opened()
        for number, payload in enumerate(PAYLOAD_BYTES):
            for skew in SKEWS:
                self._round_trip(device, payload, skew, pieces=1, seed=number * 100 + skew)

    def test_vectors_come_back(self) -> None:
        device = self.opened()
        for number, payload in enumerate(PAYLOAD_BYTES):
            for skew in SKEWS:
                self._round_trip(device, payload, skew, pieces=3, seed=number * 100 + skew)

    def _round_trip(self, device: Device, payload: int, skew: int, *, pieces: int, seed: int) -> None:
        data = random_bytes(payload, seed)
        offset = (seed % 5) * PAGE
        source = skewed(rounded(payload), skew)
        source[:payload] = data
        write(device, offset, *split(source, pieces))
        back = skewed(rounded(payload), (skew * 3) % PAGE)
        assert read(device, offset, *split(back, pieces)) == rounded(payload)
        assert back[:payload] == data, f"payload {payload}, skew {skew}, {pieces} pieces"
        assert not any(back[payload:])

    def test_pieces_of_odd_lengths_make_one_vector(self) -> None:
        device = self.opened()
        data = random_bytes(3 * PAGE, 1)
        source = skewed(3 * PAGE, 0)
        source[:] = data
        write(device, PAGE, source[:100], source[100:5000], source[5000:])
        back = skewed(3 * PAGE, 7)
        assert read(device, PAGE, back[:9000], back[9000:]) == 3 * PAGE
        assert back == data

    def test_memory_that_cannot_be_written_is_a_source(self) -> None:
        device = self.opened()
        data = random_bytes(2 * PAGE, 2)
        write(device, 0, memoryview(data))
        back = aligned(2 * PAGE)
        read(device, 0, back)
        assert back == data

    def test_a_vector_of_thousands_of_pieces(self) -> None:
        device = self.opened()
        pages = 1500  # beyond IOV_MAX of Linux
        data = random_bytes(pages * PAGE, 3)
        source = [aligned(PAGE) for _ in range(pages)]
        for index, page in enumerate(source):
            page[:] = data[index * PAGE : (index + 1) * PAGE]
        write(device, 0, *source)
        back = aligned(pages * PAGE)
        assert read(device, 0, back) == len(back)
        assert back == data
        order = list(range(pages))
        target = aligned(pages * PAGE)
        read(device, 0, *(target[index * PAGE : (index + 1) * PAGE] for index in reversed(order)))
        assert target[:PAGE] == data[-PAGE:]
        assert target[-PAGE:] == data[:PAGE]

    def test_registered_memory(self) -> None:
        device = self.opened()
        memory = aligned(64 * PAGE)
        device.register(memory)
        memory[: 8 * PAGE] = data = random_bytes(8 * PAGE, 4)
        write(device, 0, memory[: 4 * PAGE], memory[4 * PAGE : 8 * PAGE])
        write(device, 8 * PAGE, memory[5 * PAGE : 6 * PAGE], memory[: 2 * PAGE])
        read(device, 0, memory[32 * PAGE : 40 * PAGE])
        assert memory[32 * PAGE : 40 * PAGE] == data
        outside = aligned(PAGE)
        assert read(device, 8 * PAGE, memory[50 * PAGE : 51 * PAGE], outside, memory[48 * PAGE : 49 * PAGE]) == 3 * PAGE
        assert memory[50 * PAGE : 51 * PAGE] == data[5 * PAGE : 6 * PAGE]
        assert outside == data[:PAGE]
        assert memory[48 * PAGE : 49 * PAGE] == data[PAGE : 2 * PAGE]

    def test_what_was_never_written_reads_as_zeros(self) -> None:
        device = self.opened()
        back = aligned(4 * PAGE)
        back[:] = b"\xaa" * len(back)
        device.allocate(0, MIB)
        for offset in (0, 2 * MIB):  # allocated, and a hole
            assert read(device, offset, back) == len(back)
            assert not any(back)

    def test_a_read_past_the_end_is_short(self) -> None:
        device = self.opened()
        write(device, DEVICE_BYTES - PAGE, tail := aligned(PAGE))
        assert read(device, DEVICE_BYTES - PAGE, aligned(4 * PAGE)) == len(tail)
        assert read(device, DEVICE_BYTES - PAGE, *split(aligned(4 * PAGE), 4)) == len(tail)
        assert read(device, DEVICE_BYTES - PAGE, skewed(4 * PAGE, 1)) == len(tail)
        assert read(device, DEVICE_BYTES, aligned(PAGE)) == 0

    def test_nothing_to_move_completes(self) -> None:
        device = self.opened()
        assert read(device, 0) == 0
        write(device, 0)

    # ---- refusals ---------------------------------------------------------------------------------------------

    def test_unaligned_offset_or_length_is_refused(self) -> None:
        device = self.opened()
        for kind in (IoKind.READ, IoKind.WRITE):
            for offset, length_bytes in ((1, PAGE), (512, PAGE), (0, 100), (0, PAGE + 512), (-PAGE, PAGE)):
                (op,) = run(device, [IoOp(kind, offset, [aligned(length_bytes)])])
                assert op.error is not None
                assert op.error.errno == errno.EINVAL
                assert op.done_bytes == 0

    def test_a_write_beyond_the_end_is_refused(self) -> None:
        device = self.opened()
        for offset in (DEVICE_BYTES - PAGE, DEVICE_BYTES, 1 << 60):
            (op,) = run(device, [IoOp(IoKind.WRITE, offset, [aligned(2 * PAGE)])])
            assert op.error is not None
            assert op.error.errno == errno.ENOSPC

    def test_one_bad_operation_does_not_spoil_the_batch(self) -> None:
        device = self.opened()
        ops = [IoOp(IoKind.WRITE, index * PAGE, [aligned(PAGE)]) for index in range(6)]
        ops[2].offset = 17
        ops[4].offset = DEVICE_BYTES
        run(device, ops)
        assert [op.error is not None for op in ops] == [False, False, True, False, True, False]

    # ---- many at once -----------------------------------------------------------------------------------------

    def test_more_than_the_depth(self) -> None:
        device = self.opened()
        count = 40 * self.depth
        buffers = [aligned(PAGE) for _ in range(count)]
        for index, buffer in enumerate(buffers):
            buffer[:8] = index.to_bytes(8, "little")
        ops = [IoOp(IoKind.WRITE, index * PAGE, [buffers[index]], owner=index) for index in range(count)]
        done = run(device, ops)
        assert sorted(op.owner for op in done) == list(range(count))
        back = [aligned(PAGE) for _ in range(count)]
        reads = [IoOp(IoKind.READ, index * PAGE, [back[index]], flow=FlowClass.DECODE_READ) for index in range(count)]
        half = count // 2
        device.submit(reads[:half])
        device.submit(reads[half:])  # while the first half waits for room
        finish(device, count)
        assert all(op.error is None and op.done_bytes == PAGE for op in reads)
        assert [int.from_bytes(buffer[:8], "little") for buffer in back] == list(range(count))

    def test_a_batch_of_all_kinds(self) -> None:
        device = self.opened()
        ops: list[IoOp] = []
        for index in range(3 * self.depth):
            length_bytes = PAGE * (1 + index % 7)
            memory = skewed(length_bytes, index % 3)
            kind = (IoKind.WRITE, IoKind.READ, IoKind.SYNC)[index % 3]
            ops.append(IoOp(kind, index * 8 * PAGE, [] if kind is IoKind.SYNC else [memory]))
        done = run(device, ops)
        assert {id(op) for op in done} == {id(op) for op in ops}
        assert all(op.error is None and op.done_bytes == op.length_bytes for op in ops)

    def test_an_operation_is_used_again(self) -> None:
        device = self.opened()
        buffer = aligned(PAGE)
        op = IoOp(IoKind.READ, 1, [buffer])
        run(device, [op])
        assert op.error is not None
        op.offset = 0
        for _ in range(3):
            run(device, [op])
            assert op.error is None
            assert op.done_bytes == PAGE

    def test_the_descriptor_is_quiet_when_nothing_waits(self) -> None:
        device = self.opened()
        assert device.poll() == []
        write(device, 0, aligned(PAGE))
        device.poll()  # a late wake-up may have followed the last completion
        poller = select.poll()
        poller.register(device.fileno(), select.POLLIN)
        assert poller.poll(0) == []
        device.submit([])
        assert device.poll() == []

    # ---- scattered reads --------------------------------------------------------------------------------------

    def _pattern(self, device: Device) -> bytes:
        """The drive filled with bytes that tell every page from every other."""
        data = b"".join(page.to_bytes(4, "little") * (PAGE // 4) for page in range(DEVICE_BYTES // PAGE))
        write(device, 0, memoryview(data))
        return data

    def _read_scattered(
        self, device: Device, extents: Sequence[tuple[int, int]], *, skew: int = 0
    ) -> tuple[ScatteredRead, memoryview]:
        """Extents given as (page, pages)."""
        memory = skewed(sum(pages for _, pages in extents) * PAGE, skew)
        op = ScatteredRead([page * PAGE for page, _ in extents], [pages * PAGE for _, pages in extents], memory)
        done = run(device, [op])
        assert done == [op]
        return op, memory

    def test_scattered_extents_come_one_behind_the_other(self) -> None:
        device = self.opened()
        data = self._pattern(device)
        generator = random.Random(8)
        pages_all = DEVICE_BYTES // PAGE
        for count in (1, 2, 3, self.depth - 1, self.depth, self.depth + 1, 5 * self.depth):
            for skew in SKEWS:
                extents = [
                    (generator.randrange(pages_all - 8), generator.randrange(1, 8)) for _ in range(max(count, 1))
                ]
                op, memory = self._read_scattered(device, extents, skew=skew)
                expected = b"".join(data[page * PAGE : (page + pages) * PAGE] for page, pages in extents)
                assert memory == expected, f"{count} extents, skew {skew}"
                assert (op.done_bytes, op.error, op.faults) == (len(expected), None, None)

    def test_scattered_extents_in_registered_memory(self) -> None:
        device = self.opened()
        data = self._pattern(device)
        area = aligned(64 * PAGE)
        device.register(area)
        op = ScatteredRead([9 * PAGE, 3 * PAGE, 40 * PAGE], [PAGE, 4 * PAGE, 2 * PAGE], area[16 * PAGE : 23 * PAGE])
        run(device, [op])
        assert (
            area[16 * PAGE : 23 * PAGE]
            == data[9 * PAGE : 10 * PAGE] + data[3 * PAGE : 7 * PAGE] + data[40 * PAGE : 42 * PAGE]
        )
        assert not any(area[: 16 * PAGE])
        assert not any(area[23 * PAGE :])

    def test_an_extent_past_the_end_is_short_and_the_others_are_not(self) -> None:
        device = self.opened()
        data = self._pattern(device)
        last = DEVICE_BYTES // PAGE - 1
        for skew in (0, 1):
            op, memory = self._read_scattered(device, [(5, 2), (last, 3), (7, 1), (last + 1, 1)], skew=skew)
            assert op.faults == {1: (PAGE, None), 3: (0, None)}
            assert op.done_bytes == 4 * PAGE
            assert memory[: 3 * PAGE] == data[5 * PAGE : 7 * PAGE] + data[last * PAGE :]
            assert memory[5 * PAGE : 6 * PAGE] == data[7 * PAGE : 8 * PAGE]

    def test_a_bad_extent_does_not_spoil_the_others(self) -> None:
        device = self.opened()
        data = self._pattern(device)
        memory = aligned(5 * PAGE)
        op = ScatteredRead([0, 17, 2 * PAGE, -PAGE], [PAGE, PAGE, 2 * PAGE, PAGE], memory)
        for _ in range(2):
            run(device, [op])
            assert op.faults is not None
            assert sorted(op.faults) == [1, 3]
            for came_bytes, error in op.faults.values():
                assert came_bytes == 0
                assert error is not None
                assert error.errno == errno.EINVAL
            assert (op.done_bytes, op.error) == (3 * PAGE, None)
            assert memory[:PAGE] == data[:PAGE]
            assert memory[2 * PAGE : 4 * PAGE] == data[2 * PAGE : 4 * PAGE]
        op.offsets[1] = PAGE
        op.offsets[3] = 0
        run(device, [op])
        assert (op.faults, op.done_bytes) == (None, 5 * PAGE)
        assert memory == data[: 4 * PAGE] + data[:PAGE]

    def test_scattered_reads_among_others(self) -> None:
        device = self.opened()
        data = self._pattern(device)
        ops: list[IoOp] = []
        for index in range(4 * self.depth):
            if index % 3 == 0:
                ops.append(IoOp(IoKind.READ, index * PAGE, [aligned(PAGE)]))
            elif index % 7 == 1:
                ops.append(IoOp(IoKind.SYNC, 0, []))
            else:
                offsets = [(index * 5 + extent * 11) % 1000 * PAGE for extent in range(1 + index % (self.depth + 2))]
                ops.append(ScatteredRead(offsets, [PAGE] * len(offsets), skewed(len(offsets) * PAGE, index % 2)))
        half = len(ops) // 2
        device.submit(ops[:half])
        device.submit(ops[half:])
        done = finish(device, len(ops))
        assert {id(op) for op in done} == {id(op) for op in ops}
        for op in ops:
            assert (op.error, op.done_bytes) == (None, op.length_bytes)
            if isinstance(op, ScatteredRead):
                assert op.buffers[0] == b"".join(data[offset : offset + PAGE] for offset in op.offsets)

    def test_close_waits_for_scattered_reads(self) -> None:
        device = self.opened()
        for _ in range(4):
            offsets = [extent * 64 * PAGE for extent in range(self.depth)]
            device.submit([ScatteredRead(offsets, [8 * PAGE] * self.depth, aligned(8 * PAGE * self.depth))])
        device.close()

    # ---- space ------------------------------------------------------------------------------------------------

    def test_space_is_reserved_and_given_back(self) -> None:
        if not self.gives_space_back:
            return
        device = self.opened()
        before = device.allocated_bytes()
        device.allocate(MIB, 2 * MIB)
        assert device.allocated_bytes() - before >= 2 * MIB
        assert device.size_bytes == DEVICE_BYTES
        data = random_bytes(2 * MIB, 5)
        write(device, MIB, memoryview(data))
        assert device.allocated_bytes() - before < 3 * MIB
        device.discard(MIB, 2 * MIB)
        assert device.allocated_bytes() - before < MIB
        back = aligned(2 * MIB)
        assert read(device, MIB, back) == len(back)
        assert not any(back)

    def test_a_discard_leaves_its_neighbours(self) -> None:
        device = self.opened()
        data = random_bytes(3 * MIB, 6)
        write(device, 0, memoryview(data))
        device.discard(MIB, MIB)
        back = aligned(MIB)
        read(device, 0, back)
        assert back == data[:MIB]
        read(device, 2 * MIB, back)
        assert back == data[2 * MIB :]

    # ---- the end ----------------------------------------------------------------------------------------------

    def test_close_waits_for_what_is_in_flight(self) -> None:
        device = self.opened()
        count = 6 * self.depth
        data = [random_bytes(8 * PAGE, 100 + index) for index in range(count // 2)]
        device.submit([IoOp(IoKind.WRITE, i * 8 * PAGE, [memoryview(data[i])]) for i in range(count // 2)])
        device.close()
        device.close()
        if self.keeps_bytes:
            again = self.opened()
            back = aligned(8 * PAGE)
            for index, expected in enumerate(data):
                read(again, index * 8 * PAGE, back)
                assert back == expected

    def test_a_closed_device_says_so(self) -> None:
        device = self.opened()
        device.close()
        for call in (
            lambda: device.submit([]),
            device.poll,
            lambda: device.allocate(0, PAGE),
            lambda: device.discard(0, PAGE),
            device.allocated_bytes,
            lambda: device.register(aligned(PAGE)),
        ):
            try:
                call()
            except Closed:
                continue
            raise AssertionError("a closed device took a call")

    def test_synced_bytes_are_there_after_reopening(self) -> None:
        if not self.keeps_bytes:
            return
        device = self.opened()
        data = random_bytes(PAGE, 7)
        write(device, 5 * PAGE, memoryview(data))
        sync(device)
        device.close()
        back = aligned(PAGE)
        read(self.opened(), 5 * PAGE, back)
        assert back == data

    def test_only_one_owner(self) -> None:
        if not self.keeps_bytes:
            return
        first = self.opened()
        try:
            self.opened()
        except Unavailable:
            pass
        else:
            raise AssertionError("two devices have one drive")
        first.close()
        self.opened()
