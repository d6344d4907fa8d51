"""What a supervisor makes of workers that refuse, die, hang and talk nonsense."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from kvstore import errors
from kvstore.limits import MS_NS, SECOND_NS, WORKER_BACKOFF_NS_MAX, WORKER_BACKOFF_NS_MIN, MiB
from kvstore.server.control import Control
from kvstore.server.fleet import Fleet
from kvstore.server.launch import WorkerLaunch
from kvstore.server.report import Drained, NodeState, WorkerState
from kvstore.server.worker_handle import Pulse, WorkerHandle, backoff_ns
from kvstore.telemetry.metrics import SupervisorMetrics
from kvstore.wire.codec import Plain

STAND_IN = Path(__file__).with_name("stand_in_worker.py")
LAUNCH = WorkerLaunch(
    admin_fd=-1,
    rail=0,
    node_id="n",
    data_dirs=("/nowhere",),
    capacity_bytes=64 * MiB,
    hosts=("127.0.0.1",),
    advertise="",
    data_port=0,
    local_socket="",
    cache_bytes=0,
    staging_bytes=16 * MiB,
    device="auto",
    queue_depth=32,
    segment_bytes=0,
    write_amplification_max=1.3,
    endurance_bytes_day=0,
    scrub_bytes_second=0,
    repair_bytes_second=0,
    drain_ns=SECOND_NS,
    has_tenants=False,
    drives_of_node=1,
    cluster_id=bytes(16).hex(),
    log_level="info",
    log_format="human",
)


def worker(way: str, on_change: Callable[[], None] = lambda: None) -> WorkerHandle:
    """A worker that behaves in the given way."""
    return WorkerHandle(LAUNCH, on_change=on_change, command=(sys.executable, str(STAND_IN), way))


def serve(way: str, work: Callable[[WorkerHandle], Awaitable[None]]) -> WorkerHandle:
    """Run `work` beside a worker that serves; whatever happens, the process is gone afterwards."""
    handle = worker(way)

    async def play() -> None:
        life = asyncio.create_task(handle.run())
        try:
            async with asyncio.timeout(60):
                await asyncio.wait(
                    (life, asyncio.create_task(handle.wait_serving())), return_when=asyncio.FIRST_COMPLETED
                )
                if life.done():
                    life.result()
                await work(handle)
        finally:
            life.cancel()
            await asyncio.gather(life, return_exceptions=True)

    asyncio.run(play())
    assert not Path(f"/proc/{handle.report().pid}").exists()
    return handle


def stopped_process(pid: int) -> None:
    """Freezes a process, as a hang would."""
    os.kill(pid, signal.SIGSTOP)


def impatient(told: list[str]) -> WorkerHandle:
    """A handle that asks often and gives up soon; `told` gets what it says of the worker, change by change."""

    def on_change() -> None:
        told.append(handle.report().detail)

    handle = WorkerHandle(
        LAUNCH,
        on_change=on_change,
        command=(sys.executable, str(STAND_IN), "well"),
        pulse_ns=20 * MS_NS,
        pulse_wait_ns=500 * MS_NS,
    )
    return handle


async def until(condition: Callable[[], bool]) -> None:
    """Returns once it holds; the test's timeout ends it otherwise."""
    while not condition():
        await asyncio.sleep(0.01)


def test_a_worker_that_hangs_is_killed_and_started_again() -> None:
    told: list[str] = []

    async def play() -> None:
        handle = impatient(told)
        life = asyncio.create_task(handle.run())
        try:
            await handle.wait_serving()
            frozen = handle.report().pid
            stopped_process(frozen)
            await until(lambda: handle.state is WorkerState.SERVING and handle.restarts == 1)
            assert handle.report().pid != frozen
            assert not Path(f"/proc/{frozen}").exists()
            await handle.stop(within_ns=SECOND_NS)
        finally:
            life.cancel()
            await asyncio.gather(life, return_exceptions=True)

    asyncio.run(play())
    assert any("no sign of life" in text and "SIGKILL" in text for text in told), told


def test_a_pulse_tells_rates() -> None:
    first = Pulse().next({"sent_bytes": 1000, "received_bytes": 0, "lookup_keys": 10, "lookup_hits": 5}, 7 * SECOND_NS)
    assert (first.sent_bytes_second, first.lookup_hits) == (0.0, 5)
    second = first.next({"sent_bytes": 5000, "received_bytes": 2000}, 9 * SECOND_NS)
    assert (second.sent_bytes_second, second.received_bytes_second) == (2000.0, 1000.0)


def test_launch_survives_the_command_line() -> None:
    assert WorkerLaunch.from_argument(LAUNCH.to_argument()) == LAUNCH


def test_back_off_grows_to_its_bound() -> None:
    delays = [backoff_ns(failures) for failures in range(1, 40)]
    assert delays[0] == WORKER_BACKOFF_NS_MIN
    assert delays == sorted(delays)
    assert delays[-1] == WORKER_BACKOFF_NS_MAX


def test_calls_reach_a_worker_that_serves() -> None:
    async def work(handle: WorkerHandle) -> None:
        value = await handle.channel.admin("echo", {"a": b"\x00", "b": [1, 2]}, deadline_ns=SECOND_NS)
        assert value == {"verb": "echo", "given": {"a": b"\x00", "b": [1, 2]}}
        assert handle.report().state is WorkerState.SERVING
        await handle.stop(within_ns=SECOND_NS)

    serve("well", work)


def test_the_words_of_a_worker_that_refuses_are_kept() -> None:
    async def work(_: WorkerHandle) -> None:
        pytest.fail("it never served")

    with pytest.raises(errors.Unavailable, match="drive /dev/x is in use by process 7; stop it"):
        serve("refuses", work)


def test_a_worker_that_dies_before_it_serves_fails_the_start() -> None:
    async def work(_: WorkerHandle) -> None:
        pytest.fail("it never served")

    with pytest.raises(errors.Unavailable, match="exit code 9 before it was ready"):
        serve("dies", work)


def test_a_worker_that_talks_nonsense_fails_the_start() -> None:
    async def work(_: WorkerHandle) -> None:
        pytest.fail("it never served")

    with pytest.raises(errors.Internal, match="data addresses"):
        serve("nonsense", work)


def test_a_worker_that_died_is_started_again() -> None:
    async def work(handle: WorkerHandle) -> None:
        first = handle.report().pid
        os.kill(first, signal.SIGKILL)
        while handle.report().pid == first or handle.state is not WorkerState.SERVING:
            await asyncio.sleep(0.01)
        assert handle.restarts == 1
        with pytest.raises(errors.Unavailable):
            await handle.channel.admin("explode", {}, deadline_ns=SECOND_NS)

    serve("well", work)


def test_a_drained_worker_that_died_is_drained_again() -> None:
    async def work(handle: WorkerHandle) -> None:
        async def die() -> dict[str, Plain]:
            first = handle.report().pid
            os.kill(first, signal.SIGKILL)
            while handle.report().pid == first or handle.state not in (WorkerState.SERVING, WorkerState.DRAINING):
                await asyncio.sleep(0.01)
            value = await handle.channel.admin("drains", {}, deadline_ns=SECOND_NS)
            return dict(value)

        await handle.set_draining(True)
        assert await die() == {"resume": [False]}
        assert handle.state is WorkerState.DRAINING
        await handle.set_draining(False)
        assert await die() == {"resume": []}
        assert handle.state is WorkerState.SERVING

    serve("well", work)


def test_a_worker_that_is_down_keeps_no_other_from_being_drained() -> None:
    async def work(handle: WorkerHandle) -> None:
        fleet = Fleet(node_id="n", start_epoch=1, metrics=SupervisorMetrics())
        fleet.adopt([worker("well"), handle])
        with pytest.raises(errors.Unavailable, match="not started yet"):
            await Control(fleet).drain(resume=False)
        assert handle.state is WorkerState.DRAINING

    serve("well", work)


def test_a_worker_that_does_not_say_how_far_it_has_come_is_not_done() -> None:
    async def work(handle: WorkerHandle) -> None:
        fleet = Fleet(node_id="n", start_epoch=1, metrics=SupervisorMetrics())
        fleet.adopt([handle])
        assert await Control(fleet).drain(resume=False) == Drained(draining=True, done=False)

    serve("mute", work)


def test_an_answer_that_comes_too_late_is_not_taken_for_the_next() -> None:
    async def work(handle: WorkerHandle) -> None:
        with pytest.raises(errors.DeadlineExceeded, match="50 ms"):
            await handle.channel.admin("stats", {}, deadline_ns=50 * MS_NS)
        value = await handle.channel.admin("echo", {}, deadline_ns=30 * SECOND_NS)
        assert value["verb"] == "echo"

    serve("slow_stats", work)


def test_calls_at_once_queue_behind_each_other() -> None:
    async def work(handle: WorkerHandle) -> None:
        verbs = [f"verb{number}" for number in range(20)]
        calls = (handle.channel.admin(verb, {}, deadline_ns=30 * SECOND_NS) for verb in verbs)
        assert [value["verb"] for value in await asyncio.gather(*calls)] == verbs

    serve("well", work)


def test_a_worker_that_ignores_its_end_is_killed() -> None:
    async def work(handle: WorkerHandle) -> None:
        await handle.stop(within_ns=0)

    serve("deaf", work)


def test_recovery_is_visible_and_a_worker_can_be_stopped_in_it() -> None:
    async def play() -> None:
        fleet = Fleet(node_id="n", start_epoch=7, metrics=SupervisorMetrics())
        handle = worker("never_ready", fleet.changed)
        fleet.adopt([handle])
        life = asyncio.create_task(handle.run())
        while handle.report().pid == 0:
            await asyncio.sleep(0.01)
        assert fleet.state is NodeState.RECOVERING
        assert not fleet.serving
        report = await fleet.report()
        assert [(one.state, one.detail) for one in report.workers] == [(WorkerState.RECOVERING, "reads its drives")]
        with pytest.raises(errors.Unavailable, match="recovering"):
            _ = handle.channel
        await handle.stop(within_ns=SECOND_NS)
        await asyncio.gather(life, return_exceptions=True)
        assert not Path(f"/proc/{handle.report().pid}").exists()

    asyncio.run(play())


def test_the_view_and_the_state_follow_the_worker() -> None:
    async def play() -> None:
        fleet = Fleet(node_id="n", start_epoch=7, metrics=SupervisorMetrics())
        handle = worker("well", fleet.changed)
        fleet.adopt([handle])
        assert fleet.state is NodeState.DOWN
        assert fleet.view.targets == ()
        life = asyncio.create_task(handle.run())
        await handle.wait_serving()
        await asyncio.sleep(0)
        assert fleet.state is NodeState.SERVING
        assert fleet.serving
        (target,) = fleet.view.targets
        assert (target.id, target.weight, fleet.view.epoch) == ("t", 64 / 1024, 8)
        await fleet.push_view()
        await handle.set_draining(True)
        assert fleet.state is NodeState.DRAINING
        assert fleet.serving
        await handle.set_draining(False)
        assert fleet.view.epoch == 10
        fleet.stop_placing()
        assert not fleet.serving
        assert [view.epoch async for view in fleet.views(0)] == [11]
        await handle.stop(within_ns=SECOND_NS)
        await life

    asyncio.run(play())
