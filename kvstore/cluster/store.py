"""The cluster store: a few small entries that all nodes share, leases that bind entries to a living node, and a watch.

Two implementations, one suite that both pass (`kvstore.testing.cluster_suite`): `FileClusterStore`, embedded, for one
process, and `EtcdClusterStore`. What the entries mean is said in `kvstore.cluster.catalog`; per chunk there is nothing.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from kvstore.errors import InvalidRequest
from kvstore.limits import LEASE_TTL_NS_MAX, LEASE_TTL_NS_MIN, STORE_NAME_BYTES_MAX, STORE_VALUE_BYTES_MAX

ABSENT: Final = 0
"""As an expected revision: the entry must not exist."""

NO_LEASE: Final = 0

_NAME: Final = re.compile(r"[A-Za-z0-9_.%~-]+(/[A-Za-z0-9_.%~-]+)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A value, the revision at which it was written, and the lease that it lives under, or NO_LEASE."""

    value: str
    revision: int
    lease: int = NO_LEASE


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """All entries at one moment.

    Attributes:
        store_id: of this store's history; another one means that it was made anew, and revisions count from the start.
        revision: of the moment; every change has a higher one than all before it.
    """

    store_id: str
    revision: int
    entries: Mapping[str, Entry]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """An entry that was written, or removed (None): deleted, or its lease ended."""

    name: str
    entry: Entry | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A time-bound registration. `ttl_ns` is what the store granted, which may be more than was asked for."""

    id: int
    ttl_ns: int


class ClusterStore(Protocol):
    """See the module. Every call ends within STORE_CALL_NS, however many members of the store are gone.

    Each method raises, besides what it says itself:
        Unavailable, DeadlineExceeded: the store does not answer; nothing was changed. What was loaded before stays
            valid, and what needs the store to decide has to wait.
        Denied: the store does not accept who we are.
        Closed: after `close`.
    """

    async def load(self) -> Image:
        """All entries, as of a moment after the call began: no other node's finished write is missing."""

    async def put(self, name: str, value: str, *, expected: int | None = None, lease: int = NO_LEASE) -> int:
        """Write an entry; durable when it returns.

        Args:
            expected: revision that the entry must have, ABSENT if it must not exist; None writes over anything.
            lease: the entry is removed when this lease ends.

        Returns:
            The entry's new revision.

        Raises:
            StaleView: the entry is not as expected; nothing was changed. Load, and decide again.
            LeaseExpired: there is no such lease (any more).
            OutcomeUnknown: with `expected`: the answer did not come. Load, and see.
            InvalidRequest: the name is no path of plain names, or the value exceeds STORE_VALUE_BYTES_MAX.
        """

    async def delete(self, name: str, *, expected: int | None = None) -> bool:
        """Remove an entry; False when there was none. `expected` and errors as for `put`."""

    async def grant(self, *, ttl_ns: int) -> Lease:
        """A lease that ends `ttl_ns` after it was last renewed, or somewhat later. Whole seconds, rounded up."""

    async def renew(self, lease: int) -> Lease:
        """Start the lease's time anew. Raises LeaseExpired when it has ended."""

    async def revoke(self, lease: int) -> None:
        """End a lease, with all its entries, at once. No error when it has ended."""

    def watch(self, image: Image) -> AsyncIterator[tuple[Change, ...]]:
        """Every change after `image`, in order, what happened at once together. Never ends, but may raise.

        Raises:
            StaleView: changes may have been missed, or the store was made anew: load again, and watch from there.
            Unavailable: also when the member that was watched is given up for another.
        """

    async def close(self) -> None:
        """Idempotent. Calls in progress, watches included, end with Closed or Unavailable."""


def checked_name(name: str) -> str:
    """`name`, if it is one. Raises InvalidRequest."""
    if len(name) > STORE_NAME_BYTES_MAX or not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"cluster store name {name!r:.100} is not a path of plain names with at most {STORE_NAME_BYTES_MAX} bytes; "
            "percent-encode what people chose"
        )
    return name


def checked_value(name: str, value: str) -> bytes:
    """`value` as bytes. Raises InvalidRequest when it is too long."""
    content = value.encode()
    if len(content) > STORE_VALUE_BYTES_MAX:
        raise InvalidRequest(f"value of {name!r} has {len(content)} bytes, the limit is {STORE_VALUE_BYTES_MAX}")
    return content


def checked_ttl(ttl_ns: int) -> int:
    """`ttl_ns`, if a lease can be had for it. Raises InvalidRequest."""
    if not LEASE_TTL_NS_MIN <= ttl_ns <= LEASE_TTL_NS_MAX:
        raise InvalidRequest(f"lease of {ttl_ns} ns; it must be from {LEASE_TTL_NS_MIN} to {LEASE_TTL_NS_MAX} ns")
    return ttl_ns
