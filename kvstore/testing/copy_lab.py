"""Workers that copy records from each other, all on one thread: real engines and sockets, a test decides who moves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstore.cluster.view import ReplicaPolicy, Target, TargetState, View
from kvstore.engine.engine import DriveEngine, EngineSettings
from kvstore.limits import GiB, MiB
from kvstore.server.admission import Admission
from kvstore.server.batch import pack_u32
from kvstore.server.copier import Copier
from kvstore.telemetry.metrics import PullEnd
from kvstore.testing.plane_lab import LabClient, PlaneLab
from kvstore.types.flow import FlowClass
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore.types.results import ItemStatus
from kvstore.wire.messages import Feature, Match, MatchReply

_GIVE_UP_S = 20.0
SPACE = Namespace(
    tenant="t", model="m", weights="w", layout=KVLayout.opaque(chunk_bytes=2 * MiB, chunk_tokens=16, run_bytes=64 * MiB)
)


@dataclass(frozen=True, slots=True)
class OneDrive:
    """A `copier.OwnDrive`."""

    id: str
    engine: DriveEngine


class CopyNode:
    """A worker with one drive, whose target id is its name."""

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        bytes_second: int = 1 * GiB,
        capacity_bytes: int = 64 * MiB,
        admission: Admission | None = None,
    ) -> None:
        self.name = name
        self.settings = EngineSettings(
            capacity_bytes=capacity_bytes,
            segment_bytes=4 * MiB,
            cache_bytes=0,
            staging_bytes=32 * MiB,
            prefault=False,
        )
        self.folder = folder / name
        self.folder.mkdir(exist_ok=True)
        self.engine = DriveEngine.open(self.folder, self.settings, now_ns=time.monotonic_ns())
        self.lab = PlaneLab(self.engine, admission=admission)
        self.copier = self.lab.plane.copier = Copier(
            [OneDrive(name, self.engine)],
            self.engine,
            self.lab.plane,
            client_id=name.encode().ljust(16, b"."),
            bytes_second=bytes_second,
        )

    def client(self, namespace: Namespace = SPACE) -> LabClient:
        """A connection that has registered a namespace."""
        made = self.lab.client(features=Feature.NONE, flow=FlowClass.WRITEBACK)
        made.register(namespace.manifest())
        return made

    def put(
        self, keys: Sequence[bytes], values: Sequence[bytes], *, namespace: Namespace = SPACE, position: int = 0
    ) -> None:
        """Store records as one chain, or a piece from `position` on; the first key is also the head of its one run."""
        client = self.client(namespace)
        outcome = client.put(
            namespace.digest,
            keys,
            values,
            run_heads=keys[0],
            parents=b"".join([bytes(32), *keys[:-1]]),
            positions=pack_u32(list(range(position, position + len(keys)))),
        )
        assert {status for status, _ in outcome.values()} <= {ItemStatus.STORED, ItemStatus.EXISTS}, outcome
        client.close()

    def held(self, keys: Sequence[bytes], *, namespace: Namespace = SPACE) -> list[bool]:
        """Which of these records are here."""
        ref = self.engine.namespace(namespace.digest)
        if ref is None:
            return [False] * len(keys)
        found = self.engine.match(ref, b"".join(keys), now_ns=self.lab.plane.now_ns, touch=False)
        return [not status for status in found.statuses]

    def read(self, keys: Sequence[bytes], *, namespace: Namespace = SPACE) -> list[tuple[bytes, bytes]]:
        """Bytes and content id of records that are all here."""
        client = self.client(namespace)
        statuses, data = client.get(namespace.digest, keys)
        assert not any(statuses), list(statuses)
        ids = {one.item: one.content_id for one in client.pieces}
        client.close()
        return [(data[at], ids[at]) for at in range(len(keys))]

    def ends(self, how: PullEnd) -> int:
        """How many records that were to be copied here have ended so."""
        return self.lab.metrics.pulls[how]

    def close(self) -> None:
        """Ends it in order."""
        self.lab.plane.close()
        self.lab.turn_until(lambda: self.engine.idle)
        self.lab.close()
        self.engine.close()


class CopyLab:
    """Several of them, in one view."""

    def __init__(self, *nodes: CopyNode) -> None:
        self.nodes = list(nodes)
        self.epoch = 0
        self.show()

    def show(
        self,
        *,
        states: dict[str, TargetState] | None = None,
        boot_ids: dict[str, str] | None = None,
        copies: int = 1,
        head_copies: int = 1,
    ) -> View:
        """Give every node a new view."""
        self.epoch += 1
        targets = [
            Target(
                id=node.name,
                data=(f"127.0.0.1:{node.lab.port}",),
                weight=1.0,
                state=(states or {}).get(node.name, TargetState.SERVING),
                node_id=node.name,
                boot_id=(boot_ids or {}).get(node.name, (b"B" * 16).hex()),
            )
            for node in sorted(self.nodes, key=lambda node: node.name)
        ]
        view = View(
            epoch=self.epoch,
            node_id="",
            targets=tuple(targets),
            replicas=ReplicaPolicy(copies=copies, head_copies=head_copies),
            cluster="lab",
        )
        for node in self.nodes:
            node.copier.set_view(view)
        return view

    def turn(self) -> None:
        """One turn of each."""
        for node in self.nodes:
            node.lab.turn(wait_ns=200_000)

    def turn_until(self, is_done: Callable[[], bool]) -> None:
        """Turns until `is_done`; fails after a while."""
        give_up = time.monotonic() + _GIVE_UP_S
        while not is_done():
            self.turn()
            if time.monotonic() > give_up:
                raise AssertionError("it never came")

    def settle(self) -> None:
        """Turns until nothing waits to be copied anywhere."""
        self.turn_until(lambda: not any(len(node.copier.queue) for node in self.nodes))

    def match(self, client: LabClient, keys: Iterable[bytes]) -> bytes:
        """MATCH without touching anything."""
        message = Match(namespace=SPACE.digest, keys=b"".join(keys), touch=False, count=False)
        return client.call(message, MatchReply).statuses

    def close(self) -> None:
        """Ends all."""
        for node in self.nodes:
            node.close()
