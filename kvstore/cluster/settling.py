"""What is due: the view that follows from who is registered, and how long others have been away. Pure.

Every node computes this and tries to store it; equal inputs give equal views, so it does not matter who is first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from kvstore.cluster import transitions
from kvstore.cluster.registration import Registration, RelayRegistration
from kvstore.cluster.view import ReplicaPolicy, TargetId, TargetState, View
from kvstore.limits import ABSENT_GRACE_NS, DOWN_KEEP_NS, PREVIOUS_KEEP_NS_DEFAULT


@dataclass(frozen=True, slots=True, kw_only=True)
class Periods:
    """How long what is kept.

    Attributes:
        absent_ns: that a target may be missing in the store, without a word that its lease has ended.
        previous_ns: that a previous placement is kept.
        down_ns: that a target may be down before it leaves the view.
    """

    absent_ns: int = ABSENT_GRACE_NS
    previous_ns: int = PREVIOUS_KEEP_NS_DEFAULT
    down_ns: int = DOWN_KEEP_NS


@dataclass(frozen=True, slots=True, kw_only=True)
class Overdue:
    """Whose time has run out.

    Attributes:
        gone: targets that are registered no more.
        forgotten: targets that have been down for too long.
        previous: epochs of placements that were kept long enough.
    """

    gone: Collection[TargetId] = ()
    forgotten: Collection[TargetId] = ()
    previous: Collection[int] = ()


@dataclass(slots=True)
class Attendance:
    """Since when this node has seen what, on its own monotonic clock. Times are `now_ns` arguments.

    A node that was restarted counts from then on anew: things are kept longer, never shorter.
    """

    periods: Periods = field(default_factory=Periods)
    _absent: dict[TargetId, int] = field(default_factory=dict)
    _down: dict[TargetId, int] = field(default_factory=dict)
    _previous: dict[int, int] = field(default_factory=dict)

    def observe(self, view: View, registered: Collection[TargetId], now_ns: int) -> None:
        """Take what is there now."""
        absent = [target.id for target in view.targets if target.id not in registered]
        down = [target.id for target in view.targets if target.state is TargetState.DOWN]
        self._absent = {name: self._absent.get(name, now_ns) for name in absent}
        self._down = {name: self._down.get(name, now_ns) for name in down}
        self._previous = {kept.epoch: self._previous.get(kept.epoch, now_ns) for kept in view.previous}

    def lease_ended(self, target_id: TargetId, now_ns: int) -> None:
        """The store itself let go of a registration: nothing is to be waited for. Call it after `observe`."""
        self._absent[target_id] = now_ns - self.periods.absent_ns

    def overdue(self, view: View, now_ns: int) -> Overdue:
        """What is due now."""
        return Overdue(
            gone=_older(self._absent, now_ns - self.periods.absent_ns),
            forgotten=_older(self._down, now_ns - self.periods.down_ns),
            previous={
                kept.epoch for kept in view.previous if self._previous.get(kept.epoch, now_ns) + kept.keep_ns <= now_ns
            },
        )

    def next_due_ns(self, view: View, now_ns: int) -> int | None:
        """When to look again, in the future; None when nothing will be due."""
        times = [
            *(since + self.periods.absent_ns for since in self._absent.values()),
            *(since + self.periods.down_ns for since in self._down.values()),
            *(self._previous.get(kept.epoch, now_ns) + kept.keep_ns for kept in view.previous),
        ]
        return min((time for time in times if time > now_ns), default=None)


def settle(
    view: View,
    registrations: Mapping[TargetId, Registration],
    overdue: Overdue,
    periods: Periods,
    replicas: ReplicaPolicy | None = None,
    relays: Mapping[str, RelayRegistration] | None = None,
) -> View:
    """The view with everything done that is due; the same one when nothing is.

    Args:
        replicas: What the operator wants; None leaves it as it is.
        relays: All that are registered; None leaves them as they are.

    Raises:
        InvalidRequest: as `transitions.join`.
    """
    keep_ns = periods.previous_ns
    view = transitions.set_replicas(view, replicas) if replicas is not None else view
    view = transitions.attend_relays(view, relays) if relays is not None else view
    for name in sorted(registrations):
        registration = registrations[name]
        view = transitions.replace_target(view, registration, keep_ns=keep_ns)
        view = transitions.join(view, registration, keep_ns=keep_ns)
        view = transitions.renew(view, registration, keep_ns=keep_ns)
        if registration.wants_drain:
            view = transitions.drain(view, [name], keep_ns=keep_ns)
    gone = [target for target in view.targets if target.id in overdue.gone and target.id not in registrations]
    left = [target.id for target in gone if target.state is TargetState.DRAINING or target.id in overdue.forgotten]
    view = transitions.leave(view, left)
    view = transitions.expire(view, [target.id for target in gone if target.state is not TargetState.DOWN])
    return transitions.expire_previous(view, overdue.previous)


def _older(since: Mapping[TargetId, int], limit_ns: int) -> frozenset[TargetId]:
    return frozenset(name for name, seen_ns in since.items() if seen_ns <= limit_ns)
