"""When a drive is called suspect or failed."""

from __future__ import annotations

import errno

import pytest

from kvstore.device.health import DriveHealth, HealthMonitor, is_permanent

EIO = OSError(errno.EIO, "read of 4096 bytes at 0: Input/output error")


def monitor() -> HealthMonitor:
    return HealthMonitor(failed_after=3, suspect_ns=100)


def test_one_error_makes_a_suspect_and_time_clears_it() -> None:
    health = monitor()
    transition = health.note_error(EIO, 50)
    assert transition is not None
    assert (transition.before, transition.after, transition.at_ns) == (DriveHealth.OK, DriveHealth.SUSPECT, 50)
    assert health.note_success(149) is None
    assert health.health is DriveHealth.SUSPECT
    cleared = health.note_success(150)
    assert cleared is not None
    assert cleared.after is DriveHealth.OK


def test_errors_in_a_row_fail_the_drive() -> None:
    health = monitor()
    for now in range(3):
        health.note_error(EIO, now)
    assert health.health is DriveHealth.FAILED
    assert "3 errors in a row" in health.transitions[-1].reason
    assert health.note_error(EIO, 5) is None


def test_a_bad_spot_does_not_fail_the_drive() -> None:
    health = monitor()
    for now in range(100):
        health.note_error(EIO, now)
        health.note_success(now)
    assert health.health is DriveHealth.SUSPECT


def test_a_failed_drive_comes_back_by_what_it_does() -> None:
    health = monitor()
    for _ in range(3):
        health.note_error(EIO, 0)
    health.note_success(21)
    assert health.health is DriveHealth.SUSPECT
    health.note_success(121)
    assert [t.after for t in health.transitions] == [
        DriveHealth.SUSPECT,
        DriveHealth.FAILED,
        DriveHealth.SUSPECT,
        DriveHealth.OK,
    ]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EINVAL, errno.EAGAIN, errno.EINTR, errno.ENOMEM])
def test_errors_that_are_not_the_drives(code: int) -> None:
    assert not is_permanent(OSError(code, ""))
    health = monitor()
    for now in range(10):
        health.note_error(OSError(code, ""), now)
    assert health.health is DriveHealth.OK
