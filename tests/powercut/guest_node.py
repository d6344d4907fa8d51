"""Runs in the virtual machine: a node under load until the power goes; and afterwards what is left of it.

python -m tests.powercut.guest_node load SEED ext4 | raw      never ends; says events as they happen
python -m tests.powercut.guest_node audit SEED ext4 | raw     reads events from /run/control/events, says one report
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Final

from tests.faults.audit import audit
from tests.faults.ledger import Event, Ledger
from tests.faults.load import Load, LoadPlan
from tests.faults.node import HurtNode
from tests.powercut.guest_disk import DEVICE, MOUNT, Port, make_file_system, mount

CAPACITY: Final = "96MiB"
EVENTS: Final = Path("/run/control/events")
SCRATCH: Final = Path("/run/tmp")
PUT_BYTES_MAX: Final = 48 << 20


def _node(kind: str) -> HurtNode:
    data_dir = Path(DEVICE) if kind == "raw" else MOUNT / "data"
    return HurtNode(SCRATCH, data_dir=data_dir, capacity=CAPACITY, cache="16MiB", module="kvstore")


def _load(port: Port, seed: int, kind: str) -> None:
    if kind == "ext4":
        make_file_system()
        mount()
    node = _node(kind)
    node.start()
    share = (0.4, 0.15, 0.05)[seed % 3]  # few syncs leave much in the drive's cache
    plan = LoadPlan(seed=seed, threads=3, put_bytes_max=PUT_BYTES_MAX, power_share=share, deadline_s=60)
    load = Load(node.address, plan, lambda event: port.say(event.to_line()))
    load.start()
    while not load.faults:
        threading.Event().wait(1)
    raise SystemExit("\n".join(load.faults))


def _audit(port: Port, kind: str) -> None:
    if kind == "ext4":
        mount()
    ledger = Ledger()
    for line in EVENTS.read_text().splitlines():
        ledger.apply(Event.from_line(line))
    node = _node(kind)
    check = node.check()
    node.start()
    found = audit(node.address, ledger)
    seen = found.observation
    node.stop()
    report = {
        "wrong": found.wrong,
        "resurrected": seen.resurrected,
        "lost_synced": seen.lost_synced,
        "lost": seen.lost,
        "reasons": {key: found.reasons[key] for key in (*seen.lost, *seen.lost_synced)},
        "hits": found.hits,
        "unsure": seen.unsure,
        "unsure_hits": seen.unsure_hits,
        "check_status": check.status,
        "check": check.report,
        "printed": node.printed(),
    }
    port.say(json.dumps(report))


if __name__ == "__main__":
    _, word, seed_text, kind_of_disk = sys.argv
    if word == "load":
        _load(Port(), int(seed_text), kind_of_disk)
    else:
        _audit(Port(), kind_of_disk)
