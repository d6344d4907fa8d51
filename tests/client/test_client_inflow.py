"""The straight way of reads that are answered in several frames, in any order and grouping, and where it hands over."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.errors import Closed
from kvstore.transport import inflow
from kvstore.types.checksum import crc_table
from kvstore.types.results import MissReason
from kvstore.wire import messages as m
from kvstore.wire.header import FrameType, encode_head
from kvstore.wire.slices import FLAG_FINAL, Slice, encode_slices
from kvstore_client import Hit, KVClient, Miss, Stored, read_verbs

COUNT = 8
TOKENS = list(range(16 * COUNT))
SIZE = 100_000
BLOCK = 65_536


@pytest.fixture(params=["compiled", "python"])
def inflows(request, monkeypatch) -> None:
    """Both halves of `kvstore.transport.inflow`."""
    assert inflow.IS_COMPILED, inflow.HOW
    monkeypatch.setattr(inflow, "IS_COMPILED", request.param == "compiled")


@pytest.fixture
def client(node, inflows):
    node.is_brief = True
    with KVClient.connect(node.address, deadline=20) as made:
        yield made


@pytest.fixture
def stored(client, node, opaque):
    ns = client.namespace(opaque)
    keys = ns.keys(TOKENS)
    payloads = [random.Random(at).randbytes(SIZE) for at in range(COUNT)]
    assert all(isinstance(one, Stored) for one in ns.put(keys, payloads))
    assert read(ns, keys[:1])[1] == payloads[:1], "this one opens the connection"
    node.calls.clear()
    node.hellos.clear()
    return ns, keys, payloads


@pytest.fixture
def straight_only(monkeypatch):
    def fail(*_, **__):
        raise AssertionError("the general way was taken")

    monkeypatch.setattr(read_verbs, "load", fail)


def read(ns, keys, size: int = SIZE, **arguments):
    """Results, and what is in the memory of the hits."""
    memory = [bytearray(b"\xaa" * size) for _ in range(len(keys))]
    results = ns.get_into(keys, memory, **arguments)
    return results, [
        bytes(got[: one.length_bytes]) if isinstance(one, Hit) else None
        for one, got in zip(results, memory, strict=True)
    ]


def slice_of(item: int, record) -> Slice:
    size = len(record.payload)
    crcs = crc_table(record.payload, record.block_bytes)
    return Slice(item, 0, size, 0, True, record.content_id, size, record.block_bytes, crcs)


def frame_of(link, request, items, *, is_final: bool, change=None) -> bytes:
    """A DATA frame of these items of a GET; `change` may change its slices and payloads."""
    get = m.Get.decode(request.body)
    records = [link.node.records[get.namespace, get.keys[32 * at : 32 * at + 32]] for at in items]
    slices = [slice_of(at, one) for at, one in zip(items, records, strict=True)]
    payloads = [one.payload for one in records]
    if change is not None:
        change(slices, payloads)
    payload = b"".join(payloads)
    flags = len(slices) | (FLAG_FINAL if is_final else 0)
    body = encode_slices(slices)
    head = encode_head(FrameType.DATA, request.request_id, body, payload_bytes=len(payload), epoch=1, flags=flags)
    return head + payload


def end_of(request, statuses: bytes) -> bytes:
    return encode_head(FrameType.END, request.request_id, m.End(statuses=statuses).encode(), epoch=1)


def answer_once(node, answer: Callable[..., bytes | None]) -> None:
    """The first GET is answered by `answer`; None lets the connection break. The rest as ever."""
    left = [answer]

    def script(link, frame) -> bool:
        if frame.type is not FrameType.GET or not left:
            return False
        data = left.pop()(link, frame)
        if data is not None:
            link.socket.sendall(data)
        return True

    node.script = script


def asked_again(node) -> list[bytes]:
    """From now on, the keys of each GET."""
    keys: list[bytes] = []
    inner = node.script

    def script(link, frame) -> bool:
        if frame.type is FrameType.GET:
            get = m.Get.decode(frame.body)
            keys.append(get.keys)
        return inner(link, frame)

    node.script = script
    return keys


GROUPS = [
    [[0], [1], [2], [3], [4], [5], [6], [7]],
    [[7], [6], [5], [4], [3], [2], [1], [0]],
    [[0, 1, 2], [3, 4, 5], [6, 7]],
    [[5, 2], [0, 7, 6], [1], [4, 3]],
    [[3, 1, 0, 2, 7, 6, 5, 4]],
]


@pytest.mark.parametrize("groups", GROUPS)
def test_frames_in_any_order_and_grouping(client, node, stored, straight_only, groups) -> None:
    ns, keys, payloads = stored
    before = client.stats()
    answer_once(
        node,
        lambda link, get: b"".join(frame_of(link, get, group, is_final=group is groups[-1]) for group in groups),
    )
    results, data = read(ns, keys)
    assert data == payloads
    assert [one.content_id for one in results] == [record.content_id for record in node.records.values()]
    after = client.stats()
    assert after["load_hits"] - before["load_hits"] == COUNT
    assert after["load_bytes"] - before["load_bytes"] == COUNT * SIZE
    assert node.count(FrameType.GET) == 1


@pytest.mark.parametrize("groups", GROUPS)
def test_end_may_follow_the_last_frame(node, stored, groups) -> None:
    ns, keys, payloads = stored
    answer_once(
        node,
        lambda link, get: (
            b"".join(frame_of(link, get, group, is_final=False) for group in groups) + end_of(get, bytes(COUNT))
        ),
    )
    assert read(ns, keys)[1] == payloads
    assert read(ns, keys)[1] == payloads, "the connection is good for the next"
    assert node.count(FrameType.GET) == 2
    assert not node.hellos


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_frames_that_come_in_pieces_of_any_size(node, stored, seed) -> None:
    ns, keys, payloads = stored
    dice = random.Random(seed)
    order = dice.sample(range(COUNT), COUNT)
    cuts = sorted({0, COUNT, *dice.choices(range(COUNT), k=dice.randrange(4))})
    groups = [order[low:high] for low, high in pairwise(cuts)]

    def answer(link, get) -> None:
        whole = b"".join(frame_of(link, get, group, is_final=group is groups[-1]) for group in groups)
        while whole:
            count = dice.choice([1, 31, 32, 33, 1000, 70_000, 300_000])
            link.socket.sendall(whole[:count])
            whole = whole[count:]

    answer_once(node, answer)
    calls = node.count(FrameType.GET)
    assert read(ns, keys)[1] == payloads
    assert node.count(FrameType.GET) == calls + 1


def in_six(link, get) -> bytes:
    groups = [[1], [0, 2], [3], [4], [5], [6, 7]]
    return b"".join(frame_of(link, get, group, is_final=group is groups[-1]) for group in groups)


def test_small_blocks_and_records_of_several_pieces(node, stored, straight_only) -> None:
    ns, keys, _ = stored
    for size in (1, 4096, 70_000, 300_000):
        ns.delete(keys)
        payloads = [random.Random(at).randbytes(size) for at in range(COUNT)]
        assert all(isinstance(one, Stored) for one in ns.put(keys, payloads))
        answer_once(node, in_six)
        assert read(ns, keys, size)[1] == payloads


@pytest.mark.parametrize("gone", [0, 3, 7])
def test_a_miss_is_told_by_end_and_costs_no_second_request(client, node, stored, gone) -> None:
    ns, keys, payloads = stored
    here = [at for at in range(COUNT) if at != gone]

    def answer(link, get) -> bytes:
        frames = [frame_of(link, get, here[at : at + 2], is_final=False) for at in range(0, len(here), 2)]
        statuses = bytes(MissReason.EVICTED if at == gone else 0 for at in range(COUNT))
        return b"".join(frames) + end_of(get, statuses)

    answer_once(node, answer)
    results, data = read(ns, keys)
    assert results[gone] == Miss(MissReason.EVICTED)
    assert [one for at, one in enumerate(data) if at != gone] == [payloads[at] for at in here]
    assert node.count(FrameType.GET) == 1
    assert read(ns, keys)[1] == payloads, "the connection is good for the next"
    assert not node.hellos


@pytest.mark.parametrize("place", ["first", "middle", "last"])
@pytest.mark.parametrize("bad", [0, 3, 7])
def test_a_garbled_record_is_asked_for_alone(client, node, stored, bad, place) -> None:
    ns, keys, payloads = stored
    at = {"first": 0, "middle": SIZE // 2, "last": SIZE - 1}[place]

    def garble(slices, parts) -> None:
        for index, one in enumerate(slices):
            if one.item == bad:
                parts[index] = parts[index][:at] + bytes([parts[index][at] ^ 1]) + parts[index][at + 1 :]

    groups = [[0, 1], [2, 3], [4, 5], [6, 7]]
    answer_once(
        node,
        lambda link, get: b"".join(
            frame_of(link, get, group, is_final=group is groups[-1], change=garble) for group in groups
        ),
    )
    asked = asked_again(node)
    results, data = read(ns, keys)
    assert data == payloads
    assert all(isinstance(one, Hit) for one in results)
    assert asked == [keys.digests, keys.digests[32 * bad : 32 * bad + 32]]
    assert len(node.hellos) == 1, "on a fresh connection"
    assert (client.stats()["corrupt_blocks"], client.stats()["corrupt_recovered"]) == (1, 1)


@pytest.mark.parametrize("frame", [0, 2, 3])
@pytest.mark.parametrize("at", [0, 3, 5, 9, 14, 30, 33, 60, 90, 130])
def test_a_head_changed_on_the_way_is_never_believed(node, stored, frame, at) -> None:
    ns, keys, payloads = stored
    groups = [[0, 1], [2, 3], [4, 5], [6, 7]]

    def answer(link, get) -> None:
        frames = [bytearray(frame_of(link, get, group, is_final=group is groups[-1])) for group in groups]
        frames[frame][at] ^= 0x10
        link.socket.sendall(b"".join(frames))
        link.socket.close()  # a length that is not so makes it wait for more

    answer_once(node, answer)
    asked = asked_again(node)
    assert read(ns, keys)[1] == payloads
    assert asked[-1] == keys.digests[64 * frame :]


def lie_missing_final(link, get) -> bytes:
    return frame_of(link, get, [0, 1], is_final=False) + frame_of(link, get, [2, 3], is_final=True)


def lie_twice(link, get) -> bytes:
    return frame_of(link, get, [0, 1], is_final=False) + frame_of(link, get, [1, 2], is_final=False)


def lie_twice_in_a_frame(link, get) -> bytes:
    frames = [frame_of(link, get, [0, 1], is_final=False), frame_of(link, get, [2, 2], is_final=False)]
    return b"".join(frames) + frame_of(link, get, [3, 4, 5, 6, 7], is_final=True)


def lie_unknown_item(link, get) -> bytes:
    def change(slices, _) -> None:
        slices[0] = slices[0]._replace(item=COUNT)

    frames = [frame_of(link, get, [0, 1], is_final=False), frame_of(link, get, [2, 3], is_final=False, change=change)]
    return b"".join(frames)


def lie_end_of_hits(link, get) -> bytes:
    return frame_of(link, get, [0, 1], is_final=False) + end_of(get, bytes(COUNT))


@pytest.mark.parametrize("lie", [lie_missing_final, lie_unknown_item, lie_end_of_hits])
def test_a_node_that_breaks_the_protocol_is_not_believed(node, stored, lie) -> None:
    ns, keys, payloads = stored
    answer_once(node, lie)
    asked = asked_again(node)
    assert read(ns, keys)[1] == payloads
    assert len(asked) == 2
    assert asked[1] in (keys.digests[64:], keys.digests[128:]), "what has come is kept"


@pytest.mark.parametrize("lie", [lie_twice, lie_twice_in_a_frame])
def test_a_record_that_comes_twice_is_never_a_wrong_one(node, stored, lie) -> None:
    ns, keys, payloads = stored

    def answer(link, get) -> None:
        link.socket.sendall(lie(link, get))
        link.kill()

    answer_once(node, answer)
    assert read(ns, keys)[1] == payloads


LENGTHS = [2 * SIZE + 2 * 48 + 32 + 16] * 4  # of frames with two records each


@pytest.mark.parametrize("sent", [0, 1, 31, 32, 100, 144, 5_000, 2 * SIZE])
@pytest.mark.parametrize("frame", [0, 1, 3])
@pytest.mark.parametrize("then", ["break", "stall"])
def test_an_answer_that_does_not_come_whole(client, node, stored, frame, sent, then) -> None:
    ns, keys, payloads = stored
    go_on = threading.Event()
    groups = [[0, 1], [2, 3], [4, 5], [6, 7]]

    def answer(link, get) -> None:
        frames = [frame_of(link, get, group, is_final=group is groups[-1]) for group in groups]
        assert [len(one) for one in frames] == LENGTHS
        link.socket.sendall(b"".join(frames)[: sum(LENGTHS[:frame]) + sent])
        if then == "break":
            link.kill()
        else:
            go_on.wait(20)

    answer_once(node, answer)
    asked = asked_again(node)
    whole = 2 * frame + max(0, (sent - 144) // SIZE)
    if then == "break":
        # the reset may overtake what was sent, so less may have come than was
        assert read(ns, keys)[1] == payloads
        assert client.stats()["connections_broken"] == 1
        assert len(asked) == 2
        assert keys.digests[32 * whole :] in asked[1] or asked[1] in keys.digests
        return
    results, data = read(ns, keys, deadline=0.2)
    assert data[:whole] == payloads[:whole]
    assert results[whole:] == [Miss(MissReason.DEADLINE)] * (COUNT - whole)
    assert len(asked) == 1
    go_on.set()
    assert read(ns, keys)[1] == payloads


def test_a_node_that_closes_in_a_frame_is_asked_for_the_rest(client, node, stored) -> None:
    ns, keys, payloads = stored

    def answer(link, get) -> None:
        frames = [frame_of(link, get, group, is_final=False) for group in ([0, 1], [5, 4, 3])]
        link.socket.sendall(b"".join(frames)[: LENGTHS[0] + 208 + 2 * SIZE + 10])
        link.socket.close()  # everything sent still comes

    answer_once(node, answer)
    asked = asked_again(node)
    assert read(ns, keys)[1] == payloads
    rest = [2, 3, 6, 7]
    assert asked[1] == b"".join(keys.digests[32 * at : 32 * at + 32] for at in rest)


def test_an_error_in_the_middle_leaves_what_has_come(node, stored) -> None:
    ns, keys, payloads = stored

    def answer(link, get) -> None:
        link.socket.sendall(frame_of(link, get, [6, 1], is_final=False))
        link.send(get, m.ErrorReply(code=15, text="no", closing=False))

    answer_once(node, answer)
    results, data = read(ns, keys)
    assert [at for at, one in enumerate(results) if isinstance(one, Hit)] == [1, 6]
    assert (data[1], data[6]) == (payloads[1], payloads[6])
    assert results[0] == Miss(MissReason.UNAVAILABLE)
    assert read(ns, keys)[1] == payloads, "the connection is good for the next"
    assert not node.hellos


def test_other_records_among_the_expected_ones(node, stored) -> None:
    """Another length, another checksum block, a record in two slices: each costs the straight way, not the read."""
    ns, keys, payloads = stored
    records = list(node.records.values())
    expected = list(payloads)
    records[2].payload = expected[2] = expected[2][:70_000]
    records[4].block_bytes = 8192

    def answer(link, get) -> bytes:
        half = Slice(6, 0, BLOCK, 0, False, records[6].content_id, SIZE, BLOCK, crc_table(payloads[6][:BLOCK], BLOCK))
        rest = slice_of(6, records[6])
        rest = rest._replace(offset=BLOCK, length_bytes=SIZE - BLOCK, crcs=rest.crcs[4:])

        def cut(one: Slice, part: bytes):
            def change(slices, parts) -> None:
                slices[0], parts[0] = one, part

            return change

        return b"".join(
            (
                frame_of(link, get, [0, 1], is_final=False),
                frame_of(link, get, [6], is_final=False, change=cut(half, payloads[6][:BLOCK])),
                frame_of(link, get, [2, 3, 4], is_final=False),
                frame_of(link, get, [6], is_final=False, change=cut(rest, payloads[6][BLOCK:])),
                frame_of(link, get, [5, 7], is_final=True),
            )
        )

    answer_once(node, answer)
    _, data = read(ns, keys)
    assert data == expected
    assert node.count(FrameType.GET) == 1


def test_a_client_that_is_closed_in_a_frame(client, node, stored) -> None:
    ns, keys, _ = stored
    come = threading.Event()

    def answer(link, get) -> None:
        link.socket.sendall(frame_of(link, get, [0, 1], is_final=False) + b"KV")
        come.set()

    answer_once(node, answer)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            read(ns, keys)
        except Closed as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert come.wait(20)
    client.close()
    thread.join(20)
    assert not thread.is_alive()
    assert len(failures) == 1


def test_a_forked_child_reads_on_a_connection_of_its_own(node, stored) -> None:
    ns, keys, payloads = stored
    assert read(ns, keys)[1] == payloads
    child = os.fork()
    if not child:
        os._exit(0 if read(ns, keys)[1] == payloads else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert read(ns, keys)[1] == payloads
    assert {one.client_id for one in node.hellos} != set(), "of the child"


def test_a_batch_above_the_nodes_limit_takes_several_requests(client, node, stored) -> None:
    ns, keys, payloads = stored
    node.batch_items_max = 3
    client.close()
    with KVClient.connect(node.address, deadline=20) as other:
        mine = other.namespace(ns.namespace)
        assert read(mine, keys[:2])[1] == payloads[:2]
        node.calls.clear()
        assert read(mine, keys)[1] == payloads
    assert node.count(FrameType.GET) == 3


def test_threads_share_a_client(node, stored) -> None:
    ns, keys, payloads = stored
    wrong: list[object] = []

    def script(link, get) -> bool:
        if get.type is not FrameType.GET:
            return False
        count = len(m.Get.decode(get.body).keys) // 32
        frames = [frame_of(link, get, [at], is_final=at == 0) for at in reversed(range(count))]
        link.socket.sendall(b"".join(frames))
        return True

    node.script = script

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(20):
            first = rng.randrange(COUNT)
            count = rng.randrange(1, COUNT + 1 - first)
            if read(ns, keys[first : first + count])[1] != payloads[first : first + count]:
                wrong.append((seed, first, count))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
