"""The answer to a read of whole records of one length, received and checked in one compiled call (`_inflow.c`).

The client's `inflow.WholeInflow` does the same in Python, and says what is expected of the frames.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.limits import FRAME_PAYLOAD_BYTES_MAX, SLICES_PER_FRAME_MAX
from kvstore.transport.exchange import Handle
from kvstore.types.compiled import require_crc_instruction, require_interface
from kvstore.wire.expected import DATA_START, WholeRecords
from kvstore.wire.slices import FLAG_FINAL

try:
    from kvstore.transport import _inflow

    require_interface(_inflow)
    require_crc_instruction(_inflow)
except ImportError as missing:
    IS_COMPILED = False
    HOW = f"in Python: kvstore.transport._inflow cannot be used ({missing})"
else:
    IS_COMPILED = True
    HOW = "compiled"


class WholeReceiver:
    """Receives on one connection, once, without the GIL.

    Args:
        handle: Blocking, with a timeout. It stays the caller's.
        records: What is expected.
        views: Where each item belongs; held as long as this lives, each as long as each of `records`.
        request_id: Of the GET.
        piece_bytes: Received and checked at a time, about.
    """

    __slots__ = ("_inflow",)

    def __init__(
        self, handle: Handle, records: WholeRecords, views: Sequence[memoryview], request_id: int, *, piece_bytes: int
    ) -> None:
        self._inflow = _inflow.Inflow(
            handle=handle,
            views=views,
            request_id=request_id,
            start=DATA_START,
            before=records.before_id,
            after=records.after_id,
            final_flag=FLAG_FINAL,
            block_bytes=records.block_bytes,
            record_bytes=records.record_bytes,
            slices_max=SLICES_PER_FRAME_MAX,
            payload_max=FRAME_PAYLOAD_BYTES_MAX,
            piece_bytes=piece_bytes,
        )

    @property
    def epoch(self) -> int:
        """The node's view, in the last frame; 0 when it named none, or none has come whole."""
        return self._inflow.epoch

    def receive(self, rearm_at_ns: int) -> bool | None:
        """Receives until all items are done: True; or it stops at a frame (see `rest`): False.

        Args:
            rearm_at_ns: From when on the socket's timeout is too long: None then, and it may be called again.
        """
        code = self._inflow.receive(rearm_at_ns)
        return None if code == _inflow.ARM else code == _inflow.DONE

    def rest(self) -> bytes:
        """All bytes of the frame that it stopped at, and behind it, as far as they have come."""
        return self._inflow.rest()

    def done(self) -> dict[int, bytes]:
        """Content id of each item that has come whole and matched its checksums."""
        return self._inflow.done()

    def content_ids(self) -> list[bytes]:
        """The content ids of all items, which are all done."""
        return self._inflow.content_ids()
