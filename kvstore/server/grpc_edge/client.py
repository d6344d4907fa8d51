"""A client of a node's control plane, for tools. Every call has a deadline and raises KVStoreError."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore.cluster.view import View
from kvstore.errors import InvalidRequest
from kvstore.limits import CONTROL_DEADLINE_NS, SECOND_NS
from kvstore.server.grpc_edge import messages
from kvstore.server.grpc_edge.codes import BEARER, CHANNEL_OPTIONS, TOKEN_METADATA, error_of
from kvstore.server.report import Answer, Drained, Dropped, Lookup, NamespacePage, NodeReport, Question
from kvstore.v1 import control_pb2 as pb
from kvstore.v1 import control_pb2_grpc as pb_grpc

_T = TypeVar("_T")


class ControlClient:
    """One channel to one node, opened by the first call. A context manager; thread-safe."""

    def __init__(self, address: str, *, deadline_ns: int = CONTROL_DEADLINE_NS, token: bytes = b"") -> None:
        """Raises InvalidRequest for a token that HTTP/2 metadata cannot carry."""
        self._address = address
        self._metadata = _metadata(token)
        self._deadline_seconds = deadline_ns / SECOND_NS
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stub: Any = pb_grpc.ControlStub(self._channel)  # type: ignore[no-untyped-call]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Idempotent."""
        self._channel.close()

    def healthy(self, service: str = "") -> bool:
        """True when the node says that it serves."""
        request = health_pb2.HealthCheckRequest(service=service)
        stub: Any = health_pb2_grpc.HealthStub(self._channel)
        return bool(self._call(stub.Check, request).status == health_pb2.HealthCheckResponse.SERVING)

    def view(self) -> View:
        """Who serves."""
        return messages.view_value(self._call(self._stub.GetView, pb.GetViewRequest()))

    def views(self, known_epoch: int = 0, *, deadline_ns: int) -> Iterator[View]:
        """Each view newer than `known_epoch`, until DeadlineExceeded or Unavailable is raised."""
        request = pb.WatchViewRequest(known_epoch=known_epoch)
        try:
            for view in self._stub.WatchView(request, timeout=deadline_ns / SECOND_NS, metadata=self._metadata):
                yield messages.view_value(view)
        except grpc.RpcError as error:
            raise error_of(error, self._address) from None

    def report(self) -> NodeReport:
        """State and metrics of the node."""
        return messages.stats_value(self._call(self._stub.GetStats, pb.GetStatsRequest()))

    def namespaces(self, tenant: str, *, after: bytes = b"", limit: int = 0) -> NamespacePage:
        """A page of a tenant's namespaces; 0 is the node's default limit."""
        request = pb.ListNamespacesRequest(tenant=tenant, after=after, limit=limit)
        page = self._call(self._stub.ListNamespaces, request)
        return NamespacePage(namespaces=tuple(map(messages.namespace_value, page.namespaces)), next=page.next)

    def lookup(self, namespace: bytes, keys: bytes, *, count: bool = False) -> Lookup:
        """Which record keys are on the node."""
        found = self._call(self._stub.Lookup, pb.LookupRequest(namespace=namespace, keys=keys, count=count))
        return Lookup(statuses=found.statuses, prefix=found.prefix, namespace_known=found.namespace_known)

    def explain(self, question: Question) -> Answer:
        """Why something was a miss."""
        request = pb.ExplainRequest(
            tenant=question.tenant,
            namespace=question.namespace,
            manifest=question.manifest,
            model=question.model,
            weights=question.weights,
            adapter=question.adapter,
            adapter_revision=question.adapter_revision,
            layout_digest=question.layout_digest,
            keys=question.keys,
            tokens=question.tokens,
        )
        return messages.answer_value(self._call(self._stub.Explain, request))

    def drop(self, tenant: str, namespace: bytes, *, manifest: bytes = b"") -> Dropped:
        """Hide everything in a namespace, on every node of the cluster.

        Args:
            manifest: `Namespace.manifest()`: then it is remembered also where the namespace is not known.
        """
        request = pb.DropNamespaceRequest(tenant=tenant, namespace=namespace, manifest=manifest)
        done = self._call(self._stub.DropNamespace, request)
        return Dropped(dropped=done.dropped, unreached=tuple(done.unreached))

    def scrub(self, bytes_second: int = 0) -> bool:
        """Verify all records; False when a round was in progress."""
        return bool(self._call(self._stub.Scrub, pb.ScrubRequest(bytes_second=bytes_second)).started)

    def drain(self, *, resume: bool = False) -> Drained:
        """Refuse puts, or take them again; how far the node has handed on what it holds."""
        return messages.drained_value(self._call(self._stub.Drain, pb.DrainRequest(resume=resume)))

    def reload_tenants(self) -> int:
        """Let the node read its tenants file again; how many tenants there are."""
        return int(self._call(self._stub.ReloadTenants, pb.ReloadTenantsRequest()).tenants)

    def _call(self, method: Callable[..., Any], request: Any) -> Any:
        try:
            return method(request, timeout=self._deadline_seconds, metadata=self._metadata)
        except grpc.RpcError as error:
            raise error_of(error, self._address) from None


def _metadata(token: bytes) -> tuple[tuple[str, str], ...]:
    if not token:
        return ()
    text = (BEARER + token).decode("latin-1")
    if not text.isascii() or not text.isprintable():
        raise InvalidRequest("the token has characters that gRPC cannot carry; use printable ASCII")
    return ((TOKEN_METADATA, text),)
