"""`kvstore serve` as a process under test: started with free ports, its output kept, ended by whoever made it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

_WAIT_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """What the ready file says."""

    grpc: str
    data: list[str]
    metrics: str
    pid: int


class ServeProcess:
    """One supervisor with its workers. A context manager that kills what is left of it."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        """Start it; data, ready file and log lie in `folder`. `arguments` come after the usual ones, and win.

        Args:
            prefix: Command that runs what follows it in its own place, such as `NetPlace.prefix`.
        """
        self.ready_path = folder / "ready.json"
        self.log_path = folder / "serve.log"
        usual = {
            "--data-dir": str(folder / "data"),
            "--capacity": "64MiB",
            "--cache": "0",
            "--staging": "64MiB",
            "--grpc-port": "0",
            "--data-port": "0",
            "--metrics-port": "0",
            "--ready-file": str(self.ready_path),
        }
        usual |= dict(zip(arguments[::2], arguments[1::2], strict=False))
        flags = [piece for flag, value in usual.items() for piece in ((flag, value) if value else (flag,))]
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "kvstore", "serve", *flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | dict(environment or {}),
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    @property
    def log(self) -> str:
        """Everything that supervisor and workers have printed."""
        return self.log_path.read_text(errors="replace")

    def wait_ready(self, *, seconds: float = _WAIT_SECONDS) -> Ready:
        """Block until the ready file is there. Fails the test when the process ends first, or after so long."""
        end = time.monotonic() + seconds
        while not self.ready_path.exists():
            assert self.process.poll() is None, f"serve ended with {self.process.returncode}:\n{self.log}"
            assert time.monotonic() < end, f"serve was not ready in time:\n{self.log}"
            time.sleep(_POLL_SECONDS)
        return Ready(**json.loads(self.ready_path.read_text()))

    def wait_exit(self) -> int:
        """Block until the supervisor has ended; its exit status."""
        return self.process.wait(_WAIT_SECONDS)

    def terminate(self) -> None:
        """SIGTERM to the supervisor."""
        self.process.terminate()

    def kill_supervisor(self) -> None:
        """SIGKILL to the supervisor alone."""
        self.process.kill()
        self.process.wait()


def wait_until_gone(pid: int, *, seconds: float = _WAIT_SECONDS) -> None:
    """Block until a process that is not our child has ended. Raises AssertionError when it lives on."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        gone, _, _ = select.select([handle], [], [], seconds)
        assert gone, f"process {pid} still runs after {seconds:.0f} s"
    finally:
        os.close(handle)
