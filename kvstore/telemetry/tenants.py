"""What tenants use, as metrics: the tenants with most to show, the rest as one, so that series stay bounded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.limits import TENANT_SERIES_MAX

OTHERS: Final = "(others)"
"""The label of all tenants beyond TENANT_SERIES_MAX together; no tenant has this name in a metric of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantNumbers:
    """One tenant: bytes used and allowed (0: no quota), and puts refused for it."""

    name: str
    used_bytes: int
    quota_bytes: int
    refused_records: int


def bounded(tenants: Sequence[TenantNumbers]) -> Iterator[TenantNumbers]:
    """The largest as they are, then the sum of the others if there are any."""
    ranked = sorted(tenants, key=lambda tenant: (-tenant.used_bytes, tenant.name))
    yield from ranked[:TENANT_SERIES_MAX]
    rest = ranked[TENANT_SERIES_MAX:]
    if rest:
        yield TenantNumbers(
            name=OTHERS,
            used_bytes=sum(tenant.used_bytes for tenant in rest),
            quota_bytes=sum(tenant.quota_bytes for tenant in rest),
            refused_records=sum(tenant.refused_records for tenant in rest),
        )
