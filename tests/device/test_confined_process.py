"""What containers do to io_uring, done to a real process: seccomp forbids it, or memory may not be locked."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPORT = """
import json, mmap, sys
from kvstore.device.probe import open_device
from kvstore.errors import Unavailable
from kvstore.testing.device_suite import aligned, read, write
path, mode = sys.argv[1:]
try:
    device = open_device(path, size_bytes=1 << 20, mode=mode)
except Unavailable as error:
    print(json.dumps({"refused": str(error)}))
    sys.exit()
memory = aligned(1 << 20)
device.register(memory)
memory[:4096] = b"x" * 4096
write(device, 0, memory[:4096])
read(device, 0, memory[4096:8192])
assert memory[4096:8192] == b"x" * 4096
print(json.dumps({"name": device.mode.name, "reason": device.mode.reason}))
device.close()
"""

# A seccomp filter as container runtimes install it (seccomp(2)): io_uring_setup answers an errno, all else passes.
FORBID_IO_URING = """
import ctypes, struct
IO_URING_SETUP, LD_NR, JUMP_EQUAL, RETURN, ALLOW, ERRNO = 425, 0x20, 0x15, 0x06, 0x7FFF0000, 0x00050000
rows = [(LD_NR, 0, 0, 0), (JUMP_EQUAL, 0, 1, IO_URING_SETUP), (RETURN, 0, 0, ERRNO | {code}), (RETURN, 0, 0, ALLOW)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *row) for row in rows))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(rows), ctypes.addressof(code)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
assert libc.prctl(22, 2, program) == 0  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
"""


def report(path: Path, mode: str, *, before: str = "", wrapper: tuple[str, ...] = ()) -> dict[str, Any]:
    finished = subprocess.run(
        [*wrapper, sys.executable, "-c", before + REPORT, str(path), mode], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    answer: dict[str, Any] = json.loads(finished.stdout)
    return answer


@pytest.mark.parametrize(
    ("code", "words"), [(1, "seccomp profile forbids io_uring"), (38, "the kernel has no io_uring")]
)
def test_seccomp_leaves_threads_and_a_reason(tmp_path: Path, code: int, words: str) -> None:
    confined = FORBID_IO_URING.replace("{code}", str(code))
    auto = report(tmp_path / "data", "auto", before=confined)
    assert auto["name"] == "threads"
    assert words in auto["reason"]
    forced = report(tmp_path / "data", "uring", before=confined)
    assert words in forced["refused"]
    assert report(tmp_path / "data", "threads", before=confined)["name"] == "threads"


def test_without_the_right_to_lock_memory_io_uring_works_unregistered(tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))\n"
    setpriv = shutil.which("setpriv")
    assert setpriv is not None, "setpriv of util-linux is missing"
    answer = report(tmp_path / "data", "uring", before=limit, wrapper=(setpriv, "--bounding-set=-ipc_lock"))
    assert answer["name"] == "uring"
    assert "1048576 bytes of memory not registered (Cannot allocate memory" in answer["reason"]
    assert "limit is 65536 bytes" in answer["reason"]
