"""Real places for a data file: file systems and raw drives on loop devices with 512- and 4096-byte sectors."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

PLACES = ("tmpfs", "ext4-512", "ext4-4096", "xfs-512", "xfs-4096", "raw-512", "raw-4096")
IMAGE_MIB = {"ext4": 64, "xfs": 320, "raw": 8}  # mkfs.xfs refuses less than 300 MiB


def call(*command: str) -> str:
    """Run a tool of the system and return what it prints."""
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise RuntimeError(f"{' '.join(command)}: {finished.stderr.strip()}")
    return finished.stdout.strip()


class LoopLab:
    """Makes loop devices and mounts under one folder and takes all of them away again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._undo: list[tuple[str, ...]] = []

    def image(self, name: str, size_mib: int) -> Path:
        path = self.folder / f"{name}.img"
        with path.open("wb") as file:
            file.truncate(size_mib << 20)
        return path

    def loop(self, image: Path, *, sector_bytes: int) -> Path:
        device = call("losetup", "--find", "--show", "--sector-size", str(sector_bytes), str(image))
        self._undo.append(("losetup", "--detach", device))
        return Path(device)

    def mount(self, name: str, *arguments: str) -> Path:
        point = self.folder / name
        point.mkdir()
        call("mount", *arguments, str(point))
        self._undo.append(("umount", "--lazy", str(point)))
        return point

    def file_system(self, kind: str, *, size_mib: int, sector_bytes: int, name: str) -> Path:
        """A fresh ext4 or xfs on a loop device, mounted; its folder."""
        device = self.loop(self.image(name, size_mib), sector_bytes=sector_bytes)
        make = ("mkfs.xfs", "-q") if kind == "xfs" else ("mkfs.ext4", "-q", "-O", "^has_journal", "-m", "0")
        call(*make, str(device))
        return self.mount(name, str(device))

    def close(self) -> None:
        while self._undo:
            subprocess.run(self._undo.pop(), capture_output=True, check=False)


@pytest.fixture(scope="session")
def loop_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopLab]:
    """Needs root and the tools; without them its tests are skipped, which CI counts as a failure."""
    missing = [tool for tool in ("losetup", "mount", "mkfs.ext4", "mkfs.xfs") if shutil.which(tool) is None]
    if os.geteuid() != 0 or missing:
        pytest.skip(f"loop devices and mounts need root (uid is {os.geteuid()}) and the tools {missing or 'at hand'}")
    lab = LoopLab(tmp_path_factory.mktemp("loop"))
    try:
        yield lab
    finally:
        lab.close()


@pytest.fixture(scope="session")
def places(loop_lab: LoopLab) -> dict[str, Path]:
    """Folders by name, and raw devices by name; made once, each test uses a file of its own."""
    found = {"tmpfs": loop_lab.mount("tmpfs", "-t", "tmpfs", "-o", "size=64m", "tmpfs")}
    for name in PLACES[1:]:
        kind, sector = name.split("-")
        if kind == "raw":
            found[name] = loop_lab.loop(loop_lab.image(name, IMAGE_MIB[kind]), sector_bytes=int(sector))
        else:
            found[name] = loop_lab.file_system(kind, size_mib=IMAGE_MIB[kind], sector_bytes=int(sector), name=name)
    return found
