"""One target as this process sees it: its addresses, its connections, its health. No waiting in here.

The lock of whoever drives the calls (threads share one, an event loop needs none) guards every method that touches the
lists of connections: `take`, `give_back`, `drop_idle`, `disown`, `interrupt`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from threading import get_ident

from kvstore.cluster.view import TargetId
from kvstore.errors import Unavailable
from kvstore.limits import ADDRESS_REST_NS, ADDRESS_REST_NS_MAX, DOWN_REST_NS, NAMESPACES_MAX, ORPHAN_NS_MIN
from kvstore.types.flow import FlowClass
from kvstore.wire.messages import ID_BYTES, Feature, Welcome
from kvstore_client.connection import Connection
from kvstore_client.options import ClientOptions
from kvstore_client.orphans import are_in_no_call
from kvstore_client.rdma import RdmaWay
from kvstore_client.retry import BreakerState, CircuitBreaker
from kvstore_client.shm_ways import LocalWay
from kvstore_client.stats import Counters

_RATE_WEIGHT = 0.2  # of the newest sample in the moving average of the read rate
_NO_REST = (0, 0)
RATE_BYTES_MIN = 256 * 1024  # smaller reads measure the round trip, not the rate


class TargetLink:
    """Connections to one target, at most `connections_per_target` in use, idle ones kept for the next call.

    Attributes:
        id: Of the target; "" for a node that is only asked for the view.
        client_id: 16 random bytes of this process; its pins and writers belong to it.
        boot_id: Of the node as last seen; zeros before the first WELCOME. With another one, pins and writers are gone.
        breaker: Whether calls may try at all.
        view_epoch: Of the view that this link's calls are planned with; 0 when they need none.
        local: The way to it on the same host.
        rdma: The way to it by RDMA.
        read_bytes_per_second: Moving average of large reads; 0.0 before the first.
        in_flight_bytes: Asked for by reads in progress, about.
        node_id: Who must answer at its addresses; "" is anybody.
    """

    __slots__ = (
        "_addresses",
        "_counters",
        "_idle",
        "_in_use",
        "_is_drop_due",
        "_next_address",
        "_on_epoch",
        "_options",
        "_pid",
        "_rests",
        "_told",
        "_unanswered_until_ns",
        "boot_id",
        "breaker",
        "client_id",
        "id",
        "in_flight_bytes",
        "local",
        "node_id",
        "rdma",
        "read_bytes_per_second",
        "token",
        "view_epoch",
    )

    def __init__(
        self,
        target: TargetId,
        addresses: tuple[str, ...],
        *,
        client_id: bytes,
        options: ClientOptions,
        counters: Counters,
        on_epoch: Callable[[int], None],
        local: LocalWay,
        rdma: RdmaWay,
    ) -> None:
        self.id = target
        self.client_id = client_id
        self.token = options.token
        self.local = local
        self.rdma = rdma
        self.view_epoch = 0
        self.boot_id = bytes(ID_BYTES)
        self.breaker = CircuitBreaker()
        self.read_bytes_per_second = 0.0
        self.in_flight_bytes = 0
        self.node_id = ""
        self._addresses = addresses
        self._next_address = 0
        self._options = options
        self._counters = counters
        self._on_epoch = on_epoch
        self._idle: list[Connection] = []
        self._in_use: dict[Connection, int] = {}  # and the thread that has taken it
        self._is_drop_due = False
        self._pid = os.getpid()
        self._rests: dict[str, tuple[int, int]] = {}  # addresses that failed: left alone until when, for how long
        self._told: set[bytes] = set()
        self._unanswered_until_ns = 0

    @property
    def addresses(self) -> tuple[str, ...]:
        """ "host:port" of each way to it."""
        return self._addresses

    def move(self, addresses: tuple[str, ...], node_id: str) -> None:
        """What the view says. When it has changed, idle connections are closed and failures forgotten."""
        if addresses != self._addresses or node_id != self.node_id:
            self._addresses = addresses
            self.node_id = node_id
            self.breaker = CircuitBreaker()
            self._rests.clear()
            self._unanswered_until_ns = 0
            self.drop_idle_soon()

    def is_unanswered(self, now_ns: int) -> bool:
        """Whether a target that is down by the view was asked a while ago, and did not answer."""
        return now_ns < self._unanswered_until_ns

    def was_unanswered(self, now_ns: int) -> None:
        """A target that is down by the view was asked as the last resort, and did not answer."""
        self._unanswered_until_ns = now_ns + DOWN_REST_NS
        self.drop_idle()

    def take(self, flow: FlowClass, now_ns: int) -> Connection | None:
        """A connection of that class for one call, open or to be opened; None when all are in use."""
        if len(self._in_use) >= self._options.connections_per_target:
            return None
        if self._is_drop_due or self.breaker.state is BreakerState.HALF_OPEN:
            self.drop_idle()  # a probe is a new connection: HELLO tells at once whether anybody is there
        found = self._idle_for(flow, now_ns)
        if found is None:
            found = Connection(self._next_way(now_ns), greeting=self, flow=flow)
        elif self._idle:
            # never the last one: with it the node would let go of this client's pins and writers
            self._close_aged(now_ns)
        found.asked_ns = now_ns  # until its call begins: one that was never used is not silent since time 0
        self._in_use[found] = get_ident()
        return found

    def uses(self, connection: Connection) -> bool:
        """Whether a call of this thread has it now."""
        return self._in_use.get(connection) == get_ident()

    def has_room(self) -> bool:
        """Whether another connection may be taken."""
        return len(self._in_use) < self._options.connections_per_target

    def _idle_for(self, flow: FlowClass, now_ns: int) -> Connection | None:
        """An idle connection of that class. With several addresses the one that rested longest, and none as long as
        there are addresses without one: all rails are used, also one that is back."""
        same = [one for one in self._idle if one.flow is flow]
        if not same:
            return None
        found = same[-1]
        if len(self._addresses) > 1:
            used = {one.address for one in (*same, *self._in_use)}
            has_room = len(self._in_use) + 1 < self._options.connections_per_target
            if has_room and any(one not in used for one in self._ways(now_ns)):
                return None
            found = same[0]
        self._idle.remove(found)
        return found

    def _ways(self, now_ns: int) -> list[str]:
        """The addresses that did not fail lately."""
        return [one for one in self._addresses if self._rests.get(one, _NO_REST)[0] <= now_ns]

    def _next_way(self, now_ns: int) -> str:
        """The address for a new connection: those that did not fail lately in turn, else the one that did first."""
        ways = self._ways(now_ns)
        if not ways:
            return min(self._addresses, key=lambda one: self._rests.get(one, _NO_REST))
        used = self.used_addresses()
        self._next_address += 1
        start = self._next_address % len(ways)
        return min((*ways[start:], *ways[:start]), key=used.count)

    def silent_ns(self, now_ns: int) -> int:
        """For how long every connection in use has heard nothing; 0 when one has, or there is room for another one."""
        if len(self._in_use) < self._options.connections_per_target or any(one.has_heard for one in self._in_use):
            return 0
        return min(now_ns - one.asked_ns for one in self._in_use)

    def check_word(self, job_patience_ns: int, now_ns: int) -> None:
        """Raises Unavailable when those who wait for this target have waited longer than a job wants to."""
        if job_patience_ns and self.silent_ns(now_ns) >= job_patience_ns:
            raise Unavailable(
                f"all {len(self._in_use)} connections to target {self.id} have heard nothing for "
                f"{self.silent_ns(now_ns) // 1_000_000} ms; its breaker opens"
            )

    def leave_address(self, address: str, now_ns: int) -> bool:
        """A connection by this address has failed: it is left alone for a while, if there is another one to go by, and
        longer each time, since to try it may cost a call BREAKER_PROBE_NS.

        Returns:
            False when there is none: it is the target that has failed.
        """
        if len(self._addresses) < 2:
            return False
        length_ns = min(2 * self._rests.get(address, _NO_REST)[1] or ADDRESS_REST_NS, ADDRESS_REST_NS_MAX)
        self._rests[address] = (now_ns + length_ns, length_ns)
        for one in [one for one in self._idle if one.address == address]:
            self._idle.remove(one)
            one.close()
        return bool(self._ways(now_ns))

    def has_another_way(self, address: str, now_ns: int) -> bool:
        """Whether it can be reached without that address, as far as is known."""
        return any(one != address for one in self._ways(now_ns))

    def used_addresses(self) -> list[str]:
        """Address of each connection."""
        return [one.address for one in (*self._idle, *self._in_use)]

    def rests(self, address: str) -> bool:
        """Whether the last connection by that address failed."""
        return address in self._rests

    def take_idle(self, flow: FlowClass, now_ns: int) -> Connection | None:
        """An open connection of that class for a read the straight way; None when `take` has something to decide, as
        it has with several addresses: which is the next one, and when to try another."""
        idle = self._idle
        if not idle or self._is_drop_due or len(self._in_use) >= self._options.connections_per_target:
            return None
        if len(self._addresses) > 1:
            return None
        found = self._last_idle(flow)
        if found is None or not found.is_idle or not found.ends_with_data:
            return None
        idle.remove(found)
        if idle:
            self._close_aged(now_ns)
        found.asked_ns = now_ns
        self._in_use[found] = get_ident()
        return found

    def take_ready(self, flow: FlowClass, now_ns: int) -> Connection | None:
        """As `take_idle`, but None also when there are connections to close first. Give it back with `put_ready`."""
        idle = self._idle
        if (
            not idle
            or self._is_drop_due
            or self.breaker.state is not BreakerState.CLOSED
            or len(self._in_use) >= self._options.connections_per_target
            or len(self._addresses) > 1
        ):
            return None
        found = idle[-1]
        if found.flow is not flow:
            other = self._last_idle(flow)
            if other is None:
                return None
            found = other
        if found.quick is None or found.is_abandoned:
            return None
        if len(idle) > 1 and now_ns - idle[0].idle_since_ns > self._options.idle_ns:
            return None
        idle.remove(found)
        found.asked_ns = now_ns
        self._in_use[found] = get_ident()
        return found

    def _last_idle(self, flow: FlowClass) -> Connection | None:
        """The idle connection of that class that was used last: one of another class may have been since."""
        for one in reversed(self._idle):
            if one.flow is flow:
                return one
        return None

    def put_ready(self, connection: Connection) -> bool:
        """The call on a connection of `take_ready` went well; False, and nothing done, when it is for `give_back`."""
        if self._is_drop_due or len(self._idle) >= self._options.connections_per_target:
            return False
        self._in_use.pop(connection, None)
        self._idle.append(connection)
        self.breaker.succeeded()
        return True

    def give_back(self, connection: Connection, now_ns: int) -> None:
        """The call is over. The connection is kept when the next call can use it."""
        self._in_use.pop(connection, None)
        if self._is_drop_due:
            self.drop_idle()
        if not (connection.is_idle or connection.is_abandoned):
            connection.close()
            return
        connection.idle_since_ns = now_ns
        connection.is_fresh = False
        self._idle.append(connection)
        if len(self._idle) <= self._options.connections_per_target:
            return
        same = [kept for kept in self._idle if kept.flow is connection.flow]
        if len(same) > self._options.connections_per_target:
            self._idle.remove(same[0])
            same[0].close()

    def _close_aged(self, now_ns: int) -> None:
        for connection in [one for one in self._idle if now_ns - one.idle_since_ns > self._options.idle_ns]:
            self._idle.remove(connection)
            connection.close()

    def take_back(self, now_ns: int) -> bool:
        """Closes connections that threads have taken and cannot give back any more; whether there were any.

        See `orphans`. Only those that were taken a while ago are looked at.
        """
        old = [one for one in self._in_use if now_ns - one.asked_ns >= ORPHAN_NS_MIN]
        gone = are_in_no_call({self._in_use[one] for one in old}) if old else set()
        orphans = [one for one in old if self._in_use[one] in gone]
        for one in orphans:
            self._in_use.pop(one, None)
            one.close()
        return bool(orphans)

    def drop_idle(self) -> None:
        """Closes idle connections: their node is gone."""
        self._is_drop_due = False
        while self._idle:
            self._idle.pop().close()

    def drop_idle_soon(self) -> None:
        """As `drop_idle`, for those who do not hold the lock: the next `take` or `give_back` does it."""
        self._is_drop_due = True

    def disown(self) -> None:
        """In a forked child: closes its copies of the parent's sockets, which leaves the connections as they are."""
        self.drop_idle()
        for connection in self._in_use:
            connection.close()

    def interrupt(self) -> None:
        """Closes idle connections and wakes the calls in progress, which fail as Unavailable."""
        self.drop_idle()
        for connection in list(self._in_use):
            connection.interrupt()

    def note_read(self, length_bytes: int, elapsed_ns: int) -> None:
        """Measures the rate of reads."""
        if length_bytes >= RATE_BYTES_MIN and elapsed_ns > 0:
            rate = length_bytes * 1e9 / elapsed_ns
            known = self.read_bytes_per_second
            self.read_bytes_per_second = known + _RATE_WEIGHT * (rate - known) if known else rate

    @property
    def features(self) -> Feature:
        """Greeting: what the ways need that the caller allows."""
        shared = Feature.SHARED_MEMORY if self.local.is_wanted else Feature.NONE
        return shared | (Feature.RDMA if self.rdma.is_wanted else Feature.NONE)

    def words_of_way(self) -> str:
        """How payload goes, for people: "shm", "rdma" with the port, or "tcp" and why.

        "none" and why where one way is required and cannot be had; "" where that is not known yet.
        """
        if not self.local.path and self.rdma.port is not None:
            return ": ".join(filter(None, (f"rdma {self.rdma.port.name}", self.rdma.reason)))
        if need := self.words_of_need():
            return f"none: {need.removeprefix('; ')}"
        if self.rdma.is_required or not self.local.is_known:
            return ""
        return "; ".join(filter(None, (self.local.words(), self.rdma.reason)))

    def is_news(self, namespace: bytes) -> bool:
        """Whether the node was not told yet how many copies a namespace wants, as far as is known."""
        return namespace not in self._told

    def was_told(self, namespace: bytes) -> None:
        """The node knows how many copies a namespace wants."""
        if len(self._told) >= NAMESPACES_MAX:
            self._told.clear()
        self._told.add(namespace)

    def words_of_need(self) -> str:
        """What to add to the message of a failure, where one way is required and cannot be had: "" else."""
        return self.local.words_of_need() + self.rdma.words_of_need()

    def seen_boot_id(self) -> bytes:
        """Greeting: what the node was when last seen."""
        return self.boot_id

    def check(self, welcome: Welcome, address: str) -> None:
        """Greeting: raises Unavailable when another node answers than the view says: it has none of our keys."""
        if self.node_id and welcome.node_id != self.node_id:
            raise Unavailable(
                f"node {welcome.node_id} answers at {address}, where target {self.id} of node {self.node_id} was; "
                "the view is asked for again"
            )
        self._rests.pop(address, None)

    def welcomed(self, welcome: Welcome) -> None:
        """Greeting: a connection is open. Another boot id means that the node has forgotten pins and writers."""
        self._counters.connections_opened += 1
        if welcome.boot_id != self.boot_id:
            if self.boot_id != bytes(ID_BYTES):
                self._counters.restarts_noticed += 1
                self.drop_idle_soon()
                self._told.clear()
            self.boot_id = welcome.boot_id
        self._on_epoch(welcome.epoch)

    def saw_epoch(self, epoch: int) -> None:
        """Greeting: the node's view had this epoch."""
        self._on_epoch(epoch)
