"""Registered memory: the caller's on the client's side, kept for the next call; and what the node knows of it.

Registering pins pages and costs far more than a transfer, so regions are kept by the memory's owner. What the caller
frees must not stay registered (the pages of a new mapping at the same address would be other ones): an entry lives no
longer than its owner, by a weak reference, and memory without an owner is registered for one call only.
"""

from __future__ import annotations

import errno
import os
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np

from kvstore.errors import InvalidRequest, Overloaded, Unavailable
from kvstore.limits import REGION_CACHE_BYTES_DEFAULT, REGIONS_PER_CONNECTION_MAX
from kvstore.transport.rdma.verbs import MemoryRegion, VerbsFailure
from kvstore.transport.rdma_regions import MEMLOCK_WORDS
from kvstore.transport.regions import RegionTable
from kvstore.wire.pairs import RegionDescriptor
from kvstore.wire.shared import PLACE_GOES_ON, Place


def address_of(view: memoryview) -> int:
    """Where a flat view of bytes begins; it may be read-only, but not empty."""
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


def owner_of(view: memoryview) -> object | None:
    """The object whose end is the end of the memory; None when that cannot be watched.

    A numpy array that shows another's memory is not its owner: the last of its `base` chain is.
    """
    owner: object = view.obj
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    if isinstance(owner, memoryview):
        return owner_of(owner)
    if isinstance(owner, np.ndarray) and not owner.flags.owndata:
        return None  # memory that somebody lent it
    try:
        weakref.ref(owner)
    except TypeError:
        return None
    return owner


def _extent_of(owner: object) -> tuple[int, int] | None:
    """Address and length of all its memory; None for an object that does not show it as one flat buffer."""
    try:
        with memoryview(owner) as whole:  # type: ignore[arg-type]
            return (address_of(whole), whole.nbytes) if whole.c_contiguous and whole.nbytes else None
    except (TypeError, ValueError, BufferError):
        return None


class Registrar(Protocol):
    """Registers memory of this process: a device, for the access that is wanted."""

    def __call__(self, address: int, length_bytes: int) -> MemoryRegion: ...


class HeldMemory:
    """Registered memory that is in use, as regions that follow each other.

    Attributes:
        descriptors: of its regions, in order of address.
    """

    __slots__ = ("_begin", "_piece_bytes", "descriptors", "is_kept", "length_bytes", "regions", "users")

    def __init__(
        self, begin: int, length_bytes: int, piece_bytes: int, regions: list[tuple[int, MemoryRegion]]
    ) -> None:
        self._begin = begin
        self._piece_bytes = piece_bytes
        self.length_bytes = length_bytes
        self.regions = regions
        self.users = 0
        self.is_kept = False
        self.descriptors = [
            RegionDescriptor(number, region.address, region.length_bytes, region.remote_key)
            for number, region in regions
        ]

    def deregister(self) -> None:
        """The device touches it no more. Idempotent."""
        for _, region in self.regions:
            region.close()

    def covers(self, address: int, length_bytes: int) -> bool:
        """Whether those bytes lie inside."""
        return self._begin <= address and address + length_bytes <= self._begin + self.length_bytes

    def places(self, address: int, length_bytes: int) -> list[Place]:
        """Those bytes, cut where regions meet; without PLACE_GOES_ON."""
        found = []
        at = address - self._begin
        while length_bytes > 0:
            number, offset = divmod(at, self._piece_bytes)
            take = min(length_bytes, self._piece_bytes - offset)
            found.append(Place(self.regions[number][0], offset, take))
            at += take
            length_bytes -= take
        return found


class RegionCache:
    """The client's registered memory, the least recently used of what nobody uses going first over the bound.

    Thread-safe.
    """

    def __init__(
        self,
        register: Registrar,
        *,
        region_bytes_max: int,
        bytes_max: int = REGION_CACHE_BYTES_DEFAULT,
        on_close: Callable[[Sequence[int]], None],
    ) -> None:
        """
        Args:
            register: the device's.
            region_bytes_max: longer memory is cut into regions of this length.
            bytes_max: registered at once, in use or not.
            on_close: told the ids of regions that are no more; the node should forget them.
        """
        assert region_bytes_max > 0
        self._register = register
        self._region_bytes_max = region_bytes_max
        self._bytes_max = bytes_max
        self._on_close = on_close
        self._kept: OrderedDict[int, HeldMemory] = OrderedDict()  # by id() of the owner, oldest use first
        self._watches: dict[int, weakref.ref[object]] = {}
        self._ended: deque[tuple[int, HeldMemory]] = deque()  # freed, and still listed
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._next_id = 1
        self.registered_bytes = 0
        self.registered_count = 0
        self.hits = 0
        self.misses = 0

    def hold(self, view: memoryview) -> HeldMemory:
        """The memory of a buffer, with all that its owner shows of it where that is known. Give it to `release`.

        Raises as `hold_address`.
        """
        address, length = address_of(view), len(view)
        owner = owner_of(view)
        if owner is None:
            return self.hold_address(address, length)
        key = id(owner)
        with self._changing():
            known = self._kept.get(key)
            if known is not None and known.covers(address, length):
                self._kept.move_to_end(key)
                self.hits += 1
            else:
                if known is not None:
                    self._forget(key)  # another view of it: what follows covers both
                known = self._keep(key, owner, address, length)
            known.users += 1
            return known

    def hold_address(self, address: int, length_bytes: int) -> HeldMemory:
        """Memory that nobody here owns, for one call. Give it to `release`.

        Raises:
            Overloaded: all that may be registered is in use.
            Unavailable: the system refuses; the text names the limit and the fix.
        """
        with self._changing():
            held = self._new(address, length_bytes)
            held.users = 1
            return held

    def release(self, held: HeldMemory) -> None:
        """The call is over, and nobody moves its bytes any more."""
        with self._changing():
            held.users -= 1
            assert held.users >= 0
            if not held.users and not held.is_kept:
                self._close(held)

    def close(self) -> None:
        """Deregisters everything; nothing may be in use."""
        with self._changing():
            for key in list(self._kept):
                self._forget(key)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Holds the lock; memory that has been freed before, or is meanwhile, is let go of."""
        try:
            with self._lock:
                self._drop_ended()
                yield
        finally:
            self._let_go()

    def _keep(self, key: int, owner: object, address: int, length_bytes: int) -> HeldMemory:
        whole = _extent_of(owner)
        if whole is not None and whole[1] <= self._bytes_max // 2:
            begin, length = whole
            if begin <= address and address + length_bytes <= begin + length:
                address, length_bytes = whole
        held = self._new(address, length_bytes)
        held.is_kept = True
        self._kept[key] = held

        def ended(_: object) -> None:
            # called anywhere, also in a thread that holds the lock, and in a forked child, whose devices these are not
            if os.getpid() == self._pid:
                if not held.users:
                    held.deregister()
                self._ended.append((key, held))
                self._let_go()

        self._watches[key] = weakref.ref(owner, ended)
        return held

    def _let_go(self) -> None:
        """Drops what has been freed, unless somebody holds the lock: then he will."""
        while self._ended and self._lock.acquire(blocking=False):
            try:
                self._drop_ended()
            finally:
                self._lock.release()

    def _drop_ended(self) -> None:
        while self._ended:
            key, held = self._ended.popleft()
            if self._kept.get(key) is held:
                self._forget(key)

    def _new(self, address: int, length_bytes: int) -> HeldMemory:
        self.misses += 1
        self._make_room(length_bytes)
        piece = self._region_bytes_max
        regions: list[tuple[int, MemoryRegion]] = []
        try:
            for at in range(0, length_bytes, piece):
                region = self._register(address + at, min(piece, length_bytes - at))
                regions.append((self._next_id, region))
                self._next_id += 1
        except VerbsFailure as failure:
            for _, region in regions:
                region.close()
            raise explained(failure, length_bytes, self.registered_bytes) from None
        self.registered_bytes += length_bytes
        self.registered_count += len(regions)
        return HeldMemory(address, length_bytes, piece, regions)

    def _make_room(self, length_bytes: int) -> None:
        count = -(-length_bytes // self._region_bytes_max)
        if length_bytes > self._bytes_max or count > REGIONS_PER_CONNECTION_MAX:
            raise Overloaded(
                f"{length_bytes} bytes are {count} regions; at most {self._bytes_max} bytes in "
                f"{REGIONS_PER_CONNECTION_MAX} regions may be registered: pass less at once, or raise the bound"
            )
        for key in [key for key, held in self._kept.items() if not held.users]:
            if self._fits(length_bytes, count):
                return
            self._forget(key)
        if not self._fits(length_bytes, count):
            raise Overloaded(
                f"{self.registered_bytes} registered bytes are in use, {length_bytes} more would be over "
                f"{self._bytes_max}: wait for calls in progress"
            )

    def _fits(self, length_bytes: int, count: int) -> bool:
        fits_bytes = self.registered_bytes + length_bytes <= self._bytes_max
        return fits_bytes and self.registered_count + count <= REGIONS_PER_CONNECTION_MAX

    def _forget(self, key: int) -> None:
        held = self._kept.pop(key, None)
        self._watches.pop(key, None)
        if held is not None:
            held.is_kept = False
            if not held.users:
                self._close(held)

    def _close(self, held: HeldMemory) -> None:
        held.deregister()
        self.registered_bytes -= held.length_bytes
        self.registered_count -= len(held.regions)
        self._on_close([number for number, _ in held.regions])


class ClientRegions:
    """What a node knows of one client's regions. The client's device has the last word on every access."""

    __slots__ = ("_table",)

    def __init__(self) -> None:
        self._table: RegionTable[RegionDescriptor] = RegionTable(regions_max=REGIONS_PER_CONNECTION_MAX)

    def __len__(self) -> int:
        return len(self._table)

    def learn(self, descriptors: Sequence[RegionDescriptor]) -> None:
        """New regions, or newer ones. Raises InvalidRequest for one that is none, Overloaded for too many."""
        for one in descriptors:
            if not one.length_bytes or one.address + one.length_bytes > 1 << 64 or one.region >= PLACE_GOES_ON:
                raise InvalidRequest(f"region {one.region} of {one.length_bytes} bytes at {one.address:#x} is none")
            self._table.drop(one.region)
            self._table.check_new(one.region)
            self._table.add(one.region, one, one.length_bytes)

    def forget(self, regions: Sequence[int]) -> None:
        """Regions that are no more."""
        for region in regions:
            self._table.drop(region)

    def resolve(self, place: Place) -> tuple[int, int, int]:
        """Address, length and remote key of a place. Raises InvalidRequest: unknown, or longer than its region."""
        known = self._table.find(place)
        return known.address + place.offset, place.length_bytes, known.remote_key


def explained(failure: VerbsFailure, length_bytes: int, registered_bytes: int) -> Unavailable:
    """A refusal as people can act on it: ENOMEM may be each of three limits."""
    if failure.errno not in (errno.ENOMEM, errno.EAGAIN, errno.EPERM):
        return failure
    return Unavailable(
        f"{length_bytes} bytes cannot be registered beside {registered_bytes} ({failure}): the locked memory limit, or "
        f"the device's max_mr and max_mr_size; {MEMLOCK_WORDS}. `kvstore doctor` shows which"
    )
