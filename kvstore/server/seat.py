"""A node's seat in its cluster: what its workers serve is registered, what the cluster says is shown to everybody."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import kvstore
from kvstore.cluster.charter import CLUSTER_ID_NAME, checked_cluster_id, draw, new_cluster_id
from kvstore.cluster.membership import Membership
from kvstore.cluster.node_file import replace_file
from kvstore.cluster.registration import NodeNote, Registration
from kvstore.cluster.store import ClusterStore
from kvstore.cluster.store_address import EtcdAddress, FileAddress, open_cluster_store, parse_store_address
from kvstore.cluster.view import TargetState, View, decode_view, encode_view
from kvstore.errors import Denied, InvalidRequest, KVStoreError, Retryable
from kvstore.limits import (
    CLUSTER_ASK_NS,
    CLUSTER_JOIN_NS,
    CONTROL_DEADLINE_NS,
    SECOND_NS,
    SHARE_TICK_NS,
    STORE_RETRY_NS_MIN,
)
from kvstore.server.drive_owner import DriveOwner, NotedOwner, owner_in
from kvstore.server.fleet import Fleet
from kvstore.server.quotas import ClusterQuotas
from kvstore.server.report import NodeWhere
from kvstore.server.worker_handle import WorkerHandle
from kvstore.settings import NodeSettings, is_loopback

log = logging.getLogger(__name__)

VIEW_FILE: Final = "view.json"
"""The newest view that this node has seen, in its first data folder: it is served while the store is away."""

_FILE_CLUSTER: Final = "default"


def open_seat(settings: NodeSettings, node_id: str) -> Seat | None:
    """The seat that the settings ask for; None for a node on its own. Asks nobody yet.

    Raises:
        InvalidRequest: `cluster` is no address, or a file that it names cannot be read.
        Unavailable, FormatUnsupported: as `FileClusterStore`.
    """
    if not settings.cluster:
        return None
    address = parse_store_address(settings.cluster)
    if is_out_of_reach(settings.host, address):
        log.warning(
            "this node listens on %s only, and its cluster store is elsewhere: other machines cannot reach what it "
            "registers; set host (beyond loopback with tenants or insecure)",
            ", ".join(settings.host),
        )
    folder = next((path for path in map(Path, settings.data_dir) if path.is_dir()), None)
    return Seat(
        open_cluster_store(address),
        cluster=_name_of(address),
        node_id=node_id,
        label=settings.node_label,
        ttl_ns=settings.lease_ttl,
        view_path=folder / VIEW_FILE if folder is not None else None,
    )


class Seat:
    """See the module. `run` is its one task; `close` gives the seat up.

    Args:
        store: Owned from now on.
        view_path: Where the newest view is kept; None keeps it nowhere.
    """

    def __init__(
        self, store: ClusterStore, *, cluster: str, node_id: str, label: str, ttl_ns: int, view_path: Path | None
    ) -> None:
        self._store = store
        self._cluster = cluster
        self._node_id = node_id
        self._label = label
        self._view_path = view_path
        self._changed = asyncio.Event()
        known = _read_view(view_path, cluster)
        self._shown = known or View(epoch=0, node_id="", targets=(), cluster=cluster)
        self._membership = Membership(store, cluster=cluster, known=known, on_change=self._changed.set, ttl_ns=ttl_ns)
        self._quotas = ClusterQuotas(store, self._membership)

    @property
    def view(self) -> View:
        """The newest view that is known; of epoch 0 and empty when there was none yet."""
        return self._membership.view or self._shown

    @property
    def failure(self) -> str:
        """Why the cluster store cannot be asked; "" when it can."""
        return self._membership.failure

    @property
    def fence(self) -> str:
        """Why the workers refuse puts, deletes and drops for the cluster's sake; "" when they do not."""
        return self._membership.fence

    async def find_owner(self, noted: NotedOwner, *, has_record: bool) -> DriveOwner:
        """Whose drives the node serves, as the cluster says; before `run`. The first node draws the cluster's id.

        A node that was in the cluster before goes on without the store's answer.

        Raises:
            Unavailable, Denied: The store does not answer, and the node was never in this cluster.
            InvalidRequest: What stands in the store is no id.
        """
        known = noted.id_in(self._cluster)
        wait_ns = CLUSTER_ASK_NS if known or not has_record else CLUSTER_JOIN_NS
        answer = ""
        try:
            async with asyncio.timeout(wait_ns / SECOND_NS):
                answer = await self._ask_id(known or new_cluster_id(), is_patient=not known)
        except (TimeoutError, Retryable, Denied) as error:
            if isinstance(error, Denied) and not known:
                raise
            log.warning("cluster %s was not asked for its id: %s", self._cluster, error or "no answer in time")
        owner = owner_in(self._cluster, noted, answer, has_record=has_record)
        self._membership.serve_drives_of(owner.id.hex() if any(owner.id) else "")
        return owner

    async def _ask_id(self, candidate: str, *, is_patient: bool) -> str:
        is_told = False
        while True:
            try:
                text = await draw(self._store, CLUSTER_ID_NAME, candidate)
                break
            except Retryable as error:
                if not is_patient:
                    raise
                if not is_told:
                    log.warning("waits for the cluster store: %s", error)
                    is_told = True
            await asyncio.sleep(STORE_RETRY_NS_MIN / SECOND_NS)
        found = checked_cluster_id(text)
        if not found:
            raise InvalidRequest(f"{CLUSTER_ID_NAME} of cluster {self._cluster} is {text!r:.80}, no id; see the log")
        return found

    def workers_changed(self, fleet: Fleet) -> None:
        """Register what the workers serve now. A drained worker's targets are to leave the cluster."""
        self._membership.register(
            [
                Registration(
                    id=target.id,
                    data=target.data,
                    capacity_bytes=capacity_bytes,
                    node_id=self._node_id,
                    label=self._label,
                    disk_id=target.id,  # a drive's id is what names its target
                    boot_id=boot_id.hex(),
                    session="",
                    wants_drain=target.state is TargetState.DRAINING,
                )
                for target, capacity_bytes, boot_id in fleet.served()
            ]
        )
        self._changed.set()  # a worker that was started again does not know how long it may write

    async def run(self, fleet: Fleet) -> None:
        """Follow the cluster until cancelled."""
        fleet.shares, fleet.nodes, fleet.fence = self._quotas.shares, self._nodes, lambda: self.fence
        fleet.peer_token = lambda: self._membership.peer_token
        note = NodeNote(node_id=self._node_id, grpc=fleet.grpc_address, version=kvstore.__version__)
        self._membership.announce(note)
        tasks = [asyncio.create_task(self._take_part()), asyncio.create_task(self._settle_quotas(fleet))]
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                await self._tell_workers(fleet)
                self._show(fleet)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """Tell the cluster that this node is going, and let go of the store."""
        await self._membership.close()

    def _nodes(self) -> list[NodeWhere]:
        notes = self._membership.notes
        return [NodeWhere(node_id=name, grpc=notes[name].grpc, version=notes[name].version) for name in sorted(notes)]

    async def _take_part(self) -> None:
        try:
            await self._membership.run()
        except Exception:
            log.exception("this node takes no part in its cluster any more: its lease runs out; restart it, and report")

    async def _settle_quotas(self, fleet: Fleet) -> None:
        while True:
            was_settled = self._quotas.is_settled
            try:
                await self._quotas.tick(fleet)
            except Exception:
                log.exception("quotas of the cluster are not settled any more; restart this node, and report")
                return
            if self._quotas.is_settled is not was_settled:
                self._changed.set()
            pause_ns = SHARE_TICK_NS if self._quotas.is_settled else STORE_RETRY_NS_MIN
            await asyncio.sleep(pause_ns / SECOND_NS)

    async def _tell_workers(self, fleet: Fleet) -> None:
        """A worker that cannot be told stops taking writes by itself, when the time that it was told last is over."""
        await self._quotas.tell_workers(fleet)

        async def tell(worker: WorkerHandle) -> None:
            try:
                peers = {"token": self._membership.peer_token}
                await worker.channel.admin("peer_token_set", peers, deadline_ns=CONTROL_DEADLINE_NS)
                # before quotas are settled more might be taken than there is room for
                arguments = {"for_ns": self._membership.writes_ns if self._quotas.is_settled else 0}
                await worker.channel.admin("hold_writes", arguments, deadline_ns=CONTROL_DEADLINE_NS)
            except KVStoreError as error:
                log.debug("worker not told of the cluster: %s", error)

        await asyncio.gather(*map(tell, fleet.workers))

    def _show(self, fleet: Fleet) -> None:
        view = self.view
        if view == self._shown:
            return
        self._shown = view
        fleet.show(view)
        if self._view_path is not None:
            try:
                replace_file(self._view_path, encode_view(view).encode())
            except OSError as error:
                log.warning("view is not kept in %s: %s", self._view_path, error.strerror)


def is_out_of_reach(hosts: Sequence[str], address: EtcdAddress | FileAddress) -> bool:
    """Whether a node listens on loopback alone in a cluster that has other machines."""
    if isinstance(address, FileAddress) or not all(map(is_loopback, hosts)):
        return False
    return not all(is_loopback(member.rpartition(":")[0].strip("[]")) for member in address.members)


def _name_of(address: EtcdAddress | FileAddress) -> str:
    return address.cluster if isinstance(address, EtcdAddress) else _FILE_CLUSTER


def _read_view(path: Path | None, cluster: str) -> View | None:
    """What an earlier life kept. A damaged file is as good as none: the store knows better."""
    if path is None:
        return None
    try:
        view = decode_view(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, InvalidRequest) as error:
        log.warning("the last view in %s cannot be used: %s", path, error)
        return None
    return view if view.cluster == cluster else None
