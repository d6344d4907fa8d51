"""Keys that were made for another namespace are refused, not missed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstore.errors import InvalidRequest
from kvstore.types.keys import KeyChain
from kvstore_client import Exists, KVClient, Stored


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
