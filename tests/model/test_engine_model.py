"""The engine of one drive against the dict model: restarts, kills, eviction, faults, with and without a RAM cache."""

from __future__ import annotations

import errno
import unittest
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings

from kvstore.device.base import IoKind
from kvstore.device.memory import MemoryDevice
from kvstore.engine.engine import DriveEngine, EngineSettings
from kvstore.limits import PAGE_BYTES, KiB, MiB
from kvstore.testing.dict_engine import DictEngine
from kvstore.testing.engine_model import Subject, machine_of
from kvstore.testing.faulty_device import Fault, FaultAction, FaultyDevice

SIZE = 7 * MiB  # few segments, so that eviction is common
_READ_FAULTS = (FaultAction.FLIP, FaultAction.ERROR, FaultAction.SHORT, FaultAction.MISDIRECTED)
_WRITE_ERRORS = (errno.EIO, errno.ENOSPC)


class DriveSubject:
    """A `DriveEngine` on a drive in memory."""

    can_restart = True

    def __init__(
        self,
        *,
        cache: int = 0,
        staging: int = 4 * MiB,
        can_fail: bool = False,
        fails_writes: bool = False,
        shuffle: bool = False,
    ) -> None:
        self.can_fail = can_fail
        self.fails_writes = fails_writes
        self.settings = EngineSettings(cache_bytes=cache, staging_bytes=staging, prefault=False)
        self.drive = FaultyDevice(MemoryDevice(size_bytes=SIZE), seed=1, shuffle=shuffle)
        self.now_ns = 1
        self.lost_before = 0
        self.engine = DriveEngine(self.drive, self.settings, now_ns=self.now_ns)

    def restart(self, *, crash: bool) -> None:
        self.lost_before = self.lost()
        self.now_ns = self.engine.now_ns
        if not crash:
            self.engine.drain()
            while not self.engine.idle:
                self.now_ns += 1000
                self.engine.poll(self.now_ns)
        self.drive = self.drive.crash()
        self.engine = DriveEngine(self.drive, self.settings, now_ns=self.now_ns)

    def inject(self, number: int) -> None:
        if self.fails_writes and number % 2:
            self._fail_writes(number // 2)
            return
        self.drive.inject(
            Fault(
                action=_READ_FAULTS[number % len(_READ_FAULTS)],
                kind=IoKind.READ,
                skip=number // 7 % 4,
                times=1 + number // 3 % 3,
                keep_bytes=PAGE_BYTES * (number % 5),
                bit=number,
            )
        )

    def _fail_writes(self, number: int) -> None:
        """Some writes or syncs fail, or the file system has no room for another segment."""
        if number % 5 == 0:
            self.drive.full = True
            return
        self.drive.inject(
            Fault(
                action=FaultAction.ERROR,
                kind=IoKind.SYNC if number % 5 == 1 else IoKind.WRITE,
                skip=number // 7 % 4,
                times=1 + number // 3 % 3,
                errno_code=_WRITE_ERRORS[number // 11 % 2],
            )
        )

    def heal(self) -> None:
        self.drive.clear()

    def lost(self) -> int:
        metrics = self.engine.metrics
        return self.lost_before + metrics.evicted_records + metrics.quarantined_records

    def check(self) -> None:
        ledger, catalog = self.engine.store.ledger, self.engine.catalog
        counted = sum(count.pages for live in self.engine.store.table.live for count in live.values()) * PAGE_BYTES
        assert ledger.live_bytes == counted
        assert ledger.live_bytes <= self.drive.allocated_bytes()
        assert catalog.pinned_bytes >= 0
        assert self.engine.metrics.write_amplification <= 2

    def close(self) -> None:
        while not self.engine.idle:
            self.engine.poll(self.engine.now_ns + 1000)
        cache = self.engine.cache
        cache.clear()
        assert cache.arena.used_bytes == 0, "memory leaks"
        assert cache.arena.largest_hole_bytes() == cache.arena.size_bytes
        self.drive.close()


class DictSubject:
    """The double that the data plane is tested with must keep the same contract."""

    can_restart = False
    can_fail = False

    def __init__(self) -> None:
        self.engine = DictEngine()

    def restart(self, *, crash: bool) -> None:
        raise AssertionError("it keeps nothing over a restart")

    def inject(self, number: int) -> None:
        raise AssertionError("it does not fail")

    def heal(self) -> None:
        pass

    def lost(self) -> int:
        return 0

    def check(self) -> None:
        pass

    def close(self) -> None:
        assert self.engine.held_bytes == 0, "memory leaks"


_SETTINGS = settings(max_examples=25, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
_NIGHTLY = settings(_SETTINGS, max_examples=300, stateful_step_count=60)


def _case(make: Callable[[], Subject], chosen: settings) -> type[unittest.TestCase]:
    case = machine_of(make).TestCase
    case.settings = chosen
    return case


def _long(make: Callable[[], Subject]) -> type[unittest.TestCase]:
    case: type[unittest.TestCase] = pytest.mark.nightly(pytest.mark.timeout(1800)(_case(make, _NIGHTLY)))
    return case


def _plain() -> Subject:
    return DriveSubject()


def _cached() -> Subject:
    return DriveSubject(cache=2 * MiB)


def _tight() -> Subject:
    return DriveSubject(cache=512 * KiB, staging=768 * KiB, shuffle=True)


def _failing() -> Subject:
    return DriveSubject(cache=MiB, can_fail=True, shuffle=True)


def _failing_writes() -> Subject:
    return DriveSubject(cache=MiB, can_fail=True, fails_writes=True, shuffle=True)


def _double() -> Subject:
    return DictSubject()


TestDouble = _case(_double, _SETTINGS)
TestPlain = _case(_plain, _SETTINGS)
TestCached = _case(_cached, _SETTINGS)
TestTightMemory = _case(_tight, _SETTINGS)
TestFailing = _case(_failing, _SETTINGS)
TestFailingWrites = _case(_failing_writes, _SETTINGS)
TestPlainLong = _long(_plain)
TestCachedLong = _long(_cached)
TestTightMemoryLong = _long(_tight)
TestFailingLong = _long(_failing)
TestFailingWritesLong = _long(_failing_writes)
