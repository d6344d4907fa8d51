"""Memory of clients is unmapped in a thread of its own: 1 GiB takes up to .4 s, which the loop must not wait for.

The last view of a mapping may go anywhere on the loop: with a region, with a connection, or with a read of the drive.
So views are given out of memory that somebody else owns, and its owner is told when the last of them is gone.
"""

from __future__ import annotations

import logging
import mmap
import queue
import threading
import weakref
from collections.abc import Callable

import numpy as np

from kvstore.limits import SECOND_NS
from kvstore.transport.shm import mapped_at, unmap

log = logging.getLogger(__name__)


class Unmapper:
    """The thread, which runs from the first `start` to `close`."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[tuple[mmap.mmap, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread if it does not run. Raises RuntimeError when the machine gives none."""
        if self._thread is None or not self._thread.is_alive():
            made = threading.Thread(target=self._run, name="kvstore-shm-unmapper", daemon=True)
            made.start()
            self._thread = made

    def lend(self, mapped: mmap.mmap, on_unmapped: Callable[[], None]) -> memoryview:
        """All of a mapping, which ends when no view of it is left; `on_unmapped` is called in the thread then."""
        lent = np.asarray(_Lent(mapped))
        weakref.finalize(lent, self._waiting.put, (mapped, on_unmapped)).atexit = False
        return lent.data

    def close(self, *, within_ns: int) -> None:
        """Unmaps what nobody views any more and ends the thread. Idempotent.

        Args:
            within_ns: what is left after that goes with the process.
        """
        self._waiting.put(None)
        if self._thread is None:
            self._run()
            return
        self._thread.join(within_ns / SECOND_NS)
        self._thread = None

    def _run(self) -> None:
        while (found := self._waiting.get()) is not None:
            mapped, on_unmapped = found
            try:
                unmap(mapped)
            except (OSError, BufferError) as error:  # it goes with the process, and counts until then
                log.error("memory of a client could not be unmapped", exc_info=error)
            else:
                on_unmapped()
            del found, mapped, on_unmapped  # or they would stay until the next comes


class _Lent:
    """Shows numpy a mapping without holding it: who views it must not be its owner."""

    def __init__(self, mapped: mmap.mmap) -> None:
        self.__array_interface__ = {
            "data": (mapped_at(mapped), False),
            "shape": (len(mapped),),
            "typestr": "|u1",
            "version": 3,
        }
