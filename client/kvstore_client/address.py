"""Where a node is: "host:port", and the sockets that try its addresses one after the other."""

from __future__ import annotations

import os
import socket

from kvstore.errors import InvalidRequest


def in_place_of(old: socket.socket, new: socket.socket) -> socket.socket:
    """`new` under the descriptor of `old`, which is closed: who waits for that descriptor goes on waiting."""
    fileno = old.detach()
    os.dup2(new.fileno(), fileno, inheritable=False)
    new.close()
    held = socket.socket(new.family, new.type, new.proto, fileno=fileno)
    held.setblocking(False)
    return held


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[v6]:port". Raises InvalidRequest."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InvalidRequest(
            f"address {address!r:.200} is not host:port with a port from 1 to 65535; "
            "pass one such as 127.0.0.1:7400, without a scheme"
        )
    return host.strip("[]"), int(port)
