"""What tenants use, gathered from the workers and set beside what the tenants file allows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvstore.errors import Internal
from kvstore.limits import TENANTS_MAX
from kvstore.server.report import TenantReport, TenantShare
from kvstore.server.tenants import Tenant, TenantBook
from kvstore.wire.codec import Plain

_COUNTS = ("used_bytes", "records", "refused_records")


def gathered(
    rows: Iterable[Mapping[str, Plain]], book: TenantBook | None, shares: Mapping[str, TenantShare] | None = None
) -> tuple[TenantReport, ...]:
    """One entry for each tenant, by name: those of the file, and on an open node those that have something.

    Args:
        rows: what the workers say, a row for a tenant and worker.
        book: None on an open node.
        shares: of the quotas, in a cluster; None elsewhere.
    """
    sums: dict[str, list[int]] = {tenant.name: [0, 0, 0] for tenant in book or ()}
    for row in rows:
        counts = [row.get(name) for name in _COUNTS]
        name = row.get("name")
        if not isinstance(name, str) or not all(isinstance(count, int) for count in counts):
            raise Internal(f"a worker counted a tenant as {row!r:.200}")
        if name not in sums and len(sums) >= 2 * TENANTS_MAX:
            continue
        known = sums.setdefault(name, [0, 0, 0])
        for at, count in enumerate(counts):
            assert isinstance(count, int)
            known[at] += count
    known_shares = shares or {}
    return tuple(
        _use(name, sums[name], book.get(name) if book else None, known_shares.get(name)) for name in sorted(sums)
    )


def _use(name: str, counts: list[int], tenant: Tenant | None, share: TenantShare | None) -> TenantReport:
    used_bytes, records, refused = counts
    own_quota_bytes = tenant.quota_bytes if tenant else 0
    return TenantReport(
        name=name,
        quota_bytes=share.quota_bytes if share else own_quota_bytes,
        used_bytes=used_bytes,
        records=records,
        refused_records=refused,
        weight=tenant.weight if tenant else 1.0,
        share_bytes=share.share_bytes if share else 0,
        cluster_used_bytes=share.cluster_used_bytes if share else 0,
    )
