"""Every way of moving bytes on every kind of place: the whole suite on pairs that cover all, the product nightly."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.device import syscalls
from kvstore.device.base import Device
from kvstore.device.probe import open_device
from kvstore.errors import Unavailable
from kvstore.limits import MS_NS
from kvstore.testing.device_suite import DEVICE_BYTES, DeviceSuite, aligned, random_bytes, read, skewed, split, write

MODES = ("uring", "threads")
PLACES = ("tmpfs", "ext4-512", "ext4-4096", "xfs-512", "xfs-4096", "raw-512", "raw-4096")
DIRECT = (True, False)
# Each pair of (mode, place), (mode, direct I/O) and (place, direct I/O) at least once; direct I/O is how nodes run.
PAIRWISE = [(mode, place, True) for mode in MODES for place in PLACES] + [
    (MODES[index % 2], place, False) for index, place in enumerate(PLACES)
]
PRODUCT = list(itertools.product(MODES, PLACES, DIRECT))
REST = [combination for combination in PRODUCT if combination not in PAIRWISE]
# What the page cache is bypassed on: tmpfs has nothing but the page cache.
BUFFERED_ONLY = {"tmpfs"}


def name_of(combination: tuple[str, str, bool]) -> str:
    mode, place, direct_io = combination
    return f"{mode}-{place}-{'direct' if direct_io else 'buffered'}"


PARAMS = [pytest.param(each, id=name_of(each)) for each in PAIRWISE] + [
    pytest.param(each, id=name_of(each), marks=pytest.mark.nightly) for each in REST
]


class TestFileDevices(DeviceSuite):
    """The suite over a file or raw device of its own in each place."""

    _mode: str
    _direct_io: bool
    _path: Path

    @pytest.fixture(autouse=True, params=PARAMS)
    def _place(self, request: pytest.FixtureRequest, places: dict[str, Path], tmp_path: Path) -> Iterator[None]:
        self._mode, place, self._direct_io = request.param
        self.expected_mode = self._mode
        self.gives_space_back = not place.startswith("raw")
        if place.startswith("raw"):
            self._path = places[place]
            wipe(self._path)
            yield
        else:
            self._path = places[place] / tmp_path.name
            yield
            self._path.unlink(missing_ok=True)

    def open(self) -> Device:
        return open_device(
            self._path,
            size_bytes=DEVICE_BYTES,
            mode=self._mode,
            depth=self.depth,
            lock_wait_ns=20 * MS_NS,
            direct_io=self._direct_io,
        )

    def test_direct_io_is_what_was_asked_for(self, request: pytest.FixtureRequest) -> None:
        device = self.opened()
        place = request.node.callspec.params["_place"][1]
        assert device.mode.direct_io == (self._direct_io and place not in BUFFERED_ONLY), device.mode
        assert ("O_DIRECT" in device.mode.reason) == device.mode.direct_io

    def test_two_descriptors_see_the_same_bytes(self) -> None:
        device = self.opened()
        data = random_bytes(3 * 4096, 9)
        write(device, 4096, memoryview(data))
        with self._path.open("rb") as other:
            other.seek(4096)
            assert other.read(len(data)) == data


def wipe(device: Path) -> None:
    """Make a raw loop device read as zeros."""
    fd = os.open(device, os.O_RDWR)
    try:
        syscalls.block_device_discard(fd, 0, syscalls.block_device_bytes(fd))
    finally:
        os.close(fd)


@pytest.mark.nightly
@pytest.mark.parametrize("combination", PRODUCT, ids=name_of)
def test_every_length_skew_and_split(
    combination: tuple[str, str, bool], places: dict[str, Path], tmp_path: Path
) -> None:
    mode, place, direct_io = combination
    path = places[place] if place.startswith("raw") else places[place] / tmp_path.name
    device = open_device(path, size_bytes=DEVICE_BYTES, mode=mode, direct_io=direct_io)
    pages = (1, 2, 3, 16, 17, 256, 257, 1025)
    skews = (0, 1, 2, 4, 8, 511, 512, 513, 1024, 4095)
    for number, (count, skew, pieces) in enumerate(itertools.product(pages, skews, (1, 2, 5))):
        data = random_bytes(count * 4096, number)
        source, back = skewed(len(data), skew), skewed(len(data), (skew * 7) % 4096)
        source[:] = data
        offset = (number % 11) * 4096
        write(device, offset, *split(source, pieces))
        assert read(device, offset, *split(back, pieces)) == len(data)
        assert back == data, (count, skew, pieces)
    device.close()
    if not place.startswith("raw"):
        path.unlink()


@pytest.mark.parametrize("sector_bytes", [512, 4096])
def test_the_loop_devices_have_the_sectors_they_claim(places: dict[str, Path], sector_bytes: int) -> None:
    fd = os.open(places[f"raw-{sector_bytes}"], os.O_RDONLY)
    assert syscalls.block_device_sector_bytes(fd) == sector_bytes
    os.close(fd)


def test_a_mounted_raw_device_is_refused(places: dict[str, Path]) -> None:
    device_number = places["ext4-512"].stat().st_dev
    device = Path("/dev") / Path(f"/sys/dev/block/{os.major(device_number)}:{os.minor(device_number)}").resolve().name
    with pytest.raises(Unavailable, match="mounted or claimed"):
        open_device(device, size_bytes=0)


def test_a_raw_device_in_use_cannot_be_mounted(places: dict[str, Path]) -> None:
    def claim() -> None:
        os.close(os.open(places["raw-512"], os.O_RDONLY | os.O_EXCL))  # what mount(8) asks for

    device = open_device(places["raw-512"], size_bytes=0)
    with pytest.raises(OSError) as refused:
        claim()
    assert refused.value.errno == errno.EBUSY
    device.close()
    claim()


def test_the_page_cache_is_really_bypassed(places: dict[str, Path], tmp_path: Path) -> None:
    path = places["ext4-4096"] / tmp_path.name
    device = open_device(path, size_bytes=DEVICE_BYTES, mode="uring")
    flags = fcntl.fcntl(device._file.fd, fcntl.F_GETFL)  # type: ignore[attr-defined] # the only witness
    assert flags & os.O_DIRECT
    write(device, 0, aligned(4096))
    device.close()
    path.unlink()
