"""Types of the compiled search, _search.c, where each call is described."""

from typing import Final

from kvstore.engine.location import I64, U32, U64

INTERFACE: Final[int]

def find_many(
    keys: U64,
    slots: I64,
    key0: U64,
    key1: U64,
    locations: U64,
    directory: U32,
    shift: int,
    secret0: int,
    secret1: int,
    /,
) -> None: ...
def locate(
    keys: bytes | memoryview,
    indices: list[int],
    salt: bytes,
    key0: U64,
    key1: U64,
    locations: U64,
    directory: U32,
    shift: int,
    secret0: int,
    secret1: int,
    access: U32,
    access_sums: I64,
    tick: int,
    /,
) -> list[int]: ...
def line_up(locations: list[int], indices: list[int], pages_max: int, /) -> list[tuple[int, int]] | None: ...
def divide(
    wants: list[tuple[int, int]],
    at: int,
    most: int,
    count_max: int,
    record_pages_max: int,
    run_pages_max: int,
    first_byte: int,
    segment_bytes: int,
    /,
) -> tuple[int, list[tuple[int, int, int]], int, list[int], list[int], list[int], list[int]] | None: ...
