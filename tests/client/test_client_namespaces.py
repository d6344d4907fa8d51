"""Keys that were made for another namespace are refused, not missed."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvstore.errors import InvalidRequest
from kvstore.types.keys import KeyChain
from kvstore_client import AsyncKVClient, Exists, Hit, KVClient, Stored


def test_keys_of_another_namespace_are_refused(node, opaque) -> None:
    other = replace(opaque, model="another")
    with KVClient.connect(node.address) as client:
        ns, foreign = client.namespace(opaque), client.namespace(other).keys(list(range(64)))
        hashed = client.namespace(other).keys_from_hashes([b"a", b"b"], algorithm="sha256")
        for keys in (foreign, foreign[1:], foreign[::2], foreign[2:] + foreign[:1], hashed):
            with pytest.raises(InvalidRequest, match="keys never match across namespaces"):
                ns.match(keys)
            for call in (ns.contains, ns.delete, ns.prefetch):
                with pytest.raises(InvalidRequest, match="keys never match across namespaces"):
                    call(keys)
            with pytest.raises(InvalidRequest, match="keys never match across namespaces"):
                ns.put(keys, [b"x"] * len(keys))
            with pytest.raises(InvalidRequest, match=f"{keys.namespace_digest.hex()[:16]}.*{ns.digest.hex()[:16]}"):
                ns.get_into(keys, [bytearray(1) for _ in keys])


@pytest.mark.parametrize("transport", ["tcp", "auto"])
def test_one_key_of_another_namespace_is_refused_where_reads_are_quick(node, opaque, transport) -> None:
    with KVClient.connect(node.address, transport=transport) as client:
        ns = client.namespace(opaque)
        mine, foreign = (one.keys(list(range(16))) for one in (opaque, replace(opaque, model="another")))
        ns.put(mine, [b"x"])
        memory = client.alloc(1)
        for _ in range(2):  # the second goes by the lane that the first has made
            assert isinstance(ns.get_into(mine, [memory])[0], Hit)
            assert isinstance(ns.get_into(KeyChain(mine.digests), [memory])[0], Hit)
        with pytest.raises(InvalidRequest, match="keys never match across namespaces"):
            ns.get_into(foreign, [memory])


def test_the_asynchronous_client_refuses_them_too(node, opaque) -> None:
    async def read() -> None:
        async with await AsyncKVClient.connect(node.address) as client:
            foreign = client.namespace(replace(opaque, model="another")).keys(list(range(16)))
            with pytest.raises(InvalidRequest, match="keys never match across namespaces"):
                await client.namespace(opaque).get_into(foreign, [bytearray(1)])

    asyncio.run(read())


def test_keys_of_which_nothing_is_known_are_taken(node, opaque) -> None:
    """A node's, or single ones: their digest is all there is."""
    with KVClient.connect(node.address) as client:
        ns = client.namespace(opaque)
        keys = ns.keys(list(range(64)))
        assert keys.namespace_digest == keys[1:].namespace_digest == opaque.digest
        mixed = keys[:1] + replace(opaque, model="another").keys(list(range(16)))
        assert mixed.namespace_digest == b""
        for chain, count in ((KeyChain(keys.digests), 4), ([keys[0]], 1), (keys[0], 1)):
            results = ns.put(chain, [b"x"] * count)
            assert {type(one) for one in results} <= {Stored, Exists}
