"""Which records a call asks which target for, and what the answers mean together. Pure.

Records of a call are numbered section by section: record `r` belongs to key `r % key_count`, and section
`r // key_count` is one shard of one record kind (the dense record, or a sparse part). So a section's record keys are
one blob.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from kvstore.cluster.view import TargetId
from kvstore.errors import InvalidRequest
from kvstore.limits import DIGEST_BYTES
from kvstore.types.keys import ChunkKey, KeyChain, part_keys, record_keys
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore.types.results import MissReason
from kvstore_client.topology import ChainPlaces

Keys: TypeAlias = KeyChain | ChunkKey | Sequence[ChunkKey]

_BY_WORTH: Final = (
    0,
    MissReason.PENDING,
    MissReason.CORRUPT,
    MissReason.LAYOUT,
    MissReason.IO,
    MissReason.OVERLOADED,
    MissReason.DEADLINE,
    MissReason.UNAVAILABLE,
    MissReason.EVICTED,
    MissReason.ABSENT,
)
"""Of several answers about one record the first of these holds: a copy anywhere is a hit, and only if everybody says
that there is none it is absent."""


class _Worth:
    """An order of statuses, as tables: of several answers about one record the first in it holds."""

    def __init__(self, order: Sequence[int]) -> None:
        self.unavailable = order.index(MissReason.UNAVAILABLE)
        self.of_status = np.full(256, self.unavailable, np.uint8)
        self.of_status[list(order)] = np.arange(len(order))
        self.status = np.array(order, np.uint8)


_ANY: Final = _Worth(_BY_WORTH)
_ALL: Final = _Worth((*_BY_WORTH[1:-2], *_BY_WORTH[:1], *_BY_WORTH[-2:]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One record kind of one shard, for every key of the call. `part` None is the dense record."""

    shard: int
    part: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetBatch:
    """The records that one target is asked for.

    Attributes:
        keys: Record keys, n * 32 bytes.
        records: Number of each in the plan; a range when there is one target.
    """

    target: TargetId
    keys: bytes
    records: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordPlan:
    """The records of a call and the targets that may hold them; one that may lie in several places is in each."""

    key_count: int
    sections: tuple[Section, ...]
    batches: tuple[TargetBatch, ...]

    @property
    def record_count(self) -> int:
        """Records of the call over all sections."""
        return self.key_count * len(self.sections)


def chain_in(namespace: Namespace, keys: Keys) -> KeyChain:
    """`as_chain` of keys for a namespace. Raises InvalidRequest also for a chain that was made for another one."""
    chain = as_chain(keys, chunks_per_run=namespace.layout.chunks_per_run)
    if chain.namespace_digest and chain.namespace_digest != namespace.digest:
        raise InvalidRequest(
            f"the keys are of namespace {chain.namespace_digest.hex()[:16]}, this one is {namespace.digest.hex()[:16]} "
            f"(model {namespace.model!r:.80}): keys never match across namespaces; make them by this one's keys(...)"
        )
    return chain


def as_chain(keys: Keys, *, chunks_per_run: int = 1) -> KeyChain:
    """`keys` as one chain. Single keys lose their positions, so slices of a chain are the better argument.

    Args:
        keys: What the caller gave.
        chunks_per_run: Of the layout.

    Raises:
        InvalidRequest: Something in `keys` is not a ChunkKey.
    """
    if isinstance(keys, KeyChain):
        return keys
    if not isinstance(keys, ChunkKey | Iterable):
        raise InvalidRequest(f"keys are a {type(keys).__name__}; pass keys made by ns.keys(...)")
    found = [keys] if isinstance(keys, ChunkKey) else list(keys)
    chain = KeyChain()
    for index, key in enumerate(found):
        if not isinstance(key, ChunkKey):
            raise InvalidRequest(f"key {index} is a {type(key).__name__}; pass keys made by ns.keys(...)")
        if key.position is None:
            single = KeyChain(key.digest)
        else:
            single = KeyChain(
                key.digest,
                first_position=key.position,
                parent=key.parent,
                run_head=key.run_head,
                chunks_per_run=chunks_per_run,
            )
        chain = single if index == 0 else chain + single
    if chain.first_position is None and any(key.run_head not in (None, key.digest) for key in found):
        return _LooseKeys(found)
    return chain


class _LooseKeys(KeyChain):
    """Keys that do not follow each other, each of which still knows the run that it lies in."""

    __slots__ = ("_heads",)

    def __init__(self, keys: Sequence[ChunkKey]) -> None:
        super().__init__(b"".join([key.digest for key in keys]))
        self._heads = b"".join([key.run_head or key.digest for key in keys])

    def run_heads(self, chunks_per_run: int | None = None) -> bytes:
        """Those that the keys were made with."""
        return self._heads


def choose_shards(layout: KVLayout, shards: int | Sequence[int] | None) -> tuple[int, ...]:
    """The shards that a call is about: all of them for None. Raises InvalidRequest for unknown or repeated ones."""
    if shards is None:
        return tuple(range(layout.shards))
    chosen = (shards,) if isinstance(shards, int) else tuple(shards)
    if not chosen or len(set(chosen)) != len(chosen):
        raise InvalidRequest(f"shards are {list(chosen)}; name each shard once, at least one")
    for shard in chosen:
        if not 0 <= shard < layout.shards:
            raise InvalidRequest(f"shard {shard} lies outside the layout's 0..{layout.shards - 1}")
    return chosen


def sections_of(layout: KVLayout, *, shards: Sequence[int], parts: Sequence[str | None]) -> tuple[Section, ...]:
    """The sections of a call, part after part, each with every shard. Dense parts share the record of part None."""
    kinds: list[str | None] = []
    for part in parts:
        kind = None if part is None or layout.part(part).is_dense else part
        if kind not in kinds:
            kinds.append(kind)
    return tuple(Section(shard=shard, part=kind) for kind in kinds for shard in shards)


def plan_records(
    chain: KeyChain, *, layout: KVLayout, sections: Sequence[Section], where: ChainPlaces | TargetId
) -> RecordPlan:
    """Groups the records of all keys and sections by the targets that may hold them, or are to.

    All records of a chunk lie where its run does. A plain target id stands for "the only target" and saves looking at
    each key.
    """
    everything = all_record_keys(chain, sections, layout)
    count, sections = len(chain), tuple(sections)
    total = count * len(sections)
    if isinstance(where, str):
        only = TargetBatch(target=where, keys=everything, records=range(total))
        return RecordPlan(key_count=count, sections=sections, batches=(only,) if everything else ())
    rows = np.frombuffer(everything, np.dtype((np.void, DIGEST_BYTES)))
    batches = []
    for target, chosen in where.by_worker():
        records = np.concatenate([chosen + at * count for at in range(len(sections))]) if len(sections) > 1 else chosen
        if len(records) == total:
            batches.append(TargetBatch(target=target, keys=everything, records=range(total)))
        else:
            batches.append(TargetBatch(target=target, keys=rows[records].tobytes(), records=records.tolist()))
    return RecordPlan(key_count=count, sections=sections, batches=tuple(batches))


def all_record_keys(chain: KeyChain, sections: Sequence[Section], layout: KVLayout) -> bytes:
    """The record keys of every section, one section after the other, 32 bytes each."""
    if len(sections) == 1:
        return _section_keys(chain, sections[0], layout)
    return b"".join([_section_keys(chain, section, layout) for section in sections])


def split_records(batch: TargetBatch, *, items_max: int) -> Iterator[TargetBatch]:
    """The batch in requests of at most `items_max` records, in order."""
    count = len(batch.records)
    if count <= items_max:
        if count:
            yield batch
        return
    for at in range(0, count, items_max):
        yield TargetBatch(
            target=batch.target,
            keys=batch.keys[at * DIGEST_BYTES : (at + items_max) * DIGEST_BYTES],
            records=batch.records[at : at + items_max],
        )


def split_by_weight(weights: Sequence[int], *, items_max: int, weight_max: int) -> Iterator[range]:
    """Ranges of consecutive items, each at most `items_max` long and at most `weight_max` heavy (or one item)."""
    start, total = 0, 0
    for index, weight in enumerate(weights):
        if index > start and (index - start >= items_max or total + weight > weight_max):
            yield range(start, index)
            start, total = index, 0
        total += weight
    if start < len(weights):
        yield range(start, len(weights))


def gather_statuses(plan: RecordPlan, answers: Sequence[bytes | None], *, from_all: bool = False) -> bytearray:
    """One status byte per record of the plan, from one blob per batch; None (no answer) is UNAVAILABLE throughout.

    Of a record that several targets were asked for, the best answer: a hit where any of them has it. With `from_all`,
    a hit only if nobody failed: nothing is left of it.
    """
    order = _ALL if from_all else _ANY
    if len(answers) == 1 and answers[0] is not None and len(answers[0]) == plan.record_count:
        return bytearray(answers[0])
    worth = np.full(plan.record_count, 255, np.uint8)
    for batch, answer in zip(plan.batches, answers, strict=True):
        found = order.unavailable if answer is None else order.of_status[np.frombuffer(answer, np.uint8)]
        records = np.asarray(batch.records, np.intp)
        worth[records] = np.minimum(worth[records], found)
    worth[worth == 255] = order.unavailable  # nobody could be asked
    return bytearray(order.status[worth].tobytes())


def better_status(one: int, other: int) -> int:
    """What two answers about one record mean together: the one that is worth more."""
    return min(one, other, key=lambda status: int(_ANY.of_status[status & 0xFF]))


def key_statuses(plan: RecordPlan, statuses: bytes | bytearray, *, sections: range | None = None) -> bytes:
    """One status per key: 0 where every record of the chosen sections is a hit, else the first reason found."""
    count = plan.key_count
    chosen = sections if sections is not None else range(len(plan.sections))
    merged = bytearray(statuses[chosen.start * count : (chosen.start + 1) * count])
    for section in chosen[1:]:
        for at, status in enumerate(statuses[section * count : (section + 1) * count]):
            if status and not merged[at]:
                merged[at] = status
    return bytes(merged)


def prefix_length(statuses: bytes | bytearray) -> int:
    """How many statuses at the front are hits (0). The answer never crosses a hole."""
    return len(statuses) - len(statuses.lstrip(b"\0"))


def boundary_chunks(dense_chunks: int, sparse: Sequence[bytes]) -> int:
    """The longest prefix, in chunks, that every needed part can serve.

    A sparse part is keyed by the chunk it ends at, so a prefix of n chunks is served by the records of chunk n - 1.

    Args:
        dense_chunks: Length of the prefix whose dense records are all there.
        sparse: For each sparse part needed, one status per key.
    """
    for length in range(dense_chunks, 0, -1) if sparse else ():
        if all(statuses[length - 1] == 0 for statuses in sparse):
            return length
    return 0 if sparse else dense_chunks


def _section_keys(chain: KeyChain, section: Section, layout: KVLayout) -> bytes:
    if section.part is None:
        return record_keys(chain, shard=section.shard, shards=layout.shards)
    return part_keys(chain, part=section.part, shard=section.shard)
