"""What the doctor does with sockets: listens for a moment, dials addresses, sends one GET; all within deadlines."""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import ssl
import threading
import time
from dataclasses import dataclass
from typing import Final

from kvstore.device.host_files import whole_number
from kvstore.doctor.system import System
from kvstore.limits import DOCTOR_DIAL_NS_MAX, DOCTOR_REPLY_BYTES_MAX, SECOND_NS

_LISTENING: Final = "0A"  # TCP_LISTEN in /proc/net/tcp
_GREETING_BYTES: Final = 16
_WORKER_MODULE: Final = "kvstore.server.worker"  # `python -m` of it, one JSON object behind (kvstore/server/launch.py)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A process that listens on a port.

    Attributes:
        pid: its number.
        command: its command line.
        data_dirs: real paths of what it serves, if it is a kvstore node or a worker of one; empty where its workers
            do not tell.
    """

    pid: int
    command: str
    data_dirs: tuple[str, ...] = ()

    @property
    def is_node(self) -> bool:
        """Whether its command line is one of ours."""
        return "kvstore" in self.command


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialled:
    """What came of connecting to an address.

    Attributes:
        address: what the name resolved to; "" when it did not.
        problem: why the connection did not come about; "" when it did.
        took_ns: until it was established.
        is_ours: what we listened with for the purpose took the connection; None when somebody else listens there.
    """

    address: str
    problem: str
    took_ns: int
    is_ours: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpAnswer:
    """Answer to one GET. `problem` says why there is none, "" when there is one."""

    status: int
    body: str
    took_ns: int
    problem: str


def try_listen(host: str, port: int) -> int:
    """0 when this port can be listened on now, else the errno of bind(2) or listen(2); EAI_NONAME where unresolved."""
    try:
        listener = _listener(host, port)
    except socket.gaierror:
        return errno.EADDRNOTAVAIL
    except OSError as error:
        return error.errno or errno.EINVAL
    listener.close()
    return 0


def holder_of(system: System, port: int) -> Holder | None:
    """Who listens on a TCP port of this network namespace, by /proc; None when it cannot be told (another user's)."""
    inodes = _listening_inodes(system, port)
    if not inodes:
        return None
    for pid in (name for name in system.names("/proc") if name.isdigit()):
        for descriptor in system.names(f"/proc/{pid}/fd"):
            if _socket_inode(pid, descriptor) in inodes:
                command = (system.text(f"/proc/{pid}/cmdline") or "").replace("\0", " ").strip()
                return Holder(pid=int(pid), command=command, data_dirs=_data_dirs_of(system, pid))
    return None


def _data_dirs_of(system: System, pid: str) -> tuple[str, ...]:
    """What a worker owns, or all workers of a supervisor, by the command lines that workers are started with."""
    children = (system.text(f"/proc/{pid}/task/{pid}/children") or "").split()
    found: list[str] = []
    for process in (pid, *children):
        arguments = (system.text(f"/proc/{process}/cmdline") or "").split("\0")
        if _WORKER_MODULE not in arguments:
            continue
        folder = system.real(f"/proc/{process}/cwd") or "/"
        found += [
            os.path.realpath(os.path.join(folder, path)) for path in _data_dirs_in(arguments[-1] or arguments[-2])
        ]
    return tuple(dict.fromkeys(found))


def _data_dirs_in(launch: str) -> list[str]:
    try:
        told = json.loads(launch)
    except ValueError:
        return []
    paths = told.get("data_dirs") if isinstance(told, dict) else None
    return [path for path in paths if isinstance(path, str)] if isinstance(paths, list) else []


def dial_back(host: str, listen_host: str, port: int) -> Dialled:
    """Connect to `host`:`port` as a client would; where nobody listens yet, to a listener of ours on `listen_host`.

    With a listener of our own a random greeting proves that the connection has reached it and no other machine.
    """
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        return Dialled(address="", problem=f"does not resolve: {error.strerror}", took_ns=0, is_ours=None)
    name = str(address[4][0])
    try:
        listener = _listener(listen_host, port)
    except OSError:
        return _dial(address[0], address[4], name)
    greeting = os.urandom(_GREETING_BYTES)
    with listener:
        listener.settimeout(DOCTOR_DIAL_NS_MAX / SECOND_NS)
        greeter = threading.Thread(target=_greet, args=(listener, greeting), daemon=True)
        greeter.start()
        own_port = listener.getsockname()[1]
        dialled = _dial(address[0], (address[4][0], own_port, *address[4][2:]), name, greeting)
    greeter.join(DOCTOR_DIAL_NS_MAX / SECOND_NS)
    return dialled


def http_get(host: str, port: int, path: str, *, tls: ssl.SSLContext | None = None) -> HttpAnswer:
    """GET over HTTP/1.1, with TLS where a context is given, and one deadline for all of it."""
    began_ns = time.monotonic_ns()
    try:
        with _connected(host, port, tls) as connection:
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode())
            reply = _read_all(connection, began_ns + DOCTOR_DIAL_NS_MAX)
    except OSError as error:
        return HttpAnswer(status=0, body="", took_ns=time.monotonic_ns() - began_ns, problem=_words_of(error))
    took_ns = time.monotonic_ns() - began_ns
    head, _, body = reply.decode("utf-8", "replace").partition("\r\n\r\n")
    match = re.match(r"HTTP/1\.[01] (\d{3})", head)
    if match is None:
        return HttpAnswer(status=0, body="", took_ns=took_ns, problem="it does not speak HTTP")
    return HttpAnswer(status=int(match[1]), body=body, took_ns=took_ns, problem="")


def _connected(host: str, port: int, tls: ssl.SSLContext | None) -> socket.socket:
    connection = socket.create_connection((host, port), timeout=DOCTOR_DIAL_NS_MAX / SECOND_NS)
    if tls is None:
        return connection
    with connection:  # a wrapped one has taken the descriptor over; one that could not be wrapped is closed
        return tls.wrap_socket(connection, server_hostname=host)


def _listener(host: str, port: int) -> socket.socket:
    """As the node listens (SO_REUSEADDR), so that what is free for it is free for us."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1)
    except OSError:
        listener.close()
        raise
    return listener


def _greet(listener: socket.socket, greeting: bytes) -> None:
    try:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(greeting)
    except OSError:
        return  # nobody came: the dialling side says why


def _dial(family: int, address: tuple[object, ...], name: str, greeting: bytes = b"") -> Dialled:
    began_ns = time.monotonic_ns()
    with socket.socket(family, socket.SOCK_STREAM) as dialling:
        dialling.settimeout(DOCTOR_DIAL_NS_MAX / SECOND_NS)
        try:
            dialling.connect(address)
        except OSError as error:
            took_ns = time.monotonic_ns() - began_ns
            return Dialled(address=name, problem=_words_of(error), took_ns=took_ns, is_ours=None)
        took_ns = time.monotonic_ns() - began_ns
        is_ours = _hears(dialling, greeting) if greeting else None
    return Dialled(address=name, problem="", took_ns=took_ns, is_ours=is_ours)


def _hears(dialling: socket.socket, greeting: bytes) -> bool:
    try:
        return dialling.recv(_GREETING_BYTES, socket.MSG_WAITALL) == greeting
    except OSError:
        return False  # whoever took the connection has nothing to say


def _read_all(connection: socket.socket, end_ns: int) -> bytes:
    reply = bytearray()
    while len(reply) < DOCTOR_REPLY_BYTES_MAX:
        left_ns = end_ns - time.monotonic_ns()
        if left_ns <= 0:
            raise TimeoutError
        connection.settimeout(left_ns / SECOND_NS)
        piece = connection.recv(DOCTOR_REPLY_BYTES_MAX)
        if not piece:
            break
        reply += piece
    return bytes(reply)


def _words_of(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer in {DOCTOR_DIAL_NS_MAX / SECOND_NS:g} s"
    return error.strerror or str(error)


def _listening_inodes(system: System, port: int) -> set[str]:
    inodes: set[str] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in (system.text(table) or "").splitlines()[1:]:
            fields = line.split()
            # "0: 0100007F:1CE8 00000000:0000 0A ... inode" (proc(5))
            if (
                len(fields) > 9
                and fields[3] == _LISTENING
                and whole_number(fields[1].rpartition(":")[2], base=16) == port
            ):
                inodes.add(fields[9])
    return inodes


def _socket_inode(pid: str, descriptor: str) -> str:
    try:
        link = os.readlink(f"/proc/{pid}/fd/{descriptor}")
    except OSError:
        return ""
    return link.removeprefix("socket:[").rstrip("]") if link.startswith("socket:[") else ""
