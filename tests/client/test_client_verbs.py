"""Every verb of the client against a node on a real socket."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvstore.errors import Closed, InvalidRequest
from kvstore.types.layout import KVLayout, ShardAxis
from kvstore.types.namespace import Namespace
from kvstore.types.part import Part, PartKind, Retention
from kvstore.types.results import MissReason, RefusedReason
from kvstore.wire.codec import pack_plain
from kvstore.wire.header import FrameType
from kvstore_client import Exists, Hit, KVClient, Miss, Refused, Stored

TOKENS = list(range(16 * 40))
KV_LAYOUT = KVLayout(
    chunk_tokens=16,
    dtype="bf16",
    layers=6,
    shards=2,
    parts=(
        Part(name="kv", entry_bytes=512),
        Part(name="indexer", entry_bytes=32),
        Part(name="state", entry_bytes=1000, entries=1, kind=PartKind.SPARSE),
        Part(name="swa", entry_bytes=64, entries=16, kind=PartKind.SPARSE, retention=Retention.VOLATILE, ttl_ns=10**9),
    ),
)
KV = Namespace(tenant="default", model="org/m", weights="sha256:1", layout=KV_LAYOUT)


@pytest.fixture
def client(node):
    with KVClient.connect(node.address) as made:
        yield made


def noise(length: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(length)


def test_a_match_says_what_it_is(client, opaque) -> None:
    ns = client.namespace(opaque)
    keys = ns.keys(TOKENS[:64])
    ns.put(keys[:2], [noise(100)] * 2)
    with ns.match(keys) as found:
        assert repr(found) == "<Match of 32 tokens in 2 chunks, then absent, pinned>"
    assert repr(found).endswith("not pinned>")
    with ns.match(keys[:2]) as whole:
        assert ", all matched, " in repr(whole)


def test_put_and_get_of_all_sizes(client, node, opaque) -> None:
    ns = client.namespace(opaque)
    sizes = [0, 1, 511, 512, 513, 4095, 4096, 4097, 65536, 65537, 300_000]
    keys = ns.keys(TOKENS[: 16 * len(sizes)])
    payloads = [noise(size, size) for size in sizes]
    results = ns.put(keys, payloads)
    assert all(isinstance(one, Stored) and one.durable for one in results)
    assert list(ns.put(keys, payloads)) == [Exists()] * len(sizes)
    for skew in (0, 1, 511):
        memories = [bytearray(size + skew) for size in sizes]
        views = [memoryview(memory)[skew:] for memory in memories]
        loaded = ns.get_into(keys, views)
        assert [one.length_bytes for one in loaded] == sizes
        assert [bytes(view) for view in views] == payloads
        assert all(bytes(memory[:skew]) == bytes(skew) for memory in memories)
    assert node.count(FrameType.MANIFEST) == 1


def test_large_items_are_granted_and_come_in_slices(client, node) -> None:
    layout = KVLayout.opaque(chunk_bytes=5_000_000, chunk_tokens=16)
    ns = client.namespace(Namespace(tenant="default", model="big", weights="w", layout=layout))
    keys = ns.keys(TOKENS[:64])
    payloads = [noise(size, size) for size in (5_000_000, 1_048_576, 3, 2_097_153)]
    assert all(isinstance(one, Stored) for one in ns.put(keys, payloads, wait="received"))
    memory = [bytearray(len(payload)) for payload in payloads]
    assert all(isinstance(one, Hit) for one in ns.get_into(keys, memory))
    assert [bytes(one) for one in memory] == payloads


def test_received_is_not_durable(client, opaque) -> None:
    ns = client.namespace(opaque)
    (result,) = ns.put(ns.keys(TOKENS[:16]), [b"abc"], wait="received")
    assert isinstance(result, Stored)
    assert not result.durable
    with pytest.raises(InvalidRequest, match="wait is 'soon'; use one of: received, durable"):
        ns.put(ns.keys(TOKENS[:16]), [b"abc"], wait="soon")


def test_empty_batches(client, opaque) -> None:
    ns = client.namespace(opaque)
    none = ns.keys([])
    assert ns.put(none, []) == []
    assert ns.get_into(none, []) == []
    assert ns.contains(none) == []
    assert ns.wait(none, 1) == []
    assert ns.delete(none) == []
    assert ns.prefetch(none) == 0
    with ns.match(none) as found:
        assert (found.chunks, found.tokens, found.boundary, found.reason) == (0, 0, 0, None)


def test_duplicates_and_a_wrong_length_in_one_batch(client, opaque, node) -> None:
    """[a, b, a, c] where b exists and c is too long: every item has its own status."""
    ns = client.namespace(opaque)
    keys = ns.keys(TOKENS[:48])
    assert isinstance(ns.put(keys[1:2], [b"bb"])[0], Stored)
    batch = [keys[0], keys[1], keys[0], keys[2]]
    results = ns.put(batch, [b"a", b"bb", b"a", bytes(300_001)])
    assert isinstance(results[0], Stored)
    assert results[1:3] == [Exists(), Exists()]
    assert isinstance(results[3], Refused)
    assert results[3].reason is RefusedReason.INVALID
    assert "item 3 has 300001 bytes" in results[3].detail
    assert "300000" in results[3].detail
    memory = [bytearray(1), bytearray(2), bytearray(1), bytearray(5)]
    loaded = ns.get_into(batch, memory)
    assert [type(one) for one in loaded] == [Hit, Hit, Hit, Miss]
    assert memory[0] == memory[2] == b"a"


def test_duplicate_of_a_refused_item_is_refused_too(client, opaque) -> None:
    ns = client.namespace(opaque)
    keys = ns.keys(TOKENS[:16])
    results = ns.put([keys[0], keys[0]], [bytes(300_001), b"ok"])
    assert isinstance(results[0], Refused)
    assert isinstance(results[1], Stored)


def test_fragments_and_addresses(client, opaque) -> None:
    ns = client.namespace(opaque)
    keys = ns.keys(TOKENS[:32])
    payload = noise(200_000)
    source = np.frombuffer(payload, np.uint8)
    fragments = [source[:70_000], (source[70_000:].ctypes.data, 100_000), source[170_000:]]
    assert isinstance(ns.put(keys[:1], [fragments])[0], Stored)
    rows = np.zeros((8, 25_000), np.uint8)
    assert ns.get_into(keys[:1], [list(rows)])[0].length_bytes == 200_000
    assert rows.tobytes() == payload
    memory = client.alloc(200_000, prefault=True)
    assert isinstance(ns.get_into(keys[0], [memory])[0], Hit)
    assert memory == payload


def test_opaque_buffers_may_be_larger_but_not_smaller(client, opaque) -> None:
    ns = client.namespace(opaque)
    keys = ns.keys(TOKENS[:16])
    ns.put(keys, [b"x" * 1000])
    large = bytearray(5000)
    (result,) = ns.get_into(keys, [large])
    assert result.length_bytes == 1000
    assert large == b"x" * 1000 + bytes(4000)
    assert ns.get_into(keys, [bytearray(999)]) == [Miss(MissReason.LAYOUT)]


@pytest.mark.parametrize("seconds", ["1s", float("nan"), float("-inf"), [1]])
def test_what_is_no_number_of_seconds_is_refused_by_name(client, opaque, node, seconds) -> None:
    ns = client.namespace(opaque)
    keys = ns.keys(TOKENS[:16])
    with pytest.raises(InvalidRequest, match="deadline is "):
        ns.match(keys, deadline=seconds)
    with pytest.raises(InvalidRequest, match="deadline is "):
        ns.get_into(keys, [bytearray(1), bytearray(1)], deadline=seconds)
    with pytest.raises(InvalidRequest, match=r"^soft_deadline is "):
        ns.get_into(keys, [bytearray(1), bytearray(1)], soft_deadline=seconds)
    with pytest.raises(InvalidRequest, match="pin_ttl is "):
        ns.match(keys, pin_ttl=seconds)
    with pytest.raises(InvalidRequest, match="deadline is "):
        KVClient.connect(node.address, deadline=seconds)


@pytest.mark.parametrize("keys", [None, 3])
def test_keys_that_are_none_are_refused_by_name(client, opaque, keys) -> None:
    with pytest.raises(InvalidRequest, match=r"keys are a (NoneType|int); pass keys made by"):
        client.namespace(opaque).match(keys)
    with pytest.raises(InvalidRequest, match=r"keys are a (NoneType|int); pass keys made by"):
        client.namespace(opaque).get_into(keys, [bytearray(1)])


def test_one_memory_for_several_items_is_refused(client, opaque, node) -> None:
    ns = client.namespace(opaque)
    keys = ns.keys(TOKENS[:48])
    ns.put(keys, [b"a", b"b", b"c"])
    before = len(node.calls)
    for memory in (bytearray(1), np.zeros(1, np.uint8), memoryview(bytearray(1))):
        with pytest.raises(InvalidRequest, match="item 2 is the same memory as item 0"):
            ns.get_into(keys, [memory, bytearray(1), memory])
    assert len(node.calls) == before
    assert isinstance(ns.get_into(keys, [(), (), ()])[0], Miss)  # nothing to overwrite, and nothing fits


def test_an_address_with_a_scheme_is_refused_with_the_form() -> None:
    with pytest.raises(InvalidRequest, match=r"is not host:port .* without a scheme"):
        KVClient.connect("http://127.0.0.1:7400")


def test_a_put_to_a_node_without_targets_says_that_it_recovers(client, opaque, node) -> None:
    node.view = lambda: pack_plain({"epoch": 2, "node_id": "n1", "targets": []})
    ns = client.namespace(opaque)
    with KVClient.connect(node.address) as fresh:
        (result,) = fresh.namespace(opaque).put(ns.keys(TOKENS[:16]), [b"x"], deadline=5)
    assert result.reason is RefusedReason.OVERLOADED
    assert f"node n1 at {node.address} is recovering" in result.detail


@pytest.mark.parametrize(
    ("buffers", "message"),
    [
        ([bytearray(26_112), bytearray(26_112)], None),
        ([bytearray(26_112), bytearray(26_111)], "item 1 has 26111 bytes in 1 fragments, 26112 are needed"),
        ([bytearray(26_112), [bytearray(26_112), bytearray(1)]], "item 1 has 26113 bytes in 2 fragments"),
        ([bytearray(26_112), bytes(26_112)], "item 1 is read-only"),
        ([bytearray(26_112)], "1 buffers are given for 2 keys"),
    ],
)
def test_wrong_memory_is_refused_before_any_io(client, node, buffers, message) -> None:
    ns = client.namespace(KV)
    keys = ns.keys(TOKENS[:32])
    before = len(node.calls)
    if message is None:
        assert ns.get_into(keys, buffers, shards=0) == [Miss(MissReason.ABSENT)] * 2
        return
    with pytest.raises(InvalidRequest, match=message):
        ns.get_into(keys, buffers, shards=0)
    assert len(node.calls) == before


def chunk_bytes(seed: int) -> bytes:
    return noise(KV_LAYOUT.chunk_bytes, seed)


def test_shards_have_their_own_writers_and_readers(client) -> None:
    """Written as two shards, read as two halves and as a whole."""
    ns = client.namespace(KV)
    keys = ns.keys(TOKENS[: 16 * 3])
    halves = [[noise(26_112, 10 * shard + at) for at in range(3)] for shard in (0, 1)]
    ns.put(keys, halves[0], shards=0)
    with ns.match(keys) as found:
        assert found.chunks == 0
        assert found.reason is MissReason.ABSENT
    with ns.match(keys, shards=[0]) as found:
        assert found.chunks == 3
    ns.put(keys[:2], halves[1][:2], shards=[1])
    with ns.match(keys) as found:
        assert found.chunks == 2
    assert ns.contains(keys) == [True, True, False]
    wholes = [bytearray(KV_LAYOUT.chunk_bytes) for _ in range(3)]
    loaded = ns.get_into(keys, wholes)
    assert [type(one) for one in loaded] == [Hit, Hit, Miss]
    assert len(loaded[0].content_id) == 32
    assert bytes(wholes[1]) == halves[0][1] + halves[1][1]
    swapped = [bytearray(KV_LAYOUT.chunk_bytes)]
    ns.get_into(keys[:1], swapped, shards=[1, 0])
    assert bytes(swapped[0]) == halves[1][0] + halves[0][0]


@pytest.mark.parametrize("slice_bytes", [4096, 1 << 20])
def test_ranges_and_layers_land_exactly(client, node, slice_bytes) -> None:
    node.slice_bytes = slice_bytes
    ns = client.namespace(KV)
    keys = ns.keys(TOKENS[: 16 * 2])
    payloads = [noise(26_112, at) for at in (0, 1)]
    ns.put(keys, payloads, shards=1)
    for ranges in (
        [(0, 1)],
        [(26_111, 1)],
        [(4095, 2), (5000, 9000)],
        [(0, 26_112)],
        [(10, 20), (40, 4000), (20_000, 5)],
    ):
        size = sum(length for _, length in ranges)
        memory = [bytearray(b"\xaa" * size) for _ in range(2)]
        loaded = ns.get_into(keys, memory, ranges=ranges, shards=1)
        assert [one.length_bytes for one in loaded] == [size, size]
        for payload, got in zip(payloads, memory, strict=True):
            assert bytes(got) == b"".join(payload[at : at + length] for at, length in ranges)
    memory = [bytearray(3), bytearray(7)]
    ns.get_into(keys, memory, ranges=[[(1, 3)], [(100, 3), (9000, 4)]], shards=1)
    assert bytes(memory[0]) == payloads[0][1:4]
    assert bytes(memory[1]) == payloads[1][100:103] + payloads[1][9000:9004]
    kv_layer, indexer_layer = 16 * 256, 16 * 16
    memory = [bytearray(2 * (kv_layer + indexer_layer))]
    assert isinstance(ns.get_into(keys[:1], memory, layers=range(2, 4), shards=1)[0], Hit)
    at = 6 * kv_layer + 2 * indexer_layer
    assert bytes(memory[0]) == payloads[0][2 * kv_layer : 4 * kv_layer] + payloads[0][at : at + 2 * indexer_layer]
    memory = [bytearray(6 * indexer_layer)]
    ns.get_into(keys[:1], memory, part="indexer", shards=1)
    assert bytes(memory[0]) == payloads[0][6 * kv_layer :]


def test_a_range_reader_can_insist_on_one_copy(client, node) -> None:
    ns = client.namespace(KV)
    keys = ns.keys(TOKENS[:16])
    ns.put(keys, [noise(26_112, 1)], shards=0)
    (first,) = ns.get_into(keys, [bytearray(100)], ranges=[(0, 100)], shards=0)
    again = ns.get_into(keys, [bytearray(50)], ranges=[(100, 50)], shards=0, content_ids=[first.content_id])
    assert isinstance(again[0], Hit)
    ns.delete(keys, shards=0)
    ns.put(keys, [noise(26_112, 2)], shards=0)
    other = ns.get_into(keys, [bytearray(50)], ranges=[(100, 50)], shards=0, content_ids=[first.content_id])
    assert other == [Miss(MissReason.ABSENT)]


def test_sparse_parts_and_the_boundary(client, node) -> None:
    """Chunks of 16 tokens, a state each 64 tokens: the answers for 63, 64, 65, 80 and 128 tokens."""
    ns = client.namespace(KV)
    keys = ns.keys(TOKENS[:128])
    assert ns.match(keys, need=["state"]).boundary == 0
    ns.put(keys, [chunk_bytes(at) for at in range(8)])
    states = [noise(6000, at) for at in (3, 7)]
    results = ns.put([keys[3], keys[7]], states, part="state")
    assert all(isinstance(one, Stored) for one in results)
    answers = {}
    for tokens in (63, 64, 65, 80, 128):
        with ns.match(ns.keys(TOKENS[:tokens]), need=["kv", "state"]) as found:
            answers[tokens] = found.boundary
            assert found.tokens == tokens // 16 * 16
            assert found.boundary_chunks * 16 == found.boundary
    assert answers == {63: 0, 64: 64, 65: 64, 80: 64, 128: 128}
    with ns.match(keys, need=["state", "swa"]) as found:
        assert (found.tokens, found.boundary) == (128, 0)
    memory = bytearray(6000)
    assert isinstance(ns.get_into(keys[3:4], [memory], part="state")[0], Hit)
    assert memory == states[0]
    assert ns.contains(keys, part="state") == [False, False, False, True, False, False, False, True]
    with pytest.raises(InvalidRequest, match="part 'indexer' is dense"):
        ns.put(keys[:1], [bytes(1)], part="indexer")
    with pytest.raises(InvalidRequest, match="its parts are: kv, indexer, state, swa"):
        ns.match(keys, need=["mamba"])


def test_match_pins_and_gives_back(client, node, opaque) -> None:
    ns = client.namespace(opaque)
    keys = ns.keys(TOKENS[:64])
    ns.put(keys[:3], [b"1", b"22", b"333"])
    with ns.match(keys) as found:
        assert (found.chunks, found.tokens, found.boundary) == (3, 48, 48)
        assert found.pinned
        assert len(node.pins) == 1
        assert found.load_seconds_estimate > 0
        assert found.reason is MissReason.ABSENT
    assert not node.pins
    assert not found.pinned
    found.release()
    assert node.count(FrameType.UNPIN) == 1, "a second release is harmless and silent"
    with ns.match(keys, pin_ttl=0) as found:
        assert not found.pinned
    assert node.count(FrameType.UNPIN) == 1
    node.pinning = False
    with ns.match(keys) as found:
        assert found.chunks == 3
        assert not found.pinned
    node.pinning = True
    with ns.match(keys, pin_ttl=0.001) as found:
        assert found.chunks == 3
        while found.pinned:
            pass
    assert client.stats()["pins_lost"] == 1


def test_the_prefix_never_crosses_a_hole_and_pending_is_told(client, node, opaque) -> None:
    ns = client.namespace(opaque)
    keys = ns.keys(TOKENS[:80])
    ns.put(keys, [bytes([at]) for at in range(5)])
    node.pending |= {keys[2].digest, keys[3].digest}
    with ns.match(keys) as found:
        assert (found.chunks, found.pending, found.reason) == (2, 2, MissReason.PENDING)
    assert [type(one) for one in ns.wait(keys, 0.1)] == [Hit, Hit, Miss, Miss, Hit]
    node.pending.clear()
    assert [type(one) for one in ns.wait(keys, deadline=5)] == [Hit] * 5


def test_delete_prefetch_and_drop(client, opaque) -> None:
    ns = client.namespace(opaque)
    keys = ns.keys(TOKENS[:64])
    ns.put(keys[:3], [b"1", b"22", b"333"])
    assert ns.prefetch(keys) == 3
    assert [type(one) for one in ns.delete(keys[2:])] == [Hit, Miss]
    assert ns.contains(keys) == [True, True, False, False]
    assert ns.drop()
    assert ns.contains(keys) == [False] * 4


def test_batches_above_the_nodes_limit_are_split(client, node, opaque) -> None:
    """Any number of keys, in the caller's order, whatever one request may carry."""
    node.batch_items_max = 7
    with KVClient.connect(node.address) as small:
        ns = small.namespace(opaque)
        keys = ns.keys(TOKENS)
        assert len(keys) == 40
        payloads = [noise(100 + at, at) for at in range(40)]
        assert all(isinstance(one, Stored) for one in ns.put(keys, payloads))
        ns.delete(keys[33:34])
        memory = [bytearray(len(payload)) for payload in payloads]
        loaded = ns.get_into(keys, memory)
        assert [isinstance(one, Hit) for one in loaded] == [at != 33 for at in range(40)]
        assert all(bytes(memory[at]) == payloads[at] for at in range(40) if at != 33)
        with ns.match(keys) as found:
            assert found.chunks == 33
            assert found.pinned
            assert len(node.pins) == 6
        assert not node.pins
        many = ns.keys_from_hashes([at.to_bytes(8, "little") for at in range(1000)], algorithm="test")
        assert ns.contains(many) == [False] * 1000


def test_hits_are_counted_on_lookups(client, opaque) -> None:
    """10 lookups of 4 chunks: 3 full, 4 with 2 of 4, 3 misses; failed loads are counted apart."""
    ns = client.namespace(opaque)
    full, half, none = (ns.keys([seed, *TOKENS[1:64]]) for seed in (1, 2, 3))
    ns.put(full, [b"x"] * 4)
    ns.put(half[:2], [b"x"] * 2)
    for keys, times in ((full, 3), (half, 4), (none, 3)):
        for _ in range(times):
            with ns.match(keys):
                pass
    ns.contains(full)
    ns.get_into(none, [bytearray(1) for _ in range(4)])
    ns.get_into(full, [bytearray(1) for _ in range(4)])
    stats = client.stats()
    assert (stats["lookup_keys_hit"], stats["lookup_keys_asked"]) == (20, 40)
    assert (stats["load_items"], stats["load_hits"], stats["load_misses.absent"]) == (8, 4, 4)
    assert client.stats() == stats


def test_a_closed_client_says_so(node, opaque) -> None:
    client = KVClient.connect(node.address)
    ns = client.namespace(opaque)
    keys = ns.keys(TOKENS[:16])
    client.close()
    client.close()
    for call in (
        lambda: ns.match(keys),
        lambda: ns.put(keys, [b""]),
        lambda: ns.get_into(keys, [bytearray(1)]),
        lambda: ns.contains(keys),
        client.refresh,
    ):
        with pytest.raises(Closed):
            call()


def test_connections_are_reused_and_have_their_class(client, node, opaque) -> None:
    ns = client.namespace(opaque)
    keys = ns.keys(TOKENS[:16])
    for _ in range(5):
        ns.put(keys, [b"x"])
        ns.get_into(keys, [bytearray(1)])
    assert [hello.flow for hello in node.hellos] == [0, 3, 0], "one for the view, one to write, one to read"
    assert len({hello.client_id for hello in node.hellos}) == 1


def test_layer_shards_are_written_and_read_by_layer(client) -> None:
    layout = KVLayout(
        chunk_tokens=16,
        dtype="x",
        layers=4,
        shards=2,
        shard_axis=ShardAxis.LAYERS,
        parts=(Part(name="kv", entry_bytes=512),),
    )
    ns = client.namespace(Namespace(tenant="t", model="pp", weights="w", layout=layout))
    keys = ns.keys(TOKENS[:16])
    stages = [noise(2 * 8192, 1), noise(2 * 8192, 2)]
    ns.put(keys, [stages[0]], shards=0)
    ns.put(keys, [stages[1]], shards=1)
    memory = bytearray(2 * 8192)
    ns.get_into(keys, [memory], layers=[1, 2])
    assert memory == stages[0][8192:] + stages[1][:8192]
