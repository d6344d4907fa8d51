"""Keys are the same in every process, however it was started and whatever PYTHONHASHSEED is."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

ROOT = Path(__file__).resolve().parents[2]
VECTORS = ROOT / "tests" / "vectors" / "keys.json"
CASE = "case 7 of the catalogue: (1, (2, 3))"
PROGRAM = """
import multiprocessing, sys
from kvstore.types.keys import KeyChain

def derive(_):
    return KeyChain.from_tokens(bytes(range(32)), [1, 2, 3], chunk_tokens=3, extra=None).digests.hex()

if __name__ == "__main__":
    with multiprocessing.get_context(sys.argv[1]).Pool(3) as pool:
        print(*pool.map(derive, range(3), chunksize=1), derive(0))
"""


@pytest.mark.parametrize("seed", [None, "0", "1"])
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_every_process_derives_the_vector(tmp_path: Path, method: Literal["spawn", "fork"], seed: str | None) -> None:
    cases = json.loads(VECTORS.read_text())["chunks"]
    wanted = next(case["digests"][0] for case in cases if case["name"] == CASE)
    assert method in multiprocessing.get_all_start_methods()
    program = tmp_path / "derive.py"
    program.write_text(PROGRAM)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    environment["PYTHONPATH"] = str(ROOT)
    if seed is not None:
        environment["PYTHONHASHSEED"] = seed
    done = subprocess.run(
        [sys.executable, str(program), method], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [wanted] * 4
