"""A disk with a volatile write cache, served over NBD: what a power cut does to a real drive, decided by a seed.

Protocol: https://github.com/NetworkBlockDevice/nbd/blob/master/doc/proto.md, fixed newstyle, simple replies. The guest
sees every write at once; the image on the host gets only what was flushed. At the cut a random part of the rest gets
there too, cut into pieces of one sector to one page, so that writes of several sectors may be torn.
"""

from __future__ import annotations

import mmap
import random
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SECTOR_BYTES: Final = 512
PAGE_BYTES: Final = 4096
REQUEST_BYTES_MAX: Final = 32 * 1024 * 1024

_GREETING: Final = struct.Struct(">8s8sH")
_OPTION: Final = struct.Struct(">8sII")
_OPTION_REPLY: Final = struct.Struct(">QIII")
_REQUEST: Final = struct.Struct(">IHHQQI")
_REPLY: Final = struct.Struct(">IIQ")

_OPTION_MAGIC: Final = b"IHAVEOPT"
_REPLY_MAGIC: Final = 0x0003E889045565A9
_FIXED_NEWSTYLE: Final = 1
_OPT_EXPORT_NAME, _OPT_ABORT, _OPT_INFO, _OPT_GO = 1, 2, 6, 7
_REP_ACK, _REP_INFO, _REP_ERR_UNSUP = 1, 3, (1 << 31) + 1
_INFO_EXPORT, _INFO_BLOCK_SIZE = 0, 3

_HAS_FLAGS, _SEND_FLUSH, _SEND_FUA = 1, 4, 8
_TRANSMISSION_FLAGS: Final = _HAS_FLAGS | _SEND_FLUSH | _SEND_FUA
_READ, _WRITE, _DISCONNECT, _FLUSH = 0, 1, 2, 3
_FUA: Final = 1
_REQUEST_MAGIC: Final = 0x25609513
_SIMPLE_REPLY_MAGIC: Final = 0x67446698
_EINVAL: Final = 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """A write that the guest issued after the last flush. `forced` (FUA) was stable before it was acknowledged."""

    offset: int
    data: bytes
    forced: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CutReport:
    """What a cut did: pieces of unflushed writes that survived, that were lost, and writes that tore."""

    survived: int
    lost: int
    torn_writes: int


class VolatileDisk:
    """An image file behind a write cache that forgets. Not thread safe: one connection owns it.

    Args:
        image: the stable medium; its size is the disk's, a multiple of 4096.
    """

    def __init__(self, image: Path) -> None:
        self.size_bytes = image.stat().st_size
        assert self.size_bytes % PAGE_BYTES == 0, f"{image} has {self.size_bytes} bytes, not whole pages"
        with image.open("r+b") as file:
            self._stable = mmap.mmap(file.fileno(), self.size_bytes)
        self._seen = mmap.mmap(-1, self.size_bytes)  # with the cache on top: what the guest reads
        for offset in range(0, self.size_bytes, 1 << 20):
            piece = self._stable[offset : offset + (1 << 20)]
            if piece.count(0) != len(piece):  # a hole stays a hole
                self._seen[offset : offset + len(piece)] = piece
        self._unflushed: list[Write] = []
        self.flushes = 0

    @property
    def unflushed_bytes(self) -> int:
        """Bytes that a cut now could lose."""
        return sum(len(write.data) for write in self._unflushed if not write.forced)

    def read(self, offset: int, length_bytes: int) -> memoryview:
        """What the guest sees; valid until the next write."""
        return memoryview(self._seen)[offset : offset + length_bytes]

    def write(self, offset: int, data: bytes, *, forced: bool = False) -> None:
        """Take a write into the cache; `forced` also onto the medium."""
        self._seen[offset : offset + len(data)] = data
        self._unflushed.append(Write(offset=offset, data=data, forced=forced))

    def flush(self) -> None:
        """Everything taken so far is stable."""
        for write in self._unflushed:
            self._stable[write.offset : write.offset + len(write.data)] = write.data
        self._unflushed.clear()
        self.flushes += 1

    def cut(self, seed: int) -> CutReport:
        """The power goes: a random part of the cache has reached the medium. The disk is closed."""
        choice = random.Random(seed)
        share = choice.choice((0.0, 0.1, 0.5, 0.9))
        survived = lost = torn = 0
        # In the order of arrival: of two writes to one sector a drive never puts the older over the newer.
        for write in self._unflushed:
            kept = 0
            pieces = list(_pieces(write, choice))
            for offset, data in pieces:
                if write.forced or choice.random() < share:
                    self._stable[offset : offset + len(data)] = data
                    kept += 1
            survived += kept
            lost += len(pieces) - kept
            torn += 0 < kept < len(pieces)
        self._unflushed.clear()
        self._stable.flush()
        self._stable.close()
        self._seen.close()
        return CutReport(survived=survived, lost=lost, torn_writes=torn)


def _pieces(write: Write, choice: random.Random) -> Iterator[tuple[int, bytes]]:
    """The write in aligned pieces of one sector to one page: what a drive loses or keeps as one."""
    unit_bytes = choice.choice((SECTOR_BYTES, PAGE_BYTES))
    at, end = 0, len(write.data)
    while at < end:
        length_bytes = min(end - at, unit_bytes - (write.offset + at) % unit_bytes)
        yield write.offset + at, write.data[at : at + length_bytes]
        at += length_bytes


class NbdServer:
    """Serves one disk to one client at a time over a Unix socket, on a thread of its own.

    `cut` and `close` end it; the client must be dead or done by then.
    """

    def __init__(self, disk: VolatileDisk, path: Path) -> None:
        self.disk = disk
        self.path = path
        self.error: OSError | None = None
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(1)
        self._thread = threading.Thread(target=self._serve, name="nbd", daemon=True)
        self._thread.start()

    def cut(self, seed: int) -> CutReport:
        """The power goes. Call when the client is dead: what it sent and we had not read yet counts as never sent."""
        self._end()
        return self.disk.cut(seed)

    def close(self) -> None:
        """An orderly end: the cache is flushed."""
        self._end()
        self.disk.flush()
        self.disk.cut(0)

    def _end(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(30)
        assert not self._thread.is_alive(), "the NBD client still holds its connection"
        self._listener.close()
        self.path.unlink()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # shut down
            with connection:
                try:
                    if _shake_hands(connection, self.disk.size_bytes):
                        _transmit(connection, self.disk)
                except (EOFError, ConnectionError):
                    pass  # the client was killed: what this server is for
                except OSError as error:
                    self.error = error


def _shake_hands(connection: socket.socket, size_bytes: int) -> bool:
    """Newstyle negotiation. True when the client goes on to transmission."""
    connection.sendall(_GREETING.pack(b"NBDMAGIC", _OPTION_MAGIC, _FIXED_NEWSTYLE))
    _receive(connection, 4)
    while True:
        magic, option, length_bytes = _OPTION.unpack(_receive(connection, _OPTION.size))
        assert magic == _OPTION_MAGIC, magic
        _receive(connection, length_bytes)
        if option == _OPT_EXPORT_NAME:
            connection.sendall(struct.pack(">QH", size_bytes, _TRANSMISSION_FLAGS) + bytes(124))
            return True
        if option not in (_OPT_GO, _OPT_INFO):
            kind = _REP_ACK if option == _OPT_ABORT else _REP_ERR_UNSUP
            connection.sendall(_OPTION_REPLY.pack(_REPLY_MAGIC, option, kind, 0))
            if option == _OPT_ABORT:
                return False
            continue
        export = struct.pack(">HQH", _INFO_EXPORT, size_bytes, _TRANSMISSION_FLAGS)
        sizes = struct.pack(">HIII", _INFO_BLOCK_SIZE, SECTOR_BYTES, PAGE_BYTES, REQUEST_BYTES_MAX)
        for info in (export, sizes):
            connection.sendall(_OPTION_REPLY.pack(_REPLY_MAGIC, option, _REP_INFO, len(info)) + info)
        connection.sendall(_OPTION_REPLY.pack(_REPLY_MAGIC, option, _REP_ACK, 0))
        if option == _OPT_GO:
            return True


def _transmit(connection: socket.socket, disk: VolatileDisk) -> None:
    """Answers requests one by one until the client disconnects; raises EOFError when it vanishes."""
    while True:
        magic, flags, kind, cookie, offset, length_bytes = _REQUEST.unpack(_receive(connection, _REQUEST.size))
        assert magic == _REQUEST_MAGIC, magic
        if kind == _DISCONNECT:
            return
        data = _receive(connection, length_bytes) if kind == _WRITE else b""
        answer = memoryview(b"")
        error = 0
        if offset + length_bytes > disk.size_bytes:
            error = _EINVAL
        elif kind == _READ:
            answer = disk.read(offset, length_bytes)
        elif kind == _WRITE:
            disk.write(offset, data, forced=bool(flags & _FUA))
        elif kind == _FLUSH:
            disk.flush()
        else:
            error = _EINVAL
        connection.sendall(_REPLY.pack(_SIMPLE_REPLY_MAGIC, error, cookie))
        if answer:
            connection.sendall(answer)
        answer.release()


def _receive(connection: socket.socket, length_bytes: int) -> bytes:
    data = bytearray(length_bytes)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view)
        if count == 0:
            raise EOFError
        view = view[count:]
    return bytes(data)
