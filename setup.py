"""Builds the compiled parts: io_uring, search and check of cold reads, single reads, sending, puts, checksums.

pyproject.toml declares the rest. All are optional: without a compiler the install succeeds, the node uses its thread
pool device and says so, and the other parts are done in Python: the same answers, slower.
"""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Extension, setup

PARTS = (
    "kvstore.device._uring",
    "kvstore.engine._records",
    "kvstore.engine._search",
    "kvstore.transport._exchange",
    "kvstore.transport._inflow",
    "kvstore.transport._outflow",
    "kvstore.transport._put_lane",
    "kvstore.types._sums",
)
HEADERS = ["kvstore/types/_crc32c.h"]  # which a source distribution then carries


def extensions() -> list[Extension]:
    """The extensions that this system can build."""
    if not sys.platform.startswith("linux"):
        return []
    sources = {name: Path(*name.split(".")).with_suffix(".c") for name in PARTS}
    arguments = ["-O2", "-Wall", "-Wextra"]
    return [
        Extension(name, sources=[str(source)], depends=HEADERS, extra_compile_args=arguments, optional=True)
        for name, source in sources.items()
        if source.exists()
    ]


setup(ext_modules=extensions())
