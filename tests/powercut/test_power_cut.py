"""The power goes while a node is under load: no wrong byte, and what was promised against it is there.

Chunks with durability="commit" may be lost, and are counted; durability="power" and deletes must hold.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.faults.ledger import Event, Fate, Ledger
from tests.powercut.nbd import NbdServer, VolatileDisk
from tests.vm.boot_image import PROGRAMS
from tests.vm.machine import VirtualMachine, disk_device, missing_programs

DISK_BYTES = 160 << 20
RISK_BYTES = 512 << 10
RISK_WAIT_S = 60.0

MISSING = missing_programs((*PROGRAMS, "mkfs.ext4"))

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(bool(MISSING), reason=f"the virtual machine needs {MISSING}"),
]


def boot(folder: Path, disk: NbdServer, word: str, seed: int, kind: str, events: list[str]) -> VirtualMachine:
    folder.mkdir()
    (folder / "events").write_text("\n".join(events))
    command = [sys.executable, "-m", "tests.powercut.guest_node", word, str(seed), kind]
    disk_at = disk_device(disk.path, sector_bytes=(512, 4096)[seed % 2])
    return VirtualMachine(folder, command, kit="disk", devices=disk_at)


def wait_for_risk(disk: VolatileDisk) -> None:
    """Waits, not for ever, until much could be lost."""
    end = time.monotonic() + RISK_WAIT_S
    while disk.unflushed_bytes < RISK_BYTES and time.monotonic() < end:
        time.sleep(0.002)


@pytest.mark.parametrize("kind", ["ext4", "raw"])
@pytest.mark.parametrize("seed", range(1, 6))
def test_power_cut_under_load(tmp_path: Path, kind: str, seed: int) -> None:
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(DISK_BYTES)
    server = NbdServer(VolatileDisk(image), tmp_path / "nbd")
    with boot(tmp_path / "first", server, "load", seed, kind, []) as machine:
        machine.wait_said(random.Random(seed).randint(100, 400), timeout_s=900)
        wait_for_risk(server.disk)
    lines = machine.said()
    risk_bytes = server.disk.unflushed_bytes
    flushes = server.disk.flushes
    cut = server.cut(seed)
    assert server.error is None

    ledger = Ledger()
    for line in lines:
        ledger.apply(Event.from_line(line))
    fates = Counter(ledger.fate(key) for key in ledger.known_keys())
    server = NbdServer(VolatileDisk(image), tmp_path / "nbd")
    with boot(tmp_path / "second", server, "audit", seed, kind, lines) as machine:
        assert machine.wait(timeout_s=900) == 0, machine.printed()
    server.close()
    report = json.loads(machine.said()[-1])
    print(f"{kind}, seed {seed}: {len(lines)} events, {flushes} flushes, {risk_bytes} bytes at risk, {cut}")
    print("  before:", ", ".join(f"{fate.value} {count}" for fate, count in sorted(fates.items(), key=str)))
    print("  after:", {name: value for name, value in report.items() if name != "printed"})
    told = f"seed {seed}: {report}"
    assert report["wrong"] == [], told
    assert report["lost_synced"] == [], told
    assert report["resurrected"] == [], told
    assert fates[Fate.SYNCED] + fates[Fate.ABSENT], "nothing was promised against the cut: the test tested nothing"
