"""What cannot be listened on is named, with what to change."""

from __future__ import annotations

import socket

import pytest

from kvstore.errors import InvalidRequest, Unavailable
from kvstore.server.addresses import bound_port, listen


def test_an_address_of_another_machine_is_no_matter_of_the_port() -> None:
    with pytest.raises(Unavailable, match=r"192\.0\.2\.1 .*no network device of this machine has that address.*--host"):
        listen("192.0.2.1", 0, purpose="grpc_port")


def test_a_port_in_use_names_its_flag_and_who_knows_its_owner() -> None:
    with listen("127.0.0.1", 0, purpose="data_port") as taken:
        port = bound_port(taken)
        with pytest.raises(Unavailable, match=rf"data_port {port} .*pass another --data-port.*kvstore doctor"):
            listen("127.0.0.1", port, purpose="data_port")


def test_a_host_without_an_address_is_the_callers() -> None:
    with pytest.raises(InvalidRequest, match=r"nowhere\.invalid cannot be resolved"):
        listen("nowhere.invalid", 0, purpose="grpc_port")


def test_it_listens() -> None:
    with listen("127.0.0.1", 0, purpose="grpc_port") as listener:
        socket.create_connection(("127.0.0.1", bound_port(listener))).close()
