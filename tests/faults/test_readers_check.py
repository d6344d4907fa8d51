"""A node without a cache does not sum what it reads for one client: each way of reading sums it, and tells the node.

The drive's bytes are changed behind its back, so a way that believed them would give wrong ones here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvstore.limits import KiB, MiB
from kvstore.transport import exchange, inflow
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore.types.results import Hit, Miss, MissReason, Stored
from kvstore_client import AsyncKVClient, KVClient
from kvstore_client.namespace_handle import BoundNamespace
from kvstore_client.planner import Keys
from tests.faults.node import HurtNode
from tests.faults.test_damaged_disk import flip, place_of

COUNT = 6
BAD = 2
MISS = Miss(MissReason.CORRUPT)
Read = Callable[[HurtNode, BoundNamespace, Keys, int], Sequence[tuple[Hit | Miss, bytes]]]


def all_at_once(_: HurtNode, space: BoundNamespace, keys: Keys, length: int) -> Sequence[tuple[Hit | Miss, bytes]]:
    memory = [bytearray(length) for _ in range(len(keys))]
    return list(zip(space.get_into(keys, [memoryview(one) for one in memory]), map(bytes, memory), strict=True))


def one_by_one(node: HurtNode, space: BoundNamespace, keys: Keys, length: int) -> Sequence[tuple[Hit | Miss, bytes]]:
    return [all_at_once(node, space, keys[at : at + 1], length)[0] for at in range(len(keys))]


def in_python(node: HurtNode, space: BoundNamespace, keys: Keys, length: int) -> Sequence[tuple[Hit | Miss, bytes]]:
    """With the twins of what is compiled, on connections that were made for them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "IS_COMPILED", False)
        patch.setattr(inflow, "IS_COMPILED", False)
        with KVClient.connect(node.address) as client:
            own = client.namespace(space.namespace)
            return [*all_at_once(node, own, keys[:3], length), *one_by_one(node, own, keys[3:], length)]


def in_fragments(_: HurtNode, space: BoundNamespace, keys: Keys, length: int) -> Sequence[tuple[Hit | Miss, bytes]]:
    memory = [[bytearray(1000), bytearray(length - 1000)] for _ in range(len(keys))]
    found = space.get_into(keys, memory)
    return [(one, bytes(first + second)) for one, (first, second) in zip(found, memory, strict=True)]


def softly(_: HurtNode, space: BoundNamespace, keys: Keys, length: int) -> Sequence[tuple[Hit | Miss, bytes]]:
    memory = [bytearray(length) for _ in range(len(keys))]
    return list(zip(space.get_into(keys, memory, soft_deadline=5), map(bytes, memory), strict=True))


def with_await(node: HurtNode, space: BoundNamespace, keys: Keys, length: int) -> Sequence[tuple[Hit | Miss, bytes]]:
    async def read() -> Sequence[tuple[Hit | Miss, bytes]]:
        client = await AsyncKVClient.connect(node.address)
        memory = [bytearray(length) for _ in range(len(keys))]
        found = await client.namespace(space.namespace).get_into(keys, memory)
        client.close()
        return list(zip(found, map(bytes, memory), strict=True))

    return asyncio.run(read())


def over_the_socket(
    node: HurtNode, space: BoundNamespace, keys: Keys, length: int
) -> Sequence[tuple[Hit | Miss, bytes]]:
    """Memory of the caller's own on the same host: through the stream, or copied from places of the client's."""
    with KVClient.connect(node.address, transport="shm") as client:
        own = client.namespace(space.namespace)
        return [*all_at_once(node, own, keys[:4], length), *one_by_one(node, own, keys[4:], length)]


WAYS: dict[str, Read] = {
    one.__name__: one for one in (all_at_once, one_by_one, in_python, in_fragments, softly, with_await, over_the_socket)
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HurtNode]:
    with HurtNode(tmp_path_factory.mktemp("node"), cache="0", capacity="512MiB", staging="48MiB") as node:
        node.start()
        yield node


@pytest.mark.parametrize("length", [12 * KiB, 64 * KiB, 3 * MiB])
@pytest.mark.parametrize("way", WAYS)
def test_each_way_of_reading_sums_what_the_node_did_not(served: HurtNode, way: str, length: int) -> None:
    layout = KVLayout.opaque(chunk_bytes=length, chunk_tokens=16, checksum_bytes=16 * KiB)
    with KVClient.connect(served.address) as client:
        space = client.namespace(Namespace(tenant="default", model=f"{way} {length}", weights="w", layout=layout))
        keys = space.keys(range(16 * COUNT))
        payloads = [(way.encode() + b"%d %d " % (length, at) * (length // 8))[:length] for at in range(COUNT)]
        assert {type(one) for one in space.put(keys, payloads, wait="durable")} == {Stored}
        file = data_file(served)
        flip(file, place_of(file, payloads[BAD]) + length - 77)
        before = served.number("kvstore_quarantined_records")
        told = served.number("kvstore_checksum_errors", place="client")
        found = WAYS[way](served, space, keys, length)
        assert found[BAD][0] == MISS
        good = [at for at in range(COUNT) if at != BAD]
        assert all(isinstance(found[at][0], Hit) and found[at][1] == payloads[at] for at in good)
        assert served.number("kvstore_quarantined_records") == before + 1
        assert served.number("kvstore_checksum_errors", place="client") == told + 1, "the client has told of it"
        assert not space.contains(keys[BAD : BAD + 1])[0]
        assert isinstance(space.put(keys[BAD : BAD + 1], payloads[BAD : BAD + 1])[0], Stored)
        assert {type(one) for one, _ in WAYS[way](served, space, keys, length)} == {Hit}


def data_file(node: HurtNode) -> Path:
    """The file that holds everything."""
    return node.data_dir / "kvstore.data"
