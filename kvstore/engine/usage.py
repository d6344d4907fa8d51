"""What each tenant has on a drive, in padded records, and what it may have.

The ledger counts here whatever it counts as live, so the numbers are exact at any moment and after a restart; puts in
progress are held against the quota from their grant to their end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvstore.limits import PAGE_BYTES, QUOTA_TRIM_SHARE, QUOTA_TRIM_TO_SHARE
from kvstore.types.results import Refused, RefusedReason


class TenantUse:
    """One tenant on one drive.

    Attributes:
        pages, records: live, of all its namespaces in their present generation.
        waiting_pages: of puts in progress.
        quota_pages: 0 is no quota.
        refused_records: puts refused for it.
        wanted_pages: of the largest put refused since its oldest records went last, if it fits the quota at all.
    """

    __slots__ = ("name", "pages", "quota_pages", "records", "refused_records", "waiting_pages", "wanted_pages")

    def __init__(self, name: str) -> None:
        self.name = name
        self.pages = 0
        self.records = 0
        self.waiting_pages = 0
        self.quota_pages = 0
        self.refused_records = 0
        self.wanted_pages = 0

    def has_room(self, pages: int) -> bool:
        """Whether puts of so many pages are within the quota."""
        return not self.quota_pages or self.pages + self.waiting_pages + pages <= self.quota_pages

    def refusal(self, pages: int) -> Refused | None:
        """Why a put of so many pages is not taken; None where it fits."""
        if self.has_room(pages):
            return None
        self.refused_records += 1
        used, waiting, quota = (count * PAGE_BYTES for count in (self.pages, self.waiting_pages, self.quota_pages))
        fix = "Raise the quota: it has no room for one such chunk"
        if pages <= self.quota_pages:
            self.wanted_pages = max(self.wanted_pages, pages)
            fix = "Its oldest chunks go now: put again shortly, or raise the quota"
        return Refused(
            RefusedReason.QUOTA,
            f"tenant {self.name!r} has {used} bytes on this drive and {waiting} on their way; with "
            f"{pages * PAGE_BYTES} more it would be above its quota of {quota} here. {fix}",
        )

    @property
    def surplus_pages(self) -> int:
        """What must go so that puts find room again: none while the quota is not nearly used up, nor one refused."""
        taken, quota = self.pages + self.waiting_pages, self.quota_pages
        if not quota or (taken <= quota * QUOTA_TRIM_SHARE and taken + self.wanted_pages <= quota):
            return 0
        return taken - min(int(quota * QUOTA_TRIM_TO_SHARE), quota - self.wanted_pages)

    def trimmed(self) -> None:
        """Some of its records went: where that is enough, room is not kept any longer for a put that was refused."""
        if self.surplus_pages <= 0:
            self.wanted_pages = 0


class Usage:
    """All tenants of one drive, by name."""

    def __init__(self) -> None:
        self._uses: dict[str, TenantUse] = {}
        self._quotas: Mapping[str, int] = {}

    def __iter__(self) -> Iterator[TenantUse]:
        return iter(self._uses.values())

    def of(self, tenant: str) -> TenantUse:
        """The tenant's entry, made at its first record."""
        use = self._uses.get(tenant)
        if use is None:
            use = self._uses[tenant] = TenantUse(tenant)
            use.quota_pages = self._quota_pages(tenant)
        return use

    def set_quotas(self, quotas: Mapping[str, int]) -> None:
        """Bytes on this drive by tenant; a tenant that is not named has no quota."""
        self._quotas = quotas
        for use in self:
            use.quota_pages = self._quota_pages(use.name)
            if use.wanted_pages > use.quota_pages:
                use.wanted_pages = 0

    def crowded(self) -> Iterator[TenantUse]:
        """Tenants whose oldest records should go."""
        return (use for use in self._uses.values() if use.surplus_pages > 0) if self._quotas else iter(())

    def _quota_pages(self, tenant: str) -> int:
        quota_bytes = self._quotas.get(tenant, 0)
        return max(quota_bytes // PAGE_BYTES, 1) if quota_bytes else 0
