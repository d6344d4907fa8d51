"""Which file a store lies in, and whether it can still be found: another one may lie under its path later, or none."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

from kvstore.engine.drive import data_file


class StoreFile:
    """The file of one drive's store.

    A thread asks the file system: one that hangs, on a drive that died or over a network, must not hold the worker's
    loop. It waits for the next question for as long as the process lives, from the first one on.
    """

    def __init__(self, path: Path, found: os.stat_result, look: Callable[[Path], os.stat_result] = os.stat) -> None:
        """
        Args:
            path: where it is.
            found: what lay there when the store was opened.
            look: asks the file system; tests hand in one that hangs.
        """
        self.path = path
        self._identity = (found.st_dev, found.st_ino)
        self._look = look
        self._is_there = True
        self._is_asked = False
        self._questions: SimpleQueue[None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    @classmethod
    def of(cls, drive: str) -> StoreFile | None:
        """That of a drive as it is now; None for a raw device, and where it cannot be asked for."""
        path = data_file(drive)
        try:
            found = path.stat()
        except OSError:
            return None
        return cls(path, found) if stat.S_ISREG(found.st_mode) else None

    def is_there(self) -> bool:
        """Whether it could be found when last looked for, True where that cannot be told; has it looked for again."""
        if not self._is_asked:  # the last question may not be answered yet
            if self._thread is None and not self._starts():
                return self._is_there
            self._is_asked = True
            self._questions.put(None)
        return self._is_there

    def _starts(self) -> bool:
        made = threading.Thread(target=self._answer, name="kvstore-store-file", daemon=True)
        try:
            made.start()
        except RuntimeError:  # no thread is to be had now
            return False
        self._thread = made
        return True

    def _answer(self) -> None:
        while True:
            self._questions.get()
            self._is_there = self._finds_it()
            self._is_asked = False

    def _finds_it(self) -> bool:
        try:
            found = self._look(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True
        return (found.st_dev, found.st_ino) == self._identity
