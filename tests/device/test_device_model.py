"""Random operations, many in flight, against a plain array of bytes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvstore.device.base import Device, IoKind, IoOp
from kvstore.device.probe import open_device
from kvstore.testing.device_suite import MIB, PAGE, aligned, finish, random_bytes

SIZE = 4 * MIB
PAGES = SIZE // PAGE


class Model:
    """Drives a device and keeps what it must hold. Operations in flight never overlap: their order is not defined."""

    def __init__(self, device: Device, seed: int) -> None:
        self.device = device
        self.bytes = bytearray(SIZE)
        self.random = random.Random(seed)
        self.memory = aligned(64 * PAGE)
        device.register(self.memory)

    def ranges(self, count: int) -> list[tuple[int, int]]:
        """Disjoint page ranges in random order, none longer than 40 pages."""
        edges = sorted(self.random.sample(range(PAGES + 1), 2 * count))
        pairs = [(start, min(end, start + 40)) for start, end in zip(edges[::2], edges[1::2], strict=True)]
        self.random.shuffle(pairs)
        return [(start * PAGE, (end - start) * PAGE) for start, end in pairs]

    def buffers(self, length_bytes: int, spare: list[int]) -> list[memoryview]:
        """Memory for one operation: registered or not, aligned or not, whole or in pieces."""
        pages = length_bytes // PAGE
        if self.random.random() < 0.4 and spare[0] + pages <= 64:
            start = spare[0] * PAGE
            spare[0] += pages
            view = self.memory[start : start + length_bytes]
        else:
            skew = self.random.choice((0, 0, 0, 1, 512))
            view = aligned(length_bytes + PAGE)[skew : skew + length_bytes]
        cut = self.random.choice((0, PAGE, 1000, length_bytes))
        cut = min(cut, length_bytes)
        return [view[:cut], view[cut:]]

    def round(self) -> None:
        """One batch in flight together, then what it must have done."""
        ops: list[IoOp] = []
        spare = [0]
        for offset, length_bytes in self.ranges(self.random.randint(1, 24)):
            kind = self.random.choice((IoKind.READ, IoKind.WRITE, IoKind.WRITE))
            buffers = self.buffers(length_bytes, spare)
            if kind is IoKind.WRITE:
                data = self.random.randbytes(length_bytes)
                at = 0
                for view in buffers:
                    view[:] = data[at : at + len(view)]
                    at += len(view)
            ops.append(IoOp(kind, offset, buffers))
        if self.random.random() < 0.3:
            ops.append(IoOp(IoKind.SYNC, 0, []))
        half = self.random.randint(0, len(ops))
        self.device.submit(ops[:half])
        self.device.submit(ops[half:])
        for op in finish(self.device, len(ops)):
            assert op.error is None, op.error
            assert op.done_bytes == op.length_bytes
            moved = b"".join(op.buffers)
            if op.kind is IoKind.WRITE:
                self.bytes[op.offset : op.offset + len(moved)] = moved
            elif op.kind is IoKind.READ:
                assert moved == self.bytes[op.offset : op.offset + len(moved)]

    def discard(self) -> None:
        ((offset, length_bytes),) = self.ranges(1)
        self.device.discard(offset, length_bytes)
        self.bytes[offset : offset + length_bytes] = bytes(length_bytes)


@pytest.mark.parametrize("mode", ["uring", "threads"])
@pytest.mark.parametrize("depth", [1, 5, 64])
@pytest.mark.parametrize("rounds", [40, pytest.param(1000, marks=pytest.mark.nightly)])
def test_a_device_holds_what_was_written(tmp_path: Path, mode: str, depth: int, rounds: int) -> None:
    seed = depth * 1000 + rounds
    device = open_device(tmp_path / "data", size_bytes=SIZE, mode=mode, depth=depth)
    model = Model(device, seed)
    model.bytes[:] = data = random_bytes(SIZE, seed)
    device.submit([IoOp(IoKind.WRITE, 0, [memoryview(data)])])
    finish(device, 1)
    for number in range(rounds):
        try:
            model.round()
            if number % 7 == 0:
                model.discard()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, round {number}: {error}") from error
    device.close()
    again = open_device(tmp_path / "data", size_bytes=SIZE, mode="threads")
    back = aligned(SIZE)
    again.submit([IoOp(IoKind.READ, 0, [back])])
    finish(again, 1)
    assert back == model.bytes
    again.close()
