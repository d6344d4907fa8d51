"""What a read costs both sides by RDMA and in frames, on scripted devices: from which length on RDMA pays.

The device is scripted in the same process, and copies what a real one would move; frames go over loopback TCP.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvstore.limits import KiB, MiB
from kvstore.testing.rdma_town import Town
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore_bench.measure import Row
from kvstore_client import Hit, KVClient, Stored, rdma_places
from kvstore_client.namespace_handle import BoundNamespace
from kvstore_client.rdma import RdmaPort

_SHAPES: Final = ((1, 16 * KiB), (1, 128 * KiB), (1, MiB), (16, 256 * KiB), (4, 4 * MiB))
_TOKENS: Final = 16


@dataclass(slots=True)
class _Reader:
    """One client, with the records that it reads again and again."""

    ns: BoundNamespace
    buffers: list[memoryview]
    total_us: list[float] = field(default_factory=list)
    node_us: list[float] = field(default_factory=list)

    def read(self) -> None:
        """All of them."""
        keys = self.ns.keys(list(range(_TOKENS * len(self.buffers))))
        found = self.ns.get_into(keys, self.buffers)
        assert all(isinstance(one, Hit) for one in found), found

    def measure(self, town: Town, repeats: int) -> None:
        """CPU time for a read: of both sides, and of the node's thread."""
        node_ns, begin_ns = town.on_node(time.thread_time_ns), time.process_time_ns()
        for _ in range(repeats):
            self.read()
        self.total_us.append((time.process_time_ns() - begin_ns) / 1e3 / repeats)
        self.node_us.append((town.on_node(time.thread_time_ns) - node_ns) / 1e3 / repeats)


def rows(folder: Path, *, rounds: int, repeats: int) -> Iterator[Row]:
    """A row for each shape of read. The node's cache has the records."""
    town = Town(folder, cache_bytes=64 * MiB)
    least, clients = rdma_places.RDMA_CALL_BYTES_MIN, [_client(town, way) for way in ("rdma", "tcp")]
    rdma_places.RDMA_CALL_BYTES_MIN = 1  # type: ignore[misc]  # what is below it is measured as well
    try:
        for count, size in _SHAPES:
            by_rdma, in_frames = (_reader(client, count, size) for client in clients)
            by_rdma.read()
            before = town.fabric.posts, town.fabric.requests
            by_rdma.read()
            posts, requests = town.fabric.posts - before[0], town.fabric.requests - before[1]
            for _ in range(rounds):
                by_rdma.measure(town, repeats)
                in_frames.measure(town, repeats)
            yield _row(count, size, by_rdma, in_frames, posts=posts, requests=requests)
    finally:
        rdma_places.RDMA_CALL_BYTES_MIN = least  # type: ignore[misc]
        for client in clients:
            client.close()
        town.close()


def _client(town: Town, transport: str) -> KVClient:
    client = KVClient.connect(town.address, lazy=True, transport=transport)
    client.session().core.rdma.open_with(lambda host: RdmaPort(town.client_rail(), "client0:1"))
    return client


def _reader(client: KVClient, count: int, size: int) -> _Reader:
    layout = KVLayout.opaque(chunk_bytes=size, chunk_tokens=_TOKENS)
    ns = client.namespace(Namespace(tenant="default", model=os.urandom(8).hex(), weights="w", layout=layout))
    memory = client.alloc(count * size)
    buffers = [memory[at : at + size] for at in range(0, count * size, size)]
    stored = ns.put(ns.keys(list(range(_TOKENS * count))), buffers)
    assert all(isinstance(one, Stored) for one in stored), stored
    return _Reader(ns, buffers)


def _row(count: int, size: int, by_rdma: _Reader, in_frames: _Reader, *, posts: int, requests: int) -> Row:
    frames_us = statistics.median(in_frames.total_us)
    return Row(
        name=f"read of {count} x {size // KiB} KiB by RDMA",
        unit="us of CPU",
        value=statistics.median(by_rdma.total_us),
        higher_is_better=False,
        details={
            "in_frames_us": frames_us,
            "node_us": statistics.median(by_rdma.node_us),
            "node_in_frames_us": statistics.median(in_frames.node_us),
            "posts": float(posts),
            "requests": float(requests),
        },
    )
