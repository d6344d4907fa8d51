"""Each status of a completion has one action, and a consequence is never taken for the cause."""

from __future__ import annotations

import ibverbs
import pytest

from kvstore.transport.rdma.statuses import ACTIONS, Action, Status, action_of, cause_of, name_of
from kvstore.transport.rdma.verbs import Completion


@pytest.mark.parametrize(
    ("status", "action"),
    [
        (Status.SUCCESS, Action.DONE),
        (Status.LOCAL_LENGTH, Action.FAIL),
        (Status.LOCAL_OPERATION, Action.FAIL),
        (Status.LOCAL_PROTECTION, Action.FAIL),
        (Status.LOCAL_ACCESS, Action.FAIL),
        (Status.REMOTE_REQUEST, Action.FAIL),
        (Status.REMOTE_ACCESS, Action.REFRESH),
        (Status.REMOTE_OPERATION, Action.REBUILD),
        (Status.RETRY_EXCEEDED, Action.REBUILD),
        (Status.RECEIVER_NOT_READY, Action.REBUILD),
        (Status.RESPONSE_TIMEOUT, Action.REBUILD),
        (Status.FATAL, Action.REBUILD),
        (Status.FLUSHED, Action.FOLLOW),
    ],
)
def test_the_table(status: Status, action: Action) -> None:
    assert action_of(status) is action


def test_the_table_has_every_status_of_the_verbs() -> None:
    assert {int(status) for status in ibverbs.WCStatus} == set(ACTIONS) == set(Status)
    assert all(isinstance(action, Action) for action in ACTIONS.values())
    ours = {Status.LOCAL_LENGTH, Status.LOCAL_OPERATION, Status.LOCAL_PROTECTION, Status.LOCAL_ACCESS}
    assert {action_of(status) for status in ours} == {Action.FAIL}
    assert [status for status in Status if action_of(status) is Action.REFRESH] == [Status.REMOTE_ACCESS]
    assert [status for status in Status if action_of(status) is Action.FOLLOW] == [Status.FLUSHED]


def test_a_status_from_the_future_rebuilds_and_has_a_name() -> None:
    assert action_of(77) is Action.REBUILD
    assert name_of(77) == "status 77"
    assert name_of(12) == "retry_exceeded"


def test_the_cause_is_never_a_flush() -> None:
    flushed = Completion(1, Status.FLUSHED, 5, 0)
    cause = Completion(2, Status.REMOTE_ACCESS, 5, 0)
    later = Completion(3, Status.GENERAL, 5, 0)
    assert cause_of([Completion(0, 0, 5, 0), flushed, cause, later]) is cause
    assert cause_of([flushed, flushed]) is None
    assert cause_of([]) is None
