"""What a match holds against eviction: one pin on each target that granted it, and whether together they suffice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.cluster.view import TargetId
from kvstore.wire.messages import MatchReply
from kvstore_client.core import ClientCore
from kvstore_client.incoming import HIT
from kvstore_client.lookups import KeysJob
from kvstore_client.planner import RecordPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PinHold:
    """A pin on one target. It is gone when the target has started again since."""

    target: TargetId
    pin_id: int
    boot_id: bytes


def granted_pins(jobs: Sequence[KeysJob[MatchReply]]) -> tuple[PinHold, ...]:
    """The pins that were granted."""
    return tuple(
        PinHold(target=job.target, pin_id=answer.pin_id, boot_id=job.boot_id)
        for job in jobs
        if job.failure is None
        for answer in job.answers
        if answer.pinned
    )


def are_pinned(plan: RecordPlan, jobs: Sequence[KeysJob[MatchReply]], *, dense: range, chunks: int) -> bool:
    """Whether what was found is held: by everybody who was asked, or the prefix by somebody for each of its records.

    Args:
        plan: Of the match.
        jobs: One for each of its batches.
        dense: The sections of the dense records.
        chunks: Length of the prefix.
    """
    answers = [answer for job in jobs if job.failure is None for answer in job.answers]
    if answers and all(answer.pinned for answer in answers) and all(job.failure is None for job in jobs):
        return True
    if len(jobs) < 2 or not chunks:
        return False
    held = bytearray(plan.record_count)
    for job in jobs:
        at = 0
        for answer in job.answers if job.failure is None else ():
            records = job.batch.records[at : at + len(answer.statuses)]
            at += len(answer.statuses)
            if answer.pinned:
                for record, status in zip(records, answer.statuses, strict=True):
                    held[record] |= status == HIT
    if len(plan.sections) > len(dense):
        return False  # a sparse part may have been found on a target that holds no pin
    return all(all(held[at * plan.key_count : at * plan.key_count + chunks]) for at in dense)


def holds(core: ClientCore, pin: PinHold) -> bool:
    """Whether the target still knows the pin, as far as this client has noticed."""
    link = next((link for link in core.links() if link.id == pin.target), None)
    return link is not None and link.boot_id == pin.boot_id
