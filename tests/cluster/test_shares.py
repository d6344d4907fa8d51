"""Shares of a quota over a cluster: vectors, what must always hold, and that they settle."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.cluster.shares import RisingShares, decode_quota, decode_uses, encode_uses, shares_of
from kvstore.errors import InvalidRequest
from kvstore.limits import QUOTA_TRIM_SHARE, QUOTA_TRIM_TO_SHARE
from kvstore.server.quotas import Told, is_news, shares_here

AMOUNTS = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 2**50), max_size=8)


@pytest.mark.parametrize(
    ("quota", "used", "capacity", "expected"),
    [
        (900, {}, {"a": 1, "b": 1, "c": 1}, {"a": 300, "b": 300, "c": 300}),
        (900, {}, {"a": 1, "b": 2}, {"a": 300, "b": 600}),
        (900, {"a": 300}, {"a": 1, "b": 1}, {"a": 600, "b": 300}),
        (1000, {"a": 100, "gone": 300}, {"a": 1, "b": 1}, {"a": 400, "b": 300, "gone": 300}),
        (900, {"a": 600, "b": 600}, {"a": 1, "b": 1, "c": 1}, {"a": 450, "b": 450, "c": 0}),
        (0, {"a": 5}, {"a": 1}, {"a": 0}),
        (10, {}, {"a": 1, "b": 1, "c": 1}, {"a": 3, "b": 3, "c": 3}),
        (10, {"a": 2}, {}, {"a": 2}),
        (10, {}, {}, {}),
    ],
)
def test_shares_are_as_the_vectors_say(
    quota: int, used: Mapping[str, int], capacity: Mapping[str, int], expected: Mapping[str, int]
) -> None:
    assert shares_of(quota, used, capacity) == expected


@given(st.integers(0, 2**52), AMOUNTS, AMOUNTS)
def test_all_shares_together_are_never_above_the_quota(
    quota: int, used: Mapping[str, int], capacity: Mapping[str, int]
) -> None:
    shares = shares_of(quota, used, capacity)
    assert shares.keys() == used.keys() | capacity.keys()
    assert 0 <= sum(shares.values()) <= quota
    if sum(used.values()) <= quota:
        assert all(share >= used.get(name, 0) for name, share in shares.items()), "nobody has to give up what it has"
        if sum(capacity.values()):
            assert sum(shares.values()) > quota - len(capacity) - 1, "and nothing is left over"


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1000)), min_size=1, max_size=40))
def test_a_share_that_holds_was_computed_and_rises_only_after_its_time(steps: list[tuple[int, int]]) -> None:
    rising, now, past = RisingShares(rise_ns=10), 0, []
    for passed, share in steps:
        now += passed
        past.append((now, share))
        held = rising.hold("t", {"a": share}, now)["a"]
        assert held <= share, "a fall holds at once"
        since = [one for at, one in past if at > now - 10]
        before = [one for at, one in past if at <= now - 10][-1:]
        assert held == min(since + before)


class Nodes:
    """Nodes that see each other's uses late, each with its own delay, and fill what they may."""

    def __init__(self, count: int, quota: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.quota = quota
        self.capacity = {f"n{at}": self.random.choice((1, 2, 4)) for at in range(count)}
        self.used = dict.fromkeys(self.capacity, 0)
        self.held = dict.fromkeys(self.capacity, 0)
        self.published: list[dict[str, int]] = [dict(self.used)]
        self.rising = {name: RisingShares(rise_ns=5) for name in self.capacity}
        self.now = 0

    def tick(self, demand: Mapping[str, int]) -> None:
        """Everybody writes at most `demand`, gives up as the engine does, tells, and settles from what it has heard."""
        self.now += 1
        for name in self.used:
            room = max(0, self.held[name] - self.used[name])
            self.used[name] += min(room, self.random.randint(0, demand[name]))
            if self.used[name] > self.held[name] * QUOTA_TRIM_SHARE:
                self.used[name] = min(self.used[name], int(self.held[name] * QUOTA_TRIM_TO_SHARE))
        self.published.append(dict(self.used))
        for name in self.used:
            heard = dict(self.published[-1 - min(self.random.randint(0, 3), len(self.published) - 1)])
            heard[name] = self.used[name]
            share = shares_of(self.quota, heard, self.capacity)[name]
            self.held[name] = self.rising[name].hold("t", {name: share}, self.now)[name]


@given(st.integers(2, 6), st.integers(0, 2**32))
def test_what_is_used_stays_below_the_quota_and_slack_while_nodes_see_each_other_late(count: int, seed: int) -> None:
    quota = 100_000
    nodes = Nodes(count, quota, seed)
    for _ in range(60):
        nodes.tick(dict.fromkeys(nodes.used, quota))  # as fast as they may
        assert sum(nodes.used.values()) <= quota * 1.02


@given(st.integers(2, 5), st.integers(0, 2**32))
def test_shares_follow_capacity_in_the_end_whoever_was_first(count: int, seed: int) -> None:
    quota = 100_000
    nodes = Nodes(count, quota, seed)
    first = dict.fromkeys(nodes.used, 0) | {"n0": quota}
    for _ in range(80):
        nodes.tick(first)
    capacity_all = sum(nodes.capacity.values())
    alone = min(0.8, 1.2 * nodes.capacity["n0"] / capacity_all)
    assert nodes.used["n0"] > alone * quota, "who is alone may have more than its part"
    for _ in range(900):
        nodes.tick(dict.fromkeys(nodes.used, quota // 50))
    for name, used in nodes.used.items():
        fair = quota * nodes.capacity[name] / capacity_all
        assert 0.5 * fair < used < 1.6 * fair, (nodes.used, nodes.capacity)


def test_a_target_that_takes_no_chunks_keeps_the_share_that_it_had() -> None:
    held = {"t": {"a": 5, "b": 7, "down": 1}}
    before = {"a": {"t": 3}, "down": {"t": 9}}
    found = shares_here(["a", "down", "new"], ["a", "b"], held, before)
    assert found == {"a": {"t": 5}, "down": {"t": 9}}, "it is not to give up what it has; a new one waits"
    assert shares_here(["a"], ["a"], {}, before) == {"a": {}}, "no tenant has a quota any more"


def test_uses_and_quotas_travel() -> None:
    assert decode_uses(encode_uses({"größe": 5, "b": 0})) == {"größe": 5, "b": 0}
    assert decode_quota('{"bytes":7}') == 7
    for text in ("", "[]", '{"tenants":{"a":-1}}', '{"tenants":{"a":true}}', '{"tenants":{},"x":1}', '{"tenants":[]}'):
        with pytest.raises(InvalidRequest):
            decode_uses(text)
    for text in ("7", '{"bytes":-1}', "{}"):
        with pytest.raises(InvalidRequest):
            decode_quota(text)


def test_only_what_counts_is_told() -> None:
    told = Told(uses={"a": 1_000}, at_ns=0)
    quotas = {"a": 256_000, "b": 256}
    second = 10**9
    assert is_news(None, {}, quotas, 0)
    assert not is_news(told, {"a": 1_999}, quotas, second)
    assert is_news(told, {"a": 2_000}, quotas, second)
    assert is_news(told, {"a": 0}, quotas, second)
    assert is_news(told, {"a": 1_000, "b": 1}, quotas, second)
    assert is_news(told, {"a": 1_001}, quotas, 30 * second)
    assert not is_news(told, {"a": 1_000}, quotas, 3_000 * second)
