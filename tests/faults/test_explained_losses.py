"""Whatever was acknowledged and is gone: `kvstore explain` names the rule that took it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

from kvstore.types.results import Hit
from kvstore_client import KVClient
from tests.faults.node import ROOT, HurtNode
from tests.faults.shelf import Shelf, reasons
from tests.faults.test_damaged_disk import data_file, flip, place_of

COUNT = 384
CHUNK_BYTES = 256 * 1024
DELETED = range(370, 375)
DAMAGED = 380


def explained(node: HurtNode, shelf: Shelf, chunks: list[int]) -> dict[int, str]:
    """What explain says of chunks."""
    digests = [key.digest.hex() for key in (shelf.keys[at] for at in chunks)]
    command = [sys.executable, "-m", "kvstore", "explain", "--json", "--node", node.address]
    command += ["--namespace", shelf.store.digest.hex(), *digests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    found = {entry["key"]: entry["text"] for entry in answer["namespaces"][0]["keys"]}
    return {at: found[digest] for at, digest in zip(chunks, digests, strict=True)}


def test_every_loss_has_a_name(tmp_path: Path) -> None:
    with HurtNode(tmp_path, capacity="64MiB", cache="0") as node, KVClient.connect(node.start()) as client:
        shelf = Shelf(client, count=COUNT, chunk_bytes=CHUNK_BYTES, chained=False)
        for at in range(0, COUNT, 8):
            assert reasons(shelf.put(at, at + 8)) == {"Stored"}
        deleted = shelf.store.delete(shelf.keys[DELETED.start : DELETED.stop])
        assert all(isinstance(result, Hit) for result in deleted)
        file = data_file(node)
        flip(file, place_of(file, shelf.payload(DAMAGED)) + 1000)

        hits = set(shelf.hits())
        gone = [at for at in range(COUNT) if at not in hits]
        told = explained(node, shelf, gone)
        named = {at: text.split()[0] for at, text in told.items()}
        assert {at for at, name in named.items() if name == "deleted"} == set(DELETED)
        assert {at for at, name in named.items() if name == "quarantined"} == {DAMAGED}
        rest = Counter(named[at] for at in gone if at != DAMAGED and at not in DELETED)
        assert set(rest) == {"evicted"}, told
        assert rest["evicted"] >= COUNT - 256, "96 MiB were put where 64 have room"
        assert explained(node, shelf, [COUNT - 1])[COUNT - 1].startswith("stored")
