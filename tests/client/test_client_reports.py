"""A bit that flips in a node's memory: the client finds it, tells the node, and has the right bytes in one call."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.engine.engine import DriveEngine, EngineSettings
from kvstore.limits import MiB
from kvstore.server.drive_set import DriveSet
from kvstore.testing.plane_lab import PlaneLab
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore.wire.codec import pack_plain
from kvstore_client import Hit, KVClient, Stored


class Node:
    """A data plane over real drives, turned by a thread of its own."""

    def __init__(self, folder: Path, *, drives: int) -> None:
        self.drives = [self._open(folder / str(number)) for number in range(drives)]
        names = [drive.store.superblock.disk_id.hex() for drive in self.drives]
        engine = self.drives[0] if drives == 1 else DriveSet(list(zip(names, self.drives, strict=True)))
        self.lab = PlaneLab(engine)
        self.address = f"127.0.0.1:{self.lab.port}"
        target = {"id": "t", "data": [self.address], "weight": 1.0, "state": "serving"}
        self.lab.plane.set_view(1, pack_plain({"epoch": 1, "node_id": "lab", "targets": [target]}))
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._turn)
        self._thread.start()

    def flip(self, at: int) -> int:
        """Flips a bit of byte `at` of every record in memory; how many there are."""
        copies = [record for drive in self.drives for record in drive.cache.at.values()]
        for record in copies:
            record.view[at] ^= 4
        return len(copies)

    def count(self, metric: str) -> int:
        """A counter, over all drives."""
        return sum(getattr(drive.metrics, metric) for drive in self.drives)

    def close(self) -> None:
        """Ends the thread and gives everything back."""
        self._ends.set()
        self._thread.join()
        self.lab.close()
        for drive in self.drives:
            drive.close()

    def _open(self, folder: Path) -> DriveEngine:
        folder.mkdir()
        settings = EngineSettings(
            capacity_bytes=128 * MiB,
            segment_bytes=8 * MiB,
            cache_bytes=32 * MiB,
            staging_bytes=32 * MiB,
            device="threads",
            prefault=False,
        )
        return DriveEngine.open(folder, settings, now_ns=time.monotonic_ns())

    def _turn(self) -> None:
        while not self._ends.is_set():
            self.lab.turn(wait_ns=1_000_000)


@pytest.fixture(params=[1, 2], ids=["one drive", "two drives"])
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path, drives=request.param)
    yield made
    made.close()


@pytest.mark.parametrize("length", [40_000, 700_000], ids=["small", "large"])
def test_a_bit_that_flipped_in_the_nodes_memory_costs_no_hit(node: Node, length: int) -> None:
    namespace = Namespace(
        tenant="default", model="m", weights="w", layout=KVLayout.opaque(chunk_bytes=length, chunk_tokens=16)
    )
    payloads = [random.Random(number).randbytes(length) for number in range(3)]
    memory = [bytearray(length) for _ in payloads]
    with KVClient.connect(node.address) as client:
        ns = client.namespace(namespace)
        keys = ns.keys(list(range(48)))
        assert all(isinstance(one, Stored) for one in ns.put(keys, payloads))
        for at in (0, length - 1):
            assert all(isinstance(one, Hit) for one in ns.get_into(keys, memory))
            assert node.flip(at) == 3
            bad = node.count("checksum_errors_memory")
            assert all(isinstance(one, Hit) for one in ns.get_into(keys, memory))
            assert [bytes(one) for one in memory] == payloads
            assert node.count("checksum_errors_memory") == bad + 3
        assert client.stats()["corrupt_recovered"] == 6
        assert node.count("checksum_errors_reported") == 6
        assert node.count("checksum_errors_read") == node.count("quarantined_records") == 0
        seen = client.stats()["corrupt_blocks"]
        assert all(isinstance(one, Hit) for one in ns.get_into(keys, memory))
        assert client.stats()["corrupt_blocks"] == seen, "the bad copies are gone"
