"""Real drives and file systems for tests: loop devices and mounts under one folder, all taken away at the end.

Needs root, and losetup, mount and the mkfs tools of Debian's util-linux, e2fsprogs and xfsprogs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

_TOOLS: Final = ("losetup", "mount", "umount", "mkfs.ext4", "mkfs.xfs")


def missing_for_loop_lab() -> str:
    """Why no loop device can be made here, or an empty string."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if os.geteuid() != 0 or missing:
        return f"loop devices and mounts need root (uid is {os.geteuid()}) and {', '.join(missing) or 'no other tools'}"
    return ""


def call(*command: str) -> str:
    """Run a tool of the system and return what it prints."""
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise RuntimeError(f"{' '.join(command)}: {finished.stderr.strip()}")
    return finished.stdout.strip()


class LoopLab:
    """Makes loop devices and mounts, and takes all of them away on close.

    Args:
        folder: where images and mount points go.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._undo: list[tuple[str, ...]] = []

    def image(self, name: str, size_mib: int) -> Path:
        """A sparse file of zeros."""
        path = self.folder / f"{name}.img"
        with path.open("wb") as file:
            file.truncate(size_mib << 20)
        return path

    def loop(self, image: Path, *, sector_bytes: int) -> Path:
        """A loop device with sectors of 512 or 4096 bytes over an image."""
        device = call("losetup", "--find", "--show", "--sector-size", str(sector_bytes), str(image))
        self._undo.append(("losetup", "--detach", device))
        return Path(device)

    def mount(self, name: str, *arguments: str) -> Path:
        """Mount, with arguments of mount(8) before the folder; the folder."""
        point = self.folder / name
        point.mkdir()
        call("mount", *arguments, str(point))
        self._undo.append(("umount", "--lazy", str(point)))
        return point

    def file_system(self, kind: str, *, size_mib: int, sector_bytes: int, name: str) -> Path:
        """A fresh ext4 or xfs (at least 300 MiB) on a loop device, mounted; its folder."""
        device = self.loop(self.image(name, size_mib), sector_bytes=sector_bytes)
        make = ("mkfs.xfs", "-q") if kind == "xfs" else ("mkfs.ext4", "-q", "-O", "^has_journal", "-m", "0")
        call(*make, str(device))
        return self.mount(name, str(device))

    def close(self) -> None:
        """Unmount and detach everything, the newest first. Idempotent."""
        while self._undo:
            subprocess.run(self._undo.pop(), capture_output=True, check=False)
