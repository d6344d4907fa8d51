"""Layer-wise writers: any order, any alignment, visible at the commit, gone at the abort."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import Closed, InvalidRequest
from kvstore.types.checksum import crc_table
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore.types.part import Part
from kvstore.types.results import MissReason, RefusedReason
from kvstore.wire.header import FrameType
from kvstore.wire.messages import End, Result, WriterCommit
from kvstore_client import Exists, Hit, KVClient, Miss, Refused, Stored
from kvstore_client.assembly import AssembledRecord
from kvstore_client.regions import Region

LAYOUT = KVLayout(
    chunk_tokens=16,
    dtype="bf16",
    layers=5,
    shards=2,
    parts=(Part(name="kv", entry_bytes=600), Part(name="indexer", entry_bytes=40)),
)
NAMESPACE = Namespace(tenant="default", model="m", weights="w", layout=LAYOUT)
TOKENS = list(range(64))
KV_LAYER, INDEXER_LAYER = 16 * 300, 16 * 20
SHARD = 5 * (KV_LAYER + INDEXER_LAYER)


@pytest.fixture
def ns(node):
    with KVClient.connect(node.address) as client:
        yield client.namespace(NAMESPACE)


def noise(length: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(length)


@settings(deadline=None)
@given(st.integers(0, 20_000), st.sampled_from([4096, 4800, 9000]), st.data())
def test_pieces_in_any_order_make_the_record(length: int, block: int, data: st.DataObject) -> None:
    payload = noise(length, length)
    cuts = sorted({0, length, *data.draw(st.lists(st.integers(0, length), max_size=8))})
    stretches = data.draw(st.permutations(list(itertools.pairwise(cuts))))
    record = AssembledRecord(item=0, length_bytes=length, block_bytes=block)
    sent = bytearray(length)
    for low, high in stretches:
        assert not record.is_complete
        middle = (low + high) // 2
        region = Region([memoryview(payload)[low:middle], memoryview(payload)[middle:high]])
        for piece in record.add(low, region, 0, high - low):
            assert piece.offset % block == 0
            bytes_now = b"".join(piece.views)
            assert piece.crcs == crc_table(bytes_now, block)
            assert piece.length_bytes == len(bytes_now)
            sent[piece.offset : piece.offset + len(bytes_now)] = bytes_now
    assert record.is_complete
    assert sent == payload
    assert record.crc_table == crc_table(payload, block)


def test_bytes_written_twice_or_outside_are_refused() -> None:
    record = AssembledRecord(item=3, length_bytes=10_000, block_bytes=4096)
    region = Region([memoryview(bytes(10_000))])
    record.add(100, region, 0, 50)
    for offset, length in ((100, 1), (149, 10), (90, 11), (0, 4096), (0, 10_000)):
        with pytest.raises(InvalidRequest, match="item 3 were written before"):
            record.add(offset, region, 0, length)
    record.add(4096, region, 0, 4096)
    with pytest.raises(InvalidRequest, match="written before"):
        record.add(5000, region, 0, 1)
    with pytest.raises(InvalidRequest, match="outside its record of 10000"):
        record.add(9999, region, 0, 2)
    assert record.missing_blocks == 2


def test_layer_by_layer_from_two_shard_writers(ns, node) -> None:
    keys = ns.keys(TOKENS)
    chunks = [noise(2 * SHARD, at) for at in range(4)]
    for shard in (0, 1):
        with ns.writer(keys, shards=shard) as writer:
            for layer in (2, 0, 4, 1, 3):
                for index in range(4):
                    mine = chunks[index][shard * SHARD : (shard + 1) * SHARD]
                    kv = mine[layer * KV_LAYER : (layer + 1) * KV_LAYER]
                    at = 5 * KV_LAYER + layer * INDEXER_LAYER
                    writer.write(index, [kv, mine[at : at + INDEXER_LAYER]], layer=layer)
            assert ns.contains(keys, shards=shard) == [False] * 4
            with ns.match(keys, shards=shard) as found:
                assert (found.pending, found.reason) == (4, MissReason.PENDING)
            results = writer.commit()
        assert all(isinstance(one, Stored) and one.durable for one in results)
    memory = [bytearray(2 * SHARD) for _ in range(4)]
    assert all(isinstance(one, Hit) for one in ns.get_into(keys, memory))
    assert [bytes(one) for one in memory] == chunks
    assert not node.pending


def test_one_part_of_a_layer_at_a_time_over_all_shards(ns) -> None:
    keys = ns.keys(TOKENS[:16])
    chunk = noise(2 * SHARD)
    with ns.writer(keys) as writer:
        for layer in range(5):
            pieces = [chunk[s * SHARD + layer * KV_LAYER :][:KV_LAYER] for s in (0, 1)]
            writer.write(0, pieces, layer=layer, part="kv")
        for layer in range(5):
            at = 5 * KV_LAYER + layer * INDEXER_LAYER
            writer.write(0, [chunk[s * SHARD + at :][:INDEXER_LAYER] for s in (0, 1)], layer=layer, part="indexer")
        assert isinstance(writer.commit(wait="durable")[0], Stored)
    memory = bytearray(2 * SHARD)
    ns.get_into(keys, [memory])
    assert memory == chunk


def test_an_abort_leaves_nothing(ns, node) -> None:
    keys = ns.keys(TOKENS)
    with ns.writer(keys) as writer:
        writer.write(0, noise(2 * SHARD))
        assert writer.statuses == [Refused(RefusedReason.PENDING, "not committed yet")] * 4
    assert not node.writers
    assert ns.contains(keys) == [False] * 4
    writer.abort()
    with pytest.raises(Closed):
        writer.write(0, noise(2 * SHARD))
    with pytest.raises(Closed):
        writer.commit()


def test_a_commit_with_holes_stores_the_whole_ones(ns, node) -> None:
    keys = ns.keys(TOKENS[:48])
    ns.put(keys[2:], [noise(2 * SHARD, 9)])
    with ns.writer(keys) as writer:
        writer.write(0, noise(2 * SHARD, 1), offset=0)
        writer.write(1, noise(100), offset=0)
        writer.write(2, noise(2 * SHARD, 3), offset=0)
        results = writer.commit()
    assert isinstance(results[0], Stored)
    assert isinstance(results[1], Refused)
    assert results[1].reason is RefusedReason.INVALID
    assert "blocks were not written" in results[1].detail
    assert results[2] == Exists()
    assert ns.contains(keys) == [True, False, True]
    memory = bytearray(2 * SHARD)
    ns.get_into(keys[2:], [memory])
    assert memory == noise(2 * SHARD, 9), "the first commit has won"
    assert not node.writers


def test_a_writer_does_not_survive_the_nodes_restart(ns, node) -> None:
    keys = ns.keys(TOKENS[:32])
    writer = ns.writer(keys)
    writer.write(0, noise(2 * SHARD, 1))
    node.restart()
    node.pending.clear()
    ns.contains(keys)
    writer.write(1, noise(2 * SHARD, 2))
    results = writer.commit()
    assert {type(one) for one in results} == {Refused}
    assert ns.contains(keys) == [False, False]


@pytest.mark.parametrize("restarts", [False, True])
def test_what_a_commit_came_to_that_was_not_answered_is_unknown(ns, node, restarts) -> None:
    """The node may have committed: that it knows the writers no more says nothing against it."""
    with ns.writer(ns.keys(TOKENS[:16])) as writer:
        writer.write(0, noise(2 * SHARD, 1))
        told = []

        def script(link, frame) -> bool:
            if frame.type is not FrameType.WRITER_COMMIT:
                return False
            told.append(frame)
            if len(told) == 1:
                node.restart() if restarts else link.kill()
                raise ConnectionError
            count = len(WriterCommit.decode(frame.body).writer_ids) // 4
            items = b"".join(at.to_bytes(4, "little") for at in range(count))
            link.send(frame, Result(items=items, statuses=bytes([RefusedReason.DEADLINE]) * count))
            link.send(frame, End())
            return True

        node.script = script
        assert [one.reason for one in writer.commit()] == [RefusedReason.OUTCOME_UNKNOWN]
        assert len(told) == (1 if restarts else 2)


def test_wrong_memory_is_refused_before_any_io(ns, node) -> None:
    with ns.writer(ns.keys(TOKENS[:16])) as writer:
        before = len(node.calls)
        for arguments in (
            {"layer": 0, "offset": 0},
            {"layer": 9},
            {"layer": 0, "part": "none"},
            {"part": "kv"},
            {"offset": 2 * SHARD - 1},
            {"offset": -1},
            {"layer": 0},
        ):
            with pytest.raises(InvalidRequest):
                writer.write(0, bytes(17), **arguments)
        with pytest.raises(InvalidRequest, match="item 1 lies outside"):
            writer.write(1, bytes(17))
        assert len(node.calls) == before


def test_opaque_chunks_have_lengths(node, opaque) -> None:
    with KVClient.connect(node.address) as client:
        ns = client.namespace(opaque)
        keys = ns.keys(TOKENS[:48])
        with pytest.raises(InvalidRequest, match="length of item 2 is 300001"):
            ns.writer(keys, lengths=[0, 1, 300_001])
        with ns.writer(keys, lengths=[0, 5, 100_000]) as writer:
            writer.write(1, b"hello")
            for at in range(0, 100_000, 9_000):
                writer.write(2, noise(100_000)[at : at + 9_000], offset=at)
            assert all(isinstance(one, Stored) for one in writer.commit())
        memory = [bytearray(1), bytearray(5), bytearray(100_000)]
        assert [one.length_bytes for one in ns.get_into(keys, memory)] == [0, 5, 100_000]
        assert memory[1:] == [b"hello", noise(100_000)]


def test_a_writer_without_a_node_refuses_and_never_raises(node) -> None:
    with KVClient.connect(node.address) as client:
        ns = client.namespace(NAMESPACE)
        keys = ns.keys(TOKENS[:16])
        writer = ns.writer(keys)
        node.stop()
        writer.write(0, noise(2 * SHARD))
        assert {type(one) for one in writer.commit()} == {Refused}
        assert ns.get_into(keys, [bytearray(2 * SHARD)]) == [Miss(MissReason.UNAVAILABLE)]
