"""The control plane's verbs for the bearer of a tenant's token: the scopes, and nothing of other tenants."""

from __future__ import annotations

from dataclasses import replace

from kvstore.errors import Denied
from kvstore.server.control import Control
from kvstore.server.drops import DropOrder
from kvstore.server.report import Answer, Drained, Dropped, Lookup, NamespacePage, NodeReport, Question
from kvstore.server.tenants import Permit, Scope


class TenantControl(Control):
    """See `Control`. With the scope ADMIN a bearer sees every tenant; with the others its own, as its scopes allow.

    Every method raises Denied for what the token does not allow. That it names another tenant's namespace is none of
    these: such a namespace is unknown.
    """

    def __init__(self, control: Control, permit: Permit) -> None:
        super().__init__(control.fleet, control.access)
        self._permit = permit

    @property
    def _is_admin(self) -> bool:
        return Scope.ADMIN in self._permit.scopes

    def _check(self, tenant: str, scope: Scope, what: str) -> None:
        """Whether something may be asked about a tenant."""
        if self._is_admin:
            return
        self._permit.require(scope, what)
        if tenant != self._permit.tenant:
            raise Denied(
                f"{what} of tenant {tenant!r} was asked with a token of tenant {self._permit.tenant!r}; "
                "ask about one's own, or with a token of scope admin"
            )

    async def report(self) -> NodeReport:
        """See `Control`; without ADMIN only how the node is, and what the tenant itself uses."""
        report = await super().report()
        if self._is_admin:
            return report
        own = tuple(use for use in report.tenants if use.name == self._permit.tenant)
        workers = tuple(
            replace(
                worker,
                detail="",
                sent_bytes_second=0.0,
                received_bytes_second=0.0,
                lookup_keys=0,
                lookup_hits=0,
            )
            for worker in report.workers
        )
        fence = report.fence and "the node is cut off from its cluster"
        nodes = tuple(replace(node, version="") for node in report.nodes)  # whom it may ask about its own
        return replace(report, numbers={}, drives=(), tenants=own, workers=workers, nodes=nodes, fence=fence)

    async def namespaces(self, tenant: str, *, after: bytes, limit: int, deadline_ns: int) -> NamespacePage:
        """See `Control`."""
        self._check(tenant, Scope.READ, "the list of namespaces")
        return await super().namespaces(tenant, after=after, limit=limit, deadline_ns=deadline_ns)

    async def lookup(self, namespace: bytes, keys: bytes, *, count: bool, deadline_ns: int) -> Lookup:
        """See `Control`; also an admin looks up among its own tenant's chunks only."""
        self._permit.require(Scope.READ, "a lookup")
        return await self.lookup_of(self._permit.tenant, namespace, keys, count=count, deadline_ns=deadline_ns)

    async def explain(self, question: Question, *, deadline_ns: int) -> Answer:
        """See `Control`."""
        self._check(question.tenant, Scope.READ, "an explanation")
        return await super().explain(question, deadline_ns=deadline_ns)

    async def drop(self, order: DropOrder, *, deadline_ns: int) -> Dropped:
        """See `Control`."""
        self._check(order.tenant, Scope.WRITE, "the drop of a namespace")
        return await super().drop(order, deadline_ns=deadline_ns)

    async def scrub(self, bytes_second: int, *, deadline_ns: int) -> bool:
        """See `Control`."""
        self._permit.require(Scope.ADMIN, "a scrub")
        return await super().scrub(bytes_second, deadline_ns=deadline_ns)

    async def drain(self, *, resume: bool, within_ns: int = 0) -> Drained:
        """See `Control`."""
        self._permit.require(Scope.ADMIN, "a drain")
        return await super().drain(resume=resume, within_ns=within_ns)

    async def reload_tenants(self) -> int:
        """See `Control`."""
        self._permit.require(Scope.ADMIN, "a reload of the tenants file")
        return await super().reload_tenants()
