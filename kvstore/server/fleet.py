"""The workers of a node together: their view, their state, and what they count."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import kvstore
from kvstore.cluster.view import READ_STATES, Target, TargetState, View
from kvstore.errors import KVStoreError
from kvstore.limits import CONTROL_DEADLINE_NS, SECOND_NS, GiB
from kvstore.server.access import NodeAccess
from kvstore.server.drive_record import DriveVerdict
from kvstore.server.measure import Measured, measure
from kvstore.server.report import NodeReport, NodeState, NodeWhere, TenantShare, WorkerState
from kvstore.server.tenant_uses import gathered
from kvstore.server.worker_handle import OwnedTarget, WorkerHandle
from kvstore.telemetry.metrics import SupervisorMetrics
from kvstore.telemetry.registry import Registry, Snapshot

log = logging.getLogger(__name__)

_TARGET_STATES = {
    WorkerState.SERVING: TargetState.SERVING,
    WorkerState.RECOVERING: TargetState.RECOVERING,
    WorkerState.DRAINING: TargetState.DRAINING,
    WorkerState.DOWN: TargetState.DOWN,
}


class Fleet:
    """Owns the view: it changes when a worker does, and goes to the workers and to everybody who watches.

    Args:
        start_epoch: At least every epoch that this node ever showed.
        shown: Of a node in a cluster: the cluster's view as known last, which is shown instead of the node's own.

    Attributes:
        access: the tenants of the node.
        refused_drives: drives that were given to no worker, and why.
        known_disks: what lies on the drives that workers were given, by path: the view names them before their worker
            has read them, since they may hold what is deleted meanwhile.
        shares, nodes: of tenants' quotas, and all nodes, in a cluster.
        peer_token: by which nodes of a cluster know each other; empty is none.
        fence: why the cluster lets this node take no writes; "" when it may.
    """

    def __init__(
        self, *, node_id: str, start_epoch: int, metrics: SupervisorMetrics, shown: View | None = None
    ) -> None:
        self.node_id = node_id
        self._shown = shown
        self._workers: Sequence[WorkerHandle] = ()
        self._view = View(epoch=start_epoch, node_id=node_id, targets=())
        self._stopping = False
        self._changed = asyncio.Event()
        self._started_ns = time.monotonic_ns()
        self._metrics = metrics
        self._registry = Registry()
        self._registry.add(metrics)
        self.access = NodeAccess(None)
        self.refused_drives: Sequence[DriveVerdict] = ()
        self.known_disks: Mapping[str, OwnedTarget] = {}
        self.shares: Callable[[], Mapping[str, TenantShare]] = dict
        self.nodes: Callable[[], Sequence[NodeWhere]] = list
        self.fence: Callable[[], str] = str
        self.peer_token: Callable[[], bytes] = bytes
        self.grpc_address = ""
        self.metrics_address = ""

    def adopt(self, workers: Sequence[WorkerHandle]) -> None:
        """Take the workers, once, before they are started with `changed` as their `on_change`."""
        self._workers = workers
        self.changed()

    @property
    def workers(self) -> Sequence[WorkerHandle]:
        """All workers, by rail."""
        return self._workers

    @property
    def view(self) -> View:
        """The view now."""
        return self._view if self._shown is None else self._shown

    def show(self, view: View) -> None:
        """The cluster has a newer view."""
        self._shown = view
        self.changed()

    def served(self) -> list[tuple[Target, int, bytes]]:
        """The targets that this node's workers serve now, with their capacity in bytes and their worker's boot id."""
        return [
            (target, owned.capacity_bytes, worker.readiness.boot_id)
            for worker in self._workers
            if worker.readiness is not None
            for owned, target in zip(worker.readiness.targets, self._targets(worker), strict=True)
            if target.state in READ_STATES
        ]

    @property
    def state(self) -> NodeState:
        """The node as a whole."""
        if self._stopping:
            return NodeState.DRAINING
        states = {worker.state for worker in self._workers}
        if states <= {WorkerState.SERVING}:
            return NodeState.SERVING if states else NodeState.DOWN
        if WorkerState.RECOVERING in states:
            return NodeState.RECOVERING
        if states <= {WorkerState.SERVING, WorkerState.DRAINING}:
            return NodeState.DRAINING
        return NodeState.DOWN if states <= {WorkerState.DOWN} else NodeState.DEGRADED

    @property
    def serving(self) -> bool:
        """True while every worker answers gets: what readiness means. A drained node still does."""
        answering = (WorkerState.SERVING, WorkerState.DRAINING)
        started = [worker for worker in self._workers if not worker.has_failed]
        return not self._stopping and bool(started) and all(worker.state in answering for worker in started)

    def stop_placing(self) -> None:
        """The node is about to end: not ready any more, its targets draining."""
        self._stopping = True
        self.changed()

    def changed(self) -> None:
        """A worker changed: bring view, metrics and watchers up to date."""
        before = self._view
        self._view = before.with_targets(target for worker in self._workers for target in self._targets(worker))
        self._metrics.serving = int(self.serving)
        self._metrics.epoch = self.view.epoch
        self._metrics.workers = sum(worker.state is WorkerState.SERVING for worker in self._workers)
        self._metrics.worker_restarts = sum(worker.restarts for worker in self._workers)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def next_change(self) -> asyncio.Event:
        """Set when something changes after this call."""
        return self._changed

    async def views(self, known_epoch: int) -> AsyncIterator[View]:
        """The view if it is newer than `known_epoch`, then every newer one; some may be skipped. Ends with the node."""
        while True:
            change = self.next_change()
            view = self.view
            if view.epoch > known_epoch:
                known_epoch = view.epoch
                yield view
            if self._stopping:
                return
            await change.wait()

    async def push_view(self) -> None:
        """Tell the workers of the view, so that they attach its epoch to replies."""
        for worker in self._workers:
            try:
                await worker.channel.admin("view_set", self.view.to_plain(), deadline_ns=CONTROL_DEADLINE_NS)
            except KVStoreError as error:
                log.debug("view not sent: %s", error)  # it is down, and gets the view when it serves again

    async def numbers(self) -> Snapshot:
        """All metrics of the node. A worker that does not answer is left out."""
        return (await self._measure()).numbers

    async def _measure(self) -> Measured:
        return await measure(self._workers, self._registry.snapshot(), self.refused_drives)

    async def report(self) -> NodeReport:
        """Everything about the node."""
        measured = await self._measure()
        return NodeReport(
            node_id=self.node_id,
            version=kvstore.__version__,
            state=self.state,
            epoch=self.view.epoch,
            uptime_seconds=(time.monotonic_ns() - self._started_ns) / SECOND_NS,
            pid=os.getpid(),
            grpc=self.grpc_address,
            metrics=self.metrics_address,
            workers=tuple(worker.report() for worker in self._workers),
            numbers=measured.numbers,
            drives=measured.drives,
            tenants=gathered(measured.uses, self.access.book, self.shares()),
            nodes=tuple(self.nodes()),
            fence=self.fence(),
        )

    def _targets(self, worker: WorkerHandle) -> list[Target]:
        state = _TARGET_STATES[worker.state]
        readiness = worker.readiness
        if readiness is None:
            known = [self.known_disks[path] for path in worker.data_dirs if path in self.known_disks]
            return [_target(owned, (), state) for owned in known]
        if self._stopping and state is TargetState.SERVING:
            state = TargetState.DRAINING
        return [_target(owned, readiness.data, state) for owned in readiness.targets]


def _target(owned: OwnedTarget, data: tuple[str, ...], state: TargetState) -> Target:
    return Target(id=owned.id, data=data, weight=owned.capacity_bytes / GiB, state=state)
