"""Places of a call that is over, as far as the client waits: whose pages the node may still write to."""

from __future__ import annotations

import mmap

import pytest

from kvstore.limits import KiB
from kvstore.types.results import MissReason
from kvstore_client.incoming import HIT, OPEN
from kvstore_client.shm import SharedMemory, address_of
from kvstore_client.shm_places import ConnectionRegions, Places
from kvstore_client.stats import Counters

SIZE = 64 * KiB


class Record:
    """One item of a read that has come so far."""

    def __init__(self, status: int, memory: memoryview) -> None:
        self.status = status
        self.memory = memory


@pytest.mark.parametrize(
    ("status", "has_ended", "is_taken_back"),
    [
        (HIT, False, False),
        (HIT, True, False),
        (OPEN, False, True),
        (MissReason.DEADLINE, False, True),
        (MissReason.DEADLINE, True, True),
        (MissReason.ABSENT, True, False),
        (MissReason.CORRUPT, True, False),
        # the first slices were enough to give it up, and the node puts the others into place when we have returned
        (MissReason.CORRUPT, False, True),
        (MissReason.LAYOUT, False, True),
    ],
)
def test_what_a_node_writes_after_the_return_is_not_seen(status: int, has_ended: bool, is_taken_back: bool) -> None:
    shared = SharedMemory()
    memory = shared.allocate(SIZE, prefault=False)
    assert memory is not None
    found = shared.find(address_of(memory), SIZE)
    assert found is not None
    places = Places()
    places.items.append(0)
    places.found.append(memory)
    with mmap.mmap(found[0].fd, SIZE) as node:
        ConnectionRegions(shared, Counters()).settle(places, [Record(int(status), memory)], has_ended=has_ended)
        memory[:] = b"m" * SIZE
        node[:] = b"n" * SIZE
    assert bytes(memory) == (b"m" if is_taken_back else b"n") * SIZE
