"""The disk that forgets, by itself: what was flushed is there after a cut, the rest may be, in pieces."""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.powercut.nbd import PAGE_BYTES, SECTOR_BYTES, CutReport, NbdServer, VolatileDisk

DISK_BYTES = 1 << 20
READ, WRITE, DISCONNECT, FLUSH = range(4)


class NbdClient:
    """The least of a client: what qemu sends, one request at a time."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(str(path))
        self._cookie = 0
        assert self._take(16) == b"NBDMAGICIHAVEOPT"
        assert struct.unpack(">H", self._take(2))[0] & 1, "not fixed newstyle"
        self._socket.sendall(struct.pack(">I", 1))
        assert self._option(8)[0] == (1 << 31) + 1, "structured replies are not ours"
        kinds = {}
        self._send_option(7, struct.pack(">IH", 0, 0))
        while (reply := self._option_reply())[0] != 1:
            kinds[struct.unpack(">H", reply[1][:2])[0]] = reply[1][2:]
        self.size_bytes, self.flags = struct.unpack(">QH", kinds[0])

    def _take(self, count: int) -> bytes:
        data = self._socket.recv(count, socket.MSG_WAITALL) if count else b""
        assert len(data) == count
        return data

    def _send_option(self, option: int, data: bytes) -> None:
        self._socket.sendall(b"IHAVEOPT" + struct.pack(">II", option, len(data)) + data)

    def _option(self, option: int, data: bytes = b"") -> tuple[int, bytes]:
        self._send_option(option, data)
        return self._option_reply()

    def _option_reply(self) -> tuple[int, bytes]:
        _, _, kind, length_bytes = struct.unpack(">QIII", self._take(20))
        return kind, self._take(length_bytes)

    def call(self, kind: int, offset: int = 0, data: bytes | int = b"", *, fua: bool = False) -> tuple[int, bytes]:
        self._cookie += 1
        length_bytes = data if isinstance(data, int) else len(data)
        payload = b"" if isinstance(data, int) else data
        self._socket.sendall(
            struct.pack(">IHHQQI", 0x25609513, fua, kind, self._cookie, offset, length_bytes) + payload
        )
        magic, error, cookie = struct.unpack(">IIQ", self._take(16))
        assert (magic, cookie) == (0x67446698, self._cookie)
        return error, self._take(length_bytes if kind == READ and not error else 0)

    def kill(self) -> None:
        self._socket.close()


@pytest.fixture
def image(tmp_path: Path) -> Path:
    image = tmp_path / "image"
    image.write_bytes(bytes(DISK_BYTES))
    return image


@pytest.fixture
def server(image: Path, tmp_path: Path) -> Iterator[NbdServer]:
    server = NbdServer(VolatileDisk(image), tmp_path / "nbd")
    yield server
    assert server.error is None


def cut(server: NbdServer, client: NbdClient, seed: int = 0) -> CutReport:
    client.kill()
    return server.cut(seed)


def test_negotiation_offers_flush_and_fua(server: NbdServer) -> None:
    client = NbdClient(server.path)
    assert client.size_bytes == DISK_BYTES
    assert client.flags == 1 | 4 | 8
    cut(server, client)


def test_the_guest_sees_its_own_writes_at_once(server: NbdServer, image: Path) -> None:
    client = NbdClient(server.path)
    assert client.call(WRITE, 4096, b"a" * 5000) == (0, b"")
    assert client.call(READ, 4095, 3) == (0, b"\0aa")
    assert image.read_bytes() == bytes(DISK_BYTES), "unflushed, and yet on the medium"
    cut(server, client)


def test_flushed_writes_survive_every_cut(server: NbdServer, image: Path) -> None:
    client = NbdClient(server.path)
    client.call(WRITE, 0, b"a" * 8192)
    client.call(FLUSH)
    client.call(WRITE, 8192, b"b" * 8192)
    cut(server, client, seed=3)
    assert image.read_bytes()[:8192] == b"a" * 8192


def test_forced_writes_survive_and_nothing_older_overwrites_them(server: NbdServer, image: Path) -> None:
    client = NbdClient(server.path)
    client.call(WRITE, 0, b"a" * 4096)
    client.call(WRITE, 0, b"b" * 4096, fua=True)
    report = cut(server, client, seed=1)
    assert image.read_bytes()[:4096] == b"b" * 4096
    assert report.survived >= 1


@pytest.mark.parametrize("kind", [READ, WRITE])
def test_beyond_the_end_is_refused_and_the_connection_lives(server: NbdServer, kind: int) -> None:
    client = NbdClient(server.path)
    assert client.call(kind, DISK_BYTES - 512, b"x" * 1024 if kind == WRITE else 1024)[0] != 0
    assert client.call(READ, 0, 1) == (0, b"\0")
    cut(server, client)


def test_a_second_client_finds_what_the_first_wrote(server: NbdServer) -> None:
    first = NbdClient(server.path)
    first.call(WRITE, 512, b"z")
    first.kill()
    second = NbdClient(server.path)
    assert second.call(READ, 512, 1) == (0, b"z")
    cut(server, second)


def test_unflushed_writes_survive_in_part_and_whole_sectors(image: Path) -> None:
    old, new = b"o" * 65536, b"n" * 65536
    totals = CutReport(survived=0, lost=0, torn_writes=0)
    for seed in range(20):
        image.write_bytes(old + bytes(DISK_BYTES - len(old)))
        disk = VolatileDisk(image)
        disk.write(0, new)
        report = disk.cut(seed)
        found = image.read_bytes()[: len(old)]
        sectors = [found[at : at + SECTOR_BYTES] for at in range(0, len(found), SECTOR_BYTES)]
        assert all(sector in (old[:SECTOR_BYTES], new[:SECTOR_BYTES]) for sector in sectors), f"seed {seed}"
        totals = CutReport(
            survived=totals.survived + report.survived,
            lost=totals.lost + report.lost,
            torn_writes=totals.torn_writes + report.torn_writes,
        )
    assert totals.survived
    assert totals.lost
    assert totals.torn_writes


def test_a_cut_is_decided_by_its_seed(image: Path) -> None:
    outcomes = []
    for seed in (7, 7, 8):
        image.write_bytes(bytes(DISK_BYTES))
        disk = VolatileDisk(image)
        choice = random.Random(0)
        for _ in range(50):
            at = choice.randrange(0, DISK_BYTES - 3 * PAGE_BYTES) // SECTOR_BYTES * SECTOR_BYTES
            disk.write(at, choice.randbytes(3 * PAGE_BYTES))
        disk.cut(seed)
        outcomes.append(image.read_bytes())
    assert outcomes[0] == outcomes[1]
    assert outcomes[1] != outcomes[2]


def test_an_image_is_read_where_it_has_data(image: Path) -> None:
    with image.open("r+b") as file:
        file.seek(700_000)
        file.write(b"kept")
    disk = VolatileDisk(image)
    assert bytes(disk.read(699_999, 6)) == b"\0kept\0"
    disk.cut(0)
