"""Key chains: derivation, slices, sums, run heads, and what separates one key from another."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidRequest
from kvstore.limits import ENGINE_HASH_BYTES_MAX, EXTRA_BYTES_MAX
from kvstore.testing.strategies_types import chains
from kvstore.types.keys import KeyChain, part_key, part_keys, record_key, record_keys

NAMESPACE, OTHER = bytes(32), b"\x01" * 32


def chain_of(count: int, *, chunks_per_run: int = 4) -> KeyChain:
    return KeyChain.from_tokens(NAMESPACE, list(range(2 * count)), chunk_tokens=2, chunks_per_run=chunks_per_run)


def digest_list(chain: KeyChain) -> list[bytes]:
    return [key.digest for key in chain]


def rows(blob: bytes) -> list[bytes]:
    return [blob[at : at + 32] for at in range(0, len(blob), 32)]


@given(chains(), st.slices(24), st.slices(24))
def test_slices_of_slices_are_the_list_s(chain: KeyChain, first: slice, second: slice) -> None:
    assert digest_list(chain[first][second]) == digest_list(chain)[first][second]


@given(chains(), st.data())
def test_a_slice_keeps_position_parent_and_run_heads(chain: KeyChain, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(chain)))
    stop = data.draw(st.integers(start, len(chain)))
    part = chain[start:stop]
    assert list(part) == list(chain)[start:stop]
    assert part.first_position == start
    assert part.parent == (chain[start - 1].digest if start else None)
    assert part.run_heads() == chain.run_heads()[32 * start : 32 * stop]
    assert part.parents == chain.parents[32 * start : 32 * stop]
    for key, whole in zip(part, list(chain)[start:stop], strict=True):
        assert (key.position, key.parent, key.run_head) == (whole.position, whole.parent, whole.run_head)


@given(chains(), st.integers(1, 9))
def test_a_run_begins_at_multiples_of_its_size(chain: KeyChain, size: int) -> None:
    digests = rows(chain.digests)
    assert rows(chain.run_heads(size)) == [digests[index - index % size] for index in range(len(digests))]


@given(chains(), st.data())
def test_a_continuation_joins_to_the_chain(chain: KeyChain, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(chain)))
    joined = chain[:cut] + chain[cut:]
    assert joined == chain
    assert joined.run_heads() == chain.run_heads()
    assert [key.parent for key in joined] == [key.parent for key in chain]


def test_what_does_not_follow_loses_its_position() -> None:
    chain = chain_of(6)
    for first, second in ((chain[:2], chain[3:]), (chain[3:], chain[:3]), (chain[:3], chain[:3])):
        joined = first + second
        assert digest_list(joined) == digest_list(first) + digest_list(second)
        assert (joined.first_position, joined.parent) == (None, None)
        assert joined.run_heads(4) == joined.digests
    other = KeyChain.from_tokens(OTHER, list(range(12)), chunk_tokens=2)
    assert (chain[:3] + other[3:]).first_position is None


def test_a_strided_slice_has_no_positions() -> None:
    assert chain_of(6)[::2].first_position is None
    assert digest_list(chain_of(6)[::-1]) == digest_list(chain_of(6))[::-1]


def test_an_index_gives_a_key() -> None:
    chain = chain_of(6)
    key = chain[-1]
    members: Any = chain
    assert (key.position, key.parent, key.run_head) == (5, chain[4].digest, chain[4].digest)
    assert key == chain[5]
    assert key in chain
    assert key.digest in members
    assert key not in chain[:5]
    assert chain.digests[1:33] not in members
    assert "x" not in members
    assert chain[0].parent is None
    for index in (6, -7):
        with pytest.raises(IndexError, match="chain of 6"):
            chain[index]


def test_equality_is_by_digests_position_and_parent() -> None:
    chain = chain_of(6)
    assert chain == chain_of(6)
    assert chain[:3] != chain
    assert KeyChain(chain.digests) != chain
    assert chain[2:4] == KeyChain(chain[2:4].digests, first_position=2, parent=chain[1].digest)
    assert (chain == 3) is False
    assert pickle.loads(pickle.dumps(chain[2:4])).run_heads() == chain[2:4].run_heads()


def test_repr_is_short() -> None:
    assert len(repr(chain_of(500))) < 80
    assert repr(chain_of(500)).startswith("KeyChain(500 keys, from 0, ")
    assert repr(chain_of(5)[3]) == f"ChunkKey({chain_of(5)[3].digest.hex()[:8]}.., position 3)"
    assert repr(KeyChain()) == "KeyChain(0 keys, no positions)"


def test_an_empty_chain_is_legal() -> None:
    empty = KeyChain.from_tokens(NAMESPACE, [], chunk_tokens=2)
    assert (len(empty), empty.digests, empty.run_heads(4), empty.parents, list(empty)) == (0, b"", b"", b"", [])
    assert empty + chain_of(3) == chain_of(3) == chain_of(3) + empty
    assert KeyChain() + chain_of(3)[1:] == chain_of(3)[1:]
    assert record_keys(empty, shard=1, shards=2) == part_keys(empty, part="swa") == b""


@given(st.integers(0, 20), st.integers(0, 20))
def test_a_chain_can_be_continued_with_more_tokens(cut: int, more: int) -> None:
    tokens = list(range(2 * (cut + more)))
    whole = KeyChain.from_tokens(NAMESPACE, tokens, chunk_tokens=2, chunks_per_run=4)
    head = KeyChain.from_tokens(NAMESPACE, tokens[: 2 * cut], chunk_tokens=2, chunks_per_run=4)
    tail = KeyChain.from_tokens(NAMESPACE, tokens[2 * cut :], chunk_tokens=2, chunks_per_run=4, after=head)
    assert tail == whole[cut:]
    assert tail.run_heads() == whole[cut:].run_heads()


def test_nothing_follows_keys_without_positions() -> None:
    with pytest.raises(InvalidRequest, match="no positions"):
        KeyChain.from_tokens(NAMESPACE, [1, 2], chunk_tokens=2, after=KeyChain(bytes(32)))


def test_each_input_changes_the_key() -> None:
    def first(namespace: bytes, tokens: list[int], size: int, extra: list[bytes] | None = None) -> bytes:
        return KeyChain.from_tokens(namespace, tokens, chunk_tokens=size, extra=extra)[0].digest

    found = [
        first(NAMESPACE, [1, 2, 3, 4], 2),
        first(OTHER, [1, 2, 3, 4], 2),
        first(NAMESPACE, [1, 2, 3, 4], 4),
        first(NAMESPACE, [2, 1], 2),
        first(NAMESPACE, [1, 2], 2, [b"image"]),
        first(NAMESPACE, [1, 2], 2, [b"imagE"]),
        KeyChain.from_tokens(NAMESPACE, [9, 9, 1, 2], chunk_tokens=2)[1].digest,
    ]
    assert len(set(found)) == len(found)


def test_extra_in_one_chunk_changes_it_and_all_behind_it() -> None:
    plain = KeyChain.from_tokens(NAMESPACE, range(8), chunk_tokens=2)
    marked = KeyChain.from_tokens(NAMESPACE, range(8), chunk_tokens=2, extra=[b"", b"image", b"", b""])
    assert [one.digest == other.digest for one, other in zip(plain, marked, strict=True)] == [True, False, False, False]
    assert KeyChain.from_tokens(NAMESPACE, range(8), chunk_tokens=2, extra=[b""] * 4) == plain


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ([b"x"], "1 entries for 2 full chunks"),
        (b"xy", "2 entries for 2 full chunks; pass bytes for each"),
        ([b"x", "y"], "extra 1 is 'y'"),
        ([b"", bytes(EXTRA_BYTES_MAX + 1)], "extra 1 .* at most 65536 bytes"),
    ],
)
def test_bad_extra_is_refused(extra: list[bytes], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        KeyChain.from_tokens(NAMESPACE, [1, 2, 3, 4, 5], chunk_tokens=2, extra=extra)


def test_engine_hashes_never_cross_namespaces_or_algorithms() -> None:
    hashes = [b"\x01" * 32, b"\x02" * 8]
    found = [
        KeyChain.from_hashes(namespace, hashes, algorithm=algorithm).digests
        for namespace in (NAMESPACE, OTHER)
        for algorithm in ("sha256", "sha256_cbor")
    ]
    assert len(set(found)) == 4
    moved = KeyChain.from_hashes(NAMESPACE, [b"56" + b"\x01" * 32], algorithm="sha2")
    assert moved[0].digest != KeyChain.from_hashes(NAMESPACE, hashes, algorithm="sha256")[0].digest


def test_engine_hashes_with_a_position_form_a_chain() -> None:
    hashes = [bytes([index]) for index in range(1, 11)]
    whole = KeyChain.from_hashes(NAMESPACE, hashes, algorithm="a", first_position=0, chunks_per_run=4)
    late = KeyChain.from_hashes(
        NAMESPACE,
        hashes[6:],
        algorithm="a",
        first_position=6,
        parent=whole[5].digest,
        run_head=whole[4].digest,
        chunks_per_run=4,
    )
    assert late == whole[6:]
    assert late.run_heads() == whole[6:].run_heads()
    assert list(late)[1].run_head == whole[4].digest
    assert whole[:6] + late == whole
    loose = KeyChain.from_hashes(NAMESPACE, hashes, algorithm="a", chunks_per_run=4)
    assert loose.run_heads() == loose.digests == whole.digests
    assert {key.position for key in loose} == {None}


def test_a_chain_that_starts_inside_a_run_without_its_head_uses_the_first_it_knows() -> None:
    whole = chain_of(10)
    late = KeyChain(whole[6:].digests, first_position=6, parent=whole[5].digest, chunks_per_run=4)
    assert rows(late.run_heads()) == [whole[6].digest] * 2 + [whole[8].digest] * 2


@pytest.mark.parametrize(
    ("hashes", "algorithm", "message"),
    [
        ([b""], "a", "hash 0 is b''; use 1 to"),
        ([b"x", bytes(ENGINE_HASH_BYTES_MAX + 1)], "a", "hash 1 is"),
        ([3], "a", "hash 0 is 3"),
        ([b"x"], "", "algorithm '' has 0 bytes"),
        ([b"x"], "a" * 65, "has 65 bytes; use 1 to 64"),
        ([b"x"], "\ud800", "lone surrogate"),
    ],
)
def test_bad_engine_hashes_are_refused(hashes: list[bytes], algorithm: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        KeyChain.from_hashes(NAMESPACE, hashes, algorithm=algorithm)


def test_impossible_chains_are_refused() -> None:
    wrongs: list[Callable[[], KeyChain]] = [
        lambda: KeyChain(b"short"),
        lambda: KeyChain(bytes(32), first_position=-1),
        lambda: KeyChain(bytes(32), first_position=0, parent=bytes(32)),
        lambda: KeyChain(bytes(32), parent=bytes(32)),
        lambda: KeyChain(bytes(32), first_position=1, parent=b"short"),
        lambda: KeyChain(bytes(32), chunks_per_run=0),
        lambda: KeyChain.from_tokens(b"short", [1], chunk_tokens=1),
        lambda: KeyChain.from_tokens(NAMESPACE, [1], chunk_tokens=0),
    ]
    for wrong in wrongs:
        with pytest.raises(InvalidRequest):
            wrong()


def test_records_of_shards_and_parts_have_keys_of_their_own() -> None:
    chain = chain_of(5)
    assert record_keys(chain, shard=0, shards=1) == chain.digests
    blobs = [record_keys(chain, shard=shard, shards=4) for shard in range(4)]
    blobs += [part_keys(chain, part=part, shard=shard) for part in ("swa", "state") for shard in range(2)]
    blobs.append(chain.digests)
    assert len({row for blob in blobs for row in rows(blob)}) == 5 * len(blobs)
    assert rows(blobs[3])[2] == record_key(chain[2].digest, shard=3, shards=4)
    assert rows(blobs[4])[2] == part_key(chain[2].digest, part="swa", shard=0)
    assert record_keys(chain, shard=1, shards=2) == blobs[1]
    with pytest.raises(InvalidRequest, match=r"shard 4 lies outside the layout's 0\.\.3"):
        record_key(chain[0].digest, shard=4, shards=4)
