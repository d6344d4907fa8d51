"""The generated stubs are those of the oldest grpcio and protobuf that the package allows, and CI makes them anew."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
STUBS = sorted((ROOT / "kvstore" / "v1").glob("*_pb2*.py"))


def oldest(package: str) -> str:
    """The lower bound in pyproject.toml."""
    (found,) = [one for one in PROJECT["dependencies"] if one.startswith(f"{package}>=")]
    return str(found.removeprefix(f"{package}>="))


def padded(text: str) -> tuple[int, ...]:
    """A version as numbers, three of them."""
    numbers = [int(part) for part in text.split(".")]
    return tuple(numbers + [0] * (3 - len(numbers)))


def test_stubs_and_their_tools_are_of_the_oldest_grpcio() -> None:
    wanted = padded(oldest("grpcio"))
    (tools,) = [one for one in PROJECT["optional-dependencies"]["dev"] if one.startswith("grpcio-tools")]
    assert tools == "grpcio-tools==" + ".".join(map(str, wanted))
    for stub in STUBS:
        for found in re.findall(r"GRPC_GENERATED_VERSION = '([0-9.]+)'", stub.read_text()):
            assert padded(found) == wanted, f"{stub.name}: ./dev proto makes it anew"


def test_stubs_need_no_newer_protobuf_than_the_oldest() -> None:
    for stub in STUBS:
        for found in re.findall(r"# Protobuf Python Version: ([0-9.]+)", stub.read_text()):
            assert padded(found) <= padded(oldest("protobuf")), stub.name


def test_the_tests_run_with_the_oldest_grpcio() -> None:
    assert padded(version("grpcio")) == padded(oldest("grpcio"))


def test_ci_generates_the_stubs_again_and_compares() -> None:
    check = re.search(r"^check\(\) \{\n(.*?)^\}", (ROOT / "dev").read_text(), re.DOTALL | re.MULTILINE)
    assert check is not None
    assert "check_generated" in check[1]
    assert "exec ./dev check" in (ROOT / ".ci" / "run").read_text()
