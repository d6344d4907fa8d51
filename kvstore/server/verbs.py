"""What the supervisor can ask of a worker, as the data plane sees it."""

from __future__ import annotations

from typing import Protocol

from kvstore.wire.codec import Plain


class AdminVerbs(Protocol):
    """Carries out the verbs of ADMIN frames."""

    def carry_out(self, verb: str, arguments: Plain) -> bytes:
        """The packed answer. Raises InvalidRequest for an unknown verb or bad arguments, KVStoreError for a failure."""

    def supervisor_gone(self) -> None:
        """The supervisor's connection has closed."""
