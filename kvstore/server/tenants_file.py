"""The tenants file (docs/operations.md, "Tenants"): TOML or JSON, no token in clear."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from kvstore.errors import InvalidRequest
from kvstore.limits import NAME_BYTES_MAX, TENANTS_FILE_BYTES_MAX
from kvstore.server.tenants import TOKEN_HASH_BYTES, Scope, Tenant, TenantBook, Token, hash_of
from kvstore.settings import parse_size
from kvstore.types.hex_text import bytes_of_hex
from kvstore.types.secret import read_token

_TENANT_FIELDS: Final = ("name", "quota", "weight", "tokens")
_TOKEN_FIELDS: Final = ("name", "scopes", "file", "sha256")


def load_tenants(path: Path) -> TenantBook:
    """The tenants that a file describes; token files are relative to its folder.

    Raises:
        InvalidRequest: It or a token file cannot be read, or something in it is wrong; the message says where.
    """
    content = _read(path)
    root = _map(_parse(path, content), f"tenants file {path}")
    _known_only(root, ("tenants",), f"tenants file {path}")
    rows = _list(root.get("tenants"), f"tenants of {path}")
    return TenantBook([_tenant(row, f"tenant {at} of {path}", path.parent) for at, row in enumerate(rows, 1)])


def _parse(path: Path, content: bytes) -> object:
    try:
        text = content.decode()
        return json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (UnicodeDecodeError, json.JSONDecodeError, tomllib.TOMLDecodeError) as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise InvalidRequest(f"tenants file {path} is not valid {kind}: {error}") from None


def _tenant(row: object, where: str, folder: Path) -> Tenant:
    fields = _map(row, where)
    name = _text(fields.get("name"), f"name of {where}")
    where = f"tenant {name!r}"
    if len(name.encode()) > NAME_BYTES_MAX:
        raise InvalidRequest(f"{where[:80]}... has {len(name.encode())} bytes, the limit is {NAME_BYTES_MAX}")
    _known_only(fields, _TENANT_FIELDS, where)
    tokens = _list(fields.get("tokens", []), f"tokens of {where}")
    return Tenant(
        name=name,
        quota_bytes=_quota(fields.get("quota", 0), where),
        weight=_weight(fields.get("weight", 1), where),
        tokens=tuple(_token(token, f"token {at} of {where}", folder) for at, token in enumerate(tokens, 1)),
    )


def _token(row: object, where: str, folder: Path) -> Token:
    fields = _map(row, where)
    if {"token", "secret", "value"} & fields.keys():
        raise InvalidRequest(f"{where} is written in clear; put it into a file of its own (file), or give its sha256")
    _known_only(fields, _TOKEN_FIELDS, where)
    file, sha256 = fields.get("file"), fields.get("sha256")
    if (file is None) is (sha256 is None):
        raise InvalidRequest(f"{where} must have either file or sha256")
    return Token(
        hash=hash_of(read_token(folder / _text(file, f"file of {where}"))) if file else _hash(sha256, where),
        scopes=_scopes(fields.get("scopes"), where),
        name=_text(fields["name"], f"name of {where}") if "name" in fields else "",
    )


def _hash(value: object, where: str) -> bytes:
    found = bytes_of_hex(_text(value, f"sha256 of {where}"), TOKEN_HASH_BYTES)
    if found is None:
        raise InvalidRequest(f"sha256 of {where} is no SHA-256 in hex; `kvstore tenants hash FILE` prints it")
    return found


def _scopes(value: object, where: str) -> Scope:
    names = [_text(name, f"a scope of {where}") for name in _list(value, f"scopes of {where}")]
    known = {str(scope.name).lower(): scope for scope in Scope}
    wrong = sorted(set(names) - known.keys())
    if wrong or not names:
        raise InvalidRequest(f"scopes of {where} are {names}; list one or more of: {', '.join(known)}")
    scopes = Scope(0)
    for name in names:
        scopes |= known[name]
    return scopes


def _quota(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise InvalidRequest(f"quota of {where} is {value!r:.80}; write a size, such as 2TiB, or 0 for none")
    try:
        return parse_size(value)
    except ValueError as error:
        raise InvalidRequest(f"quota of {where}: {error}") from None


def _weight(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise InvalidRequest(f"weight of {where} is {value!r:.80}; write a number above 0")
    return float(value)


def _map(value: object, what: str) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{what} is {type(value).__name__}, not a table of names and values")
    return value


def _list(value: object, what: str) -> Sequence[object]:
    if not isinstance(value, list):
        raise InvalidRequest(f"{what} must be a list; it is {type(value).__name__}")
    return value


def _text(value: object, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{what} must be text; it is {value!r:.80}")
    return value


def _known_only(fields: Mapping[str, object], known: Sequence[str], where: str) -> None:
    unknown = sorted(fields.keys() - set(known))
    if unknown:
        raise InvalidRequest(f"{where} has {unknown[0]!r}, which means nothing here; known are {', '.join(known)}")


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(TENANTS_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise InvalidRequest(f"tenants file {path} cannot be read: {error.strerror}") from None
    if len(content) > TENANTS_FILE_BYTES_MAX:
        raise InvalidRequest(f"tenants file {path} has more than {TENANTS_FILE_BYTES_MAX} bytes; describe fewer")
    return content
