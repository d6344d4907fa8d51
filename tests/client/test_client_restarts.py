"""Nodes that are restarted or move, and views that say so."""

from __future__ import annotations

import time

from kvstore.errors import StaleView
from kvstore.types.results import MissReason
from kvstore.wire import messages as m
from kvstore.wire.codec import pack_plain
from kvstore.wire.failures import code_of
from kvstore.wire.header import FrameType
from kvstore_client import Exists, Hit, KVClient, Miss, Refused, Stored
from tests.client.stored_chunks import TOKENS, check, memories, prefix


def test_a_restarted_node_is_noticed(client, node, stored) -> None:
    """Same port, other boot id, manifests forgotten: gets and puts go on, pins are gone."""
    ns, keys, payloads = stored
    found = ns.match(keys)
    assert found.pinned
    node.restart()
    memory = memories()
    results = ns.get_into(keys, memory)
    assert prefix(results) == 8
    check(results, memory, payloads)
    assert not found.pinned
    found.release()
    assert node.count(FrameType.UNPIN) == 0
    assert client.stats()["restarts_noticed"] == 1
    assert client.stats()["pins_lost"] == 1
    before = node.count(FrameType.MANIFEST)
    assert isinstance(ns.put(ns.keys([5] * 16), [b"new"])[0], Stored)
    assert node.count(FrameType.MANIFEST) == before + 1


def test_a_restart_during_a_put_and_a_get(client, node, stored) -> None:
    ns, keys, payloads = stored
    state = {"get": 1, "put": 1}

    def script(link, frame) -> bool:
        kind = {FrameType.GET: "get", FrameType.OFFER: "put"}.get(frame.type)
        if kind is None or not state[kind]:
            return False
        state[kind] = 0
        node.restart()
        raise ConnectionError

    node.script = script
    memory = memories()
    results = ns.get_into(keys, memory)
    assert prefix(results) == 8
    check(results, memory, payloads)
    assert isinstance(ns.put(ns.keys([5] * 16), [b"new"])[0], Stored)


def test_a_node_that_comes_back_serves_again_within_two_seconds(client, node, stored) -> None:
    ns, keys, _ = stored
    node.stop()
    for _ in range(10):
        assert set(ns.get_into(keys, memories())) == {Miss(MissReason.UNAVAILABLE)}
    assert isinstance(ns.put(keys[:1], [b"x"])[0], Refused)
    node.start()
    began = time.monotonic()
    while not isinstance(ns.put(ns.keys([7] * 16), [b"x"])[0], Stored | Exists):
        assert time.monotonic() - began < 2
        time.sleep(0.01)


def test_a_node_that_moves_is_found_by_the_view(node, opaque) -> None:
    """The data port changes; the address that gives the view stays."""
    other = type(node)(records=node.records, manifests=node.manifests, epoch=2)
    with KVClient.connect(node.address) as client:
        ns = client.namespace(opaque)
        ns.put(ns.keys(TOKENS[:16]), [b"x"])
        other.start()
        try:
            node.epoch = 2
            node.data = (other.address,)
            ns.contains(ns.keys(TOKENS[:16]))
            memory = bytearray(1)
            assert isinstance(ns.get_into(ns.keys(TOKENS[:16]), [memory])[0], Hit)
            assert memory == b"x"
            assert other.count(FrameType.GET) == 1
        finally:
            other.stop()


def test_a_write_planned_with_an_old_view_is_planned_again(client, node, stored) -> None:
    ns, _, _ = stored
    asked = node.count(FrameType.VIEW)
    seen = []

    def script(link, frame) -> bool:
        if frame.type is not FrameType.OFFER:
            return False
        seen.append(frame.epoch)
        if frame.epoch >= node.epoch:
            return False
        error = StaleView("planned with an old view")
        link.send(frame, m.ErrorReply(code=code_of(error), text=str(error), closing=False))
        return True

    node.script = script
    node.epoch = 7
    assert isinstance(ns.put(ns.keys([5] * 16), [b"new"])[0], Stored)
    assert seen == [1, 7]
    assert node.count(FrameType.VIEW) == asked + 1


def test_a_node_that_comes_back_on_another_port_is_found(opaque, node) -> None:
    """The data port changes while nobody answers for the view either; later both are there again."""
    view_node = type(node)(epoch=3, boot_id=b"v" * 16)
    view_node.start()
    view_node.data = (node.address,)
    with KVClient.connect(view_node.address) as client:
        ns = client.namespace(opaque)
        keys = ns.keys(TOKENS[:16])
        assert isinstance(ns.put(keys, [b"x"])[0], Stored)
        view_node.stop()
        node.stop()
        for _ in range(5):
            assert ns.get_into(keys, [bytearray(1)]) == [Miss(MissReason.UNAVAILABLE)]
        node.port = 0
        node.start()
        view_node.epoch = 4
        view_node.data = (node.address,)
        view_node.start()
        began = time.monotonic()
        while not isinstance(ns.get_into(keys, [bytearray(1)])[0], Hit):
            assert time.monotonic() - began < 5
            time.sleep(0.01)
    view_node.stop()


def test_a_view_without_targets_is_asked_for_again(opaque, node) -> None:
    """A supervisor answers before its worker does."""
    address = node.address
    empty = type(node)(epoch=1)
    empty.start()
    empty.view = lambda: pack_plain({"epoch": empty.epoch, "node_id": "s", "targets": []})
    with KVClient.connect(empty.address) as client:
        ns = client.namespace(opaque)
        keys = ns.keys(TOKENS[:16])
        assert isinstance(ns.put(keys, [b"x"])[0], Refused)
        del empty.view
        empty.epoch, empty.data = 2, (address,)
        began = time.monotonic()
        while not isinstance(ns.put(keys, [b"x"])[0], Stored):
            assert time.monotonic() - began < 5
            time.sleep(0.01)
    empty.stop()
