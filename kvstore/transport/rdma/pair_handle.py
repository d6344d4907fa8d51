"""Destroying a queue pair without the GIL, which both libraries hold meanwhile: a thread would stop all others.

Their objects show no handle. It is looked for in the object: the word that points at a `struct ibv_qp` with the number
that the object names (`<infiniband/verbs.h>`, whose layout never changes). The pointed at is read by /proc/self/mem,
where a wrong guess is an error and no crash. What is not found is destroyed by the library itself.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
from typing import Final

_WORD: Final = ctypes.sizeof(ctypes.c_void_p)
_HEAD_BYTES: Final = object.__basicsize__
_OBJECT_BYTES_MAX: Final = 512
_NUMBER_AND_TYPE: Final = struct.Struct("=I4xI")  # qp_num, state, qp_type, behind six pointers and a handle
_AT: Final = 6 * _WORD + 4
_RELIABLE_CONNECTION: Final = 2


def destroy_unlocked(pair: object, number: int) -> int | None:
    """Destroys the queue pair of a library's object, which is a closed one from then on if that went well.

    Returns:
        0 or the errno of ibv_destroy_qp(3); None when no handle was found and nothing was done.
    """
    library = _library()
    slot = _slot_of(pair, number) if library is not None else 0
    if library is None or not slot:
        return None
    held = ctypes.c_void_p.from_address(slot)
    handle, held.value = held.value, None
    status = int(library.ibv_destroy_qp(ctypes.c_void_p(handle)))
    if status:
        held.value = handle
    return status


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libibverbs.so.1")
    except OSError:
        return None


def _slot_of(pair: object, number: int) -> int:
    """The address of the object's pointer; 0 when none of its words is one."""
    begin = id(pair)
    stop = min(type(pair).__basicsize__, _OBJECT_BYTES_MAX)
    try:
        memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        for at in range(_HEAD_BYTES, stop - _WORD + 1, _WORD):
            pointer = ctypes.c_size_t.from_address(begin + at).value
            if pointer and _is_pair(memory, pointer, number):
                return begin + at
        return 0
    finally:
        os.close(memory)


def _is_pair(memory: int, pointer: int, number: int) -> bool:
    try:
        found = os.pread(memory, _NUMBER_AND_TYPE.size, pointer + _AT)
    except (OSError, OverflowError):
        return False
    return len(found) == _NUMBER_AND_TYPE.size and _NUMBER_AND_TYPE.unpack(found) == (number, _RELIABLE_CONNECTION)
