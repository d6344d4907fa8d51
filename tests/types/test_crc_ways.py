"""Each way to a CRC32C of each compiled part gives what the standard and Python's library give (`_crc32c.h`)."""

from __future__ import annotations

import importlib.util
import random
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.engine import _records
from kvstore.transport import _exchange, _inflow, _put_lane
from kvstore.types import _sums, compiled
from kvstore.types.checksum import crc32c, crc_table

ROOT = Path(__file__).resolve().parents[2]
PARTS: tuple[ModuleType, ...] = (_sums, _records, _inflow, _put_lane, _exchange)
WAYS = [(part, way) for part in PARTS for way in part.crc_ways()]
RFC_3720 = [
    (b"", 0),
    (b"123456789", 0xE3069283),
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
]
NOISE = random.Random(1).randbytes(70_000)
LENGTHS = [*range(600), 1023, 1024, 1025, 4095, 4096, 4097, 16_384, 65_536, 65_537]
"""Around the ends of words, lanes and folds."""


@pytest.fixture(params=WAYS, ids=lambda pair: f"{pair[0].__name__.rpartition('.')[2]}-{pair[1]}")
def part(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    part, way = request.param
    part.choose_crc(way)
    yield part
    part.choose_crc(part.crc_ways()[-1])


def test_values_of_the_standard(part: ModuleType) -> None:
    for data, crc in RFC_3720:
        assert part.crc32c(data) == crc


def test_any_length_and_place(part: ModuleType) -> None:
    for at, length in enumerate(LENGTHS):
        view = memoryview(NOISE)[at % 67 : at % 67 + length]
        assert part.crc32c(view) == crc32c(view), length


@pytest.mark.parametrize("way", _sums.crc_ways())
@given(length=st.integers(0, 20_000), block=st.sampled_from([1, 63, 64, 500, 512, 4096, 5000]), seed=st.integers(0, 99))
def test_blocks_side_by_side(way: str, length: int, block: int, seed: int) -> None:
    data = bytearray(random.Random(seed).randbytes(length))
    _sums.choose_crc(way)
    try:
        table = crc_table(data, block)
        assert _sums.table(data, block) == table
        assert _sums.match(data, block, table)
        if length:
            data[seed * length // 100] ^= 1 << seed % 8
            assert not _sums.match(data, block, table)
    finally:
        _sums.choose_crc(_sums.crc_ways()[-1])


def test_a_way_that_this_processor_lacks_is_refused(part: ModuleType) -> None:
    for way in ("abacus", "", 7):
        with pytest.raises(ValueError, match="no way"):
            part.choose_crc(way)


def test_a_processor_without_an_instruction_leaves_payload_to_the_library() -> None:
    class Bare:
        def crc_ways(self) -> tuple[str, ...]:
            return ("table",)

    with pytest.raises(ImportError, match="no instruction"):
        compiled.require_crc_instruction(Bare())


@pytest.mark.parametrize("name", [part.__name__ for part in PARTS])
def test_a_build_for_any_processor_has_the_table(name: str, tmp_path: Path) -> None:
    compiler = shutil.which("gcc") or shutil.which("cc")
    assert compiler, "the compiled parts were built: there is a compiler"
    source = ROOT.joinpath(*name.split(".")).with_suffix(".c")
    target = tmp_path / f"{source.stem}.so"
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-DKV_CRC_PORTABLE", f"-I{sysconfig.get_path('include')}"]
    subprocess.run([compiler, *flags, str(source), "-o", str(target)], check=True)
    spec = importlib.util.spec_from_file_location(source.stem, target)
    assert spec is not None
    assert spec.loader is not None
    built = importlib.util.module_from_spec(spec)
    assert built.crc_ways() == ("table",)
    for data, crc in RFC_3720:
        assert built.crc32c(data) == crc
    for length in LENGTHS:
        assert built.crc32c(NOISE[:length]) == crc32c(NOISE[:length])
