"""A client against a dict, with a node that breaks off, garbles and restarts: a miss is legal, a wrong value never."""

from __future__ import annotations

import os
import random
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from kvstore.errors import KVStoreError
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore.types.results import MissReason, RefusedReason
from kvstore_client import Exists, Hit, KVClient, Miss, Refused, Stored

KEYS = 12
LAYOUT = KVLayout.opaque(chunk_bytes=20_000, chunk_tokens=4, checksum_bytes=4096)
CHOSEN = st.lists(st.integers(0, KEYS - 1), max_size=8)
PASSING = {MissReason.UNAVAILABLE, MissReason.CORRUPT}


def payload_of(key: int, version: int) -> bytes:
    dice = random.Random(key * 1000 + version)
    return dice.randbytes(dice.choice([0, 1, 4096, 4097, 19_999]))


class ClientModel(RuleBasedStateMachine):
    """`known` holds for each key every payload that a read may return; None stands for a miss."""

    node: Any
    faulty = False

    @initialize()
    def start(self) -> None:
        self.version = 0
        self.known: list[set[bytes | None]] = [{None} for _ in range(KEYS)]
        namespace = Namespace(tenant="default", model=os.urandom(8).hex(), weights="w", layout=LAYOUT)
        self.node.script = self.node.garble = None
        self.client = KVClient.connect(self.node.address)
        self.ns = self.client.namespace(namespace)
        self.keys = self.ns.keys(list(range(4 * KEYS)))

    def teardown(self) -> None:
        if hasattr(self, "client"):
            self.client.close()

    @rule(chosen=CHOSEN, inline=st.booleans())
    def put(self, chosen: list[int], inline: bool) -> None:
        self.version += 1
        payloads = [payload_of(key, self.version) for key in chosen]
        results = self.ns.put([self.keys[key] for key in chosen], payloads)
        assert len(results) == len(chosen)
        for key, payload, result in zip(chosen, payloads, results, strict=True):
            if isinstance(result, Stored):
                assert None in self.known[key], "a stored key was stored again"
                self.known[key] = {payload}
            elif isinstance(result, Exists):
                assert self.known[key] != {None}, "a key that nobody wrote exists"
                self.known[key] = {one for one in self.known[key] if one is not None} | (
                    {payload} if None in self.known[key] else set()
                )
            else:
                assert self.faulty
                assert isinstance(result, Refused)
                if result.reason is RefusedReason.OUTCOME_UNKNOWN and None in self.known[key]:
                    self.known[key].add(payload)

    @rule(chosen=CHOSEN)
    def get(self, chosen: list[int]) -> None:
        memory = [bytearray(20_000) for _ in chosen]
        results = self.ns.get_into([self.keys[key] for key in chosen], memory)
        for key, got, result in zip(chosen, memory, results, strict=True):
            if isinstance(result, Hit):
                value = bytes(got[: result.length_bytes])
                assert value in self.known[key], "a wrong value"
                self.known[key] = {value}
            elif result.reason is MissReason.ABSENT:
                assert None in self.known[key], "a stored key is absent"
                self.known[key] = {None}
            else:
                assert self.faulty
                assert result.reason in PASSING

    @rule(start=st.integers(0, KEYS), length=st.integers(0, KEYS))
    def match(self, start: int, length: int) -> None:
        keys = self.keys[start : start + length]
        with self.ns.match(keys) as found:
            stored = [self.known[start + at] for at in range(len(keys))]
            for at in range(found.chunks):
                assert stored[at] != {None}, "the prefix crosses a hole"
                stored[at].discard(None)
            if found.reason is MissReason.ABSENT:
                assert None in stored[found.chunks]
            elif found.reason is not None:
                assert self.faulty

    @rule(chosen=CHOSEN)
    def delete(self, chosen: list[int]) -> None:
        results = self.ns.delete([self.keys[key] for key in chosen])
        for key, result in zip(chosen, results, strict=True):
            if isinstance(result, Miss) and result.reason is not MissReason.ABSENT:
                self.known[key].add(None)
            else:
                self.known[key] = {None}

    @rule()
    def drop(self) -> None:
        done = self.ns.drop()
        self.known = [{None} if done else values | {None} for values in self.known]

    @rule(forget=st.booleans())
    def restart(self, forget: bool) -> None:
        self.node.restart(forget_manifests=forget)

    @rule(seed=st.integers(0, 1000))
    def go_wrong(self, seed: int) -> None:
        self.faulty = True
        dice = random.Random(seed)

        def script(link: Any, frame: Any) -> bool:
            if dice.random() < 0.3:
                if dice.random() < 0.5:
                    with suppress(KVStoreError):
                        link.answer(frame)
                link.kill()
                return True
            return False

        def garble(slices: Any, payloads: list[bytes]) -> None:
            if payloads and payloads[0] and dice.random() < 0.3:
                at = dice.randrange(len(payloads[0]))
                payloads[0] = payloads[0][:at] + bytes([payloads[0][at] ^ 4]) + payloads[0][at + 1 :]

        self.node.script, self.node.garble = script, garble

    @rule()
    def go_right(self) -> None:
        self.node.script = self.node.garble = None

    @invariant()
    def counters_make_sense(self) -> None:
        if hasattr(self, "client"):
            stats = self.client.stats()
            assert stats["load_hits"] <= stats["load_items"]
            assert stats["lookup_keys_hit"] <= stats["lookup_keys_asked"]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("rounds", [pytest.param(25), pytest.param(300, marks=pytest.mark.nightly)])
def test_the_client_agrees_with_a_dict(node: Any, rounds: int) -> None:
    class Bound(ClientModel):
        pass

    Bound.node = node
    run_state_machine_as_test(
        Bound,
        settings=settings(
            max_examples=rounds,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )
