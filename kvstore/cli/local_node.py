"""A node of our own on this machine: started on free ports, killed or stopped by its owner. For the demo and tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvstore.errors import Unavailable

READY_TIMEOUT_S: Final = 60.0
STOP_TIMEOUT_S: Final = 30.0
READY_POLL_S: Final = 0.01
LOG_TAIL_BYTES: Final = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """What the ready file says: where the node listens."""

    grpc: str
    data: tuple[str, ...]
    metrics: str


class LocalNode:
    """One `kvstore serve` on loopback, in a session of its own so that a kill takes supervisor and workers together."""

    def __init__(self, folder: Path, *, capacity: str = "1GiB", arguments: Sequence[str] = ()) -> None:
        """Prepares a node; nothing runs before `start`.

        Args:
            folder: Takes the data dir, the ready file and the log; kept by the caller.
            capacity: As in `kvstore serve --capacity`.
            arguments: Further arguments of `kvstore serve`.
        """
        self._data_dir = folder / "data"
        self._ready_file = folder / "ready.json"
        self._log_file = folder / "node.log"
        self._capacity = capacity
        self._arguments = tuple(arguments)
        self._process: subprocess.Popen[bytes] | None = None
        self.addresses = Addresses(grpc="", data=(), metrics="")

    @property
    def data_dir(self) -> Path:
        """Where the node keeps its data; stays after a kill."""
        return self._data_dir

    @property
    def log_file(self) -> Path:
        """What the node's processes printed, over all starts."""
        return self._log_file

    @property
    def pid(self) -> int:
        """Process id of the supervisor."""
        assert self._process is not None, "the node was not started"
        return self._process.pid

    def start(self) -> Addresses:
        """Starts the node and waits until it serves.

        Raises:
            Unavailable: It ended, or did not serve within READY_TIMEOUT_S; the message ends with what it printed.
        """
        assert self._process is None, "the node runs already"
        self._data_dir.mkdir(parents=True, exist_ok=True)
        self._ready_file.unlink(missing_ok=True)
        command = [sys.executable, "-m", "kvstore", "serve", "--data-dir", str(self._data_dir)]
        command += ["--capacity", self._capacity, "--host", "127.0.0.1", "--ready-file", str(self._ready_file)]
        command += ["--grpc-port", "0", "--data-port", "0", "--metrics-port", "0", *self._arguments]
        with self._log_file.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self.addresses = self._wait_ready()
        return self.addresses

    def kill(self) -> None:
        """SIGKILL to every process of the node: nothing is flushed, nobody says goodbye."""
        process = self._take()
        with suppress(ProcessLookupError):  # it may have ended by itself
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def stop(self) -> int:
        """SIGTERM: the node drains. Its exit status; a node that does not end within STOP_TIMEOUT_S is killed."""
        process = self._take()
        process.terminate()
        try:
            return process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            return process.wait()

    def close(self) -> None:
        """Ends the node if it runs; the data stays."""
        if self._process is not None:
            self.kill()

    def __enter__(self) -> LocalNode:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "the node does not run"
        process, self._process = self._process, None
        return process

    def _wait_ready(self) -> Addresses:
        assert self._process is not None
        end = time.monotonic() + READY_TIMEOUT_S
        while not self._ready_file.exists():
            status = self._process.poll()
            if status is not None or time.monotonic() > end:
                why = f"ended with {status}" if status is not None else f"did not serve within {READY_TIMEOUT_S:.0f} s"
                self.close()
                raise Unavailable(f"the node on {self._data_dir} {why}; it printed:\n{self._log_tail()}")
            time.sleep(READY_POLL_S)
        ready = json.loads(self._ready_file.read_text())
        return Addresses(grpc=ready["grpc"], data=tuple(ready["data"]), metrics=ready["metrics"])

    def _log_tail(self) -> str:
        return self._log_file.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
