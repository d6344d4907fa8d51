"""What the log tells of a new view."""

from __future__ import annotations

from dataclasses import replace

from kvstore.cluster.changes import has_died, words_of_changes
from kvstore.cluster.view import Target, TargetState, View


def target(number: int, state: TargetState = TargetState.SERVING) -> Target:
    return Target(
        id=f"{number:04x}" * 8, data=("10.0.0.1:7401",), weight=1.0, state=state, node_id=f"node-{number}", session="s"
    )


def view(*targets: Target, epoch: int = 7) -> View:
    return View(epoch=epoch, node_id="", cluster="prod", targets=targets)


def test_targets_that_come_go_and_change_are_told() -> None:
    before = view(target(1), target(2), target(3), target(4))
    now = view(
        target(1, TargetState.DOWN),
        replace(target(2), node_id="node-9"),
        target(3),
        target(5, TargetState.JOINING),
        epoch=8,
    )
    assert words_of_changes(before, now).split("; ") == [
        "target 00010001 of node-1 is down, was serving",
        "target 00020002 of node-9 is served by node-9 now, was by node-2",
        "target 00050005 of node-5 is new: joining",
        "target 00040004 of node-4 has left, was serving",
    ]
    assert has_died(before, now)


def test_nothing_is_said_of_an_epoch_alone() -> None:
    assert words_of_changes(view(target(1)), view(target(1), epoch=8)) == ""
    assert not has_died(view(target(1)), view(target(1), epoch=8))


def test_one_that_comes_back_or_was_down_before_has_not_died() -> None:
    down = target(1, TargetState.DOWN)
    assert not has_died(view(down), view(target(1)))
    assert not has_died(view(down), view(down))
    assert not has_died(view(), view(down))


def test_many_changes_are_one_short_line() -> None:
    words = words_of_changes(view(), view(*(target(number) for number in range(1, 41))))
    assert words.endswith("; and 24 more")
    assert words.count("is new") == 16
