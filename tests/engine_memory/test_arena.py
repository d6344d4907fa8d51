"""The arena against a naive model of bytes in use, and the promises of its pieces."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.engine.arena import Arena, Piece
from kvstore.limits import PAGE_BYTES

ARENA_PAGES = 24


def longest_free_run(taken: list[bool]) -> int:
    longest = run = 0
    for page in taken:
        run = 0 if page else run + 1
        longest = max(longest, run)
    return longest


def pages_of(piece: Piece) -> range:
    return range(piece.offset // PAGE_BYTES, (piece.offset + piece.length) // PAGE_BYTES)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30)), max_size=60))
def test_pieces_never_overlap_and_room_is_found_where_a_naive_search_finds_it(steps: list[tuple[int, int]]) -> None:
    arena = Arena(ARENA_PAGES * PAGE_BYTES)
    taken = [False] * ARENA_PAGES
    held: list[Piece] = []
    for pages, choice in steps:
        if pages and not (held and choice < 12):
            piece = arena.allocate(pages * PAGE_BYTES - choice)
            assert (piece is not None) == (longest_free_run(taken) >= pages)
            if piece is not None:
                assert not any(taken[page] for page in pages_of(piece))
                for page in pages_of(piece):
                    taken[page] = True
                held.append(piece)
        elif held:
            piece = held.pop(choice % len(held))
            for page in pages_of(piece):
                taken[page] = False
            piece.release()
        assert arena.free_bytes == taken.count(False) * PAGE_BYTES
        assert arena.used_bytes == sum(piece.length for piece in held)
    assert arena.largest_hole_bytes() == longest_free_run(taken) * PAGE_BYTES
    for piece in held:
        piece.release()
    assert arena.largest_hole_bytes() == arena.size_bytes


def test_a_piece_is_page_aligned_memory_of_its_own() -> None:
    arena = Arena(4 * PAGE_BYTES)
    first, second = arena.allocate(1), arena.allocate(PAGE_BYTES + 1)
    assert first is not None
    assert second is not None
    assert (first.length, second.length) == (PAGE_BYTES, 2 * PAGE_BYTES)
    assert first.offset % PAGE_BYTES == second.offset % PAGE_BYTES == 0
    first.view[:] = b"a" * PAGE_BYTES
    second.view[:] = b"b" * 2 * PAGE_BYTES
    assert bytes(first.view) == b"a" * PAGE_BYTES
    assert arena.memory[second.offset : second.offset + second.length] == second.view


def test_no_length_is_one_page_and_too_much_is_none() -> None:
    arena = Arena(2 * PAGE_BYTES)
    nothing = arena.allocate(0)
    assert nothing is not None
    assert nothing.length == PAGE_BYTES
    assert arena.allocate(2 * PAGE_BYTES) is None
    assert arena.allocate(1 << 50) is None


def test_memory_comes_back_with_the_last_holder() -> None:
    arena = Arena(PAGE_BYTES)
    piece = arena.allocate(1)
    assert piece is not None
    piece.hold()
    piece.release()
    assert arena.allocate(1) is None
    piece.release()
    assert piece.holders == 0
    assert arena.allocate(1) is not None


def test_a_split_piece_is_freed_part_by_part() -> None:
    arena = Arena(8 * PAGE_BYTES)
    piece = arena.allocate(8 * PAGE_BYTES)
    assert piece is not None
    piece.view[5 * PAGE_BYTES] = 7
    first, second = piece.split([PAGE_BYTES, 6 * PAGE_BYTES])
    assert second.view[4 * PAGE_BYTES] == 7
    assert arena.free_bytes == PAGE_BYTES
    second.release()
    assert arena.largest_hole_bytes() == 7 * PAGE_BYTES
    first.release()
    assert arena.largest_hole_bytes() == 8 * PAGE_BYTES
