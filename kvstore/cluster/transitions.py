"""How a cluster's view changes: pure functions from a view to the next one, epoch + 1. Nothing else changes a view.

A function that finds nothing to change gives the same view back, so that everybody may try what is due, and the first
one to store it wins. Targets keep the order of their ids. Where a change moves keys, the placement from before is kept
in the view for `keep_ns`, so that lookups find what lies there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from kvstore.cluster.registration import Registration, RelayRegistration
from kvstore.cluster.view import (
    PLACED_STATES,
    READ_STATES,
    PreviousPlacement,
    ReplicaPolicy,
    Target,
    TargetId,
    TargetState,
    View,
)
from kvstore.errors import InvalidRequest
from kvstore.limits import PREVIOUS_PLACEMENTS_MAX, RELAYS_MAX, TARGETS_MAX


def found(cluster: str) -> View:
    """The first view of a cluster: nobody is there yet."""
    return View(epoch=1, node_id="", targets=(), cluster=cluster)


def join(view: View, registration: Registration, *, keep_ns: int) -> View:
    """A target that the view does not know takes its share.

    It is JOINING while keys of its share may lie where they were before; the first target of all serves at once.

    Raises:
        InvalidRequest: the view has TARGETS_MAX targets already.
    """
    if view.target(registration.id) is not None:
        return view
    if len(view.targets) >= TARGETS_MAX:
        raise InvalidRequest(
            f"target {registration.id} cannot join: the view has {TARGETS_MAX} targets, which is the limit; "
            "remove targets that are down, or use larger ones"
        )
    is_first = not any(target.state in PLACED_STATES for target in view.targets)
    target = registration.as_target(TargetState.SERVING if is_first else TargetState.JOINING)
    return _next(view, {target.id: target}, keep_ns=keep_ns)


def renew(view: View, registration: Registration, *, keep_ns: int) -> View:
    """A target that the view knows is registered: it serves again if it was down, and is where it says it is.

    After a fence the session that was fenced changes nothing; another one does. A drain that is wanted no more ends,
    and what had not filled when it began goes on with that.
    """
    before = view.target(registration.id)
    if before is None or is_fenced(before, registration):
        return view
    resumed = before.state is TargetState.DRAINING and not registration.wants_drain
    returned = before.state in (TargetState.DOWN, TargetState.RECOVERING)
    state = TargetState.SERVING if resumed or returned else before.state
    if resumed and _was_filling(view, before):
        state = TargetState.JOINING
    return _next(view, {before.id: registration.as_target(state)}, keep_ns=keep_ns)


def replace_target(view: View, registration: Registration, *, keep_ns: int) -> View:
    """Another drive answers under a known id, or another target at a known address: the old one is gone.

    A wiped or swapped drive has its place, but nothing in it. A target of another node whose address the registered
    one uses is fenced and has no address until it registers anew: nobody may take the newcomer for it.
    """
    changed: dict[TargetId, Target | None] = {}
    before = view.target(registration.id)
    if before is not None and is_fenced(before, registration):
        return view
    if before is not None and before.disk_id != registration.disk_id:
        is_placed = before.state in PLACED_STATES
        changed[before.id] = registration.as_target(before.state if is_placed else TargetState.JOINING)
    taken = set(registration.data)
    for target in view.targets:
        if target.id != registration.id and target.node_id != registration.node_id and taken & set(target.data):
            changed[target.id] = replace(target, state=TargetState.DOWN, data=())
    return _next(view, changed, keep_ns=keep_ns)


def expire(view: View, ids: Iterable[TargetId]) -> View:
    """The leases of these targets ran out: they are down. Any registration brings them back."""
    return _down(view, ids, keep_session=False)


def fence(view: View, ids: Iterable[TargetId]) -> View:
    """These targets are cut off although registered: down, until they register in a new session."""
    return _down(view, ids, keep_session=True)


def drain(view: View, ids: Iterable[TargetId], *, keep_ns: int) -> View:
    """These targets take no new keys; what they hold is read until they leave."""
    wanted = set(ids)
    draining: dict[TargetId, Target | None] = {
        target.id: replace(target, state=TargetState.DRAINING)
        for target in view.targets
        if target.id in wanted and target.state in PLACED_STATES
    }
    return _next(view, draining, keep_ns=keep_ns)


def leave(view: View, ids: Iterable[TargetId]) -> View:
    """These targets are gone for good."""
    wanted = set(ids)
    gone: dict[TargetId, Target | None] = {target.id: None for target in view.targets if target.id in wanted}
    return _next(view, gone, keep_ns=0)


def expire_previous(view: View, epochs: Collection[int]) -> View:
    """The previous placements of these epochs have been kept long enough.

    One by which a draining target is found stays. A joining target has filled when none is left from before it came.
    """
    draining = {target.id for target in view.targets if target.state is TargetState.DRAINING}
    kept = tuple(
        previous for previous in view.previous if previous.epoch not in epochs or _finds(previous, draining, view)
    )
    if kept == view.previous:
        return view
    absent_before = {name for previous in kept for name, weight in previous.weights.items() if weight == 0}
    targets = tuple(
        replace(target, state=TargetState.SERVING)
        if target.state is TargetState.JOINING and target.id not in absent_before
        else target
        for target in view.targets
    )
    return replace(view, epoch=view.epoch + 1, previous=kept, targets=targets)


def set_replicas(view: View, replicas: ReplicaPolicy) -> View:
    """Another number of copies, from now on."""
    return view if replicas == view.replicas else replace(view, epoch=view.epoch + 1, replicas=replicas)


def attend_relays(view: View, registered: Mapping[str, RelayRegistration]) -> View:
    """The relays are those that are registered, in the order of their ids, at most RELAYS_MAX.

    A relay holds nothing, so one that is gone is not kept as down: reads go directly meanwhile.
    """
    relays = tuple(registered[name].as_relay() for name in sorted(registered)[:RELAYS_MAX])
    return view if relays == view.relays else replace(view, epoch=view.epoch + 1, relays=relays)


def outlive(view: View, known_epoch: int) -> View:
    """The same picture with an epoch above one that somebody has seen: of a store that lost its newest views."""
    return view if view.epoch > known_epoch else replace(view, epoch=known_epoch + 1)


def is_fenced(target: Target, registration: Registration) -> bool:
    """Whether this registration is of a session that was cut off: its node must register in another."""
    return target.state is TargetState.DOWN and target.session == registration.session


def _was_filling(view: View, draining: Target) -> bool:
    """Whether it was joining when its drain began: a placement lacks it that is older than the one with it.

    Newer ones lack it because it drains.
    """
    has_it = [previous.weights.get(draining.id, draining.weight) > 0 for previous in view.previous]  # the newest first
    return True in has_it and not all(has_it[has_it.index(True) :])


def _down(view: View, ids: Iterable[TargetId], *, keep_session: bool) -> View:
    wanted = set(ids)
    down: dict[TargetId, Target | None] = {
        target.id: replace(target, state=TargetState.DOWN, session=target.session if keep_session else "")
        for target in view.targets
        if target.id in wanted
    }
    return _next(view, down, keep_ns=0)


def _next(view: View, changed: Mapping[TargetId, Target | None], *, keep_ns: int) -> View:
    """The view with these targets in place of those of the same ids; None removes one."""
    before = {target.id: target for target in view.targets}
    after = {**before, **{name: target for name, target in changed.items() if target is not None}}
    for name, target in changed.items():
        if target is None:
            after.pop(name, None)
    if after == before:
        return view
    epoch = view.epoch + 1
    previous = [_corrected(kept, before, after) for kept in view.previous]
    if _moves_keys(before, after):
        weights = {name: _placed(before, name) for name in after if _placed(before, name) != after[name].weight}
        previous.insert(0, PreviousPlacement(epoch=epoch, keep_ns=keep_ns, weights=weights))
    targets = tuple(after[name] for name in sorted(after))
    return replace(view, epoch=epoch, targets=targets, previous=tuple(previous[:PREVIOUS_PLACEMENTS_MAX]))


def _moves_keys(before: Mapping[TargetId, Target], after: Mapping[TargetId, Target]) -> bool:
    """Whether keys that are to be found lie elsewhere by now: not those of a dead target, nor if there was no place."""
    changed = any(
        target.placed_weight != _placed(before, name) for name, target in after.items() if target.state in READ_STATES
    )
    return changed and any(_placed(before, name) for name in after)


def _placed(targets: Mapping[TargetId, Target], name: TargetId) -> float:
    target = targets.get(name)
    return target.placed_weight if target is not None else 0.0


def _corrected(
    previous: PreviousPlacement, before: Mapping[TargetId, Target], after: Mapping[TargetId, Target]
) -> PreviousPlacement:
    """The same placement, said of the targets as they are now: it names those that weigh something else by now."""
    weights: dict[TargetId, float] = {}
    for name, target in after.items():
        known = before.get(name)
        weight = previous.weights.get(name, known.weight if known is not None else 0.0)
        if weight != target.weight:
            weights[name] = weight
    return replace(previous, weights=weights)


def _finds(previous: PreviousPlacement, ids: Collection[TargetId], view: View) -> bool:
    return any(previous.weights.get(target.id, target.weight) > 0 for target in view.targets if target.id in ids)
