"""What a lookup says of keys that are not there, however many they are: nothing is mistaken for another."""

from __future__ import annotations

import pytest

from kvstore.limits import SECOND_NS, MiB
from kvstore.types.results import MissReason, Stored
from tests.engine_memory.test_engine_reads import Lab, key, payload

ABSENT, PENDING, EVICTED, HIT = MissReason.ABSENT, MissReason.PENDING, MissReason.EVICTED, 0


@pytest.mark.parametrize("around", [0, 3, 5000])
def test_each_missing_key_has_its_own_reason(around: int) -> None:
    lab = Lab(cache=16 * MiB)
    lab.driver.run_until(lambda: lab.engine.idle)
    stored = lab.put(3, 5000)
    deleted = lab.put(1, 5000, first=50)
    lab.driver.delete(lab.ref, deleted)
    body = payload(7, 5000)
    volatile = [key(n) for n in (60, 61)]
    for k, seconds in zip(volatile, (1000, 1), strict=True):
        spec = lab.driver.spec(lab.ref, k, body, volatile_ttl_ns=seconds * SECOND_NS, part=1)
        assert isinstance(lab.driver.put_specs([(spec, body)])[0], Stored)
    lab.driver.advance(2 * SECOND_NS)
    lab.drive.hold()
    pending = [key(70), key(71, prefix=1 << 64)]
    outcomes = [lab.driver.start_put(lab.driver.spec(lab.ref, k, body), body) for k in pending]
    lab.driver.advance(1000)
    # equal in one half of what the index knows of a key, and in none of the others
    alike = [key(72, prefix=70 + (5 << 64)), key(73, prefix=1 << 64 | 9), key(74, prefix=70 << 64)]
    others = [key(100_000 + n) for n in range(around)]

    asked = [*others, stored[0], pending[0], alike[0], volatile[0], *others, pending[1], volatile[1]]
    asked += [alike[1], deleted[0], stored[2], alike[2], pending[0]]
    wanted = [ABSENT] * around + [HIT, PENDING, ABSENT, HIT] + [ABSENT] * around + [PENDING, ABSENT]
    wanted += [ABSENT, ABSENT, HIT, ABSENT, PENDING]
    assert lab.driver.match(lab.ref, asked).statuses == bytes(wanted)
    lab.drive.release()
    lab.driver.run_until(lambda: all(outcomes))
    landed = bytes(HIT if one == PENDING else one for one in wanted)
    assert lab.driver.match(lab.ref, asked).statuses == landed


def test_what_was_evicted_says_so_beside_what_is_on_its_way() -> None:
    lab = Lab(size=16 * MiB, segment_bytes=MiB)
    first = lab.put(10, 300_000)
    for at in range(100, 160, 10):
        lab.put(10, 300_000, first=at)
    lab.driver.run_until(lambda: lab.engine.idle)
    lab.drive.hold()
    body = payload(1, 300_000)
    lab.driver.start_put(lab.driver.spec(lab.ref, key(999), body), body)
    lab.driver.advance(1000)
    statuses = lab.driver.match(lab.ref, [*first, key(999)]).statuses
    assert set(statuses[:-1]) <= {HIT, EVICTED}
    assert EVICTED in statuses[:-1]
    assert statuses[-1] == PENDING
    lab.drive.release()
