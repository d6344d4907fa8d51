"""Keeps a node full: puts ever new large chunks beside the audited load, so that the node evicts all the time."""

from __future__ import annotations

import threading
import time
from typing import Final

from kvstore.types.results import Stored
from kvstore_client import KVClient
from tests.faults.shelf import Shelf

CHUNK_BYTES: Final = 256 * 1024
BATCH: Final = 8
CHUNKS: Final = 512
PAUSE_S: Final = 0.05
DEADLINE_S: Final = 5.0


class Filler:
    """A thread between `start` and `stop`, again and again. `faults`: wrong bytes, exceptions."""

    def __init__(self, address: str) -> None:
        self.faults: list[str] = []
        self._client = KVClient.connect(address)
        self._shelves = 0
        self._at = CHUNKS
        self._shelf: Shelf
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def fill(self, length_bytes: int) -> None:
        """Puts so much now."""
        stored = 0
        while stored < length_bytes:
            stored += CHUNK_BYTES * self._put()

    def start(self) -> None:
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, name="filler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(30 + DEADLINE_S)
            assert not self._thread.is_alive(), "the filler hangs in a call"

    def close(self) -> None:
        self._client.close()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                if self._put():
                    self._shelf.get(max(0, self._at - 2 * BATCH), self._at, deadline_s=DEADLINE_S)
                else:
                    time.sleep(PAUSE_S)
        except Exception as error:  # noqa: BLE001 -- the root of a thread
            self.faults.append(f"filler: {type(error).__name__}: {error}")

    def _put(self) -> int:
        """Puts a batch; how many were stored."""
        if self._at + BATCH > CHUNKS:
            self._shelves += 1
            self._at = 0
            self._shelf = Shelf(
                self._client, count=CHUNKS, chunk_bytes=CHUNK_BYTES, name=f"filler {self._shelves}", chained=False
            )
        self._at += BATCH
        results = self._shelf.put(self._at - BATCH, self._at, deadline_s=DEADLINE_S)
        return sum(isinstance(result, Stored) for result in results)
