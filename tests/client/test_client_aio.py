"""The async twin: same verbs, same answers; a cancelled call leaves its buffers alone."""

from __future__ import annotations

import asyncio
import os
import random
import threading

import pytest

from kvstore.errors import Closed, ForkedClient, InvalidRequest, Unavailable
from kvstore.types.results import MissReason
from kvstore.wire.header import FrameType
from kvstore_client import AsyncKVClient, Exists, Hit, Miss, Stored
from kvstore_client.options import ClientOptions

TOKENS = list(range(64))
SIZE = 150_000


def payloads() -> list[bytes]:
    return [random.Random(at).randbytes(SIZE) for at in range(4)]


def test_every_verb(node, opaque) -> None:
    async def work() -> None:
        async with await AsyncKVClient.connect(node.address) as client:
            ns = client.namespace(opaque)
            keys = ns.keys(TOKENS)
            assert all(isinstance(one, Stored) for one in await ns.put(keys, payloads()))
            assert await ns.put(keys, payloads()) == [Exists()] * 4
            async with ns.match(keys) as found:
                assert (found.chunks, found.tokens) == (4, 64)
                assert found.pinned
                memory = [client.alloc(SIZE) for _ in range(4)]
                assert all(isinstance(one, Hit) for one in await ns.get_into(keys, memory))
                assert [bytes(one) for one in memory] == payloads()
            assert not node.pins
            match = await ns.match(keys)
            assert len(node.pins) == 1
            await match.release()
            await match.release()
            assert not node.pins
            part = bytearray(7)
            assert isinstance((await ns.get_into(keys[:1], [part], ranges=[(65_530, 7)]))[0], Hit)
            assert part == payloads()[0][65_530:65_537]
            assert await ns.contains(keys) == [True] * 4
            assert await ns.prefetch(keys) == 4
            assert [type(one) for one in await ns.wait(keys, 1)] == [Hit] * 4
            assert [type(one) for one in await ns.delete(keys[3:])] == [Hit]
            more = ns.keys([9] * 16)
            async with await ns.writer(more, lengths=[3]) as writer:
                await writer.write(0, b"abc")
                assert isinstance((await writer.commit())[0], Stored)
            async with await ns.writer(keys[3:], lengths=[3]) as writer:
                await writer.write(0, b"abc")
            assert not node.writers
            assert await ns.drop()
            assert await ns.contains(keys) == [False] * 4
            with pytest.raises(InvalidRequest):
                await ns.get_into(keys, [])
            assert client.stats()["lookup_keys_hit"] == 8
        with pytest.raises(Closed):
            await ns.contains(keys)

    asyncio.run(work())


def test_many_tasks_share_two_connections(node, opaque) -> None:
    async def work() -> None:
        async with await AsyncKVClient.connect(node.address) as client:
            ns = client.namespace(opaque)
            keys = ns.keys(TOKENS)
            await ns.put(keys, payloads())

            async def read(seed: int) -> None:
                memory = bytearray(SIZE)
                at = seed % 4
                assert isinstance((await ns.get_into(keys[at : at + 1], [memory]))[0], Hit)
                assert bytes(memory) == payloads()[at]

            await asyncio.gather(*(read(seed) for seed in range(40)))
        assert len([hello for hello in node.hellos if hello.flow == 0]) <= 3

    asyncio.run(work())


@pytest.mark.parametrize("sent", [0, 40, SIZE // 2])
def test_a_cancelled_get_leaves_its_buffer_alone(node, opaque, sent) -> None:
    """The node sends the rest after the task was cancelled; nothing of it lands."""
    reached, go_on, finished = threading.Event(), threading.Event(), threading.Event()

    def script(link, frame) -> bool:
        if frame.type is not FrameType.GET or finished.is_set():
            return False
        whole = bytearray()
        real, link.socket = link.socket, Recorder(whole)
        link.answer(frame)
        link.socket = real
        try:
            real.sendall(whole[:sent])
            reached.set()
            go_on.wait(30)
            real.sendall(whole[sent:])
        except OSError:
            pass
        finished.set()
        return True

    async def work() -> None:
        async with await AsyncKVClient.connect(node.address) as client:
            ns = client.namespace(opaque)
            keys = ns.keys(TOKENS)
            await ns.put(keys, payloads())
            node.script = script
            memory = bytearray(b"\xaa" * SIZE)
            task = asyncio.create_task(ns.get_into(keys[:1], [memory]))
            assert await asyncio.to_thread(reached.wait, 30)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            before = bytes(memory)
            go_on.set()
            assert await asyncio.to_thread(finished.wait, 30)
            again = bytearray(SIZE)
            assert isinstance((await ns.get_into(keys[:1], [again]))[0], Hit)
            assert bytes(again) == payloads()[0]
            assert bytes(memory) == before

    asyncio.run(work())


class Recorder:
    """Stands in for a socket and keeps what is sent."""

    def __init__(self, whole: bytearray) -> None:
        self._whole = whole

    def sendall(self, data: bytes) -> None:
        self._whole += data


def test_cancelled_waiters_do_not_lose_a_turn(node, opaque) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def script(link, frame) -> bool:
        if frame.type is FrameType.GET:
            reached.set()
            go_on.wait(30)
        return False

    async def work() -> None:
        options = ClientOptions(connections_per_target=1)
        async with await AsyncKVClient.connect(node.address, options=options) as client:
            ns = client.namespace(opaque)
            keys = ns.keys(TOKENS)
            await ns.put(keys, payloads())
            node.script = script
            tasks = [asyncio.create_task(ns.get_into(keys[:1], [bytearray(SIZE)])) for _ in range(6)]
            assert await asyncio.to_thread(reached.wait, 30)
            assert await ns.get_into(keys[:1], [bytearray(SIZE)], deadline=0.05) == [Miss(MissReason.DEADLINE)]
            for task in tasks[1:4]:
                task.cancel()
            go_on.set()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert [isinstance(one, asyncio.CancelledError) for one in results] == [False, *[True] * 3, False, False]

    asyncio.run(work())


def test_deadlines_breaks_and_restarts(node, opaque) -> None:
    async def work() -> None:
        async with await AsyncKVClient.connect(node.address) as client:
            ns = client.namespace(opaque)
            keys = ns.keys(TOKENS)
            await ns.put(keys, payloads())
            node.restart()
            memory = bytearray(SIZE)
            assert isinstance((await ns.get_into(keys[:1], [memory]))[0], Hit)
            assert isinstance((await ns.put(ns.keys([1] * 16), [b"x"]))[0], Stored)
            hold = threading.Event()

            def stall(link, frame) -> bool:
                if frame.type is FrameType.GET:
                    hold.wait(30)
                return False

            node.script = stall
            assert (
                await ns.get_into(keys, [bytearray(SIZE) for _ in range(4)], soft_deadline=0.1)
                == [Miss(MissReason.DEADLINE)] * 4
            )
            hard = await ns.get_into(keys, [bytearray(SIZE) for _ in keys], deadline=0.1, soft_deadline=60)
            assert hard == [Miss(MissReason.DEADLINE)] * 4
            assert client.stats()["soft_deadlines"] == 1, "not of a call that ended at its other deadline"
            hold.set()
            node.stop()
            assert set(await ns.get_into(keys, [bytearray(SIZE) for _ in range(4)])) == {Miss(MissReason.UNAVAILABLE)}
        with pytest.raises(Unavailable):
            await AsyncKVClient.connect(node.address)

    asyncio.run(work())


def test_a_forked_child_is_told_at_once(node, opaque) -> None:
    async def work() -> None:
        async with await AsyncKVClient.connect(node.address) as client:
            ns = client.namespace(opaque)
            keys = ns.keys(TOKENS)
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    await ns.contains(keys)
                except ForkedClient:
                    code = 0
                finally:
                    os._exit(code)
            _, status = os.waitpid(pid, 0)
            assert os.waitstatus_to_exitcode(status) == 0
            assert await ns.contains(keys) == [False] * 4

    asyncio.run(work())
