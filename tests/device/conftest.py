"""Real places for a data file: file systems and raw drives on loop devices with 512- and 4096-byte sectors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.testing.loop_lab import LoopLab, missing_for_loop_lab

PLACES = ("tmpfs", "ext4-512", "ext4-4096", "xfs-512", "xfs-4096", "raw-512", "raw-4096")
IMAGE_MIB = {"ext4": 64, "xfs": 320, "raw": 8}  # mkfs.xfs refuses less than 300 MiB


@pytest.fixture(scope="session")
def loop_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopLab]:
    """Needs root and the tools; without them its tests are skipped, which CI counts as a failure."""
    if reason := missing_for_loop_lab():
        pytest.skip(reason)
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
