"""What a client holds in one process: core and driver. A forked child finds the pid changed and makes its own."""

from __future__ import annotations

import os
from typing import Generic, TypeVar

from kvstore.errors import ForkedClient
from kvstore_client.core import ClientCore

D = TypeVar("D")


class ProcessState(Generic[D]):
    """State of a client in the process `pid`.

    Attributes:
        core: What all calls share.
        driver: Who runs them.
        is_closed: The client was closed.
    """

    def __init__(self, core: ClientCore, driver: D) -> None:
        self.pid = os.getpid()
        self.core = core
        self.driver = driver
        self.is_closed = False

    @property
    def is_usable(self) -> bool:
        """True in the process that made it, until the client is closed."""
        return not self.is_closed and self.pid == os.getpid()

    def check_process(self) -> None:
        """Raises ForkedClient in another process than the one that made it."""
        if self.pid != os.getpid():
            raise ForkedClient(
                f"this object belongs to process {self.pid}, this is {os.getpid()}; make a new one after the fork"
            )
