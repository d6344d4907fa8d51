"""One thread around epoll: descriptors and what to do when they are ready."""

from __future__ import annotations

import select
from collections.abc import Callable
from typing import Final

from kvstore.transport.outflow import outflow_of

READABLE: Final = select.EPOLLIN
WRITABLE: Final = select.EPOLLOUT
BROKEN: Final = select.EPOLLERR | select.EPOLLHUP
_EVENTS_MAX: Final = 256
_FOR_EVER_NS: Final = -1


class Loop:
    """Level-triggered readiness. Handlers get the event bits; they may watch, change and forget anything.

    Attributes:
        outflow: sends over lent sockets while the loop waits; None where that is not compiled.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self.outflow = outflow_of(self._epoll.fileno())

    def watch(self, fileno: int, handler: Callable[[int], None], interest: int = READABLE) -> None:
        """Calls `handler` whenever `fileno` is ready for `interest`, or broken."""
        self._epoll.register(fileno, interest)
        self._handlers[fileno] = handler

    def change(self, fileno: int, interest: int) -> None:
        """Another interest in a watched descriptor."""
        self._epoll.modify(fileno, interest)

    def forget(self, fileno: int) -> None:
        """No longer watched; call before the descriptor is closed."""
        if self._handlers.pop(fileno, None) is not None:
            self._epoll.unregister(fileno)

    def turn(self, timeout_ns: int | None, woke: Callable[[], None]) -> None:
        """Waits until something is ready or the time is over (None: for ever), calls `woke`, then the handlers once."""
        handlers = self._handlers
        if self.outflow is not None:
            ready = self.outflow.wait(_FOR_EVER_NS if timeout_ns is None else timeout_ns)
        else:
            # rounded up: waking before a timer is due would spin
            timeout = None if timeout_ns is None else -(-timeout_ns // 1_000_000) / 1000
            ready = self._epoll.poll(timeout, _EVENTS_MAX)
        woke()
        for fileno, events in ready:
            handler = handlers.get(fileno)
            if handler is not None:
                handler(events)

    def close(self) -> None:
        """Closes the epoll descriptor."""
        self._handlers.clear()
        self._epoll.close()
