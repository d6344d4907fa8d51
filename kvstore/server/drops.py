"""`kvstore drop` and gRPC: a namespace is hidden on every node of the cluster, whichever was asked.

The node that is asked speaks with its own workers and, as a peer, with those of the other nodes. A worker that has
never heard of the namespace is told its manifest first, so that it remembers the drop: nodes tell each other what was
dropped when one of them comes back. Where nobody can remember, since no drive serves, the supervisor does.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Final, Protocol

from kvstore.cluster.run_places import workers_of
from kvstore.cluster.view import READ_STATES, View
from kvstore.errors import (
    FormatUnsupported,
    InvalidRequest,
    KVStoreError,
    Overloaded,
    Unavailable,
    UnknownNamespace,
)
from kvstore.limits import CLUSTER_VALUE_BYTES_MAX, CONTROL_DEADLINE_NS, SECOND_NS
from kvstore.server.admin import AdminChannel
from kvstore.server.node_record import DROPS_KEY
from kvstore.server.report import Dropped
from kvstore.server.worker_handle import WorkerHandle
from kvstore.types import namespace as namespaces
from kvstore.types.digest import digest
from kvstore.wire.messages import Drop, End, Manifest
from kvstore.wire.replicas import Heads, HeadsReply

log = logging.getLogger(__name__)

_TOLD_KEY: Final = "drops/told"
"""By manifest the drives whose workers have dropped it: not again, see `PendingDrops.make_up`. By their ids, which stay
with them wherever they are plugged in: a path may lead to a drive that has not heard."""


class Record(Protocol):
    """Where a node keeps what it must not forget: `NodeRecord`."""

    def get(self, key: str) -> str | None:
        """A value."""

    def put(self, key: str, value: str) -> None:
        """Keep it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DropOrder:
    """What is to be hidden.

    Attributes:
        manifest: Of the namespace; empty where the caller does not have it.
    """

    tenant: str
    namespace: bytes
    manifest: bytes = b""


@dataclass(slots=True)
class _Place:
    """One worker: how it is called, whether it is this node's, the way to it, what it knows, and what has begun."""

    name: str
    is_own: bool = False
    channel: AdminChannel | None = None
    failure: KVStoreError | None = None
    manifest: bytes = b""
    is_dropped: bool = False
    generation: int = 0


class PendingDrops:
    """Drops that no drive could remember. They are made up for when one serves again.

    Args:
        record: None keeps nothing, so that nothing can be remembered.
    """

    def __init__(self, record: Record | None) -> None:
        self._record = record
        self._making_up = asyncio.Lock()

    def add(self, manifest: bytes) -> None:
        """Keep a drop. Raises Unavailable or Overloaded when it cannot be kept."""
        if self._record is None:
            raise Unavailable("no drive of this node serves, and it has no folder to keep the drop in; drop it again")
        kept = self._manifests()
        text = json.dumps([base64.b64encode(one).decode() for one in dict.fromkeys((*kept, manifest))])
        if len(text) > CLUSTER_VALUE_BYTES_MAX:
            raise Overloaded(
                f"{len(kept)} drops wait for a drive of this node, more than fit into {CLUSTER_VALUE_BYTES_MAX} bytes; "
                "drop it again when a drive serves"
            )
        self._keep_told(manifest, set())
        self._record.put(DROPS_KEY, text)

    async def make_up(self, workers: Sequence[WorkerHandle]) -> None:
        """A worker serves: tell all that have not been told, and forget what each has done.

        Once each: a second drop would hide what was put into the namespace behind the first.
        """
        async with self._making_up:
            for manifest in self._manifests():
                order = DropOrder(tenant="", namespace=digest(manifest), manifest=manifest)
                told = self._told(manifest)
                owned = [_drives_of(worker) for worker in workers]
                places = {
                    at: _own(f"worker {at}", worker)
                    for at, worker in enumerate(workers)
                    if not owned[at] or not told.issuperset(owned[at])
                }
                await asyncio.gather(*(_drop_at(place, order, CONTROL_DEADLINE_NS) for place in places.values()))
                for at, place in places.items():
                    told |= owned[at] if place.is_dropped else set()
                if not all(place.is_dropped for place in places.values()):
                    self._remember(manifest, told)
                    return
                log.warning(
                    "a namespace was dropped while no drive served; it is dropped on %s workers now", len(workers)
                )
                self._forget(manifest)

    def _forget(self, manifest: bytes) -> None:
        assert self._record is not None, "it was kept there"
        left = [base64.b64encode(one).decode() for one in self._manifests() if one != manifest]
        try:
            self._record.put(DROPS_KEY, json.dumps(left))
            self._keep_told(manifest, set())
        except Unavailable as error:
            log.warning("a drop that was made up for will be made once more: %s", error)

    def _remember(self, manifest: bytes, told: set[str]) -> None:
        try:
            self._keep_told(manifest, told)
        except Unavailable as error:
            log.warning("who has made up for a drop cannot be kept, and will do so once more: %s", error)

    def _told(self, manifest: bytes) -> set[str]:
        """The drives whose workers have dropped it, also in an earlier life of this process."""
        return set(self._all_told().get(base64.b64encode(manifest).decode(), ()))

    def _keep_told(self, manifest: bytes, told: set[str]) -> None:
        everybody = self._all_told()
        everybody.pop(base64.b64encode(manifest).decode(), None)
        if told:
            everybody[base64.b64encode(manifest).decode()] = sorted(told)
        if self._record is None or everybody == self._all_told():
            return
        text = json.dumps(everybody)
        if told and len(text) > CLUSTER_VALUE_BYTES_MAX:
            raise Unavailable(
                f"{sum(map(len, everybody.values()))} drives of this node have made up for drops that others have not: "
                f"more than fit into {CLUSTER_VALUE_BYTES_MAX} bytes; let all its drives serve"
            )
        self._record.put(_TOLD_KEY, text)

    def _all_told(self) -> dict[str, list[str]]:
        text = (self._record.get(_TOLD_KEY) if self._record is not None else None) or "{}"
        return dict(json.loads(text))

    def _manifests(self) -> list[bytes]:
        text = (self._record.get(DROPS_KEY) if self._record is not None else None) or "[]"
        return [base64.b64decode(one) for one in json.loads(text)]


async def drop_everywhere(
    workers: Sequence[WorkerHandle],
    view: View,
    order: DropOrder,
    *,
    node_id: str,
    peer_token: bytes,
    pending: PendingDrops,
    deadline_ns: int,
) -> Dropped:
    """Hides a namespace on every worker of the cluster that answers.

    Args:
        workers: This node's.
        view: Of the cluster, or of this node.
        node_id: This node's.
        peer_token: What it shows to others.
        pending: Takes what nobody can be told.
        deadline_ns: The time that it may take.

    Raises:
        InvalidRequest, FormatUnsupported: The manifest is none, or of another namespace.
        Unavailable: Nobody who answers knows the namespace, and not all answer: it may be dropped with its manifest.
    """
    _check(order)
    until_ns = time.monotonic_ns() + deadline_ns
    async with AsyncExitStack() as stack:
        own = [_own(f"worker {at} of node {node_id}", worker) for at, worker in enumerate(workers)]
        others = await asyncio.gather(
            *(_reach(stack, name, address, peer_token, until_ns) for name, address in _elsewhere(view, node_id))
        )
        places = [*own, *others]
        if not order.manifest:
            order = await _with_manifest(places, order, until_ns)
        if order.manifest:
            await asyncio.gather(*(_drop_at(place, order, _left_ns(until_ns)) for place in places))
            newest = max((place.generation for place in places), default=0)
            behind = [place for place in places if 0 < place.generation < newest]
            await asyncio.gather(*(_drop_at(place, order, _left_ns(until_ns), newest) for place in behind))
    unreached = tuple(f"{place.name}: {place.failure}" for place in places if place.failure is not None)
    if any(place.is_dropped for place in places):
        return Dropped(dropped=True, unreached=unreached)
    if not unreached and places:
        return Dropped(dropped=False)
    if not order.manifest:
        words = "; ".join(unreached) or "no drive of this node serves"
        raise Unavailable(f"nobody who answers knows the namespace ({words}); drop it by its manifest")
    pending.add(order.manifest)
    return Dropped(dropped=True, unreached=unreached)


def _drives_of(worker: WorkerHandle) -> set[str]:
    """Ids of those it serves; none before it first did."""
    return {target.id for target in worker.readiness.targets} if worker.readiness is not None else set()


def _check(order: DropOrder) -> None:
    if order.manifest:
        found = namespaces.Manifest.decode(order.manifest, expected_digest=order.namespace)
        if found.tenant != order.tenant:
            raise InvalidRequest(f"the manifest is of tenant {found.tenant!r}, not of {order.tenant!r}")


def _elsewhere(view: View, node_id: str) -> list[tuple[str, str]]:
    """Name and address of each worker of other nodes that serves. Those that do not hear of it when they come back."""
    if not view.cluster:
        return []
    by_id = {target.id: target for target in view.targets}
    firsts = [by_id[ids[0]] for ids in workers_of(view) if any(by_id[one].state in READ_STATES for one in ids)]
    return [(f"node {one.node_id}", one.data[0]) for one in firsts if one.node_id != node_id]


def _own(name: str, worker: WorkerHandle) -> _Place:
    try:
        return _Place(name, is_own=True, channel=worker.channel)
    except Unavailable as error:
        return _Place(name, is_own=True, failure=error)


async def _reach(stack: AsyncExitStack, name: str, address: str, token: bytes, until_ns: int) -> _Place:
    place = _Place(name)
    try:
        place.channel = await stack.enter_async_context(_connected(address, token, _left_ns(until_ns)))
    except KVStoreError as error:
        place.failure = error
    return place


@asynccontextmanager
async def _connected(address: str, token: bytes, deadline_ns: int) -> AsyncIterator[AdminChannel]:
    """A connection as a node of the cluster."""
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    channel: AdminChannel | None = None
    sock: socket.socket | None = None
    try:
        async with asyncio.timeout(deadline_ns / SECOND_NS):
            found = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
            family, kind, protocol, _, where = found[0]
            sock = socket.socket(family, kind, protocol)
            sock.setblocking(False)
            await loop.sock_connect(sock, where)
        channel = AdminChannel(sock)
        await channel.hello(deadline_ns=deadline_ns, token=token)
        yield channel
    except (OSError, TimeoutError) as error:
        raise Unavailable(f"{address} cannot be reached: {error or 'no answer in time'}") from None
    finally:
        if channel is not None:
            channel.close()
        elif sock is not None:
            sock.close()


async def _with_manifest(places: Sequence[_Place], order: DropOrder, until_ns: int) -> DropOrder:
    """The order with what any place knows of the namespace. One of another tenant is as good as none."""
    await asyncio.gather(*(_ask_manifest(place, order.namespace, _left_ns(until_ns)) for place in places))
    found = next((place.manifest for place in places if place.manifest), b"")
    if not found or namespaces.Manifest.decode(found).tenant != order.tenant:
        return order
    return DropOrder(tenant=order.tenant, namespace=order.namespace, manifest=found)


async def _ask_manifest(place: _Place, namespace: bytes, deadline_ns: int) -> None:
    if place.channel is None:
        return
    try:
        if place.is_own:
            known = await place.channel.admin("owner", {"namespace": namespace}, deadline_ns=deadline_ns)
            found = known.get("manifest")
            place.manifest = found if isinstance(found, bytes) else b""
        else:
            heads = Heads(namespace=namespace, keys=b"")
            place.manifest = (await place.channel.call(heads, HeadsReply, deadline_ns=deadline_ns)).manifest
    except (UnknownNamespace, FormatUnsupported):
        return
    except KVStoreError as error:
        place.failure = error


async def _drop_at(place: _Place, order: DropOrder, deadline_ns: int, generation: int = 0) -> None:
    """Drops it at one place, which is told the manifest if it does not know the namespace.

    With a generation it only begins that one: all places have to count the same, see `hide_dropped`.
    """
    if place.channel is None or place.failure is not None:
        return
    drop = Drop(namespace=order.namespace, generation=generation)
    try:
        try:
            end = await place.channel.call(drop, End, deadline_ns=deadline_ns)
        except UnknownNamespace:
            await place.channel.call(Manifest(manifest=order.manifest), End, deadline_ns=deadline_ns)
            end = await place.channel.call(drop, End, deadline_ns=deadline_ns)
        place.is_dropped = True
        place.generation = end.value
    except KVStoreError as error:
        place.failure = error


def _left_ns(until_ns: int) -> int:
    return max(1, until_ns - time.monotonic_ns())
