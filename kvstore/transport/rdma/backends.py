"""Which verbs library this process uses: the one asked for, or what is there."""

from __future__ import annotations

import importlib
import os
from enum import Enum
from typing import Final, Protocol, cast

from kvstore.errors import InvalidRequest, Unavailable
from kvstore.transport.rdma.verbs import Verbs


class Backend(Enum):
    """Verbs libraries, in the order in which `auto` tries them."""

    IBVERBS = "ibverbs"
    PYVERBS = "pyverbs"


LIBRARY_VARIABLE: Final = "KVSTORE_VERBS"
_HOMES: Final = {
    Backend.IBVERBS: ("kvstore.transport.rdma.ibverbs_backend", "IbverbsVerbs"),
    Backend.PYVERBS: ("kvstore.transport.rdma.pyverbs_backend", "PyverbsVerbs"),
}
_FIX: Final = "install the package ibverbs (the extra rdma of kvstore) or Debian's python3-pyverbs"


class _Maker(Protocol):
    def __call__(self) -> Verbs: ...


def open_verbs(backend: Backend | None = None) -> Verbs:
    """The library, loaded now and not before.

    Args:
        backend: None takes the one that KVSTORE_VERBS names, else the first that can be loaded.

    Raises:
        InvalidRequest: KVSTORE_VERBS names none.
        Unavailable: It, or each of them, cannot; the text names the reasons and what to install.
    """
    named = os.environ.get(LIBRARY_VARIABLE, "")
    if backend is None and named:
        try:
            backend = Backend(named)
        except ValueError:
            known = " or ".join(one.value for one in Backend)
            raise InvalidRequest(f"{LIBRARY_VARIABLE} is {named!r}; use {known}, or leave it out") from None
    reasons = []
    for one in [backend] if backend else Backend:
        module, name = _HOMES[one]
        try:
            maker = cast("_Maker", getattr(importlib.import_module(module), name))
        except ImportError as error:
            reasons.append(f"{one.value}: {error}")
        else:
            return maker()
    raise Unavailable(f"no RDMA verbs library can be loaded ({'; '.join(reasons)}); {_FIX}")
