"""The rules of the house that no linter knows, as tests over the source itself."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE_ROOTS = (ROOT / "kvstore", ROOT / "client" / "kvstore_client", ROOT / "bench" / "kvstore_bench")
GENERATED = ROOT / "kvstore" / "v1"
MODULE_LINES_MAX = 600
OWN_PACKAGES = {"kvstore", "kvstore_client", "kvstore_bench"}

# The one file that may import a third-party package; the rest of the code sees our own protocol. A path that
# ends in "/" is a folder. numpy is the language of arrays here and is free.
GRPC_EDGE = "kvstore/server/grpc_edge/"
INTEGRATIONS = "client/kvstore_client/integrations/"
THIRD_PARTY_HOMES: dict[str, tuple[str, ...]] = {
    "blake3": ("kvstore/types/digest.py",),
    "fastcrc": ("kvstore/types/checksum.py",),
    "grpc": (GRPC_EDGE, "kvstore/cluster/etcd_client.py"),
    "grpc_health": (GRPC_EDGE,),
    "grpc_reflection": (GRPC_EDGE,),
    "hypothesis": ("kvstore/testing/",),
    "ibverbs": ("kvstore/transport/rdma/ibverbs_backend.py",),
    "mooncake": ("bench/kvstore_bench/peers/mooncake.py",),
    "msgpack": ("kvstore/wire/codec.py",),
    "opentelemetry": ("client/kvstore_client/tracing.py",),
    "pytest": ("kvstore/testing/",),
    "prometheus_client": ("kvstore/telemetry/prometheus.py",),
    "pyverbs": ("kvstore/transport/rdma/pyverbs_backend.py",),
    "pydantic": ("kvstore/settings.py",),
    "pydantic_settings": ("kvstore/settings.py",),
    "rich": ("kvstore/cli/screen.py",),
    "torch": (INTEGRATIONS, "client/kvstore_client/demo/model_roles.py"),
    "transformers": (INTEGRATIONS, "client/kvstore_client/demo/model_roles.py"),
    "typer": ("kvstore/cli/main.py",),
}
# typing_extensions is no library but the type checker's own.
FREE_PACKAGES = {"numpy", "typing_extensions"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """One parsed source file, its path relative to the repository."""

    path: str
    text: str
    tree: ast.Module


def read_modules() -> list[Module]:
    """Every module that people write; generated stubs are left out."""
    found = []
    for root in SOURCE_ROOTS:
        for file in sorted(root.rglob("*.py")):
            if not file.is_relative_to(GENERATED):
                text = file.read_text()
                found.append(Module(path=str(file.relative_to(ROOT)), text=text, tree=ast.parse(text, str(file))))
    return found


MODULES = read_modules()


def imported_packages(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Top-level names of all imports of a module, wherever they stand in it, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.split(".")[0], node.lineno
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.split(".")[0], node.lineno


def test_there_is_something_to_check() -> None:
    assert any(module.path == "kvstore/limits.py" for module in MODULES)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.path)
def test_a_module_is_one_noun_with_a_docstring(module: Module) -> None:
    lines = module.text.count("\n")
    assert lines <= MODULE_LINES_MAX, f"{module.path} has {lines} lines, at most {MODULE_LINES_MAX}: it is two nouns"
    assert not module.text.strip() or ast.get_docstring(module.tree), f"{module.path} says nowhere what it is for"


def test_nothing_is_left_for_later() -> None:
    marks = ("TO" + "DO", "FIX" + "ME", "XX" + "X:")
    found = [
        f"{module.path}:{number}"
        for module in MODULES
        for number, line in enumerate(module.text.splitlines(), 1)
        if any(mark in line for mark in marks)
    ]
    assert not found, f"finish it or open an issue: {found}"


def test_nobody_calls_the_seeded_hash() -> None:
    found = [
        f"{module.path}:{node.lineno}"
        for module in MODULES
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "hash"
    ]
    assert not found, f"hash() differs from process to process; use a digest: {found}"


def test_each_third_party_package_has_one_home() -> None:
    strangers = []
    for module in MODULES:
        for package, line in imported_packages(module.tree):
            if package in sys.stdlib_module_names or package in OWN_PACKAGES or package in FREE_PACKAGES:
                continue
            homes = THIRD_PARTY_HOMES.get(package, ())
            if not any(module.path == home or (home.endswith("/") and module.path.startswith(home)) for home in homes):
                strangers.append(f"{module.path}:{line} imports {package}, whose home is {homes or 'nowhere yet'}")
    assert not strangers, "\n".join(strangers)


def test_every_home_is_lived_in() -> None:
    empty = []
    for package, homes in THIRD_PARTY_HOMES.items():
        for home in homes:
            if not any(
                module.path.startswith(home) and package in dict(imported_packages(module.tree)) for module in MODULES
            ):
                empty.append(f"{package}: {home}")
    assert not empty, f"homes that nobody lives in: {empty}"


def test_every_folder_of_code_is_a_package() -> None:
    folders = {(ROOT / module.path).parent for module in MODULES}
    bare = [str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").exists()]
    assert not bare, f"the import contracts see only packages; add __init__.py with a docstring to: {sorted(bare)}"


def test_source_roots_are_not_packages() -> None:
    wrong = [name for name in ("client", "bench", "proto", "helm", "tests") if (ROOT / name / "__init__.py").exists()]
    assert not wrong, f"source roots, not packages: {wrong}"
