"""What the log keeps for other nodes: deletes that are remembered, and how many copies a namespace asks for."""

from __future__ import annotations

import struct

import numpy as np

from kvstore.device.memory import MemoryDevice
from kvstore.engine.api import NamespaceRef
from kvstore.engine.logrecord import Drop, Reason, Tombstone, encode_drop, encode_tombstone
from kvstore.engine.namespaces import index_key, index_keys
from kvstore.limits import MiB
from kvstore.testing.store_rig import StoreRig, rig_manifest
from kvstore.types.results import MissReason

KEYS = [bytes([at]) * 32 for at in range(1, 5)]
PLAIN_TOMBSTONE = struct.Struct("<BBHIQQ16s")
PLAIN_DROP = struct.Struct("<BBHII4x")


def delete(rig: StoreRig, ref: NamespaceRef, *keys: bytes) -> bytes:
    answers: list[bytes] = []
    rig.ledger.delete(ref, index_keys(ref, b"".join(keys)), answers.append)
    rig.settle(lambda: bool(answers))
    return answers[0]


def test_a_tombstone_that_nobody_remembers_has_the_bytes_that_it_always_had() -> None:
    plain = Tombstone(key=bytes(range(16)), generation=77, page=40, segment=3, reason=Reason.DELETE)
    assert encode_tombstone(plain) == PLAIN_TOMBSTONE.pack(2, 1, 40, 3, 77, 40, bytes(range(16)))


def test_an_older_program_reads_a_remembered_one_as_reaching_further() -> None:
    kept = Tombstone(key=bytes(16), generation=77, page=40, segment=3, reason=Reason.DELETE, namespace=5)
    page = PLAIN_TOMBSTONE.unpack(encode_tombstone(kept))[5]
    assert page & 0xFFFF_FFFF == 40
    assert page > 40


def test_an_older_program_reads_a_number_of_copies_as_a_drop_to_the_present_generation() -> None:
    assert PLAIN_DROP.unpack(encode_drop(7, 3, copies=2))[3:] == (7, 3)
    assert encode_drop(7, 3) == PLAIN_DROP.pack(4, 0, 16, 7, 3)
    assert Drop(id=7, generation=3) == Drop(id=7, generation=3, copies=0)


def test_graves_and_copies_survive_restarts_and_checkpoints() -> None:
    device = MemoryDevice(size_bytes=64 * MiB)
    rig = StoreRig(device)
    rig.ledger.graves.enabled = True
    ref = rig.namespace()
    rig.ledger.add_namespace(rig_manifest("rig"), copies=3)
    rig.put(ref, KEYS[0], b"x" * 5000)
    assert delete(rig, ref, KEYS[0]) == b"\0"
    assert delete(rig, ref, KEYS[1]) == bytes([MissReason.ABSENT]), "not here, but remembered"
    for number in range(200):  # each is a log block: the halves change places several times
        delete(rig, ref, (number + 1).to_bytes(32, "little"))
    rig.put(ref, KEYS[0], b"y" * 5000)
    for life in range(2):
        rig = StoreRig(device, now_ns=rig.now_ns)
        again = rig.store.namespaces.by_digest(ref.digest)
        assert again is not None
        assert (again.generation, rig.store.namespaces.copies(ref.digest)) == (1, 3), f"life {life}"
        graves = rig.ledger.graves
        assert [index_key(again, key) in graves for key in KEYS] == [True, True, False, False]
        assert rig.catalog.lookup(index_keys(again, KEYS[0]))[0], "what was put behind its delete lives"
        assert len(graves) == 202


def test_a_drop_goes_to_the_generation_that_others_have_and_keeps_the_copies() -> None:
    device = MemoryDevice(size_bytes=64 * MiB)
    rig = StoreRig(device)
    ref = rig.ledger.add_namespace(rig_manifest("rig"), copies=2)
    rig.put(ref, KEYS[0], b"x" * 5000)
    done: list[object] = []
    fresh = rig.ledger.drop_namespace(ref, done.append, generation=9)
    rig.settle(lambda: bool(done))
    assert fresh.generation == 9
    rig = StoreRig(device, now_ns=rig.now_ns)
    again = rig.store.namespaces.by_digest(ref.digest)
    assert again is not None
    assert (again.generation, rig.store.namespaces.copies(ref.digest)) == (9, 2)
    assert not np.any(rig.catalog.lookup(index_keys(again, KEYS[0])))
