"""Builds the one compiled part, the io_uring binding; everything else is declared in pyproject.toml.

The extension is optional: without a compiler, or without io_uring, the install succeeds and the node uses its
thread pool device, and says so.
"""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Extension, setup

URING_SOURCE = Path("kvstore/device/_uring.c")


def extensions() -> list[Extension]:
    """The extensions that this system can build."""
    if not sys.platform.startswith("linux") or not URING_SOURCE.exists():
        return []
    return [
        Extension(
            "kvstore.device._uring",
            sources=[str(URING_SOURCE)],
            extra_compile_args=["-O2", "-Wall", "-Wextra"],
            optional=True,
        )
    ]


setup(ext_modules=extensions())
