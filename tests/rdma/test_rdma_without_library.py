"""Without a verbs library everything but RDMA works, and RDMA says what is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvstore.errors import InvalidRequest, Unavailable
from kvstore.transport.rdma import backends
from kvstore.transport.rdma.backends import LIBRARY_VARIABLE, Backend, open_verbs

_WITHOUT = """
import sys
sys.modules["ibverbs"] = sys.modules["pyverbs"] = None  # importing either raises ImportError
import kvstore, kvstore_client, kvstore.server.worker, kvstore.transport.rdma.backends as backends
try:
    backends.open_verbs()
except backends.Unavailable as error:
    print(error)
"""


def test_kvstore_is_imported_without_any_library() -> None:
    done = subprocess.run([sys.executable, "-c", _WITHOUT], capture_output=True, text=True, check=True)
    assert "no RDMA verbs library can be loaded" in done.stdout
    assert "ibverbs: " in done.stdout
    assert "pyverbs: " in done.stdout
    assert "the extra rdma of kvstore" in done.stdout


def test_nothing_is_loaded_before_it_is_asked_for() -> None:
    program = "import sys, kvstore_client, kvstore.server.worker; print('ibverbs' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_named_library_is_not_replaced_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(backends._HOMES, Backend.PYVERBS, ("kvstore.transport.rdma.no_such_module", "Nothing"))
    with pytest.raises(Unavailable, match="pyverbs: No module named"):
        open_verbs(Backend.PYVERBS)


def test_the_first_that_loads_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(backends._HOMES, Backend.IBVERBS, ("kvstore.transport.rdma.no_such_module", "Nothing"))
    monkeypatch.setitem(backends._HOMES, Backend.PYVERBS, ("kvstore.testing.fake_verbs", "FakeHardware"))
    monkeypatch.setattr("kvstore.testing.fake_verbs.FakeHardware", lambda: "the second")
    assert open_verbs() == "the second"


def test_the_environment_names_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(backends._HOMES, Backend.PYVERBS, ("kvstore.transport.rdma.no_such_module", "Nothing"))
    monkeypatch.setenv(LIBRARY_VARIABLE, "pyverbs")
    with pytest.raises(Unavailable, match="pyverbs: No module named"):
        open_verbs()
    monkeypatch.setenv(LIBRARY_VARIABLE, "pigeons")
    with pytest.raises(InvalidRequest, match="use ibverbs or pyverbs"):
        open_verbs()
