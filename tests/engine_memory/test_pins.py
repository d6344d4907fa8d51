"""Pins: bounded, shared without being counted twice, gone by themselves (case 29)."""

from __future__ import annotations

import numpy as np

from kvstore.engine.catalog import Catalog
from kvstore.engine.location import I64, U64, pack_location
from kvstore.engine.pins import Pins
from kvstore.limits import PAGE_BYTES, PIN_TTL_NS_MAX, SECOND_NS

CAPACITY = 800 * PAGE_BYTES
PAGES = 10


def make(records: int = 60) -> tuple[Catalog, Pins, U64]:
    catalog = Catalog(entries_max=1000, segment_count=1, seed=1)
    keys = np.array([(name * 7919, name) for name in range(records)], dtype=np.uint64)
    places = [pack_location(segment=0, page=PAGES * at, pages=PAGES, depth=at) for at in range(records)]
    for (key0, key1), place in zip(keys.tolist(), places, strict=True):
        assert catalog.commit(key0, key1, place, 1)
    return catalog, Pins(catalog, capacity_bytes=CAPACITY), keys


def slots(catalog: Catalog, keys: U64) -> I64:
    return catalog.index.find_many(keys)


def test_a_client_pins_a_quarter_and_all_clients_half() -> None:
    catalog, pins, keys = make()
    assert pins.pin(slots(catalog, keys[:20]), client_id=b"a", now_ns=0, ttl_ns=SECOND_NS)
    assert not pins.pin(slots(catalog, keys[20:21]), client_id=b"a", now_ns=0, ttl_ns=SECOND_NS)
    assert pins.pin(slots(catalog, keys[20:40]), client_id=b"b", now_ns=0, ttl_ns=SECOND_NS)
    assert not pins.pin(slots(catalog, keys[40:41]), client_id=b"c", now_ns=0, ttl_ns=SECOND_NS)
    assert catalog.pinned_bytes == 400 * PAGE_BYTES
    assert catalog.pinned(keys).tolist() == [True] * 40 + [False] * 20


def test_a_shared_prefix_is_counted_once() -> None:
    catalog, pins, keys = make()
    some = slots(catalog, keys[:20])
    ids = [pins.pin(some, client_id=b"%d" % number, now_ns=0, ttl_ns=SECOND_NS) for number in range(100)]
    assert all(ids)
    assert catalog.pinned_bytes == 200 * PAGE_BYTES
    for id in ids[:-1]:
        pins.unpin(id)
    assert catalog.pinned(keys[:20]).all()
    pins.unpin(ids[-1])
    assert catalog.pinned_bytes == 0


def test_a_thousand_abandoned_pins_vanish_by_their_ttl() -> None:
    catalog, pins, keys = make()
    for number in range(1000):
        assert pins.pin(slots(catalog, keys[number % 15 : number % 15 + 5]), client_id=b"x", now_ns=number, ttl_ns=5000)
    assert pins.next_expiry_ns() == 5000
    pins.expire(5499)
    assert len(pins) == 500
    pins.expire(6000)
    assert len(pins) == 0
    assert catalog.pinned_bytes == 0
    assert pins.next_expiry_ns() is None
    assert not catalog.pinned(keys).any()


def test_release_twice_and_of_the_unknown_is_harmless() -> None:
    catalog, pins, keys = make()
    first = pins.pin(slots(catalog, keys[:3]), client_id=b"a", now_ns=0, ttl_ns=10)
    second = pins.pin(slots(catalog, keys[:3]), client_id=b"b", now_ns=0, ttl_ns=10)
    for _ in range(3):
        pins.unpin(first)
    pins.unpin(4711)
    assert catalog.pinned(keys[:3]).all()
    pins.unpin(second)
    assert catalog.pinned_bytes == 0


def test_a_client_that_is_gone_holds_nothing() -> None:
    catalog, pins, keys = make()
    for _ in range(100):
        pins.pin(slots(catalog, keys[:3]), client_id=b"dead", now_ns=0, ttl_ns=SECOND_NS)
    kept = pins.pin(slots(catalog, keys[2:4]), client_id=b"alive", now_ns=0, ttl_ns=SECOND_NS)
    pins.client_gone(b"dead")
    assert len(pins) == 1
    assert catalog.pinned(keys[:5]).tolist() == [False, False, True, True, False]
    pins.unpin(kept)
    pins.client_gone(b"never seen")


def test_a_key_that_was_deleted_and_put_again_is_not_unpinned_below_zero() -> None:
    catalog, pins, keys = make()
    old = pins.pin(slots(catalog, keys[:2]), client_id=b"a", now_ns=0, ttl_ns=10)
    catalog.delete(keys[:1], 2)
    assert catalog.pinned_bytes == PAGES * PAGE_BYTES
    key0, key1 = keys[0].tolist()
    assert catalog.commit(key0, key1, pack_location(segment=0, page=900, pages=3, depth=0), 3)
    pins.unpin(old)
    assert catalog.pinned_bytes == 0
    assert not catalog.pinned(keys[:2]).any()


def test_a_duplicate_in_one_match_is_one_pin_and_the_ttl_is_bounded() -> None:
    catalog, pins, keys = make()
    doubled = np.concatenate([slots(catalog, keys[:2]), slots(catalog, keys[:2])])
    id = pins.pin(doubled, client_id=b"a", now_ns=0, ttl_ns=100 * PIN_TTL_NS_MAX)
    assert catalog.pinned_bytes == 2 * PAGES * PAGE_BYTES
    assert pins.next_expiry_ns() == PIN_TTL_NS_MAX
    assert pins.by_age(0) == [1, 0, 0, 0]
    assert pins.by_age(70 * SECOND_NS) == [0, 0, 1, 0]
    pins.unpin(id)
    assert catalog.pinned_bytes == 0
