"""Small files below /proc and /sys of this machine, or of a tree of files that stands for one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from kvstore.limits import DOCTOR_FILE_BYTES_MAX


class Files(Protocol):
    """A machine to read from. Paths are absolute; what is not there or not readable is None or empty."""

    def text(self, path: str) -> str | None:
        """Content of a small file, stripped; None when it cannot be read (an empty GID entry answers EINVAL, too)."""

    def names(self, path: str) -> tuple[str, ...]:
        """Names in a folder, sorted; none when it is not there."""


class HostFiles:
    """This machine, or a tree of files that stands for one (`root`)."""

    def __init__(self, root: str = "/") -> None:
        self._root = Path(root)

    def text(self, path: str) -> str | None:
        """See `Files.text`."""
        try:
            with open(self._at(path), "rb") as file:
                return file.read(DOCTOR_FILE_BYTES_MAX).decode("utf-8", "replace").strip()
        except OSError:
            return None

    def names(self, path: str) -> tuple[str, ...]:
        """See `Files.names`."""
        try:
            return tuple(sorted(os.listdir(self._at(path))))
        except OSError:
            return ()

    def _at(self, path: str) -> Path:
        return self._root / path.lstrip("/")


def whole_number(text: str | None, *, base: int = 10) -> int | None:
    """The number that a file of the kernel holds; None for none, or for what is no number."""
    try:
        return int(text or "", base)
    except ValueError:
        return None
