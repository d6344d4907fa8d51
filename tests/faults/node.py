"""A real node that tests kill, freeze and start again on its own ports, with a drive that they can hurt."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.faults.hurt_device import CONTROL_VARIABLE, Order

ROOT: Final = Path(__file__).resolve().parents[2]
READY_S: Final = 600.0  # under an emulated processor and beside other work too; what hangs meets its test's timeout
POLL_S: Final = 0.005
TAIL_BYTES: Final = 4_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What `kvstore check --json` said: its exit status and its report."""

    status: int
    report: dict[str, object]

    def number(self, name: str) -> int:
        """A count of the report."""
        value = self.report[name]
        assert isinstance(value, int), f"{name} is {value!r}"
        return value


class HurtNode:
    """`kvstore serve` on loopback. Ports are any free ones at the first start and the same ever after."""

    def __init__(
        self,
        folder: Path,
        *,
        data_dir: Path | None = None,
        capacity: str = "128MiB",
        cache: str = "16MiB",
        staging: str = "32MiB",
        arguments: Sequence[str] = (),
        module: str = "tests.faults.faulty_serve",
    ) -> None:
        """
        Args:
            folder: takes log, ready file and control file, and the data dir unless `data_dir` names another.
            arguments: further arguments of `kvstore serve`.
            module: what to run; "kvstore" is the product without a drive that can be hurt.
        """
        self.data_dir = data_dir or folder / "data"
        self._module = module
        self.log_file = folder / "node.log"
        self.control = folder / "control.json"
        self.starts_s: list[float] = []
        self.address = ""
        self._ready_file = folder / "ready.json"
        self._sizes = ["--capacity", capacity, "--cache", cache, "--staging", staging, *arguments]
        self._ports = {"grpc": 0, "data": 0, "metrics": 0}
        self._process: subprocess.Popen[bytes] | None = None
        if not self.data_dir.is_block_device():
            self.data_dir.mkdir(parents=True, exist_ok=True)

    # ---- life and death ---------------------------------------------------------------------------------------------

    def start(self) -> str:
        """Starts it and waits until it serves; the address for clients. Raises RuntimeError with what it printed."""
        assert self._process is None, "it runs already"
        self._ready_file.unlink(missing_ok=True)
        began = time.monotonic()
        command = [sys.executable, "-m", self._module, "serve", "--data-dir", str(self.data_dir)]
        command += ["--host", "127.0.0.1", "--ready-file", str(self._ready_file), *self._sizes]
        for name, port in self._ports.items():
            command += [f"--{name}-port", str(port)]
        paths = (ROOT, ROOT / "client", ROOT / "bench")
        environment = {
            **os.environ,
            CONTROL_VARIABLE: str(self.control),
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
        }
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self._wait_ready()
        self.starts_s.append(time.monotonic() - began)
        return self.address

    def _wait_ready(self) -> None:
        assert self._process is not None
        end = time.monotonic() + READY_S
        while not self._ready_file.exists():
            if self._process.poll() is not None or time.monotonic() > end:
                status = self._process.poll()
                self.close()
                raise RuntimeError(f"the node does not serve (exit status {status}); it printed:\n{self.printed()}")
            time.sleep(POLL_S)
        ready = json.loads(self._ready_file.read_text())
        found = {"grpc": ready["grpc"], "data": ready["data"][0], "metrics": ready["metrics"]}
        self._ports = {name: int(address.rpartition(":")[2]) for name, address in found.items()}
        self.address = found["grpc"]

    @property
    def pid(self) -> int:
        """Process id of the supervisor."""
        assert self._process is not None, "it does not run"
        return self._process.pid

    def worker_pid(self) -> int | None:
        """Process id of the worker; None while there is none."""
        try:
            children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        except OSError:
            return None  # the supervisor is gone
        return int(children[0]) if children else None

    def wait_serving(self, *, dead_pid: int | None, timeout_s: float = READY_S) -> None:
        """Waits until a worker other than `dead_pid` serves. Raises RuntimeError with what the node printed."""
        end = time.monotonic() + timeout_s
        while self.worker_pid() in (None, dead_pid) or not self._is_serving():
            if time.monotonic() > end or self._process is None or self._process.poll() is not None:
                raise RuntimeError(f"no worker serves after {dead_pid} died; printed:\n{self.printed()}")
            time.sleep(POLL_S)

    def _is_serving(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._ports['metrics']}/healthz", timeout=10) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def signal_worker(self, number: signal.Signals) -> int | None:
        """Signals the worker if there is one; its process id."""
        pid = self.worker_pid()
        if pid is not None:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                return None
        return pid

    def kill(self, *, worker_first: bool = False) -> None:
        """SIGKILL for the supervisor; the worker dies by that, or is killed before it."""
        if worker_first:
            self.signal_worker(signal.SIGKILL)
        process, self._process = self._process, None
        assert process is not None, "it does not run"
        process.kill()
        process.wait()

    def wait_dead(self, timeout_s: float) -> bool:
        """Waits for a supervisor that something else kills. False when it still lives."""
        assert self._process is not None
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        self._process = None
        return True

    def stop(self) -> int:
        """SIGTERM: it drains; its exit status."""
        process, self._process = self._process, None
        assert process is not None, "it does not run"
        process.terminate()
        return process.wait(60)

    def close(self) -> None:
        """Ends it if it runs."""
        if self._process is not None:
            self.kill(worker_first=True)

    # ---- faults and findings ----------------------------------------------------------------------------------------

    def order(self, order: Order) -> None:
        """What its drive does from now on."""
        order.write(self.control)

    def order_done(self) -> bool:
        """True when an ordered crash has happened."""
        return not self.control.exists()

    def withdraw(self) -> None:
        """No fault from now on."""
        self.control.unlink(missing_ok=True)

    def number(self, family: str, **labels: str) -> float:
        """The sum of a family's series that have these labels, from the Prometheus page."""
        wanted = [f'{name}="{value}"' for name, value in labels.items()]
        found = [
            value
            for name, value in self._metrics().items()
            if name.split("{")[0] in (family, f"{family}_total") and all(label in name for label in wanted)
        ]
        assert found, f"no series of {family} with {labels}"
        return sum(found)

    def _metrics(self) -> dict[str, float]:
        """Numbers by name with labels as printed."""
        url = f"http://127.0.0.1:{self._ports['metrics']}/metrics"
        with urllib.request.urlopen(url, timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        pairs = [line.rsplit(" ", 1) for line in lines if line and not line.startswith("#")]
        return {name: float(value) for name, value in pairs}

    def check(self) -> Check:
        """`kvstore check --json` on its data dir; the node must be down."""
        command = [sys.executable, "-m", "kvstore", "check", "--json", str(self.data_dir)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
        assert done.stdout, f"kvstore check printed nothing (exit status {done.returncode}): {done.stderr}"
        return Check(status=done.returncode, report=json.loads(done.stdout))

    def disk_bytes(self) -> int:
        """What its data takes of the file system, as du counts: whole blocks, of all files but the node's own notes."""
        files = [file.stat() for file in self.data_dir.rglob("*.data") if file.is_file()]
        assert files, f"{self.data_dir} holds no data"
        return sum(found.st_blocks * 512 for found in files)

    def printed(self) -> str:
        """The end of what its processes printed."""
        return self.log_file.read_bytes()[-TAIL_BYTES:].decode(errors="replace")

    def __enter__(self) -> HurtNode:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
