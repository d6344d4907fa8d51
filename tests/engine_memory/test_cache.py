"""The RAM cache: what stays, what goes, and whose memory it is."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.engine.arena import Arena, Piece
from kvstore.engine.cache import Cache, CachedRecord, HeaderLru, RecordFacts
from kvstore.engine.location import pack_location
from kvstore.limits import PAGE_BYTES

SALT = bytes(16)
ARENA_PAGES = 64


def facts(name: int, length: int = PAGE_BYTES) -> RecordFacts:
    return RecordFacts(
        key=name.to_bytes(32, "little"),
        record_bytes=length,
        block_bytes=PAGE_BYTES,
        crcs=bytes(4 * -(-length // PAGE_BYTES)),
        content_id=bytes(16),
        header_pages=1,
        location=pack_location(segment=1, page=name, pages=2, depth=0),
    )


def piece_of(cache: Cache, length: int = PAGE_BYTES) -> Piece:
    piece = cache.allocate(length)
    assert piece is not None
    return piece


def insert(cache: Cache, name: int, *, salt: bytes = SALT) -> CachedRecord:
    return cache.insert(salt, facts(name), piece_of(cache), tick=1)


def names_in(cache: Cache) -> set[int]:
    return {int.from_bytes(key, "little") for key in cache.space(SALT) or {}}


@pytest.fixture
def cache() -> Cache:
    return Cache(Arena(ARENA_PAGES * PAGE_BYTES), capacity_bytes=20 * PAGE_BYTES)


def test_it_stays_within_its_capacity(cache: Cache) -> None:
    for name in range(1, 100):
        insert(cache, name)
        assert cache.used_bytes <= cache.capacity_bytes
        assert cache.arena.used_bytes == cache.used_bytes
    assert len(cache) == 20
    assert cache.metrics.cache_evictions == 79
    cache.clear()
    assert cache.arena.used_bytes == cache.used_bytes == 0


def test_a_scan_does_not_push_out_what_is_asked_for(cache: Cache) -> None:
    hot = [insert(cache, name) for name in range(1, 6)]
    for record in hot:
        record.touch()
    for name in range(100, 300):
        insert(cache, name)
    assert names_in(cache) >= {1, 2, 3, 4, 5}


def test_what_comes_back_soon_is_kept(cache: Cache) -> None:
    insert(cache, 1)
    for name in range(100, 121):
        insert(cache, name)
    assert 1 not in names_in(cache)
    insert(cache, 1)
    for name in range(200, 215):
        insert(cache, name)
    assert 1 in names_in(cache)


def test_second_touch_admits_at_the_second_sight() -> None:
    cache = Cache(Arena(ARENA_PAGES * PAGE_BYTES), capacity_bytes=20 * PAGE_BYTES, second_touch=True)
    key = facts(1).key
    assert not cache.admits(key, PAGE_BYTES)
    assert cache.admits(key, PAGE_BYTES)


def test_a_record_that_is_large_for_the_cache_stays_out(cache: Cache) -> None:
    assert cache.admits(facts(1).key, 2 * PAGE_BYTES)
    assert not cache.admits(facts(1).key, 3 * PAGE_BYTES)
    off = Cache(Arena(PAGE_BYTES), capacity_bytes=0)
    assert not off.fits(1)


def test_eviction_never_frees_bytes_that_are_being_sent(cache: Cache) -> None:
    record = insert(cache, 1)
    piece = record.piece
    assert piece is not None
    record.view[:4] = b"sent"
    piece.hold()
    for name in range(2, 200):
        other = insert(cache, name)
        other.view[:4] = b"else"
    assert 1 not in names_in(cache)
    assert bytes(record.view[:4]) == b"sent"
    piece.release()


def test_memory_for_others_is_made_by_evicting(cache: Cache) -> None:
    for name in range(1, 21):
        insert(cache, name)
    big = cache.allocate(60 * PAGE_BYTES)
    assert big is not None
    assert len(cache) <= 4
    assert cache.allocate(5 * PAGE_BYTES) is None
    assert len(cache) == 0


def test_another_copy_of_a_key_replaces_the_first(cache: Cache) -> None:
    insert(cache, 1)
    newer = insert(cache, 1)
    assert cache.find(SALT, newer.facts.key) is newer
    assert cache.used_bytes == PAGE_BYTES
    assert cache.arena.used_bytes == PAGE_BYTES


def test_records_follow_the_drive(cache: Cache) -> None:
    stays, moves, goes = (insert(cache, name) for name in (1, 2, 3))
    new = pack_location(segment=2, page=9, pages=2, depth=0)
    keys = np.zeros((1, 2), dtype=np.uint64)
    cache.moved(keys, np.array([moves.location], dtype=np.uint64), np.array([new], dtype=np.uint64))
    cache.removed(keys, np.array([goes.location], dtype=np.uint64))
    assert cache.at[new] is moves
    assert names_in(cache) == {1, 2}
    cache.removed(keys, np.array([new, stays.location], dtype=np.uint64))
    assert len(cache) == 0
    assert not cache.at


def test_a_namespace_goes_at_once(cache: Cache) -> None:
    insert(cache, 1)
    other = b"o" * 16
    insert(cache, 1, salt=other)
    cache.forget_namespace(SALT)
    assert cache.space(SALT) is None
    assert len(cache) == 1


def test_no_bytes_are_a_record_too(cache: Cache) -> None:
    record = cache.insert(SALT, facts(1, 0), None, tick=1)
    assert len(record.view) == 0
    for name in range(2, 100):
        insert(cache, name)
    assert 1 not in names_in(cache)


def test_volatile_records_live_until_their_time_and_within_their_share(cache: Cache) -> None:
    for name in range(1, 6):
        assert cache.insert_volatile(SALT, facts(name), piece_of(cache), tick=1, until_ns=100 * name) is not None
    extra = piece_of(cache)
    assert cache.insert_volatile(SALT, facts(9), extra, tick=1, until_ns=5) is None
    extra.release()
    for name in range(100, 200):
        insert(cache, name)
    assert names_in(cache) >= {1, 2, 3, 4, 5}
    assert cache.next_expiry_ns() == 100
    cache.expire(300)
    assert names_in(cache) & {1, 2, 3, 4, 5} == {4, 5}
    cache.forget(SALT, facts(4).key)
    cache.expire(1000)
    assert cache.volatile_bytes == 0
    assert not names_in(cache) & {1, 2, 3, 4, 5}


def test_headers_are_remembered_within_bytes_and_per_generation() -> None:
    headers = HeaderLru(bytes_max=3 * 600)
    for name in range(1, 4):
        headers.put(7, facts(name))
    assert headers.get(facts(1).location, 7) is not None
    assert headers.get(facts(1).location, 8) is None
    headers.put(7, facts(4))
    assert len(headers) == 3
    assert headers.get(facts(2).location, 7) is None, "the least recently used one went"
    headers.forget(facts(1).location, 7)
    assert headers.get(facts(1).location, 7) is None
