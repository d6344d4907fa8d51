"""Listening sockets and how their addresses are written."""

from __future__ import annotations

import errno
import socket

from kvstore.errors import InvalidRequest, Unavailable


def join_address(host: str, port: int) -> str:
    """ "host:port", with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(host: str, port: int, *, purpose: str) -> socket.socket:
    """A listening, non-blocking TCP socket; port 0 is any free one.

    Args:
        purpose: name of the setting, for the message: "grpc_port".

    Raises:
        InvalidRequest: the host has no address on this machine.
        Unavailable: the port is in use, or not allowed to us.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise InvalidRequest(f"host {host} cannot be resolved: {error.strerror}") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(socket.SOMAXCONN)
    except OSError as error:
        listener.close()
        flag = f"--{purpose.replace('_', '-')}"
        fix = f"pass another {flag}, or 0 for any free one"
        if error.errno == errno.EADDRNOTAVAIL:
            fix = "no network device of this machine has that address; name one in --host (`ip address` lists them)"
        elif error.errno == errno.EADDRINUSE:
            fix += "; `kvstore doctor` with the same settings says whose it is"
        elif error.errno in (errno.EACCES, errno.EPERM):
            fix += "; those below net.ipv4.ip_unprivileged_port_start need CAP_NET_BIND_SERVICE"
        raise Unavailable(f"{purpose} {port} on {host} cannot be listened on: {error.strerror}; {fix}") from None
    listener.setblocking(False)
    return listener


def bound_port(listener: socket.socket) -> int:
    """The port that a listening socket has got."""
    return int(listener.getsockname()[1])
