"""Opening a drive: what is chosen and said, what is refused, and how a second owner waits."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import pytest

from kvstore.device import probe, uring_probe
from kvstore.device.base import IoKind, IoOp
from kvstore.device.file import open_data_file
from kvstore.device.probe import open_device
from kvstore.device.scattered import ScatteredRead
from kvstore.device.threads import ThreadsDevice
from kvstore.device.uring import Reaped, UringDevice
from kvstore.device.uring_probe import explain_setup_failure, make_ring, probe_uring
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.limits import MS_NS, QUEUE_DEPTH_MAX, SECOND_NS
from kvstore.telemetry.metrics import DeviceMetrics
from kvstore.testing.device_suite import MIB, PAGE, aligned, random_bytes, read, run, skewed, write

SIZE = 4 * MIB


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data"


# ---- what is chosen -----------------------------------------------------------------------------------------------


def test_auto_takes_io_uring_where_it_works(path: Path) -> None:
    device = open_device(path, size_bytes=SIZE)
    assert device.mode.name == "uring"
    assert "io_uring works on this file" in device.mode.reason
    device.register(aligned(MIB))
    assert "1 MiB of memory registered" in device.mode.reason
    device.close()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.EPERM, "seccomp"),
        (errno.ENOSYS, "the kernel has no io_uring"),
        (errno.ENOMEM, "ulimit -l"),
        (errno.EMFILE, "Too many open files"),
    ],
)
def test_without_io_uring_threads_say_why(path: Path, monkeypatch: pytest.MonkeyPatch, code: int, words: str) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, "io_uring_setup")

    monkeypatch.setattr(uring_probe, "_make_ring", refuse)
    device = open_device(path, size_bytes=SIZE)
    assert device.mode.name == "threads"
    assert words in device.mode.reason
    assert "io_uring_setup" in device.mode.reason
    device.close()
    with pytest.raises(Unavailable, match=words) as refused:
        open_device(path, size_bytes=SIZE, mode="uring")
    assert str(path) in str(refused.value)
    open_device(path, size_bytes=SIZE, mode="threads").close()  # the refused one has let go of the file


def test_without_the_binding_threads_say_why(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uring_probe, "BINDING_MISSING", "kvstore.device._uring is not built (no compiler)")
    device = open_device(path, size_bytes=SIZE)
    assert device.mode.name == "threads"
    assert "is not built" in device.mode.reason
    device.close()
    with pytest.raises(Unavailable, match="C compiler"):
        open_device(path, size_bytes=SIZE, mode="uring")


def test_an_operation_that_fails_on_this_file_is_found(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on kernels where every io_uring operation answers EOPNOTSUPP though the set-up works."""
    monkeypatch.setattr(uring_probe, "_try_one", lambda ring, op: "Operation not supported")
    device = open_device(path, size_bytes=SIZE)
    assert device.mode.name == "threads"
    assert "Operation not supported" in device.mode.reason
    device.close()


def test_an_operation_code_that_is_missing_is_done_without(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = uring_probe._try_one
    answers = iter(["", "", "", "Invalid argument", "Invalid argument"])  # readv, sync, read; then the fixed ones

    def sometimes(ring: Any, op: IoOp) -> str:
        return real(ring, op) or next(answers)

    monkeypatch.setattr(uring_probe, "_try_one", sometimes)
    device = open_device(path, size_bytes=SIZE)
    assert device.mode.name == "uring"
    assert "no read_fixed (Invalid argument)" in device.mode.reason
    assert "no readv_fixed (Invalid argument)" in device.mode.reason
    memory = aligned(MIB)
    device.register(memory)
    memory[:PAGE] = data = random_bytes(PAGE, 1)
    write(device, 0, memory[:PAGE])
    read(device, 0, memory[PAGE : 2 * PAGE])
    assert memory[PAGE : 2 * PAGE] == data
    device.close()


def test_memory_that_cannot_be_pinned_is_done_without(path: Path) -> None:
    file = open_data_file(path, size_bytes=SIZE, create=True)
    ring = TamperedRing(make_ring(file, depth=8))
    ring.refuse_memory = True
    device = UringDevice(file, ring, abilities=probe_uring(file), reason="test")
    memory = aligned(MIB)
    device.register(memory)
    assert "not registered (Cannot allocate memory; the locked memory limit is" in device.mode.reason
    write(device, 0, memory[:PAGE])
    device.close()


def test_the_sysctl_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    setting = tmp_path / "io_uring_disabled"
    setting.write_text("2\n")
    monkeypatch.setattr(uring_probe, "DISABLED_SYSCTL", setting)
    assert "kernel.io_uring_disabled is 2, set it to 0" in explain_setup_failure(OSError(errno.EPERM, "io_uring_setup"))


def test_a_file_system_without_direct_io_is_said(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_direct(fd: int, buffers: Any, offset: int) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    with monkeypatch.context() as patch:
        patch.setattr("os.preadv", no_direct)
        file = open_data_file(path, size_bytes=SIZE, create=True)
    assert not file.direct_io
    device = ThreadsDevice(file, depth=1, reason="test")
    assert "refuses O_DIRECT (Invalid argument)" in device.mode.reason
    write(device, 0, aligned(PAGE))
    device.close()


# ---- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mode": "dpdk"}, "use one of: auto, uring, threads"),
        ({"depth": 0}, "out of range"),
        ({"depth": QUEUE_DEPTH_MAX + 1}, "out of range"),
        ({"size_bytes": 5000}, "multiple of 4096"),
        ({"size_bytes": 0}, "no capacity was given"),
        ({"size_bytes": 1 << 60}, "lower the capacity"),
        ({"create": False}, "create the store first"),
    ],
)
def test_wrong_arguments(path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        open_device(path, **{"size_bytes": SIZE, **changes})


def test_a_folder_is_not_a_drive(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="Is a directory"):
        open_device(tmp_path, size_bytes=SIZE)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(InvalidRequest, match="neither a regular file nor a block device"):
        open_device(tmp_path / "fifo", size_bytes=SIZE)


def test_the_size_found_is_taken_when_none_is_given(path: Path) -> None:
    path.write_bytes(bytes(3 * PAGE + 100))
    device = open_device(path, size_bytes=0)
    assert device.size_bytes == 3 * PAGE
    device.close()


@pytest.mark.parametrize("mode", ["uring", "threads"])
@pytest.mark.parametrize("direct_io", [True, False])
def test_a_file_that_ends_inside_a_page_reads_short(path: Path, mode: str, direct_io: bool) -> None:
    path.write_bytes(data := random_bytes(3 * PAGE + 100, 3))
    device = open_device(path, size_bytes=0, mode=mode, direct_io=direct_io)
    back = aligned(8 * PAGE)
    assert read(device, PAGE, back[:PAGE], back[PAGE:]) == 2 * PAGE + 100
    assert back[: 2 * PAGE + 100] == data[PAGE:]
    device.close()


def test_a_lower_capacity_keeps_the_bytes_of_the_file(path: Path) -> None:
    open_device(path, size_bytes=SIZE).close()
    device = open_device(path, size_bytes=MIB)
    assert device.size_bytes == MIB
    assert path.stat().st_size == SIZE
    device.close()


def test_the_file_is_its_owners_alone(path: Path) -> None:
    open_device(path, size_bytes=SIZE).close()
    assert path.stat().st_mode & 0o777 == 0o600


# ---- one owner ----------------------------------------------------------------------------------------------------

HOLDER = """
import sys
from kvstore.device.base import IoKind, IoOp
from kvstore.device.probe import open_device
device = open_device(sys.argv[1], size_bytes=int(sys.argv[2]), mode=sys.argv[3], depth=32)
buffers = [memoryview(bytearray(b"x" * 65536)) for _ in range(32)]
device.submit([IoOp(IoKind.WRITE, index * 65536, [buffers[index]]) for index in range(32)])
print("mine", flush=True)
while True:
    for op in device.poll():
        device.submit([op])
"""


@pytest.fixture(params=["uring", "threads"])
def holder(request: pytest.FixtureRequest, path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the drive and writes to it without a pause."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path), str(SIZE), request.param], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "mine\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_second_process_is_told_who_has_the_drive(holder: subprocess.Popen[str], path: Path) -> None:
    with pytest.raises(Unavailable) as refused:
        open_device(path, size_bytes=SIZE, lock_wait_ns=30 * MS_NS)
    assert str(path) in str(refused.value)
    assert f"process {holder.pid}" in str(refused.value)
    assert "30 ms" in str(refused.value)


def test_who_waits_for_another_process_says_so(
    holder: subprocess.Popen[str], path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(Unavailable):
        open_device(path, size_bytes=SIZE, lock_wait_ns=1200 * MS_NS)
    assert f"is in use by process {holder.pid}" in caplog.text
    assert "waits for it, up to 1.2 s" in caplog.text


def test_after_kill_9_the_next_owner_gets_it_when_all_writes_are_done(
    holder: subprocess.Popen[str], path: Path
) -> None:
    holder.send_signal(signal.SIGKILL)
    device = open_device(path, size_bytes=SIZE, lock_wait_ns=60 * SECOND_NS)
    mine = random_bytes(SIZE, 4)
    write(device, 0, memoryview(mine))
    holder.wait()
    back = aligned(SIZE)
    for _ in range(3):
        read(device, 0, back)
        assert back == mine  # nothing of the dead owner lands later
    device.close()


# ---- interruptions, at the edge to the kernel -----------------------------------------------------------------------


def _is_scattered(op: IoOp) -> TypeGuard[ScatteredRead]:
    return isinstance(op, ScatteredRead)


class TamperedRing:
    """A ring whose results a test replaces; what does not matter to it goes to the real one."""

    def __init__(self, ring: Any) -> None:
        self._ring = ring
        self.answers: list[int] = []
        self.for_ever = 0
        self.refuse_memory = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ring, name)

    @property
    def variants(self) -> int:
        return int(self._ring.variants)

    @variants.setter
    def variants(self, value: int) -> None:
        self._ring.variants = value

    def register_memory(self, memory: memoryview, piece_bytes: int) -> None:
        if self.refuse_memory:
            raise OSError(errno.ENOMEM, "IORING_REGISTER_BUFFERS")
        self._ring.register_memory(memory, piece_bytes)

    def reap(self) -> Reaped:
        done, odd, scattered = self._ring.reap()
        if not (self.for_ever or self.answers):
            return done, odd, scattered
        changed: list[tuple[IoOp, int]] = []
        extents = [(op, [(n, length) for n, length in enumerate(op.lengths)]) for op in done if _is_scattered(op)]
        for op, result in [(op, op.done_bytes) for op in done if not _is_scattered(op)] + odd:
            op.done_bytes = 0
            changed.append((op, self._answer(result)))
        for op, results in extents:
            op.done_bytes = 0
            results[:] = [(number, self._answer(result)) for number, result in results]
        return [], changed, extents + scattered

    def _answer(self, result: int) -> int:
        return self.for_ever or (self.answers.pop(0) if self.answers else result)


class TamperedCalls:
    """preadv and pwritev whose results a test replaces."""

    def __init__(self) -> None:
        self.answers: list[int] = []
        self.for_ever = 0

    def preadv(self, fd: int, buffers: Any, offset: int) -> int:
        return self._answer(os.preadv(fd, buffers, offset))

    def pwritev(self, fd: int, buffers: Any, offset: int) -> int:
        return self._answer(os.pwritev(fd, buffers, offset))

    def _answer(self, result: int) -> int:
        answer = self.for_ever or (self.answers.pop(0) if self.answers else result)
        if answer < 0:
            raise OSError(-answer, os.strerror(-answer))
        return answer


Tampered = tuple[UringDevice | ThreadsDevice, TamperedRing | TamperedCalls, DeviceMetrics]


@pytest.fixture(params=["uring", "threads"])
def tampered(request: pytest.FixtureRequest, path: Path) -> Iterator[Tampered]:
    metrics = DeviceMetrics()
    file = open_data_file(path, size_bytes=SIZE, create=True)
    edge: TamperedRing | TamperedCalls
    device: UringDevice | ThreadsDevice
    if request.param == "uring":
        edge = TamperedRing(make_ring(file, depth=8))
        device = UringDevice(file, edge, abilities=probe_uring(file), reason="test", metrics=metrics)
    else:
        edge = TamperedCalls()
        device = ThreadsDevice(file, depth=1, reason="test", metrics=metrics, preadv=edge.preadv, pwritev=edge.pwritev)
    yield device, edge, metrics
    edge.for_ever = 0
    device.close()


@pytest.mark.parametrize(
    "answers",
    [
        [-errno.EINTR],
        [-errno.EAGAIN, -errno.EAGAIN, -errno.EINTR],
        [PAGE],
        [PAGE, -errno.EINTR, 2 * PAGE],
        [PAGE + 512, PAGE],
        [3 * PAGE + 1, -errno.EAGAIN],
    ],
)
def test_interrupted_and_short_transfers_are_finished(tampered: Tampered, answers: Sequence[int]) -> None:
    device, edge, metrics = tampered
    data = random_bytes(5 * PAGE, 8)
    source = aligned(5 * PAGE)
    source[:] = data
    edge.answers = list(answers)
    write(device, 0, source[:PAGE], source[2 * PAGE : 4 * PAGE], source[PAGE : 2 * PAGE], source[4 * PAGE :])
    edge.answers = list(answers)
    back = aligned(5 * PAGE)
    read(device, 0, back[:PAGE], back[2 * PAGE : 4 * PAGE], back[PAGE : 2 * PAGE], back[4 * PAGE :])
    assert back == data
    assert metrics.retries == 2 * len(answers)


@pytest.mark.parametrize(
    "answers",
    [
        [-errno.EINTR],
        [0, -errno.EAGAIN],
        [PAGE],
        [PAGE, -errno.EINTR, 2 * PAGE],
        [PAGE + 512, PAGE, PAGE],
        [-errno.EAGAIN, PAGE + 1, -errno.EINTR, -errno.EAGAIN],
    ],
)
@pytest.mark.parametrize("skew", [0, 1])
def test_interrupted_and_short_extents_are_finished(tampered: Tampered, answers: Sequence[int], skew: int) -> None:
    device, edge, metrics = tampered
    data = random_bytes(16 * PAGE, 8)
    write(device, 0, memoryview(data))
    metrics.retries = 0
    memory = skewed(8 * PAGE, skew)
    op = ScatteredRead([9 * PAGE, 0, 5 * PAGE], [3 * PAGE, 3 * PAGE, 2 * PAGE], memory)
    edge.answers = list(answers)
    assert run(device, [op]) == [op]
    faults = op.faults or {}
    if 0 in answers:  # as at the end of the file, whichever extent it was that was answered so
        assert list(faults.values()) == [(0, None)]
    else:
        assert faults == {}
    at = came_bytes = 0
    for number, (offset, length) in enumerate(zip(op.offsets, op.lengths, strict=True)):
        if number not in faults:
            assert memory[at : at + length] == data[offset : offset + length]
            came_bytes += length
        at += length
    assert op.done_bytes == came_bytes
    assert metrics.retries > 0


def test_a_failed_extent_reaches_the_caller_alone(tampered: Tampered) -> None:
    device, edge, _ = tampered
    data = random_bytes(16 * PAGE, 8)
    write(device, 0, memoryview(data))
    memory = aligned(2 * PAGE)
    op = ScatteredRead([8 * PAGE, 3 * PAGE], [PAGE, PAGE], memory)
    edge.answers = [-errno.EIO]
    run(device, [op])
    assert op.error is None
    assert op.faults is not None
    ((number, (came_bytes, error)),) = op.faults.items()
    assert error is not None
    assert (number, came_bytes, error.errno) == (0, 0, errno.EIO)
    assert "read of 4096 bytes at 32768" in str(error)
    assert memory[PAGE:] == data[3 * PAGE : 4 * PAGE]
    edge.for_ever = -errno.EAGAIN
    run(device, [op])
    assert op.faults is not None
    assert sorted(op.faults) == [0, 1]
    edge.for_ever = 0
    run(device, [op])
    assert (op.faults, memory) == (None, data[8 * PAGE : 9 * PAGE] + data[3 * PAGE : 4 * PAGE])


@pytest.mark.parametrize("skew", [0, 1])
def test_an_error_reaches_the_caller(tampered: Tampered, skew: int) -> None:
    device, edge, _ = tampered
    edge.answers = [-errno.EIO]
    op = IoOp(IoKind.READ, 8 * PAGE, [aligned(2 * PAGE)[skew : PAGE + skew]])
    run(device, [op])
    assert op.error is not None
    assert op.error.errno == errno.EIO
    assert "read of 4096 bytes at 32768" in str(op.error)
    run(device, [op])
    assert op.error is None
    assert op.done_bytes == PAGE


def test_a_drive_that_is_always_busy_fails_in_the_end(tampered: Tampered) -> None:
    device, edge, _ = tampered
    edge.for_ever = -errno.EAGAIN
    op = IoOp(IoKind.READ, 0, [aligned(PAGE)])
    run(device, [op])
    assert op.error is not None
    assert op.error.errno == errno.EAGAIN


def test_memory_that_went_away_does_not_end_a_thread(path: Path) -> None:
    device = open_device(path, size_bytes=SIZE, mode="threads", depth=1)
    view = aligned(PAGE)
    op = IoOp(IoKind.READ, 0, [view])
    view.release()
    run(device, [op])
    assert op.error is not None
    assert op.error.errno == errno.EFAULT
    memory = aligned(2 * PAGE)
    scattered = ScatteredRead([0, PAGE], [PAGE, PAGE], memory)
    memory.release()
    run(device, [scattered])
    assert scattered.faults is not None
    assert sorted(scattered.faults) == [0, 1]
    write(device, 0, aligned(PAGE))
    device.close()


def test_modes_are_the_ones_documented() -> None:
    assert probe.MODES == ("auto", "uring", "threads")
