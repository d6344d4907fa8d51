"""Bytes on the drive change behind the node's back: a flipped bit (case 19), a tail that never got there (case 14)."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from kvstore.types.results import Hit, Miss, MissReason
from kvstore_client import KVClient
from tests.faults.audit import audit
from tests.faults.ledger import Ledger
from tests.faults.load import Load, LoadPlan
from tests.faults.node import HurtNode
from tests.faults.shelf import BLOCK_BYTES, Shelf, reasons

COUNT = 24
CHUNK_BYTES = 4 * BLOCK_BYTES
PAGE_BYTES = 4096
_GONE = (Miss(MissReason.CORRUPT), Miss(MissReason.ABSENT))


def data_file(node: HurtNode) -> Path:
    """The file that holds everything."""
    return max((file for file in node.data_dir.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)


def flip(file: Path, offset: int, bit: int = 3) -> None:
    with file.open("r+b", buffering=0) as drive:
        drive.seek(offset)
        byte = drive.read(1)[0]
        drive.seek(offset)
        drive.write(bytes([byte ^ 1 << bit]))


def place_of(file: Path, payload: bytes) -> int:
    """Where a payload lies on the drive."""
    at = file.read_bytes().find(payload)
    assert at >= 0, "the payload is not on the drive"
    return at


@pytest.fixture
def shelf_node(node: HurtNode) -> HurtNode:
    node.start()
    with KVClient.connect(node.address) as client:
        assert reasons(Shelf(client, count=COUNT, chunk_bytes=CHUNK_BYTES).put()) == {"Stored"}
    return node


def test_a_flipped_payload_bit_costs_its_record_alone(shelf_node: HurtNode) -> None:
    with KVClient.connect(shelf_node.address) as client:
        shelf = Shelf(client, count=COUNT, chunk_bytes=CHUNK_BYTES)
        file = data_file(shelf_node)
        flip(file, place_of(file, shelf.payload(5)) + 2 * BLOCK_BYTES + 17)
        assert shelf.get_range(5, 2 * BLOCK_BYTES + 16, 2) == Miss(MissReason.CORRUPT)
        assert shelf.get_range(5, 0, BLOCK_BYTES) in _GONE, "a record is served whole or not at all"
        for _ in range(3):  # no livelock: a damaged record is found once, and is a miss from then on
            assert shelf.hits() == [at for at in range(COUNT) if at != 5]
        assert shelf_node.number("kvstore_quarantined_records") == 1
        assert not shelf.store.contains(shelf.keys[5:6])[0]
        assert reasons(shelf.put(5, 6)) == {"Stored"}, "the place is free for a good copy"
        assert shelf.hits() == list(range(COUNT))


def test_a_whole_read_of_a_flipped_bit_is_a_miss(shelf_node: HurtNode) -> None:
    with KVClient.connect(shelf_node.address) as client:
        shelf = Shelf(client, count=COUNT, chunk_bytes=CHUNK_BYTES)
        file = data_file(shelf_node)
        flip(file, place_of(file, shelf.payload(7)) + CHUNK_BYTES - 1)
        results, _ = shelf.get()
        assert results[7] == Miss(MissReason.CORRUPT)
        assert sum(isinstance(result, Hit) for result in results) == COUNT - 1
        assert shelf_node.number("kvstore_quarantined_records") == 1
    shelf_node.kill()
    shelf_node.start()
    with KVClient.connect(shelf_node.address) as client:
        shelf = Shelf(client, count=COUNT, chunk_bytes=CHUNK_BYTES)
        assert shelf.hits() == [at for at in range(COUNT) if at != 7], "a quarantine outlives a restart"


@pytest.mark.parametrize("offset", [0, 8, 40, 100, 200])
def test_a_flipped_header_bit_gives_the_right_bytes_or_a_miss(shelf_node: HurtNode, offset: int) -> None:
    with KVClient.connect(shelf_node.address) as client:
        shelf = Shelf(client, count=COUNT, chunk_bytes=CHUNK_BYTES)
        file = data_file(shelf_node)
        flip(file, place_of(file, shelf.payload(9)) - PAGE_BYTES + offset)
        assert shelf.hits() in ([at for at in range(COUNT) if at != 9], list(range(COUNT)))
        assert shelf.get_range(9, 0, 100) in _GONE or shelf.hits(9, 10) == [9]


@pytest.mark.parametrize("zeroed_bytes", [4096, 256 * 1024])
def test_a_copy_whose_tail_never_got_to_the_disk(tmp_path: Path, shelf_node: HurtNode, zeroed_bytes: int) -> None:
    with KVClient.connect(shelf_node.address) as client:
        shelf = Shelf(client, count=COUNT, chunk_bytes=CHUNK_BYTES)
        payload = shelf.payload(COUNT - 1)
    shelf_node.kill()
    copied = tmp_path / "copy"
    copied.mkdir()
    copy = HurtNode(copied, cache="0")
    shutil.rmtree(copy.data_dir)
    shutil.copytree(shelf_node.data_dir, copy.data_dir)
    file = data_file(copy)
    end = place_of(file, payload) + len(payload)
    with file.open("r+b") as drive:
        drive.seek(end - zeroed_bytes)
        drive.write(bytes(zeroed_bytes))
    check = copy.check()
    assert check.status != 0, "the offline check saw nothing"
    with copy, KVClient.connect(copy.start()) as client:
        shelf = Shelf(client, count=COUNT, chunk_bytes=CHUNK_BYTES)
        damaged = -(-zeroed_bytes // (CHUNK_BYTES + PAGE_BYTES))
        hits = shelf.hits()
        assert COUNT - 1 not in hits
        assert hits == list(range(len(hits)))
        assert len(hits) >= COUNT - damaged - 1


@pytest.mark.parametrize("seed", range(3))
def test_flips_anywhere_never_give_a_wrong_byte(node: HurtNode, seed: int) -> None:
    """Written by a load, killed, a bit flipped in each of 40 written pages, read back: right bytes or a miss."""
    ledger = Ledger()
    load = Load(node.start(), LoadPlan(seed=seed, put_bytes_max=12 << 20), ledger.apply)
    load.run_for(1.0)
    node.kill()
    file = data_file(node)
    choice = random.Random(seed)
    image = file.read_bytes()
    written = [at for at in range(0, len(image), PAGE_BYTES) if image.count(0, at, at + PAGE_BYTES) < PAGE_BYTES]
    flipped = sorted(at + choice.randrange(PAGE_BYTES) for at in choice.sample(written, 40))
    for offset in flipped:
        flip(file, offset, choice.randrange(8))
    where = f"seed {seed}, flipped at {flipped}"
    assert node.check().status in (0, 1), where
    node.start()
    found = audit(node.address, ledger)
    assert found.wrong == [], where
    lost = len(found.observation.lost) + len(found.observation.lost_synced)
    assert lost < len(ledger.known_keys()) / 2, f"{where}: {found.observation}"
    print(f"{where}: {found.hits} hits, {lost} lost")
