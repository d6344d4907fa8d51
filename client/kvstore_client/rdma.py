"""RDMA of this process: ports that workers are reached by, registered memory of the caller, lanes to each worker.

The client posts nothing: its device answers a node's READs and takes its WRITEs while a queue pair is there. Taking the
pair down is what makes memory quiet, at once, whatever the node still believes.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Final

from kvstore.device.host_files import HostFiles
from kvstore.errors import Closed, KVStoreError, Unavailable
from kvstore.limits import PAIR_IDLE_NS, RDMA_TRANSFER_BYTES_MAX
from kvstore.transport.rdma.backends import open_verbs
from kvstore.transport.rdma.client_lane import ClientLane
from kvstore.transport.rdma.link import LinkState
from kvstore.transport.rdma.marks import Lane
from kvstore.transport.rdma.rail import Rail, open_rail
from kvstore.transport.rdma.regions import RegionCache
from kvstore.transport.rdma.verbs import Access
from kvstore.transport.rdma_choice import choose_port
from kvstore.transport.rdma_ports import read_ports
from kvstore_client.stats import Counters

log = logging.getLogger(__name__)

REMOTE: Final = Access.REMOTE_READ | Access.REMOTE_WRITE
PORT_VARIABLE: Final = "KVSTORE_CLIENT_RDMA_PORT"
GID_VARIABLE: Final = "KVSTORE_CLIENT_RDMA_GID"
"""Environment variables that choose the port ("mlx5_0:1") and GID (index or address) in place of the rule."""


class RdmaPort:
    """One local port, open. Its rail is not thread-safe: whoever touches it, or a lane, holds `lock`.

    Attributes:
        name: "mlx5_0:1".
        cache: the caller's memory that is registered with it. Thread-safe.
    """

    def __init__(self, rail: Rail, name: str) -> None:
        self.name = name
        self.rail = rail
        self.lock = threading.RLock()
        self.lanes: list[WorkerLane] = []
        self.cache = RegionCache(
            lambda address, length: rail.register(address, length, Access.LOCAL_WRITE | REMOTE),
            region_bytes_max=min(rail.device.limits.region_bytes_max, RDMA_TRANSFER_BYTES_MAX),
            on_close=lambda ids: None,
        )
        self._users = 0
        self._is_closing = False
        self._is_closed = False
        _keep_in_children(self)

    def begin_use(self) -> None:
        """The port stays open until `end_use`. Raises Closed."""
        with self.lock:
            if self._is_closing:
                raise Closed("the client is closed; make a new one")
            self._users += 1

    def end_use(self) -> None:
        """A call has ended, and holds no memory of the port's any more."""
        with self.lock:
            self._users -= 1
            self._close_if_unused()

    def close_idle(self, now_ns: int, *, idle_ns: int = PAIR_IDLE_NS) -> None:
        """Takes down queue pairs that nobody uses."""
        with self.lock:
            for lane in self.lanes:
                if lane.is_ready and not lane.users and now_ns - lane.used_ns >= idle_ns:
                    lane.end.retire()

    def close(self) -> None:
        """Takes down all queue pairs now; memory and device when the last call that uses them has ended."""
        with self.lock:
            self._is_closing = True
            for lane in self.lanes:
                lane.end.close()
            self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._is_closing and not self._users and not self._is_closed:
            self._is_closed = True
            if self.rail.close_pairs():  # else memory and device are left to the end of the process
                self.cache.close()
                self.rail.close()


_open_ports: Final[weakref.WeakSet[RdmaPort]] = weakref.WeakSet()


def _keep_in_children(port: RdmaPort) -> None:
    """A forked child shares the parent's device: what it frees there, the parent loses. So it never frees any of it."""
    _watch_forks()
    _open_ports.add(port)


@functools.cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_make_immortal)


def _make_immortal() -> None:
    for port in list(_open_ports):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(port))
    _open_ports.clear()


class WorkerLane:
    """One lane to one worker, shared by the calls of this process. The port's lock guards it.

    Attributes:
        end: our end.
        users: calls that have named places for it and have not ended.
        used_ns: when the last one began.
    """

    __slots__ = ("end", "used_ns", "users")

    def __init__(self, end: ClientLane) -> None:
        self.end = end
        self.users = 0
        self.used_ns = 0

    @property
    def is_ready(self) -> bool:
        """Calls may name places."""
        return self.end.is_ready

    @property
    def is_being_made(self) -> bool:
        """Another call's handshake is under way."""
        return self.end.link.state is LinkState.MAKING


def open_port(host: str) -> RdmaPort:
    """The port that has `host`, an address of ours, or else the one that the rule chooses.

    Raises:
        Unavailable, InvalidRequest: No port can be used, or no library; the text says why and what to do.
    """
    choice = choose_port(
        read_ports(HostFiles()),
        wanted_port=os.environ.get(PORT_VARIABLE, ""),
        wanted_gid=os.environ.get(GID_VARIABLE, ""),
        hosts=(host,) if host else (),
    )
    return RdmaPort(open_rail(open_verbs(), choice, remote_access=REMOTE), choice.port.name)


class Opening:
    """A port that is being opened, or was, or could not be.

    Attributes:
        port: None until it is open.
    """

    __slots__ = ("_has_ended", "_reason", "port")

    def __init__(self) -> None:
        self.port: RdmaPort | None = None
        self._reason = ""
        self._has_ended = threading.Event()

    def end(self, port: RdmaPort | None, reason: str) -> None:
        """It is open; or not, for a reason."""
        self.port, self._reason = port, reason
        self._has_ended.set()

    def result(self) -> RdmaPort:
        """Waits until it is open. Raises Unavailable: it cannot be."""
        self._has_ended.wait()
        if self.port is None:
            raise Unavailable(self._reason)
        return self.port


class RdmaPorts:
    """The ports of one client in one process, each opened when a worker is first reached from its address.

    Attributes:
        reason: why there is none, for people; "" while none was needed.
        is_used: some worker has agreed on it.
    """

    def __init__(self, counters: Counters, opener: Callable[[str], RdmaPort] = open_port) -> None:
        self._counters = counters
        self._opener = opener
        self._lock = threading.Lock()
        self._by_host: dict[str, Opening] = {}
        self._is_closed = False
        self.reason = ""
        self.is_used = False

    def port_for(self, host: str) -> RdmaPort:
        """The port for connections from this address of ours. Opened by the first who asks; others wait for him.

        Raises:
            Unavailable: There is none, with the reason.
            Closed: The client is closed.
        """
        with self._lock:
            if self._is_closed:
                raise Closed("the client is closed; make a new one")
            opening = self._by_host.get(host)
            is_ours = opening is None
            if opening is None:
                opening = self._by_host[host] = Opening()
        if is_ours:
            self._open(host, opening)
        return opening.result()

    def open_with(self, opener: Callable[[str], RdmaPort]) -> None:
        """From now on ports are opened so: as a test's or a benchmark's devices are."""
        self._opener = opener

    def _open(self, host: str, opening: Opening) -> None:
        """Opening a device takes a while, so the lock is not held."""
        try:
            opened = self._opener(host)
        except KVStoreError as error:
            with self._lock:
                self._note(str(error))
            opening.end(None, str(error))
            return
        except BaseException:
            with self._lock:
                del self._by_host[host]
            opening.end(None, "opening it was interrupted")
            raise
        with self._lock:
            # addresses may share a port: one device is used
            known = next((one for one in self._open_ports() if one.name == opened.name), None)
            is_closed = self._is_closed
            opening.end(known or opened, "")
        if known is not None or is_closed:
            opened.close()

    def _open_ports(self) -> set[RdmaPort]:
        return {one.port for one in self._by_host.values() if one.port is not None}

    def _note(self, reason: str) -> None:
        if not self.reason:
            log.info("payload goes without RDMA: %s", reason)
            self._counters.rdma_fallbacks += 1
        self.reason = reason

    def close_idle(self) -> None:
        """Takes down queue pairs that nobody has used for a while."""
        now_ns = time.monotonic_ns()
        with self._lock:
            ports = self._open_ports()
        for port in ports:
            port.close_idle(now_ns)

    def close(self) -> None:
        """Closes all ports. Idempotent."""
        with self._lock:
            self._is_closed = True
            ports = self._open_ports()
        for port in ports:
            port.close()

    def disown(self) -> None:
        """In a forked child: the devices are the parent's."""
        self._by_host = {}


class RdmaWay:
    """The way to one worker by RDMA, as far as it is known. Guarded like its `TargetLink` where the port's lock is not.

    Attributes:
        is_wanted: the caller allows it.
        is_required: and nothing else.
        port: that is used; None while nothing has been agreed on.
        reason: why it is not used, or not always, for people; "" when it is, or not known yet.
    """

    __slots__ = ("_boot_id", "_lanes", "_ports", "is_required", "is_wanted", "port", "reason")

    def __init__(self, ports: RdmaPorts, *, is_wanted: bool, is_required: bool) -> None:
        self._ports = ports
        self.is_wanted = is_wanted
        self.is_required = is_required
        self.port: RdmaPort | None = None
        self.reason = ""
        self._lanes: dict[Lane, WorkerLane] = {}
        self._boot_id = b""

    def join(self, *, host: str, is_offered: bool, boot_id: bytes) -> RdmaPort | None:
        """A connection from `host` is open: the port that its calls use, or None with `reason` said.

        Raises:
            Unavailable: RDMA is required.
        """
        if not self.is_wanted:
            return None
        try:
            if not is_offered:
                raise Unavailable("the node does not use RDMA (see its status for why)")
            port = self._ports.port_for(host)
        except KVStoreError as error:
            self.reason, self.port = str(error), None
            if self.is_required:
                raise Unavailable(f"transport rdma cannot be used: {error}; use auto to fall back to TCP") from None
            return None
        with port.lock:
            if boot_id != self._boot_id or port is not self.port:
                for lane in self._lanes.values():
                    lane.end.retire()  # the node has forgotten its ends
                if port is not self.port:
                    self._lanes = {}
                self._boot_id, self.port = boot_id, port
        self.reason = ""
        self._ports.is_used = True
        return port

    def words_of_need(self) -> str:
        """As `TargetLink.words_of_need`."""
        return f"; transport rdma cannot be used: {self.reason}" if self.is_required and self.reason else ""

    def lane(self, port: RdmaPort, which: Lane) -> WorkerLane:
        """The lane of a class; made when first used. The caller holds the port's lock."""
        found = self._lanes.get(which)
        if found is None:
            found = self._lanes[which] = WorkerLane(ClientLane(port.rail, which))
            port.lanes.append(found)
        return found

    def close_idle(self) -> None:
        """As `RdmaPorts.close_idle`."""
        self._ports.close_idle()
