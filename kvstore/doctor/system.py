"""What the doctor may ask of the machine: files below /proc and /sys, limits of the process, tables of the kernel.

Everything here reads, nothing changes. The checks themselves never see it: they are handed facts.
"""

from __future__ import annotations

import ctypes
import os
import resource
import socket
import struct
from dataclasses import dataclass
from typing import Final, Protocol

from kvstore.device.host_files import Files, HostFiles
from kvstore.limits import DOCTOR_DUMP_BYTES_MAX, DOCTOR_DUMP_NS_MAX, SECOND_NS

_TIME_ERROR: Final = 5  # adjtimex(2): the clock is not synchronised
_TIMEX_BYTES: Final = 512  # more than struct timex of any architecture
_NLM_F_REQUEST: Final = 0x1
_NLM_F_DUMP: Final = 0x300
_NLMSG_ERROR: Final = 2
_NLMSG_DONE: Final = 3
_NETLINK_HEADER: Final = struct.Struct("=IHHII")  # netlink(7): length, type, flags, sequence, port
_NETLINK_READ_BYTES: Final = 256 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A limit of this process, getrlimit(2). None is unlimited."""

    soft: int | None
    hard: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a netlink dump: its type, and what follows the header."""

    kind: int
    body: bytes


class System(Files, Protocol):
    """A machine to read from. Paths are absolute; what is not there or not readable is None or empty."""

    def real(self, path: str) -> str | None:
        """The path with all links followed; None when it is not there."""

    def limit(self, which: int) -> Limit:
        """A limit of this process by its number in `resource`."""

    def kernel_release(self) -> str:
        """As uname(2) tells: "6.1.0-18-amd64"."""

    def clock_is_synchronised(self) -> bool | None:
        """Whether the kernel believes its wall clock, adjtimex(2); None when it does not tell."""

    def dump(self, protocol: int, kind: int, body: bytes) -> tuple[Message, ...] | None:
        """A table of the kernel by netlink(7), one message each; None when it is refused or not there."""


class LinuxSystem(HostFiles):
    """This machine, or a tree of files that stands for one (`root`)."""

    def real(self, path: str) -> str | None:
        try:
            found = self._at(path).resolve(strict=True)
        except OSError:
            return None
        root = self._root.resolve()
        return f"/{found.relative_to(root)}" if found.is_relative_to(root) else None

    def limit(self, which: int) -> Limit:
        soft, hard = resource.getrlimit(which)
        return Limit(soft=_bounded(soft), hard=_bounded(hard))

    def kernel_release(self) -> str:
        return os.uname().release

    def clock_is_synchronised(self) -> bool | None:
        libc = ctypes.CDLL(None, use_errno=True)
        state = libc.adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))  # modes = 0: only reads
        return None if state < 0 else state != _TIME_ERROR

    def dump(self, protocol: int, kind: int, body: bytes) -> tuple[Message, ...] | None:
        try:
            with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol) as asking:
                asking.settimeout(DOCTOR_DUMP_NS_MAX / SECOND_NS)
                length = _NETLINK_HEADER.size + len(body)
                asking.send(_NETLINK_HEADER.pack(length, kind, _NLM_F_REQUEST | _NLM_F_DUMP, 1, 0) + body)
                return _collect(asking)
        except OSError:
            return None


def _bounded(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


def _collect(asking: socket.socket) -> tuple[Message, ...] | None:
    """Messages up to the end of the dump, bounded in bytes; None when the kernel answers with an error."""
    messages: list[Message] = []
    taken_bytes = 0
    while taken_bytes < DOCTOR_DUMP_BYTES_MAX:
        datagram = asking.recv(_NETLINK_READ_BYTES)
        taken_bytes += len(datagram)
        offset = 0
        while offset + _NETLINK_HEADER.size <= len(datagram):
            length, kind, _, _, _ = _NETLINK_HEADER.unpack_from(datagram, offset)
            if length < _NETLINK_HEADER.size or kind == _NLMSG_ERROR:
                return None
            if kind == _NLMSG_DONE:
                return tuple(messages)
            messages.append(Message(kind=kind, body=datagram[offset + _NETLINK_HEADER.size : offset + length]))
            offset += (length + 3) & ~3  # messages are aligned to 4 bytes
        if not datagram:
            return tuple(messages)
    return tuple(messages)
