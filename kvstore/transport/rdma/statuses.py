"""What each status of a completion means for whoever posted the work: one action each, in one table."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, IntEnum
from typing import Final

from kvstore.transport.rdma.verbs import SUCCESS, Completion


class Status(IntEnum):
    """Statuses of completions (IBV_WC_*, ibv_poll_cq(3))."""

    SUCCESS = SUCCESS
    LOCAL_LENGTH = 1
    LOCAL_OPERATION = 2
    LOCAL_CONTEXT = 3
    LOCAL_PROTECTION = 4
    FLUSHED = 5
    WINDOW_BIND = 6
    BAD_RESPONSE = 7
    LOCAL_ACCESS = 8
    REMOTE_REQUEST = 9
    REMOTE_ACCESS = 10
    REMOTE_OPERATION = 11
    RETRY_EXCEEDED = 12
    RECEIVER_NOT_READY = 13
    LOCAL_DOMAIN = 14
    REMOTE_DOMAIN = 15
    REMOTE_ABORT = 16
    CONTEXT_NUMBER = 17
    CONTEXT_STATE = 18
    FATAL = 19
    RESPONSE_TIMEOUT = 20
    GENERAL = 21
    TAG_MATCHING = 22
    TAG_RENDEZVOUS = 23


class Action(Enum):
    """What to do about work that ended so. But for DONE the queue pair is in error and must be made again."""

    DONE = "done"
    """The bytes are where they should be."""
    FAIL = "fail"
    """Our own mistake: the operation fails for good, trying again would repeat it."""
    REFRESH = "refresh"
    """The other side's region is not what its descriptor said: ask for it anew, once."""
    REBUILD = "rebuild"
    """The way between is broken: another queue pair after a pause, then again."""
    FOLLOW = "follow"
    """Only a consequence: the cause is the status of another work request of this queue pair."""


ACTIONS: Final[dict[int, Action]] = {
    Status.SUCCESS: Action.DONE,
    Status.LOCAL_LENGTH: Action.FAIL,
    Status.LOCAL_OPERATION: Action.FAIL,
    Status.LOCAL_CONTEXT: Action.FAIL,
    Status.LOCAL_PROTECTION: Action.FAIL,
    Status.FLUSHED: Action.FOLLOW,
    Status.WINDOW_BIND: Action.FAIL,
    Status.BAD_RESPONSE: Action.REBUILD,
    Status.LOCAL_ACCESS: Action.FAIL,
    Status.REMOTE_REQUEST: Action.FAIL,
    Status.REMOTE_ACCESS: Action.REFRESH,
    Status.REMOTE_OPERATION: Action.REBUILD,
    Status.RETRY_EXCEEDED: Action.REBUILD,
    Status.RECEIVER_NOT_READY: Action.REBUILD,
    Status.LOCAL_DOMAIN: Action.FAIL,
    Status.REMOTE_DOMAIN: Action.FAIL,
    Status.REMOTE_ABORT: Action.REBUILD,
    Status.CONTEXT_NUMBER: Action.FAIL,
    Status.CONTEXT_STATE: Action.FAIL,
    Status.FATAL: Action.REBUILD,
    Status.RESPONSE_TIMEOUT: Action.REBUILD,
    Status.GENERAL: Action.REBUILD,
    Status.TAG_MATCHING: Action.FAIL,
    Status.TAG_RENDEZVOUS: Action.FAIL,
}
assert set(ACTIONS) == set(Status), "every status has one action"


def action_of(status: int) -> Action:
    """The table's, and REBUILD for a status that it does not know: a newer device may have one."""
    return ACTIONS.get(status, Action.REBUILD)


def name_of(status: int) -> str:
    """For messages."""
    return Status(status).name.lower() if status in ACTIONS else f"status {status}"


def cause_of(completions: Iterable[Completion]) -> Completion | None:
    """The one that broke a queue pair: the first that is neither done nor a consequence.

    None when all are flushed: then the cause is not among them (we put the queue pair into error ourselves, or the
    other side did), and the way between is what is broken.
    """
    for one in completions:
        if action_of(one.status) not in (Action.DONE, Action.FOLLOW):
            return one
    return None
