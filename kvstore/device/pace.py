"""How many bytes of reads a drive is given at one time. Nothing here does I/O.

A drive that answers each operation when it has ended needs no more than what it moves while we look. Some answer
otherwise: the host of a virtual one takes all that it finds, carries it out, and tells of all of it at once. Such a
drive stands still from there until it has been given more, so it is given more at one time. What that costs others is
that they wait for longer behind it, which is why it holds only while one flow class alone uses the drive, and for a
while has: a single read that comes now and then is not to be the one that waits.
"""

from __future__ import annotations

from kvstore.limits import (
    DRIVE_ALONE_NS,
    DRIVE_BYTES_AT_FIRST,
    DRIVE_BYTES_IN_FLIGHT_MAX,
    DRIVE_BYTES_IN_GROUPS_MAX,
    DRIVE_LAST_GROUP_BYTES,
)


class Pace:
    """Of one drive."""

    def __init__(self) -> None:
        self._bytes_max = 0  # 0 of an idle drive
        self._kept_bytes = 0  # until something has ended
        self._shared_ns = -DRIVE_ALONE_NS  # when several flow classes last used it

    def bytes_max(self, waiting_bytes: int) -> int:
        """How many bytes may be on the drive.

        An idle one gets a quarter of what waits: the first bytes are then on their way to who asked while the next are
        read.
        """
        if not self._bytes_max:
            self._bytes_max = min(max(DRIVE_BYTES_AT_FIRST, waiting_bytes // 4), DRIVE_BYTES_IN_FLIGHT_MAX)
        return self._bytes_max

    def kept_back(self, waiting_bytes: int, room_bytes: int) -> int:
        """How many of the bytes that wait are for the next time, though there is room for all.

        A drive that tells of all at once gets the last bytes by themselves: so there is little to be done with them
        when the last of them have come.
        """
        is_last = DRIVE_LAST_GROUP_BYTES < waiting_bytes <= room_bytes
        if is_last and self._bytes_max > DRIVE_BYTES_IN_FLIGHT_MAX and not self._kept_bytes:
            self._kept_bytes = waiting_bytes // 4
        return self._kept_bytes

    def shared(self, now_ns: int) -> None:
        """Several flow classes use the drive."""
        self._shared_ns = now_ns

    def answered(self, *, stands: bool, now_ns: int) -> None:
        """Some operations have ended. `stands` when none are left on the drive, though more wait."""
        is_alone = now_ns - self._shared_ns >= DRIVE_ALONE_NS
        bound = DRIVE_BYTES_IN_GROUPS_MAX if stands and is_alone else DRIVE_BYTES_IN_FLIGHT_MAX
        self._bytes_max = min(2 * self._bytes_max, bound)
        self._kept_bytes = 0

    def rested(self) -> None:
        """Nothing is on the drive, and nothing waits."""
        self._bytes_max = self._kept_bytes = 0
