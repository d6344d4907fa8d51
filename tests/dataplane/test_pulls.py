"""Records copied from one worker to another: real engines, real sockets, and sources that fail and lie."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.engine.api import PutSpec, ReadHandle, ReadSink, ReadSpec, ReadyItem
from kvstore.engine.heads import Head
from kvstore.limits import PULL_BURST_BYTES, PULL_FAILURES_MAX, PULL_WINDOW_BYTES, SECOND_NS, MiB
from kvstore.server import copier
from kvstore.server.admission import TokenAdmission
from kvstore.server.copier import HeadsFound
from kvstore.server.tenants import Scope, Tenant, TenantBook, Token, hash_of
from kvstore.telemetry.metrics import DataplaneMetrics, PullEnd
from kvstore.testing.copy_lab import SPACE, CopyLab, CopyNode
from kvstore.types.checksum import crc_table
from kvstore.types.flow import FlowClass
from kvstore.types.namespace import Namespace
from kvstore.types.results import Exists, MissReason, Refused, RefusedReason
from kvstore.wire.messages import End
from kvstore.wire.replicas import Heads, HeadsReply, Pull

KEYS = [bytes([at]) * 32 for at in range(1, 9)]
VALUES = [os.urandom(length) for length in (5000, 100_000, 1, 2 * MiB, 0, 65536, 70_000, 3 * MiB)]
OTHER = Namespace(tenant="t", model="another", weights="w", layout=SPACE.layout)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[CopyLab]:
    made = CopyLab(CopyNode(tmp_path, "a"), CopyNode(tmp_path, "b"))
    yield made
    made.close()


def pull(node: CopyNode, keys: list[bytes], source: str, namespace: Namespace = SPACE) -> bytes:
    client = node.client(namespace)
    statuses = client.call(Pull(namespace=namespace.digest, keys=b"".join(keys), source=source), End).statuses
    client.close()
    return statuses


def ends(node: CopyNode) -> dict[str, int]:
    return {how.name.lower(): count for how in PullEnd if (count := node.ends(how))}


# --- what a copy is ---------------------------------------------------------------------------------------------------
def test_a_copy_is_what_its_first_writer_wrote(lab: CopyLab) -> None:
    a, b = lab.nodes
    a.put(KEYS, VALUES)
    assert pull(b, KEYS, "a") == bytes(8)
    lab.settle()
    assert ends(b) == {"pulled": 8}
    assert b.lab.metrics.pulled_bytes == sum(map(len, VALUES))
    assert b.read(KEYS) == a.read(KEYS)
    both = [node.client().call(Heads(namespace=SPACE.digest, keys=b"".join(KEYS)), HeadsReply) for node in (a, b)]
    assert both[0] == both[1], "content id, parent, position, run head, part and blocks are kept"


def test_it_is_there_after_a_restart(lab: CopyLab, tmp_path: Path) -> None:
    a, b = lab.nodes
    a.put(KEYS, VALUES)
    pull(b, KEYS, "a")
    lab.settle()
    b.close()
    again = lab.nodes[1] = CopyNode(tmp_path, "b")
    assert again.read(KEYS) == a.read(KEYS)


def test_what_comes_meanwhile_and_what_is_not_there_is_left_alone(lab: CopyLab) -> None:
    a, b = lab.nodes
    a.put(KEYS[:4], VALUES[:4])
    pull(b, KEYS, "a")
    b.put(KEYS[:2], VALUES[:2])
    mine = b.read(KEYS[:2])
    lab.settle()
    assert ends(b) == {"held": 2, "pulled": 2, "absent": 4}
    assert b.read(KEYS[:2]) == mine, "first commit wins"


def test_a_batch_longer_than_a_window_comes_in_several(lab: CopyLab) -> None:
    a, b = lab.nodes
    count = 3 * PULL_WINDOW_BYTES // (2 * MiB)
    keys = [at.to_bytes(32, "little") for at in range(1, count + 1)]
    a.put(keys, [os.urandom(2 * MiB) for _ in keys])
    pull(b, keys, "a")
    lab.settle()
    assert b.held(keys) == [True] * count
    assert b.read(keys) == a.read(keys)


# --- the byte budget --------------------------------------------------------------------------------------------------
def test_the_budget_is_kept(tmp_path: Path) -> None:
    """Counted bytes against the node's own clock, which the test moves: no wall time."""
    rate = 1 * MiB
    a, b = CopyNode(tmp_path, "a"), CopyNode(tmp_path, "b", bytes_second=rate)
    lab = CopyLab(a, b)
    keys = [at.to_bytes(32, "little") for at in range(1, 33)]
    a.put(keys, [os.urandom(1 * MiB) for _ in keys])
    begun_ns = b.lab.plane.clock()
    pull(b, keys, "a")
    seen = []
    while len(b.copier.queue):
        lab.turn()
        spent_ns = b.lab.plane.now_ns - begun_ns
        seen.append(b.lab.metrics.pulled_bytes)
        assert seen[-1] <= rate * spent_ns // SECOND_NS + PULL_BURST_BYTES + PULL_WINDOW_BYTES
        if any(fetch.waits for fetch in b.copier._fetches.values()):
            b.lab.clock_ns += SECOND_NS // 10  # nothing else to wait for
    assert seen[-1] == 32 * MiB
    assert b.lab.plane.now_ns - begun_ns >= (32 * MiB - PULL_BURST_BYTES - PULL_WINDOW_BYTES) * SECOND_NS // rate
    lab.close()


def test_a_budget_of_nothing_copies_nothing(tmp_path: Path) -> None:
    lab = CopyLab(CopyNode(tmp_path, "a"), CopyNode(tmp_path, "b", bytes_second=0))
    a, b = lab.nodes
    a.put(KEYS, VALUES)
    pull(b, KEYS, "a")
    for _ in range(20):
        lab.turn()
    assert (ends(b), len(b.copier.queue)) == ({}, 8)
    lab.close()


# --- sources that fail ------------------------------------------------------------------------------------------------
def skip_pauses(lab: CopyLab, node: CopyNode) -> None:
    """Turns, and moves the node's clock to when it will try again, until it has given up or is done."""

    def is_done() -> bool:
        wait_ns = node.copier.due_ns - node.lab.plane.now_ns
        if not node.copier._fetches and 0 < wait_ns < 60 * SECOND_NS:
            node.lab.clock_ns += wait_ns
        return not len(node.copier.queue)

    lab.turn_until(is_done)


def test_a_source_that_nobody_answers_for_is_given_up(lab: CopyLab) -> None:
    a, b = lab.nodes
    for listening in list(a.lab.plane._listeners):
        a.lab.loop.forget(listening.fileno())
        listening.close()
    a.lab.plane._listeners.clear()
    pull(b, KEYS, "a")
    skip_pauses(lab, b)
    assert ends(b) == {"given_up": 8}


def test_a_source_that_dies_in_the_middle_is_taken_up_again_when_it_is_back(lab: CopyLab, tmp_path: Path) -> None:
    a, b = lab.nodes
    a.put(KEYS, VALUES)
    pull(b, KEYS, "a")
    lab.turn_until(lambda: b.lab.metrics.pulled_bytes > 0)
    a.close()
    lab.nodes = [b]
    lab.turn_until(lambda: not len(b.copier._fetches))
    assert len(b.copier.queue) == 8, "the batch waits for another try"
    again = CopyNode(tmp_path, "a")
    lab.nodes = [again, b]
    lab.show()
    skip_pauses(lab, b)
    assert b.held(KEYS) == [True] * 8
    assert b.read(KEYS) == again.read(KEYS)


def test_a_worker_at_a_reused_address_is_not_taken_for_the_old_one(lab: CopyLab) -> None:
    a, b = lab.nodes
    a.put(KEYS, VALUES)
    lab.show(boot_ids={"a": (b"O" * 16).hex()})
    pull(b, KEYS, "a")
    lab.turn_until(lambda: len(b.copier.queue) == 8 and not b.copier._fetches and b.copier.due_ns < 1 << 62)
    assert b.held(KEYS) == [False] * 8
    lab.show()
    skip_pauses(lab, b)
    assert ends(b) == {"pulled": 8}


def test_a_source_that_leaves_the_view_is_given_up(lab: CopyLab) -> None:
    _, b = lab.nodes
    pull(b, KEYS, "a")
    lab.nodes = [b]
    lab.show()
    lab.turn_until(lambda: not len(b.copier.queue))
    assert ends(b) == {"given_up": 8}
    lab.nodes = [_, b]


def test_a_silent_source_holds_nobody_up(lab: CopyLab) -> None:
    _, b = lab.nodes
    with socket.create_server(("127.0.0.1", 0)) as silent:
        view = lab.show()
        a = replace(view.targets[0], data=(f"127.0.0.1:{silent.getsockname()[1]}",))
        b.copier.set_view(replace(view, epoch=9, targets=(a, *view.targets[1:])))
        pull(b, KEYS, "a")
        for _ in range(PULL_FAILURES_MAX):
            lab.turn_until(lambda: bool(b.copier._fetches))
            b.lab.clock_ns += 3 * SECOND_NS  # the greeting is overdue
            lab.turn_until(lambda: not b.copier._fetches)
            b.lab.clock_ns += 60 * SECOND_NS
    assert ends(b) == {"given_up": 8}


def test_a_batch_that_stands_still_takes_its_connection_with_it(lab: CopyLab, monkeypatch: pytest.MonkeyPatch) -> None:
    """What of its bytes is still to come must not land in memory that others have been given."""
    monkeypatch.setattr(copier, "PULL_STALL_NS", 1 * SECOND_NS)
    a, b = lab.nodes
    a.put(KEYS, VALUES)
    pull(b, KEYS, "a")
    lab.turn_until(lambda: any(fetch._window for fetch in b.copier._fetches.values()))
    b.lab.clock_ns += 2 * SECOND_NS
    b.lab.turn(wait_ns=0)
    assert (len(b.copier._peers), len(b.copier._fetches)) == (0, 0)
    b.lab.clock_ns += 1 * SECOND_NS
    lab.settle()
    assert b.read(KEYS) == a.read(KEYS)


def test_a_full_queue_refuses(lab: CopyLab) -> None:
    _, b = lab.nodes
    b.copier.queue._records_max = 6
    b.copier._budget.bytes_second = 0
    assert pull(b, KEYS[:5], "a") == bytes([0, 0, 0, RefusedReason.OVERLOADED, RefusedReason.OVERLOADED])


def test_a_fenced_node_stores_nothing_of_what_it_was_to_copy(lab: CopyLab) -> None:
    a, b = lab.nodes
    a.put(KEYS, VALUES)
    pull(b, KEYS, "a")
    b.lab.plane.fenced_from_ns = 0
    for _ in range(20):
        lab.turn()
    assert (b.held(KEYS), len(b.copier.queue)) == ([False] * 8, 8)
    b.lab.plane.fenced_from_ns = 1 << 63
    b.lab.clock_ns += SECOND_NS
    lab.settle()
    assert b.held(KEYS) == [True] * 8


# --- tenants ----------------------------------------------------------------------------------------------------------
PEERS = b"the token of this cluster's nodes"


def tenants(metrics: DataplaneMetrics) -> TokenAdmission:
    tokens = (Token(hash=hash_of(b"a token of tenant t"), scopes=Scope.READ | Scope.WRITE),)
    admission = TokenAdmission(metrics)
    admission.tell(TenantBook([Tenant(name="t", tokens=tokens), Tenant(name="u")]))
    admission.tell_peer_token(PEERS)
    return admission


@pytest.mark.parametrize("shown", [PEERS, b"", b"a token of tenant t", b"another token of 16 bytes"])
def test_where_there_are_tenants_only_who_shows_the_peer_token_is_given_copies(tmp_path: Path, shown: bytes) -> None:
    nodes = [CopyNode(tmp_path, name, admission=tenants(DataplaneMetrics())) for name in ("a", "b")]
    lab = CopyLab(*nodes)
    a, b = nodes
    b.lab.plane.peer_token = shown
    theirs = Namespace(tenant="u", model="m", weights="w", layout=SPACE.layout)
    ref = a.engine.add_namespace(theirs.manifest())
    spec = PutSpec(
        namespace=ref,
        key=KEYS[0],
        payload_bytes=1,
        block_bytes=4096,
        crc_table=crc_table(b"x", 4096),
        flow=FlowClass.WRITEBACK,
        deadline_ns=1 << 62,
        client_id=bytes(16),
    )
    a.engine.open_put(spec, store_x)
    lab.turn_until(lambda: a.held(KEYS[:1], namespace=theirs) == [True])
    b.engine.add_namespace(theirs.manifest())
    b.copier.queue.offer(theirs.digest, KEYS[:1], "a", tenant="theirs")
    b.copier.wake()
    skip_pauses(lab, b)
    assert b.held(KEYS[:1], namespace=theirs) == [shown == PEERS]
    lab.close()


def store_x(ticket: object) -> None:
    assert not isinstance(ticket, Exists | Refused)
    ticket.buffer[:] = b"x"  # type: ignore[attr-defined]
    ticket.commit(on_done=lambda _: None)  # type: ignore[attr-defined]


# --- sources that lie -------------------------------------------------------------------------------------------------
class Bent:
    """An engine whose reads deliver something else."""

    def __init__(self, node: CopyNode, bend: Callable[[ReadyItem], None]) -> None:
        self._engine = node.engine
        self._bend = bend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def read(self, spec: ReadSpec, sink: ReadSink, *, now_ns: int) -> ReadHandle:
        return self._engine.read(spec, _BentSink(sink, self._bend), now_ns=now_ns)


class _BentSink:
    def __init__(self, sink: ReadSink, bend: Callable[[ReadyItem], None]) -> None:
        self._sink = sink
        self._bend = bend
        self.missed = sink.missed
        self.finished = sink.finished

    def ready(self, item: ReadyItem) -> None:
        self._bend(item)
        self._sink.ready(item)


def garble(item: ReadyItem) -> None:
    if len(item.data) > 1000:
        data = bytearray(item.data)
        data[700] ^= 1
        item.data = memoryview(data)


def garble_well(item: ReadyItem) -> None:
    garble(item)
    item.crcs = crc_table(item.data, item.block_bytes)


def shorten(item: ReadyItem) -> None:
    item.record_bytes += 1


def rename(item: ReadyItem) -> None:
    item.content_id = bytes(16)


@pytest.mark.parametrize("bend", [garble, garble_well, shorten, rename])
def test_bytes_that_are_not_the_record_are_never_stored(lab: CopyLab, bend: Callable[[ReadyItem], None]) -> None:
    a, b = lab.nodes
    a.put(KEYS, VALUES)
    a.lab.plane._engine = Bent(a, bend)  # type: ignore[assignment]  # all else is the engine's own
    pull(b, KEYS, "a")
    skip_pauses(lab, b)
    stored = [at for at, held in enumerate(b.held(KEYS)) if held]
    a.lab.plane._engine = a.engine
    assert b.read([KEYS[at] for at in stored]) == a.read([KEYS[at] for at in stored])
    bent = [at for at, value in enumerate(VALUES) if len(value) > 1000]
    if bend in (garble, garble_well):
        assert sorted({*range(8)} - {*stored}) == bent
        assert b.ends(PullEnd.FAILED) == 2 * len(bent)
    else:
        assert b.ends(PullEnd.GIVEN_UP) == 8 - len(stored)
    assert not b.engine.store.writer.pending, "no ticket is left over"


def other_length(found: HeadsFound) -> HeadsFound:
    return _changed(found, payload_bytes=4999)


def other_block(found: HeadsFound) -> HeadsFound:
    return _changed(found, block_bytes=16)


def huge(found: HeadsFound) -> HeadsFound:
    return _changed(found, payload_bytes=1 << 31)


def no_id(found: HeadsFound) -> HeadsFound:
    return _changed(found, content_id=bytes(16))


def another_namespace(found: HeadsFound) -> HeadsFound:
    return replace(found, manifest=OTHER.manifest())


def no_manifest(found: HeadsFound) -> HeadsFound:
    return replace(found, manifest=b"?")


def too_few(found: HeadsFound) -> HeadsFound:
    return replace(found, heads=found.heads[:1])


def _changed(found: HeadsFound, **fields: Any) -> HeadsFound:
    return replace(found, heads=[replace(one, **fields) if isinstance(one, Head) else one for one in found.heads])


@pytest.mark.parametrize("bend", [other_length, other_block, huge, no_id, another_namespace, no_manifest, too_few])
def test_heads_that_are_not_true_store_nothing(
    lab: CopyLab, monkeypatch: pytest.MonkeyPatch, bend: Callable[[HeadsFound], HeadsFound]
) -> None:
    a, b = lab.nodes
    a.put(KEYS[:2], VALUES[:2])
    honest = a.copier.heads
    monkeypatch.setattr(
        a.copier, "heads", lambda digest, keys, on_done: honest(digest, keys, lambda found: on_done(bend(found)))
    )
    pull(b, KEYS[:2], "a")
    skip_pauses(lab, b)
    assert b.held(KEYS[:2]) == [False, False]
    assert b.ends(PullEnd.FAILED) + b.ends(PullEnd.GIVEN_UP) == 2
    assert not b.engine.store.writer.pending
    assert b.engine.namespace(OTHER.digest) is None


def test_a_record_that_the_source_cannot_read_now_is_asked_for_once_more(
    lab: CopyLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = lab.nodes
    a.put(KEYS[:2], VALUES[:2])
    honest = a.copier.heads
    asked = []

    def unwilling(digest: bytes, keys: list[bytes], on_done: Callable[[HeadsFound], None]) -> None:
        asked.append(len(keys))
        bad = [MissReason.IO] * len(keys)
        if len(asked) > 1:
            honest(digest, keys, on_done)
        else:
            on_done(HeadsFound(heads=bad, generation=1, manifest=SPACE.manifest()))

    monkeypatch.setattr(a.copier, "heads", unwilling)
    pull(b, KEYS[:2], "a")
    lab.settle()
    assert asked == [2, 2]
    assert b.held(KEYS[:2]) == [True, True]


def test_what_goes_to_another_node_is_summed_by_the_source(lab: CopyLab) -> None:
    """Without a cache it sums nothing for a client that does so itself; a copy is judged where the bad record lies."""
    a, b = lab.nodes
    a.put(KEYS[:3], VALUES[:3])
    drive = a.folder / "kvstore.data"
    at = drive.read_bytes().index(VALUES[1]) + 1000
    with drive.open("r+b", buffering=0) as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 8]))
    pull(b, KEYS[:3], "a")
    lab.settle()
    assert b.held(KEYS[:3]) == [True, False, True]
    assert (a.engine.metrics.checksum_errors_read, a.engine.metrics.quarantined_records) == (2, 1)
    assert b.engine.metrics.checksum_errors_received == 0, "nothing wrong was sent"


# --- namespaces -------------------------------------------------------------------------------------------------------
def test_what_was_dropped_at_the_source_is_dropped_here_before_anything_is_copied(lab: CopyLab) -> None:
    a, b = lab.nodes
    a.put(KEYS[:1], VALUES[:1])
    b.put(KEYS[1:2], VALUES[1:2])
    ref = a.engine.namespace(SPACE.digest)
    assert ref is not None
    a.engine.drop_namespace(ref, lambda: None)
    a.put(KEYS[2:3], VALUES[2:3])
    pull(b, KEYS[2:3], "a")
    lab.settle()
    assert b.held(KEYS[:3]) == [False, False, True], "what b had is of before the drop"


def test_nothing_is_copied_from_a_source_that_missed_a_drop(lab: CopyLab) -> None:
    a, b = lab.nodes
    a.put(KEYS, VALUES)
    b.put(KEYS[:1], VALUES[:1])
    ref = b.engine.namespace(SPACE.digest)
    assert ref is not None
    b.engine.drop_namespace(ref, lambda: None)
    pull(b, KEYS, "a")
    lab.settle()
    assert b.held(KEYS) == [False] * 8
    assert ends(b) == {"deleted": 8}


def test_two_namespaces_are_not_mixed_up(lab: CopyLab) -> None:
    a, b = lab.nodes
    a.put(KEYS[:1], VALUES[:1])
    a.put(KEYS[:1], VALUES[1:2], namespace=OTHER)
    pull(b, KEYS[:1], "a")
    pull(b, KEYS[:1], "a", OTHER)
    lab.settle()
    assert b.read(KEYS[:1])[0][0] == VALUES[0]
    assert b.read(KEYS[:1], namespace=OTHER)[0][0] == VALUES[1]
