"""A real etcd under test, of one member or several: started on free ports, frozen, killed, wiped, with or without TLS.

It ends with the process that made it (PR_SET_PDEATHSIG), or with its `with` block.
"""

from __future__ import annotations

import json
import shutil
import signal
import socket
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

_WAIT_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 0.05
_FIRST_PORT: Final = 2379
_HEARTBEAT_MS: Final = 100
_ELECTION_MS: Final = 1_000
"""etcd's own values: shorter ones lose their leader on a busy machine, and a lease's shortest time depends on them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificates:
    """Files of one authority, and of one key pair signed by it for localhost, good for members and clients."""

    ca: Path
    cert: Path
    key: Path


def make_certificates(folder: Path) -> Certificates:
    """A new authority and a key pair, by the openssl program."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ext").write_text(
        "subjectAltName=DNS:localhost,IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\nkeyUsage=digitalSignature\n"
    )
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    _openssl(folder, "req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca", "-days", "2")
    _openssl(folder, "req", *key, "-keyout", "key.pem", "-out", "csr.pem", "-subj", "/CN=kvstore")
    signer = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "ext", "-days", "2"]
    _openssl(folder, "x509", "-req", "-in", "csr.pem", *signer, "-out", "cert.pem")
    return Certificates(ca=folder / "ca.pem", cert=folder / "cert.pem", key=folder / "key.pem")


class EtcdProcess:
    """An etcd of `count` members. A context manager that kills what is left of it."""

    def __init__(
        self,
        folder: Path,
        *,
        count: int = 1,
        certificates: Certificates | None = None,
        host: str = "127.0.0.1",
        prefix: Sequence[str] = (),
    ) -> None:
        """Start it; data and logs lie in `folder`. Returns when every member answers.

        Args:
            host: Address that the members listen on; one beyond loopback is a place where nobody else listens.
            prefix: Command that runs what follows it at that place (`NetPlace.prefix`).
        """
        self._folder = folder
        self._certificates = certificates
        self._host = host
        self._prefix = tuple(prefix)
        ports = list(range(_FIRST_PORT, _FIRST_PORT + 2 * count)) if prefix else _free_ports(2 * count)
        self.ports = ports[:count]
        self._peers = {f"m{at}": f"http://{host}:{port}" for at, port in enumerate(ports[count:])}
        self._processes: list[subprocess.Popen[bytes] | None] = [None] * count
        self._is_frozen = [False] * count
        folder.mkdir(parents=True, exist_ok=True)
        try:
            for member in range(count):
                self.start(member)
            for member in range(count):
                self.wait_healthy(member)
        except BaseException:
            self.kill_all()
            raise

    @property
    def members(self) -> str:
        """ "host:port" of the members, with commas."""
        host = "localhost" if self._certificates else self._host
        return ",".join(f"{host}:{port}" for port in self.ports)

    def start(self, member: int) -> None:
        """Start a member that does not run, with the data it left."""
        name = f"m{member}"
        scheme = "https" if self._certificates else "http"
        url = f"{scheme}://{self._host}:{self.ports[member]}"
        flags = {
            "--name": name,
            "--data-dir": str(self._folder / name),
            "--listen-client-urls": url,
            "--advertise-client-urls": url,
            "--listen-peer-urls": self._peers[name],
            "--initial-advertise-peer-urls": self._peers[name],
            "--initial-cluster": ",".join(f"{peer}={at}" for peer, at in self._peers.items()),
            "--heartbeat-interval": str(_HEARTBEAT_MS),
            "--election-timeout": str(_ELECTION_MS),
            "--logger": "zap",
            "--log-level": "warn",
        }
        if self._certificates:
            flags |= {
                "--cert-file": str(self._certificates.cert),
                "--key-file": str(self._certificates.key),
                "--trusted-ca-file": str(self._certificates.ca),
            }
        arguments = [piece for pair in flags.items() for piece in pair]
        if self._certificates:
            arguments.append("--client-cert-auth")
        with (self._folder / f"{name}.log").open("ab") as log:
            self._processes[member] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *self._prefix, "etcd", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait_healthy(self, member: int) -> None:
        """Until a member has a leader and answers."""
        until = time.monotonic() + _WAIT_SECONDS
        while not self._is_healthy(member):
            process = self._processes[member]
            assert process is not None, f"member {member} does not run"
            assert process.poll() is None, f"etcd ended: {self.log(member)}"
            assert time.monotonic() < until, f"etcd does not become healthy: {self.log(member)}"
            time.sleep(_POLL_SECONDS)

    def log(self, member: int) -> str:
        """The end of what a member wrote."""
        return (self._folder / f"m{member}.log").read_text(errors="replace")[-2_000:]

    def kill(self, member: int) -> None:
        """kill -9, and wait for its end."""
        process = self._processes[member]
        if process is not None:
            process.kill()  # also ends a frozen one
            process.wait()
            self._processes[member] = None
            self._is_frozen[member] = False

    def kill_all(self) -> None:
        """kill -9 to all that run."""
        for member in range(len(self._processes)):
            self.kill(member)

    def freeze(self, member: int) -> None:
        """SIGSTOP: its connections stay open, and nobody answers."""
        self._send(member, signal.SIGSTOP)
        self._is_frozen[member] = True

    def thaw(self, member: int) -> None:
        """SIGCONT."""
        self._send(member, signal.SIGCONT)
        self._is_frozen[member] = False

    def is_frozen(self, member: int) -> bool:
        """Whether `freeze` was the last word."""
        return self._is_frozen[member]

    def restart_all(self) -> None:
        """Start those that do not run, and wait for all."""
        for member, process in enumerate(self._processes):
            if process is None:
                self.start(member)
        for member in range(len(self._processes)):
            self.wait_healthy(member)

    def wipe(self) -> None:
        """Kill all, lose all they stored, and start them again, empty."""
        self.kill_all()
        for name in self._peers:
            shutil.rmtree(self._folder / name)
        self.restart_all()

    def wait_led(self) -> None:
        """Until a member that runs, and is not frozen, leads."""
        until = time.monotonic() + _WAIT_SECONDS
        while True:
            try:
                self.leader()
                return
            except (AssertionError, OSError):
                assert time.monotonic() < until, "the members that are left have no leader"
                time.sleep(_POLL_SECONDS)

    def leader(self) -> int:
        """Which member leads, of those that run and are not frozen."""
        for member, process in enumerate(self._processes):
            if process is None or self._is_frozen[member]:
                continue
            status = self.post(member, "/v3/maintenance/status", {})
            header = status["header"]
            assert isinstance(header, dict)
            if status.get("leader") == header.get("member_id"):
                return member
        raise AssertionError("no member leads")

    def post(self, member: int, path: str, body: Mapping[str, object], *, token: str = "") -> dict[str, object]:
        """Ask etcd's own JSON gateway, which is apart from the code under test."""
        request = urllib.request.Request(f"{self._url(member)}{path}", data=json.dumps(body).encode())
        if token:
            request.add_header("Authorization", token)
        with urllib.request.urlopen(request, timeout=10, context=self._context()) as reply:
            answer: dict[str, object] = json.load(reply)
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill_all()

    def _send(self, member: int, number: signal.Signals) -> None:
        process = self._processes[member]
        assert process is not None, f"member {member} does not run"
        process.send_signal(number)

    def _url(self, member: int) -> str:
        place = "https://localhost" if self._certificates else f"http://{self._host}"
        return f"{place}:{self.ports[member]}"

    def _context(self) -> ssl.SSLContext | None:
        if self._certificates is None:
            return None
        context = ssl.create_default_context(cafile=str(self._certificates.ca))
        context.load_cert_chain(self._certificates.cert, self._certificates.key)
        return context

    def _is_healthy(self, member: int) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url(member)}/health", timeout=2, context=self._context()) as reply:
                return bool(json.load(reply).get("health") == "true")
        except (OSError, ValueError):
            return False


def _free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now: etcd cannot be asked which one it got for 0."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=60)
