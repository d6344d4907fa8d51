"""PULL, HEADS and FORGET, as a worker answers them: a data plane over a real engine."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest

from kvstore.cluster.view import Target, TargetState, View
from kvstore.engine.api import NamespaceRef
from kvstore.engine.engine import DriveEngine, EngineSettings
from kvstore.engine.told import news_of
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.limits import NEWS_STEP_GRAVES, SECOND_NS, MiB
from kvstore.server.batch import pack_u32, unpack_u32
from kvstore.server.copier import Copier, HeadsFound
from kvstore.server.teller import Teller
from kvstore.testing.plane_lab import LabClient, PlaneLab
from kvstore.types.checksum import crc_table
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore.types.results import ItemStatus, MissReason, RefusedReason
from kvstore.wire.frames import Frame
from kvstore.wire.header import FrameType, Header
from kvstore.wire.messages import Delete, Drop, End, Match, MatchReply
from kvstore.wire.replicas import Forget, Heads, HeadsReply, Pull

SPACE = Namespace(
    tenant="t", model="m", weights="w", layout=KVLayout.opaque(chunk_bytes=2 * MiB, chunk_tokens=16, run_bytes=64 * MiB)
)
KEYS = [bytes([at]) * 32 for at in range(1, 5)]
VALUES = [os.urandom(count) for count in (5000, 100_000, 1, 2 * MiB)]
RUN_HEADS = [KEYS[0]] * 4
PARENTS = [bytes(32), *KEYS[:3]]
ABSENT = MissReason.ABSENT


@dataclass(frozen=True, slots=True)
class OneDrive:
    id: str
    engine: DriveEngine


class Node:
    def __init__(self, folder: Path) -> None:
        settings = EngineSettings(
            capacity_bytes=64 * MiB, segment_bytes=8 * MiB, cache_bytes=0, staging_bytes=32 * MiB, prefault=False
        )
        self.engine = DriveEngine.open(folder, settings, now_ns=time.monotonic_ns())
        self.lab = PlaneLab(self.engine)
        self.copier = self.lab.plane.copier = Copier(
            [OneDrive("here", self.engine)], self.engine, self.lab.plane, client_id=b"H" * 16, bytes_second=0
        )
        self.copier.set_view(view_of("here", "there"))

    def client(self) -> LabClient:
        return self.lab.client()

    def close(self) -> None:
        self.lab.plane.close()
        self.lab.turn_until(lambda: self.engine.idle)
        self.lab.close()
        self.engine.close()


def view_of(*names: str, down: tuple[str, ...] = ()) -> View:
    targets = [
        Target(
            id=name,
            data=("127.0.0.1:1",),
            weight=1.0,
            state=TargetState.DOWN if name in down else TargetState.SERVING,
        )
        for name in names
    ]
    return View(epoch=1, node_id="", targets=tuple(targets))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.close()


@pytest.fixture
def client(node: Node) -> LabClient:
    made = node.client()
    made.register(SPACE.manifest())
    return made


def store(client: LabClient, count: int = 4) -> None:
    outcome = client.put(
        SPACE.digest,
        KEYS[:count],
        VALUES[:count],
        run_heads=b"".join(RUN_HEADS[:count]),
        parents=b"".join(PARENTS[:count]),
        positions=pack_u32(range(count)),
        parts=bytes([0, 0, 2, 0][:count]),
    )
    assert {status for status, _ in outcome.values()} == {ItemStatus.STORED}


def held(client: LabClient) -> bytes:
    return client.call(
        Match(namespace=SPACE.digest, keys=b"".join(KEYS), touch=False, count=False), MatchReply
    ).statuses


# --- PULL -------------------------------------------------------------------------------------------------------------
def test_what_is_lacking_is_queued_and_what_is_held_is_not(node: Node, client: LabClient) -> None:
    store(client, 2)
    reply = client.call(Pull(namespace=SPACE.digest, keys=b"".join(KEYS), source="there"), End)
    assert (reply.statuses, reply.value) == (bytes(4), 2)
    again = client.call(Pull(namespace=SPACE.digest, keys=b"".join(KEYS), source="there"), End)
    assert (again.statuses, again.value) == (bytes(4), 0)
    batch = node.copier.queue.next_batch(0)
    assert batch is not None
    assert (batch.source, batch.namespace, batch.keys) == ("there", SPACE.digest, tuple(KEYS[2:]))


@pytest.mark.parametrize("source", ["127.0.0.1:9", "elsewhere", "", "fallen"])
def test_nobody_points_a_node_at_a_source_that_its_view_does_not_have(
    node: Node, client: LabClient, source: str
) -> None:
    node.copier.set_view(view_of("here", "there", "fallen", down=("fallen",)))
    reply = client.call(Pull(namespace=SPACE.digest, keys=KEYS[0], source=source), End)
    assert reply.statuses == bytes([RefusedReason.INVALID])
    assert len(node.copier.queue) == 0


def test_a_namespace_must_be_known_first(node: Node) -> None:
    reply = node.client().call(Pull(namespace=b"?" * 32, keys=KEYS[0], source="there"), End)
    assert reply.statuses == bytes([RefusedReason.UNKNOWN_NAMESPACE])


def test_a_node_that_takes_nothing_new_pulls_nothing(node: Node, client: LabClient) -> None:
    pull = Pull(namespace=SPACE.digest, keys=KEYS[0], source="there")
    node.lab.plane.is_draining = True
    assert client.call(pull, End).statuses == bytes([RefusedReason.DRAINING])
    node.lab.plane.is_draining = False
    node.lab.plane.fenced_from_ns = 0
    assert client.call(pull, End).statuses == bytes([RefusedReason.FENCED])


def test_a_node_on_its_own_has_nobody_to_get_anything_from(node: Node, client: LabClient) -> None:
    node.lab.plane.copier = None
    pull = Pull(namespace=SPACE.digest, keys=KEYS[0], source="there")
    assert client.call(pull, End).statuses == bytes([RefusedReason.INVALID])


# --- HEADS ------------------------------------------------------------------------------------------------------------
def test_heads_say_all_that_a_copy_must_keep(client: LabClient) -> None:
    store(client)
    reply = client.call(Heads(namespace=SPACE.digest, keys=b"".join(KEYS) + b"n" * 32), HeadsReply)
    assert reply.statuses == bytes([0, 0, 0, 0, ABSENT])
    assert (reply.generation, reply.manifest) == (1, SPACE.manifest())
    assert unpack_u32(reply.lengths) == (*map(len, VALUES), 0)
    assert unpack_u32(reply.block_bytes) == (*[65536] * 4, 0)
    assert unpack_u32(reply.positions) == (0, 1, 2, 3, 0)
    assert reply.parts == bytes([0, 0, 2, 0, 0])
    assert reply.run_heads == b"".join(RUN_HEADS) + bytes(32)
    assert reply.parents == b"".join(PARENTS) + bytes(32)
    client.get(SPACE.digest, KEYS)
    found = {one.item: one.content_id for one in client.pieces}
    assert reply.content_ids == b"".join(found[at] for at in range(4)) + bytes(16)


def test_heads_of_a_header_longer_than_a_page(client: LabClient) -> None:
    value = os.urandom(6 * MiB)  # 1,536 words of 4 KiB blocks: two pages of header
    block = 4096
    assert client.put(SPACE.digest, [KEYS[0]], [value], block_bytes=block, crc_tables=crc_table(value, block))
    reply = client.call(Heads(namespace=SPACE.digest, keys=KEYS[0]), HeadsReply)
    assert (reply.statuses, unpack_u32(reply.lengths)) == (b"\0", (len(value),))


def test_heads_of_an_unknown_namespace_are_absent(client: LabClient) -> None:
    reply = client.call(Heads(namespace=b"?" * 32, keys=b"".join(KEYS)), HeadsReply)
    assert (reply.statuses, reply.generation, reply.manifest) == (bytes([ABSENT]) * 4, 0, b"")


# --- FORGET -----------------------------------------------------------------------------------------------------------
def forget(generation: int, *gone: bytes) -> Forget:
    return Forget(
        manifest=SPACE.manifest(),
        generation=generation,
        keys=b"".join(key[:16] for key in gone),
        ages_ns=struct.pack(f"<{len(gone)}Q", *[SECOND_NS] * len(gone)),
    )


def test_what_was_deleted_elsewhere_is_deleted_here(client: LabClient) -> None:
    store(client)
    client.call(forget(1, KEYS[0], KEYS[2], b"n" * 32), End)
    assert [bool(status) for status in held(client)] == [True, False, True, False]
    assert client.get(SPACE.digest, KEYS[1:2]) == (b"\0", {0: VALUES[1]})


def test_what_was_dropped_elsewhere_is_dropped_here_once(node: Node, client: LabClient) -> None:
    store(client, 1)
    client.call(forget(4), End)
    assert held(client)[0], "it is of generation 1"
    ref = node.engine.namespace(SPACE.digest)
    assert ref is not None
    assert ref.generation == 4
    store(client, 1)
    client.call(forget(4), End)
    client.call(forget(2), End)
    assert not held(client)[0], "told again, or by somebody who missed more"
    client.call(Drop(namespace=SPACE.digest), End)
    assert held(client)[0]


def test_whatever_generation_is_told_a_namespace_can_be_dropped_and_written_again(node: Node) -> None:
    highest = 0x7FFF_FFFF
    with pytest.raises(InvalidRequest, match="generation"):
        Forget.decode(Forget(manifest=SPACE.manifest(), generation=highest + 1).encode())
    client = node.client()
    client.call(Forget(manifest=SPACE.manifest(), generation=highest), End)
    client.call(Drop(namespace=SPACE.digest), End)
    assert client.put(SPACE.digest, KEYS[:1], VALUES[:1])[0][0] == ItemStatus.STORED
    assert client.get(SPACE.digest, KEYS[:1])[1][0] == VALUES[0]


def test_a_record_that_one_drive_cannot_give_now_is_not_gone_since_another_drive_never_had_it(node: Node) -> None:
    class Silent:
        """A drive that knows the namespace and whose answer a test gives."""

        def __init__(self, answer: MissReason) -> None:
            self.engine = cast(Any, self)
            self.id = "silent"
            self.store = self
            self.heads = self
            self.namespaces = node.engine.store.namespaces
            self._answer = answer

        def namespace(self, digest: bytes) -> NamespaceRef | None:
            return node.engine.namespace(digest)

        def read(self, ref: NamespaceRef, keys: Sequence[bytes], on_done: Callable[[list[Any]], None]) -> None:
            on_done([self._answer] * len(keys))

    node.client().register(SPACE.manifest())
    found: list[HeadsFound] = []
    own = OneDrive("here", node.engine)
    copier = node.copier
    for drives in ([own, Silent(MissReason.IO)], [Silent(MissReason.IO), own]):
        copier._drives = cast(Any, drives)
        copier.heads(SPACE.digest, KEYS[:1], found.append)
        node.lab.turn_until(lambda: bool(found))
        assert found.pop().heads == [MissReason.IO]
    copier._drives = [own]


class Listening:
    """A `TellingHost` whose targets answer as a test says."""

    now_ns = 0

    def __init__(self, *failures: KVStoreError | None) -> None:
        self.failures = list(failures)
        self.told: list[Forget] = []

    def ask(self, target: Target, call: Any) -> None:
        self.told.append(call.message)
        failure = self.failures.pop(0) if self.failures else None
        if failure is not None:
            call.failed(failure)
        else:
            body = End().encode()
            header = Header(
                type=FrameType.END, request_id=1, body_bytes=len(body), payload_bytes=0, epoch=0, flags=0, crc=0
            )
            call.arrived(Frame(header, body, []))

    def wake(self) -> None:
        pass


def test_what_is_refused_of_one_namespace_keeps_nobody_from_hearing_of_the_others(node: Node) -> None:
    client = node.client()
    spaces = [replace(SPACE, model=name) for name in ("one", "two", "three")]
    for space in spaces:
        client.register(space.manifest())
        client.call(Delete(namespace=space.digest, keys=KEYS[0]), End)
    host = Listening(InvalidRequest("the drive knows 65536 namespaces"))
    teller = Teller(host, [node.engine])
    there = view_of("here", "there")
    teller.tell([there.targets[1]], there)
    teller.poll(0)
    assert [one.manifest for one in host.told] == [space.manifest() for space in spaces]
    assert not teller.untold


def test_who_comes_back_is_told_in_steps(node: Node) -> None:
    client = node.client()
    client.register(SPACE.manifest())
    keys = [at.to_bytes(4, "little") * 8 for at in range(1, NEWS_STEP_GRAVES + 300)]
    client.call(Delete(namespace=SPACE.digest, keys=b"".join(keys)), End)
    graves = node.engine.store.ledger.graves
    count = min(len(graves), len(keys))
    steps = news_of(node.engine)
    first = next(steps)
    assert len(first.prefixes) == min(count, NEWS_STEP_GRAVES)
    client.call(Delete(namespace=SPACE.digest, keys=b"a" * 32), End)
    left = [prefix for news in steps for prefix in news.prefixes]
    told = {*first.prefixes, *left}
    assert len(told) == len(first.prefixes) + len(left)
    assert told <= {key[:16] for key in keys}, "what goes meanwhile is not told, and nothing twice"


def test_a_namespace_that_is_told_of_is_known_from_then_on(node: Node) -> None:
    client = node.client()
    client.call(forget(3, KEYS[0]), End)
    assert client.call(Heads(namespace=SPACE.digest, keys=b""), HeadsReply).generation == 3
