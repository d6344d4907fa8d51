"""What hardware does to a data path, on scripted devices: flapping ports, endless work, limits, many clients."""

from __future__ import annotations

import errno
import os
from collections import deque
from dataclasses import replace

import pytest

from kvstore.errors import Overloaded, Unavailable
from kvstore.limits import PAIR_BACKOFF_NS_MIN, PAIRS_PER_CLIENT_MAX, RAIL_REQUESTS_MAX, SLICE_BYTES_MAX, KiB, MiB
from kvstore.testing.fake_verbs import FakeFabric, FakeHardware
from kvstore.testing.rdma_lab import client_rail, node_rail, turn_until
from kvstore.testing.rdma_suite import USUAL, RdmaJoint, slice_of
from kvstore.testing.transport_suite import Client, Fetched
from kvstore.testing.verbs_suite import Ground
from kvstore.transport.base import Landing
from kvstore.transport.rdma.client_lane import ClientLane
from kvstore.transport.rdma.link import LinkState
from kvstore.transport.rdma.marks import Lane, mark_of
from kvstore.transport.rdma.pair_queue import Transfer
from kvstore.transport.rdma.pairs import PairTable
from kvstore.transport.rdma.rail import Rail, open_rail
from kvstore.transport.rdma.staging import Staging
from kvstore.transport.rdma.statuses import Action, Status, action_of
from kvstore.transport.rdma.verbs import SUCCESS, Access, PortState, Work
from kvstore.transport.rdma_choice import GidEntry, RdmaPort, choose_port


def gid(host: int) -> bytes:
    return bytes(10) + b"\xff\xff\x0a\x4d\x00" + bytes([host])


class Bed:
    """A node's and a client's device."""

    def __init__(self) -> None:
        self.node, self.client = FakeHardware(gids={3: gid(1)}), FakeHardware(gids={3: gid(2)})
        self.fabric = FakeFabric({"node0": self.node, "client0": self.client})
        self.ground = Ground(verbs=self.fabric, names=("node0", "client0"), gid_index=3)

    def join(self) -> RdmaJoint:
        joint = RdmaJoint(self.ground, USUAL)
        self.memory = Client()
        joint.receive_into(self.memory.views)
        return joint


def give(joint: RdmaJoint, item: int, data: bytes) -> list[int]:
    sent: list[int] = []
    view = memoryview(bytearray(data))
    joint.lab.deliver([slice_of(item, data)], [view], 1, payload_bytes=len(data), on_sent=lambda: sent.append(1))
    return sent


@pytest.mark.parametrize("status", [one for one in Status if one is not Status.SUCCESS], ids=lambda one: one.name)
def test_what_each_status_costs(status: Status, monkeypatch: pytest.MonkeyPatch) -> None:
    """The transfer fails, its bytes go in frames, and the next pair is made when the table says."""
    bed = Bed()
    joint = bed.join()
    now_ns = 10**12
    joint.client.clock = lambda: now_ns
    first = joint.client.lane.number
    value = os.urandom(128 * KiB)
    with monkeypatch.context() as patched:
        patched.setattr(bed.fabric, "_transfer", lambda *_: status)
        sent = give(joint, 0, value)
        turn_until([joint.lab, joint.client], lambda: bool(sent and joint.arrived))
    assert bed.memory.data(0, len(value)) == value
    assert joint.lab.fallback_bytes == len(value)
    assert joint.lab.rail.pair_count == 0
    action, link = action_of(status), joint.client.lane.link
    assert not joint.client.lane.is_ready
    assert link.may_begin(now_ns) == (action in (Action.REFRESH, Action.FOLLOW))
    assert link.may_begin(now_ns + PAIR_BACKOFF_NS_MIN)
    now_ns += PAIR_BACKOFF_NS_MIN
    joint.open_pair()
    assert joint.client.lane.number != first
    again = give(joint, 1, value)
    turn_until([joint.lab, joint.client], lambda: bool(again))
    assert joint.lab.placed_bytes == len(value), "one-sided again"
    joint.close()


def test_a_port_that_goes_down_and_comes_back() -> None:
    bed = Bed()
    joint = bed.join()
    now_ns = 10**12
    joint.client.clock = lambda: now_ns
    values = [os.urandom(128 * KiB) for _ in range(8)]
    bed.client.state = PortState.DOWN
    sent = [give(joint, item, value) for item, value in enumerate(values)]  # eight striped chunks of one get
    turn_until([joint.lab, joint.client], lambda: all(sent) and len(joint.arrived) == 8)
    for item, value in enumerate(values):
        assert bed.memory.data(item, len(value)) == value
    assert joint.lab.fallback_bytes == 8 * 128 * KiB
    assert joint.client.lane.link.state is LinkState.WAITING

    # while the port is down every new pair fails its probe, and the pause grows
    for _ in range(3):
        now_ns += 10**10
        joint.client.open_pair()
        turn_until([joint.lab, joint.client], lambda: joint.client.lane.link.state is LinkState.WAITING)
    assert joint.client.lane.link.breaks == 4
    assert joint.lab.rail.pair_count == 0, "failed pairs are destroyed"

    bed.client.state = PortState.ACTIVE
    now_ns += 10**10
    joint.client.open_pair()
    turn_until([joint.lab, joint.client], lambda: joint.client.lane.is_ready)
    joint.arrived.clear()
    sent = [give(joint, item, value[::-1]) for item, value in enumerate(values)]
    turn_until([joint.lab, joint.client], lambda: all(sent) and len(joint.arrived) == 8)
    for item, value in enumerate(values):
        assert bed.memory.data(item, len(value)) == value[::-1]
    assert joint.lab.placed_bytes == 8 * 128 * KiB, "all of it one-sided again"
    joint.close()


def test_work_that_never_ends_holds_no_memory_once_its_call_is_given_up() -> None:
    bed = Bed()
    joint = bed.join()
    bed.fabric.hold()
    sent = give(joint, 0, b"a" * 4096)
    memory = memoryview(bytearray(4096))
    joint.offer(5, [memoryview(b"b" * 4096)])
    events = Fetched()
    joint.lab.fetch([Landing(item=5, buffer=memory)], 1, events)
    for _ in range(20):
        joint.turn()
    assert (sent, events.items) == ([], [])
    joint.lab.unfetch()  # the deadline
    bed.fabric.release()
    turn_until([joint.lab, joint.client], lambda: bool(sent))
    assert events.items == []
    assert not any(memory), "the pair was destroyed before the landing was given to somebody else"
    assert sent == [1], "the other transfer of that pair went in a frame"
    assert bed.memory.data(0, 4096) == b"a" * 4096
    joint.close()


def test_a_channel_that_closes_gives_back_memory_that_no_device_reads_any_more() -> None:
    bed = Bed()
    joint = bed.join()
    bed.fabric.hold()
    sent = give(joint, 0, b"a" * 4096)
    joint.lab.close()
    joint.lab.rail.on_readable()
    assert sent == [1]
    bed.fabric.release()
    assert not any(bed.memory.memory[0])
    joint.close()


def test_reads_and_posts_stay_within_the_bounds_of_the_device() -> None:
    bed = Bed()
    bed.node.limits = replace(bed.node.limits, completions_max=40, work_requests_max=32, region_bytes_max=64 * KiB)
    joint = bed.join()
    bed.fabric.hold()
    values = [os.urandom(500 * KiB + item) for item in range(6)]
    for item, value in enumerate(values):
        joint.offer(item, [memoryview(value)])
    memory = [memoryview(bytearray(len(value))) for value in values]
    events = Fetched()
    joint.lab.fetch([Landing(item=item, buffer=view) for item, view in enumerate(memory)], 1, events)
    posted = []
    while len(events.items) < 6:
        posted.append(sum(len(one.pieces) for one in bed.fabric._waiting))
        bed.fabric.release(1)
        joint.turn()
    assert max(posted) <= 32
    assert [bytes(view) for view in memory] == values
    assert joint.lab.pulled_bytes == sum(map(len, values))
    joint.close()


def test_many_clients_need_two_pairs_each_and_no_more() -> None:
    bed = Bed()
    rail, remote = node_rail(bed.fabric, "node0", 3), client_rail(bed.fabric, "client0", 3)
    table = PairTable(rail)
    clients = [number.to_bytes(16, "little") for number in range(1152)]
    for now_ns, client_id in enumerate(clients):
        for _ in range(3):  # calls to some of the worker's 16 drives: they share its pairs
            for lane in Lane:
                if table.ready(client_id, lane, now_ns) is None:
                    open_probed(table, remote, rail, client_id, lane, now_ns)
    assert table.opened == len(table) == rail.pair_count == 1152 * PAIRS_PER_CLIENT_MAX
    table.sweep(1152, idle_ns=1000)
    assert len(table) == 999 * PAIRS_PER_CLIENT_MAX, "who was idle for long has none"
    table.forget_client(clients[-1])
    assert len(table) == rail.pair_count == 998 * PAIRS_PER_CLIENT_MAX
    table.close()
    assert rail.pair_count == 0


def open_probed(table: PairTable, remote: Rail, rail: Rail, client_id: bytes, lane: Lane, now_ns: int) -> None:
    end = ClientLane(remote, lane)
    answer = table.open(client_id, lane, end.begin(now_ns), now_ns)
    end.answer(answer, now_ns)
    found: list[int] = []
    table.probe(client_id, lane, found.append)
    rail.on_readable()
    assert found == [SUCCESS]
    end.probed(SUCCESS, now_ns)


def test_a_full_table_takes_from_the_idle_and_else_refuses() -> None:
    bed = Bed()
    rail, remote = node_rail(bed.fabric, "node0", 3), client_rail(bed.fabric, "client0", 3)
    table = PairTable(rail, pairs_max=1)
    open_probed(table, remote, rail, b"a", Lane.FOREGROUND, 1)
    open_probed(table, remote, rail, b"b", Lane.FOREGROUND, 1)
    assert table.ready(b"a", Lane.FOREGROUND, 2) is None
    taken_down = table.ready(b"b", Lane.FOREGROUND, 2)
    assert taken_down is not None
    taken_down.close()  # by a channel that gave a call up
    assert table.ready(b"b", Lane.FOREGROUND, 2) is None
    open_probed(table, remote, rail, b"b", Lane.FOREGROUND, 2)
    pair = table.ready(b"b", Lane.FOREGROUND, 2)
    assert pair is not None
    bed.fabric.hold()
    pair.submit(Transfer(Work.READ, [(0, 64, 0, 0, 0)], lambda status: None))
    with pytest.raises(Overloaded, match="at most 1 may be"):
        table.open(b"c", Lane.FOREGROUND, ClientLane(remote, Lane.FOREGROUND).begin(3), 3)


def test_a_device_that_takes_no_more_pairs_or_memory_says_so() -> None:
    bed = Bed()
    rail, remote = node_rail(bed.fabric, "node0", 3), client_rail(bed.fabric, "client0", 3)
    table = PairTable(rail)
    lane = ClientLane(remote, Lane.FOREGROUND)
    offer = lane.begin(0)
    bed.node.refusals["create_qp"] = deque([errno.ENOMEM])
    with pytest.raises(Unavailable, match=r"ibv_create_qp .* Cannot allocate memory"):
        table.open(b"a", Lane.FOREGROUND, offer, 0)
    bed.node.refusals["modify_qp"] = deque([errno.ENETUNREACH])
    with pytest.raises(Unavailable, match="unreachable"):
        table.open(b"a", Lane.FOREGROUND, offer, 0)
    assert rail.pair_count == len(table) == 0
    bed.client.refusals["create_qp"] = deque([errno.ENOMEM])
    lane.broke(action_of(Status.FLUSHED), 0)
    now_ns = 10**12
    with pytest.raises(Unavailable):
        lane.begin(now_ns)
    assert lane.link.state is LinkState.WAITING


def test_a_post_that_is_refused_breaks_the_pair_and_goes_in_a_frame() -> None:
    bed = Bed()
    joint = bed.join()
    bed.node.refusals["post_send"] = deque([errno.ENOMEM])
    data = os.urandom(SLICE_BYTES_MAX)
    sent = give(joint, 0, data)
    turn_until([joint.lab, joint.client], lambda: bool(sent and joint.arrived))
    assert bed.memory.data(0, len(data)) == data
    assert joint.lab.rail.pair_count == 0
    joint.close()


def test_staging_is_cut_to_what_the_device_takes() -> None:
    bed = Bed()
    bed.node.limits = replace(bed.node.limits, region_bytes_max=1 * MiB)
    rail = node_rail(bed.fabric, "node0", 3)
    staging = Staging(rail)
    arenas = [memoryview(bytearray(2 * MiB + 4096)) for _ in range(2)]
    for arena in arenas:
        staging.add(arena)
    assert len(bed.fabric.regions) == 7  # three each, and the rail's pad
    begin = staging._regions[0].address
    first, second = staging.cut(begin + 1 * MiB - 10, 30) or []
    assert (first[:2], second[:2]) == ((begin + 1 * MiB - 10, 10), (begin + 1 * MiB, 20))
    assert staging.cut(begin - 1, 5) is None
    assert staging.cut(begin + 2 * MiB + 4000, 200) is None or abs(staging._begins[3] - begin) == 2 * MiB + 4096
    staging.close()
    rail.close()
    assert not bed.fabric.regions


def test_all_requests_of_a_rail_fit_its_completion_queue() -> None:
    bed = Bed()
    rail, remote = node_rail(bed.fabric, "node0", 3), client_rail(bed.fabric, "client0", 3)
    table = PairTable(rail)
    ends: list[int] = []
    bed.fabric.hold()
    pairs = []
    for number in range(80):
        lane = ClientLane(remote, Lane.FOREGROUND)
        lane.answer(table.open(bytes([number]), Lane.FOREGROUND, lane.begin(0), 0), 0)
        entry = table._entries[bytes([number]), Lane.FOREGROUND].pair
        entry.submit(Transfer(Work.READ, [(0, 8, 0, 0, 0)] * 300, ends.append))
        pairs.append(entry)
    assert sum(pair.posted for pair in pairs) == RAIL_REQUESTS_MAX
    bed.fabric.release()
    turn_until([], lambda: bool(rail.on_readable() or len(ends) == 80))  # reads end once a thread destroyed their pair
    assert set(ends) <= {Status.FLUSHED}
    assert rail.pair_count == 0


def test_a_rail_stands_on_the_port_that_was_chosen() -> None:
    bed = Bed()
    ipv4 = GidEntry(index=3, gid="::ffff:10.77.0.1", type="RoCE v2", netdev="eth0")
    local = GidEntry(index=0, gid="fe80::1", type="RoCE v2", netdev="eth0")
    port = RdmaPort(device="node0", port=1, link_layer="Ethernet", state="ACTIVE", gids=(local, ipv4))
    rail = open_rail(bed.fabric, choose_port([port]), remote_access=Access.LOCAL_READ)
    assert (rail.port_number, rail.gid_index) == (1, 3)
    assert rail.new_pair(mark_of(Lane.FOREGROUND), lambda *_: None).offer().end.gid == gid(1)
    rail.close()
    bed.node.refusals["create_cq"] = deque([errno.ENOMEM])
    with pytest.raises(Unavailable, match="create_cq"):
        open_rail(bed.fabric, choose_port([port]), remote_access=Access.LOCAL_READ)
