"""The data plane: connections, whose turn it is to send, and which request goes where.

Single-threaded; the worker's loop calls `turn` after each round of readiness events. Requests are carried out as their
frames arrive; output is sent round robin, about one frame of payload for each connection in each turn.
"""

from __future__ import annotations

import logging
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from kvstore.engine.api import Engine
from kvstore.errors import Denied, InvalidRequest, Overloaded, StaleView, Unavailable
from kvstore.limits import (
    ACCEPTS_PER_EVENT_MAX,
    BATCH_ITEMS_MAX,
    CONNECTIONS_MAX,
    FRAME_BODY_BYTES_MAX,
    FRAME_PAYLOAD_BYTES_MAX,
    HELLO_WAIT_NS,
    IDLE_WAIT_NS,
    INLINE_PUT_BYTES_MAX,
    MANIFESTS_SHARE_TENANT,
    NAMESPACES_PER_TENANT_MAX,
    PUT_WINDOW_BYTES,
    REQUESTS_BYTES_MAX,
    REQUESTS_BYTES_SMALL,
    SWEEP_NS,
    WRITE_WAVE_NS,
)
from kvstore.server import copy_calls, lookups, rdma_calls, shm_calls
from kvstore.server.admission import Admission, agreed_version, guarded, own_client_id
from kvstore.server.clients import Client, Clients
from kvstore.server.connection import Connection
from kvstore.server.copier import Copier
from kvstore.server.groups import GroupAnswers
from kvstore.server.headway import Patience
from kvstore.server.loop import READABLE, Loop
from kvstore.server.place_calls import drop_regions, start_get_into, start_offer_from
from kvstore.server.puts import start_offer
from kvstore.server.rdma import RdmaService
from kvstore.server.reads import start_get
from kvstore.server.tenant_engine import TenantEngine
from kvstore.server.tenants import Permit, Scope
from kvstore.server.verbs import AdminVerbs
from kvstore.server.writer_calls import WriterCommitCall, WriterWriteCall, abort_writers, open_writers
from kvstore.telemetry.logs import RepeatLogger
from kvstore.telemetry.metrics import DataplaneMetrics, DeniedKind, Verb
from kvstore.transport.shm_regions import MappedMemory, regions_max
from kvstore.types.flow import FlowClass
from kvstore.types.results import Refused, RefusedReason
from kvstore.wire.body import MemoryBudget
from kvstore.wire.codec import unpack_plain
from kvstore.wire.frames import Frame
from kvstore.wire.header import FrameType
from kvstore.wire.messages import (
    Admin,
    AdminReply,
    Feature,
    Hello,
    Offer,
    Pong,
    ViewReply,
    ViewRequest,
    Welcome,
    WriterAbort,
    WriterCommit,
)
from kvstore.wire.shared import LocalReply

log = logging.getLogger(__name__)

FEATURES: Final = Feature.FINAL_DATA | Feature.DATA_CRCS | Feature.PULL | Feature.READER_CHECKS
_NEVER_NS: Final = 1 << 63


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who this worker is, for WELCOME; and where clients on its host find it."""

    node_id: str
    boot_id: bytes
    local: LocalReply = field(default_factory=LocalReply)


class DataPlane:
    """Serves one engine to many connections.

    Attributes:
        loop, metrics, clock: see there.
        faults: takes the log lines that peers can cause by the thousand.
        handlers: what carries out each request, and CANCEL.
        epoch: of the view.
        now_ns: the time of this turn.
        quick_engine: the engine while new requests are taken.
        requests_memory: what clients' requests take, all together.
        shared_memory: what clients share with us, all together.
        rdma: the worker's, None where there is none; set before clients come.
        namespace_count: how many namespaces of a tenant a drive knows; set by whoever has the drives.
        manifests_share: which part of what a drive keeps of manifests is a tenant's; likewise.
        calls_wait: whether puts or reads wait for memory; likewise.
        peer_token: what this node shows to the other nodes of its cluster; a secret, empty outside of one.
        is_draining: new puts are refused.
        copier: keeps copies in step with other nodes; None on a node on its own.
        fenced_from_ns: when puts and deletes are refused because nobody vouches for the node (see `hold_writes`).
    """

    def __init__(
        self,
        loop: Loop,
        *,
        identity: Identity,
        admission: Admission,
        admin: AdminVerbs,
        metrics: DataplaneMetrics,
        clock: Callable[[], int],
    ) -> None:
        self.loop = loop
        self.metrics = metrics
        self.faults = RepeatLogger(log)
        self.epoch = 0
        self.is_draining = False
        self.copier: Copier | None = None
        self.fenced_from_ns = _NEVER_NS
        self.peer_token = b""
        self.namespace_count: Callable[[str], int] = lambda _: 0
        self.manifests_share: Callable[[str], float] = lambda _: 0.0
        self.calls_wait: Callable[[], bool] = lambda: False
        self.now_ns = clock()
        self.clock = clock
        self.requests_memory = MemoryBudget(REQUESTS_BYTES_MAX, small_bytes=REQUESTS_BYTES_SMALL)
        self._patience = Patience(self.requests_memory)
        self.shared_memory = MappedMemory(regions_max=regions_max())
        self.rdma: RdmaService | None = None
        self._identity = identity
        self._admission = admission
        self._admin = admin
        self._view = b""
        self._engine: Engine | None = None
        self.quick_engine: Engine | None = None
        self._tenant_engines: dict[str, TenantEngine] = {}
        self._is_stopping = False
        self._engine_is_due = False
        self._gathering: deque[tuple[int, Callable[[], None]]] = deque()  # see `gather`: when, and what is called then
        self._timer_ns = _NEVER_NS  # when the engine wants to be polled
        self._timer_is_stale = True  # a read that is answered from memory sets no timer, all else may
        self._connections: set[Connection] = set()
        self._clients = Clients(self.requests_memory)
        self._groups = GroupAnswers()
        self._turns: deque[Connection] = deque()
        self._listeners: list[socket.socket] = []
        self._full: set[socket.socket] = set()  # listeners that are not listened to until the next sweep
        self._sweep_ns = self.now_ns + SWEEP_NS
        self.handlers: Mapping[FrameType, Callable[[Connection, Frame], None]] = {
            FrameType.HELLO: self._hello,
            FrameType.PING: self._ping,
            FrameType.MANIFEST: self._manifest,
            FrameType.VIEW: self._get_view,
            FrameType.MATCH: self._match,
            FrameType.UNPIN: self._unpin,
            FrameType.GET: self._get,
            FrameType.OFFER: self._offer,
            FrameType.WRITER_OPEN: self._writer_open,
            FrameType.WRITER_WRITE: self._writer_write,
            FrameType.WRITER_COMMIT: self._writer_commit,
            FrameType.WRITER_ABORT: self._writer_abort,
            FrameType.WAIT: self._wait,
            FrameType.DELETE: self._delete,
            FrameType.DROP: self._drop,
            FrameType.PREFETCH: self._prefetch,
            FrameType.CANCEL: self._cancel,
            FrameType.ADMIN: self._administer,
            FrameType.LOCAL: self._local,
            FrameType.REGION: self._region,
            FrameType.REGION_DROP: self._region_drop,
            FrameType.GET_INTO: self._get_into,
            FrameType.OFFER_FROM: self._offer_from,
            **copy_calls.CopyVerbs(self, serving=self._serving, check_fence=self._check_fence).handlers(),
            **rdma_calls.HANDLERS,
        }

    # --- set up and end ---------------------------------------------------------------------------------------------
    def serve(self, engine: Engine) -> None:
        """From now on requests are carried out by `engine`."""
        self._engine = engine
        self.quick_engine = None if self._is_stopping else engine
        for fileno in engine.filenos():
            self.loop.watch(fileno, self._engine_ready)

    def use_rdma(self, rdma: RdmaService) -> None:
        """From now on clients that come may have their memory read and written."""
        self.rdma = rdma
        self.loop.watch(rdma.fileno(), rdma.on_ready)

    def listen(self, listening: socket.socket) -> None:
        """Takes connections from a listening socket, which it owns from now on."""
        self._listeners.append(listening)
        self.loop.watch(listening.fileno(), lambda _: self._accept(listening))

    def add_admin(self, connected: socket.socket) -> Connection:
        """The supervisor's connection; ADMIN is legal there."""
        return self._add(connected, is_admin=True)

    def stop(self) -> None:
        """From now on new clients are refused by the kernel and new requests by an ERROR; those in progress go on."""
        self._is_stopping = True
        self.quick_engine = None
        self.is_draining = True
        for listening in self._listeners:
            self.loop.forget(listening.fileno())
            listening.close()
        self._listeners.clear()
        self._full.clear()

    @property
    def calls_active(self) -> int:
        """Requests in progress, and answers not sent yet; the supervisor's connection is left out."""
        return sum(1 for one in self._connections if not one.is_admin and not one.is_idle)

    def close(self) -> None:
        """Closes every connection."""
        self.stop()
        if self.copier is not None:
            self.copier.close()
        for connection in list(self._connections):
            connection.close()

    def set_view(self, epoch: int, view: bytes) -> None:
        """The view that VIEW is answered with; its epoch stands in every frame from now on."""
        self.epoch = epoch
        self._view = view

    def renew_permits(self, renewed: Callable[[Permit], Permit | None]) -> None:
        """What tokens allow has changed: connections may do what their token allows now, and close without one."""
        for connection in list(self._connections):
            if connection.permit is None:
                continue
            permit = renewed(connection.permit)
            if permit is None:
                self.metrics.denied[DeniedKind.REVOKED] += 1
                connection.give_up(Denied("the token was revoked; ask the operator for another one"))
            else:
                self._allow(connection, permit)

    # --- the loop ---------------------------------------------------------------------------------------------------
    def wait_ns(self) -> int | None:
        """How long the loop may wait for events."""
        if self._turns or self._engine_is_due or (self.rdma is not None and self.rdma.has_ended):
            return 0
        if self._timer_is_stale and self._engine is not None:
            timer_ns = self._engine.next_timer_ns()
            self._timer_ns = _NEVER_NS if timer_ns is None else timer_ns
            self._timer_is_stale = False
        due_ns = min(self._timer_ns, self._sweep_ns if self._connections or self._full else _NEVER_NS)
        if self._gathering:
            due_ns = min(due_ns, self._gathering[0][0])
        if self.copier is not None:
            due_ns = min(due_ns, self.copier.due_ns)
        return None if due_ns == _NEVER_NS else max(0, due_ns - self.clock())

    def woke(self) -> None:
        """The loop has waited, and handles events after this."""
        self.now_ns = self.clock()

    def turn(self) -> None:
        """After a round of events: the engine's work, then a turn to send for each connection, then what is overdue."""
        engine = self._engine
        while self._gathering and self._gathering[0][0] <= self.now_ns:
            self._gathering.popleft()[1]()
        copier = self.copier
        if copier is not None and copier.due_ns <= self.now_ns:
            copier.poll(self.now_ns)
        if engine is not None and (self._engine_is_due or self._timer_ns <= self.now_ns):
            self._engine_is_due = False
            self._timer_is_stale = True
            engine.poll(self.now_ns)
        if self.rdma is not None and self.rdma.has_ended:
            self.rdma.on_ready()
        turns = self._turns
        for _ in range(len(turns)):
            connection = turns.popleft()
            if connection.send_turn():
                turns.append(connection)
            else:
                connection.in_turn = False
        if self.now_ns >= self._sweep_ns:
            self._sweep()

    def want_send(self, connection: Connection) -> None:
        """The connection gets a turn to send."""
        if not connection.in_turn:
            connection.in_turn = True
            self._turns.append(connection)

    def wake_engine(self) -> None:
        """The engine has work, though none of its descriptors says so: it is polled in this turn."""
        self._engine_is_due = True

    def gather(self, hand_over: Callable[[], None]) -> None:
        """Calls `hand_over`, which gives the engine what waits for more of its kind, WRITE_WAVE_NS from now."""
        self._gathering.append((self.now_ns + WRITE_WAVE_NS, hand_over))

    def _engine_ready(self, _: int) -> None:
        self._engine_is_due = True

    def _sweep(self) -> None:
        """Closes connections that are overdue, ends calls and writers that are."""
        now_ns = self.now_ns
        self._sweep_ns = now_ns + SWEEP_NS
        self.metrics.calls_active = self.calls_active
        self._count_shared()
        busy = {one.client for one in self._connections if one.uses_memory}
        self._patience.look(others_wait=len(busy) > 1 and self.calls_wait())
        for connection in list(self._connections):
            call = connection.call
            if call is not None and call.deadline_ns <= now_ns:
                connection.guard(call.overdue)
            elif connection.due_ns <= now_ns:
                connection.expire()
            connection.watch_progress(self._patience)
        if self.rdma is not None:
            self.rdma.sweep(now_ns)
        while self._full:
            self.loop.change(self._full.pop().fileno(), READABLE)
        for writer in self._clients.expire_writers(now_ns):
            writer.doom(orphaned=True)

    def _count_shared(self) -> None:
        metrics, memory = self.metrics, self.shared_memory
        metrics.shared_bytes, metrics.shared_from_drive = memory.mapped_bytes, memory.from_drive_bytes
        metrics.shared_copied_in, metrics.shared_copied_out = memory.copied_in_bytes, memory.copied_out_bytes

    # --- connections ------------------------------------------------------------------------------------------------
    def _accept(self, listening: socket.socket) -> None:
        for _ in range(ACCEPTS_PER_EVENT_MAX):
            try:
                accepted, _peer = listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # out of descriptors, or the peer is gone already: the others go on, and the loop does not spin
                self.faults.warning("accept", f"a connection could not be accepted: {error}; see `ulimit -n`")
                self.loop.change(listening.fileno(), 0)
                self._full.add(listening)
                return
            self.metrics.accepted += 1
            connection = self._add(accepted)
            if len(self._connections) > CONNECTIONS_MAX:
                self.metrics.rejected += 1
                limit = f"the limit is {CONNECTIONS_MAX}"
                connection.give_up(Overloaded(f"{len(self._connections)} connections are open, {limit}: close some"))

    def _add(self, connected: socket.socket, *, is_admin: bool = False) -> Connection:
        connection = Connection(connected, self, due_ns=self.clock() + HELLO_WAIT_NS, is_admin=is_admin)
        self._connections.add(connection)
        self.metrics.connections = len(self._connections)
        return connection

    def closed(self, connection: Connection) -> None:
        """A connection is gone."""
        self._connections.discard(connection)
        self.metrics.connections = len(self._connections)
        self.metrics.shared_connections -= connection.shares_memory
        self.metrics.rdma_connections -= connection.uses_rdma
        client = connection.client
        if client is not None and self._clients.leave(client) and self._engine is not None:
            self._engine.client_gone(client.id)
            self._engine_is_due = True
            if self.rdma is not None:
                self.rdma.pairs.forget_client(client.id)
        if connection.is_admin:
            self._admin.supervisor_gone()

    # --- requests ---------------------------------------------------------------------------------------------------
    def place_writer_slices(self, connection: Connection, frame: Frame) -> Sequence[memoryview] | None:
        """Destination of a WRITER_WRITE's payload."""
        self.metrics.calls[Verb.WRITER] += 1
        if connection.permit is not None:
            connection.permit.require(Scope.WRITE, frame.type.name)
        self._engine_is_due = True
        call = WriterWriteCall(connection, _client_of(connection), frame, now_ns=self.now_ns)
        connection.call = call
        return call.place(self.now_ns)

    def _hello(self, connection: Connection, frame: Frame) -> None:
        hello = Hello.decode(frame.body)
        version = agreed_version(hello)
        permit = None if connection.is_admin else self._admission.admit(hello)
        offered = shm_calls.features_of(connection, FEATURES, self._identity.local)
        features = offered & Feature(hello.features & offered)
        client = self._clients.enter(own_client_id(hello.client_id, permit))
        connection.greeted(client, FlowClass(hello.flow), features)
        self.metrics.shared_connections += connection.shares_memory
        self.metrics.rdma_connections += connection.uses_rdma
        if permit is not None:
            self._allow(connection, permit)
        connection.due_ns = self.now_ns + IDLE_WAIT_NS
        connection.answer(
            Welcome(
                version=version,
                features=features,
                node_id=self._identity.node_id,
                boot_id=self._identity.boot_id,
                epoch=self.epoch,
                body_bytes_max=FRAME_BODY_BYTES_MAX,
                payload_bytes_max=FRAME_PAYLOAD_BYTES_MAX,
                batch_items_max=BATCH_ITEMS_MAX,
                inline_put_bytes_max=INLINE_PUT_BYTES_MAX,
                put_credit_bytes=PUT_WINDOW_BYTES,
            )
        )

    def _allow(self, connection: Connection, permit: Permit) -> None:
        """From now on the connection may do what is granted, among its tenant's namespaces."""
        connection.allow(permit, guarded(self.handlers, permit, partial(self._count_denied, DeniedKind.SCOPE)))

    def _count_denied(self, kind: DeniedKind) -> None:
        self.metrics.denied[kind] += 1

    def _ping(self, connection: Connection, _: Frame) -> None:
        connection.answer(Pong())

    def _get_view(self, connection: Connection, frame: Frame) -> None:
        known = ViewRequest.decode(frame.body).known_epoch
        connection.answer(ViewReply(epoch=self.epoch, view=b"" if known == self.epoch else self._view))

    def _get(self, connection: Connection, frame: Frame) -> None:
        if start_get(connection, frame.body, self._serving(connection), now_ns=self.now_ns):
            self._engine_is_due = True

    def _match(self, connection: Connection, frame: Frame) -> None:
        lookups.match(connection, frame.body, self._serving(connection), self.now_ns, self._groups)
        self._timer_is_stale = True  # a pin runs out some time

    def _unpin(self, connection: Connection, frame: Frame) -> None:
        lookups.unpin(connection, frame.body, self._serving(connection))
        self._engine_is_due = True

    def _manifest(self, connection: Connection, frame: Frame) -> None:
        lookups.manifest(connection, frame.body, self._serving(connection))
        self._engine_is_due = True

    def _wait(self, connection: Connection, frame: Frame) -> None:
        lookups.wait(connection, frame.body, self._serving(connection), self.now_ns)
        self._engine_is_due = True

    def _delete(self, connection: Connection, frame: Frame) -> None:
        self._check_epoch(frame)
        self._check_fence()
        lookups.delete(connection, frame.body, self._serving(connection), self.now_ns)
        self._engine_is_due = True

    def _drop(self, connection: Connection, frame: Frame) -> None:
        self._check_epoch(frame)
        self._check_fence()
        lookups.drop(connection, frame.body, self._serving(connection), self.now_ns)
        self._engine_is_due = True

    def _prefetch(self, connection: Connection, frame: Frame) -> None:
        lookups.prefetch(connection, frame.body, self._serving(connection), self.now_ns)
        self._engine_is_due = True

    def _offer(self, connection: Connection, frame: Frame) -> None:
        self._check_epoch(frame)
        start_offer(
            connection,
            Offer.decode(frame.body),
            frame.payload,
            self._serving(connection),
            refusal=self._put_refusal(connection),
            now_ns=self.now_ns,
        )
        self._engine_is_due = True

    def _local(self, connection: Connection, _: Frame) -> None:
        connection.answer(self._identity.local)

    def _region(self, connection: Connection, frame: Frame) -> None:
        shm_calls.add_region(connection, frame.body)
        self._count_shared()

    def _region_drop(self, connection: Connection, frame: Frame) -> None:
        drop_regions(connection, frame.body)
        self._count_shared()

    def _get_into(self, connection: Connection, frame: Frame) -> None:
        if start_get_into(connection, frame.body, self._serving(connection), now_ns=self.now_ns):
            self._engine_is_due = True

    def _offer_from(self, connection: Connection, frame: Frame) -> None:
        self._check_epoch(frame)
        start_offer_from(
            connection,
            frame.body,
            self._serving(connection),
            refusal=self._put_refusal(connection),
            now_ns=self.now_ns,
        )
        self._engine_is_due = True

    def _writer_open(self, connection: Connection, frame: Frame) -> None:
        self._check_epoch(frame)
        self.metrics.calls[Verb.WRITER] += 1
        client, refusal = _client_of(connection), self._put_refusal(connection)
        open_writers(connection, frame.body, client, self._serving(connection), refusal=refusal, now_ns=self.now_ns)
        self._engine_is_due = True

    def _writer_write(self, connection: Connection, frame: Frame) -> None:
        call = connection.call
        if not isinstance(call, WriterWriteCall):
            raise InvalidRequest("WRITER_WRITE without payload: send at least one byte")
        call.arrived(self.now_ns)
        self._engine_is_due = True

    def _writer_commit(self, connection: Connection, frame: Frame) -> None:
        self.metrics.calls[Verb.WRITER] += 1
        commit = WriterCommit.decode(frame.body)
        call = WriterCommitCall(connection, _client_of(connection), commit, now_ns=self.now_ns)
        connection.call = call
        if self.now_ns >= self.fenced_from_ns:
            call.refuse_all(Refused(RefusedReason.FENCED, self._words_of_fence()))
        else:
            call.start()
        self._engine_is_due = True

    def _writer_abort(self, connection: Connection, frame: Frame) -> None:
        connection.answer(abort_writers(_client_of(connection), WriterAbort.decode(frame.body)))
        self._engine_is_due = True

    def _cancel(self, connection: Connection, _: Frame) -> None:
        if connection.call is not None:
            self.metrics.cancelled += 1
            connection.call.cancel()
            self._engine_is_due = True

    def _administer(self, connection: Connection, frame: Frame) -> None:
        if not connection.is_admin:
            raise Denied("ADMIN is for the node's supervisor only: use `kvstore` or gRPC")
        request = Admin.decode(frame.body)
        arguments = unpack_plain(request.arguments, what=f"arguments of {request.verb}")
        connection.answer(AdminReply(value=self._admin.carry_out(request.verb, arguments)))
        self._engine_is_due = True

    def _serving(self, connection: Connection) -> Engine:
        if self._is_stopping:
            raise Unavailable(f"node {self._identity.node_id} is shutting down: ask another, or again shortly")
        if self._engine is None:
            raise Unavailable(f"node {self._identity.node_id} is still reading its drives: try again shortly")
        permit = connection.permit
        return self._engine if permit is None or permit.is_peer else self._engine_of(permit.tenant, self._engine)

    def _engine_of(self, tenant: str, engine: Engine) -> TenantEngine:
        """The engine with the namespaces of one tenant only."""
        found = self._tenant_engines.get(tenant)
        if found is None:
            on_foreign = partial(self._count_denied, DeniedKind.FOREIGN_NAMESPACE)
            is_full = partial(self._has_all_namespaces, tenant)
            found = TenantEngine(engine, tenant, on_foreign=on_foreign, is_full=is_full)
            self._tenant_engines[tenant] = found
        return found

    def _has_all_namespaces(self, tenant: str) -> bool:
        is_full = self.namespace_count(tenant) >= NAMESPACES_PER_TENANT_MAX
        return is_full or self.manifests_share(tenant) >= MANIFESTS_SHARE_TENANT

    def _check_epoch(self, frame: Frame) -> None:
        if frame.epoch and frame.epoch < self.epoch:
            raise StaleView(
                f"this {frame.type.name} was planned by view {frame.epoch}, the node has {self.epoch}: ask for the view"
            )

    def _check_fence(self) -> None:
        if self.now_ns >= self.fenced_from_ns:
            raise Unavailable(self._words_of_fence())

    def _words_of_fence(self) -> str:
        return (
            f"node {self._identity.node_id} is fenced: its lease in the cluster store is not renewed, "
            "so it serves reads only; is the store reachable from it?"
        )

    def _put_refusal(self, connection: Connection) -> Refused | None:
        if connection.permit is not None and Scope.WRITE not in connection.permit.scopes:
            self.metrics.denied[DeniedKind.SCOPE] += 1
            return Refused(RefusedReason.DENIED, f"the token of tenant {connection.permit.tenant!r} may not write")
        if self.is_draining:
            return Refused(RefusedReason.DRAINING, f"node {self._identity.node_id} is draining: write to another")
        if self.now_ns >= self.fenced_from_ns:
            return Refused(RefusedReason.FENCED, self._words_of_fence())
        return None


def _client_of(connection: Connection) -> Client:
    assert connection.client is not None, "the session admits no request before HELLO"
    return connection.client
