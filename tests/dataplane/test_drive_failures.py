"""A drive that fails while the node runs: it says so, takes no puts any more, and the other one does."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.engine.engine import DriveEngine, EngineSettings
from kvstore.engine.job import Steps
from kvstore.engine.told import raise_generation
from kvstore.limits import DEVICE_FAILED_AFTER_ERRORS, SECOND_NS, SPACE_RETRY_NS_MIN, MiB
from kvstore.server.drive_set import DriveSet
from kvstore.server.drives import Drive
from kvstore.server.worker_verbs import Started, WorkerVerbs
from kvstore.testing.plane_lab import PlaneLab
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore.types.results import ItemStatus
from kvstore.wire.codec import unpack_plain

NAMESPACE = Namespace(
    tenant="default", model="m", weights="w", layout=KVLayout.opaque(chunk_bytes=1 * MiB, chunk_tokens=16)
)
KEYS = [os.urandom(32) for _ in range(24)]
VALUES = [os.urandom(5000) for _ in KEYS]


@pytest.fixture
def drives(tmp_path: Path) -> Iterator[list[Drive]]:
    made = []
    for name in "ab":
        folder = tmp_path / name
        folder.mkdir()
        settings = EngineSettings(
            capacity_bytes=64 * MiB,
            segment_bytes=8 * MiB,
            cache_bytes=0,
            staging_bytes=16 * MiB,
            device="threads",
            prefault=False,
        )
        engine = DriveEngine.open(folder, settings, now_ns=time.monotonic_ns())
        made.append(Drive(id=engine.store.superblock.disk_id.hex(), path=str(folder), engine=engine))
    yield made
    for drive in made:
        drive.engine.close()


def fail(drive: Drive, number: int) -> None:
    """As many errors in a row as make a drive failed."""
    for _ in range(DEVICE_FAILED_AFTER_ERRORS):
        drive.engine._queue.health.note_error(OSError(number, os.strerror(number)), time.monotonic_ns())


def test_puts_go_to_the_drive_that_takes_them(drives: list[Drive]) -> None:
    lab = PlaneLab(DriveSet([(drive.id, drive.engine) for drive in drives]))
    client = lab.client()
    client.register(NAMESPACE.manifest())
    fail(drives[0], errno.EIO)
    assert client.put(NAMESPACE.digest, KEYS, VALUES) == dict.fromkeys(range(len(KEYS)), (ItemStatus.STORED, ""))
    held = [len(drive.engine.catalog.index) for drive in drives]
    assert held == [0, len(KEYS)]
    assert client.get(NAMESPACE.digest, KEYS)[1] == dict(enumerate(VALUES))
    lab.turn_until(lambda: all(drive.engine.idle for drive in drives))
    lab.close()


def test_a_drive_that_erased_nothing_is_tried_with_puts_after_a_while(drives: list[Drive]) -> None:
    lab = PlaneLab(DriveSet([(drive.id, drive.engine) for drive in drives]))
    client = lab.client()
    client.register(NAMESPACE.manifest())
    engine, now_ns = drives[0].engine, time.monotonic_ns()
    engine.store.reclaimer.unerased, engine.store.reclaimer.erase_failed = 2, OSError(errno.EIO, "no")
    engine.poll(now_ns)
    half = len(KEYS) // 2
    client.put(NAMESPACE.digest, KEYS[:half], VALUES[:half])
    assert [len(drive.engine.catalog.index) for drive in drives] == [0, half]
    engine.poll(now_ns + 2 * SPACE_RETRY_NS_MIN)
    assert drives[0].describe()["state"] == "failed", "until it has erased a segment"
    client.put(NAMESPACE.digest, KEYS[half:], VALUES[half:])
    held = [len(drive.engine.catalog.index) for drive in drives]
    assert held[0] > 0
    lab.turn_until(lambda: all(drive.engine.idle for drive in drives))
    lab.close()


@pytest.mark.parametrize(
    ("number", "state", "fix"),
    [(errno.EIO, "failed", "replace it"), (errno.EROFS, "read-only", "mount it for writing")],
)
def test_a_drive_says_what_is_wrong_with_it(drives: list[Drive], number: int, state: str, fix: str) -> None:
    assert drives[0].describe()["state"] == "serving"
    drives[0].engine._queue.health.note_error(OSError(errno.EIO, "once"), time.monotonic_ns())
    assert drives[0].describe()["state"] == "suspect"
    fail(drives[0], number)
    said = drives[0].describe()
    assert said["state"] == state
    assert fix in str(said["detail"])
    assert os.strerror(number) in str(said["detail"])


def test_a_drive_that_was_mounted_read_only_says_so_until_it_takes_writes_again(
    drives: list[Drive], caplog: pytest.LogCaptureFixture
) -> None:
    """Its reads succeed, so that its health says nothing of it."""
    drive, verbs = drives[0], WorkerVerbs(Started(drives=drives[:1]))
    engine, store, now_ns = drive.engine, drive.engine.store, time.monotonic_ns()

    def poll(until: Callable[[], bool]) -> None:
        nonlocal now_ns
        for _ in range(10_000):
            now_ns += SECOND_NS // 100
            engine.poll(now_ns)
            verbs._tell_of_failures()
            if until():
                return
        raise AssertionError(drive.describe())

    failing = OSError(errno.EROFS, os.strerror(errno.EROFS))
    write = store.log._put

    def refused(used: list[int]) -> Steps[OSError | None]:
        yield from ()
        return failing

    store.log._put = refused  # type: ignore[method-assign]
    engine.add_namespace(NAMESPACE.manifest())
    poll(lambda: store.log.failed is not None)
    for _ in range(3):  # each time that the log is tried again
        poll(lambda: store.log.failed is None)
        assert drive.describe()["state"] == "read-only"
        assert not engine.takes_puts
        poll(lambda: store.log.failed is not None)
    said = str(drive.describe()["detail"])
    assert "mount it for writing" in said
    assert os.strerror(errno.EROFS) in said
    told = [one.getMessage() for one in caplog.records if "takes no puts" in one.getMessage()]
    assert len(told) == 1, "it is told of once"
    assert drive.path in told[0]
    store.log._put = write  # type: ignore[method-assign]
    poll(lambda: drive.describe()["state"] == "serving")
    assert engine.takes_puts
    assert any("takes puts again" in one.getMessage() for one in caplog.records)


# --- drops that a drive has missed ------------------------------------------------------------------------------------
def joined(drives: list[Drive], digest: bytes, generation: int) -> None:
    DriveSet([(drive.id, drive.engine) for drive in drives])


def told(drives: list[Drive], digest: bytes, generation: int) -> None:
    answer = WorkerVerbs(Started(drives=drives)).carry_out(
        "dropped_set", {"digests": digest, "generations": [generation]}
    )
    assert unpack_plain(answer, what="answer") == {"count": 1}


@pytest.mark.parametrize("catch_up", [joined, told])
def test_a_drive_catches_up_in_one_step_however_much_it_has_missed(
    drives: list[Drive], catch_up: Callable[[list[Drive], bytes, int], None]
) -> None:
    """What generation there is may come from another node: a drop for each one between would never end."""
    generation = 0x7FFF_FFFF
    refs = [drive.engine.add_namespace(NAMESPACE.manifest()) for drive in drives]
    raise_generation(drives[0].engine, refs[0], generation, lambda: None)
    catch_up(drives, NAMESPACE.digest, generation)
    now = [drive.engine.namespace(NAMESPACE.digest) for drive in drives]
    assert [ref.generation for ref in now if ref is not None] == [generation] * 2
    while not all(drive.engine.idle for drive in drives):
        for drive in drives:
            drive.engine.poll(time.monotonic_ns())
