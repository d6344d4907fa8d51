"""Who may connect, and what each connection may do: the one place that looks at a HELLO's token and versions."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping
from typing import Final, Protocol, TypeVar

from kvstore.errors import Denied, FormatUnsupported
from kvstore.server.tenants import Permit, Scope, TenantBook, authenticate, hash_of
from kvstore.telemetry.metrics import DataplaneMetrics, DeniedKind
from kvstore.types.digest import digest
from kvstore.wire.header import VERSION, FrameType
from kvstore.wire.messages import ID_BYTES, Hello

_Connection = TypeVar("_Connection")
_Frame = TypeVar("_Frame")

SCOPE_OF: Final[Mapping[FrameType, Scope]] = {
    FrameType.MATCH: Scope.READ,
    FrameType.UNPIN: Scope.READ,
    FrameType.GET: Scope.READ,
    FrameType.GET_INTO: Scope.READ,
    FrameType.WAIT: Scope.READ,
    FrameType.PREFETCH: Scope.READ,
    FrameType.PULL: Scope.READ,
    FrameType.HEADS: Scope.READ,
    FrameType.MANIFEST: Scope.WRITE,
    FrameType.WRITER_WRITE: Scope.WRITE,
    FrameType.WRITER_COMMIT: Scope.WRITE,
    FrameType.WRITER_ABORT: Scope.WRITE,
    FrameType.DELETE: Scope.WRITE,
    FrameType.DROP: Scope.WRITE,
    FrameType.FORGET: Scope.WRITE,
}
"""What a verb needs. OFFER, OFFER_FROM and WRITER_OPEN need WRITE too, and answer for each of their items."""


PEERS_ONLY: Final = frozenset({FrameType.HEADS, FrameType.FORGET})
"""Verbs that nodes speak among themselves: no tenant's token is good for them, whatever its scopes."""

PEER_SCOPES: Final = Scope.READ | Scope.WRITE
"""What a node of the same cluster may do; nothing that concerns the node as such."""


class Admission(Protocol):
    """Decides about a HELLO."""

    def admit(self, hello: Hello) -> Permit | None:
        """What a welcome peer may do, None for all. Raises Denied for the others."""


class OpenAdmission:
    """Admits every peer: for nodes that listen on loopback only, or were told to be open."""

    def admit(self, hello: Hello) -> None:
        """Every token is good."""


class TokenAdmission:
    """Admits bearers of a tenant's token, and nodes of the same cluster; nobody before it was given tenants.

    Attributes:
        is_told: it was given tenants.
    """

    def __init__(self, metrics: DataplaneMetrics) -> None:
        self.is_told = False
        self._book = TenantBook()
        self._peer: Permit | None = None
        self._metrics = metrics

    def tell(self, book: TenantBook) -> None:
        """The tenants from now on."""
        self._book = book
        self.is_told = True

    def tell_peer_token(self, token: bytes) -> None:
        """By which the nodes of the cluster are known from now on; empty is none."""
        self._peer = Permit(tenant="", scopes=PEER_SCOPES, token_hash=hash_of(token), is_peer=True) if token else None

    def admit(self, hello: Hello) -> Permit:
        """See `Admission`."""
        peer = self._peer
        if peer is not None and hmac.compare_digest(peer.token_hash, hash_of(hello.token)):
            return peer
        try:
            return authenticate(self._book, hello.token)
        except Denied:
            self._metrics.denied[DeniedKind.WRONG_TOKEN if hello.token else DeniedKind.NO_TOKEN] += 1
            raise

    def renewed(self, permit: Permit) -> Permit | None:
        """What the bearer of a token may do now; None when it was taken back."""
        if permit.is_peer:
            return self._peer if self._peer == permit else None
        return self._book.renewed(permit)


def guarded(
    handlers: Mapping[FrameType, Callable[[_Connection, _Frame], None]],
    permit: Permit,
    on_denied: Callable[[], None],
) -> Mapping[FrameType, Callable[[_Connection, _Frame], None]]:
    """The handlers, with those of verbs that are not granted replaced by a Denied."""

    def refuser(kind: FrameType) -> Callable[[_Connection, _Frame], None]:
        def refuse(_connection: _Connection, _frame: _Frame) -> None:
            on_denied()
            permit.require(SCOPE_OF[kind], kind.name)
            raise Denied(f"{kind.name} is for nodes of this cluster only; a tenant deletes with DELETE and DROP")

        return refuse

    def is_granted(kind: FrameType) -> bool:
        return SCOPE_OF.get(kind, Scope(0)) in permit.scopes and (permit.is_peer or kind not in PEERS_ONLY)

    return {kind: handler if is_granted(kind) else refuser(kind) for kind, handler in handlers.items()}


def own_client_id(client_id: bytes, permit: Permit | None) -> bytes:
    """A client's id within its tenant: pins and writers belong to it, and another tenant cannot name it. Peers are a
    tenant of their own, without a name, which no tenant has."""
    return client_id if permit is None else digest(b"kvstore.client.v1", permit.tenant.encode(), client_id)[:ID_BYTES]


def agreed_version(hello: Hello) -> int:
    """The newest protocol version that both sides speak.

    Raises:
        FormatUnsupported: There is none.
    """
    if not hello.version_min <= VERSION <= hello.version_max:
        raise FormatUnsupported(
            f"client speaks protocol versions {hello.version_min} to {hello.version_max}, this node {VERSION}: "
            "upgrade the older side"
        )
    return VERSION
