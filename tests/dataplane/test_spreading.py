"""Copies that are brought about by the nodes themselves: lost replicas, a drain, deletes that others must hear of."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.cluster.placement import Ranking
from kvstore.cluster.view import TargetState
from kvstore.engine.told import was_deleted
from kvstore.limits import REPAIR_WINDOW_NS, SECOND_NS, SPREAD_SETTLE_NS, MiB
from kvstore.telemetry.metrics import PullEnd
from kvstore.testing.copy_lab import SPACE, CopyLab, CopyNode
from kvstore.wire.messages import Delete, Drop, End, Manifest
from kvstore.wire.replicas import Pull

VALUE = os.urandom(50_000)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[CopyLab]:
    made = CopyLab(*(CopyNode(tmp_path, name) for name in ("a", "b", "c")))
    yield made
    made.close()


def run(number: int, count: int = 3) -> list[bytes]:
    """Keys of one run, which `CopyNode.put` stores with the first as its head."""
    return [bytes([number, at]) * 16 for at in range(1, count + 1)]


def put_run(lab: CopyLab, keys: list[bytes], copies: int = 1) -> list[CopyNode]:
    """Stores a run on its first places, as a client does; who has it."""
    view = lab.nodes[0].copier.view
    names = Ranking.of(view).rank(keys[0], copies)
    holders = [node for name in names for node in lab.nodes if node.name == name]
    for node in holders:
        node.put(keys, [VALUE] * len(keys))
    return holders


def pass_time(lab: CopyLab, nanoseconds: int) -> None:
    for node in lab.nodes:
        node.lab.clock_ns += nanoseconds


def settled(lab: CopyLab) -> None:
    """Until every node has walked once."""
    pass_time(lab, SPREAD_SETTLE_NS)
    for _ in range(5):
        lab.turn()

    def is_quiet() -> bool:
        pass_time(lab, SECOND_NS // 20)
        return all(
            node.copier.spreader._round is None and not len(node.copier.queue) and not node.copier._fetches
            for node in lab.nodes
        )

    lab.turn_until(is_quiet)


def holders(lab: CopyLab, key: bytes) -> list[str]:
    return [node.name for node in lab.nodes if node.held([key])[0]]


# --- replicas ---------------------------------------------------------------------------------------------------------
def test_lost_replicas_come_back(lab: CopyLab, tmp_path: Path) -> None:
    lab.show(copies=2, head_copies=2)
    runs = [run(number) for number in range(1, 13)]
    for keys in runs:
        put_run(lab, keys, copies=2)
    lost = lab.nodes[2]
    lost.close()
    for file in lost.folder.iterdir():
        file.unlink()
    lab.nodes[2] = CopyNode(tmp_path, "c")
    view = lab.show(copies=2, head_copies=2, boot_ids={"c": (b"B" * 16).hex()})
    settled(lab)
    ranking = Ranking.of(view)
    for keys in runs:
        for key in keys:
            assert holders(lab, key) == sorted(ranking.rank(keys[0], 2)), "each on its two places, on no third"
    pulled = lab.nodes[2].ends(PullEnd.PULLED)
    assert pulled == sum("c" in ranking.rank(keys[0], 2) for keys in runs) * 3


def test_only_the_heads_have_more_copies_where_the_policy_says_so(lab: CopyLab) -> None:
    lab.show(copies=1, head_copies=2)
    keys = run(1)
    put_run(lab, keys)  # one place only: the second copy was lost
    settled(lab)
    assert [len(holders(lab, key)) for key in keys] == [2, 2, 2], "the first run of a chain is its head"
    tail = [bytes([9, at]) * 16 for at in range(1, 20)]
    first = put_run(lab, tail)[0]
    assert len(first.held(tail)) == 19
    lab.show(copies=1, head_copies=2)
    settled(lab)
    per_run = SPACE.layout.chunks_per_run
    assert [len(holders(lab, key)) for key in tail] == [2 if at < per_run else 1 for at in range(19)]


def test_a_namespace_may_ask_for_more_copies_than_the_policy(lab: CopyLab, tmp_path: Path) -> None:
    lab.show(copies=1, head_copies=1)
    keys = run(1)
    home = put_run(lab, keys)[0]
    client = home.client()
    client.call(Manifest(manifest=SPACE.manifest(), copies=3), End)
    client.close()
    settled(lab)
    lab.show(copies=1, head_copies=1)
    settled(lab)
    assert [holders(lab, key) for key in keys] == [["a", "b", "c"]] * 3
    at = lab.nodes.index(home)
    home.close()
    again = lab.nodes[at] = CopyNode(tmp_path, home.name)
    assert again.engine.store.namespaces.copies(SPACE.digest) == 3, "it is on the drive"
    others = [node for node in lab.nodes if node is not again]
    assert {node.engine.store.namespaces.copies(SPACE.digest) for node in others} == {3}, "and came with the copies"


def test_nothing_is_pushed_to_who_is_new(tmp_path: Path) -> None:
    a, b = CopyNode(tmp_path, "a"), CopyNode(tmp_path, "b")
    lab = CopyLab(a, b)
    lab.show()
    for number in range(1, 9):
        put_run(lab, run(number))
    lab.nodes.append(CopyNode(tmp_path, "c"))
    lab.show()
    settled(lab)
    assert lab.nodes[2].lab.metrics.pulled_bytes == 0
    lab.close()


def arrivals(node: CopyNode, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Keys in the order in which they come into the queue of a node, as they come."""
    came: list[bytes] = []
    offer = node.copier.queue.offer

    def noting(namespace: bytes, keys: list[bytes], source: str, *, tenant: str) -> list[bool]:
        taken = offer(namespace, keys, source, tenant=tenant)
        came.extend(key for key, is_taken in zip(keys, taken, strict=True) if is_taken)
        return taken

    monkeypatch.setattr(node.copier.queue, "offer", noting)
    return came


# --- drain ------------------------------------------------------------------------------------------------------------
def test_a_draining_worker_hands_everything_on_and_goes_on_serving(lab: CopyLab) -> None:
    runs = [run(number) for number in range(1, 13)]
    for keys in runs:
        put_run(lab, keys)
    leaving = lab.nodes[0]
    had = [key for keys in runs for key in keys if leaving.held([key])[0]]
    assert had
    leaving.lab.plane.is_draining = True
    view = lab.show(states={"a": TargetState.DRAINING})
    lab.turn_until(lambda: leaving.copier.spreader.is_done)
    ranking = Ranking.of(view)
    for keys in runs:
        for key in keys:
            assert ranking.rank(keys[0], 1)[0] in holders(lab, key)
    assert (leaving.copier.spreader.handed_on, leaving.copier.spreader.left_behind) == (len(had), 0)
    assert leaving.held(had) == [True] * len(had)
    assert leaving.client().get(SPACE.digest, had[:1])[1] == {0: VALUE}


def test_a_drain_goes_heads_first_then_the_warmest(lab: CopyLab, monkeypatch: pytest.MonkeyPatch) -> None:
    leaving = lab.nodes[0]
    per_run = SPACE.layout.chunks_per_run
    chain = [bytes([1, at]) * 16 for at in range(1, per_run + 3)]
    leaving.put(chain, [VALUE] * len(chain))
    told: list[bytes] = []
    ask = leaving.copier.ask

    def noting(target: object, call: object) -> None:
        message = call.message  # type: ignore[attr-defined]
        if isinstance(message, Pull):
            told.extend(message.keys[at : at + 32] for at in range(0, len(message.keys), 32))
        ask(target, call)  # type: ignore[arg-type]

    monkeypatch.setattr(leaving.copier, "ask", noting)
    lab.show(states={"a": TargetState.DRAINING})
    lab.turn_until(lambda: leaving.copier.spreader.is_done)
    assert list(dict.fromkeys(told)) == chain, "the head run, then what follows it"


def test_a_drain_arrives_in_the_order_of_the_chain_at_who_has_never_heard_of_the_namespace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = CopyNode(tmp_path, "a"), CopyNode(tmp_path, "b", capacity_bytes=256 * MiB)
    lab = CopyLab(a, b)
    chain = [at.to_bytes(32, "little") for at in range(1, 201)]
    a.put(chain[:100], [VALUE[:5_000]] * 100)
    a.lab.clock_ns += SECOND_NS  # the end of the chain is warmer than its beginning
    a.put(chain[100:], [VALUE[:5_000]] * 100, position=100)
    came = arrivals(b, monkeypatch)
    lab.show(states={"a": TargetState.DRAINING})
    lab.turn_until(lambda: a.copier.spreader.is_done)
    assert came == chain
    assert b.held(chain) == [True] * 200
    assert (a.copier.spreader.handed_on, a.copier.spreader.left_behind) == (200, 0)
    lab.close()


def test_what_a_full_queue_refuses_is_told_again_before_what_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = CopyNode(tmp_path, "a"), CopyNode(tmp_path, "b", capacity_bytes=256 * MiB)
    lab = CopyLab(a, b)
    b.copier.queue._records_max = 80
    chain = [at.to_bytes(32, "little") for at in range(1, 201)]
    a.put(chain, [VALUE[:5_000]] * 200)
    came = arrivals(b, monkeypatch)
    lab.show(states={"a": TargetState.DRAINING})

    def is_done() -> bool:
        pass_time(lab, SECOND_NS // 100)
        return a.copier.spreader.is_done

    lab.turn_until(is_done)
    assert came == chain
    assert b.held(chain) == [True] * 200
    lab.close()


def test_a_drain_ends_although_nobody_takes_anything(lab: CopyLab) -> None:
    leaving = lab.nodes[0]
    keys = run(1)
    leaving.put(keys, [VALUE] * 3)
    for node in lab.nodes[1:]:
        node.lab.plane.is_draining = True  # they refuse
    lab.show(states={"a": TargetState.DRAINING})

    def is_done() -> bool:
        pass_time(lab, SECOND_NS // 5)
        return leaving.copier.spreader.is_done

    lab.turn_until(is_done)
    assert (leaving.copier.spreader.handed_on, leaving.copier.spreader.left_behind) == (0, 3)


def test_a_drain_keeps_to_the_budget_of_who_takes(tmp_path: Path) -> None:
    a, b = CopyNode(tmp_path, "a"), CopyNode(tmp_path, "b", bytes_second=4 * MiB)
    lab = CopyLab(a, b)
    keys = [at.to_bytes(32, "little") for at in range(1, 21)]
    a.put(keys, [os.urandom(1 * MiB) for _ in keys])
    lab.show(states={"a": TargetState.DRAINING})

    def is_done() -> bool:
        if any(fetch.waits for fetch in b.copier._fetches.values()):
            pass_time(lab, SECOND_NS // 10)
        return a.copier.spreader.is_done

    lab.turn_until(is_done)
    assert b.held(keys) == [True] * 20
    lab.close()


# --- deletes ----------------------------------------------------------------------------------------------------------
def delete(node: CopyNode, keys: list[bytes]) -> bytes:
    client = node.client()
    statuses = client.call(Delete(namespace=SPACE.digest, keys=b"".join(keys)), End).statuses
    client.close()
    return statuses


def pull(node: CopyNode, keys: list[bytes], source: str) -> bytes:
    client = node.client()
    statuses = client.call(Pull(namespace=SPACE.digest, keys=b"".join(keys), source=source), End).statuses
    client.close()
    return statuses


@pytest.mark.parametrize("had_it", [True, False])
@pytest.mark.parametrize("restarted", [True, False])
def test_no_pull_brings_back_what_was_deleted(lab: CopyLab, tmp_path: Path, had_it: bool, restarted: bool) -> None:
    a, b, _ = lab.nodes
    keys = run(1)
    a.put(keys, [VALUE] * 3)
    if had_it:
        b.put(keys, [VALUE] * 3)
    else:
        b.client().close()
    delete(b, keys[:2])
    if restarted:
        b.close()
        b = lab.nodes[1] = CopyNode(tmp_path, "b")
        lab.show()
    pull(b, keys, "a")
    lab.settle()
    assert b.held(keys) == [False, False, True]
    assert b.ends(PullEnd.DELETED) == 2


def test_a_delete_that_comes_while_the_bytes_do_wins(lab: CopyLab) -> None:
    a, b, _ = lab.nodes
    keys = [bytes([7]) * 32]
    a.put(keys, [os.urandom(3 * MiB)])
    pull(b, keys, "a")
    lab.turn_until(lambda: b.lab.metrics.pulled_bytes > 0)
    ref = b.engine.namespace(SPACE.digest)
    assert ref is not None
    b.engine.delete(ref, keys[0], lambda _: None)
    lab.settle()
    assert b.held(keys) == [False]


def test_who_comes_back_hears_what_was_deleted_before_anything_is_copied_from_it(lab: CopyLab) -> None:
    a, b, c = lab.nodes
    keys = run(1)
    for node in (a, b):
        node.put(keys, [VALUE] * 3)
    lab.show(states={"a": TargetState.DOWN})
    delete(b, keys[:1])
    lab.show()
    pull(c, keys, "a")
    lab.turn_until(lambda: not b.copier._teller.untold)
    assert a.held(keys) == [False, True, True]
    assert was_deleted(a.engine, SPACE.digest, keys[0]), "it remembers, too"
    lab.settle()


def test_who_is_new_hears_of_drops(lab: CopyLab, tmp_path: Path) -> None:
    a = lab.nodes[0]
    a.put(run(1), [VALUE] * 3)
    client = a.client()
    client.call(Drop(namespace=SPACE.digest), End)
    lab.nodes.append(CopyNode(tmp_path, "d"))
    lab.show()
    lab.turn_until(lambda: not a.copier._teller.untold)
    ref = lab.nodes[3].engine.namespace(SPACE.digest)
    assert ref is not None
    assert ref.generation == 2


def test_a_grave_is_forgotten_after_the_window(lab: CopyLab) -> None:
    b = lab.nodes[1]
    b.client().close()
    delete(b, run(1))
    assert was_deleted(b.engine, SPACE.digest, run(1)[0])
    b.lab.clock_ns += REPAIR_WINDOW_NS + 10 * SECOND_NS
    b.engine.poll(b.lab.plane.clock())
    delete(b, run(2))
    assert not was_deleted(b.engine, SPACE.digest, run(1)[0])
    assert was_deleted(b.engine, SPACE.digest, run(2)[0])


def test_graves_are_bounded_and_the_oldest_goes_first(lab: CopyLab) -> None:
    b = lab.nodes[1]
    b.client().close()
    graves = b.engine.store.ledger.graves
    count = graves._count_max + 5
    keys = [at.to_bytes(32, "little") for at in range(1, count + 1)]
    delete(b, keys)
    assert (len(graves), graves.lost) == (count - 5, 5)
    assert not was_deleted(b.engine, SPACE.digest, keys[4])
    assert was_deleted(b.engine, SPACE.digest, keys[5])


def test_a_node_on_its_own_remembers_no_delete(tmp_path: Path) -> None:
    node = CopyNode(tmp_path, "a")
    node.engine.store.ledger.graves.enabled = False
    node.put(run(1), [VALUE] * 3)
    delete(node, run(1))
    assert len(node.engine.store.ledger.graves) == 0
    node.close()
