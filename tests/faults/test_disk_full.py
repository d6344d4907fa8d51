"""The file system is smaller than the capacity, and others use it too (case 48)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import pytest

from kvstore.server.grpc_edge.client import ControlClient
from kvstore.testing.loop_lab import LoopLab
from kvstore.types.results import Stored
from kvstore_client import KVClient
from tests.faults.node import HurtNode
from tests.faults.shelf import Shelf, reasons

CHUNK_BYTES = 64 * 1024
MIB = 1 << 20
RESUME_S = 60.0


@pytest.fixture
def folder(lab: LoopLab) -> Path:
    return lab.file_system("ext4", size_mib=16, sector_bytes=512, name="tiny")


@pytest.fixture
def full_node(tmp_path: Path, folder: Path) -> Iterator[HurtNode]:
    with HurtNode(tmp_path, data_dir=folder / "data", capacity="64MiB", cache="0") as node:
        yield node


def take_everything(file: Path) -> None:
    """A foreign file takes all that is left."""
    with file.open("wb", buffering=0) as foreign:
        for piece_bytes in (MIB, 4096):
            with pytest.raises(OSError, match="No space left"):
                _write_for_ever(foreign, piece_bytes)


def _write_for_ever(file: FileIO, piece_bytes: int) -> None:
    while True:
        file.write(b"f" * piece_bytes)


def test_a_full_file_system_evicts_serves_and_recovers(full_node: HurtNode, folder: Path) -> None:
    foreign = folder / "foreign"
    with KVClient.connect(full_node.start()) as client:
        shelf = Shelf(client, count=1024, chunk_bytes=CHUNK_BYTES)
        assert reasons(shelf.put(0, 32)) == {"Stored"}
        fd = os.open(foreign, os.O_CREAT | os.O_WRONLY)
        os.posix_fallocate(fd, 0, 6 * MIB)
        os.close(fd)

        # twice what there is room for: the oldest give way
        stored = 0
        for at in range(32, 320, 16):
            results = shelf.put(at, at + 16)
            assert reasons(results) <= {"Stored", "Refused NO_SPACE"}
            stored += sum(isinstance(result, Stored) for result in results)
            assert shelf.hits(at, at + 16) or reasons(results) == {"Refused NO_SPACE"}
        assert stored >= 200, "a full file system should evict, not refuse"
        hits = shelf.hits(0, 320)
        assert len(hits) >= 32
        assert full_node.number("kvstore_allocated_bytes") <= 16 * MIB
        squeezed = full_node.number("kvstore_live_bytes")
        assert "the file system is full: " in full_node.printed(), "its log says why it evicts early"
        with ControlClient(full_node.address) as control:
            (drive,) = control.report().drives
        assert "its file system is full: free space on it, or lower its capacity of 64 MiB" in drive.detail

        foreign.unlink()
        end, at = time.monotonic() + RESUME_S, 320
        while full_node.number("kvstore_live_bytes") < squeezed + 3 * MIB:
            assert time.monotonic() < end, f"the room of the foreign file is not used: {full_node.printed()}"
            shelf.put(at, at + 8)
            at = at + 8 if at < 1000 else 320
            time.sleep(0.2)
    full_node.kill()
    check = full_node.check()
    assert check.status == 0, check.report


def test_many_small_chunks_take_one_file(tmp_path: Path, lab: LoopLab) -> None:
    """On a file system with eight inodes in all (case 52)."""
    folder = lab.mount("few", "-t", "tmpfs", "-o", "size=96m,nr_inodes=8", "tmpfs")
    with HurtNode(tmp_path, data_dir=folder, capacity="64MiB") as node, KVClient.connect(node.start()) as client:
        shelf = Shelf(client, count=4096, chunk_bytes=4096)
        for at in range(0, 4096, 1024):
            assert reasons(shelf.put(at, at + 1024)) == {"Stored"}
        node.kill()
        node.start()
        assert len(shelf.hits()) == 4096
        assert node.disk_bytes() <= 64 * MIB


def test_a_start_on_a_full_file_system_serves_what_is_there(full_node: HurtNode, folder: Path) -> None:
    with KVClient.connect(full_node.start()) as client:
        shelf = Shelf(client, count=64, chunk_bytes=CHUNK_BYTES)
        assert reasons(shelf.put()) == {"Stored"}
        full_node.kill()
        take_everything(folder / "foreign")
        full_node.start()
        assert shelf.hits() == list(range(64))
