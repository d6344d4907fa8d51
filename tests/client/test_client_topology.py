"""The workers of a view as the client knows them, and where it looks for the keys of a chain."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvstore.cluster.run_places import NO_PLACE
from kvstore.cluster.view import PreviousPlacement, ReplicaPolicy, Target, TargetState, View
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore_client.place_order import BROKEN_SECONDS, load_seconds, reading_order
from kvstore_client.planner import as_chain
from kvstore_client.topology import ChainPlaces, Placement, placement_of, places_of, routes_of

LAYOUT = KVLayout.opaque(chunk_bytes=1000, chunk_tokens=4, run_bytes=3000)
NAMESPACE = Namespace(tenant="default", model="m", weights="w", layout=LAYOUT)


def view_of(*states: TargetState, policy: ReplicaPolicy | None = None) -> View:
    targets = tuple(
        Target(id=f"t{at}", data=(f"10.0.0.{at}:7401",), weight=1.0, state=state, node_id=f"n{at}")
        for at, state in enumerate(states)
    )
    return View(epoch=1, node_id="", targets=targets, replicas=policy or ReplicaPolicy())


def placement(view: View) -> Placement | str | None:
    return placement_of(view, routes_of(view, asked_host="h"))


def test_drives_of_one_worker_are_one_route() -> None:
    targets = tuple(
        Target(id=f"d{at}", data=("0.0.0.0:7401",), weight=1.0, state=TargetState.SERVING) for at in range(4)
    )
    view = View(epoch=1, node_id="n", targets=targets)
    routes = routes_of(view, asked_host="10.1.1.1")
    assert [(route.id, route.addresses) for route in routes] == [("d0", ("10.1.1.1:7401",))]
    assert placement_of(view, routes) == "d0"
    assert routes_of(view, asked_host="::1")[0].addresses == ("[::1]:7401",)


def test_a_placement_is_only_made_where_several_can_be_asked() -> None:
    serving, down = TargetState.SERVING, TargetState.DOWN
    assert placement(view_of()) is None
    assert placement(view_of(down)) == "t0", "it may be back before the view says so"
    assert placement(view_of(TargetState.RECOVERING, TargetState.RECOVERING)) is None
    assert placement(view_of(TargetState.RECOVERING, TargetState.DRAINING)) == "t1"
    assert isinstance(placement(view_of(down, down)), Placement), "one that is down may answer reads"
    assert isinstance(placement(view_of(down, TargetState.DRAINING)), Placement)
    assert isinstance(placement(view_of(serving, down, serving)), Placement)


def test_a_run_is_in_one_place_and_the_head_run_in_two() -> None:
    chain = NAMESPACE.keys(list(range(4 * 30)))
    found = places_of(Placement(view_of(*[TargetState.SERVING] * 5)), chain, copies=None)
    assert found.run_of.tolist() == [at // 3 for at in range(30)]
    assert [(row != NO_PLACE).sum() for row in found.places] == [2] + [1] * 9
    rest = places_of(Placement(view_of(*[TargetState.SERVING] * 5)), chain[4:], copies=None)
    assert (rest.places[rest.run_of][:, 0] == found.places[found.run_of][4:, 0]).all(), "also from inside a run on"


def test_single_keys_are_where_their_chain_is() -> None:
    chain = NAMESPACE.keys(list(range(4 * 30)))
    where = Placement(view_of(*[TargetState.SERVING] * 5))
    whole = places_of(where, chain, copies=None)
    for picked in ([chain[4]], [chain[4], chain[5]], [chain[20], chain[4], chain[0]], [chain[at] for at in range(30)]):
        loose = as_chain(picked, chunks_per_run=LAYOUT.chunks_per_run)
        found = places_of(where, loose, copies=None)
        wanted = [whole.places[whole.run_of[key.position or 0], 0] for key in picked]
        assert found.places[found.run_of][:, 0].tolist() == wanted


def test_a_view_is_asked_about_what_it_was_before() -> None:
    view = view_of(TargetState.SERVING, TargetState.SERVING, TargetState.JOINING, policy=ReplicaPolicy(head_copies=1))
    chain = NAMESPACE.keys(list(range(4 * 300)))
    old = Placement(View(epoch=1, node_id="", targets=view.targets[:2], replicas=view.replicas))
    new = Placement(
        View(
            epoch=2,
            node_id="",
            targets=view.targets,
            replicas=view.replicas,
            previous=(PreviousPlacement(epoch=2, keep_ns=1, weights={"t2": 0.0}),),
        )
    )
    before, after = places_of(old, chain, copies=None), places_of(new, chain, copies=None)
    assert (after.places == before.places).any(axis=1).all()
    assert after.newest == 1
    assert after.only_newest().places.shape[1] == 1


@given(st.lists(st.lists(st.integers(-1, 4), min_size=4, max_size=4), min_size=1, max_size=30), st.integers(1, 3))
def test_an_order_of_reading_holds_every_place_once_and_the_newest_first(rows: list[list[int]], newest: int) -> None:
    places = np.array([[at if row.index(at) == n else -1 for n, at in enumerate(row)] for row in rows], np.intp)
    where = ChainPlaces(tuple("abcde"), np.arange(len(rows)), places, newest)
    order = reading_order(where, np.zeros(5), np.ones(5))
    for before, after in zip(places.tolist(), order.tolist(), strict=True):
        live = [at for at in before if at != NO_PLACE]
        assert sorted(live) == sorted(at for at in after if at != NO_PLACE)
        assert after[: len(live)].count(NO_PLACE) == 0
        first = [at for at in before[:newest] if at != NO_PLACE]
        assert set(after[: len(first)]) == set(first)


def test_the_least_loaded_copy_is_read_and_a_broken_one_last() -> None:
    places = np.array([[0, 1]] * 10, np.intp)
    where = ChainPlaces(("a", "b"), np.arange(10), places, 2)
    idle = reading_order(where, np.zeros(2), np.ones(2))
    assert (idle[:, 0] == 0).sum() == 5, "one read of ten runs uses both copies"
    loads = load_seconds([10_000, 0], [1000.0, 0.0], [False, False])
    assert loads.tolist() == [10.0, 0.0]
    assert (reading_order(where, loads, np.ones(2))[:, 0] == 1).all()
    broken = load_seconds([0, 0], [0.0, 0.0], [False, True])
    assert broken[1] == BROKEN_SECONDS
    assert (reading_order(where, broken, np.ones(2))[:, 0] == 0).all()


def test_what_was_written_while_targets_served_is_looked_for_there_last_when_they_are_down() -> None:
    serving, down = TargetState.SERVING, TargetState.DOWN
    chain = NAMESPACE.keys(list(range(4 * 300)))
    before = places_of(Placement(view_of(*[serving] * 6)), chain, copies=2)
    for states in ([down] + [serving] * 5, [serving, down, serving, serving, down, serving]):
        after = places_of(Placement(view_of(*states)), chain, copies=2, with_down=True)
        numbers = {f"t{at}" for at, state in enumerate(states) if state is down}
        assert after.down == numbers
        live = after.places[:, : after.newest]
        assert not np.isin(live, [int(name[1]) for name in numbers]).any()
        for old, new in zip(before.places[before.run_of], after.places[after.run_of], strict=True):
            held_by_down = {f"t{at}" for at in old.tolist()} & numbers
            asked = [f"t{at}" for at in new.tolist() if at != NO_PLACE]
            assert held_by_down <= set(asked)
            assert not set(asked[:2]) & numbers, "behind those that are not down"
        assert (after.without(after.down).places[:, after.newest :] == NO_PLACE).all()
        assert places_of(Placement(view_of(*states)), chain, copies=2).places.shape[1] == after.newest


def test_places_of_targets_that_went_down_one_after_the_other_are_found() -> None:
    """What was written while one was down lies where it would be without that one."""
    serving, down = TargetState.SERVING, TargetState.DOWN
    chain = NAMESPACE.keys(list(range(4 * 300)))
    written = places_of(Placement(view_of(down, *[serving] * 5)), chain, copies=1)
    after = places_of(Placement(view_of(down, down, *[serving] * 4)), chain, copies=1, with_down=True)
    rows = zip(written.places[written.run_of], after.places[after.run_of], strict=True)
    assert all(1 in new for old, new in rows if 1 in old)
