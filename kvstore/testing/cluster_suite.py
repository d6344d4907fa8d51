"""The conformance suite of cluster stores: what every `ClusterStore` must do, wherever it keeps its entries.

A test class inherits `ClusterStoreSuite` and gives `open`, which returns a store with nothing in it, and `reopen`,
which returns another store on what a closed one left behind. Times are real: leases are the shortest there are.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import pytest

from kvstore.cluster.charter import PEER_TOKEN_NAME, draw
from kvstore.cluster.store import ABSENT, Change, ClusterStore, Image
from kvstore.errors import Closed, InvalidRequest, LeaseExpired, StaleView
from kvstore.limits import SECOND_NS, STORE_VALUE_BYTES_MAX

Result = TypeVar("Result")

WAIT_SECONDS = 30.0


async def until(check: Callable[[], Awaitable[bool]]) -> None:
    """Waits for what a store will say in a while."""
    async with asyncio.timeout(WAIT_SECONDS):
        while not await check():
            await asyncio.sleep(0.05)


class ClusterStoreSuite:
    """See the module."""

    def open(self) -> ClusterStore:
        """A store with nothing in it."""
        raise NotImplementedError

    def reopen(self) -> ClusterStore:
        """Another store on what the last one of this test left."""
        raise NotImplementedError

    def run(self, body: Callable[[ClusterStore], Awaitable[Result]]) -> Result:
        """Runs `body` with a new store on a loop of its own."""

        async def main() -> Result:
            store = self.open()
            try:
                async with asyncio.timeout(2 * WAIT_SECONDS):
                    return await body(store)
            finally:
                await store.close()

        return asyncio.run(main())

    def test_it_begins_empty(self) -> None:
        async def body(store: ClusterStore) -> None:
            assert (await store.load()).entries == {}

        self.run(body)

    def test_what_is_written_is_loaded(self) -> None:
        async def body(store: ClusterStore) -> None:
            first = await store.put("view", "one")
            second = await store.put("tenants/a%20b", "größe")
            image = await store.load()
            assert {name: entry.value for name, entry in image.entries.items()} == {
                "view": "one",
                "tenants/a%20b": "größe",
            }
            assert (image.entries["view"].revision, image.entries["tenants/a%20b"].revision) == (first, second)
            assert 0 < first < second <= image.revision

        self.run(body)

    def test_entries_outlive_the_store_that_wrote_them(self) -> None:
        async def body(store: ClusterStore) -> None:
            revision = await store.put("policy/p", "kept")
            await store.close()
            again = self.reopen()
            image = await again.load()
            assert (image.entries["policy/p"].value, image.entries["policy/p"].revision) == ("kept", revision)
            with pytest.raises(StaleView):
                await again.put("policy/p", "x", expected=ABSENT)
            assert await again.put("policy/p", "x", expected=revision) > revision
            await again.close()

        self.run(body)

    def test_of_two_who_expect_the_same_one_writes(self) -> None:
        async def body(store: ClusterStore) -> None:
            first = await store.put("view", "1", expected=ABSENT)
            with pytest.raises(StaleView):
                await store.put("view", "other", expected=ABSENT)
            second = await store.put("view", "2", expected=first)
            with pytest.raises(StaleView):
                await store.put("view", "other", expected=first)
            with pytest.raises(StaleView):
                await store.delete("view", expected=first)
            assert (await store.load()).entries["view"].value == "2"
            assert await store.delete("view", expected=second)
            with pytest.raises(StaleView):
                await store.put("view", "3", expected=second)
            assert (await store.load()).entries == {}

        self.run(body)

    def test_many_swaps_at_once_lose_none(self) -> None:
        async def add(store: ClusterStore) -> None:
            while True:
                entry = (await store.load()).entries["count"]
                try:
                    await store.put("count", str(int(entry.value) + 1), expected=entry.revision)
                except StaleView:
                    continue
                return

        async def body(store: ClusterStore) -> None:
            await store.put("count", "0")
            await asyncio.gather(*(add(store) for _ in range(12)))
            assert (await store.load()).entries["count"].value == "12"

        self.run(body)

    def test_of_many_who_draw_at_once_all_hold_the_same(self) -> None:
        async def body(store: ClusterStore) -> None:
            drawn = await asyncio.gather(*(draw(store, PEER_TOKEN_NAME, f"token of {number}") for number in range(12)))
            assert len(set(drawn)) == 1
            assert (await store.load()).entries[PEER_TOKEN_NAME].value == drawn[0]
            assert await draw(store, PEER_TOKEN_NAME, "later") == drawn[0]
            await store.delete(PEER_TOKEN_NAME)
            assert await draw(store, PEER_TOKEN_NAME, "anew") == "anew"

        self.run(body)

    def test_deleting_nothing_is_no_error(self) -> None:
        async def body(store: ClusterStore) -> None:
            assert not await store.delete("quota/q")
            await store.put("quota/q", "1")
            assert await store.delete("quota/q")
            assert not await store.delete("quota/q")

        self.run(body)

    def test_names_and_values_are_bounded(self) -> None:
        async def body(store: ClusterStore) -> None:
            for name in ("", "/view", "view/", "a//b", "a b", "größe", "x" * 2_000):
                with pytest.raises(InvalidRequest):
                    await store.put(name, "x")
            with pytest.raises(InvalidRequest):
                await store.put("view", "x" * (STORE_VALUE_BYTES_MAX + 1))
            await store.put("view", "x" * STORE_VALUE_BYTES_MAX)
            for ttl_ns in (0, SECOND_NS // 2, 10**6 * SECOND_NS):
                with pytest.raises(InvalidRequest):
                    await store.grant(ttl_ns=ttl_ns)

        self.run(body)

    def test_a_lease_that_is_renewed_keeps_its_entries(self) -> None:
        async def body(store: ClusterStore) -> None:
            lease = await store.grant(ttl_ns=SECOND_NS)
            assert lease.ttl_ns >= SECOND_NS
            await store.put("targets/t", "here", lease=lease.id)
            loop = asyncio.get_running_loop()
            end = loop.time() + 2.5 * lease.ttl_ns / SECOND_NS
            while loop.time() < end:
                await asyncio.sleep(lease.ttl_ns / SECOND_NS / 5)
                assert (await store.renew(lease.id)).id == lease.id
            assert (await store.load()).entries["targets/t"].lease == lease.id

        self.run(body)

    def test_a_lease_that_is_not_renewed_takes_its_entries_along(self) -> None:
        async def body(store: ClusterStore) -> None:
            lease = await store.grant(ttl_ns=SECOND_NS)
            await store.put("targets/t", "here", lease=lease.id)
            await store.put("targets/u", "stays")

            async def is_gone() -> bool:
                return list((await store.load()).entries) == ["targets/u"]

            await until(is_gone)
            with pytest.raises(LeaseExpired):
                await store.renew(lease.id)
            with pytest.raises(LeaseExpired):
                await store.put("targets/t", "again", lease=lease.id)

        self.run(body)

    def test_a_revoked_lease_is_gone_at_once(self) -> None:
        async def body(store: ClusterStore) -> None:
            lease = await store.grant(ttl_ns=60 * SECOND_NS)
            await store.put("targets/t", "1", lease=lease.id)
            await store.put("targets/u", "2", lease=lease.id)
            await store.revoke(lease.id)
            assert (await store.load()).entries == {}
            await store.revoke(lease.id)
            with pytest.raises(LeaseExpired):
                await store.renew(lease.id)

        self.run(body)

    def test_an_entry_written_anew_belongs_to_the_new_lease(self) -> None:
        async def body(store: ClusterStore) -> None:
            old, new = [await store.grant(ttl_ns=60 * SECOND_NS) for _ in range(2)]
            await store.put("targets/t", "1", lease=old.id)
            await store.put("targets/t", "2", lease=new.id)
            await store.revoke(old.id)
            assert (await store.load()).entries["targets/t"].value == "2"

        self.run(body)

    def test_a_watch_tells_every_change_in_order(self) -> None:
        async def body(store: ClusterStore) -> None:
            await store.put("before", "0")
            image = await store.load()
            await store.put("missed/by/load", "1")
            async with watching(store, image) as next_changes:
                assert [(one.name, _value(one)) for one in await next_changes()] == [("missed/by/load", "1")]
                await store.put("a", "2")
                await store.put("a", "3")
                await store.delete("a")
                seen = [one for _ in range(3) for one in await next_changes()]
                assert [(one.name, _value(one)) for one in seen] == [("a", "2"), ("a", "3"), ("a", None)]

        self.run(body)

    def test_a_watch_tells_that_a_lease_ended(self) -> None:
        async def body(store: ClusterStore) -> None:
            lease = await store.grant(ttl_ns=SECOND_NS)
            await store.put("targets/t", "1", lease=lease.id)
            await store.put("targets/u", "2", lease=lease.id)
            async with watching(store, await store.load()) as next_changes:
                gone: dict[str, str | None] = {}
                while len(gone) < 2:
                    gone |= {one.name: _value(one) for one in await next_changes()}
                assert gone == {"targets/t": None, "targets/u": None}

        self.run(body)

    def test_two_watches_see_the_same(self) -> None:
        async def body(store: ClusterStore) -> None:
            image = await store.load()
            async with watching(store, image) as one, watching(store, image) as other:
                await store.put("a", "1")
                assert await one() == await other()

        self.run(body)

    def test_an_image_of_another_store_is_not_watched(self) -> None:
        async def body(store: ClusterStore) -> None:
            image = await store.load()
            foreign = Image(store_id="another", revision=image.revision, entries={})
            with pytest.raises(StaleView):
                async with watching(store, foreign) as next_changes:
                    await next_changes()
            ahead = Image(store_id=image.store_id, revision=image.revision + 1_000, entries={})
            with pytest.raises(StaleView):
                async with watching(store, ahead) as next_changes:
                    await next_changes()

        self.run(body)

    def test_after_close_everything_says_so(self) -> None:
        async def body(store: ClusterStore) -> None:
            await store.close()
            await store.close()
            for call in (store.load(), store.put("a", "1"), store.delete("a"), store.grant(ttl_ns=SECOND_NS)):
                with pytest.raises(Closed):
                    await call
            for late in (store.renew(1), store.revoke(1)):
                with pytest.raises(Closed):
                    await late

        self.run(body)

    def test_close_ends_a_watch(self) -> None:
        async def body(store: ClusterStore) -> None:
            async with watching(store, await store.load()) as next_changes:
                waiting = asyncio.ensure_future(next_changes())
                await asyncio.sleep(0)
                await store.close()
                with pytest.raises(Closed):
                    await waiting

        self.run(body)


@asynccontextmanager
async def watching(store: ClusterStore, image: Image) -> AsyncIterator[Callable[[], Awaitable[tuple[Change, ...]]]]:
    """Watches, and gives what to call for the next changes; waiting for them is bounded."""
    changes = store.watch(image)

    async def following() -> tuple[Change, ...]:
        async with asyncio.timeout(WAIT_SECONDS):
            return await anext(changes)

    try:
        yield following
    finally:
        await changes.aclose()  # type: ignore[attr-defined]


def _value(change: Change) -> str | None:
    return change.entry.value if change.entry is not None else None
