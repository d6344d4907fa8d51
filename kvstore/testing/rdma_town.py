"""A data plane over a real drive in a thread of its own, on scripted RDMA devices, for whole clients.

The client is the test's: it gets its ports from `Town.ports`. Node and client share the process, so bytes move between
their memories as a device would move them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from kvstore.engine.engine import DriveEngine, EngineSettings
from kvstore.errors import Unavailable
from kvstore.limits import MiB
from kvstore.server.rdma import RdmaService
from kvstore.telemetry.metrics import RdmaMetrics
from kvstore.testing.fake_verbs import FakeFabric, FakeHardware
from kvstore.testing.plane_lab import PlaneLab
from kvstore.testing.rdma_lab import client_rail, node_rail
from kvstore.transport.rdma.rail import Rail
from kvstore.wire.codec import Plain, pack_plain

GID_INDEX: Final = 3
_WAIT_NS: Final = 2_000_000
T = TypeVar("T")


def gid(host: int) -> bytes:
    """That of 10.77.0.`host`."""
    return bytes(10) + b"\xff\xff\x0a\x4d\x00" + bytes([host])


class Town:
    """A node with RDMA, and the network that it and its clients are in.

    Attributes:
        node, client: their devices, which a test may change.
        metrics: of the node's RDMA.
        service: the node's; touch it in `on_node` only.
    """

    def __init__(self, folder: Path, *, cache_bytes: int = 32 * MiB) -> None:
        self.node, self.client = FakeHardware(gids={GID_INDEX: gid(1)}), FakeHardware(gids={GID_INDEX: gid(2)})
        self.fabric = FakeFabric({"node0": self.node, "client0": self.client})
        settings = EngineSettings(capacity_bytes=128 * MiB, cache_bytes=cache_bytes, staging_bytes=32 * MiB)
        self.engine = DriveEngine.open(folder, settings, now_ns=0)
        self.lab = PlaneLab(self.engine)
        self.metrics = RdmaMetrics()
        self.service = self._serve()
        target: dict[str, Plain] = {
            "id": "t0",
            "data": [f"127.0.0.1:{self.lab.port}"],
            "weight": 1.0,
            "state": "serving",
        }
        self.lab.plane.set_view(1, pack_plain({"epoch": 1, "node_id": "town", "targets": [target]}))
        self._calls: list[Callable[[], None]] = []
        self._is_over = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _serve(self) -> RdmaService:
        rail = node_rail(self.fabric, "node0", GID_INDEX)
        service = RdmaService(rail, self.metrics, lambda: self.lab.plane.now_ns)
        service.register([self.engine.cache.arena.memory])
        self.lab.plane.use_rdma(service)
        return service

    @property
    def address(self) -> str:
        """Where clients connect."""
        return f"127.0.0.1:{self.lab.port}"

    def client_rail(self) -> Rail:
        """Of a client process."""
        return client_rail(self.fabric, "client0", GID_INDEX)

    def on_node(self, call: Callable[[], T]) -> T:
        """Runs something in the node's thread, between two turns."""
        done = threading.Event()
        found: list[T] = []

        def run() -> None:
            found.append(call())
            done.set()

        self._calls.append(run)
        if not done.wait(30):
            raise Unavailable("the node's thread does not turn")
        return found[0]

    def close(self) -> None:
        """Ends the node; clients must be closed."""
        self._is_over = True
        self._thread.join()
        self.lab.close()
        self.service.close()
        self.engine.close(within_ns=10**9)

    def _run(self) -> None:
        while not self._is_over:
            while self._calls:
                self._calls.pop(0)()
            self.lab.turn(wait_ns=_WAIT_NS)
