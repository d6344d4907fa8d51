"""A writer that is killed in the middle of its chunks (case 27): nobody waits for it, and its room comes back."""

from __future__ import annotations

import subprocess
import sys
import time

from kvstore_client import KVClient
from tests.faults.node import ROOT, HurtNode
from tests.faults.orphan_maker import CHUNK_BYTES, COUNT, TTL_S
from tests.faults.shelf import Shelf, reasons

PATIENCE_S = 30.0


def test_a_killed_writer_leaves_nothing_behind(node: HurtNode) -> None:
    node.start()
    command = [sys.executable, "-m", "tests.faults.orphan_maker", node.address]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None
        assert maker.stdout.readline() == "written\n"
        assert node.number("kvstore_open_writers") == COUNT
        maker.kill()
    with KVClient.connect(node.address) as client:
        shelf = Shelf(client, count=COUNT, chunk_bytes=CHUNK_BYTES)
        assert shelf.hits() == [], "half a chunk is visible"
        began = time.monotonic()
        results = shelf.put(deadline_s=PATIENCE_S)
        assert reasons(results) == {"Stored"}, f"after {time.monotonic() - began:.1f} s, owner ttl {TTL_S} s"
        assert shelf.hits() == list(range(COUNT))
    assert node.number("kvstore_open_writers") == 0
    assert node.number("kvstore_orphan_puts") == COUNT
    live_bytes = node.number("kvstore_live_bytes")
    node.kill()
    check = node.check()
    assert check.status == 0, check.report
    node.start()
    assert node.number("kvstore_live_bytes") == live_bytes
