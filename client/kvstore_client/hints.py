"""Read repair: a target that lacks what another one had is told so, and copies it by itself, in the background.

A hint is small, rare and may fail: nothing depends on it. The nodes' own walk finds what no hint has told.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TypeAlias

from kvstore.cluster.view import TargetId
from kvstore.limits import DIGEST_BYTES, PULL_KEYS_PER_HINT_MAX, PULL_NS_MAX
from kvstore.types.flow import FlowClass
from kvstore.wire.messages import End, Feature
from kvstore.wire.replicas import Pull
from kvstore_client.connection import Connection, Steps
from kvstore_client.core import ClientCore
from kvstore_client.rounds import Job, Verb

Lacking: TypeAlias = Mapping[tuple[TargetId, TargetId], bytes]
"""Record keys by who lacks them and who has them."""


class PullJob(Job):
    """Tells one target what it lacks and who has it."""

    __slots__ = ("_message",)

    def __init__(self, *, target: TargetId, flow: FlowClass, deadline_ns: int, message: Pull) -> None:
        super().__init__(target=target, flow=flow, deadline_ns=deadline_ns, retries_max=0)
        self._message = message

    def run(self, connection: Connection) -> Steps:
        """Asks, if the node understands it."""
        assert connection.welcome is not None
        if Feature.PULL in Feature(connection.welcome.features):
            yield from connection.ask(self._message, End)


def hint(core: ClientCore, namespace: bytes, lacking: Lacking, call_deadline_ns: int) -> Verb[None]:
    """At most one request, about the target that lacks most. Its failure is of no interest."""
    now_ns = time.monotonic_ns()
    if not lacking or now_ns >= call_deadline_ns or not core.may_hint(now_ns):
        return
    (target, source), keys = max(lacking.items(), key=lambda one: len(one[1]))
    message = Pull(namespace=namespace, keys=keys[: PULL_KEYS_PER_HINT_MAX * DIGEST_BYTES], source=source)
    deadline_ns = min(call_deadline_ns, now_ns + PULL_NS_MAX)
    yield [PullJob(target=target, flow=core.options.flow, deadline_ns=deadline_ns, message=message)]
    core.counters.repair_hints += 1
