"""fio as the limit of a drive, O_DIRECT at a queue depth: reads of the file the node stores in, writes beside it."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

STALLED_BYTES_PER_S = 200_000_000
"""Below this the drive of a shared machine is stalled and the sample is thrown away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FioResult:
    """One fio run: rate and CPU."""

    bytes_per_s: float
    cpu_s_per_gb: float


def available() -> bool:
    """Whether the fio program is installed."""
    return shutil.which("fio") is not None


def random_read(
    path: Path, *, block_bytes: int, depth: int, offset: int, size_bytes: int, seconds: float
) -> FioResult | None:
    """Random reads over [offset, offset + size). None when the drive was stalled. Raises OSError without fio."""
    place = [f"--filename={path}", f"--offset={offset}", f"--size={size_bytes}", "--readonly", "--norandommap"]
    return _run("read", [*place, "--rw=randread", "--randrepeat=0"], block_bytes, depth, seconds)


def overwrite(path: Path, *, block_bytes: int, depth: int, seconds: float) -> FioResult | None:
    """Writes over an existing file, from its begin and round again. None when the drive was stalled. Raises OSError."""
    return _run("write", [f"--filename={path}", "--rw=write", "--overwrite=1"], block_bytes, depth, seconds)


def _run(direction: str, chosen: list[str], block_bytes: int, depth: int, seconds: float) -> FioResult | None:
    command = [
        "fio", "--name=limit", *chosen, f"--bs={block_bytes}", f"--iodepth={depth}", "--ioengine=io_uring",
        "--fixedbufs=1", "--direct=1", "--time_based", f"--runtime={seconds}", "--output-format=json",
    ]  # fmt: skip
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=seconds + 60)
    job = json.loads(done.stdout)["jobs"][0]
    rate = job[direction]["bw_bytes"]
    if rate < STALLED_BYTES_PER_S:
        return None
    cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    return FioResult(bytes_per_s=rate, cpu_s_per_gb=cpu_s / (job[direction]["io_bytes"] / 1e9))
