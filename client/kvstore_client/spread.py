"""Reading records that may lie in several places: side by side, then on to the next place for what one did not have."""

from __future__ import annotations

import time

from kvstore.limits import BREAKER_OPEN_NS_MIN, PLANS_PER_CALL_MAX
from kvstore.types.results import MissReason
from kvstore_client.core import ClientCore
from kvstore_client.hints import hint
from kvstore_client.outcomes import close_open
from kvstore_client.planned_read import PlannedRead, SpreadRequest
from kvstore_client.rounds import Verb, refresh_view
from kvstore_client.topology import places_of

_NEW_VIEW = frozenset({int(MissReason.UNAVAILABLE), int(MissReason.OVERLOADED)})
"""What a newer view may help with."""


def load_spread(core: ClientCore, request: SpreadRequest) -> Verb[None]:
    """Reads records, each from the first place that has it. All of them have a status afterwards."""
    for plans in range(PLANS_PER_CALL_MAX):
        view, placement = core.view, core.placement
        if placement is None:
            break
        where = places_of(placement, request.chain, copies=request.copies, with_down=True)
        where = where.without(core.unanswered(where.down))
        read = PlannedRead(core, request, where, is_repeated=plans > 0)
        yield from read.read()
        yield from hint(core, request.namespace.digest, read.lacking(), request.deadline_ns)
        if not any(record.status in _NEW_VIEW for record in request.records):
            break
        is_known = core.view is view and not (yield from _finds_new_view(core, request.deadline_ns))
        if is_known and not read.has_given_up:
            break
        if read.has_given_up:
            if time.monotonic_ns() + BREAKER_OPEN_NS_MIN >= request.deadline_ns:
                break
            yield BREAKER_OPEN_NS_MIN  # a place that was given up for another one is asked again, now that none has it
    close_open(request.records, None)


def _finds_new_view(core: ClientCore, deadline_ns: int) -> Verb[bool]:
    """Asks for the view, if that may help; whether it is another one than before."""
    view = core.view
    if core.wants_view(time.monotonic_ns()):
        yield from refresh_view(core, deadline_ns)
    return core.view is not view and time.monotonic_ns() < deadline_ns
