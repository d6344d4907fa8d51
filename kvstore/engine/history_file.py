"""What became of keys, kept beside the drive's file over restarts, so that a miss can say why afterwards too.

It is told to people and decides nothing: it is written now and then and at the end, not synced, and one that is damaged
or of another drive is passed over. What went in the last HISTORY_SAVE_NS before a kill is not in it. A raw block device
has no folder and so no such file: after a start its misses are "never written, or gone before".
"""

from __future__ import annotations

import logging
import os
import struct
import threading
from pathlib import Path
from typing import Final

from kvstore.engine.history import History
from kvstore.limits import HISTORY_BYTES_MAX, HISTORY_SAVE_NS
from kvstore.types.checksum import crc32c

HISTORY_FILE: Final = "kvstore.history"

_HEAD = struct.Struct("<4sII16s")  # magic, CRC of all behind it, access tick when it was written, disk id
_MAGIC: Final = b"KVH1"
_CRC_END: Final = 8

_log = logging.getLogger(__name__)


def encode_history(events: bytes, *, tick: int, disk_id: bytes) -> bytes:
    """The file's bytes. `events` are `History.dump`'s."""
    body = _HEAD.pack(_MAGIC, 0, tick, disk_id)[_CRC_END:] + events
    return _MAGIC + struct.pack("<I", crc32c(body)) + body


def decode_history(data: bytes, disk_id: bytes) -> tuple[int, bytes] | None:
    """(tick, events) of a whole file of this disk, else None."""
    if len(data) < _HEAD.size:
        return None
    magic, crc, tick, disk = _HEAD.unpack_from(data)
    if magic != _MAGIC or disk != disk_id or crc != crc32c(data[_CRC_END:]):
        return None
    return tick, data[_HEAD.size :]


class HistoryFile:
    """Loads a history at the start, and saves it in the background while it changes.

    Attributes:
        tick: access tick at which what was loaded had been saved; 0 without.
    """

    def __init__(self, path: Path | None, history: History, *, disk_id: bytes) -> None:
        """Load what is there.

        Args:
            path: None keeps nothing.
        """
        self._path = path
        self._history = history
        history.is_kept = path is not None
        self._disk_id = disk_id
        self._saved = history.noted
        self._next_ns = 0
        self._writing: threading.Thread | None = None
        self.tick = 0
        if path is not None:
            self._load(path)

    def _load(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                found = decode_history(file.read(HISTORY_BYTES_MAX), self._disk_id)
        except FileNotFoundError:
            return
        except OSError as error:
            _log.warning("%s cannot be read (%s): misses of what went before are told as absent", path, error)
            return
        if found is None or not self._history.restore(found[1]):
            _log.warning("%s is damaged or of another drive: misses of what went before are told as absent", path)
            return
        self.tick = found[0]
        self._saved = self._history.noted

    def poll(self, now_ns: int, tick: int) -> None:
        """Save if it is due and something went. Never blocks: a thread writes."""
        if self._path is None or now_ns < self._next_ns or self._saved == self._history.noted:
            return
        if self._writing is not None and self._writing.is_alive():
            return
        self._next_ns = now_ns + HISTORY_SAVE_NS
        self._begin(self._path, tick)

    def _begin(self, path: Path, tick: int) -> None:
        self._saved = self._history.noted
        data = encode_history(self._history.dump(), tick=tick, disk_id=self._disk_id)
        self._writing = threading.Thread(target=_write, args=(path, data), name="history", daemon=True)
        self._writing.start()

    def close(self, tick: int, *, within_s: float) -> None:
        """Save what has gone since the last time, for at most so long."""
        if self._writing is not None:
            self._writing.join(within_s)
        if self._path is not None and self._saved != self._history.noted:
            self._begin(self._path, tick)
        if self._writing is not None:
            self._writing.join(within_s)


def _write(path: Path, data: bytes) -> None:
    fresh = path.with_name(f"{path.name}.new")
    try:
        fresh.write_bytes(data)
        os.replace(fresh, path)
    except OSError as error:
        _log.warning("%s cannot be written (%s): a restart will not know what went", path, error)
