"""A drop that is made up for is made once at each worker: what is put behind it is not hidden by the next one's."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from kvstore.errors import Unavailable
from kvstore.limits import CLUSTER_VALUE_BYTES_MAX
from kvstore.server.admin import AdminChannel
from kvstore.server.drops import PendingDrops
from kvstore.server.worker_handle import OwnedTarget, Readiness, WorkerHandle
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore.wire.messages import Drop, End

GONE = Namespace(tenant="default", model="gone", weights="w", layout=KVLayout.opaque(chunk_bytes=4096, chunk_tokens=16))


class MemoryRecord:
    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.is_full = False

    def get(self, key: str) -> str | None:
        return self.values.get(key)

    def put(self, key: str, value: str) -> None:
        if self.is_full:
            raise Unavailable("no space left on device")
        self.values[key] = value


class ScriptedWorker:
    """Counts the drops that it is told of, and is away at first where a test says so."""

    def __init__(self, *, is_away: bool, drive: str) -> None:
        self.is_away = is_away
        self.drive = drive
        self.drops = 0

    @property
    def readiness(self) -> Readiness | None:
        if self.is_away:
            return None
        return Readiness(data=(), boot_id=b"", targets=(OwnedTarget(id=self.drive, path="/same", capacity_bytes=1),))

    @property
    def channel(self) -> AdminChannel:
        if self.is_away:
            raise Unavailable("it is restarting")
        return cast("AdminChannel", self)

    async def call(self, message: object, answer: type[End], *, deadline_ns: int) -> End:
        self.drops += isinstance(message, Drop)
        return End(statuses=b"")


def test_a_worker_that_has_dropped_it_is_not_told_again_when_another_comes_back() -> None:
    pending = PendingDrops(MemoryRecord())
    pending.add(GONE.manifest())
    first, second = ScriptedWorker(is_away=False, drive="a"), ScriptedWorker(is_away=True, drive="b")
    workers = [cast("WorkerHandle", one) for one in (first, second)]
    asyncio.run(pending.make_up(workers))
    second.is_away = False
    asyncio.run(pending.make_up(workers))
    assert (first.drops, second.drops) == (1, 1)
    pending.add(GONE.manifest())
    asyncio.run(pending.make_up(workers))
    assert (first.drops, second.drops) == (2, 2), "another drop"


def test_a_worker_that_has_dropped_it_is_not_told_again_after_a_restart_of_the_supervisor() -> None:
    record = MemoryRecord()
    PendingDrops(record).add(GONE.manifest())
    told = []
    for is_away in (True, False, False):
        first, second = ScriptedWorker(is_away=False, drive="a"), ScriptedWorker(is_away=is_away, drive="b")
        asyncio.run(PendingDrops(record).make_up([cast("WorkerHandle", one) for one in (first, second)]))
        told.append((first.drops, second.drops))
    assert told == [(1, 0), (0, 1), (0, 0)], "each once"


def test_a_drive_that_was_not_told_is_told_where_one_that_was_told_lay() -> None:
    record = MemoryRecord()
    PendingDrops(record).add(GONE.manifest())
    told = []
    for drives in (("a", ""), ("b", "a")):  # by place; the second is away at first
        workers = [ScriptedWorker(is_away=not drive, drive=drive) for drive in drives]
        asyncio.run(PendingDrops(record).make_up([cast("WorkerHandle", one) for one in workers]))
        told.append([one.drops for one in workers])
    assert told == [[1, 0], [1, 0]]


def test_a_record_that_takes_nothing_does_not_end_the_making_up(caplog: pytest.LogCaptureFixture) -> None:
    record = MemoryRecord()
    pending = PendingDrops(record)
    pending.add(GONE.manifest())
    record.is_full = True
    first, second = ScriptedWorker(is_away=False, drive="a"), ScriptedWorker(is_away=True, drive="b")
    asyncio.run(pending.make_up([cast("WorkerHandle", one) for one in (first, second)]))
    assert first.drops == 1
    assert "cannot be kept" in caplog.text


def test_who_has_made_up_for_drops_is_kept_within_a_bound(caplog: pytest.LogCaptureFixture) -> None:
    record = MemoryRecord()
    pending = PendingDrops(record)
    pending.add(GONE.manifest())
    long_id = "a" * CLUSTER_VALUE_BYTES_MAX
    workers = [ScriptedWorker(is_away=False, drive=long_id), ScriptedWorker(is_away=True, drive="b")]
    asyncio.run(pending.make_up([cast("WorkerHandle", one) for one in workers]))
    assert all(len(value) <= CLUSTER_VALUE_BYTES_MAX for value in record.values.values())
    assert "who has made up for a drop cannot be kept" in caplog.text
    assert [one.drops for one in workers] == [1, 0]
