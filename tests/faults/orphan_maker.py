"""python -m tests.faults.orphan_maker ADDRESS: opens writers, writes half of each, says so, and waits to be killed."""

from __future__ import annotations

import signal
import sys
from typing import Final

from kvstore_client import KVClient
from tests.faults.shelf import Shelf

COUNT: Final = 32
CHUNK_BYTES: Final = 256 * 1024
TTL_S: Final = 2.0


def main(address: str) -> None:
    """Never returns."""
    client = KVClient.connect(address)
    shelf = Shelf(client, count=COUNT, chunk_bytes=CHUNK_BYTES)
    writer = shelf.store.writer(shelf.keys, lengths=[CHUNK_BYTES] * COUNT, ttl=TTL_S)
    for at in range(COUNT):
        writer.write(at, shelf.payload(at)[: CHUNK_BYTES // 2], offset=0)
    print("written", flush=True)
    signal.pause()


if __name__ == "__main__":
    main(sys.argv[1])
