"""What is installed, and by which name: the parts that others build upon and the commands that we tell them to type."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (ROOT / "kvstore", ROOT / "client" / "kvstore_client", ROOT / "bench" / "kvstore_bench")


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_a_package_tells_its_users_that_it_is_typed(package: Path) -> None:
    """Else mypy takes everything imported from it for Any."""
    assert (package / "py.typed").exists()


def test_nobody_is_told_to_install_a_stranger() -> None:
    """`kvstore` on PyPI is somebody else's program: ours is installed by its folder."""
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *(file for one in PACKAGES for file in one.rglob("*.py"))]
    stranger = re.compile(r"pip install(?! [^`'\"\n]* \. in)[^`'\"\n]*[ \"']kvstore\b|extra kvstore\[|`kvstore\[")
    found = [f"{file.relative_to(ROOT)}: {hit[0]}" for file in files for hit in stranger.finditer(file.read_text())]
    assert not found, found


def test_a_change_to_any_part_in_c_builds_it_again() -> None:
    """`./dev` builds what it names; a part left out would stay as it was, and be refused when its number rises."""
    line = next(line for line in (ROOT / "dev").read_text().splitlines() if "-- install_self" in line)
    named = line.split("setup.py", 1)[1].split("--")[0]
    listed = subprocess.run(["bash", "-c", f"ls {named}"], cwd=ROOT, capture_output=True, text=True, check=True)
    parts = {str(file.relative_to(ROOT)) for one in PACKAGES for file in one.rglob("*.[ch]")}
    assert parts
    assert set(listed.stdout.split()) == parts
