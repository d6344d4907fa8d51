"""A machine made of files: what `kvstore.doctor` reads, in any state that a test wants."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from pathlib import Path

from kvstore.doctor.system import Limit, LinuxSystem, Message


class FakeSystem(LinuxSystem):
    """A tree of files below `root` stands for / of the machine; the rest is set as attributes.

    Attributes:
        limits: by number of `resource`; others are unlimited.
        release: uname -r.
        is_synchronised: answer of `clock_is_synchronised`.
        dumps: tables of the kernel by (protocol, message type); others are refused.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        self.root = root
        self.limits: dict[int, Limit] = {resource.RLIMIT_NOFILE: Limit(soft=1024, hard=1 << 20)}
        self.release = "6.12.0"
        self.is_synchronised: bool | None = True
        self.dumps: dict[tuple[int, int], tuple[Message, ...]] = {}

    def put(self, files: Mapping[str, str]) -> None:
        """Write files by their absolute path there. "-> /path" makes a link, a path that ends in / a folder."""
        for path, content in files.items():
            place = self.root / path.strip("/")
            if path.endswith("/"):
                place.mkdir(parents=True, exist_ok=True)
                continue
            place.parent.mkdir(parents=True, exist_ok=True)
            place.unlink(missing_ok=True)
            if content.startswith("-> "):
                target = self.root / content.removeprefix("-> ").strip("/")
                place.symlink_to(os.path.relpath(target, place.parent))
            else:
                place.write_text(f"{content}\n")

    def limit(self, which: int) -> Limit:
        return self.limits.get(which, Limit(soft=None, hard=None))

    def kernel_release(self) -> str:
        return self.release

    def clock_is_synchronised(self) -> bool | None:
        return self.is_synchronised

    def dump(self, protocol: int, kind: int, body: bytes) -> tuple[Message, ...] | None:
        return self.dumps.get((protocol, kind))
