"""Runs in the virtual machine: mounts its disk, and for the harness's own tests writes files with and without fsync.

python -m tests.powercut.guest_disk write | list
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.vm.machine import port_path

DEVICE: Final = "/dev/vda"
MOUNT: Final = Path("/run/disk")
FILE_BYTES: Final = 16_384


def make_file_system() -> None:
    """ext4 as a person would make it: its defaults, journal and barriers on."""
    subprocess.run(["mkfs.ext4", "-q", DEVICE], check=True)


def mount() -> None:
    """Mounts the disk on MOUNT; the kernel replays the journal."""
    subprocess.run(["/bin/busybox", "mount", "-t", "ext4", DEVICE, str(MOUNT)], check=True)


class Port:
    """Says lines to the host. A line is out when `say` returns."""

    def __init__(self) -> None:
        self._fd = os.open(port_path(), os.O_WRONLY)

    def say(self, line: str) -> None:
        data = line.encode() + b"\n"
        while data:
            data = data[os.write(self._fd, data) :]


def _write(port: Port) -> None:
    make_file_system()
    mount()
    folder = os.open(MOUNT, os.O_RDONLY)
    number = 0
    while True:
        for name, synced in ((f"loose-{number}", False), (f"synced-{number}", True)):
            fd = os.open(MOUNT / name, os.O_WRONLY | os.O_CREAT, 0o600)
            os.write(fd, number.to_bytes(4, "little") * (FILE_BYTES // 4))
            if synced:
                os.fsync(fd)
                os.fsync(folder)
            os.close(fd)
        port.say(str(number))
        number += 1


def _list(port: Port) -> None:
    mount()
    for file in sorted(MOUNT.glob("*-*")):
        number = int(file.name.split("-")[1])
        whole = file.read_bytes() == number.to_bytes(4, "little") * (FILE_BYTES // 4)
        port.say(f"{file.name} {'whole' if whole else 'broken'}")
    os.sync()


if __name__ == "__main__":
    {"write": _write, "list": _list}[sys.argv[1]](Port())
