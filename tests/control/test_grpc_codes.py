"""The one table between our errors and gRPC status codes."""

from __future__ import annotations

import grpc
import pytest

from kvstore import errors
from kvstore.server.grpc_edge.codes import STATUS_OF, error_of, status_of


class _Failed(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details


@pytest.mark.parametrize("kind", STATUS_OF, ids=lambda kind: kind.__name__)
def test_each_error_comes_back_as_itself(kind: type[errors.KVStoreError]) -> None:
    status = status_of(kind("keys: 65537, at most 65536"))
    again = error_of(_Failed(status, "keys: 65537, at most 65536"), "h:1")
    shared = {errors.NoSpace: errors.Overloaded, errors.Closed: errors.Unavailable}
    assert type(again) is shared.get(kind, kind)
    assert "65536" in str(again)


def test_every_concrete_error_has_a_status() -> None:
    for kind in vars(errors).values():
        if (
            isinstance(kind, type)
            and issubclass(kind, errors.KVStoreError)
            and kind not in (errors.KVStoreError, errors.Retryable)
        ):
            assert status_of(kind("x")) is not grpc.StatusCode.OK
    assert status_of(errors.QuotaExceeded("x")) is status_of(errors.NoSpace("x"))


def test_a_node_that_is_not_there_is_named() -> None:
    error = error_of(_Failed(grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses"), "10.0.0.1:7400")
    assert isinstance(error, errors.Unavailable)
    assert "10.0.0.1:7400" in str(error)
    assert "running" in str(error)


def test_a_web_server_in_place_of_a_node_is_named() -> None:
    details = "Received http2 header with status: 404"
    error = error_of(_Failed(grpc.StatusCode.UNIMPLEMENTED, details), "10.0.0.1:7402")
    assert isinstance(error, errors.Unavailable)
    assert "10.0.0.1:7402, but a web server or a proxy" in str(error)


def test_a_message_that_grpc_itself_refuses_is_our_callers_to_fix() -> None:
    details = "SERVER: Received message larger than max (70000000 vs. 67108864)"
    error = error_of(_Failed(grpc.StatusCode.RESOURCE_EXHAUSTED, details), "h:1")
    assert isinstance(error, errors.InvalidRequest)
    assert "67108864" in str(error)


def test_a_status_that_is_none_of_ours_is_internal() -> None:
    assert type(error_of(_Failed(grpc.StatusCode.ALREADY_EXISTS, ""), "h:1")) is errors.Internal
