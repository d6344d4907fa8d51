"""Members of a real three-node etcd that are killed or frozen: calls end in time, and reach those that are left."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from kvstore.cluster.etcd_client import EtcdClient
from kvstore.cluster.etcd_store import EtcdClusterStore
from kvstore.cluster.file_store import FileClusterStore
from kvstore.cluster.store import ABSENT, ClusterStore
from kvstore.cluster.store_address import EtcdAddress, EtcdSecrets
from kvstore.errors import DeadlineExceeded, FormatUnsupported, OutcomeUnknown, StaleView, Unavailable
from kvstore.limits import SECOND_NS
from kvstore.testing.cluster_suite import until
from kvstore.testing.etcd_process import EtcdProcess

AWAY = (Unavailable, DeadlineExceeded)


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdProcess]:
    with EtcdProcess(tmp_path_factory.mktemp("trio"), count=3) as etcd:
        yield etcd


def run(etcd: EtcdProcess, body: Callable[[ClusterStore], Awaitable[None]], *, first: int = 0) -> None:
    """Runs `body` with a store that asks member `first` first; afterwards all members run again."""
    members = etcd.members.split(",")
    address = EtcdAddress(members=tuple(members[first:] + members[:first]), cluster=f"faults-{time.monotonic_ns()}")

    async def main() -> None:
        store = EtcdClusterStore(EtcdClient(address, EtcdSecrets()), cluster=address.cluster)
        try:
            async with asyncio.timeout(100):
                await body(store)
        finally:
            await store.close()

    try:
        asyncio.run(main())
    finally:
        for member in range(len(members)):
            if etcd.is_frozen(member):
                etcd.thaw(member)
        etcd.restart_all()


@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_the_member_that_is_asked_is_lost(trio: EtcdProcess, how: str) -> None:
    leader = trio.leader()
    other = (leader + 1) % 3

    async def body(store: ClusterStore) -> None:
        lease = await store.grant(ttl_ns=20 * SECOND_NS)
        await store.put("a", "1", lease=lease.id)
        await asyncio.to_thread(getattr(trio, how), other)
        # one attempt is lost, no call is: each of these may be repeated
        assert (await store.load()).entries["a"].value == "1"
        await store.put("a", "2", lease=lease.id)
        assert (await store.renew(lease.id)).id == lease.id

    run(trio, body, first=other)


@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_the_leader_is_lost(trio: EtcdProcess, how: str) -> None:
    leader = trio.leader()

    async def body(store: ClusterStore) -> None:
        await store.put("a", "1")
        await asyncio.to_thread(getattr(trio, how), leader)

        async def writes() -> bool:
            try:
                await store.put("a", "2")
            except AWAY:
                return False
            return True

        await until(writes)
        assert (await store.load()).entries["a"].value == "2"

    run(trio, body, first=leader)


def test_a_watch_of_a_frozen_member_ends_when_another_is_asked(trio: EtcdProcess) -> None:
    member = (trio.leader() + 1) % 3

    async def body(store: ClusterStore) -> None:
        image = await store.load()
        changes = store.watch(image)
        await store.put("a", "1")
        assert len(await anext(changes)) == 1
        waiting = asyncio.ensure_future(anext(changes))
        await asyncio.to_thread(trio.freeze, member)
        await store.put("a", "2")
        with pytest.raises(Unavailable, match="another is asked"):
            await waiting
        again = store.watch(image)
        values: list[str] = []
        while len(values) < 2:
            values += [change.entry.value for change in await anext(again) if change.entry]
        assert values == ["1", "2"]

    run(trio, body, first=member)


def test_a_member_without_the_others_lets_go_of_its_watch_and_decides_nothing(trio: EtcdProcess) -> None:
    async def body(store: ClusterStore) -> None:
        revision = await store.put("view", "1", expected=ABSENT)
        waiting = asyncio.ensure_future(anext(store.watch(await store.load())))
        await asyncio.to_thread(trio.kill, 1)
        await asyncio.to_thread(trio.kill, 2)
        with pytest.raises(Unavailable):
            await waiting
        loaded, swapped = await asyncio.gather(
            store.load(), store.put("view", "2", expected=revision), return_exceptions=True
        )
        assert isinstance(loaded, AWAY)
        assert isinstance(swapped, (*AWAY, OutcomeUnknown))

    run(trio, body)


def test_a_swap_whose_answer_is_lost_says_so_and_happened_at_most_once(trio: EtcdProcess) -> None:
    member = (trio.leader() + 1) % 3

    async def body(store: ClusterStore) -> None:
        revision = await store.put("view", "1", expected=ABSENT)
        await asyncio.to_thread(trio.freeze, member)
        with pytest.raises(OutcomeUnknown):
            await store.put("view", "2", expected=revision)
        await asyncio.to_thread(trio.thaw, member)
        entry = (await store.load()).entries["view"]
        assert entry.value in ("1", "2")
        if entry.value == "2":
            with pytest.raises(StaleView):
                await store.put("view", "3", expected=revision)

    run(trio, body, first=member)


def test_nobody_there_is_told_within_the_time_of_a_call(trio: EtcdProcess) -> None:
    async def body(store: ClusterStore) -> None:
        image = await store.load()
        await asyncio.to_thread(trio.kill_all)
        calls = (store.load(), store.put("a", "1"), store.grant(ttl_ns=SECOND_NS))
        for failure in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(failure, AWAY)
            assert "etcd member" in str(failure)
        with pytest.raises(AWAY):
            await anext(store.watch(image))

    run(trio, body)


def test_changes_that_were_compacted_are_not_passed_over(shared_etcd: EtcdProcess) -> None:
    async def body(store: ClusterStore) -> None:
        image = await store.load()
        for value in "123":
            revision = await store.put("a", value)
        await asyncio.to_thread(shared_etcd.post, 0, "/v3/kv/compaction", {"revision": revision})
        with pytest.raises(StaleView, match="compacted"):
            await anext(store.watch(image))

    run(shared_etcd, body)


def test_a_file_store_belongs_to_one_process(tmp_path: Path) -> None:
    async def main() -> None:
        store = FileClusterStore(tmp_path / "cluster.json", clock=time.monotonic_ns)
        with pytest.raises(Unavailable, match="several nodes need etcd"):
            FileClusterStore(tmp_path / "cluster.json", clock=time.monotonic_ns)
        await store.close()
        await FileClusterStore(tmp_path / "cluster.json", clock=time.monotonic_ns).close()

    asyncio.run(main())


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": 9}', '{"version": 1, "entries": {"a": 1}}'])
def test_a_damaged_file_store_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(content)
    with pytest.raises(FormatUnsupported, match=r"cluster\.json"):
        FileClusterStore(path, clock=time.monotonic_ns)


def test_a_file_store_that_cannot_be_written_keeps_what_it_has(tmp_path: Path) -> None:
    async def main() -> None:
        folder = tmp_path / "folder"
        folder.mkdir()
        store = FileClusterStore(folder / "cluster.json", clock=time.monotonic_ns)
        await store.put("a", "1")
        folder.rename(tmp_path / "moved")
        with pytest.raises(Unavailable, match="cannot be written"):
            await store.put("a", "2")
        assert (await store.load()).entries["a"].value == "1"

    asyncio.run(main())
