"""Processes under measurement: CPU time, memory, and a node started for a scenario."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType

from kvstore.server.private_folder import private_folder

_IDLE_CPU_NS = 5_000_000  # in a quarter of a second


def cpu_ns_of(pid: int) -> int:
    """CPU time of all threads of one process, in ns (/proc/PID/task/TID/schedstat, proc(5))."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            total += int((task / "schedstat").read_text().split()[0])
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total


def descendants(pid: int) -> list[int]:
    """`pid` and all its living children, in no order."""
    found = [pid]
    for candidate in found:
        for task in Path(f"/proc/{candidate}/task").glob("*/children"):
            try:
                found += [int(child) for child in task.read_text().split()]
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found


@contextmanager
def one_core_each(near: int, far: Sequence[int]) -> Iterator[None]:
    """Keeps one process on the first core and others on the second, on a machine that has two.

    A wake-up on a sleeping core costs many times one on the core that rings: without this the scheduler's choice of
    who sits beside whom decides a comparison of round trips.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        yield
        return
    _keep(threads_of([near]), {cores[0]})
    _keep(threads_of(far), {cores[1]})
    try:
        yield
    finally:
        _keep(threads_of([near, *far]), set(cores))


def threads_of(pids: Sequence[int]) -> list[int]:
    """Thread ids of processes, as `sched_setaffinity` takes them."""
    return [int(task.name) for pid in pids for task in Path(f"/proc/{pid}/task").iterdir()]


def _keep(threads: Sequence[int], cores: set[int]) -> None:
    for thread in threads:
        try:
            os.sched_setaffinity(thread, cores)
        except ProcessLookupError:
            continue  # it has ended


def own_cpu_ns() -> int:
    """CPU time of this process, all threads."""
    return time.process_time_ns()


class Node:
    """A `kvstore serve` of our own, on free ports of the loopback. Context manager."""

    def __init__(self, *, data_dir: Path, capacity_bytes: int, cache_bytes: int, extra: tuple[str, ...] = ()) -> None:
        self.data_dir = data_dir
        self._end = ExitStack()
        self._folder = self._end.enter_context(private_folder(None, purpose="bench"))
        self._ready_path = self._folder / "ready.json"
        self._command = [
            sys.executable, "-m", "kvstore", "serve", "--data-dir", str(data_dir),
            "--capacity", str(capacity_bytes), "--cache", str(cache_bytes), "--grpc-port", "0",
            "--data-port", "0", "--metrics-port", "0",
            "--ready-file", str(self._ready_path), *extra,
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None
        self.address = ""
        try:
            self.start()
        except BaseException:
            self._end.close()
            raise

    def start(self, timeout_s: float = 60) -> float:
        """Start and wait until it serves; returns the seconds that took. Raises RuntimeError when it does not."""
        self._ready_path.unlink(missing_ok=True)
        log = self._folder / "node.log"
        began = time.perf_counter()
        with log.open("ab") as output:
            self._process = subprocess.Popen(self._command, stdout=output, stderr=output, env=dict(os.environ))
        while not self._ready_path.exists():
            if self._process.poll() is not None or time.perf_counter() - began > timeout_s:
                raise RuntimeError(
                    f"the node did not start in {timeout_s} s:\n{log.read_text(errors='replace')[-4000:]}"
                )
            time.sleep(0.01)
        ready = json.loads(self._ready_path.read_text())
        self.address = ready["grpc"]
        return time.perf_counter() - began

    def cpu_ns(self) -> int:
        """CPU time of supervisor and workers so far."""
        assert self._process is not None
        return sum(cpu_ns_of(pid) for pid in descendants(self._process.pid))

    def pids(self) -> list[int]:
        """Supervisor and workers."""
        assert self._process is not None
        return descendants(self._process.pid)

    def settle(self, timeout_s: float = 60) -> None:
        """Wait until the node idles: it touches its memory in the background for some seconds after its start."""
        end = time.perf_counter() + timeout_s
        while time.perf_counter() < end:
            before = self.cpu_ns()
            time.sleep(0.25)
            if self.cpu_ns() - before < _IDLE_CPU_NS:
                return

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        assert self._process is not None
        for pid in reversed(descendants(self._process.pid)):
            os.kill(pid, signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        """SIGTERM and wait."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.wait(timeout=60)

    def __enter__(self) -> Node:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._end.close()
