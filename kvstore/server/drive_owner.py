"""Whose drives a node serves: its own, or those of its cluster. Pure, but for the node's record.

A node on its own draws an id at its first start. A cluster has one for all of its nodes, in its store: drives that
bear it may move between them. A node that joins a cluster brings its own drives along, which are the cluster's from
then on; drives of another cluster are foreign, since other tenants may have the same names there.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.engine.format import UUID_BYTES
from kvstore.engine.identity import NO_CLUSTER, DriveContent
from kvstore.errors import Unavailable
from kvstore.server.drive_record import cluster_of
from kvstore.server.node_record import NodeRecord

_ID_KEY: Final = "cluster/id"
_NAME_KEY: Final = "cluster/name"
_OWN_KEY: Final = "cluster/own"


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveOwner:
    """What the drives of a node bear.

    Attributes:
        id: of the cluster, or of the node on its own; zeros take the drives of any.
        own_id: that the node drew while it was on its own; drives that bear it become the cluster's. Zeros for none.
        cluster: name of the cluster; "" for a node on its own.
    """

    id: bytes
    own_id: bytes = NO_CLUSTER
    cluster: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotedOwner:
    """What an earlier life noted, in hex; "" for nothing. An `id` without `cluster` was drawn by the node itself."""

    id: str = ""
    own_id: str = ""
    cluster: str = ""

    def id_in(self, cluster: str) -> str:
        """The id of a cluster, if the node was in it."""
        return self.id if self.cluster == cluster else ""


def noted_owner(record: NodeRecord | None) -> NotedOwner:
    """What is noted; nothing without a record."""
    if record is None:
        return NotedOwner()
    kept, own, cluster = (record.get(key) or "" for key in (_ID_KEY, _OWN_KEY, _NAME_KEY))
    return NotedOwner(id=kept, own_id=own if cluster else kept, cluster=cluster)


def note_owner(record: NodeRecord, owner: DriveOwner) -> None:
    """Note it. Raises Unavailable."""
    if owner.cluster:
        # before the id: an id without a name would be taken for one of the node's own
        record.put(_OWN_KEY, owner.own_id.hex() if any(owner.own_id) else "")
        record.put(_NAME_KEY, owner.cluster)
    record.put(_ID_KEY, owner.id.hex())


def owner_alone(noted: NotedOwner, contents: Sequence[DriveContent], *, has_record: bool) -> DriveOwner:
    """Of a node on its own: what is noted, else what its drives say, else a new id; where nothing is noted, any."""
    if noted.id:
        return DriveOwner(id=bytes.fromhex(noted.id))
    return DriveOwner(id=cluster_of(contents) or (os.urandom(UUID_BYTES) if has_record else NO_CLUSTER))


def owner_in(cluster: str, noted: NotedOwner, cluster_id: str, *, has_record: bool) -> DriveOwner:
    """Of a node in a cluster.

    Args:
        cluster_id: as the store says, in hex; "" when it does not answer.

    Raises:
        Unavailable: The store does not answer, and the node was never in this cluster.
    """
    own_id = bytes.fromhex(noted.own_id) if noted.own_id else NO_CLUSTER
    known = cluster_id or noted.id_in(cluster)
    if known:
        return DriveOwner(id=bytes.fromhex(known), own_id=own_id, cluster=cluster)
    if not has_record:
        return DriveOwner(id=NO_CLUSTER)  # raw devices alone: nothing could be noted, and reads can be served
    raise Unavailable(
        f"the cluster store of {cluster!r} does not answer, and this node was never in that cluster: it has to say "
        "whose the drives are; start the node again once the store can be reached"
    )
