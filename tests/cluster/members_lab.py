"""Members of a cluster over a real etcd, in one process: each may be cut off from it, and die."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from kvstore.cluster.etcd_client import EtcdClient
from kvstore.cluster.etcd_store import EtcdClusterStore
from kvstore.cluster.membership import Membership
from kvstore.cluster.registration import Registration
from kvstore.cluster.settling import Periods
from kvstore.cluster.store import Change, ClusterStore, Image
from kvstore.cluster.store_address import EtcdAddress, EtcdSecrets
from kvstore.cluster.view import Target, TargetState, View
from kvstore.errors import Unavailable
from kvstore.limits import SECOND_NS, GiB
from kvstore.testing.etcd_process import EtcdProcess

WAIT_SECONDS = 60.0
TTL_NS = 2 * SECOND_NS
PERIODS = Periods(absent_ns=20 * SECOND_NS, previous_ns=600 * SECOND_NS, down_ns=600 * SECOND_NS)

SERVING, JOINING, DRAINING, DOWN = (
    TargetState.SERVING,
    TargetState.JOINING,
    TargetState.DRAINING,
    TargetState.DOWN,
)
_numbers = itertools.count()


def registration(number: int, *, disk: str = "", address: str = "") -> Registration:
    return Registration(
        id=f"t{number}",
        data=(address or f"10.0.0.{number}:7401",),
        capacity_bytes=100 * GiB,
        node_id=f"n{number}",
        label="",
        disk_id=disk or f"disk{number}",
        boot_id="b",
        session="",
    )


class CutStore:
    """A store that this node alone can be cut off from."""

    def __init__(self, inner: ClusterStore) -> None:
        self._inner = inner
        self._cut = asyncio.Event()
        self.is_mute = False  # no answer comes, rather than an error

    def cut(self) -> None:
        self._cut.set()

    def mend(self) -> None:
        self._cut.clear()

    async def _unless_cut(self, call: Coroutine[Any, Any, Any]) -> Any:
        if self.is_mute:
            call.close()
            await asyncio.Event().wait()
        if self._cut.is_set():
            call.close()
            raise Unavailable("this node is cut off")
        return await call

    async def load(self) -> Image:
        return await self._unless_cut(self._inner.load())  # type: ignore[no-any-return]

    async def put(self, name: str, value: str, **how: Any) -> int:
        return await self._unless_cut(self._inner.put(name, value, **how))  # type: ignore[no-any-return]

    async def delete(self, name: str, **how: Any) -> bool:
        return await self._unless_cut(self._inner.delete(name, **how))  # type: ignore[no-any-return]

    async def grant(self, **how: Any) -> Any:
        return await self._unless_cut(self._inner.grant(**how))

    async def renew(self, lease: int) -> Any:
        return await self._unless_cut(self._inner.renew(lease))

    async def revoke(self, lease: int) -> None:
        await self._unless_cut(self._inner.revoke(lease))

    async def watch(self, image: Image) -> AsyncIterator[tuple[Change, ...]]:
        changes = self._inner.watch(image)
        while True:
            following = asyncio.ensure_future(anext(changes))
            cut = asyncio.ensure_future(self._cut.wait())
            try:
                await asyncio.wait((following, cut), return_when=asyncio.FIRST_COMPLETED)
                if cut.done():
                    raise Unavailable("this node is cut off")
                yield following.result()
            finally:
                following.cancel()
                cut.cancel()

    async def close(self) -> None:
        await self._inner.close()


class Node:
    """One member with what it registers."""

    def __init__(
        self, cluster: Cluster, number: int, *, known: View | None = None, cluster_id: str = "", **how: str
    ) -> None:
        self.id = f"t{number}"
        self.store = CutStore(cluster.open_store())
        self.views: list[View] = []
        self.member = Membership(
            self.store,
            cluster=cluster.name,
            known=known,
            on_change=self._changed,
            ttl_ns=cluster.ttl_ns,
            periods=PERIODS,
        )
        self.member.serve_drives_of(cluster_id or cluster.id)
        self.member.register([registration(number, **how)])
        self.task = asyncio.ensure_future(self.member.run())

    def _changed(self) -> None:
        view = self.member.view
        if view is not None and (not self.views or self.views[-1] != view):
            self.views.append(view)

    @property
    def view(self) -> View:
        assert self.member.view is not None
        return self.member.view

    def states(self) -> dict[str, TargetState]:
        """Of the targets, as this node sees them."""
        found = self.member.view.targets if self.member.view is not None else ()
        return {target.id: target.state for target in found}

    def target(self, number: int) -> Target:
        target = self.view.target(f"t{number}")
        assert target is not None
        return target

    async def die(self) -> None:
        """Without a word, as by kill -9."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.store.close()

    async def close(self) -> None:
        await self.member.close()
        await asyncio.gather(self.task, return_exceptions=True)
        assert [view.epoch for view in self.views] == sorted({view.epoch for view in self.views}), "epochs only grow"


class Cluster:
    """Nodes on one etcd, under a name of their own."""

    def __init__(self, etcd: EtcdProcess, ttl_ns: int, cluster_id: str) -> None:
        self.name = f"members-{next(_numbers)}"
        self.id = cluster_id
        self.ttl_ns = ttl_ns
        self._address = EtcdAddress(members=tuple(etcd.members.split(",")), cluster=self.name)
        self.nodes: list[Node] = []

    def open_store(self) -> ClusterStore:
        return EtcdClusterStore(EtcdClient(self._address, EtcdSecrets()), cluster=self.name)

    def add(self, number: int, **how: Any) -> Node:
        node = Node(self, number, **how)
        self.nodes.append(node)
        return node

    async def settled(self, **states: TargetState) -> None:
        """Until every node sees these targets, in these states, and nobody that should serve is fenced."""
        alive = [node for node in self.nodes if not node.task.done()]

        def agree() -> bool:
            return (
                all(node.states() == states for node in alive)
                and len({node.view.epoch for node in alive}) == 1
                and not any(node.member.fenced for node in alive)
            )

        await until(agree, lambda: str([(node.id, node.states(), node.member.fenced) for node in alive]))


async def until(check: Callable[[], bool], words: Callable[[], str] = lambda: "it did not happen") -> None:
    """Waits until something is so."""
    loop = asyncio.get_running_loop()
    end = loop.time() + WAIT_SECONDS
    while not check():
        assert loop.time() < end, words()
        await asyncio.sleep(0.02)


@asynccontextmanager
async def cluster_on(
    etcd: EtcdProcess, *numbers: int, ttl_ns: int = TTL_NS, cluster_id: str = ""
) -> AsyncIterator[Cluster]:
    cluster = Cluster(etcd, ttl_ns, cluster_id)
    try:
        for number in numbers:
            cluster.add(number)
        yield cluster
    finally:
        for node in cluster.nodes:
            if not node.task.done():
                await node.close()


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(2 * WAIT_SECONDS):
            await body()

    asyncio.run(main())
