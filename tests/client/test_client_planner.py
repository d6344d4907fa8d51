"""Which records a call asks for, and what the statuses mean together."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidRequest
from kvstore.types.keys import KeyChain, part_keys, record_keys
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore.types.part import Part, PartKind
from kvstore.types.results import MissReason
from kvstore_client.planner import (
    as_chain,
    boundary_chunks,
    choose_shards,
    gather_statuses,
    key_statuses,
    plan_records,
    prefix_length,
    sections_of,
    split_by_weight,
    split_records,
)
from kvstore_client.topology import ChainPlaces

ABSENT = int(MissReason.ABSENT)
LAYOUT = KVLayout(
    chunk_tokens=16,
    dtype="bf16",
    layers=2,
    shards=4,
    parts=(
        Part(name="kv", entry_bytes=64),
        Part(name="state", entry_bytes=256, entries=1, kind=PartKind.SPARSE),
    ),
    run_bytes=16384,
)
NAMESPACE = Namespace(tenant="default", model="m", weights="w", layout=LAYOUT)


def by_head(chain: KeyChain, *choices: Callable[[bytes], str]) -> ChainPlaces:
    """Places of each key, one for each choice."""
    heads = [chain.run_heads()[at : at + 32] for at in range(0, 32 * len(chain), 32)]
    names = [[choice(head) for choice in choices] for head in heads]
    workers = sorted({name for row in names for name in row})
    places = np.array([[workers.index(name) for name in row] for row in names], np.intp).reshape(-1, len(choices))
    return ChainPlaces(tuple(workers), np.arange(len(chain)), places, 1)


def chain_of(count: int) -> KeyChain:
    return NAMESPACE.keys(list(range(16 * count)))


def test_one_target_takes_everything_in_section_order() -> None:
    chain = chain_of(3)
    sections = sections_of(LAYOUT, shards=(1, 2), parts=(None, "state"))
    plan = plan_records(chain, layout=LAYOUT, sections=sections, where="t0")
    assert [(section.part, section.shard) for section in plan.sections] == [
        (None, 1),
        (None, 2),
        ("state", 1),
        ("state", 2),
    ]
    assert plan.batches[0].keys == b"".join(
        [record_keys(chain, shard=shard, shards=4) for shard in (1, 2)]
        + [part_keys(chain, part="state", shard=shard) for shard in (1, 2)]
    )
    assert list(plan.batches[0].records) == list(range(12))


def test_no_keys_need_no_target() -> None:
    plan = plan_records(KeyChain(), layout=LAYOUT, sections=sections_of(LAYOUT, shards=(0,), parts=(None,)), where="t")
    assert plan.batches == ()
    assert key_statuses(plan, gather_statuses(plan, [])) == b""


def test_keys_of_a_run_go_to_the_target_of_its_head() -> None:
    chain = chain_of(40)
    assert LAYOUT.chunks_per_run > 1
    heads = chain.run_heads()
    first, *_ = {heads[at : at + 32] for at in range(0, len(heads), 32)}
    plan = plan_records(
        chain,
        layout=LAYOUT,
        sections=sections_of(LAYOUT, shards=(0, 1), parts=(None,)),
        where=by_head(chain, lambda head: "a" if head == first else "b"),
    )
    for batch in plan.batches:
        for record in batch.records:
            head = heads[record % 40 * 32 : (record % 40 + 1) * 32]
            assert (head == first) == (batch.target == "a")
    assert sorted(record for batch in plan.batches for record in batch.records) == list(range(80))


@given(st.data())
def test_statuses_come_back_in_the_callers_order(data: st.DataObject) -> None:
    count = data.draw(st.integers(0, 30))
    shards = data.draw(st.sampled_from([(0,), (1, 3), (0, 1, 2, 3)]))
    chain = chain_of(count)
    plan = plan_records(
        chain,
        layout=LAYOUT,
        sections=sections_of(LAYOUT, shards=shards, parts=(None,)),
        where=by_head(chain, lambda head: f"t{head[0] % 3}"),
    )
    wanted = data.draw(st.lists(st.sampled_from([0, 0, ABSENT, 8]), min_size=count, max_size=count))
    answers = [bytes(wanted[record % count] for record in batch.records) for batch in plan.batches]
    statuses = gather_statuses(plan, list(answers))
    assert list(key_statuses(plan, statuses)) == wanted


def test_a_key_is_the_worst_of_its_shards_and_no_answer_is_unavailable() -> None:
    plan = plan_records(
        chain_of(3), layout=LAYOUT, sections=sections_of(LAYOUT, shards=(0, 1), parts=(None,)), where="t"
    )
    assert key_statuses(plan, bytes([0, 0, ABSENT, 0, ABSENT, 0])) == bytes([0, ABSENT, ABSENT])
    assert gather_statuses(plan, [None]) == bytes([MissReason.UNAVAILABLE]) * 6


def test_prefix_never_crosses_a_hole() -> None:
    assert [prefix_length(bytes(s)) for s in ([], [0], [1], [0, 0, 1, 0], [0, 0, 0])] == [0, 1, 0, 2, 3]


@pytest.mark.parametrize(("tokens", "boundary"), [(63, 0), (64, 64), (65, 64), (80, 64), (128, 128)])
def test_boundary_with_state_each_64_tokens(tokens: int, boundary: int) -> None:
    """Chunks of 16 tokens, a snapshot at each multiple of 64: the length that attention and state both serve."""
    dense = tokens // 16
    state = bytes(0 if (chunk + 1) * 16 % 64 == 0 else ABSENT for chunk in range(dense))
    assert boundary_chunks(dense, [state]) * 16 == boundary


def test_boundary_needs_every_sparse_part_at_the_same_end() -> None:
    state = bytes([0, ABSENT, 0, ABSENT, 0])
    swa = bytes([0, 0, ABSENT, ABSENT, 0])
    assert boundary_chunks(5, [state, swa]) == 5
    assert boundary_chunks(4, [state, swa]) == 1
    assert boundary_chunks(4, [state]) == 3
    assert boundary_chunks(4, [bytes([ABSENT] * 5)]) == 0, "the window is evicted, attention alone is no use"
    assert boundary_chunks(4, []) == 4


def test_large_batches_are_split_in_order() -> None:
    chain = chain_of(25)
    plan = plan_records(chain, layout=LAYOUT, sections=sections_of(LAYOUT, shards=(0,), parts=(None,)), where="t")
    pieces = list(split_records(plan.batches[0], items_max=10))
    assert [len(piece.records) for piece in pieces] == [10, 10, 5]
    assert b"".join(piece.keys for piece in pieces) == plan.batches[0].keys
    assert [record for piece in pieces for record in piece.records] == list(range(25))


@given(st.lists(st.integers(0, 50), max_size=60), st.integers(1, 9), st.integers(1, 80))
def test_splitting_by_weight_keeps_all_items_in_order(weights: list[int], items_max: int, weight_max: int) -> None:
    ranges = list(split_by_weight(weights, items_max=items_max, weight_max=weight_max))
    assert [index for one in ranges for index in one] == list(range(len(weights)))
    for one in ranges:
        assert 1 <= len(one) <= items_max
        assert len(one) == 1 or sum(weights[index] for index in one) <= weight_max


def test_single_keys_and_lists_of_keys_are_chains_too() -> None:
    chain = chain_of(4)
    assert as_chain(chain) is chain
    assert as_chain(chain[2]).digests == chain[2].digest
    assert as_chain([chain[0], chain[1]]) == chain[:2]
    assert as_chain([chain[3], chain[0]]).digests == chain[3].digest + chain[0].digest
    with pytest.raises(InvalidRequest, match="key 1 is a bytes"):
        as_chain([chain[0], b"x"])  # type: ignore[list-item]


@pytest.mark.parametrize("shards", [[], [0, 0], [4], [-1]])
def test_wrong_shards_are_refused(shards: list[int]) -> None:
    with pytest.raises(InvalidRequest, match="shard"):
        choose_shards(LAYOUT, shards)
    assert choose_shards(LAYOUT, None) == (0, 1, 2, 3)
    assert choose_shards(LAYOUT, 2) == (2,)
