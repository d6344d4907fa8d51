"""The bare pair moves the bytes that it is measured for: they lie on its drive, and what it reads came from there."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.limits import KiB, MiB
from kvstore_bench.measure import Limit, Sample
from kvstore_bench.peers.drive_pair import DrivePair
from kvstore_bench.scenarios.micro import put_details

RECORD = 64 * KiB
STEP = RECORD + 4 * KiB


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "bare.data"


@pytest.fixture
def pair(path: Path) -> Iterator[DrivePair]:
    made = DrivePair(path, 16 * MiB)
    yield made
    made.close()


def test_a_batch_lies_on_the_drive_when_it_is_told_of(pair: DrivePair, path: Path) -> None:
    memory = bytearray(random.Random(1).randbytes(5 * MiB))
    for turn in range(4):  # more than the file has room for: it begins anew
        memory[:8] = turn.to_bytes(8, "little")
        pair.put([memoryview(memory)[at : at + MiB] for at in range(0, len(memory), MiB)])
        content = path.read_bytes()
        assert bytes(memory[:MiB]) in content
        assert bytes(memory[MiB:]) in content
    assert pair.cpu_ns() > 0


def test_records_come_from_the_drive(pair: DrivePair, path: Path) -> None:
    content = random.Random(2).randbytes(16 * MiB)
    with path.open("r+b") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    there = {content[at + 4 * KiB : at + STEP] for at in range(0, len(content) - STEP + 1, STEP)}
    memory = memoryview(bytearray(32 * RECORD))
    buffers = [memory[at : at + RECORD] for at in range(0, len(memory), RECORD)]
    for _ in range(3):
        pair.get(buffers)
        assert len({bytes(one) for one in buffers} & there) == 32


def test_what_puts_reach_is_told_without_fio_too() -> None:
    samples = [Sample(seconds=1.0, work_bytes=10**9, operations=1, cpu_client_ns=1, cpu_node_ns=1)] * 3
    limits = [Limit(bytes_per_s=2e9, pair_cpu_s_per_gb=0.5)] * 3
    ratio, details = put_details(samples, limits, [4e9] * 3)
    assert (ratio, details["of_drive"], details["drive_gb_per_s"]) == (0.5, 0.25, 4.0)
    ratio, details = put_details(samples, limits, [])
    assert ratio == 0.5
    assert "of_drive" not in details
