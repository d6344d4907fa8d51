"""One data dir, one node, and a row of deaths under load, each followed by an audit."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from itertools import cycle
from pathlib import Path
from typing import Final

from kvstore.device.base import IoKind
from tests.faults.audit import audit
from tests.faults.filler import Filler
from tests.faults.hurt_device import Moment, Order, Region, Step
from tests.faults.ledger import Ledger
from tests.faults.load import Load, LoadPlan
from tests.faults.node import HurtNode

SEGMENT: Final = "2MiB"  # small, so that segments are opened, sealed and evicted in every round
DEVICES: Final = ("uring", "threads")  # each is forced in its turn: both are first-class
STEP_WAIT_S: Final = 1.5  # a step that the load did not reach by then is not waited for: the worker is killed then
AFTERMATH_S: Final = 0.1
BALANCE_ROUNDS: Final = 5
LIVE_SHARE: Final = 0.6  # of a full node's capacity at the least; what open segments and eviction in progress take
DEATHS_PER_LIFE: Final = 2  # a supervisor backs off from a worker that keeps dying; a new one does not

STEPS: Final = (
    *((IoKind.WRITE, Region.RECORD, moment) for moment in Moment),
    *((IoKind.WRITE, Region.LOG, moment) for moment in Moment),
    *((IoKind.WRITE, Region.HEADER, moment) for moment in Moment),
    *((IoKind.WRITE, Region.SEAL, moment) for moment in Moment),
    (IoKind.SYNC, Region.DRIVE, Moment.BEFORE),
    (IoKind.SYNC, Region.DRIVE, Moment.AFTER),
    (IoKind.READ, Region.RECORD, Moment.BEFORE),
    (IoKind.READ, Region.RECORD, Moment.AFTER),
)


class Death(Enum):
    """Who dies, and when."""

    WORKER = "worker"  # at any moment
    NODE = "node"  # supervisor and worker, at any moment
    WORKER_STEP = "worker at a step"
    NODE_STEP = "node at a step"


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodePlan:
    """Attributes:
    seed: of every choice.
    rounds: deaths.
    is_full: the node is small and kept full by chunks that nobody audits, so that it evicts all the time.
    put_bytes_max: payload begun in a round.
    """

    seed: int
    rounds: int
    is_full: bool = False
    put_bytes_max: int = 4 << 20

    @property
    def capacity_bytes(self) -> int:
        """Of the node. Not full, it has room for all that an episode puts."""
        return (64 if self.is_full else 192) << 20


class Episode:
    """Attributes:
    told: counts for the reader of the test's output: deaths by kind and step, outcomes of calls.
    """

    def __init__(self, folder: Path, plan: EpisodePlan) -> None:
        self.plan = plan
        arguments = ("--segment-bytes", SEGMENT, "--device", DEVICES[plan.seed % len(DEVICES)])
        self.node = HurtNode(folder, capacity=f"{plan.capacity_bytes}B", arguments=arguments)
        self.ledger = Ledger()
        self.told: Counter[str] = Counter()
        self._choice = random.Random(plan.seed)
        first = plan.seed * 7 % len(STEPS)  # over several episodes every step has its turn
        self._steps = cycle(STEPS[first:] + STEPS[:first])
        self._documents = 0
        self._deaths = 0  # of workers in this supervisor's life

    def run(self) -> None:
        """All rounds; AssertionError names the seed and the round."""
        self.node.start()
        filler = Filler(self.node.address)
        if self.plan.is_full:
            filler.fill(2 * self.plan.capacity_bytes)
        for number in range(self.plan.rounds):
            if self.plan.is_full:
                filler.start()
            name = f"seed {self.plan.seed}, round {number}"
            self._round(name, self._next_death())
            filler.stop()
            assert not filler.faults, f"{name}: {filler.faults}"
            if number % BALANCE_ROUNDS == BALANCE_ROUNDS - 1:
                self._balance(name)
        filler.close()
        self.node.close()

    def _round(self, name: str, death: Death) -> None:
        """Load, death, return, and everything read."""
        name = f"{name}, {death.value} dies"
        self.told[death.value] += 1
        plan = LoadPlan(
            seed=self._choice.randrange(1 << 30),
            put_bytes_max=self.plan.put_bytes_max,
            first_document=self._documents,
        )
        load = Load(self.node.address, plan, self.ledger.apply)
        worker = self.node.worker_pid()
        load.start()
        with self._measured("dying"):
            if death in (Death.WORKER_STEP, Death.NODE_STEP):
                self._die_at_step(node=death is Death.NODE_STEP)
            else:
                time.sleep(self._choice.uniform(0.02, 0.3))
                self._die_now(node=death is Death.NODE)
        with self._measured("coming back"):
            if death in (Death.NODE, Death.NODE_STEP):
                self._deaths = 0
                self.node.start()
            else:
                self._deaths += 1
                self.node.wait_serving(dead_pid=worker)
        time.sleep(AFTERMATH_S)
        load.stop()
        self._documents = load.next_document
        self.told.update(load.counts)
        self.told["calls late by more than 1 s"] += load.late_s > 1
        assert not load.faults, f"{name}: {load.faults[:5]}\n{self.node.printed()}"
        with self._measured("being audited"):
            self._audit(name)

    @contextmanager
    def _measured(self, what: str) -> Iterator[None]:
        began_ns = time.monotonic_ns()
        yield
        self.told[f"ms {what}"] += (time.monotonic_ns() - began_ns) // 1_000_000

    def _balance(self, name: str) -> None:
        """The node's account of itself equals the sum over its drive, before a kill and after the next start."""
        before = self._account()
        self.told["evicted segments"] += int(self.node.number("kvstore_evicted_segments"))
        self.node.kill()
        with self._measured("being checked"):
            check = self.node.check()
        self._deaths = 0
        self.node.start()
        recount = (check.number("live_bytes"), check.number("records"))
        told = f"{name}: {before} before the kill, {recount} on the drive {check.report}\n{self.node.printed()}"
        assert check.status == 0, told
        assert check.number("live_bytes") <= check.number("allocated_bytes") <= self.plan.capacity_bytes, told
        assert self.node.disk_bytes() <= self.plan.capacity_bytes, told
        assert self._account() == recount, told
        # a full node may have been evicting when it was killed
        assert self.plan.is_full or before == recount, told
        if self.plan.is_full:
            assert recount[0] > LIVE_SHARE * self.plan.capacity_bytes, told

    def _account(self) -> tuple[int, int]:
        return int(self.node.number("kvstore_live_bytes")), int(self.node.number("kvstore_records"))

    def _next_death(self) -> Death:
        if self._deaths >= DEATHS_PER_LIFE:
            return self._choice.choice((Death.NODE, Death.NODE_STEP))
        return self._choice.choices(tuple(Death), (2, 1, 5, 2))[0]

    def _die_at_step(self, *, node: bool) -> None:
        kind, region, moment = next(self._steps)
        rare = region in (Region.HEADER, Region.SEAL)
        step = Step(
            kind=kind, region=region, moment=moment, count=1 if rare else self._choice.randint(1, 12), node=node
        )
        self.node.order(Order(crash=step))
        end = time.monotonic() + STEP_WAIT_S
        while not self.node.order_done() and time.monotonic() < end:
            time.sleep(0.002)
        reached = self.node.order_done()
        self.told[f"{kind.value} {region.value} {moment.value}" + ("" if reached else ", not reached")] += 1
        if not reached:
            self.node.withdraw()
            self._die_now(node=node)
        elif node:
            assert self.node.wait_dead(10), "the supervisor outlived its kill"

    def _die_now(self, *, node: bool) -> None:
        if node:
            self.node.kill(worker_first=self._choice.random() < 0.5)
        else:
            self.node.signal_worker(signal.SIGKILL)

    def _audit(self, name: str) -> None:
        found = audit(self.node.address, self.ledger)
        seen = found.observation
        self.told["audited hits"] += found.hits
        self.told["unsure keys"] += seen.unsure
        self.told["unsure keys that were there"] += seen.unsure_hits
        printed = f"\n{self.node.printed()}"
        assert not found.wrong, f"{name}: {found.wrong[:5]}{printed}"
        assert not seen.resurrected, f"{name}: {seen}{printed}"
        lost = [*seen.lost, *seen.lost_synced]
        if self.plan.is_full:
            self.told["acknowledged, then evicted"] += len(lost)
        else:
            assert not lost, f"{name}: {seen}: {found.describe(lost)}{printed}"
