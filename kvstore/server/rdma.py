"""RDMA of one worker: its port, the queue pairs of its clients, and the memory of ours that they read and write."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.device.host_files import HostFiles
from kvstore.errors import InvalidRequest, KVStoreError, Unavailable
from kvstore.server.launch import RdmaMode
from kvstore.telemetry.metrics import RdmaMetrics
from kvstore.transport.rdma.backends import open_verbs
from kvstore.transport.rdma.marks import lane_of
from kvstore.transport.rdma.node_channel import RdmaNodeChannel
from kvstore.transport.rdma.pairs import PairTable
from kvstore.transport.rdma.rail import Pair, Rail, open_rail
from kvstore.transport.rdma.regions import explained
from kvstore.transport.rdma.staging import Staging
from kvstore.transport.rdma.verbs import Access, VerbsFailure
from kvstore.transport.rdma_choice import choose_port
from kvstore.transport.rdma_ports import read_ports
from kvstore.transport.tcp_node import OtherPayload
from kvstore.wire.body import MemoryBudget

if TYPE_CHECKING:
    from kvstore.server.connection import Connection

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaWish:
    """What the settings say.

    Attributes:
        mode: whether.
        port, gid: as of `rdma_choice.choose_port`; "" lets the rule choose.
        hosts: addresses that the worker listens on.
    """

    mode: RdmaMode
    port: str = ""
    gid: str = ""
    hosts: tuple[str, ...] = ()


class RdmaService:
    """See the module. The worker's loop calls `on_ready` when `fileno()` is readable, and `sweep` now and then.

    Attributes:
        pairs: of all clients.
        metrics, clock: as given.
    """

    def __init__(self, rail: Rail, metrics: RdmaMetrics, clock: Callable[[], int]) -> None:
        """
        Args:
            rail: open, for a node; its end is ours from now on.
            metrics: filled here and by the channels.
            clock: monotonic, of the turn.
        """
        self.pairs = PairTable(rail)
        self.metrics = metrics
        self._rail = rail
        self._staging = Staging(rail)
        self.clock = clock
        self._is_gone = False

    def fileno(self) -> int:
        """For select or epoll."""
        return self._rail.fileno()

    def register(self, arenas: Sequence[memoryview]) -> None:
        """Memory that payload goes out of and into, for good. Raises Unavailable, which names the limit and the fix."""
        done_bytes = 0
        for arena in arenas:
            try:
                self._staging.add(arena)
            except VerbsFailure as failure:
                raise explained(failure, len(arena), done_bytes) from None
            done_bytes += len(arena)

    def channel(
        self, accepted: socket.socket, other: OtherPayload, *, body_bytes_max: int, budget: MemoryBudget | None
    ) -> RdmaNodeChannel:
        """The channel of an accepted TCP socket."""
        return RdmaNodeChannel(
            accepted,
            other,
            staging=self._staging,
            metrics=self.metrics,
            body_bytes_max=body_bytes_max,
            budget=budget,
        )

    def pair_of(self, connection: Connection) -> Pair | None:
        """What the payload of a connection's calls travels on now."""
        if self._is_gone:
            return None
        assert connection.client is not None, "the session admits no request before HELLO"
        return self.pairs.ready(connection.client.id, lane_of(connection.flow), self.clock())

    def check(self) -> None:
        """Raises Unavailable once the device is gone."""
        if self._is_gone:
            raise Unavailable("the RDMA device is gone; payload goes by TCP until the worker is started again")

    @property
    def has_ended(self) -> bool:
        """Some transfers have ended of which the descriptor does not tell: call `on_ready`."""
        return self._rail.has_ended

    def on_ready(self, _: int = 0) -> None:
        """Tells how transfers ended."""
        try:
            self._rail.on_readable()
        except VerbsFailure as failure:
            self._fail(failure)

    def sweep(self, now_ns: int) -> None:
        """Closes what nobody uses, and tells the metrics."""
        self.pairs.sweep(now_ns)
        metrics = self.metrics
        metrics.pairs = len(self.pairs)
        metrics.pairs_closing = self._rail.dying_count
        metrics.pairs_broken = self.pairs.broken
        metrics.mtu_bytes = self.pairs.mtu_bytes

    def close(self) -> None:
        """Ends all; no connection may be open. Idempotent.

        Where the device does not let go of our memory in time, or is gone and would refuse all of it, memory and device
        are left to the end of the process.
        """
        self.pairs.close()
        if self._rail.close_pairs() and not self._is_gone:
            self._staging.close()
            self._rail.close()

    def _fail(self, failure: VerbsFailure) -> None:
        if not self._is_gone:
            self._is_gone = True
            self.metrics.choice = f"TCP: the RDMA device is gone ({failure})"
            log.error("the RDMA device is gone, payload goes by TCP from now on: %s", failure)
            self.pairs.close()
            self._rail.lose_device()


class Holding:
    """A connection as its channel sees it (`node_channel.Holder`)."""

    __slots__ = ("_connection", "_service", "guard", "moved", "now_ns")

    def __init__(self, service: RdmaService, connection: Connection) -> None:
        self._service = service
        self._connection = connection
        self.moved = connection.request_send
        self.guard = connection.guard
        self.now_ns = service.clock

    def pair(self) -> Pair | None:
        """See `Holder.pair`."""
        return self._service.pair_of(self._connection)


def start_rdma(
    wish: RdmaWish, arenas: Sequence[memoryview], metrics: RdmaMetrics, clock: Callable[[], int]
) -> RdmaService | None:
    """Takes a port into use as the settings say; None where TCP is to be used, which is said once.

    Args:
        arenas: all memory that payload goes out of and into.

    Raises:
        Unavailable, InvalidRequest: RDMA is required, and cannot be had; the text says why and what to do.
    """
    if wish.mode is RdmaMode.OFF:
        metrics.choice = "TCP: as set"
        return None
    try:
        choice = choose_port(read_ports(HostFiles()), wanted_port=wish.port, wanted_gid=wish.gid, hosts=wish.hosts)
        # nobody may do anything in the memory of a node
        service = RdmaService(open_rail(open_verbs(), choice, remote_access=Access.LOCAL_READ), metrics, clock)
        try:
            service.register(arenas)
        except KVStoreError:
            service.close()
            raise
    except KVStoreError as error:
        if wish.mode is RdmaMode.REQUIRED:
            kind = InvalidRequest if isinstance(error, InvalidRequest) else Unavailable
            raise kind(f"transport rdma cannot be had: {error}; use transport auto to fall back to TCP") from None
        metrics.fallbacks += 1
        metrics.choice = f"TCP: {error}"
        log.info("payload goes by TCP: %s", error)
        return None
    metrics.choice = f"RDMA {choice.reason}"
    log.info("RDMA: %s", choice.reason)
    return service
