"""What is new in a view, in words for the log: an operator sees there which targets came, went and died, and when."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvstore.cluster.view import Target, TargetState, View

_TOLD_MAX: Final = 16  # a rack that dies is one line of the log, and a short one
_ID_CHARACTERS: Final = 8


def words_of_changes(before: View, now: View) -> str:
    """One line, such as "target 3f2f242c of node-7 is down, was serving"; "" when no target came, went or changed."""
    changes = list(_changes(before, now))
    more = [f"and {len(changes) - _TOLD_MAX} more"] if len(changes) > _TOLD_MAX else []
    return "; ".join([*changes[:_TOLD_MAX], *more])


def has_died(before: View, now: View) -> bool:
    """Whether a target is down that was not."""
    known = {target.id: target.state for target in before.targets}
    return any(one.state is TargetState.DOWN is not known.get(one.id, TargetState.DOWN) for one in now.targets)


def _changes(before: View, now: View) -> Iterator[str]:
    known = {target.id: target for target in before.targets}
    for target in now.targets:
        old = known.pop(target.id, None)
        if old is None:
            yield f"{_name(target)} is new: {target.state}"
        elif old.state is not target.state:
            yield f"{_name(target)} is {target.state}, was {old.state}"
        elif old.node_id != target.node_id:
            yield f"{_name(target)} is served by {target.node_id} now, was by {old.node_id}"
    for gone in known.values():
        yield f"{_name(gone)} has left, was {gone.state}"


def _name(target: Target) -> str:
    node = f" of {target.node_id}" if target.node_id else ""
    return f"target {target.id[:_ID_CHARACTERS]}{node}"
