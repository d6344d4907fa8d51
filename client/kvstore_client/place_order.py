"""In which order the places of a record are read: the least loaded live one first. Pure.

Where a run belongs now comes before where it was before, since it has moved, or will. Among the places where it
belongs, what counts is how soon each would be through with what it was given and with this run on top of it, so one
large read spreads over copies as well as many small ones do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstore.cluster.placement import Places
from kvstore.cluster.run_places import NO_PLACE, Counts
from kvstore_client.topology import ChainPlaces

Seconds = NDArray[np.float64]

BROKEN_SECONDS: Final = 1e6
"""Load of a worker that may not be asked now: whoever else may have a record is asked before it."""


def load_seconds(in_flight_bytes: Sequence[int], rates: Sequence[float], is_broken: Sequence[bool]) -> Seconds:
    """How long each worker has to do with what this process has asked it for.

    Args:
        in_flight_bytes: Asked for and not here yet.
        rates: Bytes per second as measured, 0.0 where nothing is known: then the best that is known.
        is_broken: Its breaker is open.
    """
    known = np.array(rates, np.float64)
    best = float(known.max(initial=0.0)) or 1.0
    seconds: Seconds = np.array(in_flight_bytes, np.float64) / np.where(known > 0, known, best)
    seconds[np.array(is_broken, np.bool_)] += BROKEN_SECONDS
    return seconds


def reading_order(where: ChainPlaces, loads: Seconds, run_seconds: Seconds) -> Places:
    """For each run its places, the one to ask first in front, NO_PLACE behind the last.

    Args:
        where: Places of the runs.
        loads: Of each worker, as `load_seconds` gives it.
        run_seconds: What one more run costs each worker.
    """
    places = where.places.copy()
    newest = places[:, : where.newest]
    if where.newest > 1:
        loads = loads.copy()
        for row in newest:
            _lead_with_least_loaded(row, loads, run_seconds)
    order = np.argsort(places == NO_PLACE, axis=1, kind="stable")
    ordered: Places = np.take_along_axis(places, order, axis=1)
    return ordered


def _lead_with_least_loaded(row: Places, loads: Seconds, run_seconds: Seconds) -> None:
    """Sorts the places of one run by load, and adds the run to that of the first."""
    live = row[row != NO_PLACE]
    if not len(live):
        return
    if len(live) > 1:
        live = live[np.argsort(loads[live] + run_seconds[live], kind="stable")]
        row[: len(live)] = live
        row[len(live) :] = NO_PLACE
    loads[live[0]] += run_seconds[live[0]]


def prefer(order: Places, firsts: Counts) -> Places:
    """The same places with that of `firsts` in front, in the rows that have it.

    Args:
        order: One row a key.
        firsts: A place, or NO_PLACE, for each.
    """
    is_first = (order == firsts[:, np.newaxis]) & (firsts != NO_PLACE)[:, np.newaxis]
    sorted_places: Places = np.take_along_axis(order, np.argsort(~is_first, axis=1, kind="stable"), axis=1)
    return sorted_places


def at_try(order: Places, rows: Counts, tries: Counts) -> Places:
    """The place of each row at its try, NO_PLACE when there are not so many."""
    width = order.shape[1]
    found: Places = order[rows, np.minimum(tries, width - 1)]
    found[tries >= width] = NO_PLACE
    return found
