"""The tenants file: what it may say, that no token stands in it, and that a mistake is named."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from kvstore.errors import Denied, InvalidRequest
from kvstore.limits import TOKEN_BYTES_MIN, GiB
from kvstore.server.access import NodeAccess
from kvstore.server.tenants import Scope, Tenant, TenantBook, Token, authenticate, hash_of
from kvstore.server.tenants_file import load_tenants
from kvstore.types.secret import read_token, write_new_token

SECRET = b"a secret of 24 bytes or "
GOOD = f"""
[[tenants]]
name = "search"
quota = "2GiB"
weight = 2
tokens = [
  {{ name = "inference", scopes = ["read", "write"], file = "search.token" }},
  {{ scopes = ["read"], sha256 = "{hash_of(b"dashboards of search").hex()}" }},
]

[[tenants]]
name = "operators"
tokens = [{{ scopes = ["admin"], sha256 = "{hash_of(b"the one of operators").hex()}" }}]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "search.token").write_bytes(SECRET + b"\n")
    (tmp_path / "search.token").chmod(0o600)
    return tmp_path


def write(folder: Path, text: str, name: str = "tenants.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_file_of_tenants(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    book = load_tenants(write(folder, GOOD))
    search = book.get("search")
    assert search is not None
    assert (search.quota_bytes, search.weight) == (2 * GiB, 2.0)
    granted = {token: book.find(token) for token in (SECRET.strip(), b"dashboards of search", b"the one of operators")}
    assert [(permit.tenant, permit.scopes) for permit in granted.values() if permit] == [
        ("search", Scope.READ | Scope.WRITE),
        ("search", Scope.READ),
        ("operators", Scope.ADMIN),
    ]
    assert book.find(b"search.token") is None
    assert not caplog.records, "rights are as they should be"


def test_json_says_the_same(folder: Path) -> None:
    token = {"scopes": ["read"], "sha256": hash_of(SECRET).hex()}
    path = write(folder, json.dumps({"tenants": [{"name": "t", "tokens": [token]}]}), "tenants.json")
    assert load_tenants(path).find(SECRET) is not None


def test_a_book_travels_to_the_workers(folder: Path) -> None:
    book = load_tenants(write(folder, GOOD))
    again = TenantBook.from_plain(book.to_plain())
    assert list(again) == list(book)
    assert b"secret" not in repr(book.to_plain()).encode()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tenants = 7", "must be a list"),
        ("[[tenants]]\nquota = 1", "name of tenant 1"),
        ("[[tenants]]\nname = 't'\nqota = 1", "'qota'"),
        ("[[tenants]]\nname = 't'\nquota = 'much'", "quota of tenant 't'"),
        ("[[tenants]]\nname = 't'\nweight = 0", "weight of tenant 't'"),
        ("[[tenants]]\nname = 't'\n[[tenants]]\nname = 't'", "described twice"),
        ("[[tenants]]\nname = 't'\ntokens = [{ scopes = ['read'], token = 'x' }]", "written in clear"),
        ("[[tenants]]\nname = 't'\ntokens = [{ scopes = ['read'] }]", "either file or sha256"),
        ("[[tenants]]\nname = 't'\ntokens = [{ scopes = ['all'], sha256 = 'x' }]", "sha256"),
        ("[[tenants]]\nname = 't'\ntokens = [{ scopes = [], file = 'search.token' }]", "scopes of token 1"),
        ("[[tenants]]\nname = 't'\ntokens = [{ scopes = ['rad'], file = 'search.token' }]", "read, write, admin"),
        ("[[tenants]]\nname = 't'\ntokens = [{ scopes = ['read'], file = 'gone' }]", "gone cannot be read"),
        (GOOD + "[[tenants]]\nname='x'\ntokens=[{scopes=['read'], file='search.token'}]", "one token is given to"),
        ("tenants = [", "not valid TOML"),
        ("other = 1\ntenants = []", "'other'"),
    ],
)
def test_what_is_wrong_is_named(folder: Path, text: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        load_tenants(write(folder, text))


def test_a_secret_that_others_may_read_is_warned_about(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "search.token").chmod(0o644)
    with caplog.at_level(logging.WARNING):
        load_tenants(write(folder, GOOD))
    assert "0644" in caplog.text
    assert SECRET.decode().strip() not in caplog.text


def test_a_short_secret_is_none(tmp_path: Path) -> None:
    (tmp_path / "token").write_bytes(b"x" * (TOKEN_BYTES_MIN - 1))
    with pytest.raises(InvalidRequest, match="new-token"):
        read_token(tmp_path / "token")


def test_a_new_token_is_its_owners_alone_and_replaces_nothing(tmp_path: Path) -> None:
    token = write_new_token(tmp_path / "token")
    assert read_token(tmp_path / "token") == token
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    with pytest.raises(InvalidRequest, match="exists already"):
        write_new_token(tmp_path / "token")
    assert write_new_token(tmp_path / "other") != token


def test_a_reload_that_fails_changes_nothing(folder: Path) -> None:
    path = write(folder, GOOD)
    access = NodeAccess(path)
    write(folder, "tenants = [")
    with pytest.raises(InvalidRequest):
        access.reload()
    permit = access.permit_of(SECRET.strip())
    assert permit is not None
    assert permit.tenant == "search"


def test_an_open_node_grants_everything_to_everybody() -> None:
    access = NodeAccess(None)
    assert access.permit_of(b"") is None
    assert access.permit_of(b"whatever it is") is None
    assert access.reload() is None


def test_a_grant_is_renewed_by_its_token() -> None:
    def book(name: str, scopes: Scope) -> TenantBook:
        return TenantBook([Tenant(name=name, tokens=(Token(hash=hash_of(SECRET), scopes=scopes),))])

    permit = authenticate(book("t", Scope.READ), SECRET)
    assert book("t", Scope.ADMIN).renewed(permit) == authenticate(book("t", Scope.ADMIN), SECRET)
    assert book("u", Scope.READ).renewed(permit) is None
    assert TenantBook().renewed(permit) is None
    with pytest.raises(Denied, match="no token"):
        authenticate(book("t", Scope.READ), b"")
