"""Host names of nodes: looked up beside the caller, so that a silent name server costs it no more than its deadline.

Lookups of one name are shared, and their number is bounded.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from typing import TypeAlias

from kvstore.errors import Overloaded
from kvstore.limits import NAME_LOOKUPS_MAX

Endpoint: TypeAlias = tuple[int, int, int, str, "tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]"]
"""Family, kind, protocol, canonical name and socket address, as `socket.getaddrinfo` gives them."""

_lock = threading.Lock()
_running: dict[tuple[int, str, int], _Lookup] = {}


def numeric_endpoints(host: str, port: int) -> Sequence[Endpoint] | None:
    """Where "host:port" is, without asking anybody; None when the host is a name."""
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        return None


class NameWait:
    """One caller's share of a lookup.

    Attributes:
        done: becomes readable when the answer is there. The caller closes it.
    """

    def __init__(self, host: str, port: int) -> None:
        """Begins, or joins the lookup of the same name that is running. Raises Overloaded."""
        self.done, self._bell = socket.socketpair()
        self.done.setblocking(False)
        name = (os.getpid(), host, port)  # a forked child has the table, but not the threads
        try:
            with _lock:
                lookup = _running.get(name)
                if lookup is None:
                    if len(_running) >= NAME_LOOKUPS_MAX:
                        raise Overloaded(
                            f"{len(_running)} host names are being looked up, the limit is {NAME_LOOKUPS_MAX}; "
                            "is the name server away? Addresses need none"
                        )
                    lookup = _Lookup(name)
                    lookup.start()  # it cannot end before it has this caller
                    _running[name] = lookup
                lookup.bells.append(self._bell)
        except BaseException:
            self.done.close()
            self._bell.close()
            raise
        self._lookup = lookup

    @property
    def is_over(self) -> bool:
        """Whether `endpoints` can be asked."""
        return self._lookup.is_over

    def endpoints(self) -> Sequence[Endpoint]:
        """What was found. Raises OSError when the name is not known or cannot be looked up."""
        if self._lookup.error is not None:
            raise OSError(self._lookup.error.errno or 0, f"its name is not known: {self._lookup.error.strerror}")
        return self._lookup.found


class _Lookup(threading.Thread):
    """Asks the system once, then rings everybody who waits."""

    def __init__(self, name: tuple[int, str, int]) -> None:
        super().__init__(name=f"kvstore-lookup-{name[1]}", daemon=True)
        self._asked = name
        self.bells: list[socket.socket] = []
        self.found: Sequence[Endpoint] = ()
        self.error: OSError | None = None
        self.is_over = False

    def run(self) -> None:
        _, host, port = self._asked
        try:
            self.found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            self.error = error if isinstance(error, OSError) else OSError(0, str(error))
        with _lock:
            self.is_over = True
            _running.pop(self._asked, None)
            for bell in self.bells:
                bell.close()  # the other end reads its end
