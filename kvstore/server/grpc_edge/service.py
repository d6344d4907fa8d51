"""The gRPC server: control, health and reflection, on a Unix socket that only the supervisor's port leads to."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, TypeAlias, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvstore.errors import Denied, InvalidRequest, KVStoreError
from kvstore.limits import (
    CONTROL_DEADLINE_NS,
    GRPC_CALLS_MAX,
    HANDOVER_ANSWER_NS,
    HANDOVER_WAIT_NS_MAX,
    NAMESPACES_PAGE_LIMIT_MAX,
    SECOND_NS,
)
from kvstore.server.control import Control
from kvstore.server.drops import DropOrder
from kvstore.server.grpc_edge import messages
from kvstore.server.grpc_edge.codes import BEARER, SERVER_OPTIONS, TOKEN_METADATA, status_of
from kvstore.server.report import Question
from kvstore.server.tenant_control import TenantControl
from kvstore.telemetry.metrics import SupervisorMetrics, error_index
from kvstore.v1 import control_pb2 as pb
from kvstore.v1 import control_pb2_grpc as pb_grpc

log = logging.getLogger(__name__)

LIVENESS_SERVICE: Final = "kvstore.liveness"
"""Health service that is SERVING as long as the supervisor runs; "" and the control service mean readiness."""

_CONTROL_SERVICE: Final = pb.DESCRIPTOR.services_by_name["Control"].full_name
_READINESS: Final = ("", _CONTROL_SERVICE)
_NAMESPACES_LIMIT_DEFAULT: Final = 100

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_T = TypeVar("_T")


class GrpcServer:
    """Owns the server and its health. Made on the running asyncio loop."""

    def __init__(self, control: Control, *, metrics: SupervisorMetrics) -> None:
        self._health = health.aio.HealthServicer()
        self._server = grpc.aio.server(options=SERVER_OPTIONS, maximum_concurrent_rpcs=GRPC_CALLS_MAX)
        pb_grpc.add_ControlServicer_to_server(_ControlServicer(control, metrics), self._server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (_CONTROL_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    async def start(self, socket_path: str) -> None:
        """Listen on a Unix socket."""
        self._server.add_insecure_port(f"unix:{socket_path}")
        await self._health.set(LIVENESS_SERVICE, health_pb2.HealthCheckResponse.SERVING)
        await self.set_serving(False)
        await self._server.start()

    async def set_serving(self, serving: bool) -> None:
        """Readiness as health checks see it."""
        response = health_pb2.HealthCheckResponse
        for service in _READINESS:
            await self._health.set(service, response.SERVING if serving else response.NOT_SERVING)

    async def stop(self, *, within_ns: int) -> None:
        """Take no new calls, and let those in progress end within the time."""
        await self._server.stop(within_ns / SECOND_NS)


class _ControlServicer(pb_grpc.ControlServicer):
    """Each method decodes, asks `Control` and encodes; `_answer` maps what goes wrong."""

    def __init__(self, control: Control, metrics: SupervisorMetrics) -> None:
        self._control = control
        self._metrics = metrics

    async def GetView(self, request: pb.GetViewRequest, context: _Context) -> pb.View:
        async def view(control: Control, _: int) -> pb.View:
            return messages.view_message(control.view())

        return await self._answer(context, view)

    async def WatchView(self, request: pb.WatchViewRequest, context: _Context) -> AsyncIterator[pb.View]:
        self._metrics.grpc_calls += 1
        try:
            async for view in self._control_for(context).views(request.known_epoch):
                self._control_for(context)  # the token may have been taken back meanwhile
                yield messages.view_message(view)
        except Denied as error:
            self._metrics.grpc_errors[error_index(error)] += 1
            await context.abort(status_of(error), str(error))
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the node is stopping; ask another one for the view")

    async def GetStats(self, request: pb.GetStatsRequest, context: _Context) -> pb.Stats:
        async def stats(control: Control, _: int) -> pb.Stats:
            return messages.stats_message(await control.report())

        return await self._answer(context, stats)

    async def ListNamespaces(self, request: pb.ListNamespacesRequest, context: _Context) -> pb.ListNamespacesResponse:
        async def page(control: Control, deadline_ns: int) -> pb.ListNamespacesResponse:
            limit = request.limit or _NAMESPACES_LIMIT_DEFAULT
            if limit > NAMESPACES_PAGE_LIMIT_MAX:
                raise InvalidRequest(f"limit is {limit}, at most {NAMESPACES_PAGE_LIMIT_MAX}; ask page by page")
            found = await control.namespaces(request.tenant, after=request.after, limit=limit, deadline_ns=deadline_ns)
            rows = [messages.namespace_message(namespace) for namespace in found.namespaces]
            return pb.ListNamespacesResponse(namespaces=rows, next=found.next)

        return await self._answer(context, page)

    async def Lookup(self, request: pb.LookupRequest, context: _Context) -> pb.LookupResponse:
        async def lookup(control: Control, deadline_ns: int) -> pb.LookupResponse:
            found = await control.lookup(request.namespace, request.keys, count=request.count, deadline_ns=deadline_ns)
            return pb.LookupResponse(
                statuses=found.statuses, prefix=found.prefix, namespace_known=found.namespace_known
            )

        return await self._answer(context, lookup)

    async def Explain(self, request: pb.ExplainRequest, context: _Context) -> pb.ExplainResponse:
        async def explain(control: Control, deadline_ns: int) -> pb.ExplainResponse:
            question = Question(
                tenant=request.tenant,
                namespace=request.namespace,
                manifest=request.manifest,
                model=request.model,
                weights=request.weights,
                adapter=request.adapter,
                adapter_revision=request.adapter_revision,
                layout_digest=request.layout_digest,
                keys=request.keys,
                tokens=tuple(request.tokens),
            )
            return messages.answer_message(await control.explain(question, deadline_ns=deadline_ns))

        return await self._answer(context, explain)

    async def DropNamespace(self, request: pb.DropNamespaceRequest, context: _Context) -> pb.DropNamespaceResponse:
        async def drop(control: Control, deadline_ns: int) -> pb.DropNamespaceResponse:
            order = DropOrder(tenant=request.tenant, namespace=request.namespace, manifest=request.manifest)
            done = await control.drop(order, deadline_ns=deadline_ns)
            return pb.DropNamespaceResponse(dropped=done.dropped, unreached=done.unreached)

        return await self._answer(context, drop)

    async def Scrub(self, request: pb.ScrubRequest, context: _Context) -> pb.ScrubResponse:
        async def scrub(control: Control, deadline_ns: int) -> pb.ScrubResponse:
            return pb.ScrubResponse(started=await control.scrub(request.bytes_second, deadline_ns=deadline_ns))

        return await self._answer(context, scrub)

    async def Drain(self, request: pb.DrainRequest, context: _Context) -> pb.DrainResponse:
        async def drain(control: Control, deadline_ns: int) -> pb.DrainResponse:
            left_seconds = context.time_remaining()
            if left_seconds is not None:  # it may wait for longer than any other verb
                deadline_ns = messages.seconds_left_ns(left_seconds, HANDOVER_WAIT_NS_MAX)
            within_ns = max(deadline_ns - HANDOVER_ANSWER_NS, 0)
            drained = await control.drain(resume=request.resume, within_ns=within_ns)
            return messages.drained_message(drained)

        return await self._answer(context, drain)

    async def ReloadTenants(self, request: pb.ReloadTenantsRequest, context: _Context) -> pb.ReloadTenantsResponse:
        async def reload(control: Control, _: int) -> pb.ReloadTenantsResponse:
            return pb.ReloadTenantsResponse(tenants=await control.reload_tenants())

        return await self._answer(context, reload)

    def _control_for(self, context: _Context) -> Control:
        """The verbs as the caller may use them. Raises Denied."""
        permit = self._control.access.permit_of(_token_of(context))
        return self._control if permit is None else TenantControl(self._control, permit)

    async def _answer(self, context: _Context, work: Callable[[Control, int], Awaitable[_T]]) -> _T:
        """Do the work within the call's time, and turn what goes wrong into a status. The root of every unary call."""
        self._metrics.grpc_calls += 1
        try:
            return await work(
                self._control_for(context), messages.seconds_left_ns(context.time_remaining(), CONTROL_DEADLINE_NS)
            )
        except KVStoreError as error:
            self._metrics.grpc_errors[error_index(error)] += 1
            await context.abort(status_of(error), str(error))
        except Exception as error:  # the root of a call: a defect is that call's failure, not the node's
            self._metrics.grpc_errors[error_index(error)] += 1
            log.exception("a control call failed by a defect of ours")
            await context.abort(grpc.StatusCode.INTERNAL, f"a defect of this node, please report it: {error!r}")


def _token_of(context: _Context) -> bytes:
    """The token in a call's metadata, empty where there is none."""
    for name, value in context.invocation_metadata() or ():
        if name == TOKEN_METADATA:
            raw = value.encode() if isinstance(value, str) else value
            return raw[len(BEARER) :].strip() if raw.startswith(BEARER) else raw
    return b""
