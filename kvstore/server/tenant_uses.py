"""What tenants use, gathered from the workers and set beside what the tenants file allows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvstore.errors import Internal
from kvstore.limits import TENANTS_MAX
from kvstore.server.report import TenantUse
from kvstore.server.tenants import Tenant, TenantBook
from kvstore.wire.codec import Plain

_COUNTS = ("used_bytes", "records", "refused_records")


def gathered(rows: Iterable[Mapping[str, Plain]], book: TenantBook | None) -> tuple[TenantUse, ...]:
    """One entry for each tenant, by name: those of the file, and on an open node those that have something.

    Args:
        rows: what the workers say, a row for a tenant and worker.
        book: None on an open node.
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
    return tuple(_use(name, sums[name], book.get(name) if book else None) for name in sorted(sums))


def _use(name: str, counts: list[int], tenant: Tenant | None) -> TenantUse:
    used_bytes, records, refused = counts
    return TenantUse(
        name=name,
        quota_bytes=tenant.quota_bytes if tenant else 0,
        used_bytes=used_bytes,
        records=records,
        refused_records=refused,
        weight=tenant.weight if tenant else 1.0,
    )
