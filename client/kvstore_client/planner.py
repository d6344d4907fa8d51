"""Which records a call asks which target for, and what the answers mean together. Pure.

Records of a call are numbered section by section: record `r` belongs to key `r % key_count`, and section
`r // key_count` is one shard of one record kind (the dense record, or a sparse part). So a section's record keys are
one blob.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvstore.errors import InvalidRequest
from kvstore.limits import DIGEST_BYTES
from kvstore.types.keys import ChunkKey, KeyChain, part_keys, record_keys
from kvstore.types.layout import KVLayout
from kvstore.types.results import MissReason

TargetId: TypeAlias = str
TargetOf: TypeAlias = Callable[[bytes], TargetId]
Keys: TypeAlias = KeyChain | ChunkKey | Sequence[ChunkKey]


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
    """The records of a call and the targets that hold them."""

    key_count: int
    sections: tuple[Section, ...]
    batches: tuple[TargetBatch, ...]

    @property
    def record_count(self) -> int:
        """Records of the call over all sections."""
        return self.key_count * len(self.sections)


def as_chain(keys: Keys) -> KeyChain:
    """`keys` as one chain. Single keys lose their place in a run, so slices of a chain are the better argument.

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
                key.digest, first_position=key.position, parent=key.parent, run_head=key.run_head, chunks_per_run=1
            )
        chain = single if index == 0 else chain + single
    return chain


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
    chain: KeyChain, *, layout: KVLayout, sections: Sequence[Section], target_of: TargetOf | TargetId
) -> RecordPlan:
    """Groups the records of all keys and sections by target.

    All records of a chunk lie where its run's head places them. A plain target id stands for "the only target" and
    saves looking at each key.
    """
    everything = all_record_keys(chain, sections, layout)
    count = len(chain)
    if isinstance(target_of, str):
        only = TargetBatch(target=target_of, keys=everything, records=range(count * len(sections)))
        return RecordPlan(key_count=count, sections=tuple(sections), batches=(only,) if everything else ())
    owners = _owners(chain, target_of)
    grouped: dict[TargetId, list[int]] = {}
    for record in range(count * len(sections)):
        grouped.setdefault(owners[record % count], []).append(record)
    batches = tuple(
        TargetBatch(
            target=target,
            keys=b"".join(everything[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES] for at in records),
            records=records,
        )
        for target, records in grouped.items()
    )
    return RecordPlan(key_count=count, sections=tuple(sections), batches=batches)


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


def gather_statuses(plan: RecordPlan, answers: Sequence[bytes | None]) -> bytearray:
    """One status byte per record of the plan, from one blob per batch; None (no answer) is UNAVAILABLE throughout."""
    statuses = bytearray([MissReason.UNAVAILABLE]) * plan.record_count
    for batch, answer in zip(plan.batches, answers, strict=True):
        if answer is None:
            continue
        if isinstance(batch.records, range):
            statuses[batch.records.start : batch.records.stop] = answer
        else:
            for record, status in zip(batch.records, answer, strict=True):
                statuses[record] = status
    return statuses


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


def _owners(chain: KeyChain, target_of: TargetOf) -> list[TargetId]:
    """The target of each key; a head is placed once."""
    heads = chain.run_heads()
    placed: dict[bytes, TargetId] = {}
    owners = []
    for at in range(0, len(heads), DIGEST_BYTES):
        head = heads[at : at + DIGEST_BYTES]
        target = placed.get(head)
        if target is None:
            target = placed[head] = target_of(head)
        owners.append(target)
    return owners
