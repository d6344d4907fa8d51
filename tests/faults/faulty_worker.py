"""python -m tests.faults.faulty_worker LAUNCH: the worker as it is, on a drive that a test can hurt."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import kvstore.device.probe
from tests.faults.hurt_device import CONTROL_VARIABLE, HurtDevice

_open_device = kvstore.device.probe.open_device


def _open_hurt(path: str | Path, **options: Any) -> HurtDevice:
    return HurtDevice(_open_device(path, **options), path=Path(path), control=Path(os.environ[CONTROL_VARIABLE]))


kvstore.device.probe.open_device = _open_hurt

from kvstore.server.worker import main  # noqa: E402 -- it binds `open_device` when it is imported

if __name__ == "__main__":
    main()
