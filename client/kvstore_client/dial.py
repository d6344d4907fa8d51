"""Connecting to "host:port": every address of the host in turn, the first that answers is taken."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable

from kvstore.errors import Unavailable
from kvstore.transport.tcp import tune
from kvstore_client.address import in_place_of, split_address
from kvstore_client.names import NameWait, numeric_endpoints
from kvstore_client.waiting import READ, WRITE, Steps


def dial(address: str, hold: Callable[[socket.socket], None]) -> Steps:
    """Connects.

    Args:
        address: "host:port".
        hold: Is given the socket that is waited for next, and in the end the one that is connected.

    Raises:
        Unavailable: Nobody can be reached there.
    """
    host, port = split_address(address)
    held: socket.socket | None = None
    try:
        endpoints = numeric_endpoints(host, port)
        if endpoints is None:
            wait = NameWait(host, port)
            held = wait.done
            hold(held)
            while not wait.is_over:
                yield READ
            endpoints = wait.endpoints()
        code = errno.EADDRNOTAVAIL
        for family, kind, protocol, _, where in endpoints:
            made = socket.socket(family, kind | socket.SOCK_NONBLOCK, protocol)
            if held is not None:
                made = in_place_of(held, made)  # "localhost" is ::1 first, where nobody may listen
            held = made
            hold(held)
            code = held.connect_ex(where)
            if code == errno.EINPROGRESS:
                yield WRITE
                code = held.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            # Linux may connect a socket in the ephemeral port range to itself when nobody listens there
            if code == 0 and held.getsockname() == held.getpeername():
                code = errno.ECONNREFUSED
            if code == 0:
                break
        if code or held is None:
            raise OSError(code, os.strerror(code))
        held.setblocking(True)
        tune(held)
    except OSError as error:
        hint = "; does `kvstore serve` run there?" if error.errno == errno.ECONNREFUSED else ""
        raise Unavailable(f"node at {address} cannot be reached: {error.strerror or error}{hint}") from None
