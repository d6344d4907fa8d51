"""Ranks of one request, each a process and a client of its own, are told the same although the store changes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from kvstore.testing.serve_process import ServeProcess
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore_client import Hit, KVClient, Stored

RANKS = 3
CHUNKS = 12
GROUP = bytes(range(16))
NAMESPACE = Namespace(
    tenant="default", model="m", weights="w", layout=KVLayout.opaque(chunk_bytes=10_000, chunk_tokens=4)
)
RANK = """
import sys
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore_client import Hit, KVClient

layout = KVLayout.opaque(chunk_bytes=10_000, chunk_tokens=4)
with KVClient.connect(sys.argv[1]) as client:
    ns = client.namespace(Namespace(tenant="default", model="m", weights="w", layout=layout))
    keys = ns.keys(list(range(4 * int(sys.argv[2]))))
    sys.stdin.readline()
    with ns.match(keys, group=bytes.fromhex(sys.argv[3])) as found:
        memory = [bytearray(1000) for _ in range(found.chunks)]
        hits = sum(isinstance(one, Hit) for one in ns.get_into(keys[: found.chunks], memory))
        print(found.chunks, found.pinned, hits, flush=True)
        sys.stdin.readline()
"""


def test_ranks_that_ask_together_are_told_the_same_and_hold_it(tmp_path: Path) -> None:
    with ServeProcess(tmp_path) as serving:
        address = serving.wait_ready().data[0]
        with KVClient.connect(address) as client:
            ns = client.namespace(NAMESPACE)
            keys = ns.keys(list(range(4 * CHUNKS)))
            payloads = [bytes([at]) * 1000 for at in range(CHUNKS)]
            assert {type(one) for one in ns.put(keys[:6], payloads[:6])} == {Stored}
            command = [sys.executable, "-c", RANK, address, str(CHUNKS), GROUP.hex()]
            ranks = [
                subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=os.environ
                )
                for _ in range(RANKS)
            ]
            try:
                told = []
                for at, rank in enumerate(ranks):
                    assert rank.stdin is not None
                    assert rank.stdout is not None
                    print("go", file=rank.stdin, flush=True)
                    told.append(rank.stdout.readline())
                    # what comes between two ranks that ask must not make them disagree
                    assert isinstance(ns.put(keys[6 + at : 7 + at], payloads[6 + at : 7 + at])[0], Stored)
                assert told == ["6 True 6\n"] * RANKS
                with ns.match(keys) as found:
                    assert found.chunks == 6 + RANKS, "who asks alone is told what is there now"
                assert {type(one) for one in ns.wait(keys[:6])} == {Hit}
            finally:
                for rank in ranks:
                    rank.communicate("done\n", timeout=60)
            assert [rank.returncode for rank in ranks] == [0] * RANKS
