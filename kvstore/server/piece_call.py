"""A read in progress as the engine sees it: pieces come in, and wait until the connection has a turn to send."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from kvstore.engine.api import Engine, ReadHandle, ReadSpec, ReadyItem
from kvstore.server.call import Call, end_read
from kvstore.telemetry.metrics import Verb
from kvstore.types.results import MissReason

if TYPE_CHECKING:
    from kvstore.server.connection import Connection

OPEN: Final = int(MissReason.DEADLINE)
"""What an item counts as that was neither moved nor missed when the call ends."""


class PieceCall(Call):
    """One read. The engine delivers verified pieces within its window; how they travel is the subclass's.

    They are held until they have been moved, then released, which lets the engine go on.
    """

    __slots__ = ("_finished", "_handle", "_pieces", "_starting", "_statuses")

    def __init__(self, connection: Connection, count: int, *, now_ns: int, deadline_ns: int) -> None:
        # what Call's constructor does, in line: one is made for every GET
        self.connection = connection
        self.verb = Verb.GET
        self.request_id = connection.session.request_id
        self.started_ns = now_ns
        self.deadline_ns = deadline_ns
        self.over = False
        self._starting = True
        self._statuses = bytearray([OPEN]) * count
        self._pieces: deque[ReadyItem] = deque()
        self._finished = False
        self._handle: ReadHandle | None = None

    def start(self, engine: Engine, spec: ReadSpec, now_ns: int) -> bool:
        """Begins, and moves a frame of what is there; True when the engine has delivered everything already."""
        self._hold(engine.read(spec, self, now_ns=now_ns))
        self._starting = False
        is_delivered = self._finished
        if self._pieces or is_delivered:
            self.connection.send_now()
        return is_delivered

    def _hold(self, handle: ReadHandle) -> None:
        """Keeps it while it can be cancelled: handle and call know each other, and no cycle is left behind."""
        if not self._finished:
            self._handle = handle

    # --- ReadSink ---------------------------------------------------------------------------------------------------
    def ready(self, item: ReadyItem) -> None:
        """A piece to move."""
        if self.over:
            item.release()
            return
        self._pieces.append(item)
        if not self._starting and not self.connection.in_turn:
            self.connection.request_send()

    def missed(self, index: int, reason: MissReason) -> None:
        """An item that will not come; END says so."""
        self._statuses[index] = reason

    def finished(self) -> None:
        """Nothing more comes."""
        self._finished = True
        self._handle = None
        if not self._starting:
            self.connection.request_send()

    # --- Call -------------------------------------------------------------------------------------------------------
    @property
    def held_bytes(self) -> int:
        return self._handle.staged_bytes if self._handle is not None else sum(len(item.data) for item in self._pieces)

    def cancel(self) -> None:
        self.release()
        self._end()

    def overdue(self) -> None:
        self.close_unread()

    def release(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.cancel()
        pieces, self._pieces = self._pieces, deque()
        for item in pieces:
            item.release()

    def _end(self) -> None:
        end_read(self, bytes(self._statuses))
