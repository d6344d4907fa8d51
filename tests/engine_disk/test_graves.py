"""Deletes that are remembered: for a time, up to a bound, and no tenant takes the room of the others."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.engine.graves import Graves
from kvstore.engine.logrecord import TOMBSTONE_BYTES
from kvstore.limits import ACCESS_TICK_NS, LOG_SHARE_GRAVES, REPAIR_WINDOW_NS

WINDOW_TICKS = REPAIR_WINDOW_NS // ACCESS_TICK_NS


def graves_of(count: int) -> Graves:
    made = Graves(log_half_bytes=int(count * TOMBSTONE_BYTES / LOG_SHARE_GRAVES) + TOMBSTONE_BYTES)
    assert made._count_max == count
    return made


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def test_one_tenant_alone_has_all_the_room_and_its_oldest_go() -> None:
    graves = graves_of(100)
    for number in range(150):
        graves.dig(key(number), 1, number, b"", tenant="t")
    assert (len(graves), graves.lost) == (100, 50)
    assert key(49) not in graves
    assert key(50) in graves


def test_a_tenant_that_deletes_without_end_takes_none_of_anothers_part() -> None:
    graves = graves_of(100)
    for number in range(100):
        graves.dig(key(number), 1, number, b"", tenant="greedy")
    for number in range(1000, 1050):
        graves.dig(key(number), 2, number, b"", tenant="modest")
    for number in range(2000, 5000):
        graves.dig(key(number), 1, number, b"", tenant="greedy")
    assert all(key(number) in graves for number in range(1000, 1050))
    assert len(graves) == 100


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 40), st.integers(0, 3)), max_size=200))
def test_it_remembers_what_a_plain_model_does(steps: list[tuple[str, int, int]]) -> None:
    graves = graves_of(12)
    tick = 0
    dug: dict[bytes, tuple[str, int]] = {}
    for tenant, number, pause in steps:
        tick += pause * WINDOW_TICKS // 4
        name = key(number + 100 * ord(tenant))
        graves.dig(name, ord(tenant), tick, name, tenant=tenant)
        dug[name] = tenant, tick
        assert name in graves, "what was deleted last is remembered"
        assert len(graves) <= 12
    graves.expire(tick)
    kept = graves.keys()
    assert all(dug[one][1] + WINDOW_TICKS > tick for one in kept)
    told = graves.of(kept, tick)
    assert sum(map(len, told.values())) == len(graves)
    assert sorted(graves.log_records()) == sorted(kept)
