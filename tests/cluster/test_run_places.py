"""Which workers hold runs: the same as ranking each run alone, with each worker once."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.cluster.placement import Ranking
from kvstore.cluster.run_places import NO_PLACE, NOT_A_HEAD, RunPlaces, copies_of, workers_of
from kvstore.cluster.view import PreviousPlacement, ReplicaPolicy, Target, TargetState, View

STATES = [TargetState.SERVING, TargetState.SERVING, TargetState.JOINING, TargetState.DRAINING, TargetState.DOWN]


def target(number: int, *, drives: int = 1, state: TargetState = TargetState.SERVING, label: str = "") -> Target:
    worker = number // drives
    return Target(
        id=f"t{number:02}",
        data=(f"10.0.0.{worker}:7401",),
        weight=1.0 + number % 3,
        state=state,
        node_id=f"n{worker}",
        label=label,
    )


@st.composite
def views(draw: st.DrawFn) -> View:
    drives = draw(st.integers(1, 3))
    count = draw(st.integers(1, 9))
    label = draw(st.sampled_from(["", "rack"]))
    targets = tuple(
        target(number, drives=drives, state=draw(st.sampled_from(STATES)), label=label) for number in range(count)
    )
    previous = tuple(
        PreviousPlacement(epoch=at + 1, keep_ns=1, weights={f"t{draw(st.integers(0, count - 1)):02}": 0.0})
        for at in range(draw(st.integers(0, 2)))
    )
    return View(epoch=9, node_id="", targets=targets, previous=previous)


def expected(ranking: Ranking, head: bytes, copies: int, worker_of: dict[str, int]) -> list[int]:
    """The workers of one run, the slow way."""
    found: list[int] = []
    for name in ranking.rank(head, max(1, len(ranking.ids))):
        number = worker_of.get(name, NO_PLACE)
        if number != NO_PLACE and number not in found and len(found) < copies:
            found.append(number)
    return found


@given(views(), st.integers(0, 99), st.data())
def test_places_of_a_batch_are_those_of_each_run_alone(view: View, seed: int, data: st.DataObject) -> None:
    heads = [random.Random(seed + at).randbytes(32) for at in range(data.draw(st.integers(1, 6)))]
    copies = np.array([data.draw(st.integers(1, 3)) for _ in heads], np.intp)
    places = RunPlaces(view)
    worker_of = {name: number for number, names in enumerate(places.workers) for name in names}
    newest = places.newest(b"".join(heads), copies)
    everywhere = places.everywhere(b"".join(heads), copies)
    assert newest.shape == (len(heads), copies.max())
    for row, head in enumerate(heads):
        wanted = expected(Ranking.of(view), head, copies[row], worker_of)
        assert [at for at in newest[row].tolist() if at != NO_PLACE] == wanted
        for ranking in Ranking.before(view):
            wanted += expected(ranking, head, copies[row], worker_of)
        assert [at for at in everywhere[row].tolist() if at != NO_PLACE] == list(dict.fromkeys(wanted))


def test_drives_that_share_a_node_and_its_addresses_are_one_worker() -> None:
    view = View(epoch=1, node_id="", targets=tuple(target(at, drives=2) for at in range(4)))
    assert workers_of(view) == (("t00", "t01"), ("t02", "t03"))
    same = Target(id="x", data=("10.0.0.0:7401",), weight=1.0, state=TargetState.SERVING, node_id="other")
    assert len(workers_of(View(epoch=1, node_id="", targets=(*view.targets, same)))) == 3


@pytest.mark.parametrize(("namespace_copies", "found"), [(None, [2, 2, 1, 1]), (3, [3, 3, 3, 3]), (1, [2, 2, 1, 1])])
def test_head_runs_have_copies_of_their_own(namespace_copies: int | None, found: list[int]) -> None:
    policy = ReplicaPolicy(copies=1, head_copies=2, head_runs=2)
    counts = copies_of(policy, np.array([0, 1, 2, NOT_A_HEAD], np.intp), namespace_copies)
    assert counts.tolist() == found


def test_one_more_worker_takes_its_share_and_what_it_takes_is_still_found() -> None:
    heads = b"".join(random.Random(at).randbytes(32) for at in range(4_000))
    one = np.ones(4_000, np.intp)
    before = View(epoch=1, node_id="", targets=tuple(target(3 * at) for at in range(8)))
    newcomer = Target(id="z", data=("10.0.1.0:7401",), weight=1.0, state=TargetState.JOINING, node_id="nz", label="")
    after = View(
        epoch=2,
        node_id="",
        targets=(*before.targets, newcomer),
        previous=(PreviousPlacement(epoch=2, keep_ns=1, weights={"z": 0.0}),),
    )
    old, new = RunPlaces(before).newest(heads, one)[:, 0], RunPlaces(after).newest(heads, one)[:, 0]
    moved = old != new
    assert set(new[moved].tolist()) == {8}
    assert 0.08 < moved.mean() < 0.14
    everywhere = RunPlaces(after).everywhere(heads, one)
    assert (everywhere == old[:, np.newaxis]).any(axis=1).all()
