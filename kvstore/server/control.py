"""The control plane's verbs, without gRPC: what tools and routers may ask of a node."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping
from typing import Final

from kvstore.cluster.view import PLACED_STATES, View
from kvstore.errors import Internal, InvalidRequest, KVStoreError, Unavailable, UnknownNamespace
from kvstore.limits import (
    BATCH_ITEMS_MAX,
    CONTROL_DEADLINE_NS,
    DIGEST_BYTES,
    EXPLAIN_KEYS_MAX,
    HANDOVER_POLL_NS,
    NAMESPACES_PAGE_BYTES_MAX,
    NAMESPACES_PAGE_MAX,
    SECOND_NS,
)
from kvstore.server.access import NodeAccess
from kvstore.server.admin import maps_of
from kvstore.server.drops import DropOrder, PendingDrops, drop_everywhere
from kvstore.server.explain import KeyAsker, explain
from kvstore.server.fleet import Fleet
from kvstore.server.report import (
    Answer,
    Drained,
    Dropped,
    KeyAnswer,
    Lookup,
    NamespacePage,
    NamespaceReport,
    NodeReport,
    Question,
)
from kvstore.server.worker_handle import WorkerHandle
from kvstore.types.namespace import Manifest
from kvstore.types.results import MissReason
from kvstore.wire.codec import Plain
from kvstore.wire.messages import Match, MatchReply

log = logging.getLogger(__name__)

_HIT: Final = 0


class Control:
    """Each verb raises KVStoreError; `deadline_ns` is the time that it may take.

    Attributes:
        fleet: The workers of the node.
        access: Its tenants.
    """

    def __init__(
        self, fleet: Fleet, access: NodeAccess | None = None, *, pending_drops: PendingDrops | None = None
    ) -> None:
        """
        Args:
            access: The node's tenants; None is an open node.
            pending_drops: Where drops are kept that no drive can remember; None keeps none.
        """
        self.fleet = fleet
        self._pending_drops = pending_drops or PendingDrops(None)
        self.access = access or NodeAccess(None)

    def view(self) -> View:
        """Who serves."""
        return self.fleet.view

    def views(self, known_epoch: int) -> AsyncIterator[View]:
        """Each view newer than `known_epoch`."""
        return self.fleet.views(known_epoch)

    async def report(self) -> NodeReport:
        """State and metrics of the node."""
        return await self.fleet.report()

    async def namespaces(self, tenant: str, *, after: bytes, limit: int, deadline_ns: int) -> NamespacePage:
        """Namespaces of one tenant in the order of digests, those that any worker knows."""
        _require(tenant, "tenant")
        if after and len(after) != DIGEST_BYTES:
            raise InvalidRequest(f"after has {len(after)} bytes; pass `next` of the last page, {DIGEST_BYTES} bytes")
        return _page(await self._of_tenant(tenant, after, deadline_ns), limit)

    async def lookup(self, namespace: bytes, keys: bytes, *, count: bool, deadline_ns: int) -> Lookup:
        """Which keys are here: a hit where any worker has it. Never touches or pins.

        Keys that a worker which is down might have are misses of that reason. Raises Unavailable when all are down.
        """
        return await self.lookup_of("", namespace, keys, count=count, deadline_ns=deadline_ns)

    async def lookup_of(self, tenant: str, namespace: bytes, keys: bytes, *, count: bool, deadline_ns: int) -> Lookup:
        """`lookup` as a tenant may ask it: another one's namespace is not known. "" is whoever's it is."""
        _check_digest(namespace, "namespace")
        _check_keys(keys, BATCH_ITEMS_MAX)
        message = Match(namespace=namespace, keys=keys, touch=False, count=False)
        replies: list[bytes] = []
        known, down = False, None
        teller: WorkerHandle | None = None
        for worker in self.fleet.workers:
            try:
                await _check_owner(worker, namespace, tenant, deadline_ns)
                reply = await worker.channel.call(message, MatchReply, deadline_ns=deadline_ns)
            except UnknownNamespace:
                teller = worker
                replies.append(_all(MissReason.ABSENT, keys))
            except Unavailable as error:
                down = error
            else:
                known = True
                teller = worker
                replies.append(reply.statuses)
        if down is not None and not replies:
            raise down
        if down is not None:
            replies.append(_all(MissReason.UNAVAILABLE, keys))
        merged = replies[0]
        for statuses in replies[1:]:
            merged = bytes(map(_better, merged, statuses))
        if count and teller is not None:
            # one worker counts for all: each would know its own hits only, and call the others' misses
            counted: dict[str, Plain] = {"keys": len(merged), "hits": merged.count(_HIT)}
            await teller.channel.admin("count_lookup", counted, deadline_ns=deadline_ns)
        return Lookup(statuses=merged, prefix=len(merged) - len(merged.lstrip(b"\0")), namespace_known=known)

    async def explain(self, question: Question, *, deadline_ns: int) -> Answer:
        """Why something was a miss, within one tenant."""
        _require(question.tenant, "tenant")
        _check_keys(question.keys, EXPLAIN_KEYS_MAX)
        if question.namespace:
            _check_digest(question.namespace, "namespace")
        namespaces = await self._of_tenant(question.tenant, b"", deadline_ns)
        return await explain(question, namespaces, self._asker(deadline_ns))

    async def drop(self, order: DropOrder, *, deadline_ns: int) -> Dropped:
        """Hide everything in a namespace of the tenant, on every node of the cluster. See `drop_everywhere`."""
        _require(order.tenant, "tenant")
        _check_digest(order.namespace, "namespace")
        return await drop_everywhere(
            self.fleet.workers,
            self.fleet.view,
            order,
            node_id=self.fleet.node_id,
            peer_token=self.fleet.peer_token(),
            pending=self._pending_drops,
            deadline_ns=deadline_ns,
        )

    async def scrub(self, bytes_second: int, *, deadline_ns: int) -> bool:
        """Verify all records; False when a round was in progress everywhere."""
        started = [
            await worker.channel.admin("scrub", {"bytes_second": bytes_second}, deadline_ns=deadline_ns)
            for worker in self.fleet.workers
        ]
        return any(value.get("started") is True for value in started)

    async def drain(self, *, resume: bool, within_ns: int = 0) -> Drained:
        """Refuse puts on every worker, or take them again.

        In a cluster a draining node hands on what it holds: this waits for so long for that to end. It goes on anyway.
        Says how far it has come.

        Raises Unavailable when one does not serve, after the others were told; that one is told once it serves.
        """
        deadline_ns = time.monotonic_ns() + within_ns
        down: Unavailable | None = None
        for worker in self.fleet.workers:
            try:
                await worker.set_draining(not resume)
            except Unavailable as error:
                down = error
        if down is not None:
            raise down
        if resume:
            return Drained(draining=False)
        while True:
            drained = await self._drained(deadline_ns)
            if drained.done or time.monotonic_ns() >= deadline_ns:
                return drained
            await asyncio.sleep(HANDOVER_POLL_NS / SECOND_NS)

    async def _drained(self, deadline_ns: int) -> Drained:
        """How far all workers have handed on; one that does not say is not done."""
        wait_ns = min(max(deadline_ns - time.monotonic_ns(), HANDOVER_POLL_NS), CONTROL_DEADLINE_NS)
        parts = await asyncio.gather(*(_handover(worker, wait_ns) for worker in self.fleet.workers))
        own = {target.id for target, _, _ in self.fleet.served()}
        others = {
            target.node_id
            for target in self.fleet.view.targets
            if target.state in PLACED_STATES and target.id not in own
        }
        return Drained(
            draining=True,
            done=all(part.done for part in parts),
            handed_on=sum(part.handed_on for part in parts),
            left_behind=sum(part.left_behind for part in parts),
            receivers=len(others),
        )

    async def reload_tenants(self) -> int:
        """Read the tenants file again and tell the workers; says how many tenants there are.

        A worker that does not serve is told once it does. Raises InvalidRequest when the file is bad: nothing changes.
        """
        book = self.access.reload()
        if book is None:
            return 0
        for worker in self.fleet.workers:
            await worker.set_tenants(book)
        return len(book)

    async def _of_tenant(self, tenant: str, after: bytes, deadline_ns: int) -> list[NamespaceReport]:
        """Every namespace of a tenant after a digest, in the order of digests, whichever worker knows it."""
        found = {
            namespace.digest: namespace
            for worker in self.fleet.workers
            async for namespace in _namespaces(worker, after, deadline_ns)
            if namespace.tenant == tenant
        }
        return [found[digest] for digest in sorted(found)]

    def _asker(self, deadline_ns: int) -> KeyAsker:
        async def ask(namespace: bytes, keys: bytes) -> list[KeyAnswer]:
            answers: list[KeyAnswer] = []
            for worker in self.fleet.workers:
                arguments: dict[str, Plain] = {"namespace": namespace, "keys": keys}
                value = await worker.channel.admin("explain", arguments, deadline_ns=deadline_ns)
                if value.get("known") is not True:
                    continue  # nothing of the namespace was ever put on its drives
                found = _key_answers(keys, maps_of(value, "keys"))
                answers = [_better_answer(*pair) for pair in zip(answers, found, strict=True)] if answers else found
            return answers or [_absent(key) for key in _split(keys)]

        return ask


async def _handover(worker: WorkerHandle, deadline_ns: int) -> Drained:
    """How far a worker has handed on; as if it had not begun when it does not say."""
    try:
        answer = await worker.channel.admin("handover", {}, deadline_ns=deadline_ns)
    except KVStoreError as error:
        log.debug("a worker does not say how far it has handed on: %s", error)  # ten times a second while it is down
        return Drained(draining=True)
    handed_on, left_behind = answer.get("handed_on"), answer.get("left_behind")
    if not isinstance(handed_on, int) or not isinstance(left_behind, int):
        raise Internal(f"the worker told of its hand-over as {answer!r:.200}")
    return Drained(draining=True, done=answer.get("done") is True, handed_on=handed_on, left_behind=left_behind)


async def _check_owner(worker: WorkerHandle, namespace: bytes, tenant: str, deadline_ns: int) -> None:
    """Raises UnknownNamespace for one that is not the tenant's: tenants do not learn of each other. "" is any."""
    if tenant:
        value = await worker.channel.admin("owner", {"namespace": namespace}, deadline_ns=deadline_ns)
        if value.get("tenant") != tenant:
            raise UnknownNamespace(f"namespace {namespace.hex()} is not known here")


def _require(text: str, name: str) -> None:
    if not text:
        raise InvalidRequest(f'{name} is empty; name the {name}, "default" if you never set one')


def _check_digest(digest: bytes, name: str) -> None:
    if len(digest) != DIGEST_BYTES:
        raise InvalidRequest(f"{name} has {len(digest)} bytes; a digest has {DIGEST_BYTES}")


def _check_keys(keys: bytes, count_max: int) -> None:
    count, rest = divmod(len(keys), DIGEST_BYTES)
    if rest:
        raise InvalidRequest(f"keys have {len(keys)} bytes; pass {DIGEST_BYTES} for each key")
    if count > count_max:
        raise InvalidRequest(f"{count} keys in one request, at most {count_max}; split the batch")


def _all(reason: MissReason, keys: bytes) -> bytes:
    return bytes([reason]) * (len(keys) // DIGEST_BYTES)


def _better(old: int, new: int) -> int:
    """A hit beats everything, and any other answer beats absent."""
    if _HIT in (old, new):
        return _HIT
    return new if old == MissReason.ABSENT else old


def _better_answer(old: KeyAnswer, new: KeyAnswer) -> KeyAnswer:
    if new.status == "hit" or (old.status == "absent" and not old.ago_ns):
        return new
    return old


def _key_answers(keys: bytes, values: list[Mapping[str, Plain]]) -> list[KeyAnswer]:
    digests = _split(keys)
    if len(values) != len(digests):
        raise Internal(f"the worker explained {len(values)} keys of {len(digests)}")
    return [_key_answer(*pair) for pair in zip(digests, values, strict=True)]


def _split(keys: bytes) -> list[bytes]:
    return [keys[at : at + DIGEST_BYTES] for at in range(0, len(keys), DIGEST_BYTES)]


def _absent(key: bytes) -> KeyAnswer:
    text = "the namespace was dropped or forgotten while this was asked"
    return KeyAnswer(key=key, status=MissReason.ABSENT.name.lower(), text=text, ago_ns=0)


def _key_answer(key: bytes, value: Mapping[str, Plain]) -> KeyAnswer:
    status, text, ago_ns = value.get("status"), value.get("text", ""), value.get("ago_ns", 0)
    if not isinstance(status, int) or not isinstance(text, str) or not isinstance(ago_ns, int):
        raise Internal(f"the worker explained a key as {value!r:.200}")
    name = "hit" if status == _HIT else MissReason(status).name.lower()
    return KeyAnswer(key=key, status=name, text=text, ago_ns=ago_ns)


async def _namespaces(worker: WorkerHandle, after: bytes, deadline_ns: int) -> AsyncIterator[NamespaceReport]:
    """All namespaces of a worker after a digest, fetched page by page."""
    while True:
        arguments: dict[str, Plain] = {"after": after, "limit": NAMESPACES_PAGE_MAX}
        value = await worker.channel.admin("namespaces", arguments, deadline_ns=deadline_ns)
        rows = maps_of(value, "namespaces")
        for row in rows:
            yield _namespace_report(row)
        if len(rows) < NAMESPACES_PAGE_MAX:
            return
        last = rows[-1].get("digest")
        assert isinstance(last, bytes)
        after = last


def _namespace_report(row: Mapping[str, Plain]) -> NamespaceReport:
    manifest, generation = row.get("manifest"), row.get("generation", 0)
    if not isinstance(manifest, bytes) or not isinstance(generation, int):
        raise Internal(f"the worker described a namespace as {row!r:.200}")
    return describe(Manifest.decode(manifest), generation=generation, dropped=row.get("dropped") is True)


def describe(manifest: Manifest, *, generation: int, dropped: bool) -> NamespaceReport:
    """A namespace as shown to people."""
    layout = manifest.layout
    parts = "+".join(part.name for part in layout.parts)
    scheme = layout.dtype if layout.quantisation == "none" else f"{layout.dtype} {layout.quantisation}"
    return NamespaceReport(
        digest=manifest.digest,
        tenant=manifest.tenant,
        model=manifest.model,
        weights=manifest.weights,
        adapter=manifest.adapter,
        adapter_revision=manifest.adapter_revision,
        layout=f"{layout.chunk_tokens} tokens, {layout.layers} layers, {scheme}, {parts}, {layout.shards} shards",
        layout_digest=layout.digest,
        generation=generation,
        dropped=dropped,
        manifest=manifest.encode(),
    )


def _page(namespaces: list[NamespaceReport], limit: int) -> NamespacePage:
    """The first of them that fit the limit and NAMESPACES_PAGE_BYTES_MAX."""
    taken: list[NamespaceReport] = []
    size_bytes = 0
    for namespace in namespaces:
        size_bytes += len(namespace.manifest)
        if len(taken) == limit or (taken and size_bytes > NAMESPACES_PAGE_BYTES_MAX):
            return NamespacePage(namespaces=tuple(taken), next=taken[-1].digest)
        taken.append(namespace)
    return NamespacePage(namespaces=tuple(taken), next=b"")
