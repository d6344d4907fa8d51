"""The pure parts of a queue pair: what is posted when, what both ends agree on, when the next one may be made."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidRequest, Overloaded
from kvstore.limits import (
    CHAIN_REQUESTS_MAX,
    PAIR_BACKOFF_NS_MAX,
    PAIR_BACKOFF_NS_MIN,
    PAIR_READS_MAX,
    PAIR_REQUESTS_MAX,
)
from kvstore.transport.rdma.link import Link, LinkState
from kvstore.transport.rdma.marks import DEFAULT_MARKS, Lane, Mark, lane_of, mark_of
from kvstore.transport.rdma.pair_offer import PairOffer, path_between
from kvstore.transport.rdma.pair_queue import Chain, PairQueue, Transfer
from kvstore.transport.rdma.statuses import Action
from kvstore.transport.rdma.verbs import SUCCESS, Access, Completion, PairEnd, Piece, Work
from kvstore.types.flow import FlowClass

FENCE = (0xF000, 99)


def pieces(count: int, *, first: int = 0) -> list[Piece]:
    return [(100 * number, 10, 1, 7000 + 10 * number, 2) for number in range(first, first + count)]


def take_all(queue: PairQueue, room: int = 1 << 30) -> list[Chain]:
    found = []
    while (chain := queue.next_chain(room)) is not None:
        found.append(chain)
        room -= chain.count
    return found


def empty_queue(requests_max: int = PAIR_REQUESTS_MAX) -> PairQueue:
    return PairQueue(fence=FENCE, ids=itertools.count(1), requests_max=requests_max)


def end(queue: PairQueue, chain: Chain) -> Transfer | None:
    return queue.ended(Completion(chain.work_id, SUCCESS, 5, 0))


def test_a_read_is_one_chain_and_a_write_ends_with_a_fence() -> None:
    queue = empty_queue()
    read = Transfer(Work.READ, pieces(3), lambda status: None)
    write = Transfer(Work.WRITE, pieces(2), lambda status: None)
    queue.add(read)
    queue.add(write)
    first, second, fence = take_all(queue)
    assert (first.kind, list(first.pieces)) == (Work.READ, pieces(3))
    assert (second.kind, list(second.pieces)) == (Work.WRITE, pieces(2))
    # the last byte of the last piece, which lies at 7010 and is 10 long
    assert (fence.kind, list(fence.pieces)) == (Work.READ, [(0xF000, 1, 99, 7019, 2)])
    assert queue.posted == 6
    assert end(queue, first) is read
    assert end(queue, second) is None, "the writes may not be in memory yet"
    assert end(queue, fence) is write
    assert queue.is_idle


@given(
    st.lists(st.tuples(st.sampled_from([Work.READ, Work.WRITE]), st.integers(1, 200)), max_size=8),
    st.integers(1, 100),
    st.randoms(use_true_random=False),
)
def test_all_is_posted_in_order_within_the_bounds(
    wanted: list[tuple[Work, int]], requests_max: int, random: object
) -> None:
    queue = empty_queue(requests_max)
    transfers = [Transfer(kind, pieces(count), lambda status: None) for kind, count in wanted]
    for transfer in transfers:
        queue.add(transfer)
    posted: list[tuple[Work, Piece]] = []
    flying: list[Chain] = []
    ended: list[Transfer] = []
    while not queue.is_idle:
        for chain in take_all(queue, random.randint(1, 80)):  # type: ignore[attr-defined]
            assert 1 <= chain.count <= CHAIN_REQUESTS_MAX
            posted += [(chain.kind, piece) for piece in chain.pieces]
            flying.append(chain)
        assert queue.posted == sum(chain.count for chain in flying) <= requests_max
        done = end(queue, flying.pop(0))
        if done is not None:
            ended.append(done)
    expected: list[tuple[Work, Piece]] = []
    for kind, count in wanted:
        expected += [(kind, piece) for piece in pieces(count)]
        if kind is Work.WRITE:
            _, length, _, remote, key = pieces(count)[-1]
            expected.append((Work.READ, (0xF000, 1, 99, remote + length - 1, key)))
    assert posted == expected
    assert ended == transfers


def test_a_drained_queue_gives_back_each_transfer_once() -> None:
    queue = empty_queue(70)
    transfers = [Transfer(Work.WRITE, pieces(65), lambda status: None) for _ in range(3)]
    for transfer in transfers:
        queue.add(transfer)
    take_all(queue)
    assert queue.drain() == transfers
    assert queue.is_idle
    assert queue.posted == 0


def test_a_queue_has_a_bound() -> None:
    queue = empty_queue()
    for _ in range(1024):
        queue.add(Transfer(Work.READ, pieces(64), lambda status: None))
    with pytest.raises(Overloaded, match="65536"):
        queue.add(Transfer(Work.READ, pieces(1), lambda status: None))


def offer(mtu: int, reads: int, number: int = 5) -> PairOffer:
    end = PairEnd(number=number, packet_number=number + 1, lid=3, gid=bytes(range(16)))
    return PairOffer(end=end, mtu_bytes=mtu, reads_max=reads, probe_address=77, probe_key=8, probe_word=b"w" * 16)


@pytest.mark.parametrize(("ours", "theirs", "agreed"), [(4096, 1024, 1024), (4096, 4096, 4096), (512, 4096, 512)])
def test_both_ends_come_to_the_same_path(ours: int, theirs: int, agreed: int) -> None:
    here, there = offer(ours, 16, 5), offer(theirs, 128, 6)
    mark = mark_of(Lane.FOREGROUND)
    paths = [
        path_between(one, PairOffer.decode(other.encode()), port=1, gid_index=3, mark=mark, access=Access.LOCAL_READ)
        for one, other in ((here, there), (there, here))
    ]
    assert [path.mtu_bytes for path in paths] == [agreed, agreed]
    assert [(path.reads_out, path.reads_in) for path in paths] == [(PAIR_READS_MAX, PAIR_READS_MAX)] * 2
    assert paths[0].remote == there.end
    assert paths[0].packet_number == here.end.packet_number
    assert paths[0].traffic_class == 26 << 2 | 2
    assert paths[0].retry_count < 7, "which is without end for some devices"


def test_an_offer_survives_its_encoding_and_nonsense_does_not() -> None:
    one = offer(2048, 4)
    assert PairOffer.decode(one.encode()) == one
    assert PairOffer.decode(one.encode() + b"of a newer version") == one
    for bad in (b"", one.encode()[:-1], offer(1500, 4).encode(), offer(1024, 0).encode()):
        with pytest.raises(InvalidRequest):
            PairOffer.decode(bad)


def test_every_class_has_a_lane_and_reads_that_somebody_waits_for_have_their_own() -> None:
    assert [lane_of(flow) for flow in FlowClass] == [Lane.FOREGROUND] * 2 + [Lane.BACKGROUND] * 3
    assert mark_of(Lane.FOREGROUND) == DEFAULT_MARKS[FlowClass.DECODE_READ]
    assert mark_of(Lane.BACKGROUND) == DEFAULT_MARKS[FlowClass.PREFETCH]
    own = {**DEFAULT_MARKS, FlowClass.DECODE_READ: Mark(dscp=46, service_level=5)}
    assert mark_of(Lane.FOREGROUND, own).traffic_class == 46 << 2 | 2
    for dscp, level in ((64, 0), (0, 16), (-1, 0)):
        with pytest.raises(InvalidRequest, match="DSCP is 0 to 63"):
            Mark(dscp=dscp, service_level=level)


def test_a_broken_link_is_made_again_after_a_growing_pause() -> None:
    link = Link()
    now = 1_000
    pauses = []
    for _ in range(9):
        assert link.may_begin(now)
        link.begin(now)
        link.probed()
        link.broke(Action.REBUILD, now)
        assert not link.may_begin(now)
        pause = next(
            step for step in range(0, 2 * PAIR_BACKOFF_NS_MAX, PAIR_BACKOFF_NS_MIN) if link.may_begin(now + step)
        )
        pauses.append(pause)
        now += pause
    assert pauses[:3] == [PAIR_BACKOFF_NS_MIN, 2 * PAIR_BACKOFF_NS_MIN, 4 * PAIR_BACKOFF_NS_MIN]
    assert pauses == sorted(pauses)
    assert pauses[-1] == PAIR_BACKOFF_NS_MAX
    link.begin(now)
    link.probed()
    link.worked()
    link.broke(Action.REBUILD, now)
    assert link.may_begin(now + PAIR_BACKOFF_NS_MIN), "it had worked between"
    assert link.rebuilt == 9


def test_a_remote_access_error_refreshes_at_once_but_only_once() -> None:
    link = Link()
    link.begin(0)
    link.probed()
    link.broke(Action.REFRESH, 0)
    assert link.may_begin(0)
    link.begin(0)
    link.probed()
    link.broke(Action.REFRESH, 0)
    assert not link.may_begin(0)
    assert link.may_begin(PAIR_BACKOFF_NS_MIN)


def test_a_link_that_is_retired_or_fails_while_it_is_made() -> None:
    link = Link()
    link.begin(0)
    link.retired()
    assert link.may_begin(0)
    link.begin(0)
    link.broke(Action.REBUILD, 0)
    assert link.state is LinkState.WAITING
    link.retired()
    assert not link.may_begin(0), "retiring does not shorten the pause"
    link.close()
    assert not link.may_begin(1 << 60)
