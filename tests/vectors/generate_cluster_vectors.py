"""Writes placement.json and transitions.json: `python tests/vectors/generate_cluster_vectors.py`.

Only for new cases: a case that is there already can change only with a new placement, which moves every chunk.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from kvstore.cluster import transitions
from kvstore.cluster.placement import lookup_order, rank, seed_of
from kvstore.cluster.registration import Registration, RelayRegistration
from kvstore.cluster.settling import Overdue, Periods, settle
from kvstore.cluster.view import PreviousPlacement, ReplicaPolicy, Target, TargetState, View

FOLDER = Path(__file__).parent
GIB = 1 << 30
KEEP_NS = 60_000_000_000
HEADS = [hashlib.sha256(f"run {number}".encode()).digest() for number in range(24)]

JOINING, SERVING, DRAINING, DOWN = (
    TargetState.JOINING,
    TargetState.SERVING,
    TargetState.DRAINING,
    TargetState.DOWN,
)


def target(name: str, *, gib: int = 100, label: str = "", state: TargetState = SERVING, **more: str) -> Target:
    return Target(
        id=name,
        data=(f"{name}.example:7401",),
        weight=float(gib),
        state=state,
        node_id=more.get("node_id", f"node-{name}"),
        label=label,
        capacity_bytes=gib * GIB,
        disk_id=more.get("disk_id", f"disk-{name}"),
        boot_id=more.get("boot_id", "b1"),
        session=more.get("session", "s1"),
    )


def registration(name: str, *, gib: int = 100, wants_drain: bool = False, **more: str) -> Registration:
    return Registration(
        id=name,
        data=(more.get("address", f"{name}.example:7401"),),
        capacity_bytes=gib * GIB,
        node_id=more.get("node_id", f"node-{name}"),
        label=more.get("label", ""),
        disk_id=more.get("disk_id", f"disk-{name}"),
        boot_id=more.get("boot_id", "b1"),
        session=more.get("session", "s1"),
        wants_drain=wants_drain,
    )


def view(*targets: Target, epoch: int = 7, previous: tuple[PreviousPlacement, ...] = ()) -> View:
    return View(epoch=epoch, node_id="", targets=targets, previous=previous, cluster="vectors")


def placement_case(name: str, of: View, count: int) -> dict[str, object]:
    return {
        "name": name,
        "view": of.to_plain(),
        "count": count,
        "runs": [
            {"head": head.hex(), "places": list(rank(of, head, count)), "lookup": list(lookup_order(of, head, count))}
            for head in HEADS
        ],
    }


def placement_vectors() -> dict[str, object]:
    equal = view(*(target(f"d{at}") for at in range(4)))
    sizes = view(target("a", gib=1000), target("b", gib=4000), target("c", gib=4000), target("d", gib=8000))
    racks = view(*(target(f"r{at}", label=f"rack{at // 2}") for at in range(6)))
    one_rack = view(*(target(f"s{at}", label="rack") for at in range(3)), target("t", label="other"))
    states = view(
        target("down", state=DOWN), target("draining", state=DRAINING), target("joining", state=JOINING), target("on")
    )
    grown = transitions.join(equal, registration("d9", gib=300), keep_ns=KEEP_NS)
    shrunk = transitions.drain(grown, ["d1"], keep_ns=KEEP_NS)
    return {
        "seeds": {name: f"{seed_of(name):016x}" for name in ("a", "d0", "", "größe", "0" * 64)},
        "cases": [
            placement_case("one target", view(target("only")), 2),
            placement_case("four equal targets", equal, 1),
            placement_case("weights 1 : 4 : 4 : 8", sizes, 2),
            placement_case("copies go to different racks", racks, 3),
            placement_case("more copies than racks", one_rack, 3),
            placement_case("only some take new runs", states, 4),
            placement_case("a ninth target has joined: lookups ask where runs were before", grown, 1),
            placement_case("and one of the others drains", shrunk, 2),
            placement_case("nobody there", view(), 1),
        ],
    }


def case(name: str, change: str, arguments: Mapping[str, object], before: View, after: View) -> dict[str, object]:
    return {
        "name": name,
        "change": change,
        "arguments": arguments,
        "before": before.to_plain(),
        "after": after.to_plain(),
    }


def of_registration(name: str, change: str, before: View, new: Registration) -> dict[str, object]:
    function = {"join": transitions.join, "renew": transitions.renew, "replace": transitions.replace_target}[change]
    arguments = {"registration": new.to_plain(), "keep_ns": KEEP_NS}
    return case(name, change, arguments, before, function(before, new, keep_ns=KEEP_NS))


def of_ids(name: str, change: str, before: View, *ids: str) -> dict[str, object]:
    if change == "drain":
        after = transitions.drain(before, ids, keep_ns=KEEP_NS)
        return case(name, change, {"ids": list(ids), "keep_ns": KEEP_NS}, before, after)
    function = {"expire": transitions.expire, "fence": transitions.fence, "leave": transitions.leave}[change]
    return case(name, change, {"ids": list(ids)}, before, function(before, ids))


def of_previous(name: str, before: View, *epochs: int) -> dict[str, object]:
    after = transitions.expire_previous(before, epochs)
    return case(name, "expire_previous", {"epochs": list(epochs)}, before, after)


def relay(name: str, *, wants_drain: bool = False, session: str = "s1") -> RelayRegistration:
    return RelayRegistration(
        id=name,
        data=(f"{name}.example:7501",),
        node_id=f"node-{name}",
        label="rack1",
        boot_id="b1",
        session=session,
        wants_drain=wants_drain,
    )


def of_relays(name: str, before: View, *registered: RelayRegistration) -> dict[str, object]:
    after = transitions.attend_relays(before, {one.id: one for one in registered})
    return case(name, "attend_relays", {"relays": [one.to_plain() for one in registered]}, before, after)


def of_settling(name: str, before: View, registered: list[Registration], overdue: Overdue) -> dict[str, object]:
    periods = Periods(previous_ns=KEEP_NS)
    after = settle(before, {one.id: one for one in registered}, overdue, periods)
    arguments = {
        "registrations": [one.to_plain() for one in registered],
        "keep_ns": KEEP_NS,
        "gone": sorted(overdue.gone),
        "forgotten": sorted(overdue.forgotten),
        "previous": sorted(overdue.previous),
    }
    return case(name, "settle", arguments, before, after)


def transition_vectors() -> list[dict[str, object]]:
    two = view(target("a"), target("b"))
    joined = transitions.join(two, registration("c"), keep_ns=KEEP_NS)
    fenced = transitions.fence(two, ["b"])
    drained = transitions.drain(two, ["b"], keep_ns=KEEP_NS)
    begun = transitions.drain(joined, ["c"], keep_ns=KEEP_NS)
    filled = transitions.expire_previous(begun, [joined.epoch])
    overtaken = transitions.join(drained, registration("c"), keep_ns=KEEP_NS)
    full = two
    for at in range(6):
        full = transitions.join(full, registration(f"n{at}"), keep_ns=KEEP_NS)
    policy = ReplicaPolicy(copies=2, head_copies=3, head_runs=4)
    relayed = transitions.attend_relays(two, {"r1": relay("r1"), "r2": relay("r2")})
    return [
        of_registration("the first target serves at once", "join", view(epoch=1), registration("a")),
        of_registration("the third fills first", "join", two, registration("c")),
        of_registration("one that is known does not join", "join", two, registration("b")),
        of_registration("the same registration again changes nothing", "renew", two, registration("b")),
        of_registration("a stranger is not renewed", "renew", two, registration("c")),
        of_registration("a worker restarted elsewhere", "renew", two, registration("b", boot_id="b2", address="x:1")),
        of_registration("a drive that grew", "renew", two, registration("b", gib=200)),
        of_registration(
            "back from the dead", "renew", view(target("a"), target("b", state=DOWN)), registration("b", session="s2")
        ),
        of_registration("a fenced session stays out", "renew", fenced, registration("b")),
        of_registration("a new session after a fence", "renew", fenced, registration("b", session="s2")),
        of_registration("a drain that is wanted no more", "renew", drained, registration("b")),
        of_registration("wanted no more by one that had not filled", "renew", begun, registration("c")),
        of_registration("wanted no more by one that has filled since", "renew", filled, registration("c")),
        of_registration("wanted no more by one that served before another came", "renew", overtaken, registration("b")),
        of_registration("a wiped drive", "replace", two, registration("b", disk_id="new", boot_id="b2")),
        of_registration(
            "a wiped drive, back from the dead", "replace", fenced, registration("b", disk_id="new", session="s2")
        ),
        of_registration(
            "another node on a reused address", "replace", two, registration("c", address="b.example:7401")
        ),
        of_registration(
            "a second drive of one node", "replace", two, registration("c", node_id="node-b", address="b.example:7401")
        ),
        of_registration(
            "a fenced one takes no address", "replace", fenced, registration("b", address="a.example:7401")
        ),
        of_ids("a lease ran out", "expire", two, "b"),
        of_ids("one that is not there", "expire", two, "z"),
        of_ids("a fence", "fence", two, "b"),
        of_ids("a drain", "drain", two, "b", "z"),
        of_ids("only what is placed can drain", "drain", view(target("a", state=DOWN), target("b")), "a"),
        of_ids("a drain while another fills", "drain", joined, "a"),
        of_ids("gone for good", "leave", drained, "b"),
        of_previous("filled", joined, 8),
        of_previous("none of that epoch", joined, 3),
        of_previous("kept while somebody drains", drained, 8),
        of_previous("some of several", full, 8, 9, 10, 11, 12),
        case(
            "more copies", "set_replicas", {"replicas": policy.to_plain()}, two, transitions.set_replicas(two, policy)
        ),
        case("a store that forgot", "outlive", {"known_epoch": 90}, two, transitions.outlive(two, 90)),
        case("a store that did not", "outlive", {"known_epoch": 6}, two, transitions.outlive(two, 6)),
        of_settling("three nodes find each other", view(epoch=1), [registration(name) for name in "cab"], Overdue()),
        of_settling("nothing is due", two, [registration("a")], Overdue()),
        of_settling("a node is gone", two, [registration("a")], Overdue(gone=["b"])),
        of_settling("a drained node is gone", drained, [registration("a")], Overdue(gone=["b"])),
        of_settling("a node drains", two, [registration("a"), registration("b", wants_drain=True)], Overdue()),
        of_settling("gone for too long", transitions.expire(two, ["b"]), [], Overdue(gone=["a", "b"], forgotten=["b"])),
        of_settling(
            "two nodes say that they have one address",
            two,
            [registration("a"), registration("b", address="a.example:7401")],
            Overdue(),
        ),
        of_relays("two relays come", two, relay("r2"), relay("r1")),
        of_relays("the same relays again", relayed, relay("r1"), relay("r2")),
        of_relays("a relay's lease ran out", relayed, relay("r2")),
        of_relays("a relay drains", relayed, relay("r1", wants_drain=True), relay("r2")),
        of_relays("a relay was started again", relayed, relay("r1", session="s2"), relay("r2")),
        of_settling("relays are left as they are", relayed, [registration("a"), registration("b")], Overdue()),
    ]


def all_vectors() -> dict[str, object]:
    """The content of each vector file, by its name."""
    return {"placement": placement_vectors(), "transitions": transition_vectors()}


if __name__ == "__main__":
    for file, content in all_vectors().items():
        (FOLDER / f"{file}.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
