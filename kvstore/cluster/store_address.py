"""Where a cluster store is, as one text, and the store behind it.

    etcd://HOST:PORT[,HOST:PORT...][/CLUSTER][?ca=FILE][&cert=FILE&key=FILE][&user=NAME&password_file=FILE]
    file:///PATH

`ca` turns TLS on and names who may vouch for the members; `cert` and `key` are this node's own. CLUSTER separates
several clusters of one etcd, and is "default" where it is not named. Secrets stand in files, never in the text.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import parse_qsl, unquote

from kvstore.cluster.store import ClusterStore
from kvstore.errors import InvalidRequest
from kvstore.limits import STORE_MEMBERS_MAX, TOKEN_BYTES_MAX

_OPTIONS: Final = ("ca", "cert", "key", "user", "password_file")
_MEMBER: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):([0-9]{1,5})")
_CLUSTER: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_CREDENTIALS: Final = re.compile(r"[^/,'\"\s]*@")


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdAddress:
    """An etcd and how to speak with it.

    Attributes:
        members: "host:port" of its members, at least one.
        cluster: name of our cluster in it.
        ca: file with the certificates that vouch for the members, PEM; "" is no TLS.
        cert, key: files with this node's certificate and private key, PEM; both or none.
        user: name to log in with; "" is nobody.
        password_file: file whose first line is the password.
    """

    members: tuple[str, ...]
    cluster: str = "default"
    ca: str = ""
    cert: str = ""
    key: str = ""
    user: str = ""
    password_file: str = ""

    def __str__(self) -> str:
        return f"etcd://{','.join(self.members)}/{self.cluster}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileAddress:
    """A cluster store in a file."""

    path: str

    def __str__(self) -> str:
        return f"file://{self.path}"


def parse_store_address(text: str) -> EtcdAddress | FileAddress:
    """The address behind a text as the module describes it. Raises InvalidRequest."""
    # not by urlsplit: some releases of Python take brackets only around all of a netloc, and ours lists several hosts
    scheme, _, rest = text.partition("://")
    rest, _, query = rest.partition("?")
    netloc, slash, path = rest.partition("/")
    if "#" in text:
        raise _wrong(text, "it has a '#'; write %23 where one is meant")
    try:
        options = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))
    except ValueError as error:
        raise _wrong(text, str(error)) from None
    if scheme == "file" and not netloc and slash and not query:
        return FileAddress(path=unquote(slash + path))
    if scheme != "etcd":
        raise _wrong(text, "it begins with neither etcd:// nor file:///")
    return _etcd_address(text, netloc, path, options)


def open_cluster_store(address: EtcdAddress | FileAddress) -> ClusterStore:
    """The store at an address; asks nobody yet. Files named in it are read now.

    Raises:
        InvalidRequest: a file with a certificate or password cannot be read.
        Unavailable, FormatUnsupported: as `FileClusterStore`.
    """
    # the one that is not used is not loaded: a client that only knows views has no gRPC
    if isinstance(address, FileAddress):
        from kvstore.cluster.file_store import FileClusterStore

        return FileClusterStore(Path(address.path), clock=time.monotonic_ns)
    from kvstore.cluster.etcd_client import EtcdClient
    from kvstore.cluster.etcd_store import EtcdClusterStore

    secrets = read_secrets(address)
    return EtcdClusterStore(EtcdClient(address, secrets), cluster=address.cluster)


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdSecrets:
    """The content of the files that an address names; empty where it names none."""

    ca: bytes = b""
    cert: bytes = b""
    key: bytes = b""
    password: str = ""


def read_secrets(address: EtcdAddress) -> EtcdSecrets:
    """Reads the files. Raises InvalidRequest naming the one that cannot be read."""
    password = _content(address.password_file, "password_file", bytes_max=TOKEN_BYTES_MAX).decode(errors="replace")
    return EtcdSecrets(
        ca=_content(address.ca, "ca"),
        cert=_content(address.cert, "cert"),
        key=_content(address.key, "key"),
        password=password.partition("\n")[0].rstrip("\r"),
    )


def _etcd_address(text: str, netloc: str, path: str, options: Mapping[str, str]) -> EtcdAddress:
    members = tuple(netloc.split(","))
    for member in members:
        found = _MEMBER.fullmatch(member)
        if found is None or not 0 < int(found[2]) < 65_536:
            raise _wrong(text, f"{member!r} is no host:port; a user is passed as ?user=NAME")
    if len(members) > STORE_MEMBERS_MAX or len(set(members)) < len(members):
        raise _wrong(text, f"it names {len(members)} members; name each once, at most {STORE_MEMBERS_MAX}")
    cluster = path.strip("/") or "default"
    if not _CLUSTER.fullmatch(cluster):
        raise _wrong(text, f"cluster {cluster!r} is not 1 to 64 letters, digits, '.', '_' or '-'")
    unknown = sorted(set(options) - set(_OPTIONS))
    if unknown or "" in options.values():
        raise _wrong(text, f"options are {', '.join(_OPTIONS)}, each with a value; it has {', '.join(options)}")
    if ("cert" in options) != ("key" in options) or ("cert" in options and "ca" not in options):
        raise _wrong(text, "cert, key and ca belong together")
    if ("user" in options) != ("password_file" in options):
        raise _wrong(text, "user and password_file belong together")
    return EtcdAddress(members=members, cluster=cluster, **options)


def _content(path: str, option: str, *, bytes_max: int = 1 << 20) -> bytes:
    if not path:
        return b""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{option} {path} of the cluster store cannot be read: {error.strerror}") from None
    if not content or len(content) > bytes_max:
        raise InvalidRequest(f"{option} {path} of the cluster store has {len(content)} bytes, not 1 to {bytes_max}")
    return content


def _wrong(text: str, reason: str) -> InvalidRequest:
    """Without what stands before an '@': it may be somebody's password."""
    said = _CREDENTIALS.sub("...@", f"cluster {text!r}: {reason}")
    return InvalidRequest(f"{said}; write etcd://HOST:PORT,HOST:PORT/CLUSTER?ca=FILE or file:///PATH")
