"""The type of anything with a buffer: bytes, bytearray, memoryview, mmap, array.array, numpy arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, cast

from kvstore.errors import InvalidRequest

if TYPE_CHECKING:
    import numpy.typing as npt


class SupportsBuffer(Protocol):
    """An object that `memoryview` takes (PEP 688, which names the method for checkers of any Python version)."""

    def __buffer__(self, flags: int, /) -> memoryview: ...


# numpy declares its arrays as buffers to type checkers from Python 3.12 on only
Buffer: TypeAlias = "SupportsBuffer | npt.NDArray[Any]"

view_of: Final = cast("Callable[[Buffer], memoryview]", memoryview)
"""`memoryview`, for the checker's sake also of numpy arrays: no copy, and the buffer is pinned while the view lives."""


def flat_view(data: Buffer) -> memoryview:
    """`data` as a flat view of bytes, without a copy; whatever its item type and shape.

    Raises:
        InvalidRequest: The buffer is not C-contiguous; the message has shape and strides.
    """
    view = view_of(data)
    if view.format == "B" and view.ndim == 1 and view.c_contiguous:
        return view
    if view.nbytes == 0:
        return memoryview(b"")
    if not view.c_contiguous:
        raise InvalidRequest(
            f"buffer of shape {view.shape} and strides {view.strides} is not C-contiguous; pass a contiguous one"
        )
    return view.cast("B")
