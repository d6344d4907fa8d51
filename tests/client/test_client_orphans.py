"""Connections that an exception of a signal handler has cut off from the call that took them are found again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from kvstore.limits import ORPHAN_NS_MIN
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore_client import Hit, KVClient
from kvstore_client.loads import Begun
from kvstore_client.orphans import are_in_no_call
from kvstore_client.straight import handing_over
from kvstore_client.target import TargetLink


class Cut(BaseException):
    """What a signal handler raises."""


def losing(take: Callable[..., object]) -> Callable[..., object]:
    """Takes a connection, and loses it: the signal comes before the caller has it."""

    def take_and_lose(*arguments: object) -> object:
        taken = take(*arguments)
        if taken is not None:
            raise Cut
        return taken

    return take_and_lose


def cut_off(call: Callable[[], object]) -> None:
    """Lets a call lose the connection that it takes."""
    with pytest.MonkeyPatch.context() as patched:
        for name in ("take", "take_idle", "take_ready"):
            patched.setattr(TargetLink, name, losing(getattr(TargetLink, name)))
        with pytest.raises(Cut):
            call()


@pytest.mark.parametrize("count", [1, 4])
def test_a_call_finds_the_connections_that_others_lost(client, stored, count) -> None:
    ns, keys, payloads = stored
    memory = [bytearray(len(one)) for one in payloads[:count]]
    for _ in range(client.options.connections_per_target):
        cut_off(lambda: ns.get_into(keys[:count], memory))
    (target,) = client.session().core.target_ids()
    assert not client.session().core.link(target).has_room()
    assert {type(one) for one in ns.get_into(keys[:count], memory)} == {Hit}
    assert [bytes(one) for one in memory] == list(payloads[:count])


def test_another_thread_finds_them_too(client, stored) -> None:
    ns, keys, _ = stored
    for _ in range(client.options.connections_per_target):
        cut_off(lambda: ns.contains(keys))
    found: list[bool] = []
    other = threading.Thread(target=lambda: found.extend(ns.contains(keys)))
    other.start()
    other.join(60)
    assert found == [True] * len(keys)


def test_a_call_that_needs_several_targets_finds_them_too(cluster) -> None:
    layout = KVLayout.opaque(chunk_bytes=2000, chunk_tokens=4, run_bytes=6000)
    with KVClient.connect(cluster.nodes[0].address) as client:
        ns = client.namespace(Namespace(tenant="default", model="m", weights="w", layout=layout))
        keys = ns.keys(list(range(4 * 24)))
        ns.put(keys, [b"x"] * 24)
        assert all(one.records for one in cluster.nodes)
        assert ns.contains(keys) == [True] * 24  # the connections that are lost have served
        for _ in range(client.options.connections_per_target):
            cut_off(lambda: ns.contains(keys))
        core = client.session().core
        assert not all(core.link(target).has_room() for target in core.target_ids())
        assert ns.contains(keys) == [True] * 24


def test_what_is_cut_off_after_its_end_leaves_the_connection_to_who_has_it_now(client, stored) -> None:
    ns, keys, payloads = stored
    assert isinstance(ns.get_into(keys[:1], [bytearray(len(payloads[0]))])[0], Hit)
    session, now_ns = client.session(), time.monotonic_ns()
    (target,) = session.core.target_ids()
    link, flow = session.core.link(target), client.options.flow
    connection = link.take(flow, now_ns)
    begun = Begun(target, (link, connection), (), connection.deadline_ns)
    taken: list[object] = []

    def end_and_be_cut() -> None:
        with handing_over(session.driver, begun):
            session.driver.give_back(link, connection, now_ns, has_broken=False)
            other = threading.Thread(target=lambda: taken.append(link.take(flow, now_ns)))
            other.start()
            other.join(60)
            raise Cut

    with pytest.raises(Cut):
        end_and_be_cut()
    assert taken == [connection]
    assert connection.is_open


def test_a_connection_in_use_is_left_to_its_call(client, node, stored) -> None:
    ns, keys, payloads = stored
    arrived, go_on = threading.Semaphore(0), threading.Event()

    def script(link, frame) -> bool:
        arrived.release()
        return not go_on.wait(60)

    node.script = script
    results: list[object] = []

    def read_one() -> None:
        results.extend(ns.get_into(keys[:1], [bytearray(len(payloads[0]))]))

    busy = [threading.Thread(target=read_one) for _ in range(client.options.connections_per_target)]
    for one in busy:
        one.start()
    for _ in busy:
        assert arrived.acquire(timeout=60)
    seconds = 1.5 * ORPHAN_NS_MIN / 1e9
    assert not any(ns.contains(keys, deadline=seconds))
    go_on.set()
    for one in busy:
        one.join(60)
    assert {type(one) for one in results} == {Hit}
    assert client.stats()["connections_broken"] == 0


def test_nothing_is_taken_from_greenlets_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """With gevent threads go by identifiers of greenlets, and of one that waits Python tells no frame."""
    own = threading.get_ident()
    ended = threading.Thread(target=lambda: None)
    ended.start()
    ended.join()
    assert ended.ident is not None
    assert are_in_no_call({ended.ident}) == {ended.ident}
    monkeypatch.setattr(threading, "get_ident", lambda: own + 1)
    assert are_in_no_call({ended.ident, own + 2}) == set()


@pytest.mark.parametrize("place", ["__enter__", "__exit__"])
def test_no_lock_stays_held_when_the_signal_comes_inside_a_condition(client, place) -> None:
    """Its `__enter__` and `__exit__` are Python: the lock is taken, or not given back yet, where a signal may come."""
    driver = client.session().driver

    class Interrupted(threading.Condition):
        pass

    def cut(condition: threading.Condition, *arguments: object) -> None:
        if place == "__enter__":
            threading.Condition.__enter__(condition)
        raise Cut

    setattr(Interrupted, place, cut)
    driver._changed.__class__ = Interrupted
    for call in (lambda: driver.pause(0), driver.close):
        try:
            call()
        except Cut:
            pass
        if is_held := driver._lock.locked():
            driver._lock.release()  # or the fixture would wait for it
        assert not is_held
