"""Queue pairs are destroyed in a thread of their own: it may take long, and whoever owns the loop must not wait for it.

A queue pair that is to go is put into the error state first, at once, so that it moves nothing new; what was posted is
flushed then. Destroying it says for certain that no device touches any memory for it. A device that refuses is asked
again: until then the queue pair counts as being there.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import deque

from kvstore.limits import PAIR_DESTROY_AGAIN_NS
from kvstore.transport.rdma.pair_queue import PairQueue
from kvstore.transport.rdma.verbs import QueuePair, VerbsFailure

log = logging.getLogger(__name__)


class Dying:
    """A queue pair on its way out.

    Attributes:
        number: the device's.
        queue: its transfers that have not ended: whose memory a device may still write to.
        posted: work requests that it held room for.
    """

    __slots__ = ("_is_gone", "_was_refused", "number", "pair", "posted", "queue")

    def __init__(self, pair: QueuePair, transfers: PairQueue) -> None:
        self.pair = pair
        self.number = pair.number
        self.queue = transfers
        self.posted = transfers.posted
        self._is_gone = threading.Event()
        self._was_refused = False

    def wait(self, within_ns: int) -> bool:
        """Until it is destroyed; False when that takes longer."""
        return self._is_gone.wait(within_ns / 1e9)

    def destroy(self) -> bool:
        """Does so; False when the device refuses, which is said once."""
        try:
            self.pair.close()
        except VerbsFailure as failure:
            if not self._was_refused:
                log.warning("a queue pair that is not used any more stays for now, with its memory: %s", failure)
            self._was_refused = True
            return False
        return True

    def tell(self) -> None:
        """It is destroyed, and `Closer.take` gives it."""
        self._is_gone.set()


class Closer:
    """The thread, which begins with the first queue pair and ends with `close`."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Dying | None] = queue.SimpleQueue()
        self._gone: deque[Dying] = deque()
        self._thread: threading.Thread | None = None
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Readable when `take` has something to give."""
        return self._event

    def destroy(self, dying: Dying) -> None:
        """Destroys it, after those that wait already."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvstore-rdma-closer", daemon=True)
            self._thread.start()
        self._waiting.put(dying)

    def take(self) -> list[Dying]:
        """Those that have been destroyed since the last time."""
        try:
            os.eventfd_read(self._event)
        except BlockingIOError:
            return []
        return [self._gone.popleft() for _ in range(len(self._gone))]

    def close(self) -> None:
        """Ends the thread; nothing may wait. Idempotent."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()
            self._thread = None
        if self._event >= 0:
            os.close(self._event)
            self._event = -1

    def _run(self) -> None:
        refused: deque[tuple[Dying, int]] = deque()  # in the order of when to ask again
        while True:
            wait_s = max(0, refused[0][1] - time.monotonic_ns()) / 1e9 if refused else None
            try:
                dying = self._waiting.get(timeout=wait_s)
            except queue.Empty:
                dying, _ = refused.popleft()
            if dying is None:
                return
            if not dying.destroy():
                refused.append((dying, time.monotonic_ns() + PAIR_DESTROY_AGAIN_NS))
                continue
            self._gone.append(dying)
            os.eventfd_write(self._event, 1)
            dying.tell()
