"""Tenants' quotas over all nodes of a cluster: what they use here is told, what they may use here is settled.

Every `SHARE_TICK_NS` a node asks its workers what tenants with a quota have on each drive, writes what has changed into
the cluster store, and computes its shares from what all nodes wrote (`kvstore.cluster.shares`). Without the store the
last shares hold: nobody else knows of what is put here meanwhile, so nobody takes it into account.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from kvstore.cluster.catalog import Document, documents_of, use_name, uses_of
from kvstore.cluster.membership import Membership
from kvstore.cluster.shares import RisingShares, capacities_of, decode_quota, encode_uses, shares_of
from kvstore.cluster.store import ClusterStore
from kvstore.cluster.view import TargetId, View
from kvstore.errors import InvalidRequest, KVStoreError, Retryable
from kvstore.limits import CONTROL_DEADLINE_NS, SHARE_PUBLISH_PARTS, SHARE_REPEAT_NS
from kvstore.server.admin import maps_of, text_of
from kvstore.server.fleet import Fleet
from kvstore.server.report import TenantShare
from kvstore.server.tenants import TenantBook
from kvstore.server.worker_handle import WorkerHandle
from kvstore.wire.codec import Plain

log = logging.getLogger(__name__)

Shares = Mapping[TargetId, Mapping[str, int]]
"""Bytes by target and tenant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What was written last of a target, and when."""

    uses: Mapping[str, int]
    at_ns: int


def is_news(told: Told | None, uses: Mapping[str, int], quotas: Mapping[str, int], now_ns: int) -> bool:
    """Whether the others have to know: a use changed by a part of its quota that counts, or at all a while ago."""
    if told is None or told.uses.keys() != uses.keys():
        return True
    moved = any(abs(used - told.uses[name]) * SHARE_PUBLISH_PARTS >= quotas[name] for name, used in uses.items())
    return moved or (told.uses != uses and now_ns - told.at_ns >= SHARE_REPEAT_NS)


def shares_here(
    ours: Collection[TargetId],
    placed: Collection[TargetId],
    held: Mapping[str, Mapping[TargetId, int]],
    before: Shares,
) -> Shares:
    """Shares of a node's targets, from those that hold in the cluster, by tenant.

    A target that takes no new chunks now keeps the share that it had: its worker may be starting again, and it is not
    to give up anything because no part of what is free was counted for it. One that never had a share has none.
    """
    return {
        name: {tenant: of_tenant[name] for tenant, of_tenant in held.items()} if name in placed else before[name]
        for name in ours
        if name in placed or name in before
    }


class ClusterQuotas:
    """See the module. Calls of `tick` do not overlap.

    Attributes:
        is_settled: every quota holds on the workers, or there is none: puts may be taken.
    """

    def __init__(
        self, store: ClusterStore, membership: Membership, *, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._store = store
        self._membership = membership
        self._clock = clock
        self._rising = RisingShares()
        self._told: dict[TargetId, Told] = {}
        self._shares: Shares = {}
        self._used_all: Mapping[str, int] = {}
        self._quotas: Mapping[str, int] = {}
        self.is_settled = False

    def shares(self) -> dict[str, TenantShare]:
        """What each tenant with a quota has in the whole cluster, and may have here; for people."""
        return {
            name: TenantShare(
                quota_bytes=quota_bytes,
                share_bytes=sum(of_target.get(name, 0) for of_target in self._shares.values()),
                cluster_used_bytes=self._used_all.get(name, 0),
            )
            for name, quota_bytes in self._quotas.items()
            if self._shares
        }

    async def tick(self, fleet: Fleet) -> None:
        """Tell, settle, and let the workers hold to it. What the store or a worker fails with is logged."""
        view, book = self._membership.view, fleet.access.book
        if view is None or self._membership.failure:
            return
        quotas = self._quotas_of(book)
        if not quotas and not self._shares:
            self.is_settled = True
            return
        try:
            await self._tell_others(fleet, quotas)
        except KVStoreError as error:
            level = logging.DEBUG if isinstance(error, Retryable) else logging.WARNING
            log.log(level, "the cluster was not told of what tenants use: %s", error)
            return
        are_known = self._settle(fleet, view, quotas)
        await self.tell_workers(fleet)
        self.is_settled = are_known
        await self._tidy(view)

    async def tell_workers(self, fleet: Fleet) -> None:
        """Every worker holds to the shares of its drives; one that was started again knows of none."""

        async def tell(worker: WorkerHandle) -> None:
            try:
                shares: dict[str, Plain] = {name: dict(of_target) for name, of_target in self._shares.items()}
                await worker.channel.admin("shares_set", {"shares": shares}, deadline_ns=CONTROL_DEADLINE_NS)
            except KVStoreError as error:
                log.debug("worker not told of the shares: %s", error)

        if self._shares or self.is_settled:
            await asyncio.gather(*map(tell, fleet.workers))

    def _quotas_of(self, book: TenantBook | None) -> dict[str, int]:
        """What the tenants file says, or a document of the cluster, which is the same for all nodes."""
        quotas = {tenant.name: tenant.quota_bytes for tenant in book or ()}
        for name, text in documents_of(self._membership.entries, Document.QUOTA).items():
            try:
                quotas[name] = decode_quota(text)
            except InvalidRequest as error:
                log.warning("quota of tenant %s is left out: %s", name, error)
        return {name: quota_bytes for name, quota_bytes in quotas.items() if quota_bytes}

    async def _tell_others(self, fleet: Fleet, quotas: Mapping[str, int]) -> None:
        now_ns = self._clock()
        for name, used in (await _used_here(fleet)).items():
            uses = {tenant: used_bytes for tenant, used_bytes in used.items() if tenant in quotas}
            entry = self._membership.entries.get(use_name(name))
            if entry is None or is_news(self._told.get(name), uses, quotas, now_ns):
                value = encode_uses(uses)
                if entry is None or entry.value != value:
                    await self._store.put(use_name(name), value)
                self._told[name] = Told(uses=uses, at_ns=now_ns)

    def _settle(self, fleet: Fleet, view: View, quotas: Mapping[str, int]) -> bool:
        """Shares of our targets, from what all wrote; of ours from what we wrote last, which may not be back yet.

        False when one of ours has no share yet, because the view gives it no chunks.
        """
        now_ns = self._clock()
        ours = {owned.id for worker in fleet.workers if worker.readiness for owned in worker.readiness.targets}
        self._told = {name: told for name, told in self._told.items() if name in ours}
        uses = {**uses_of(self._membership.entries), **{name: told.uses for name, told in self._told.items()}}
        known = {target.id for target in view.targets}
        uses = {name: used for name, used in uses.items() if name in known}
        capacities = capacities_of(view)
        held: dict[str, Mapping[TargetId, int]] = {}
        for tenant, quota_bytes in quotas.items():
            used_bytes = {name: used[tenant] for name, used in uses.items() if used.get(tenant)}
            held[tenant] = self._rising.hold(tenant, shares_of(quota_bytes, used_bytes, capacities), now_ns)
        self._rising.forget_others(set(quotas), known)
        self._shares, self._quotas = shares_here(ours, capacities.keys(), held, self._shares), quotas
        self._used_all = {name: sum(used.get(name, 0) for used in uses.values()) for name in quotas}
        return ours <= self._shares.keys()

    async def _tidy(self, view: View) -> None:
        """What stands of targets that have left the view, and are not ours to come, is removed by whoever sees it."""
        known = {target.id for target in view.targets}
        for name in uses_of(self._membership.entries).keys() - known - self._told.keys():
            try:
                await self._store.delete(use_name(name))
            except KVStoreError as error:
                log.debug("%s was not removed: %s", use_name(name), error)


async def _used_here(fleet: Fleet) -> dict[TargetId, dict[str, int]]:
    """Bytes by target and tenant, of the workers that answer."""

    async def ask(worker: WorkerHandle) -> dict[TargetId, dict[str, int]]:
        try:
            value = await worker.channel.admin("uses", {}, deadline_ns=CONTROL_DEADLINE_NS)
        except KVStoreError as error:
            log.debug("no uses: %s", error)
            return {}
        return {text_of(row, "id"): _numbers(row.get("tenants")) for row in maps_of(value, "targets")}

    found: dict[TargetId, dict[str, int]] = {}
    for one in await asyncio.gather(*map(ask, fleet.workers)):
        found |= one
    return found


def _numbers(value: Plain) -> dict[str, int]:
    given = value if isinstance(value, Mapping) else {}
    return {str(name): count for name, count in given.items() if isinstance(count, int)}
