"""The power cut is honest: what a guest synced is there afterwards, and what it did not sync can be lost."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.powercut.nbd import NbdServer, VolatileDisk
from tests.vm.boot_image import PROGRAMS
from tests.vm.machine import VirtualMachine, disk_device, missing_programs

DISK_BYTES = 128 << 20
PROGRAM = [sys.executable, "-m", "tests.powercut.guest_disk"]

MISSING = missing_programs((*PROGRAMS, "mkfs.ext4"))

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(MISSING), reason=f"the virtual machine needs {MISSING}"),
]


def boot(folder: Path, disk: NbdServer, word: str) -> VirtualMachine:
    folder.mkdir()
    return VirtualMachine(folder, [*PROGRAM, word], kit="disk", devices=disk_device(disk.path))


@pytest.mark.parametrize("seed", [1, 2])
def test_synced_files_survive_the_cut_and_loose_ones_may_not(tmp_path: Path, seed: int) -> None:
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(DISK_BYTES)
    server = NbdServer(VolatileDisk(image), tmp_path / "nbd")
    with boot(tmp_path / "first", server, "write") as machine:
        machine.wait_said(40 + seed, timeout_s=300)
    written = [int(line) for line in machine.said()]
    report = server.cut(seed)
    assert server.error is None

    server = NbdServer(VolatileDisk(image), tmp_path / "nbd")
    with boot(tmp_path / "second", server, "list") as machine:
        assert machine.wait(timeout_s=300) == 0, machine.printed()
    server.close()
    found = dict(line.split() for line in machine.said())
    print(f"cut: {report}; {len(written)} written, {len(found)} files found")
    assert [number for number in written if found.get(f"synced-{number}") != "whole"] == [], f"seed {seed}"
    whole = [number for number in written if found.get(f"loose-{number}") == "whole"]
    assert len(whole) < len(written), "nothing was lost: the disk has no volatile cache"
