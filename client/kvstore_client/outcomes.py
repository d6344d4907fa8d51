"""From the states of records to the outcome of each item, in the caller's order. Pure but for counting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from kvstore.errors import (
    ChecksumMismatch,
    DeadlineExceeded,
    InvalidRequest,
    KVStoreError,
    Overloaded,
    Unavailable,
    UnknownNamespace,
)
from kvstore.types.results import Exists, Hit, ItemStatus, Miss, MissReason, Refused, RefusedReason, Stored
from kvstore_client.incoming import HIT, OPEN, IncomingRecord
from kvstore_client.stats import Counters

_MISSES: Final = {int(reason): Miss(reason) for reason in MissReason}
TAKEN: Final = frozenset({ItemStatus.STORED, ItemStatus.RECEIVED, ItemStatus.EXISTS})
"""Outcomes of a copy after which a target has it."""

_REASONS: Final[tuple[tuple[type[KVStoreError], MissReason], ...]] = (
    (DeadlineExceeded, MissReason.DEADLINE),
    (Overloaded, MissReason.OVERLOADED),
    (Unavailable, MissReason.UNAVAILABLE),
    (UnknownNamespace, MissReason.ABSENT),
    (ChecksumMismatch, MissReason.CORRUPT),
)


def miss_reason(failure: KVStoreError | None) -> MissReason:
    """Why what a failed job left open is a miss.

    Raises:
        InvalidRequest: `failure` itself, when it is one: the caller must change the request.
    """
    for kind, reason in _REASONS:
        if isinstance(failure, kind):
            return reason
    if isinstance(failure, InvalidRequest):
        raise failure
    return MissReason.UNAVAILABLE


def miss_of(status: int) -> Miss:
    """The miss with that wire code; one that this version does not know is UNAVAILABLE."""
    return _MISSES.get(status) or _MISSES[MissReason.UNAVAILABLE]


def load_results(rows: Sequence[Sequence[IncomingRecord]], counters: Counters) -> list[Hit | Miss]:
    """One result per item; `rows` holds, section by section, the item's records. No record is open any more."""
    results: list[Hit | Miss] = []
    hits = total = 0
    for records in zip(*rows, strict=True):
        bad = HIT
        length = 0
        for record in records:
            if record.mismatches:
                counters.corrupt_blocks += record.mismatches
                counters.corrupt_recovered += record.status == HIT
            if record.status == HIT:
                length += record.wanted_bytes
            elif bad == HIT:
                bad = record.status
        if bad != HIT:
            results.append(_count_miss(bad, counters))
            continue
        hits += 1
        total += length
        content_id = records[0].content_id if len(records) == 1 else b"".join([one.content_id for one in records])
        results.append(Hit(length_bytes=length, content_id=content_id))
    counters.load_items += len(results)
    counters.load_hits += hits
    counters.load_bytes += total
    return results


def close_open(records: Sequence[IncomingRecord], failure: KVStoreError | None) -> None:
    """Gives every record that is still open the reason that its job failed with. Raises as `miss_reason`."""
    for record in records:
        if record.status == OPEN:
            record.status = miss_reason(failure)


class CopyOutcome(Protocol):
    """How the copy of a record on one target ended."""

    status: int
    content_id: bytes
    detail: str


def store_result(records: Sequence[Sequence[CopyOutcome]]) -> Stored | Exists | Refused:
    """The outcome of one item: refused if no copy of any of its records was taken, stored if any was stored now.

    Args:
        records: The copies of each record of the item, at least one.
    """
    durable = True
    stored = False
    copies = 0
    ids = b""
    for number, places in enumerate(records):
        good = [one for one in places if one.status in TAKEN]
        if not good:
            worst = next((one for one in places if one.status == RefusedReason.OUTCOME_UNKNOWN), places[0])
            return refused(worst.status, worst.detail)
        copies = min(copies, len(good)) if number else len(good)
        new = [one for one in good if one.status != ItemStatus.EXISTS]
        stored |= bool(new)
        durable &= all(one.status == ItemStatus.STORED for one in new)
        ids += (new or good)[0].content_id
    return Stored(durable=durable, content_id=ids, copies=copies) if stored else Exists(copies)


def refused(status: int, detail: str) -> Refused:
    """The refusal with that wire code."""
    try:
        return Refused(RefusedReason(status), detail)
    except ValueError:
        return Refused(
            RefusedReason.OUTCOME_UNKNOWN, detail or f"the node gave the status {status}, unknown to this version"
        )


def count_stores(results: Sequence[Stored | Exists | Refused], lengths: Sequence[int], counters: Counters) -> None:
    """Counts the outcome of a put or a writer."""
    counters.store_items += len(results)
    for result, length in zip(results, lengths, strict=True):
        if isinstance(result, Stored):
            counters.store_stored += 1
            counters.store_bytes += length
        elif isinstance(result, Exists):
            counters.store_exists += 1
        else:
            counters.store_refused[result.reason] = counters.store_refused.get(result.reason, 0) + 1


def _count_miss(status: int, counters: Counters) -> Miss:
    miss = miss_of(status)
    counters.load_misses[miss.reason] = counters.load_misses.get(miss.reason, 0) + 1
    return miss
