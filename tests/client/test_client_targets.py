"""Several targets: one call fans out over them, in one loop, and answers in the caller's order."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest

from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore.types.results import MissReason
from kvstore.wire.codec import pack_plain
from kvstore.wire.header import FrameType
from kvstore_client import AsyncKVClient, Exists, Hit, KVClient, Miss, Refused, Stored

COUNT = 48
LAYOUT = KVLayout.opaque(chunk_bytes=200_000, chunk_tokens=4, run_bytes=600_000)
NAMESPACE = Namespace(tenant="default", model="m", weights="w", layout=LAYOUT)


def payload(at: int) -> bytes:
    return random.Random(at).randbytes(1000 + 4000 * at)


@pytest.fixture
def nodes(node):
    """Three nodes with one view of all of them."""
    made = [node, *(type(node)(boot_id=bytes([at]) * 16) for at in (1, 2))]
    for one in made[1:]:
        one.start()
    targets = [
        {"id": f"t{at}", "data": [one.address], "weight": 1.0, "state": "serving"} for at, one in enumerate(made)
    ]
    replicas = {"copies": 1, "head_copies": 1}
    view = pack_plain({"epoch": 1, "node_id": "n", "targets": targets, "replicas": replicas})
    for one in made:
        one.view = lambda: view
    yield made
    for one in made[1:]:
        one.stop()


def test_a_batch_is_spread_and_comes_back_in_order(nodes) -> None:
    with KVClient.connect(nodes[1].address) as client:
        ns = client.namespace(NAMESPACE)
        keys = ns.keys(list(range(4 * COUNT)))
        assert LAYOUT.chunks_per_run == 3
        assert {type(one) for one in ns.put(keys, [payload(at) for at in range(COUNT)])} == {Stored}
        shares = [len(one.records) for one in nodes]
        assert sum(shares) == COUNT
        assert all(share % 3 == 0 and share for share in shares), "runs stay together"
        memory = [bytearray(len(payload(at))) for at in range(COUNT)]
        with ns.match(keys) as found:
            assert found.chunks == COUNT
            assert found.pinned
            assert [len(one.pins) for one in nodes] == [1, 1, 1]
            results = ns.get_into(keys, memory)
        assert [len(one.pins) for one in nodes] == [0, 0, 0]
        assert {type(one) for one in results} == {Hit}
        assert [bytes(one) for one in memory] == [payload(at) for at in range(COUNT)]
        ns.delete(keys[10:11])
        assert [at for at, one in enumerate(ns.contains(keys)) if not one] == [10]
        with ns.match(keys) as found:
            assert found.chunks == 10
        with ns.writer(keys[9:12], lengths=[5, 6, 7]) as writer:
            for at in range(3):
                writer.write(at, bytes(5 + at))
            assert [type(one) for one in writer.commit()] == [Exists, Stored, Exists]
        assert ns.drop()
        assert not any(ns.contains(keys))


def test_a_dead_target_costs_only_its_own_keys(nodes) -> None:
    with KVClient.connect(nodes[0].address) as client:
        ns = client.namespace(NAMESPACE)
        keys = ns.keys(list(range(4 * COUNT)))
        ns.put(keys, [payload(at) for at in range(COUNT)])
        mine = {key for _, key in nodes[2].records}
        lost = [at for at in range(COUNT) if keys[at].digest in mine]
        nodes[2].stop()
        memory = [bytearray(len(payload(at))) for at in range(COUNT)]
        for _ in range(4):
            results = ns.get_into(keys, memory)
            assert [at for at, one in enumerate(results) if one == Miss(MissReason.UNAVAILABLE)] == lost
            assert all(bytes(memory[at]) == payload(at) for at in range(COUNT) if at not in lost)
        with ns.match(keys) as found:
            assert found.chunks == lost[0]
            assert found.pinned == (lost[0] > 0), "what was found is held where it was found"
        results = ns.put(keys, [payload(at) for at in range(COUNT)])
        assert [at for at, one in enumerate(results) if isinstance(one, Refused)] == lost


@pytest.mark.parametrize("kind", ["deadline", "soft_deadline"])
def test_a_stalled_target_costs_only_its_own_keys(nodes, kind) -> None:
    go_on = threading.Event()
    with KVClient.connect(nodes[0].address) as client:
        ns = client.namespace(NAMESPACE)
        keys = ns.keys(list(range(4 * COUNT)))
        ns.put(keys, [payload(at) for at in range(COUNT)])
        mine = {key for _, key in nodes[1].records}

        def script(link, frame) -> bool:
            if frame.type is FrameType.GET:
                go_on.wait(60)  # a call that waits for it gets a hit then, which fails below
            return False

        nodes[1].script = script
        memory = [bytearray(len(payload(at))) for at in range(COUNT)]
        results = ns.get_into(keys, memory, **{kind: 0.3})
        for at, (result, got) in enumerate(zip(results, memory, strict=True)):
            assert result == Miss(MissReason.DEADLINE) if keys[at].digest in mine else bytes(got) == payload(at)
        go_on.set()
        assert {type(one) for one in ns.get_into(keys, memory)} == {Hit}


def test_tasks_and_threads_that_need_all_targets_do_not_block_each_other(nodes) -> None:
    with KVClient.connect(nodes[0].address) as client:
        ns = client.namespace(NAMESPACE)
        keys = ns.keys(list(range(4 * COUNT)))
        ns.put(keys, [payload(at) for at in range(COUNT)])
        wrong = []

        def work() -> None:
            for _ in range(3):
                memory = [bytearray(len(payload(at))) for at in range(COUNT)]
                results = ns.get_into(keys, memory, deadline=60)
                wrong.extend(
                    at for at in range(COUNT) if not isinstance(results[at], Hit) or bytes(memory[at]) != payload(at)
                )

        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong

    async def tasks() -> None:
        async with await AsyncKVClient.connect(nodes[2].address) as client:
            ns = client.namespace(NAMESPACE)

            async def read() -> None:
                memory = [bytearray(len(payload(at))) for at in range(COUNT)]
                results = await ns.get_into(keys, memory, deadline=60)
                assert {type(one) for one in results} == {Hit}
                assert [bytes(one) for one in memory] == [payload(at) for at in range(COUNT)]

            await asyncio.gather(*(read() for _ in range(8)))

    asyncio.run(tasks())
