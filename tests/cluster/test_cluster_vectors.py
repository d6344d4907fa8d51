"""Golden vectors of placement, which `tests/vectors/check_vectors.mjs` reads too, and of every change of a view."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvstore.cluster import transitions
from kvstore.cluster.placement import lookup_order, rank, seed_of
from kvstore.cluster.registration import (
    Registration,
    RelayRegistration,
    decode_registration,
    decode_relay,
    encode_registration,
)
from kvstore.cluster.settling import Overdue, Periods, settle
from kvstore.cluster.view import ReplicaPolicy, View, decode_view, encode_view

FOLDER = Path(__file__).parents[1] / "vectors"
PLACEMENT = json.loads((FOLDER / "placement.json").read_text())
TRANSITIONS = json.loads((FOLDER / "transitions.json").read_text())


@pytest.mark.parametrize("case", PLACEMENT["cases"], ids=lambda case: case["name"])
def test_runs_are_placed_as_the_vectors_say(case: dict[str, Any]) -> None:
    view = View.from_plain(case["view"])
    for run in case["runs"]:
        head = bytes.fromhex(run["head"])
        assert list(rank(view, head, case["count"])) == run["places"]
        assert list(lookup_order(view, head, case["count"])) == run["lookup"]


def test_seeds_are_as_the_vectors_say() -> None:
    assert {name: f"{seed_of(name):016x}" for name in PLACEMENT["seeds"]} == PLACEMENT["seeds"]


@pytest.mark.parametrize("case", TRANSITIONS, ids=lambda case: case["name"])
def test_views_change_as_the_vectors_say(case: dict[str, Any]) -> None:
    before, after = View.from_plain(case["before"]), View.from_plain(case["after"])
    assert changed(before, case["change"], case["arguments"]) == after
    assert (after == before) == (after.epoch == before.epoch)
    assert after.epoch >= before.epoch
    assert [target.id for target in after.targets] == sorted(target.id for target in after.targets)


@pytest.mark.parametrize("case", TRANSITIONS, ids=lambda case: case["name"])
def test_doing_it_twice_changes_nothing_more(case: dict[str, Any]) -> None:
    if case["change"] != "outlive":
        once = View.from_plain(case["after"])
        assert changed(once, case["change"], case["arguments"]) == once


@pytest.mark.parametrize("case", TRANSITIONS, ids=lambda case: case["name"])
def test_views_and_registrations_of_the_vectors_travel(case: dict[str, Any]) -> None:
    view = View.from_plain(case["after"])
    assert view.to_plain() == case["after"]
    assert decode_view(encode_view(view)) == view
    if "registration" in case["arguments"]:
        registration = Registration.from_plain(case["arguments"]["registration"])
        assert decode_registration(encode_registration(registration)) == registration
    for plain in case["arguments"].get("relays", ()):
        relay = RelayRegistration.from_plain(plain)
        assert decode_relay(encode_registration(relay)) == relay


def changed(view: View, change: str, arguments: dict[str, Any]) -> View:
    """The view after the change that a case names."""
    match change:
        case "join":
            return transitions.join(view, _registration(arguments), keep_ns=arguments["keep_ns"])
        case "renew":
            return transitions.renew(view, _registration(arguments), keep_ns=arguments["keep_ns"])
        case "replace":
            return transitions.replace_target(view, _registration(arguments), keep_ns=arguments["keep_ns"])
        case "expire":
            return transitions.expire(view, arguments["ids"])
        case "fence":
            return transitions.fence(view, arguments["ids"])
        case "drain":
            return transitions.drain(view, arguments["ids"], keep_ns=arguments["keep_ns"])
        case "leave":
            return transitions.leave(view, arguments["ids"])
        case "expire_previous":
            return transitions.expire_previous(view, arguments["epochs"])
        case "set_replicas":
            return transitions.set_replicas(view, ReplicaPolicy.from_plain(arguments["replicas"]))
        case "attend_relays":
            relays = map(RelayRegistration.from_plain, arguments["relays"])
            return transitions.attend_relays(view, {one.id: one for one in relays})
        case "outlive":
            return transitions.outlive(view, arguments["known_epoch"])
        case "settle":
            registered = map(Registration.from_plain, arguments["registrations"])
            overdue = Overdue(gone=arguments["gone"], forgotten=arguments["forgotten"], previous=arguments["previous"])
            periods = Periods(previous_ns=arguments["keep_ns"])
            return settle(view, {one.id: one for one in registered}, overdue, periods)
    raise AssertionError(change)


def _registration(arguments: dict[str, Any]) -> Registration:
    return Registration.from_plain(arguments["registration"])
