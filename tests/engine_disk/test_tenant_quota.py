"""Quota: what each tenant has is counted exactly, bounds its puts, and makes its own oldest records go."""

from __future__ import annotations

import random

import pytest

from kvstore.device.memory import MemoryDevice
from kvstore.engine.api import NamespaceRef, PutSpec, PutTicket
from kvstore.engine.location import location_page_counts
from kvstore.engine.namespaces import index_keys
from kvstore.limits import PAGE_BYTES, SECOND_NS, KiB, MiB
from kvstore.testing.store_rig import StoreRig
from kvstore.types.flow import FlowClass
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore.types.results import Exists, Refused, RefusedReason, Stored

LAYOUT = KVLayout.opaque(chunk_bytes=1 * MiB, chunk_tokens=16)
PADDED = 64 * KiB
PAYLOAD = PADDED - 2 * PAGE_BYTES  # with its header page and at most a page of padding


def key_of(number: int) -> bytes:
    return random.Random(number).randbytes(32)


def namespace(rig: StoreRig, tenant: str, model: str = "m") -> NamespaceRef:
    return rig.ledger.add_namespace(Namespace(tenant=tenant, model=model, weights="w", layout=LAYOUT).manifest())


def put(rig: StoreRig, ref: NamespaceRef, number: int) -> Stored | Exists | Refused:
    return rig.put(ref, key_of(number), random.Random(number).randbytes(PAYLOAD))


def used_bytes(rig: StoreRig, tenant: str) -> int:
    return rig.ledger.usage.of(tenant).pages * PAGE_BYTES


def recounted_bytes(rig: StoreRig, refs: list[NamespaceRef], numbers: range) -> int:
    """The same from the index, record by record."""
    pages = 0
    for ref in refs:
        locations = rig.catalog.lookup(index_keys(ref, b"".join(map(key_of, numbers))))
        pages += int(location_page_counts(locations).sum())
    return pages * PAGE_BYTES


def present(rig: StoreRig, ref: NamespaceRef, numbers: range) -> list[int]:
    locations = rig.catalog.lookup(index_keys(ref, b"".join(map(key_of, numbers))))
    return [number for number, location in zip(numbers, locations.tolist(), strict=True) if location]


def check(rig: StoreRig) -> None:
    """Tenants together have what is live."""
    assert sum(use.pages for use in rig.ledger.usage) * PAGE_BYTES == rig.ledger.live_bytes
    assert all(use.waiting_pages == 0 for use in rig.ledger.usage)
    rig.check_accounts()


@pytest.fixture
def rig() -> StoreRig:
    return StoreRig(MemoryDevice(size_bytes=32 * MiB))


def test_use_is_counted_through_puts_deletes_drops_evictions_and_a_restart(rig: StoreRig) -> None:
    a1, a2, b = namespace(rig, "a"), namespace(rig, "a", "other"), namespace(rig, "b")
    numbers = range(60)
    for number in numbers:
        for ref in (a1, a2, b):
            put(rig, ref, number)
    assert used_bytes(rig, "a") == recounted_bytes(rig, [a1, a2], numbers)
    assert used_bytes(rig, "b") == recounted_bytes(rig, [b], numbers)
    rig.delete(a1, [key_of(number) for number in range(10)])
    assert used_bytes(rig, "a") == recounted_bytes(rig, [a1, a2], numbers)
    assert rig.ledger.usage.of("a").records == 110
    rig.ledger.drop_namespace(a2, lambda error: None)
    rig.settle()
    assert rig.ledger.usage.of("a").records == 50
    check(rig)
    for number in range(1000, 1600):  # several times the drive
        put(rig, b, number)
    rig.settle()
    assert rig.metrics.evicted_segments > 0
    check(rig)
    before = {use.name: (use.pages, use.records) for use in rig.ledger.usage if use.pages}
    again = StoreRig(rig.device, now_ns=rig.now_ns)
    assert {use.name: (use.pages, use.records) for use in again.ledger.usage if use.pages} == before
    check(again)


def test_a_put_above_the_quota_is_refused_with_the_numbers(rig: StoreRig) -> None:
    ref, other = namespace(rig, "small"), namespace(rig, "other")
    rig.ledger.usage.set_quotas({"small": 40 * PAGE_BYTES})
    first = put(rig, ref, 0)
    assert isinstance(first, Stored)
    begun = [rig.begin_put(ref, key_of(number), bytes(PAYLOAD)) for number in range(1, 6)]
    rig.settle(lambda: all(one.outcome is not None for one in begun))
    outcomes = [one.outcome for one in begun]
    refused = [one for one in outcomes if isinstance(one, Refused)]
    assert len(refused) == 4, "what is on its way counts too"
    assert {one.reason for one in refused} == {RefusedReason.QUOTA}
    assert f"quota of {40 * PAGE_BYTES}" in refused[0].detail
    assert "'small'" in refused[0].detail
    assert rig.metrics.refusals[RefusedReason.QUOTA] == 4
    assert rig.ledger.usage.of("small").refused_records == 4
    assert isinstance(put(rig, other, 0), Stored), "it is the one tenant's alone"
    assert isinstance(put(rig, ref, 0), Exists | Stored)
    rig.settle()
    check(rig)


def test_streaming_puts_count_too(rig: StoreRig) -> None:
    ref = namespace(rig, "small")
    rig.ledger.usage.set_quotas({"small": 20 * PAGE_BYTES})
    answers: list[PutTicket | Exists | Refused] = []
    for number in range(3):
        spec = PutSpec(
            namespace=ref,
            key=key_of(number),
            payload_bytes=PAYLOAD,
            block_bytes=PAGE_BYTES,
            crc_table=None,
            flow=FlowClass.WRITEBACK,
            deadline_ns=rig.now_ns + SECOND_NS,
            client_id=bytes(16),
        )
        rig.store.writer.open_put(spec, answers.append, streaming=True)
    rig.settle(lambda: len(answers) == 3)
    assert [isinstance(one, Refused) for one in answers] == [False, True, True]
    granted = answers[0]
    assert not isinstance(granted, Exists | Refused)
    granted.abort()
    check(rig)


def test_a_tenant_at_its_quota_gives_up_its_own_oldest_and_nobody_elses(rig: StoreRig) -> None:
    full, other = namespace(rig, "full"), namespace(rig, "other")
    for number in range(40):
        put(rig, other, number)
    quota = 60 * PADDED
    rig.ledger.usage.set_quotas({"full": quota})
    stored = []
    for number in range(200):
        rig.ledger.tick += 10
        if isinstance(put(rig, full, number), Stored):
            stored.append(number)
        rig.settle()
        assert used_bytes(rig, "full") <= quota
    assert len(stored) == 200, "with room made beforehand none has to be refused"
    left = present(rig, full, range(200))
    assert left == list(range(200 - len(left), 200)), "the oldest went"
    assert used_bytes(rig, "full") >= 0.8 * quota
    assert present(rig, other, range(40)) == list(range(40))
    check(rig)
    again = StoreRig(rig.device, now_ns=rig.now_ns)
    assert present(again, namespace(again, "full"), range(200)) == left, "they stay away"
    check(again)


def test_what_is_pinned_stays_and_the_next_oldest_goes(rig: StoreRig) -> None:
    ref = namespace(rig, "full")
    rig.ledger.usage.set_quotas({"full": 60 * PADDED})
    for number in range(10):
        put(rig, ref, number)
    rig.catalog.pin(rig.catalog.index.find_many(index_keys(ref, b"".join(map(key_of, range(10))))))
    for number in range(10, 150):
        rig.ledger.tick += 10
        put(rig, ref, number)
        rig.settle()
    assert present(rig, ref, range(10)) == list(range(10))
    assert present(rig, ref, range(10, 20)) == []
    check(rig)


def test_a_quota_that_shrinks_makes_room_by_and_by(rig: StoreRig) -> None:
    ref = namespace(rig, "full")
    for number in range(100):
        rig.ledger.tick += 1
        put(rig, ref, number)
    rig.ledger.usage.set_quotas({"full": 30 * PADDED})
    for _ in range(100):
        rig.poll()
        rig.settle()
    assert used_bytes(rig, "full") <= 30 * PADDED
    assert isinstance(put(rig, ref, 1000), Stored)
    check(rig)


def test_what_was_given_up_and_put_again_and_deleted_does_not_return(rig: StoreRig) -> None:
    ref = namespace(rig, "full")
    rig.ledger.usage.set_quotas({"full": 30 * PADDED})
    for number in range(60):
        rig.ledger.tick += 10
        put(rig, ref, number)
        rig.settle()
    assert not present(rig, ref, range(1))
    put(rig, ref, 0)
    rig.delete(ref, [key_of(0)])
    again = StoreRig(rig.device, now_ns=rig.now_ns)
    assert not present(again, namespace(again, "full"), range(1))


def test_a_put_that_finds_no_room_is_made_room_for_however_large_it_is(rig: StoreRig) -> None:
    ref, other = namespace(rig, "full"), namespace(rig, "other")
    put(rig, other, 0)
    quota = 20 * PADDED  # a record is 5% of it, as much as may be free before anything goes
    rig.ledger.usage.set_quotas({"full": quota})
    for number in range(18):
        rig.ledger.tick += 1
        assert isinstance(put(rig, ref, number), Stored)
    rig.settle()
    large = random.Random(99).randbytes(6 * PADDED)
    assert isinstance(rig.put(ref, key_of(99), large), Refused)
    rig.settle()
    assert isinstance(rig.put(ref, key_of(99), large), Stored), "its oldest chunks went"
    rig.settle()
    assert used_bytes(rig, "full") <= quota
    assert present(rig, other, range(1)) == [0]
    rig.delete(ref, [key_of(99)])
    before = used_bytes(rig, "full")
    put(rig, ref, 100)
    rig.settle()
    assert used_bytes(rig, "full") > before, "nothing goes for what was made room for before"
    check(rig)


def test_nothing_goes_for_a_put_that_never_fits(rig: StoreRig) -> None:
    ref = namespace(rig, "small")
    rig.ledger.usage.set_quotas({"small": 4 * PADDED})
    put(rig, ref, 0)
    refused = rig.put(ref, key_of(1), bytes(6 * PADDED))
    assert isinstance(refused, Refused)
    assert "Raise the quota" in refused.detail
    assert "put again" not in refused.detail
    rig.settle()
    assert present(rig, ref, range(1)) == [0]
    check(rig)
