"""The engine as one tenant sees it: with its own namespaces only."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.engine.api import Engine, NamespaceRef
from kvstore.errors import Denied, FormatUnsupported, InvalidRequest
from kvstore.limits import MANIFESTS_SHARE_TENANT, NAMESPACES_PER_TENANT_MAX
from kvstore.types.digest import digest
from kvstore.types.namespace import Manifest


class TenantEngine:
    """Implements `kvstore.engine.api.Engine` over another one.

    Every verb names its namespace by digest and needs a reference to go on, and references are given out here alone:
    another tenant's namespace is answered as one that nobody ever registered. All else is the engine's own method.
    """

    __slots__ = (
        "_add_namespace",
        "_find",
        "_is_full",
        "_on_foreign",
        "client_gone",
        "delete",
        "drop_namespace",
        "filenos",
        "look_cached",
        "match",
        "next_timer_ns",
        "open_parcels",
        "open_put",
        "poll",
        "prefetch",
        "read",
        "take_cached",
        "tenant",
        "unpin",
        "wait",
    )

    def __init__(
        self,
        engine: Engine,
        tenant: str,
        *,
        on_foreign: Callable[[], None],
        is_full: Callable[[], bool],
    ) -> None:
        """
        Args:
            on_foreign: Called when the tenant names a namespace of another one.
            is_full: Whether the tenant has as many namespaces, or bytes of their manifests, as one may have.
        """
        self._is_full = is_full
        self.tenant = tenant
        self._find = engine.namespace
        self._add_namespace = engine.add_namespace
        self._on_foreign = on_foreign
        self.client_gone = engine.client_gone
        self.delete = engine.delete
        self.drop_namespace = engine.drop_namespace
        self.filenos = engine.filenos
        self.look_cached = engine.look_cached
        self.match = engine.match
        self.next_timer_ns = engine.next_timer_ns
        self.open_parcels = engine.open_parcels
        self.open_put = engine.open_put
        self.poll = engine.poll
        self.prefetch = engine.prefetch
        self.read = engine.read
        self.take_cached = engine.take_cached
        self.unpin = engine.unpin
        self.wait = engine.wait

    def namespace(self, digest: bytes) -> NamespaceRef | None:
        """See `Engine.namespace`; None also for a namespace of another tenant."""
        ref = self._find(digest)
        if ref is None or ref.tenant == self.tenant:
            return ref
        self._on_foreign()
        return None

    def add_namespace(self, manifest: bytes, *, copies: int = 0) -> NamespaceRef:
        """See `Engine.add_namespace`. Raises Denied for a manifest that names another tenant."""
        try:
            named = Manifest.decode(manifest).tenant
        except FormatUnsupported as error:
            raise InvalidRequest(f"namespace manifest of {len(manifest)} bytes: {error}") from error
        if named != self.tenant:
            self._on_foreign()
            raise Denied(
                f"the namespace is of tenant {named!r}, the token of tenant {self.tenant!r}; "
                f"pass Namespace(tenant={self.tenant!r}, ...), or the other tenant's token"
            )
        if self._find(digest(manifest)) is None and self._is_full():
            raise InvalidRequest(
                f"tenant {self.tenant!r} has {NAMESPACES_PER_TENANT_MAX} namespaces here, or "
                f"{MANIFESTS_SHARE_TENANT:.0%} of what the drive keeps of manifests, the limit of one tenant; use "
                "fewer distinct salts, adapters or layouts"
            )
        return self._add_namespace(manifest, copies=copies)
