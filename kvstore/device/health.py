"""Is this drive to be trusted? Counting permanent I/O errors, as pure code; time is an argument."""

from __future__ import annotations

import errno
from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import Final

from kvstore.limits import DEVICE_FAILED_AFTER_ERRORS, DEVICE_SUSPECT_NS

_PERMANENT: Final = frozenset(
    (
        errno.EIO,
        errno.ENXIO,
        errno.ENODEV,
        errno.EROFS,
        errno.EREMOTEIO,
        errno.ENODATA,  # critical medium error, block/blk-core.c
        errno.EILSEQ,  # protection error, block/blk-core.c
        errno.ETIMEDOUT,
        errno.ESHUTDOWN,
        errno.EUCLEAN,  # the file system found itself damaged
    )
)
_TRANSITIONS_KEPT: Final = 16


def is_permanent(error: OSError) -> bool:
    """True for errors of the drive itself. ENOSPC, EINVAL and the like say nothing about its health."""
    return error.errno in _PERMANENT


class DriveHealth(Enum):
    """How a drive has behaved."""

    OK = "ok"
    SUSPECT = "suspect"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """One change of health.

    Attributes:
        at_ns: when, on the caller's clock.
        before: health until then.
        after: health from then on.
        reason: what happened, for people.
    """

    at_ns: int
    before: DriveHealth
    after: DriveHealth
    reason: str


class HealthMonitor:
    """Health of one drive.

    ok -> suspect at the first permanent error; suspect -> ok when an operation succeeds and the last error is
    `suspect_ns` ago; suspect -> failed after `failed_after` permanent errors with no success between them;
    failed -> suspect when an operation succeeds.

    Args:
        failed_after: errors in a row that mark the drive failed.
        suspect_ns: quiet time after which a suspect drive is trusted again.
    """

    def __init__(
        self,
        *,
        failed_after: int = DEVICE_FAILED_AFTER_ERRORS,
        suspect_ns: int = DEVICE_SUSPECT_NS,
    ) -> None:
        self.health = DriveHealth.OK
        self.transitions: deque[Transition] = deque(maxlen=_TRANSITIONS_KEPT)
        self._failed_after = failed_after
        self._suspect_ns = suspect_ns
        self._errors_in_a_row = 0
        self._last_error_ns = 0

    def note_success(self, now_ns: int) -> Transition | None:
        """An operation moved its bytes. Cheap while the drive is ok."""
        self._errors_in_a_row = 0
        if self.health is DriveHealth.OK:
            return None
        if self.health is DriveHealth.FAILED:
            self._last_error_ns = now_ns
            return self._go(DriveHealth.SUSPECT, now_ns, "an operation succeeded")
        if now_ns - self._last_error_ns >= self._suspect_ns:
            return self._go(DriveHealth.OK, now_ns, f"no error for {self._suspect_ns} ns")
        return None

    def note_error(self, error: OSError, now_ns: int) -> Transition | None:
        """An operation failed; errors that are not the drive's own are passed over."""
        if not is_permanent(error):
            return None
        self._errors_in_a_row += 1
        self._last_error_ns = now_ns
        if self.health is DriveHealth.FAILED:
            return None
        if self._errors_in_a_row >= self._failed_after:
            return self._go(DriveHealth.FAILED, now_ns, f"{self._errors_in_a_row} errors in a row, the last: {error}")
        if self.health is DriveHealth.OK:
            return self._go(DriveHealth.SUSPECT, now_ns, str(error))
        return None

    def _go(self, after: DriveHealth, now_ns: int, reason: str) -> Transition:
        transition = Transition(at_ns=now_ns, before=self.health, after=after, reason=reason)
        self.health = after
        self.transitions.append(transition)
        return transition
