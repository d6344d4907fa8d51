"""How items of a write ended, gathered for the next RESULT frame."""

from __future__ import annotations

from kvstore.limits import DETAIL_BYTES_MAX, RESULTS_PER_FRAME_MAX
from kvstore.server.batch import pack_u32
from kvstore.types.results import Exists, ItemStatus, Refused, Stored
from kvstore.wire.failures import clip
from kvstore.wire.messages import ID_BYTES, Result

_NO_ID = bytes(ID_BYTES)


class Outcomes:
    """Ended items in the order in which they ended."""

    __slots__ = ("_content_ids", "_details", "_items", "_statuses")

    def __init__(self) -> None:
        self._clear()

    def __len__(self) -> int:
        return len(self._items)

    def add(self, item: int, status: int, *, content_id: bytes = _NO_ID, detail: str = "") -> None:
        """An item has ended."""
        if detail:
            self._details[len(self._items)] = one_line(detail)
        self._items.append(item)
        self._statuses.append(status)
        self._content_ids += content_id or _NO_ID

    def add_many(self, items: range, status: int, content_ids: bytes = b"") -> None:
        """Items have ended in one way; with ID_BYTES of content id for each, or without."""
        count = len(items)
        self._items += items
        self._statuses += bytes([status]) * count
        self._content_ids += content_ids or bytes(count * ID_BYTES)

    def add_outcome(self, item: int, outcome: Stored | Exists | Refused) -> None:
        """An item has ended as the engine says."""
        if isinstance(outcome, Stored):
            self.add(item, ItemStatus.STORED, content_id=outcome.content_id)
        elif isinstance(outcome, Exists):
            self.add(item, ItemStatus.EXISTS)
        else:
            self.add(item, outcome.reason, detail=outcome.detail)

    def take(self) -> list[Result]:
        """All that were added, as messages."""
        results = []
        details = self._details
        for at in range(0, len(self._items), RESULTS_PER_FRAME_MAX):
            stop = min(at + RESULTS_PER_FRAME_MAX, len(self._items))
            content_ids = bytes(self._content_ids[at * ID_BYTES : stop * ID_BYTES])
            some = [details.get(place, "") for place in range(at, stop)] if details else []
            results.append(
                Result(
                    items=pack_u32(self._items[at:stop]),
                    statuses=bytes(self._statuses[at:stop]),
                    content_ids=content_ids if content_ids.strip(b"\0") else b"",
                    details="\n".join(some) if any(some) else "",
                )
            )
        self._clear()
        return results

    def _clear(self) -> None:
        self._items: list[int] = []
        self._statuses = bytearray()
        self._content_ids = bytearray()
        self._details: dict[int, str] = {}


def one_line(detail: str) -> str:
    """A detail as it may stand in a RESULT: one line, and not too long."""
    return clip(detail.replace("\n", " "), DETAIL_BYTES_MAX) if detail else ""
