"""Placement: even, by weight, over failure domains; and a change of the view moves no more than it must."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.cluster import transitions
from kvstore.cluster.placement import Ranking, loads, lookup_order, rank
from kvstore.cluster.registration import Registration
from kvstore.cluster.view import ReplicaPolicy, Target, TargetState, View
from kvstore.errors import InvalidRequest
from kvstore.limits import DIGEST_BYTES, PLACE_CELLS_MAX, GiB

RUNS = 20_000
HEADS = random.Random(56).randbytes(DIGEST_BYTES * RUNS)
KEEP_NS = 10**9


def registration(number: int, *, gib: int = 100, label: str = "") -> Registration:
    return Registration(
        id=f"disk{number}",
        data=(f"10.0.0.{number}:7401",),
        capacity_bytes=gib * GiB,
        node_id=f"node{number}",
        label=label,
        disk_id=f"disk{number}",
        boot_id="b",
        session="s",
    )


def view_of(*registrations: Registration) -> View:
    targets = sorted((one.as_target(TargetState.SERVING) for one in registrations), key=lambda target: target.id)
    return View(epoch=1, node_id="", targets=tuple(targets))


def first_places(view: View) -> list[str]:
    ranking = Ranking.of(view)
    return [ranking.ids[at] for at in ranking.rank_batch(HEADS, 1)[:, 0]]


def test_a_ninth_target_takes_its_share_and_nothing_else_moves() -> None:
    eight = view_of(*map(registration, range(8)))
    nine = transitions.join(eight, registration(8), keep_ns=KEEP_NS)
    before, after = first_places(eight), first_places(nine)
    moved = [now for was, now in zip(before, after, strict=True) if was != now]
    assert set(moved) == {"disk8"}
    assert 0.9 / 9 <= len(moved) / RUNS <= 1.1 / 9
    back = transitions.leave(nine, ["disk8"])
    assert first_places(back) == before


def test_lookups_find_every_run_where_it_was_before() -> None:
    view = view_of(*map(registration, range(4)))
    homes = first_places(view)
    for number in (4, 5):
        view = transitions.join(view, registration(number), keep_ns=KEEP_NS)
    view = transitions.drain(view, ["disk0"], keep_ns=KEEP_NS)
    view = transitions.renew(view, registration(1, gib=300), keep_ns=KEEP_NS)
    for number in range(0, RUNS, 100):
        head = HEADS[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
        places = lookup_order(view, head, 1)
        assert homes[number] in places
        assert len(places) == len(set(places)) <= 1 + len(view.previous)


def test_of_several_copies_one_is_still_asked_after_a_change() -> None:
    eight = view_of(*map(registration, range(8)))
    was = Ranking.of(eight).rank_batch(HEADS, 2)
    nine = transitions.join(eight, registration(8), keep_ns=KEEP_NS)
    now = Ranking.of(nine)
    # ids sort in the same order, and disk8 is the last: indices mean the same target
    kept = [len(set(old) & set(new)) for old, new in zip(was.tolist(), now.rank_batch(HEADS, 2).tolist(), strict=True)]
    assert min(kept) >= 1


def test_a_dead_target_moves_only_its_own_runs_and_each_to_its_next_place() -> None:
    view = view_of(*map(registration, range(8)))
    ranked = Ranking.of(view).rank_batch(HEADS, 2)
    dead = transitions.expire(view, ["disk3"])
    after = first_places(dead)
    for (first, second), now in zip(ranked.tolist(), after, strict=True):
        assert now == (f"disk{second}" if first == 3 else f"disk{first}")


@pytest.mark.parametrize("targets", [4, 8, 16])
def test_equal_targets_are_loaded_evenly(targets: int) -> None:
    ranking = Ranking.of(view_of(*map(registration, range(targets))))
    load = loads(ranking, ranking.rank_batch(HEADS, 1))
    assert max(load.values()) / (RUNS / targets) <= 1.3


def test_load_follows_capacity() -> None:
    sizes = {0: 1_000, 1: 4_000, 2: 4_000, 3: 8_000}
    ranking = Ranking.of(view_of(*(registration(number, gib=gib) for number, gib in sizes.items())))
    load = loads(ranking, ranking.rank_batch(HEADS, 1))
    shares = {number: load[f"disk{number}"] / RUNS / (gib / sum(sizes.values())) for number, gib in sizes.items()}
    assert max(shares.values()) <= 1.3
    assert min(shares.values()) >= 0.7


def test_a_fresh_target_gets_at_most_twice_its_share_while_it_fills() -> None:
    view = transitions.join(view_of(*map(registration, range(4))), registration(4), keep_ns=KEEP_NS)
    fresh = view.target("disk4")
    assert fresh is not None
    assert fresh.state is TargetState.JOINING
    writes = first_places(view)[:1_000]
    assert writes.count("disk4") <= 2 * 1_000 / 5


def test_copies_lie_in_different_domains_while_there_are_any() -> None:
    racks = [registration(number, label=f"rack{number % 3}") for number in range(9)]
    ranking = Ranking.of(view_of(*racks))
    label_of = np.array([int(name.removeprefix("disk")) % 3 for name in ranking.ids])
    labels = label_of[ranking.rank_batch(HEADS, 3)]
    assert (np.sort(labels, axis=1) == [0, 1, 2]).all()


def test_drives_of_one_node_are_one_domain_without_labels() -> None:
    targets = [
        Target(id=f"d{at}", data=(), weight=1.0, state=TargetState.SERVING, node_id=f"n{at // 2}") for at in range(4)
    ]
    ranking = Ranking.of(View(epoch=1, node_id="", targets=tuple(targets)))
    places = ranking.rank_batch(HEADS[: 1_000 * DIGEST_BYTES], 2)
    assert (places[:, 0] // 2 != places[:, 1] // 2).all()


def test_more_copies_than_domains_go_to_different_targets() -> None:
    view = view_of(*(registration(number, label="rack") for number in range(3)))
    for count in (2, 3, 5):
        places = rank(view, HEADS[:DIGEST_BYTES], count)
        assert len(set(places)) == len(places) == min(count, 3)


def test_only_live_targets_are_placed_and_draining_ones_are_still_asked() -> None:
    view = view_of(*map(registration, range(4)))
    homes = first_places(view)
    view = transitions.drain(view, ["disk1"], keep_ns=KEEP_NS)
    view = transitions.fence(view, ["disk2"])
    assert not {"disk1", "disk2"} & set(first_places(view))
    number = homes.index("disk1")
    places = lookup_order(view, HEADS[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES], 1)
    assert places[1] == "disk1"
    assert "disk2" not in places


def test_nothing_is_placed_where_nobody_is() -> None:
    assert rank(View(epoch=1, node_id="", targets=()), HEADS[:DIGEST_BYTES], 3) == ()


def test_a_batch_is_what_its_runs_are_alone_and_in_any_pieces() -> None:
    view = view_of(*(registration(number, gib=50 + number, label=f"r{number % 4}") for number in range(300)))
    ranking = Ranking.of(view)
    count = 2 * PLACE_CELLS_MAX // 300 + 7  # more than is computed at once
    places = ranking.rank_batch(HEADS[: count * DIGEST_BYTES], 3)
    for at in (0, 1, PLACE_CELLS_MAX // 300 - 1, PLACE_CELLS_MAX // 300, count - 1):
        alone = ranking.rank(HEADS[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES], 3)
        assert alone == tuple(ranking.ids[index] for index in places[at])


@pytest.mark.parametrize(("heads", "count"), [(b"x" * 31, 1), (b"x" * 32, 0)])
def test_what_makes_no_sense_is_refused(heads: bytes, count: int) -> None:
    with pytest.raises(InvalidRequest):
        Ranking.of(view_of(registration(1))).rank_batch(heads, count)


@given(st.integers(0, 9), st.sampled_from([None, 1, 2, 3]))
def test_heads_have_their_own_number_of_copies(run_index: int, namespace_copies: int | None) -> None:
    policy = ReplicaPolicy(copies=1, head_copies=2, head_runs=3)
    copies = policy.copies_of(run_index=run_index, namespace_copies=namespace_copies)
    wanted = namespace_copies or 1
    assert copies == (max(2, wanted) if run_index < 3 else wanted)


CHANGES = st.lists(
    st.tuples(st.sampled_from(["join", "drain", "expire", "leave", "back"]), st.integers(0, 5)), max_size=12
)


@given(CHANGES)
def test_what_was_written_under_a_kept_placement_is_looked_up_there(changes: list[tuple[str, int]]) -> None:
    """Each change may move a run; wherever it was written last, and still can be read, a lookup goes there."""
    head = HEADS[:DIGEST_BYTES]
    view = transitions.join(View(epoch=1, node_id="", targets=()), registration(0), keep_ns=KEEP_NS)
    written: dict[int, str] = {view.epoch: rank(view, head, 1)[0]}
    for change, number in changes:
        if change == "leave":  # for good: who comes back under its id is asked for what it is given from then on
            written = {epoch: name for epoch, name in written.items() if name != registration(number).id}
        view = change_of(view, change, number)
        place = rank(view, head, 1)
        if place:
            written[view.epoch] = place[0]
        readable = {target.id for target in view.targets if target.state is not TargetState.DOWN}
        oldest = min((previous.epoch for previous in view.previous), default=view.epoch + 1)
        before = max((epoch for epoch in written if epoch < oldest), default=0)
        kept = [name for epoch, name in written.items() if epoch >= before and name in readable]
        assert set(kept) <= set(lookup_order(view, head, 1))


def change_of(view: View, change: str, number: int) -> View:
    new = registration(number)
    match change:
        case "join":
            return transitions.join(view, new, keep_ns=KEEP_NS)
        case "drain":
            return transitions.drain(view, [new.id], keep_ns=KEEP_NS)
        case "expire":
            return transitions.expire(view, [new.id])
        case "leave":
            return transitions.leave(view, [new.id])
    return transitions.renew(view, new, keep_ns=KEEP_NS)
