"""What a client makes of the codes of refusals, also of ones that its version does not know."""

from __future__ import annotations

import pytest

from kvstore.types.results import Refused, RefusedReason
from kvstore_client.outcomes import refused


@pytest.mark.parametrize("reason", RefusedReason)
def test_every_code_is_its_reason(reason: RefusedReason) -> None:
    assert refused(int(reason), "why") == Refused(reason, "why")


def test_a_code_of_a_newer_node_is_safe_to_act_on() -> None:
    assert refused(200, "node a is fenced") == Refused(RefusedReason.OUTCOME_UNKNOWN, "node a is fenced")
    assert "200" in refused(200, "").detail
