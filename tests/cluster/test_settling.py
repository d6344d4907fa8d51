"""What is due when, on a clock that the test turns; and entries that make no sense."""

from __future__ import annotations

from kvstore.cluster import transitions
from kvstore.cluster.catalog import (
    VIEW_NAME,
    registrations_of,
    target_name,
    target_of,
    view_of,
)
from kvstore.cluster.registration import Registration, encode_registration
from kvstore.cluster.settling import Attendance, Overdue, Periods, settle
from kvstore.cluster.store import Entry
from kvstore.cluster.view import TargetState, View, encode_view
from kvstore.limits import GiB

PERIODS = Periods(absent_ns=10, previous_ns=100, down_ns=1_000)


def registration(name: str) -> Registration:
    return Registration(
        id=name,
        data=(f"{name}:1",),
        capacity_bytes=GiB,
        node_id=name,
        label="",
        disk_id=name,
        boot_id="b",
        session="s",
    )


def view_of_two() -> View:
    registered = {name: registration(name) for name in "ab"}
    return settle(transitions.found("c"), registered, Overdue(), PERIODS)


def test_an_absent_target_has_its_grace_and_a_lease_that_ended_none() -> None:
    view, attendance = view_of_two(), Attendance(periods=PERIODS)
    attendance.observe(view, {"a"}, 50)
    assert attendance.overdue(view, 59).gone == frozenset()
    assert attendance.next_due_ns(view, 50) == 60
    assert attendance.overdue(view, 60).gone == {"b"}
    attendance.observe(view, {"a"}, 55)
    assert attendance.overdue(view, 60).gone == {"b"}  # seen again as absent: counted from the first time
    attendance.observe(view, {"a", "b"}, 60)
    assert attendance.overdue(view, 100).gone == frozenset()
    attendance.observe(view, {"b"}, 200)
    attendance.lease_ended("a", 200)
    assert attendance.overdue(view, 200).gone == {"a"}


def test_a_previous_placement_is_kept_for_its_time_since_it_was_seen() -> None:
    view, attendance = view_of_two(), Attendance(periods=PERIODS)
    (previous,) = view.previous
    attendance.observe(view, {"a", "b"}, 1_000)
    assert attendance.next_due_ns(view, 1_000) == 1_100
    assert attendance.overdue(view, 1_099).previous == set()
    overdue = attendance.overdue(view, 1_100)
    assert overdue.previous == {previous.epoch}
    filled = settle(view, {name: registration(name) for name in "ab"}, overdue, PERIODS)
    assert filled.previous == ()
    assert {target.state for target in filled.targets} == {TargetState.SERVING}
    assert attendance.next_due_ns(filled, 1_100) is None


def test_a_target_that_stays_down_is_forgotten() -> None:
    view, attendance = transitions.expire(view_of_two(), ["b"]), Attendance(periods=PERIODS)
    attendance.observe(view, {"a"}, 0)
    assert attendance.overdue(view, 999).forgotten == frozenset()
    overdue = attendance.overdue(view, 1_000)
    assert overdue.forgotten == {"b"}
    left = settle(view, {"a": registration("a")}, overdue, PERIODS)
    assert [target.id for target in left.targets] == ["a"]


def test_entries_of_others_are_left_out_one_by_one() -> None:
    good = registration("größe/1")
    entries = {
        target_name(good.id): Entry(value=encode_registration(good), revision=1),
        target_name("torn"): Entry(value='{"id":', revision=2),
        target_name("newer"): Entry(value=encode_registration(registration("newer"))[:-1] + ',"colour":1}', revision=3),
        target_name("liar"): Entry(value=encode_registration(registration("other")), revision=4),
        VIEW_NAME: Entry(value=encode_view(view_of_two()), revision=5),
        "something/else": Entry(value="", revision=6),
    }
    assert registrations_of(entries) == {good.id: good}
    assert target_of(target_name(good.id)) == good.id
    assert target_of(VIEW_NAME) is None
    assert view_of(entries) == view_of_two()
    assert view_of({}) is None
