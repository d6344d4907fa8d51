"""The embedded cluster store: one JSON file and one process; no server needed."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Final

from kvstore.cluster.node_file import replace_file
from kvstore.cluster.store import NO_LEASE, Change, Entry, Image, Lease, checked_name, checked_ttl, checked_value
from kvstore.errors import Closed, FormatUnsupported, LeaseExpired, Overloaded, StaleView, Unavailable
from kvstore.limits import SECOND_NS, STORE_ENTRIES_MAX

_VERSION: Final = 1
_BACKLOG_MAX: Final = 4_096
"""Changes that a slow watcher may be behind by; then it must load again."""


class FileClusterStore:
    """A `ClusterStore` in a file. Entries under a lease are not written: they cannot outlive the process anyhow.

    Not for threads: all calls come from one event loop. A second process is refused while this one has it open.

    Args:
        path: Its folder must exist.
        clock: Monotonic nanoseconds.

    Raises:
        Unavailable: the file cannot be read or written, or another process has it.
        FormatUnsupported: the file is not ours, or of a newer version.
    """

    def __init__(self, path: Path, *, clock: Callable[[], int]) -> None:
        self._path = path
        self._clock = clock
        self._lock = _lock(path)
        try:
            self._store_id, self._revision, self._entries = _read(path)
            self._leases: dict[int, tuple[int, int]] = {}  # id -> ttl_ns, ends at
            self._watchers: set[_Watcher] = set()
            self._lease_count = 0
            self._closed = False
            self._save(self._entries)
        except BaseException:
            os.close(self._lock)
            raise

    async def load(self) -> Image:
        """See `ClusterStore`."""
        self._tick()
        return Image(store_id=self._store_id, revision=self._revision, entries=dict(self._entries))

    async def put(self, name: str, value: str, *, expected: int | None = None, lease: int = NO_LEASE) -> int:
        """See `ClusterStore`."""
        checked_value(name, value)
        self._tick()
        self._check(checked_name(name), expected)
        if lease != NO_LEASE and lease not in self._leases:
            raise LeaseExpired(f"lease {lease} has ended; register again")
        if name not in self._entries and len(self._entries) >= STORE_ENTRIES_MAX:
            raise Overloaded(f"cluster store {self._path} has {STORE_ENTRIES_MAX} entries, which is the limit")
        entry = Entry(value=value, revision=self._revision + 1, lease=lease)
        self._apply([Change(name=name, entry=entry)])
        return entry.revision

    async def delete(self, name: str, *, expected: int | None = None) -> bool:
        """See `ClusterStore`."""
        self._tick()
        self._check(checked_name(name), expected)
        if name not in self._entries:
            return False
        self._apply([Change(name=name, entry=None)])
        return True

    async def grant(self, *, ttl_ns: int) -> Lease:
        """See `ClusterStore`."""
        granted_ns = -(-checked_ttl(ttl_ns) // SECOND_NS) * SECOND_NS
        self._tick()
        self._lease_count += 1
        self._leases[self._lease_count] = (granted_ns, self._clock() + granted_ns)
        self._wake()
        return Lease(id=self._lease_count, ttl_ns=granted_ns)

    async def renew(self, lease: int) -> Lease:
        """See `ClusterStore`."""
        self._tick()
        if lease not in self._leases:
            raise LeaseExpired(f"lease {lease} has ended; register again")
        ttl_ns, _ = self._leases[lease]
        self._leases[lease] = (ttl_ns, self._clock() + ttl_ns)
        return Lease(id=lease, ttl_ns=ttl_ns)

    async def revoke(self, lease: int) -> None:
        """See `ClusterStore`."""
        self._tick()
        if self._leases.pop(lease, None) is not None:
            self._end([lease])

    async def watch(self, image: Image) -> AsyncIterator[tuple[Change, ...]]:
        """See `ClusterStore`."""
        self._tick()
        if image.store_id != self._store_id or image.revision > self._revision:
            raise StaleView(f"cluster store {self._path} was made anew; load it again")
        watcher = _Watcher()
        watcher.offer(self._since(image))
        self._watchers.add(watcher)
        try:
            while True:
                while watcher.waiting:
                    yield watcher.waiting.popleft()
                watcher.woken.clear()
                await self._pause(watcher)
                self._tick()
                if watcher.is_behind:
                    raise StaleView(f"watcher of {self._path} is more than {_BACKLOG_MAX} changes behind; load again")
        finally:
            self._watchers.discard(watcher)

    async def close(self) -> None:
        """See `ClusterStore`."""
        if not self._closed:
            self._closed = True
            os.close(self._lock)
            self._wake()

    def _since(self, image: Image) -> tuple[Change, ...]:
        """What differs from `image`, as one change of everything."""
        now, then = self._entries, image.entries
        written = [Change(name=name, entry=entry) for name, entry in now.items() if then.get(name) != entry]
        return (*written, *(Change(name=name, entry=None) for name in then if name not in now))

    async def _pause(self, watcher: _Watcher) -> None:
        """Until something changes, or a lease ends by time."""
        ends_ns = min((ends for _, ends in self._leases.values()), default=None)
        try:
            async with asyncio.timeout(None if ends_ns is None else max(0, ends_ns - self._clock()) / SECOND_NS):
                await watcher.woken.wait()
        except TimeoutError:
            pass

    def _wake(self) -> None:
        for watcher in self._watchers:
            watcher.woken.set()

    def _tick(self) -> None:
        """Ends leases whose time is over; every call begins with it."""
        if self._closed:
            raise Closed(f"cluster store {self._path} is closed")
        now_ns = self._clock()
        ended = [lease for lease, (_, ends_ns) in self._leases.items() if ends_ns <= now_ns]
        for lease in ended:
            del self._leases[lease]
        self._end(ended)

    def _end(self, leases: Iterable[int]) -> None:
        ended = set(leases)
        gone = [Change(name=name, entry=None) for name, entry in self._entries.items() if entry.lease in ended]
        if gone:
            self._apply(gone)

    def _check(self, name: str, expected: int | None) -> None:
        entry = self._entries.get(name)
        revision = entry.revision if entry is not None else 0
        if expected is not None and revision != expected:
            raise StaleView(f"{name} of the cluster store has revision {revision}, not {expected}; load it again")

    def _apply(self, changes: list[Change]) -> None:
        entries = dict(self._entries)
        for change in changes:
            if change.entry is None:
                entries.pop(change.name, None)
            else:
                entries[change.name] = change.entry
        if _kept(entries) != _kept(self._entries):
            self._save(entries)
        self._entries = entries
        self._revision += 1
        for watcher in self._watchers:
            watcher.offer(tuple(changes))

    def _save(self, entries: dict[str, Entry]) -> None:
        content = {
            "version": _VERSION,
            "store_id": self._store_id,
            "revision": self._revision + 1,
            "entries": {name: [entry.value, entry.revision] for name, entry in _kept(entries).items()},
        }
        try:
            # the token of peers is in it
            replace_file(self._path, json.dumps(content, indent=1, sort_keys=True).encode(), mode=0o600)
        except OSError as error:
            raise Unavailable(f"cluster store {self._path} cannot be written: {error.strerror}") from error


class _Watcher:
    """One `watch`: what it was not given yet."""

    __slots__ = ("is_behind", "waiting", "woken")

    def __init__(self) -> None:
        self.waiting: deque[tuple[Change, ...]] = deque()
        self.woken = asyncio.Event()
        self.is_behind = False

    def offer(self, changes: tuple[Change, ...]) -> None:
        if changes:
            self.is_behind = self.is_behind or len(self.waiting) >= _BACKLOG_MAX
            if not self.is_behind:
                self.waiting.append(changes)
            self.woken.set()


def _kept(entries: dict[str, Entry]) -> dict[str, Entry]:
    return {name: entry for name, entry in entries.items() if entry.lease == NO_LEASE}


def _lock(path: Path) -> int:
    """A descriptor that holds the lock; the file beside the store, which is replaced and cannot carry one itself."""
    lock_path = path.with_name(f"{path.name}.lock")
    try:
        descriptor = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise Unavailable(f"cluster store {path} cannot be locked: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise Unavailable(f"cluster store {path} is in use by another process; several nodes need etcd") from None
    return descriptor


def _read(path: Path) -> tuple[str, int, dict[str, Entry]]:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return secrets.token_hex(8), 0, {}
    except OSError as error:
        raise Unavailable(f"cluster store {path} cannot be read: {error.strerror}") from error
    try:
        stored = json.loads(content)
        version = stored["version"]
        if version == _VERSION:
            entries = {
                str(name): Entry(value=str(value), revision=int(revision))
                for name, (value, revision) in stored["entries"].items()
            }
            return str(stored["store_id"]), int(stored["revision"]), entries
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise FormatUnsupported(f"cluster store {path} is damaged ({error}); move it away to start anew") from error
    raise FormatUnsupported(f"cluster store {path} has version {version!r}, this program reads {_VERSION}")
