"""A cluster under test: real nodes on small drives, a real etcd, and everything that may happen to them.

    with ClusterLab(tmp_path, nodes=3) as lab:
        lab.wait_settled()
        lab.kill("n0")
        lab.start("n0")             # the same drive, on the same port
        lab.wait_settled()

With `in_namespaces`, each node and the etcd have a network of their own (`kvstore.testing.net_lab`), and this process
is one more address among them. One node has one drive. Nodes, etcd and networks end with this process, however it
ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from kvstore.cluster.view import PLACED_STATES, Target, TargetState, View
from kvstore.errors import KVStoreError
from kvstore.limits import SECOND_NS
from kvstore.server.grpc_edge.client import ControlClient
from kvstore.testing.etcd_process import EtcdProcess
from kvstore.testing.net_lab import MTU_BYTES, NetLab, NetPlace
from kvstore.testing.serve_process import Ready, ServeProcess

GRPC_PORT: Final = 7400
DATA_PORT: Final = 7401
METRICS_PORT: Final = 7402
_WAIT_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 0.05
_ASK_NS: Final = 2 * SECOND_NS
_CLUSTER: Final = "lab"
_ETCD: Final = "etcd"
_TIED: Final = ("setpriv", "--pdeathsig", "KILL")


class NotInTime(AssertionError):
    """What was waited for did not come."""


def until(check: Callable[[], bool], words: str, *, seconds: float = _WAIT_SECONDS) -> float:
    """Wait until `check` holds; the seconds that took. Raises NotInTime, with `words`."""
    began = time.monotonic()
    while not check():
        if time.monotonic() - began > seconds:
            raise NotInTime(f"not within {seconds:g} s: {words}")
        time.sleep(_POLL_SECONDS)
    return time.monotonic() - began


@dataclass(slots=True, kw_only=True)
class LabNode:
    """One node, over all its lives.

    Attributes:
        place: Its network; None is the loopback.
        ready: Addresses of its newest life; the same in all of them.
        process: Of its newest life, running or not; None before the first.
        former_boot: Boot id that the view had for it before that life.
    """

    name: str
    folder: Path
    place: NetPlace | None = None
    ready: Ready | None = None
    process: ServeProcess | None = None
    former_boot: str = ""
    arguments: tuple[str, ...] = ()
    is_stopped: bool = False

    @property
    def is_running(self) -> bool:
        """Whether its newest life goes on and is not stopped."""
        return self.process is not None and self.process.process.poll() is None and not self.is_stopped

    @property
    def addresses(self) -> Ready:
        """Where it listens."""
        assert self.ready is not None, f"node {self.name} was never started"
        return self.ready


@dataclass(frozen=True, slots=True, kw_only=True)
class LabOptions:
    """How the nodes of a lab are made.

    Attributes:
        capacity: Of each drive.
        staging: Memory for transfers of each node; it is most of what a node takes.
        rails: Network cards of each node; more than one `in_namespaces` only.
        workers: Of each node with networks; 0 is the default, one for each card.
        drives: Of each node.
        lease_ttl: How long the cluster waits for a silent node.
        arguments: More of `kvstore serve`, for every node.
    """

    capacity: str = "64MiB"
    cache: str = "0"
    staging: str = "16MiB"
    lease_ttl: str = "2s"
    rails: int = 1
    workers: int = 1
    drives: int = 1
    drain_timeout: str = "20s"
    arguments: tuple[str, ...] = ()


class ClusterLab:
    """See the module. A context manager that ends whatever is left.

    Attributes:
        etcd: None with a file store.
        nodes: By name, in the order of their first start.
    """

    def __init__(
        self,
        folder: Path,
        *,
        nodes: int | Sequence[str] = 3,
        store: str = "etcd",
        etcd_members: int = 1,
        in_namespaces: bool = False,
        mtu_bytes: int = MTU_BYTES,
        options: LabOptions | None = None,
    ) -> None:
        """Starts everything, and returns when each node serves (`wait_settled` waits for them to know each other).

        Args:
            nodes: How many (named n0, n1, ...), or their names.
            store: "etcd", or "file", which belongs to one node.
            in_namespaces: Give each node, and the etcd, a network of its own.
            mtu_bytes: Of these networks.

        Raises:
            NamespacesUnavailable: `in_namespaces`, and this process may not make them.
        """
        names = [f"n{at}" for at in range(nodes)] if isinstance(nodes, int) else list(nodes)
        assert store in ("etcd", "file"), f"there is no store {store}"
        assert store == "etcd" or len(names) == 1, f"a file store is for one node, not for {len(names)}"
        self._folder = folder
        self._options = options or LabOptions()
        self._stack = ExitStack()
        self.nodes: dict[str, LabNode] = {}
        self.etcd: EtcdProcess | None = None
        self.net: NetLab | None = None
        try:
            self.net = self._stack.enter_context(NetLab(mtu_bytes=mtu_bytes)) if in_namespaces else None
            if store == "etcd":
                self.etcd = self._stack.enter_context(self._start_etcd(etcd_members))
            for name in names:
                self._begin(name)
            for name in names:
                self.wait_ready(name)
        except BaseException:
            self.close()
            raise

    # --- nodes ----------------------------------------------------------------------------------------------------
    def add(self, name: str, *arguments: str, at: str = "") -> LabNode:
        """A new node with a drive of its own, serving when this returns.

        Args:
            at: A node that has ended: the new one takes over its address and ports.
        """
        assert name not in self.nodes, f"node {name} is there; start() begins its next life"
        self._begin(name, arguments, at=at)
        self.wait_ready(name)
        return self.nodes[name]

    def start(self, name: str, *, is_waiting: bool = True) -> None:
        """The next life of a node that has ended: the same drive, address and ports."""
        node = self.nodes[name]
        assert node.process is None or node.process.process.poll() is not None, f"node {name} runs"
        known = self._target_in_any_view(name)
        node.former_boot = known.boot_id if known is not None else ""
        self._spawn(node)
        if is_waiting:
            self.wait_ready(name)

    def wait_ready(self, name: str) -> Ready:
        """Until it serves."""
        node = self.nodes[name]
        assert node.process is not None
        node.ready = node.process.wait_ready()
        return node.ready

    def kill(self, name: str) -> None:
        """kill -9 to supervisor and workers at once."""
        node = self.nodes[name]
        self._signal(node, signal.SIGKILL)
        assert node.process is not None
        node.process.process.wait()
        node.is_stopped = False

    def stop(self, name: str) -> None:
        """SIGSTOP to supervisor and workers: their connections stay open, and nobody answers."""
        self._signal(self.nodes[name], signal.SIGSTOP)
        self.nodes[name].is_stopped = True

    def cont(self, name: str) -> None:
        """SIGCONT."""
        self._signal(self.nodes[name], signal.SIGCONT)
        self.nodes[name].is_stopped = False

    def terminate(self, name: str) -> None:
        """SIGTERM to the supervisor."""
        node = self.nodes[name]
        assert node.process is not None
        node.process.terminate()

    def wait_exit(self, name: str) -> int:
        """Until the supervisor has ended; its exit status."""
        node = self.nodes[name]
        assert node.process is not None
        return node.process.wait_exit()

    def drain(self, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`kvstore drain` as its user runs it; what it said, and its exit status."""
        command = (sys.executable, "-m", "kvstore", "drain", "--node", self.nodes[name].addresses.grpc, *arguments)
        return subprocess.run(command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)

    def log(self, name: str) -> str:
        """Everything that a node has printed in all its lives."""
        node = self.nodes[name]
        return node.process.log if node.process is not None else ""

    # --- networks -------------------------------------------------------------------------------------------------
    def partition(self, name: str, *others: str) -> None:
        """Cut a node off from others: names of nodes, "etcd", or "clients", which is this process."""
        self._net().block(self._place(name), self._addresses_of(others))

    def heal(self, name: str, *others: str) -> None:
        """Undo `partition`."""
        self._net().unblock(self._place(name), self._addresses_of(others))

    def pull_cable(self, name: str) -> None:
        """Nobody hears from a node any more, nor it from anybody."""
        self._net().cut(self._place(name))

    def plug_in(self, name: str) -> None:
        """Undo `pull_cable`."""
        self._net().mend(self._place(name))

    def command_in(self, place: NetPlace, *arguments: str) -> list[str]:
        """A Python program in a network of its own, ended with this process."""
        return [*_TIED, *place.prefix, sys.executable, *arguments]

    # --- what the cluster says ------------------------------------------------------------------------------------
    def data_addresses(self, names: Iterable[str] = ()) -> list[str]:
        """Data-plane addresses of these nodes, or of all that were started."""
        return [address for name in (names or self.nodes) for address in self.nodes[name].addresses.data]

    def view(self, name: str) -> View | None:
        """As a node serves it; None when it does not answer."""
        try:
            with ControlClient(self.nodes[name].addresses.grpc, deadline_ns=_ASK_NS) as control:
                return control.view()
        except KVStoreError:
            return None

    def states(self, name: str) -> dict[str, TargetState]:
        """State of each node in the view that this one serves; empty when it does not answer."""
        view = self.view(name)
        return {} if view is None else {target.node_id: target.state for target in view.targets}

    def target_of(self, name: str) -> Target:
        """A node's target, in any view that knows it."""
        found = self._target_in_any_view(name)
        assert found is not None, f"no view has node {name}"
        return found

    def running(self) -> list[str]:
        """Nodes that live and are not stopped."""
        return [name for name, node in self.nodes.items() if node.is_running]

    def is_settled(self, *, without: Sequence[str] = ()) -> bool:
        """Whether all running nodes serve one view, in which they are placed with the lives that they are in.

        Args:
            without: Nodes that run, and that the view need not place.
        """
        wanted = set(self.running()) - set(without)
        views = [self.view(name) for name in self.running() if name not in without]
        if not views or any(view is None for view in views):
            return False
        first = views[0]
        assert first is not None
        if any(view is None or view.epoch != first.epoch for view in views):
            return False
        placed = {
            target.node_id
            for target in first.targets
            if target.state in PLACED_STATES and target.boot_id != self._former_boot(target.node_id)
        }
        return placed >= wanted and not (placed - set(self.running()))

    def wait_settled(self, *, without: Sequence[str] = (), seconds: float = _WAIT_SECONDS) -> float:
        """Until `is_settled`; the seconds that took."""
        return until(
            lambda: self.is_settled(without=without),
            f"{self.running()} are one cluster; they say {[self.states(name) for name in self.running()]}",
            seconds=seconds,
        )

    def wait_state(self, name: str, *states: TargetState, seconds: float = _WAIT_SECONDS) -> float:
        """Until every other running node says so of a node; the seconds that took."""

        def said() -> bool:
            others = [other for other in self.running() if other != name]
            return all(self.states(other).get(name) in states for other in others)

        return until(said, f"node {name} is {' or '.join(states)}", seconds=seconds)

    def lookup(self, name: str, namespace: bytes, keys: bytes) -> bytes | None:
        """Which record keys lie on one node: a status byte each, 0 is yes; None when it does not answer.

        Asked of the node itself, apart from placement and client.
        """
        try:
            with ControlClient(self.nodes[name].addresses.grpc, deadline_ns=_ASK_NS) as control:
                found = control.lookup(namespace, keys)
                return found.statuses if found.namespace_known else b"\xff" * (len(keys) // 32)
        except KVStoreError:
            return None

    def close(self) -> None:
        """Ends everything. Idempotent."""
        for node in self.nodes.values():
            if node.process is not None:
                node.process.__exit__(None, None, None)
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- inside ---------------------------------------------------------------------------------------------------
    def _start_etcd(self, members: int) -> EtcdProcess:
        folder = self._folder / _ETCD
        if self.net is None:
            return EtcdProcess(folder, count=members)
        self._etcd_place = self.net.add(_ETCD)
        return EtcdProcess(folder, count=members, host=self._etcd_place.address, prefix=self._etcd_place.prefix)

    def _begin(self, name: str, arguments: Sequence[str] = (), *, at: str = "") -> None:
        folder = self._folder / name
        folder.mkdir()
        node = LabNode(name=name, folder=folder, arguments=tuple(arguments))
        if at:
            former = self.nodes[at]
            assert not former.is_running, f"node {at} still runs"
            node.place, node.ready = former.place, former.ready
        elif self.net is not None:
            node.place = self.net.add(name, rails=self._options.rails)
        self.nodes[name] = node
        self._spawn(node)

    def _spawn(self, node: LabNode) -> None:
        (node.folder / "ready.json").unlink(missing_ok=True)  # of a life that was killed
        options = self._options
        arguments = [
            *("--node-id", node.name, "--cluster", self._cluster()),
            *("--capacity", options.capacity, "--cache", options.cache, "--staging", options.staging),
            *("--lease-ttl", options.lease_ttl, "--drain-timeout", options.drain_timeout),
            *self._listening(node),
            *(
                ("--data-dir", ",".join(str(node.folder / f"drive{at}") for at in range(options.drives)))
                * (options.drives > 1)
            ),
            *options.arguments,
            *node.arguments,
        ]
        prefix = (*_TIED, *(node.place.prefix if node.place is not None else ()))
        node.process = ServeProcess(node.folder, *arguments, prefix=prefix)
        node.is_stopped = False

    def _cluster(self) -> str:
        if self.etcd is not None:
            return f"etcd://{self.etcd.members}/{_CLUSTER}"
        return f"file://{self._folder / 'cluster.json'}"

    def _listening(self, node: LabNode) -> tuple[str, ...]:
        if node.place is not None:
            ports = (GRPC_PORT, DATA_PORT, METRICS_PORT)
        elif node.ready is not None:
            ready = node.ready
            ports = (_port(ready.grpc), _port(ready.data[0]), _port(ready.metrics))
        else:
            ports = (0, 0, 0)
        grpc, data, metrics = map(str, ports)
        flags = ("--grpc-port", grpc, "--data-port", data, "--metrics-port", metrics)
        if node.place is None:
            return flags
        return (
            *flags,
            "--host",
            ",".join(node.place.addresses),
            "--workers",
            str(self._options.workers),
            "--insecure",
            "",
        )

    def _signal(self, node: LabNode, number: signal.Signals) -> None:
        assert node.process is not None, f"node {node.name} does not run"
        try:
            os.killpg(node.process.process.pid, number)
        except ProcessLookupError:
            pass  # it has ended

    def _net(self) -> NetLab:
        assert self.net is not None, "this lab has no networks; make it with in_namespaces=True"
        return self.net

    def _place(self, name: str) -> NetPlace:
        place = self.nodes[name].place
        assert place is not None, "this lab has no networks; make it with in_namespaces=True"
        return place

    def _addresses_of(self, names: Iterable[str]) -> list[str]:
        return [address for name in names for address in self._addresses_at(name)]

    def _addresses_at(self, name: str) -> tuple[str, ...]:
        if name == "clients":
            return self._net().outside
        return self._etcd_place.addresses if name == _ETCD else self._place(name).addresses

    def _former_boot(self, name: str) -> str:
        node = self.nodes.get(name)
        return node.former_boot if node is not None and node.former_boot else "-"

    def _target_in_any_view(self, name: str) -> Target | None:
        views = [view for other in self.running() if (view := self.view(other)) is not None]
        newest = max(views, key=lambda view: view.epoch, default=None)
        if newest is None:
            return None
        return next((target for target in newest.targets if target.node_id == name), None)


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])
