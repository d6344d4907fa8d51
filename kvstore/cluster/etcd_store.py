"""The cluster store on etcd: entries are keys below "/kvstore/CLUSTER/", leases are etcd's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Final

from kvstore.cluster.etcd_client import (
    DELETE,
    GRANT,
    KEEP_ALIVE,
    PUT,
    RANGE,
    REVOKE,
    TXN,
    WATCH,
    EtcdClient,
)
from kvstore.cluster.store import NO_LEASE, Change, Entry, Image, Lease, checked_name, checked_ttl, checked_value
from kvstore.errors import LeaseExpired, Overloaded, StaleView, Unavailable
from kvstore.limits import SECOND_NS, STORE_ENTRIES_MAX
from kvstore.v1 import etcd_pb2 as pb

_EQUAL: Final = 0
_MOD_REVISION: Final = 2
_DELETED: Final = 1


class EtcdClusterStore:
    """A `ClusterStore` on etcd.

    `load` is linearizable: a member asks the others before it answers. A watch is never taken up again after a break,
    because revisions of an etcd that came back empty mean something else: its user loads, and watches from there.
    """

    def __init__(self, client: EtcdClient, *, cluster: str) -> None:
        self._client = client
        self._prefix = f"/kvstore/{cluster}/".encode()
        self._range_end = self._prefix[:-1] + bytes([self._prefix[-1] + 1])

    async def load(self) -> Image:
        """See `ClusterStore`."""
        request = pb.RangeRequest(key=self._prefix, range_end=self._range_end, limit=STORE_ENTRIES_MAX + 1)
        reply = await self._client.call(RANGE, request)
        if len(reply.kvs) > STORE_ENTRIES_MAX:
            raise Overloaded(
                f"cluster store {self._client} has more than {STORE_ENTRIES_MAX} entries; who else writes there?"
            )
        entries = {self._name(pair.key): _entry(pair) for pair in reply.kvs}
        return Image(store_id=_store_id(reply.header), revision=reply.header.revision, entries=entries)

    async def put(self, name: str, value: str, *, expected: int | None = None, lease: int = NO_LEASE) -> int:
        """See `ClusterStore`."""
        request = pb.PutRequest(key=self._key(name), value=checked_value(name, value), lease=lease)
        if expected is None:
            done = await self._client.call(PUT, request)
            return done.header.revision
        reply = await self._try_swap(name, expected, pb.RequestOp(request_put=request))
        return reply.header.revision

    async def delete(self, name: str, *, expected: int | None = None) -> bool:
        """See `ClusterStore`."""
        request = pb.DeleteRangeRequest(key=self._key(name))
        if expected is None:
            done = await self._client.call(DELETE, request)
            return done.deleted > 0
        reply = await self._try_swap(name, expected, pb.RequestOp(request_delete_range=request))
        return reply.responses[0].response_delete_range.deleted > 0

    async def grant(self, *, ttl_ns: int) -> Lease:
        """See `ClusterStore`."""
        seconds = -(-checked_ttl(ttl_ns) // SECOND_NS)
        reply = await self._client.call(GRANT, pb.LeaseGrantRequest(TTL=seconds))
        return Lease(id=reply.ID, ttl_ns=reply.TTL * SECOND_NS)

    async def renew(self, lease: int) -> Lease:
        """See `ClusterStore`."""
        reply = await self._client.call_stream(KEEP_ALIVE, pb.LeaseKeepAliveRequest(ID=lease))
        if reply.TTL <= 0:
            raise LeaseExpired(f"lease {lease:x} of {self._client} has ended; register again")
        return Lease(id=lease, ttl_ns=reply.TTL * SECOND_NS)

    async def revoke(self, lease: int) -> None:
        """See `ClusterStore`."""
        try:
            await self._client.call(REVOKE, pb.LeaseRevokeRequest(ID=lease))
        except LeaseExpired:
            pass  # it has ended, which is what was wanted

    async def watch(self, image: Image) -> AsyncIterator[tuple[Change, ...]]:
        """See `ClusterStore`."""
        create = pb.WatchCreateRequest(key=self._prefix, range_end=self._range_end, start_revision=image.revision + 1)
        async with aclosing(self._client.follow(WATCH, pb.WatchRequest(create_request=create))) as replies:
            async for reply in replies:
                self._check_watch(reply, image)
                if reply.events:
                    yield tuple(self._change(event) for event in reply.events)

    async def close(self) -> None:
        """See `ClusterStore`."""
        await self._client.close()

    def _check_watch(self, reply: pb.WatchResponse, image: Image) -> None:
        """Raises StaleView or Unavailable when this watch cannot tell everything after `image`."""
        if reply.created and (_store_id(reply.header) != image.store_id or reply.header.revision < image.revision):
            raise StaleView(f"cluster store {self._client} was made anew; load it again")
        if reply.compact_revision:
            raise StaleView(f"changes after revision {image.revision} of {self._client} are compacted; load again")
        if reply.canceled:
            raise Unavailable(f"watch of {self._client} was ended: {reply.cancel_reason or 'no reason given'}")

    async def _try_swap(self, name: str, expected: int, operation: pb.RequestOp) -> pb.TxnResponse:
        compare = pb.Compare(result=_EQUAL, target=_MOD_REVISION, key=self._key(name), mod_revision=expected)
        reply = await self._client.call(TXN, pb.TxnRequest(compare=[compare], success=[operation]))
        if not reply.succeeded:
            raise StaleView(f"{name} of {self._client} has not revision {expected} any more; load it again")
        return reply

    def _key(self, name: str) -> bytes:
        return self._prefix + checked_name(name).encode()

    def _name(self, key: bytes) -> str:
        return key.removeprefix(self._prefix).decode(errors="replace")

    def _change(self, event: pb.Event) -> Change:
        entry = None if event.type == _DELETED else _entry(event.kv)
        return Change(name=self._name(event.kv.key), entry=entry)


def _entry(pair: pb.KeyValue) -> Entry:
    value = pair.value.decode(errors="replace")
    return Entry(value=value, revision=pair.mod_revision, lease=pair.lease)


def _store_id(header: pb.ResponseHeader) -> str:
    """etcd's own. One made anew may have the same, for it comes from the members' addresses; so revisions count too."""
    return f"{header.cluster_id:x}"
