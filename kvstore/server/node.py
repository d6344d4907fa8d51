"""The supervisor: `kvstore serve`. Builds the node out of its parts, and lives until a signal ends it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
import uuid
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from kvstore.doctor.start import log_start
from kvstore.engine.identity import NO_CLUSTER, DriveContent
from kvstore.errors import KVStoreError, Unavailable
from kvstore.limits import SECOND_NS, SIGNAL_ECHO_NS
from kvstore.server.access import NodeAccess
from kvstore.server.addresses import bound_port, join_address, listen
from kvstore.server.control import Control
from kvstore.server.drive_check import CheckedDrives, check_drives, contents_of, note_drives, usable_paths
from kvstore.server.drive_owner import note_owner, noted_owner, owner_alone
from kvstore.server.drops import PendingDrops
from kvstore.server.fleet import Fleet
from kvstore.server.generations import hide_dropped
from kvstore.server.grpc_edge.service import GrpcServer
from kvstore.server.http_edge import HttpEdge
from kvstore.server.launch import RdmaMode, WorkerLaunch
from kvstore.server.node_record import NODE_ID_KEY, open_record
from kvstore.server.places import (
    ReadyAddresses,
    clear_ready_file,
    remove_ready_file,
    write_ready_file,
)
from kvstore.server.private_folder import socket_folder
from kvstore.server.report import WorkerState
from kvstore.server.seat import open_seat
from kvstore.server.wire_edge import WireEdge
from kvstore.server.worker_handle import OwnedTarget, WorkerHandle
from kvstore.settings import NodeSettings, is_wildcard
from kvstore.telemetry.metrics import SupervisorMetrics

log = logging.getLogger(__name__)

_BOOTS_KEY: Final = "node/boots"
_CHANGES_BITS: Final = 20
"""Epoch = starts of the node << 20 | changes since: it grows over restarts without a write for each change."""

_GRPC_STOP_NS: Final = SECOND_NS


def run_node(settings: NodeSettings) -> None:
    """Serve until SIGTERM or SIGINT. Logging is set up by the caller.

    Raises:
        KVStoreError: the node could not start; the message is for the operator.
    """
    asyncio.run(_run(settings))


async def _run(settings: NodeSettings) -> None:
    with socket_folder(settings.socket_dir) as private_dir:
        await Node(settings, private_dir=str(private_dir)).run()


class Node:
    """One node on the running loop. `private_dir` is a folder of mode 0700 for its Unix sockets."""

    def __init__(self, settings: NodeSettings, *, private_dir: str) -> None:
        self._settings = settings
        self._stop = asyncio.Event()
        self._metrics = SupervisorMetrics()
        self._ready_path = Path(settings.ready_file) if settings.ready_file else None
        if self._ready_path:
            clear_ready_file(self._ready_path)
        self._private_dir = private_dir
        self._usable, self._bad = usable_paths(settings.data_dir)
        log_start(settings)
        self._store = open_record(self._usable, settings.node_id or "")
        self._node_id = settings.node_id or self._kept(NODE_ID_KEY) or f"node-{uuid.uuid4().hex[:12]}"
        # on raw devices alone nothing of ours is kept between starts, so the clock must tell them apart
        self._boots = int(self._kept(_BOOTS_KEY) or 0) + 1 if self._store else int(time.time())
        self._seat = open_seat(settings, self._node_id)
        self._fleet = Fleet(
            node_id=self._node_id,
            start_epoch=self._boots << _CHANGES_BITS,
            metrics=self._metrics,
            shown=self._seat.view if self._seat else None,
        )
        self._grpc_socket = str(Path(private_dir) / "grpc.sock")
        self._access = NodeAccess(Path(settings.tenants) if settings.tenants else None)
        self._fleet.access = self._access
        self._pending_drops = PendingDrops(self._store)
        self._control = Control(self._fleet, self._access, pending_drops=self._pending_drops)
        self._grpc = GrpcServer(self._control, metrics=self._metrics)
        self._wire_edge = WireEdge(
            self._fleet, access=self._access, grpc_socket=self._grpc_socket, metrics=self._metrics
        )
        self._http_edge = HttpEdge(self._fleet, access=self._access)
        self._adopted: frozenset[str] = frozenset()
        self._workers: list[WorkerHandle] = []
        self._were_serving: set[WorkerHandle] = set()
        self._told = self._told_ns = 0  # the signal that it drains for, and when it came
        self._errands: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Serve until a signal; raises KVStoreError when the start fails."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._signalled, signum)
        loop.add_signal_handler(signal.SIGHUP, self._hung_up)
        if not await self._plan_or_stop():
            await self._close()
            return
        await self._open_ports()
        self._fleet.adopt(self._workers)
        lives = [asyncio.create_task(worker.run()) for worker in self._workers]
        followers = [asyncio.create_task(follow) for follow in (self._follow_health(), self._follow_view())]
        if self._seat:
            followers.append(asyncio.create_task(self._seat.run(self._fleet)))
        try:
            await self._until_serving(lives)
            if not self._stop.is_set():
                self._announce()
                await self._stop.wait()
            await self._drain()
        finally:
            for worker in self._workers:
                worker.kill()
            for task in (*lives, *followers):
                task.cancel()
            await asyncio.gather(*lives, *followers, return_exceptions=True)
            await self._close()

    async def _plan_or_stop(self) -> bool:
        """Decide which drives are served, and by which workers; False when a signal came first."""
        planning = asyncio.create_task(self._plan())
        stopped = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait((planning, stopped), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
        if not planning.done():
            planning.cancel()
            await asyncio.gather(planning, return_exceptions=True)
            return False
        planning.result()
        return not self._stop.is_set()

    async def _plan(self) -> None:
        found = contents_of(self._usable)
        noted, has_record = noted_owner(self._store), self._store is not None
        if self._seat:
            owner = await self._seat.find_owner(noted, has_record=has_record)
        else:
            contents = [content for content in found.values() if isinstance(content, DriveContent)]
            owner = owner_alone(noted, contents, has_record=has_record)
        drives = check_drives(found, self._bad, self._store, owner)
        if self._store:
            note_owner(self._store, owner)
        self._adopted = drives.adopted
        self._fleet.refused_drives = drives.refused
        self._fleet.known_disks = {
            path: OwnedTarget(id=found_id, path=path, capacity_bytes=self._settings.capacity_each_bytes)
            for path, content in found.items()
            if path in drives.paths and isinstance(content, DriveContent) and (found_id := content.disk_id)
        }
        self._workers = [
            WorkerHandle(
                with_socket(launch, self._settings, self._private_dir),
                on_change=self._worker_changed,
                tenants=self._access.book,
            )
            for launch in plan_workers(self._settings, self._node_id, drives)
        ]

    def _worker_changed(self) -> None:
        self._fleet.changed()
        serving = {worker for worker in self._workers if worker.state is WorkerState.SERVING}
        if serving - self._were_serving:
            self._spawn(self._hide_dropped())
        self._were_serving = serving
        if self._seat:
            self._seat.workers_changed(self._fleet)

    async def _hide_dropped(self) -> None:
        await hide_dropped(self._workers)
        await self._pending_drops.make_up(self._workers)

    def _signalled(self, signum: int) -> None:
        now_ns = time.monotonic_ns()
        if self._stop.is_set():
            if self._told == signum and now_ns - self._told_ns < SIGNAL_ECHO_NS:
                return
            log.warning("%s again: calls in progress are cut off", signal.Signals(signum).name)
            for worker in self._workers:
                worker.kill()
            return
        log.info("%s: draining", signal.Signals(signum).name)
        self._told, self._told_ns = signum, now_ns
        self._stop.set()

    def _hung_up(self) -> None:
        """SIGHUP: read the tenants file again."""
        self._spawn(self._reload())

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._errands.add(task)  # the loop itself holds tasks weakly
        task.add_done_callback(self._errands.discard)

    async def _reload(self) -> None:
        try:
            await self._control.reload_tenants()
        except KVStoreError as error:
            log.error("SIGHUP: the tenants stay as they were: %s", error)

    async def _open_ports(self) -> None:
        grpc_listeners = self._listen("grpc_port", self._settings.grpc_port)
        metrics_listeners = self._listen("metrics_port", self._settings.metrics_port)
        host = self._settings.advertised_host
        self._fleet.grpc_address = join_address(host, bound_port(grpc_listeners[0]))
        self._fleet.metrics_address = join_address(host, bound_port(metrics_listeners[0]))
        await self._grpc.start(self._grpc_socket)
        await self._wire_edge.start(grpc_listeners)
        await self._http_edge.start(metrics_listeners)

    def _listen(self, purpose: str, port: int) -> list[socket.socket]:
        """One listener for each host, all on one port."""
        listeners: list[socket.socket] = []
        for host in dict.fromkeys(self._settings.host):
            listeners.append(listen(host, port, purpose=purpose))
            port = bound_port(listeners[0])
        return listeners

    async def _until_serving(self, lives: Sequence[asyncio.Task[None]]) -> None:
        """Until every worker serves or has failed to start, or a signal comes; raises when all have failed."""
        serving = asyncio.create_task(self._all_serving())
        stopped = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait((serving, stopped), return_when=asyncio.FIRST_COMPLETED)
        finally:
            serving.cancel()
            stopped.cancel()
        if all(worker.has_failed for worker in self._workers) and not self._stop.is_set():
            for life in lives:
                life.result()

    async def _all_serving(self) -> None:
        for worker in self._workers:
            await worker.wait_serving()

    def _announce(self) -> None:
        """The drives are ours now: keep who we are, and tell the world."""
        self._keep_identity()
        data = [address for worker in self._workers if worker.readiness for address in worker.readiness.data]
        log.info(
            "node %s serves: gRPC %s, data %s, metrics http://%s",
            self._node_id,
            self._fleet.grpc_address,
            ", ".join(data),
            self._fleet.metrics_address,
        )
        if self._ready_path:
            addresses = ReadyAddresses(
                grpc=self._fleet.grpc_address, data=data, metrics=self._fleet.metrics_address, pid=os.getpid()
            )
            write_ready_file(self._ready_path, addresses)

    def _keep_identity(self) -> None:
        """A full file system must not keep a node from serving what it has."""
        if self._store:
            try:
                self._store.put(NODE_ID_KEY, self._node_id)
                self._store.put(_BOOTS_KEY, str(self._boots))
                targets = [one for worker in self._workers if worker.readiness for one in worker.readiness.targets]
                note_drives(self._store, {one.path: one.id for one in targets}, self._settings.data_dir)
                self._store.take_over(self._adopted & {one.path for one in targets})
            except Unavailable as error:
                log.warning("%s; after a restart clients may take an old view for the new one, until it changes", error)

    async def _follow_health(self) -> None:
        """Carry each change to health checks."""
        while True:
            change = self._fleet.next_change()
            await self._grpc.set_serving(self._fleet.serving)
            await change.wait()

    async def _follow_view(self) -> None:
        """Carry each change to the workers; apart from health, since a busy worker may let us wait."""
        while True:
            change = self._fleet.next_change()
            await self._fleet.push_view()
            await change.wait()

    async def _drain(self) -> None:
        self._fleet.stop_placing()
        goodbye = [self._seat.close()] if self._seat else []
        await asyncio.gather(
            *goodbye, *(worker.stop(within_ns=self._settings.drain_timeout) for worker in self._workers)
        )

    async def _close(self) -> None:
        self._wire_edge.stop()
        self._http_edge.stop()
        await self._grpc.stop(within_ns=_GRPC_STOP_NS)
        if self._ready_path:
            remove_ready_file(self._ready_path)
        if self._store:
            self._store.close()
        log.info("node %s has stopped", self._node_id)

    def _kept(self, key: str) -> str | None:
        return self._store.get(key) if self._store else None


def plan_workers(settings: NodeSettings, node_id: str, drives: CheckedDrives) -> list[WorkerLaunch]:
    """The workers of `divide_workers`, with those of their drives that are ours; one without a drive is left out."""
    launches = [
        replace(
            launch,
            data_dirs=tuple(path for path in launch.data_dirs if path in drives.paths),
            cluster_id=drives.owner.id.hex(),
            own_id=drives.owner.own_id.hex(),
        )
        for launch in divide_workers(settings, node_id)
    ]
    return [launch for launch in launches if launch.data_dirs]


def with_socket(launch: WorkerLaunch, settings: NodeSettings, private_dir: str) -> WorkerLaunch:
    """The worker with a Unix socket for clients on this host, unless only TCP is wanted."""
    if settings.transport in ("tcp", "rdma"):
        return launch
    return replace(launch, local_socket=str(Path(private_dir) / f"data-{launch.rail}.sock"))


_RDMA_MODES: Final = {
    "tcp": RdmaMode.OFF,
    "shm": RdmaMode.OFF,
    "auto": RdmaMode.AUTO,
    "rdma": RdmaMode.REQUIRED,
}


def _data_port(settings: NodeSettings, nth: int) -> int:
    """Where the nth worker listens on every address: the first on the data port, others behind the node's last one."""
    if not nth or not settings.data_port:
        return settings.data_port
    return max(settings.grpc_port, settings.data_port, settings.metrics_port) + nth


def divide_workers(settings: NodeSettings, node_id: str) -> list[WorkerLaunch]:
    """One worker for each address (rail), or as many as asked for, but no more than there are drives.

    Drives and memory are divided evenly. Each worker has a rail of its own, its first address, and listens on the
    others as well: a rail that dies must not take drives with it.
    """
    rails = len(settings.host)
    count = min(settings.workers or rails, len(settings.data_dir))
    return [
        WorkerLaunch(
            admin_fd=-1,  # known when it is started
            rail=rail,
            node_id=node_id,
            data_dirs=settings.data_dir[rail::count],
            capacity_bytes=settings.capacity_each_bytes,
            hosts=(*settings.host[rail % rails :], *settings.host[: rail % rails]),
            advertise=settings.advertise if any(map(is_wildcard, settings.host)) else "",
            data_port=_data_port(settings, rail),
            local_socket="",
            cache_bytes=settings.cache // count,
            staging_bytes=settings.staging // count,
            device=settings.device,
            queue_depth=settings.queue_depth,
            segment_bytes=settings.segment_bytes,
            write_amplification_max=settings.write_amplification_max,
            endurance_bytes_day=settings.drive_endurance,
            scrub_bytes_second=settings.scrub_rate,
            repair_bytes_second=settings.repair_rate,
            drain_ns=settings.drain_timeout,
            is_member=bool(settings.cluster),
            rdma=_RDMA_MODES[settings.transport].value,
            rdma_port=settings.rdma_port,
            rdma_gid=settings.rdma_gid,
            has_tenants=bool(settings.tenants),
            drives_of_node=len(settings.data_dir),
            cluster_id=NO_CLUSTER.hex(),
            log_level=settings.log_level,
            log_format=settings.log_format,
        )
        for rail in range(count)
    ]
