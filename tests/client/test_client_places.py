"""Where keys are looked for, and when: targets that are down but answer, keys that moved, jobs beside slow ones."""

from __future__ import annotations

import threading

import pytest

from kvstore.cluster.view import View
from kvstore.errors import Unavailable
from kvstore.limits import SECOND_NS
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore.types.results import MissReason, RefusedReason
from kvstore.wire.codec import unpack_plain
from kvstore.wire.failures import code_of
from kvstore.wire.header import FrameType
from kvstore.wire.messages import End, ErrorReply
from kvstore_client import Hit, KVClient, Miss, Refused, Stored
from kvstore_client.rounds import Job

COUNT = 24
LAYOUT = KVLayout.opaque(chunk_bytes=2000, chunk_tokens=4, run_bytes=6000)
NAMESPACE = Namespace(tenant="default", model="m", weights="w", layout=LAYOUT)
KEYS = NAMESPACE.keys(list(range(4 * COUNT)))
PAYLOADS = [bytes([at]) * (100 + at) for at in range(COUNT)]


def read(ns) -> list[Hit | Miss]:
    memory = [bytearray(len(one)) for one in PAYLOADS]
    results = ns.get_into(KEYS, memory)
    assert all(bytes(memory[at]) == PAYLOADS[at] for at, one in enumerate(results) if isinstance(one, Hit))
    return results


def held_by(node) -> set[int]:
    kept = {key for _, key in node.records}
    return {at for at in range(COUNT) if KEYS[at].digest in kept}


@pytest.fixture
def long_patience(monkeypatch) -> None:
    """A busy machine is no reason to give a place up."""
    for name in ("PLACE_SILENCE_NS", "LAST_SILENCE_NS"):
        monkeypatch.setattr(f"kvstore_client.planned_read.{name}", 30 * SECOND_NS)


@pytest.mark.parametrize("down", [{1: "down"}, {0: "down", 1: "down"}, {0: "down", 1: "down", 2: "down"}])
def test_a_target_that_is_down_by_the_view_and_answers_is_read(cluster, down) -> None:
    with KVClient.connect(cluster.nodes[0].address) as client:
        ns = client.namespace(NAMESPACE)
        ns.put(KEYS, PAYLOADS)
        assert all(held_by(one) for one in cluster.nodes)
        cluster.show(states=down)
        client.refresh()
        cluster.clear_calls()
        assert {type(one) for one in read(ns)} == {Hit}
        with ns.match(KEYS) as found:
            assert found.chunks == COUNT
            assert found.pinned
        assert all(ns.contains(KEYS))
        assert {type(one) for one in ns.wait(KEYS)} == {Hit}
        assert client.stats()["breaker_opened"] == 0
        assert not any(one.pulls for one in cluster.nodes), "nobody copies from one that is down"
        other = ns.keys(list(range(1000, 1000 + 4 * COUNT)))
        stored = {type(one) for one in ns.put(other, PAYLOADS)}
        assert stored == ({Stored} if len(down) < 3 else {Refused})
        assert not any(cluster.nodes[at].count(FrameType.OFFER) for at in down), "it is given nothing"


def test_a_target_that_is_down_indeed_is_left_alone_after_one_try(cluster) -> None:
    go_on = threading.Event()
    with KVClient.connect(cluster.nodes[0].address) as client:
        ns = client.namespace(NAMESPACE)
        ns.put(KEYS, PAYLOADS)
        lost = held_by(cluster.nodes[1])
        cluster.show(states={1: "down"})
        client.refresh()
        cluster.nodes[1].script = lambda link, frame: bool(go_on.wait(60)) and False
        cluster.clear_calls()
        try:
            read(ns)
            asked = len(cluster.nodes[1].calls)
            assert asked
            for _ in range(3):
                assert {at for at, one in enumerate(read(ns)) if one == Miss(MissReason.ABSENT)} == lost
                assert {at for at, one in enumerate(ns.contains(KEYS)) if not one} == lost
            assert len(cluster.nodes[1].calls) == asked
            assert {type(one) for one in ns.delete(KEYS)} == {Hit, Miss}
            assert Miss(MissReason.UNAVAILABLE) not in ns.delete(KEYS), "it has no say"
            assert client.stats()["breaker_opened"] == 0
        finally:
            go_on.set()


def test_a_delete_that_a_fenced_target_refuses_is_none(cluster) -> None:
    with KVClient.connect(cluster.nodes[0].address) as client:
        ns = client.namespace(NAMESPACE)
        ns.put(KEYS, PAYLOADS)
        kept = held_by(cluster.nodes[1])
        cluster.show(states={1: "down"})
        client.refresh()

        def fenced(link, frame) -> bool:
            if frame.type is FrameType.DELETE:
                link.send(frame, ErrorReply(code=code_of(Unavailable("")), text="fenced", closing=False))
            return frame.type is FrameType.DELETE

        cluster.nodes[1].script = fenced
        results = ns.delete(KEYS)
        assert {at for at, one in enumerate(results) if one == Miss(MissReason.UNAVAILABLE)} >= kept
        assert {type(one) for at, one in enumerate(read(ns)) if at in kept} == {Hit}, "it answers reads"


def test_after_a_match_keys_that_moved_are_asked_for_where_they_were_found(cluster) -> None:
    cluster.show(states={2: "away"})
    with KVClient.connect(cluster.nodes[0].address) as client:
        ns = client.namespace(NAMESPACE)
        ns.put(KEYS, PAYLOADS)
        cluster.show(states={2: "joining"}, previous=[{"t2": 0.0}])
        client.refresh()
        with ns.match(KEYS) as found:
            assert found.chunks == COUNT
            cluster.clear_calls()
            assert {type(one) for one in read(ns)} == {Hit}
            assert not cluster.nodes[2].count(FrameType.GET), "it has nothing yet"
            assert cluster.nodes[2].pulls, "it is told what it lacks all the same"
        own = ns.keys(list(range(1000, 1000 + 4 * COUNT)))
        ns.put(own, PAYLOADS)
        with ns.match(own) as found:
            memory = [bytearray(len(one)) for one in PAYLOADS]
            assert {type(one) for one in ns.get_into(own, memory)} == {Hit}
            assert cluster.nodes[2].count(FrameType.GET) == 1, "what lies where it belongs is asked for there"
        for told in cluster.nodes[2].pulls:
            source = cluster.nodes[int(told.source[1])].records
            for at in range(0, len(told.keys), 32):
                record = source.pop((NAMESPACE.digest, told.keys[at : at + 32]))
                cluster.nodes[2].records[NAMESPACE.digest, told.keys[at : at + 32]] = record
        assert {type(one) for one in read(ns)} == {Hit}, "what a match has told may be over"


@pytest.mark.usefixtures("short_patience")
@pytest.mark.timeout(60)
def test_a_wait_gives_a_silent_place_up_and_tells_what_is_known(cluster, monkeypatch) -> None:
    for name in ("PLACE_SILENCE_NS", "LAST_SILENCE_NS"):
        monkeypatch.setattr(f"kvstore_client.asking.{name}", SECOND_NS // 8)
    go_on = threading.Event()
    with KVClient.connect(cluster.nodes[0].address) as client:
        ns = client.namespace(NAMESPACE)
        ns.put(KEYS, PAYLOADS)
        lost = held_by(cluster.nodes[1])
        cluster.nodes[1].script = lambda link, frame: (
            frame.type in (FrameType.WAIT, FrameType.HELLO) and bool(go_on.wait(100)) and False
        )
        try:
            results = ns.wait(KEYS, deadline=90)
            assert {at for at, one in enumerate(results) if one == Miss(MissReason.UNAVAILABLE)} == lost
            assert {type(one) for at, one in enumerate(results) if at not in lost} == {Hit}
        finally:
            go_on.set()


def test_a_wait_goes_on_while_keys_are_pending_and_ends_when_they_are_somewhere(cluster) -> None:
    with KVClient.connect(cluster.nodes[0].address) as client:
        ns = client.namespace(NAMESPACE)
        ns.put(KEYS, PAYLOADS)
        late = held_by(cluster.nodes[1])
        cluster.nodes[1].pending |= {KEYS[at].digest for at in late}

        def slow(link, frame) -> bool:
            if cluster.nodes[1].count(FrameType.WAIT) == 3:
                cluster.nodes[1].pending.clear()
            return False

        cluster.nodes[1].script = slow
        assert {type(one) for one in ns.wait(KEYS, deadline=60)} == {Hit}
        assert cluster.counts(FrameType.WAIT) == [1, 3, 1], "only who has something pending is asked again"
        cluster.nodes[1].script = None
        cluster.nodes[1].pending |= {KEYS[at].digest for at in late}
        assert {at for at, one in enumerate(ns.wait(KEYS, deadline=0.3)) if one == Miss(MissReason.PENDING)} == late


def test_an_answer_without_statuses_is_none(cluster) -> None:
    with KVClient.connect(cluster.nodes[0].address) as client:
        ns = client.namespace(NAMESPACE)
        ns.put(KEYS, PAYLOADS)
        lost = held_by(cluster.nodes[1])

        def bare(link, frame) -> bool:
            if frame.type in (FrameType.WAIT, FrameType.DELETE):
                link.send(frame, End())
            return frame.type in (FrameType.WAIT, FrameType.DELETE)

        cluster.nodes[1].script = bare
        unavailable = Miss(MissReason.UNAVAILABLE)
        assert {at for at, one in enumerate(ns.wait(KEYS)) if one == unavailable} == lost
        assert {at for at, one in enumerate(ns.delete(KEYS)) if one == unavailable} >= lost


def test_a_place_that_is_silent_for_half_of_a_short_deadline_is_not_asked_again(cluster, monkeypatch) -> None:
    """Nothing says that its node was restarted: what others have is asked of them, while there is time."""
    cluster.show(copies=2)
    monkeypatch.setattr("kvstore_client.planned_read.PLACE_SILENCE_NS", SECOND_NS // 4)
    monkeypatch.setattr("kvstore_client.rounds.BREAKER_SILENCE_NS", 60 * SECOND_NS)
    go_on = threading.Event()
    with KVClient.connect(cluster.nodes[0].address) as client:
        ns = client.namespace(NAMESPACE)
        ns.put(KEYS, PAYLOADS)
        assert {type(one) for one in read(ns)} == {Hit}
        cluster.nodes[1].script = lambda link, frame: bool(go_on.wait(60)) and False
        cluster.clear_calls()
        try:
            assert {type(one) for one in read(ns)} == {Hit}
            assert cluster.nodes[1].calls == [FrameType.GET], "it was asked once, and greeted by no new connection"
        finally:
            go_on.set()


@pytest.mark.parametrize("way", ["match", "contains", "wait"])
def test_a_lookup_gives_up_one_frozen_place_before_its_deadline_when_others_have_told_all(
    cluster, monkeypatch, way
) -> None:
    cluster.show(copies=2)
    real, hurried, go_on = Job.hurry, [], threading.Event()

    def hurry(job: Job, silence_ns: int, now_ns: int) -> None:
        hurried.append((job, silence_ns))
        real(job, silence_ns, now_ns)

    monkeypatch.setattr(Job, "hurry", hurry)
    monkeypatch.setattr("kvstore_client.asking.PLACE_SILENCE_NS", 60 * SECOND_NS)
    monkeypatch.setattr("kvstore_client.rounds.BREAKER_SILENCE_NS", SECOND_NS)
    monkeypatch.setattr("kvstore_client.retry.BREAKER_SILENCE_NS", SECOND_NS)
    with KVClient.connect(cluster.nodes[0].address) as client:
        ns = client.namespace(NAMESPACE)
        ns.put(KEYS, PAYLOADS)
        assert all(ns.contains(KEYS))
        hurried.clear()
        cluster.nodes[1].script = lambda link, frame: bool(go_on.wait(60)) and False
        cluster.clear_calls()
        try:
            if way == "match":
                with ns.match(KEYS, deadline=4) as found:
                    assert found.chunks == COUNT
            else:
                assert {bool(one) for one in getattr(ns, way)(KEYS, deadline=4)} == {True}
            ((job, silence_ns),) = hurried
            assert job.target == "t1"
            assert silence_ns <= 2 * SECOND_NS, "half of what was left"
            assert job.is_cut, "it was waited for until the deadline"
            assert len(cluster.nodes[1].calls) == 1, "nobody needs what it says"
            assert client.stats()["breaker_opened"] == 1, "the next lookup does not ask it"
        finally:
            go_on.set()


@pytest.mark.usefixtures("long_patience")
@pytest.mark.parametrize("trouble", ["absent", "broken"])
def test_what_one_place_did_not_bring_is_asked_of_the_next_beside_a_slow_one(cluster, trouble) -> None:
    cluster.show(copies=2)
    has_moved_on = threading.Event()
    with KVClient.connect(cluster.nodes[0].address, deadline=60) as client:
        ns = client.namespace(NAMESPACE)
        ns.put(KEYS, PAYLOADS)
        if trouble == "absent":
            cluster.nodes[0].records.clear()
        cluster.clear_calls()

        def broken(link, frame) -> bool:
            if frame.type is FrameType.GET and trouble == "broken":
                link.kill()
            return frame.type is FrameType.GET and trouble == "broken"

        def watches(link, frame) -> bool:
            if sum(cluster.counts(FrameType.GET)[1:]) > 2:
                has_moved_on.set()
            return False

        def slow(link, frame) -> bool:
            if frame.type is FrameType.GET:
                watches(link, frame)
                has_moved_on.wait(20)
            return False

        cluster.nodes[0].script, cluster.nodes[1].script, cluster.nodes[2].script = broken, slow, watches
        assert {type(one) for one in read(ns)} == {Hit}
        assert has_moved_on.is_set(), "the slow one was waited for first"
        cluster.nodes[0].script = None


@pytest.mark.usefixtures("long_patience")
def test_a_job_that_failed_is_repeated_beside_a_slow_one(cluster) -> None:
    is_repeated = threading.Event()
    with KVClient.connect(cluster.nodes[0].address, deadline=60) as client:
        ns = client.namespace(NAMESPACE)
        ns.put(KEYS, PAYLOADS)
        cluster.clear_calls()
        was_repeated = []

        def breaks_off(link, frame) -> bool:
            if frame.type is FrameType.GET and cluster.nodes[0].count(FrameType.GET) < 3:
                link.kill()
                return True
            is_repeated.set()
            return False

        def slow(link, frame) -> bool:
            if frame.type is FrameType.GET:
                was_repeated.append(is_repeated.wait(20))
            return False

        cluster.nodes[0].script, cluster.nodes[1].script = breaks_off, slow
        is_repeated.clear()
        assert {type(one) for one in read(ns)} == {Hit}
        assert was_repeated == [True]


def test_a_fast_target_is_not_measured_by_the_slowest_of_its_round(cluster, monkeypatch) -> None:
    monkeypatch.setattr("kvstore_client.target.RATE_BYTES_MIN", 1)
    with KVClient.connect(cluster.nodes[0].address, deadline=60) as client:
        ns = client.namespace(NAMESPACE)
        ns.put(KEYS, PAYLOADS)
        core = client.session().core
        never = threading.Event()

        def slow(link, frame) -> bool:
            if frame.type is FrameType.GET:
                never.wait(0.5)  # which the other ones do not need
            return False

        cluster.nodes[1].script = slow
        assert {type(one) for one in read(ns)} == {Hit}
        spent = [
            sum(len(PAYLOADS[at]) for at in held_by(one)) / core.link(f"t{number}").read_bytes_per_second
            for number, one in enumerate(cluster.nodes)
        ]
        assert max(spent[0], spent[2]) < spent[1]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("verb", [FrameType.WRITER_WRITE, FrameType.WRITER_COMMIT])
def test_a_copy_that_hangs_is_given_up_once_another_one_is_through(cluster, verb) -> None:
    cluster.show(copies=2)
    go_on = threading.Event()
    with KVClient.connect(cluster.nodes[0].address, deadline=100) as client:
        ns = client.namespace(NAMESPACE)
        cluster.nodes[1].script = lambda link, frame: frame.type is verb and bool(go_on.wait(100)) and False
        try:
            with ns.writer(KEYS, lengths=[len(one) for one in PAYLOADS]) as writer:
                for at, one in enumerate(PAYLOADS):
                    writer.write(at, one)
                results = writer.commit()
            assert {type(one) for one in results} == {Stored}
            assert {one.copies for one in results} == {1, 2}
            assert sum(one.copies for one in results) == len(cluster.nodes[0].records) + len(cluster.nodes[2].records)
        finally:
            go_on.set()


@pytest.mark.timeout(60)
def test_a_copy_that_hangs_on_a_new_connection_is_given_up_too(cluster, monkeypatch) -> None:
    """The other one is through while it is being opened."""
    cluster.show(copies=2)
    is_hurried, go_on = threading.Event(), threading.Event()

    def hurry(job: Job, silence_ns: int, now_ns: int) -> None:
        real(job, silence_ns, now_ns)
        is_hurried.set()

    def slow(link, frame) -> bool:
        if frame.type is FrameType.HELLO:
            is_hurried.wait(60)
        return frame.type is FrameType.WRITER_COMMIT and bool(go_on.wait(100)) and False

    real = Job.hurry
    monkeypatch.setattr(Job, "hurry", hurry)
    monkeypatch.setattr("kvstore_client.rounds.CONNECT_NS_MAX", 40 * SECOND_NS)  # a busy machine is no reason
    monkeypatch.setattr("kvstore_client.writer_verbs.PLACE_SILENCE_NS", 3 * SECOND_NS)
    with KVClient.connect(cluster.nodes[0].address, deadline=100) as client:
        ns = client.namespace(NAMESPACE)
        try:
            with ns.writer(KEYS, lengths=[len(one) for one in PAYLOADS]) as writer:
                for at, one in enumerate(PAYLOADS):
                    writer.write(at, one)
                is_hurried.clear()
                client.session().core.link("t1").drop_idle()
                cluster.nodes[1].script = slow
                results = writer.commit()
            assert {type(one) for one in results} == {Stored}
            assert {one.copies for one in results} == {1, 2}
        finally:
            go_on.set()


def test_what_a_restarted_worker_has_forgotten_is_not_written_to_it(cluster) -> None:
    """Also when the restart comes between its own answer to the opening and the last one."""
    with KVClient.connect(cluster.nodes[0].address, deadline=60) as client:
        ns = client.namespace(NAMESPACE)
        ns.put(ns.keys(list(range(1000, 1000 + 4 * COUNT))), PAYLOADS)
        is_open = threading.Event()

        def opens(link, frame) -> bool:
            if frame.type is FrameType.WRITER_OPEN:
                link.answer(frame)
                is_open.set()
            return frame.type is FrameType.WRITER_OPEN

        def opens_when_the_other_has_restarted(link, frame) -> bool:
            if frame.type is FrameType.WRITER_OPEN and is_open.wait(60):
                cluster.nodes[0].boot_id = b"another boot id."
                cluster.nodes[0].writers.clear()
                client.session().core.link("t0").drop_idle()
                ns.contains(KEYS)
            return False

        cluster.nodes[0].script, cluster.nodes[1].script = opens, opens_when_the_other_has_restarted
        with ns.writer(KEYS, lengths=[len(one) for one in PAYLOADS]) as writer:
            for at, one in enumerate(PAYLOADS):
                writer.write(at, one)
            results = writer.commit()
        assert not cluster.nodes[0].count(FrameType.WRITER_WRITE)
        lost = [one for one in results if isinstance(one, Refused)]
        assert lost
        assert {(one.reason, "started again" in one.detail) for one in lost} == {(RefusedReason.OVERLOADED, True)}


def test_an_epoch_that_is_named_while_the_view_is_asked_for_is_asked_for_as_well(cluster) -> None:
    with KVClient.connect(cluster.nodes[0].address) as client:
        core = client.session().core
        old = cluster.nodes[0].view()
        for one in cluster.nodes:
            one.epoch = 7  # its frames name it, and its answer was made before
        client.refresh()
        assert core.newest_epoch == 7
        assert core.wants_view(0), "nobody was asked for epoch 7"
        client.refresh()
        assert not core.wants_view(0), "everybody was"
        assert core.view == View.from_plain(unpack_plain(old, what="view"))
