"""A drive that has lost its end answers EIO there (case 49): real errors, by a truncated image under a loop device."""

from __future__ import annotations

import os
from pathlib import Path

from kvstore.testing.loop_lab import LoopLab
from kvstore.types.results import Hit, Miss
from kvstore_client import KVClient
from tests.faults.node import HurtNode
from tests.faults.shelf import Shelf, reasons

MIB = 1 << 20
CHUNK_BYTES = 256 * 1024
COUNT = 128


def test_real_io_errors_are_misses_and_the_rest_is_served(tmp_path: Path, lab: LoopLab) -> None:
    image = lab.image("drive", 64)
    device = lab.loop(image, sector_bytes=4096)
    with (
        HurtNode(tmp_path, data_dir=device, capacity="64MiB", cache="0") as node,
        KVClient.connect(node.start()) as client,
    ):
        shelf = Shelf(client, count=COUNT, chunk_bytes=CHUNK_BYTES)
        assert reasons(shelf.put()) == {"Stored"}
        worker = node.worker_pid()
        whole = image.read_bytes()
        os.truncate(image, 16 * MIB)

        results, _ = shelf.get()
        assert reasons(results) == {"Hit", "Miss IO"}
        kept = [at for at, result in enumerate(results) if isinstance(result, Hit)]
        lost = [at for at, result in enumerate(results) if isinstance(result, Miss)]
        assert len(kept) >= 16
        assert len(lost) >= 32
        assert node.number("kvstore_device_healthy") == 0, "an operator sees nothing"
        assert node.worker_pid() == worker, "the worker died of it"
        for _ in range(3):  # no livelock: the same answer, at once
            results, _ = shelf.get()
            assert reasons([results[at] for at in lost]) <= {
                "Miss IO",
                "Miss CORRUPT",
                "Miss ABSENT",
                "Miss UNAVAILABLE",
            }

        with image.open("r+b") as file:  # the drive is whole again: what it holds was never lost
            file.write(whole)
        node.kill()
        node.start()
        assert set(shelf.hits()) >= set(kept)
