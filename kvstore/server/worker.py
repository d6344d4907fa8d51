"""python -m kvstore.server.worker LAUNCH: the process that owns drives and moves payload.

One thread around epoll. Started by the supervisor, with which it speaks over an inherited Unix socket (see
`kvstore.server.launch`); it ends when that closes. gRPC is never imported here.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType as StackFrame
from typing import Final

from kvstore.cluster.view import View
from kvstore.doctor.compiled import check_compiled, read_compiled
from kvstore.errors import KVStoreError
from kvstore.limits import CONNECTIONS_MAX, DESCRIPTORS_OWN, SECOND_NS
from kvstore.server.admission import Admission, OpenAdmission, TokenAdmission
from kvstore.server.connection import Connection
from kvstore.server.copier import Copier
from kvstore.server.dataplane import DataPlane, Identity
from kvstore.server.drives import joined, open_drives
from kvstore.server.launch import RdmaMode, WorkerLaunch
from kvstore.server.loop import Loop
from kvstore.server.rdma import RdmaWish, start_rdma
from kvstore.server.tenants import TenantBook
from kvstore.server.worker_verbs import Handover, Moved, Started, WorkerVerbs
from kvstore.telemetry.logs import LogFormat, LogLevel, configure
from kvstore.telemetry.metrics import DataplaneMetrics, RdmaMetrics
from kvstore.transport.shm import host_id, listen_unix
from kvstore.transport.tcp import address_of, listen_tcp
from kvstore.wire.shared import LocalReply

log = logging.getLogger("kvstore.server.worker")  # __name__ is __main__ here

_PR_SET_PDEATHSIG: Final = 1  # prctl(2)
_BOOT_ID_BYTES: Final = 16
_GC_OBJECTS: Final = 100_000
"""New objects between collections: the hot path makes no cycles, and a full pass would be a pause."""
_LINGER_NS: Final = SECOND_NS // 5
_SIGNAL_BYTES: Final = 64
_WILDCARDS: Final = frozenset({"0.0.0.0", "::"})


class Worker:
    """Everything of one worker process, from its start to its end. Implements `worker_verbs.WorkerControl`."""

    def __init__(self, launch: WorkerLaunch, *, admission: Admission | None = None) -> None:
        self._launch = launch
        self._loop = Loop()
        self._metrics = DataplaneMetrics()
        self._started = Started(boot_id=os.urandom(_BOOT_ID_BYTES))
        self._started.registry.add(self._metrics)
        self._started.registry.add(self._started.process)
        self._book = TenantBook()
        self._shares: Mapping[str, Mapping[str, int]] = {}
        self._view: View | None = None
        self._tokens = TokenAdmission(self._metrics) if launch.has_tenants else None
        verbs = WorkerVerbs(self._started)
        verbs.bind(self)
        self._plane = DataPlane(
            self._loop,
            identity=_identity(launch, self._started.boot_id),
            admission=admission or self._tokens or OpenAdmission(),
            admin=verbs,
            metrics=self._metrics,
            clock=time.monotonic_ns,
        )
        if launch.is_member:
            self.hold_writes(for_ns=0)
        self._admin: Connection | None = None
        self._end_ns: int | None = None  # when it ends at the latest, once it was told to
        self._exit_code = 0
        self._was_told_to_stop = False

    # --- WorkerControl ----------------------------------------------------------------------------------------------
    @property
    def now_ns(self) -> int:
        """The time of this turn."""
        return self._plane.now_ns

    @property
    def is_draining(self) -> bool:
        """Puts are refused."""
        return self._plane.is_draining

    def drain(self, *, resume: bool) -> None:
        """Refuse puts, or take them again."""
        self._plane.is_draining = not resume
        for drive in self._started.drives:
            if resume:
                drive.engine.resume()
            else:
                drive.engine.drain()

    def handover(self) -> Handover:
        """See `WorkerControl.handover`."""
        copier = self._plane.copier
        if copier is None:
            return Handover(done=True)  # a node on its own
        if not self._plane.is_draining:
            return Handover(done=False)  # started again, and not told yet
        spreader = copier.spreader
        return Handover(done=spreader.is_done, handed_on=spreader.handed_on, left_behind=spreader.left_behind)

    def hold_writes(self, *, for_ns: int) -> None:
        """Take puts and deletes for so long, then refuse them until told again: the node's lease has so long to go."""
        self._plane.fenced_from_ns = time.monotonic_ns() + for_ns

    def count_lookup(self, *, key_count: int, hit_count: int) -> None:
        """Take a lookup of the whole node into the hit rate."""
        metrics = self._plane.metrics
        metrics.lookups += 1
        metrics.lookup_keys += key_count
        metrics.lookup_hits += hit_count

    def moved(self) -> Moved:
        """What it has moved since it started."""
        metrics = self._metrics
        return Moved(
            sent_bytes=sum(metrics.sent_bytes),
            received_bytes=sum(metrics.received_bytes),
            lookup_keys=metrics.lookup_keys,
            lookup_hits=metrics.lookup_hits,
        )

    def shut_down(self, *, within_ns: int) -> None:
        """Finish what is in progress, for at most so long, then end."""
        if self._end_ns is None:
            log.info("shuts down: calls in progress have %.1f s", within_ns / SECOND_NS)
        end_ns = time.monotonic_ns() + within_ns
        self._end_ns = end_ns if self._end_ns is None else min(self._end_ns, end_ns)
        self._plane.stop()

    def end_at_once(self) -> None:
        """The supervisor is gone: nobody would restart us, and a new one wants the drives."""
        if self._end_ns is None:
            log.warning("the supervisor is gone; the worker ends")
        self._end_ns = time.monotonic_ns()
        self._plane.stop()

    def start_failed(self) -> None:
        """The supervisor is told why: end as soon as the answer is out."""
        self._exit_code = 1
        self._end_ns = time.monotonic_ns() + SECOND_NS

    def set_view(self, view: View, packed: bytes) -> None:
        """What clients are told of the cluster."""
        self._plane.set_view(view.epoch, packed)
        self._view = view
        if self._plane.copier is not None:
            self._plane.copier.set_view(view)

    def set_tenants(self, book: TenantBook) -> None:
        """Who may do what and have how much; connections whose token was taken back are closed."""
        if self._tokens is not None:
            self._tokens.tell(book)
            self._plane.renew_permits(self._tokens.renewed)
            self._book = book
            self._set_quotas()

    def set_shares(self, shares: Mapping[str, Mapping[str, int]]) -> None:
        """What tenants may have on each target; who has no room at all may have a byte, since 0 is no quota."""
        told = {target: {name: max(share, 1) for name, share in given.items()} for target, given in shares.items()}
        if told != self._shares:
            self._shares = told
            self._set_quotas()

    def set_peer_token(self, token: bytes) -> None:
        """By which nodes of the cluster know each other; connections that were made by the last one are closed."""
        if token == self._plane.peer_token:
            return  # it is told with each renewal of the lease
        self._plane.peer_token = token
        if self._tokens is not None:
            self._tokens.tell_peer_token(token)
            self._plane.renew_permits(self._tokens.renewed)

    def _set_quotas(self) -> None:
        """A node's quota of a tenant is divided evenly over its drives, as its capacity is.

        In a cluster the supervisor settles with the other nodes what each drive may hold; until it has, no puts are
        taken, and what is there already is left as it is.
        """
        quotas = {tenant.name: tenant.quota_bytes // self._launch.drives_of_node for tenant in self._book}
        for drive in self._started.drives:
            shares = self._shares.get(drive.id, {}) if self._launch.is_member else quotas
            drive.engine.set_quotas(shares)

    @property
    def _is_introduced(self) -> bool:
        """The supervisor has greeted, and said who the tenants are where there are any."""
        return (
            self._admin is not None
            and self._admin.client is not None
            and (self._tokens is None or self._tokens.is_told)
        )

    # --- life -------------------------------------------------------------------------------------------------------
    def run(self) -> int:
        """Serves until told to end; returns the exit code."""
        self._admin = self._plane.add_admin(socket.socket(fileno=self._launch.admin_fd))
        while not self._is_introduced and self._end_ns is None:
            self._turn()  # the supervisor wants its WELCOME before a recovery that may take long
        if self._end_ns is None:
            self._start()
        while not self._is_over():
            self._turn()
        self._finish()
        return self._exit_code

    def _start(self) -> None:
        """Recovers the drives and takes clients; what goes wrong is the answer to `ready`."""
        try:
            drives, self._started.faults = open_drives(self._launch)
            self._started.drives = drives
            self._set_quotas()
            for drive in drives:
                self._started.registry.add(drive.engine.metrics)
                self._started.registry.add(drive.engine.device_metrics)
            engine = joined(drives)
            self._plane.namespace_count = self._namespace_count
            self._plane.manifests_share = self._manifests_share
            self._plane.calls_wait = self._calls_wait
            self._plane.serve(engine)
            self._start_rdma([drive.engine.cache.arena.memory for drive in drives])
            if self._launch.is_member:
                self._plane.copier = copier = Copier(
                    drives,
                    engine,
                    self._plane,
                    client_id=self._started.boot_id,
                    bytes_second=self._launch.repair_bytes_second,
                )
                if self._view is not None:
                    copier.set_view(self._view)
            listening = [listen_tcp(host, self._launch.data_port) for host in self._launch.hosts]
            self._started.data = [self._reported(one) for one in listening]
            if self._launch.local_socket:
                listening.append(listen_unix(self._launch.local_socket))
            for one in listening:
                self._plane.listen(one)
        except KVStoreError as error:
            log.error("the worker cannot start: %s", error)
            self._started.failure = error
            return
        gc.collect()
        gc.freeze()
        gc.set_threshold(_GC_OBJECTS)
        self._watch_sigterm()

    def _start_rdma(self, arenas: Sequence[memoryview]) -> None:
        launch = self._launch
        wish = RdmaWish(
            mode=RdmaMode(launch.rdma),
            port=launch.rdma_port,
            gid=launch.rdma_gid,
            hosts=(launch.hosts[0], launch.advertise),  # its rail
        )
        metrics = RdmaMetrics()
        self._started.registry.add(metrics)
        service = start_rdma(wish, arenas, metrics, lambda: self._plane.now_ns)
        if service is not None:
            self._plane.use_rdma(service)

    def _namespace_count(self, tenant: str) -> int:
        return max(drive.engine.store.namespaces.count_of(tenant) for drive in self._started.drives)

    def _manifests_share(self, tenant: str) -> float:
        return max(drive.engine.store.namespaces.manifests_share_of(tenant) for drive in self._started.drives)

    def _calls_wait(self) -> bool:
        metrics = [drive.engine.metrics for drive in self._started.drives]
        return any(one.grants_waiting or one.reads_waiting for one in metrics)

    def _reported(self, listening: socket.socket) -> str:
        """The address that clients are told."""
        host, _, port = address_of(listening).rpartition(":")
        advertise = self._launch.advertise
        if advertise and host.strip("[]") in _WILDCARDS:
            host = f"[{advertise}]" if ":" in advertise else advertise
        return f"{host}:{port}"

    def _watch_sigterm(self) -> None:
        """Wakes the loop by a descriptor: a signal that only set a flag could come between the look and the wait."""
        receiving, sending = socket.socketpair()
        receiving.setblocking(False)
        sending.setblocking(False)
        signal.set_wakeup_fd(sending.detach())
        signal.signal(signal.SIGTERM, self._on_sigterm)
        self._loop.watch(receiving.fileno(), lambda _: self._on_signal_bytes(receiving))

    def _on_sigterm(self, _number: int, _frame: StackFrame | None) -> None:
        self._was_told_to_stop = True

    def _on_signal_bytes(self, woken: socket.socket) -> None:
        woken.recv(_SIGNAL_BYTES)  # left unread they would wake the loop in every turn from now on
        if self._was_told_to_stop:
            self.shut_down(within_ns=self._launch.drain_ns)

    def _turn(self) -> None:
        wait_ns = self._plane.wait_ns()
        if self._end_ns is not None:
            wait_ns = min(_LINGER_NS, _LINGER_NS if wait_ns is None else wait_ns)
        self._loop.turn(wait_ns, self._plane.woke)
        self._plane.turn()

    def _is_over(self) -> bool:
        if self._end_ns is None:
            return False
        if time.monotonic_ns() >= self._end_ns:
            return True
        is_answered = self._admin is None or self._admin.is_closed or self._admin.is_idle
        is_written = all(drive.engine.idle for drive in self._started.drives)
        return is_answered and is_written and not self._plane.calls_active

    def _finish(self) -> None:
        left_ns = max(0, (self._end_ns or 0) - time.monotonic_ns())
        self._plane.close()
        if self._plane.rdma is not None:
            self._plane.rdma.close()
        for drive in self._started.drives:
            drive.engine.close(within_ns=left_ns + SECOND_NS)
        self._plane.shared_memory.close(within_ns=left_ns + SECOND_NS)  # no drive writes there any more
        self._loop.close()


def _identity(launch: WorkerLaunch, boot_id: bytes) -> Identity:
    """Who this worker is, and where clients on this host find it."""
    path = launch.local_socket
    host = host_id() if path else ""
    local = LocalReply(host=host, path=path) if host else LocalReply()
    return Identity(node_id=launch.node_id, boot_id=boot_id, local=local)


def die_with_parent() -> None:
    """Asks the kernel to kill this process when the supervisor dies, even if it hangs (PR_SET_PDEATHSIG, prctl(2))."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        log.warning("prctl(PR_SET_PDEATHSIG) failed: %s", os.strerror(ctypes.get_errno()))


def allow_descriptors() -> None:
    """Raises the soft limit on open files as far as the hard one allows, and says when that is too little."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < CONNECTIONS_MAX + DESCRIPTORS_OWN:
        log.warning(
            "%d open files are allowed, %d connections need %d: raise the hard limit (ulimit -Hn, LimitNOFILE=)",
            hard,
            CONNECTIONS_MAX,
            CONNECTIONS_MAX + DESCRIPTORS_OWN,
        )


def tell_compiled() -> None:
    """Says what costs more than it needs to, if anything does."""
    missing = read_compiled()
    if missing:
        log.warning("doctor: %s", check_compiled(missing).sentence)


def main() -> None:
    """The worker's process, from its one argument on."""
    launch = WorkerLaunch.from_argument(sys.argv[1])
    configure(level=LogLevel(launch.log_level), format=LogFormat(launch.log_format), process=f"worker-{launch.rail}")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    allow_descriptors()
    tell_compiled()
    sys.exit(Worker(launch).run())


if __name__ == "__main__":
    main()
