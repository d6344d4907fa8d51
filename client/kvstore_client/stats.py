"""What the client counts: plain integers, added to without a lock. A lost update costs a count, no more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvstore.types.results import MissReason, RefusedReason


@dataclass(slots=True)
class Counters:
    """The client's own counters. Hits are counted on lookups (`match`), loads apart: a failed load is no missed lookup.

    Attributes:
        lookup_keys_asked, lookup_keys_hit: Keys of `match` calls, and how many of them the usable prefix covered.
        load_items, load_hits, load_bytes: Items of `get_into`, those that were served, and their bytes.
        load_misses: Items that were not served, by reason.
        store_items, store_stored, store_exists, store_bytes: Items of `put` and of writers; bytes of those stored.
        store_refused: Items refused, by reason.
        corrupt_blocks: Received blocks that did not match their checksum.
        corrupt_recovered: Records that matched when they were asked for again.
        retries, retries_denied: Repeated requests, and those that the budget did not allow.
        connections_opened, connections_broken: Over all targets.
        breaker_opened: Times a target was given up for a while.
        restarts_noticed: Times a target had another boot id.
        pins_lost: Matches whose pin was gone before they ended (node restarted, or ttl over).
        copied_bytes: Of records that came through shared memory of the client's own to memory that is not shared.
        shm_fallbacks: Times that memory could not be shared with a target on this host, or on one that is not known,
            although that was allowed; `transports` says why.
        rdma_fallbacks: 1 when RDMA was allowed and no port could be opened; `transports` says why.
        soft_deadlines: Loads that returned at their soft deadline.
        repair_hints: Times a target was told that it lacks what another one had.
    """

    lookup_keys_asked: int = 0
    lookup_keys_hit: int = 0
    load_items: int = 0
    load_hits: int = 0
    load_bytes: int = 0
    load_misses: dict[MissReason, int] = field(default_factory=dict)
    store_items: int = 0
    store_stored: int = 0
    store_exists: int = 0
    store_bytes: int = 0
    store_refused: dict[RefusedReason, int] = field(default_factory=dict)
    corrupt_blocks: int = 0
    corrupt_recovered: int = 0
    retries: int = 0
    retries_denied: int = 0
    connections_opened: int = 0
    connections_broken: int = 0
    breaker_opened: int = 0
    restarts_noticed: int = 0
    pins_lost: int = 0
    soft_deadlines: int = 0
    repair_hints: int = 0
    rdma_fallbacks: int = 0
    shm_fallbacks: int = 0
    copied_bytes: int = 0

    def snapshot(self) -> Mapping[str, int]:
        """All counters by name; those by reason as "load_misses.absent". Never negative, never going back."""
        numbers: dict[str, int] = {}
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, int):
                numbers[name] = value
            else:
                for reason, count in list(value.items()):
                    numbers[f"{name}.{reason.name.lower()}"] = count
        return numbers
