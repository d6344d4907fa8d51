"""How long a load will take, from how long loads took. Pure code; time is an argument."""

from __future__ import annotations

from typing import Final

from kvstore.limits import MS_NS, SECOND_NS

_WEIGHT: Final = 0.2
_SAMPLE_NS_MIN: Final = MS_NS
_FIRST_RATE: Final = 500_000_000  # bytes per second, until something was measured: a modest SSD
_LATENCY_NS: Final = MS_NS // 5  # until the first byte
_MEMORY_RATE: Final = 5_000_000_000


class LoadEstimator:
    """Moving averages of the drive's read rate while it is busy, and of the share that is read from memory."""

    def __init__(self) -> None:
        self._rate = float(_FIRST_RATE)
        self._memory_share = 0.0
        self._read_bytes = 0
        self._sample_bytes = 0
        self._sample_ns = 0
        self._last_ns = 0
        self._busy = False

    def observe(self, *, read_bytes: int, busy: bool, now_ns: int) -> None:
        """Called once in each turn; idle time does not count against the drive.

        Args:
            read_bytes: read from the drive ever.
            busy: reads are in flight now.
        """
        if self._busy:
            self._sample_bytes += read_bytes - self._read_bytes
            self._sample_ns += now_ns - self._last_ns
            if self._sample_ns >= _SAMPLE_NS_MIN and self._sample_bytes:
                self._rate += _WEIGHT * (self._sample_bytes * SECOND_NS / self._sample_ns - self._rate)
                self._sample_bytes = self._sample_ns = 0
        self._busy, self._last_ns, self._read_bytes = busy, now_ns, read_bytes

    def served(self, *, from_memory: int, records: int) -> None:
        """Of so many records asked for, so many were in memory."""
        if records:
            self._memory_share += _WEIGHT * (from_memory / records - self._memory_share)

    def load_ns(self, length_bytes: int) -> int:
        """Expected time until so many bytes are in node memory, sent one after the other; 0 for none."""
        if not length_bytes:
            return 0
        cold = 1.0 - self._memory_share
        drive_ns = cold * (_LATENCY_NS + length_bytes * SECOND_NS / max(self._rate, 1.0))
        memory_ns = self._memory_share * length_bytes * SECOND_NS / _MEMORY_RATE
        return int(drive_ns + memory_ns)


class DayMeter:
    """Bytes written in the last 24 hours, from a counter that only grows. An hour coarse."""

    _HOUR_NS: Final = 3600 * SECOND_NS

    def __init__(self, now_ns: int) -> None:
        self._samples = [(now_ns, 0)]

    def last_day(self, total_bytes: int, now_ns: int) -> int:
        """Note the counter and answer its growth since a day ago, or since the start."""
        samples = self._samples
        if now_ns - samples[-1][0] >= self._HOUR_NS:
            samples.append((now_ns, total_bytes))
        while len(samples) > 1 and now_ns - samples[1][0] >= 24 * self._HOUR_NS:
            samples.pop(0)
        return total_bytes - samples[0][1]
