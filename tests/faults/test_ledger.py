"""The bookkeeping of the fault tests judges rightly: else they would prove nothing."""

from __future__ import annotations

import pytest

from kvstore.types.results import Exists, Miss, MissReason, Refused, RefusedReason, Stored
from tests.faults.ledger import Deed, Event, Fate, Ledger, Outcome, delete_outcome, put_outcome


def ledger_of(*steps: tuple[Deed, Outcome]) -> Ledger:
    """A ledger in which key 1 went through the steps."""
    ledger = Ledger()
    for deed, outcome in steps:
        ledger.apply(Event.from_line(Event.begin(deed, [1]).to_line()))
        if outcome is not Outcome.BEGUN:
            ledger.apply(Event(deed=deed, keys=(1,), outcomes=(outcome,)))
    return ledger


PUT, POWER, DELETE = Deed.PUT, Deed.POWER_PUT, Deed.DELETE
DONE, REFUSED, UNKNOWN, BEGUN = Outcome.DONE, Outcome.REFUSED, Outcome.UNKNOWN, Outcome.BEGUN


@pytest.mark.parametrize(
    ("steps", "fate"),
    [
        ([], Fate.NEVER),
        ([(PUT, BEGUN)], Fate.UNSURE),
        ([(PUT, DONE)], Fate.STORED),
        ([(PUT, REFUSED)], Fate.NEVER),
        ([(PUT, UNKNOWN)], Fate.UNSURE),
        ([(POWER, DONE)], Fate.SYNCED),
        ([(PUT, DONE), (POWER, DONE)], Fate.SYNCED),
        ([(POWER, DONE), (PUT, DONE)], Fate.SYNCED),
        ([(PUT, DONE), (PUT, UNKNOWN)], Fate.STORED),
        ([(PUT, DONE), (DELETE, BEGUN)], Fate.UNSURE),
        ([(PUT, DONE), (DELETE, DONE)], Fate.ABSENT),
        ([(PUT, DONE), (DELETE, UNKNOWN)], Fate.UNSURE),
        ([(PUT, DONE), (DELETE, DONE), (PUT, BEGUN)], Fate.UNSURE),
        ([(PUT, UNKNOWN), (DELETE, DONE)], Fate.UNSURE),
        ([(PUT, UNKNOWN), (PUT, DONE)], Fate.UNSURE),
        ([(DELETE, UNKNOWN), (PUT, DONE)], Fate.UNSURE),
    ],
)
def test_fates(steps: list[tuple[Deed, Outcome]], fate: Fate) -> None:
    assert ledger_of(*steps).fate(1) is fate


@pytest.mark.parametrize(
    ("steps", "is_hit", "wrong"),
    [
        ([(PUT, DONE)], False, "lost"),
        ([(POWER, DONE)], False, "lost_synced"),
        ([(PUT, DONE), (DELETE, DONE)], True, "resurrected"),
        ([(PUT, REFUSED)], True, "resurrected"),
        ([], True, "resurrected"),
        ([(PUT, BEGUN)], True, ""),
        ([(PUT, BEGUN)], False, ""),
        ([(PUT, DONE)], True, ""),
        ([(PUT, DONE), (DELETE, DONE)], False, ""),
    ],
)
def test_observations(steps: list[tuple[Deed, Outcome]], is_hit: bool, wrong: str) -> None:
    observation = ledger_of(*steps).observe({1: is_hit})
    found = {name: getattr(observation, name) for name in ("lost", "lost_synced", "resurrected")}
    assert found == {name: [1] if name == wrong else [] for name in found}


def test_what_was_observed_is_the_truth_from_then_on() -> None:
    ledger = ledger_of((PUT, DONE))
    ledger.observe({1: True})
    assert ledger.observe({1: False}).lost == [1]
    assert ledger.fate(1) is Fate.ABSENT
    assert ledger.observe({1: True}).resurrected == [1]


def test_what_may_still_land_is_unsure_for_one_more_observation() -> None:
    ledger = ledger_of((PUT, UNKNOWN))
    assert ledger.observe({1: False}).resurrected == []
    assert ledger.observe({1: True}).resurrected == []
    assert ledger.observe({1: False}).lost == [1]


def test_outcomes_of_results() -> None:
    assert put_outcome(Stored(durable=True)) is DONE
    assert put_outcome(Stored(durable=False)) is UNKNOWN
    assert put_outcome(Exists()) is DONE
    assert put_outcome(Refused(RefusedReason.NO_SPACE)) is REFUSED
    assert put_outcome(Refused(RefusedReason.OUTCOME_UNKNOWN)) is UNKNOWN
    assert put_outcome(Refused(RefusedReason.DEADLINE)) is UNKNOWN
    assert delete_outcome(Miss(MissReason.ABSENT)) is DONE
    assert delete_outcome(Miss(MissReason.UNAVAILABLE)) is UNKNOWN
