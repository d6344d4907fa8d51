"""Memory of this process that nodes on the same host may write to and read from: what `alloc` gives.

A node that is told to read from its drive into a place may still do so after the call has ended: the deadline passed,
the connection broke, the node was killed while its drive was at work. So the places of a call that ended like that are
taken away from it: other pages are put where they were, and the old ones are the node's alone from then on. What a
caller sees in a buffer after a call is his, whatever a drive does later.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final
from weakref import WeakSet

from kvstore.limits import DETACHED_RANGES_MAX, PAGE_BYTES
from kvstore.transport.shm import create_memory

_MAP_FIXED: Final = 0x10  # mmap(2)
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14
_FAILED: Final = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)


class Allocation:
    """One memfd, mapped here.

    Attributes:
        number: no other allocation of this process has it.
        fd: to hand to nodes; closed when the memory is freed. -1 for pages that no node can reach.
        address, length_bytes: of the mapping; whole pages. No bytes once the memory is freed.
        patches: what has been put in place of parts of it, newest last.
    """

    __slots__ = ("address", "fd", "length_bytes", "number", "patches")

    def __init__(self, number: int, fd: int, address: int, length_bytes: int) -> None:
        self.number = number
        self.fd = fd
        self.address = address
        self.length_bytes = length_bytes
        self.patches: list[Allocation] = []

    def holder(self, address: int, length_bytes: int) -> Allocation | None:
        """This one, or the patch, that all of these bytes are of; None when that is no single one."""
        end = address + length_bytes
        for patch in reversed(self.patches):
            if patch.address <= address and end <= patch.address + patch.length_bytes:
                return patch if patch.fd >= 0 else None
            if patch.address < end and address < patch.address + patch.length_bytes:
                return None
        return self


class _Area(mmap.mmap):
    """A mapping that tells before it ends: afterwards other memory may lie at its address."""

    on_freed: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self.on_freed is not None:
            self.on_freed()


class SharedMemory:
    """All allocations of one client in one process. Thread-safe.

    Attributes:
        numbers: of all that there are.
        changes: counts what may change where an address is found.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended: deque[Allocation] = deque()  # freed, and still listed
        self._starts: list[int] = []
        self._by_start: list[Allocation] = []
        self._count = 0
        self.changes = 0
        self.numbers: frozenset[int] = frozenset()
        self._bounded: WeakSet[_Area] = WeakSet()
        self._bounded_lock = threading.Lock()

    def allocate(self, length_bytes: int, *, prefault: bool) -> memoryview | None:
        """Memory of `length_bytes`, above 0, freed with the last view of it; None when the system gives none."""
        whole = -(-length_bytes // PAGE_BYTES) * PAGE_BYTES
        try:
            fd = create_memory(whole)
        except OSError:
            return None
        try:
            area = _Area(fd, whole, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        except (OSError, ValueError):
            os.close(fd)
            return None
        if prefault:
            try:
                area.madvise(_MADV_POPULATE_WRITE)
            except OSError:
                pass  # an older kernel: the pages are there, and are mapped at their first use
        one = self._add(fd, ctypes.addressof(ctypes.c_char.from_buffer(area)), whole)
        area.on_freed = partial(self._freed, one)
        return memoryview(area)[:length_bytes]

    def allocate_bounded(self, length_bytes: int, *, bytes_max: int) -> memoryview | None:
        """As `allocate`, of pages that are there; None too where those so allocated would be more than `bytes_max`."""
        with self._bounded_lock:
            if sum(map(len, self._bounded)) + length_bytes > bytes_max:
                return None
            view = self.allocate(length_bytes, prefault=True)
            if view is not None:
                assert isinstance(view.obj, _Area), "a view of what was mapped"
                self._bounded.add(view.obj)
            return view

    def find(self, address: int, length_bytes: int) -> tuple[Allocation, int] | None:
        """The allocation that holds these bytes, and their offset in it."""
        starts, found = self._starts, self._by_start  # replaced as a whole, never changed
        at = bisect_right(starts, address) - 1
        if at < 0 or address + length_bytes > found[at].address + found[at].length_bytes:
            return None
        one = found[at].holder(address, length_bytes) if found[at].patches else found[at]
        return None if one is None else (one, address - one.address)

    def detach(self, address: int, length_bytes: int) -> None:
        """Puts new pages where these are, whose contents are lost: no node can write to what stands there from now on.

        The new pages can be shared again, under another number.

        Args:
            address, length_bytes: whole pages of an allocation that is in use.

        Raises:
            MemoryError: The kernel cannot: nodes may still write there.
        """
        with self._changing():
            at = bisect_right(self._starts, address) - 1
            parent = self._by_start[at]
            fd = -1
            if len(parent.patches) < DETACHED_RANGES_MAX:
                try:
                    fd = create_memory(length_bytes)
                except OSError:
                    pass  # private pages will do
            flags = mmap.MAP_SHARED if fd >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            access = mmap.PROT_READ | mmap.PROT_WRITE
            if _libc.mmap(address, length_bytes, access, flags | _MAP_FIXED, fd, 0) in (_FAILED, None):
                why = os.strerror(ctypes.get_errno())
                if fd >= 0:
                    os.close(fd)
                raise MemoryError(f"{length_bytes} bytes of memory cannot be taken back from a node: {why}")
            self._count += 1
            parent.patches = [
                *(one for one in parent.patches if not _is_inside(one, address, length_bytes)),
                Allocation(self._count, fd, address, length_bytes),
            ]
            self._replace(self._by_start)

    def _add(self, fd: int, address: int, length_bytes: int) -> Allocation:
        with self._changing():
            self._count += 1
            one = Allocation(self._count, fd, address, length_bytes)
            self._replace([*self._by_start, one])
        return one

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Holds the lock; what has been freed, or is meanwhile, is not listed before and behind it."""
        try:
            with self._lock:
                self._drop_ended()
                yield
        finally:
            self._forget_ended()

    def _freed(self, one: Allocation) -> None:
        """The garbage collector calls this anywhere, also in a thread that holds the lock: it must not wait for it."""
        one.length_bytes = 0  # found no more
        self.changes += 1
        self._ended.append(one)
        self._forget_ended()

    def _forget_ended(self) -> None:
        """Drops what has been freed, unless somebody holds the lock: then he will."""
        while self._ended and self._lock.acquire(blocking=False):
            try:
                self._drop_ended()
            finally:
                self._lock.release()

    def _drop_ended(self) -> None:
        ended: list[Allocation] = []
        while self._ended:
            ended.append(self._ended.popleft())
        if not ended:
            return
        self._replace([other for other in self._by_start if other not in ended])
        for one in ended:
            for freed in (one, *one.patches):
                if freed.fd >= 0:
                    os.close(freed.fd)

    def _replace(self, allocations: Sequence[Allocation]) -> None:
        ordered = sorted(allocations, key=lambda one: one.address)
        self._by_start, self._starts = ordered, [one.address for one in ordered]
        self.changes += 1
        self.numbers = frozenset(one.number for parent in ordered for one in (parent, *parent.patches))


def address_of(view: memoryview) -> int:
    """Where the bytes of a view that may be written, not empty, lie."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _is_inside(one: Allocation, address: int, length_bytes: int) -> bool:
    """Whether all of a patch lies under a new one; its descriptor is closed then."""
    if not (address <= one.address and one.address + one.length_bytes <= address + length_bytes):
        return False
    if one.fd >= 0:
        os.close(one.fd)
    return True
