"""A demo that is ended early takes its node along."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvstore.cli.local_node import LocalNode
from kvstore.errors import Unavailable


def _processes_with(text: str) -> list[str]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in command and "serve" in command:
            found.append(command)
    return found


def test_sigterm_ends_the_node_of_the_demo(tmp_path: Path) -> None:
    demo = subprocess.Popen(
        [sys.executable, "-m", "kvstore", "demo", "--synthetic"],
        env={"PATH": "/usr/bin:/bin", "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    end = time.monotonic() + 60
    while not _processes_with(str(tmp_path)):
        assert demo.poll() is None, "the demo ended before its node was there"
        assert time.monotonic() < end
        time.sleep(0.02)
    demo.send_signal(signal.SIGTERM)
    assert demo.wait(60) == 128 + signal.SIGTERM
    assert not _processes_with(str(tmp_path))


def test_a_node_that_cannot_start_says_why(tmp_path: Path) -> None:
    node = LocalNode(tmp_path, arguments=("--cache", "no size"))
    with pytest.raises(Unavailable, match="it printed"):
        node.start()
    node.close()
