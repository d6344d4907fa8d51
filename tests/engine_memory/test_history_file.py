"""What went before a restart: `explain` tells evicted from never written, whatever became of the file that says it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.engine.engine import DriveEngine, EngineSettings
from kvstore.engine.history import Fate, History
from kvstore.engine.history_file import HISTORY_FILE, decode_history, encode_history
from kvstore.limits import HISTORY_BYTES_MAX, HISTORY_ENTRIES_MAX, HISTORY_SAVE_NS, SECOND_NS, KiB, MiB
from kvstore.testing.engine_driver import Driver
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore.types.results import MissReason, Stored

SETTINGS = EngineSettings(
    capacity_bytes=8 * MiB, cache_bytes=0, staging_bytes=16 * MiB, segment_bytes=MiB, prefault=False, device="threads"
)
MANIFEST = Namespace(
    tenant="t", model="m", weights="w", layout=KVLayout.opaque(chunk_bytes=MiB, chunk_tokens=16)
).manifest()


def key(number: int) -> bytes:
    return number.to_bytes(4, "big").ljust(32, b"\1")


class Lab:
    """An engine in a folder."""

    def __init__(self, folder: Path) -> None:
        self.engine = DriveEngine.open(folder, SETTINGS, now_ns=1)
        self.driver = Driver(self.engine)
        self.ref = self.driver.namespace(MANIFEST)

    def fill(self) -> list[int]:
        """Put more than there is room for; which went."""
        for number in range(20):
            outcome = self.driver.put(self.ref, [(key(number), bytes([number]) * (900 * KiB))])[0]
            assert isinstance(outcome, Stored)
            self.driver.run_until(lambda: self.engine.idle)
            self.driver.advance(SECOND_NS)
        gone = [number for number in range(20) if self.status(number)]
        assert gone
        return gone

    def status(self, number: int) -> int:
        return self.driver.match(self.ref, [key(number)], touch=False).statuses[0]

    def told(self, number: int) -> str:
        return self.engine.explain(self.ref, key(number))[0].text


def test_evicted_is_told_from_never_written_after_a_restart(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    gone = lab.fill()
    lab.driver.delete(lab.ref, [key(19)])
    lab.engine.close()
    again = Lab(tmp_path)
    for number in gone:
        assert again.status(number) == MissReason.EVICTED
        assert "evicted about" in again.told(number)
    assert "deleted about" in again.told(19)
    assert "never written" in again.told(1000)
    again.engine.close()
    assert "evicted about" in Lab(tmp_path).told(gone[0]), "it is remembered for longer than one restart"


def test_a_kill_costs_only_what_went_last(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    gone = lab.fill()
    lab.engine.update_gauges(lab.driver.now_ns)
    lab.driver.delete(lab.ref, [key(19)])
    lab.engine.update_gauges(lab.driver.now_ns)
    assert lab.engine._history_file._writing is not None
    lab.engine._history_file._writing.join()
    lab.engine.device.close()  # and not the engine: it was killed
    again = Lab(tmp_path)
    assert all("evicted about" in again.told(number) for number in gone)
    assert "never written" in again.told(19)
    again.driver.advance(HISTORY_SAVE_NS)
    again.engine.close()


@pytest.mark.parametrize("damage", ["bit", "short", "empty", "other drive", "folder", "gone"])
def test_a_damaged_file_is_passed_over(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    lab = Lab(tmp_path)
    gone = lab.fill()
    lab.engine.close()
    file = tmp_path / HISTORY_FILE
    data = bytearray(file.read_bytes())
    file.unlink()
    if damage == "bit":
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    elif damage == "short":
        file.write_bytes(data[:-1])
    elif damage == "empty":
        file.write_bytes(b"")
    elif damage == "other drive":
        file.write_bytes(encode_history(bytes(data[28:]), tick=7, disk_id=bytes(16)))
    elif damage == "folder":
        file.mkdir()
    again = Lab(tmp_path)
    assert again.status(gone[0]) == MissReason.ABSENT
    assert "never written" in again.told(gone[0])
    assert (HISTORY_FILE in caplog.text) == (damage != "gone")
    again.engine.close()


@given(
    st.lists(st.tuples(st.integers(0, 30), st.sampled_from(list(Fate)), st.integers(0, 5)), max_size=80),
    st.integers(1, 20),
)
def test_what_is_restored_is_what_was_remembered(events: list[tuple[int, Fate, int]], room: int) -> None:
    before, after = History(room, seed=1), History(room, seed=2)
    for number, fate, tick in events:
        before.note(np.array([[number, number]], dtype=np.uint64), fate, tick)
    assert after.restore(before.dump())
    for number in range(31):
        assert after.event(number, number) == before.event(number, number)
    assert len(after) == len(before)


@given(st.binary(max_size=200))
def test_other_bytes_are_refused(data: bytes) -> None:
    assert decode_history(data, bytes(16)) is None


def test_a_full_history_fits_its_bound() -> None:
    history = History(seed=1)
    keys = np.arange(2 * HISTORY_ENTRIES_MAX, dtype=np.uint64).reshape(-1, 2)
    history.note(keys, Fate.EVICTED, 1)
    data = encode_history(history.dump(), tick=1, disk_id=bytes(16))
    assert len(data) <= HISTORY_BYTES_MAX
    assert History(seed=1).restore(data[28:])
    assert not history.restore(b"\0" * 21), "no such fate"
    assert not history.restore(b"\0")


def test_a_drive_without_a_folder_says_that_it_remembers_nothing_over_a_restart(tmp_path: Path) -> None:
    for place, said in ((tmp_path, "this drive was opened"), (tmp_path / "file", "keeps no history over a restart")):
        engine = DriveEngine.open(place, SETTINGS, now_ns=1)
        ref = engine.add_namespace(MANIFEST)
        assert said in engine.explain(ref, key(1))[0].text
        engine.close()
