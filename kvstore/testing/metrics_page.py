"""One number of a node's metrics page, for tests of real processes."""

from __future__ import annotations

import re
import time
import urllib.request

from kvstore.testing.serve_process import Ready

_WAIT_SECONDS = 30.0
_POLL_SECONDS = 0.05


def metric(ready: Ready, name: str) -> float:
    """The value of a series now.

    Args:
        name: with its labels, or without where there is but one series of it.
    """
    text = urllib.request.urlopen(f"http://{ready.metrics}/metrics", timeout=30).read().decode()
    labels = "" if "{" in name else r"(?:{[^}]*})?"
    found = re.search(rf"^{re.escape(name)}{labels} ([0-9.e+]+)$", text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def wait_for_metric(ready: Ready, name: str, value: float) -> None:
    """Until a series has a value; the node updates it several times a second."""
    end = time.monotonic() + _WAIT_SECONDS
    while metric(ready, name) != value:
        assert time.monotonic() < end, f"{name} is {metric(ready, name)}, not {value}"
        time.sleep(_POLL_SECONDS)
