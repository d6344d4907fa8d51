"""A data plane over an engine in memory, for the tests of this room; a module with another engine has its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore.engine.api import NamespaceRef
from kvstore.testing.dict_engine import DictEngine
from kvstore.testing.plane_lab import PlaneLab


@pytest.fixture
def engine() -> Iterator[DictEngine]:
    made = DictEngine()
    yield made
    assert made.held_bytes == 0
    made.close()


@pytest.fixture
def lab(engine: DictEngine) -> Iterator[PlaneLab]:
    made = PlaneLab(engine)
    yield made
    made.close()


@pytest.fixture
def namespace(engine: DictEngine) -> NamespaceRef:
    return engine.add_namespace(b"manifest")
