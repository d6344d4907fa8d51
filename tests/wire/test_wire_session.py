"""The tables of legal transitions: every pair of state and frame, legal or not, on both sides."""

from __future__ import annotations

import itertools

import pytest

from kvstore.errors import Closed, InvalidRequest
from kvstore.wire.header import FrameType
from kvstore.wire.session import (
    ANSWERS,
    REQUESTS,
    STRAGGLERS,
    TO_CLIENT,
    TO_NODE,
    ClientSession,
    ServerSession,
    State,
    Verdict,
)

F = FrameType
PAIRS = list(itertools.product(State, FrameType))
REQUEST_OF = {State.ANSWER: F.MATCH, State.READ: F.GET, State.WRITE: F.OFFER}


def client_in(state: State) -> ClientSession:
    session = ClientSession()
    if state is State.NEW:
        return session
    if state is State.CLOSED:
        session.close()
        return session
    session.hello()
    if state is not State.GREETING:
        session.receive(F.WELCOME, 0)
    if state in REQUEST_OF:
        session.start(REQUEST_OF[state])
    assert session.state is state
    return session


def server_in(state: State) -> ServerSession:
    session = ServerSession()
    if state is State.NEW:
        return session
    if state is State.CLOSED:
        session.close()
        return session
    session.receive(F.HELLO, 0)
    if state is not State.GREETING:
        session.send(F.WELCOME)
    if state in REQUEST_OF:
        session.receive(REQUEST_OF[state], 1)
    assert session.state is state
    return session


@pytest.mark.parametrize(("state", "frame"), PAIRS)
def test_every_frame_in_every_state_at_the_node(state: State, frame: FrameType) -> None:
    session = server_in(state)
    after = TO_NODE[state].get(frame)
    if after is not None:
        assert session.receive(frame, session.request_id or 1) is Verdict.ACCEPT
        assert session.state is after
    elif state is State.IDLE and frame in STRAGGLERS:
        assert session.receive(frame, 1) is Verdict.IGNORE
        assert session.state is state
    else:
        with pytest.raises(InvalidRequest, match=frame.name):
            session.receive(frame, session.request_id)
        assert session.state is state


@pytest.mark.parametrize(("state", "frame"), PAIRS)
def test_every_frame_in_every_state_at_the_client(state: State, frame: FrameType) -> None:
    session = client_in(state)
    after = TO_CLIENT[state].get(frame)
    if state is State.ANSWER and frame in (F.MATCH_REPLY, F.END):
        after = State.IDLE
    if state is State.CLOSED:
        assert session.receive(frame, session.request_id) is Verdict.IGNORE
    elif after is not None:
        assert session.receive(frame, session.request_id) is Verdict.ACCEPT
        assert session.state is after
    else:
        with pytest.raises(InvalidRequest, match=frame.name):
            session.receive(frame, session.request_id)


@pytest.mark.parametrize(("state", "frame"), PAIRS)
def test_a_client_sends_only_what_is_legal(state: State, frame: FrameType) -> None:
    session = client_in(state)
    legal = frame in TO_NODE[state]

    def send() -> None:
        if frame is F.HELLO:
            session.hello()
        elif frame in REQUESTS:
            session.start(frame)
        else:
            session.send(frame)

    if legal:
        send()
        assert session.state is TO_NODE[state][frame]
    else:
        with pytest.raises(Closed if state is State.CLOSED else InvalidRequest):
            send()


@pytest.mark.parametrize("request_type", sorted(REQUESTS))
def test_each_call_ends_with_its_answer_on_both_sides(request_type: FrameType) -> None:
    client, server = client_in(State.IDLE), server_in(State.IDLE)
    for _ in range(3):
        request_id = client.start(request_type)
        assert server.receive(request_type, request_id) is Verdict.ACCEPT
        assert server.request is request_type
        answer = ANSWERS[request_type]
        server.send(answer)
        assert client.receive(answer, request_id) is Verdict.ACCEPT
        assert client.state is server.state is State.IDLE
        assert client.request is None


def test_stragglers_of_an_older_call_are_ignored_on_both_sides() -> None:
    client, server = client_in(State.IDLE), server_in(State.IDLE)
    first = client.start(F.OFFER)
    server.receive(F.OFFER, first)
    server.send(F.END)
    client.receive(F.END, first)
    second = client.start(F.GET)
    assert second != first
    assert server.receive(F.DATA, first) is Verdict.IGNORE
    assert server.receive(F.CANCEL, first) is Verdict.IGNORE
    server.receive(F.GET, second)
    assert server.receive(F.CANCEL, first) is Verdict.IGNORE
    assert client.receive(F.GRANT, first) is Verdict.IGNORE
    assert client.receive(F.END, first) is Verdict.IGNORE
    assert client.state is State.READ


def test_a_new_request_during_a_call_is_refused() -> None:
    server = server_in(State.READ)
    with pytest.raises(InvalidRequest, match="GET"):
        server.receive(F.GET, 2)


def test_an_error_of_the_connection_closes_a_call_in_progress() -> None:
    client = client_in(State.READ)
    assert client.receive(F.ERROR, 0) is Verdict.ACCEPT
    assert client.state is State.CLOSED


def test_request_ids_wrap_and_are_never_zero() -> None:
    client = client_in(State.IDLE)
    client._request_id = 0xFFFF_FFFF
    assert client.start(F.PING) == 1


def test_a_node_never_sends_what_is_illegal() -> None:
    for state, frame in ((State.IDLE, F.DATA), (State.READ, F.GRANT), (State.ANSWER, F.DATA), (State.NEW, F.WELCOME)):
        with pytest.raises(AssertionError, match=frame.name):
            server_in(state).send(frame)
