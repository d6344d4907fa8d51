"""Lookups of ranks that ask together: one answer for all of them, held until each has its own pin."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.engine.engine import DriveEngine, EngineSettings
from kvstore.limits import MATCH_GROUP_NS, MiB
from kvstore.server.groups import GroupAnswers
from kvstore.testing.dict_engine import DictEngine
from kvstore.testing.plane_lab import LabClient, PlaneLab
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore.types.results import ItemStatus, MissReason
from kvstore.wire.messages import End, Match, MatchReply, Unpin

SPACE = Namespace(tenant="t", model="m", weights="w", layout=KVLayout.opaque(chunk_bytes=MiB, chunk_tokens=16))
KEYS = [bytes([at]) * 32 for at in range(1, 5)]
GROUP = b"request 1 ranks."
ABSENT = int(MissReason.ABSENT)
PIN_NS = 1_000_000_000


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[PlaneLab]:
    settings = EngineSettings(
        capacity_bytes=64 * MiB, segment_bytes=1 * MiB, cache_bytes=0, staging_bytes=32 * MiB, prefault=False
    )
    engine = DriveEngine.open(tmp_path, settings, now_ns=time.monotonic_ns())
    made = PlaneLab(engine)
    yield made
    made.plane.close()
    made.turn_until(lambda: engine.idle)
    made.close()
    engine.close()


def rank(lab: PlaneLab) -> LabClient:
    client = lab.client(client_id=os.urandom(16))
    client.register(SPACE.manifest())
    return client


def match(client: LabClient, *, group: bytes = GROUP, keys: list[bytes] = KEYS) -> MatchReply:
    request = Match(namespace=SPACE.digest, keys=b"".join(keys), pin_ttl_ns=PIN_NS, group=group)
    return client.call(request, MatchReply)


def store(client: LabClient, keys: list[bytes], *, value: bytes = b"v" * 5000) -> None:
    for key in keys:
        (outcome,) = client.put(SPACE.digest, [key], [value]).values()
        assert outcome[0] == ItemStatus.STORED


def test_all_of_a_group_are_told_what_the_first_was_told(lab: PlaneLab) -> None:
    first, second = rank(lab), rank(lab)
    store(first, KEYS[:2])
    told = match(first)
    assert told.statuses == bytes([0, 0, ABSENT, ABSENT])
    store(first, KEYS[2:])
    assert match(second).statuses == told.statuses
    assert match(second).pinned
    assert match(second, group=b"").statuses == bytes(4)
    assert match(second, group=b"request 2 ranks.").statuses == bytes(4)


def test_who_asks_for_other_keys_has_an_answer_of_its_own(lab: PlaneLab) -> None:
    client = rank(lab)
    match(client)
    store(client, KEYS)
    assert match(client, keys=KEYS[:3]).statuses == bytes(3)


def test_a_namespace_that_becomes_known_changes_nothing_for_the_group(lab: PlaneLab) -> None:
    first, second = lab.client(client_id=os.urandom(16)), lab.client(client_id=os.urandom(16))
    assert match(first).statuses == bytes([ABSENT] * 4)
    second.register(SPACE.manifest())
    store(second, KEYS)
    assert match(second).statuses == bytes([ABSENT] * 4)


def test_what_the_group_was_told_outlives_the_first_ones_pin_and_a_full_drive(lab: PlaneLab) -> None:
    first, second = rank(lab), rank(lab)
    store(first, KEYS)
    told = match(first)
    first.call(Unpin(pin_id=told.pin_id), End)
    for at in range(100):
        store(first, [(1_000 + at).to_bytes(32, "little")], value=bytes(MiB - 65_536))
    again = match(second)
    assert again.statuses == told.statuses == bytes(4)
    assert again.pinned, "each of them is still there"
    _, got = second.get(SPACE.digest, KEYS)
    assert set(got) == {0, 1, 2, 3}


def test_a_group_has_an_end_and_a_bound() -> None:
    engine = DictEngine()
    namespace = engine.add_namespace(SPACE.manifest())
    groups = GroupAnswers(bytes_max=1_600)

    def ask(group: bytes, now_ns: int) -> bytes:
        request = Match(namespace=SPACE.digest, keys=b"".join(KEYS), group=group)
        return groups.match(engine, namespace, request, tenant="", client_id=bytes(16), now_ns=now_ns).statuses

    before = ask(GROUP, 0)
    engine.put_now(namespace, KEYS[0], b"v")
    assert ask(GROUP, MATCH_GROUP_NS - 1) == before
    assert ask(GROUP, MATCH_GROUP_NS)[0] == 0
    for at in range(20):
        ask(bytes([at]) * 16, MATCH_GROUP_NS)
    assert len(groups) == 3


def test_another_tenant_is_not_told(lab: PlaneLab) -> None:
    engine = DictEngine()
    namespace = engine.add_namespace(SPACE.manifest())
    engine.put_now(namespace, KEYS[0], b"v")
    groups = GroupAnswers()
    request = Match(namespace=SPACE.digest, keys=KEYS[0], group=GROUP)
    for known, tenant, status in ((namespace, "t", 0), (None, "other", ABSENT)):
        told = groups.match(engine, known, request, tenant=tenant, client_id=bytes(16), now_ns=0)
        assert told.statuses == bytes([status])
