"""Flow classes: what kind of traffic a request is, so that the node can order it on the wire and on the disk."""

from __future__ import annotations

from enum import IntEnum


class FlowClass(IntEnum):
    """Class of a request; the value is its code on the wire. Lower values matter more to latency."""

    DECODE_READ = 0
    PREFILL_READ = 1
    PREFETCH = 2
    WRITEBACK = 3
    BACKGROUND = 4

    @classmethod
    def parse(cls, name: str) -> FlowClass:
        """The class called `name` ("decode_read", ...). Raises ValueError with the known names."""
        try:
            return cls[name.upper()]
        except KeyError:
            known = ", ".join(member.name.lower() for member in cls)
            raise ValueError(f"flow class {name!r} is unknown; use one of: {known}") from None
