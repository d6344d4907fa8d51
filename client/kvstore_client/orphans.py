"""Connections that a call took and could not give back: an exception came from a signal handler just then.

Python runs those between any two steps of the main thread, so also between taking a connection and the `try` that gives
it back, or within that. Who waits for a connection for long looks whether the threads that have taken them are still in
a call; see `BlockingDriver`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Final

_OURS: Final = "kvstore_client."
_HOLDERS: Final = frozenset({"kvstore_client.lane", "kvstore_client.straight"})
"""Modules in whose functions a connection may be held while a signal handler makes another call. (A call that needs
several connections holds none to the target that it waits for; see `Together.take_all`.)"""


def are_in_no_call(threads: set[int]) -> set[int]:
    """Those of these threads that cannot hold a connection any more. For a thread in doubt it says that it can.

    Args:
        threads: Identifiers, as of `threading.get_ident`, of those that have taken connections to one target. If the
            calling thread's is among them, it waits for another connection to that target in a call of its own.
    """
    frames = sys._current_frames()  # what other threads do is told by nothing else
    own = threading.get_ident()
    if own not in frames:
        return set()  # these are greenlets' identifiers, as with gevent's: of those that wait no frame is told
    return {one for one in threads if not _may_hold(frames.get(one), is_own=one == own)}


def _may_hold(frame: FrameType | None, *, is_own: bool) -> bool:
    runs = 0
    for module, function in _stack(frame):
        if module.startswith(_OURS) and not is_own:
            return True
        if module in _HOLDERS:
            return True
        runs += module == "kvstore_client.blocking" and function == "run"
    return runs > 1  # a call within a call: the outer one may hold it


def _stack(frame: FrameType | None) -> Iterator[tuple[str, str]]:
    while frame is not None:
        yield str(frame.f_globals.get("__name__", "")), frame.f_code.co_name
        frame = frame.f_back
