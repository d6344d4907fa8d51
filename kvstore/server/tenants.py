"""Tenants of a node: who they are, by which tokens they are known, and what each token allows.

A token is a secret of its bearer; a node keeps only its SHA-256, here and in what supervisor and workers tell each
other. Reading them from a file is `kvstore.server.tenants_file`.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntFlag
from typing import Final

from kvstore.errors import Denied, InvalidRequest
from kvstore.limits import TENANTS_MAX, TOKENS_MAX
from kvstore.wire.codec import Plain

TOKEN_HASH_BYTES: Final = 32


class Scope(IntFlag):
    """What a token allows. None includes another.

    Attributes:
        READ: match, get, wait and prefetch chunks of the tenant, list and explain its namespaces.
        WRITE: put and delete chunks of the tenant, register and drop its namespaces.
        ADMIN: see and drop every tenant's namespaces over gRPC, all numbers, drain, scrub, reload. No payload.
    """

    READ = 1
    WRITE = 2
    ADMIN = 4


ALL_SCOPES: Final = Scope.READ | Scope.WRITE | Scope.ADMIN


def scope_names(scopes: Scope) -> str:
    """The scopes for people: "read, write"."""
    return ", ".join(str(scope.name).lower() for scope in Scope if scope in scopes) or "none"


def hash_of(token: bytes) -> bytes:
    """What is kept of a token: its SHA-256. Tokens are drawn at random, so nothing slower is needed."""
    return hashlib.sha256(token).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Permit:
    """What a bearer of a token may do; the supervisor's own connection, and every one of an open node, has none.

    Attributes:
        tenant: whose namespaces are there for the bearer; of a peer "".
        scopes: see `Scope`.
        token_hash: by which the permit is found again after a reload.
        is_peer: the bearer is a node of this cluster: every tenant's namespaces are there for it.
    """

    tenant: str
    scopes: Scope
    token_hash: bytes
    is_peer: bool = False

    def may_see(self, tenant: str) -> bool:
        """Whether the namespaces of a tenant are there for the bearer."""
        return self.is_peer or tenant == self.tenant

    def require(self, scope: Scope, what: str) -> None:
        """Raises Denied when the token lacks a scope that `what` needs."""
        if scope not in self.scopes:
            bearer = "a peer" if self.is_peer else f"tenant {self.tenant!r}"
            raise Denied(
                f"{what} needs scope {scope_names(scope)}, the token of {bearer} has "
                f"{scope_names(self.scopes)}; use another token, or give this one the scope in the tenants file"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One token of a tenant. `name` is for people; empty where nobody gave one."""

    hash: bytes
    scopes: Scope
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """One tenant.

    Attributes:
        name: as namespaces name it.
        tokens: by which it is known; may be empty, then nobody is.
        quota_bytes: of the node's SSDs, in padded records; 0 is no quota.
        weight: its share within a flow class, relative to the other tenants.
    """

    name: str
    tokens: tuple[Token, ...] = ()
    quota_bytes: int = 0
    weight: float = 1.0


class TenantBook:
    """All tenants of a node, immutable.

    Raises:
        InvalidRequest: A tenant or a token appears twice, or there are more than TENANTS_MAX or TOKENS_MAX.
    """

    def __init__(self, tenants: Iterable[Tenant] = ()) -> None:
        self._tenants: dict[str, Tenant] = {}
        self._permits: dict[bytes, Permit] = {}
        for tenant in tenants:
            if tenant.name in self._tenants:
                raise InvalidRequest(
                    f"tenant {tenant.name!r} is described twice; describe it once, with all its tokens"
                )
            self._tenants[tenant.name] = tenant
            for token in tenant.tokens:
                self._add(tenant, token)
        if len(self._tenants) > TENANTS_MAX or len(self._permits) > TOKENS_MAX:
            raise InvalidRequest(
                f"{len(self._tenants)} tenants with {len(self._permits)} tokens; at most {TENANTS_MAX} tenants and "
                f"{TOKENS_MAX} tokens are taken: describe fewer, or give tenants fewer tokens"
            )

    def _add(self, tenant: Tenant, token: Token) -> None:
        other = self._permits.get(token.hash)
        if other is not None:
            raise InvalidRequest(
                f"one token is given to tenant {other.tenant!r} and to tenant {tenant.name!r}; draw another one"
            )
        self._permits[token.hash] = Permit(tenant=tenant.name, scopes=token.scopes, token_hash=token.hash)

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._tenants.values())

    def __len__(self) -> int:
        return len(self._tenants)

    def get(self, name: str) -> Tenant | None:
        """The tenant of that name."""
        return self._tenants.get(name)

    def find(self, token: bytes) -> Permit | None:
        """What a token allows. Takes the same time whichever token is right, and however much of one is."""
        asked = hash_of(token)
        found = None
        for known, permit in self._permits.items():
            if hmac.compare_digest(known, asked):
                found = permit
        return found

    def renewed(self, permit: Permit) -> Permit | None:
        """What the token behind a permit of an older book allows now; None when it does not, or to another tenant."""
        now = self._permits.get(permit.token_hash)
        return now if now is not None and now.tenant == permit.tenant else None

    def to_plain(self) -> dict[str, Plain]:
        """Plain data that `from_plain` reads."""
        tenants: list[Plain] = [
            {
                "name": tenant.name,
                "quota_bytes": tenant.quota_bytes,
                "weight": tenant.weight,
                "tokens": [
                    {"hash": token.hash, "scopes": int(token.scopes), "name": token.name} for token in tenant.tokens
                ],
            }
            for tenant in self
        ]
        return {"tenants": tenants}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Plain]) -> TenantBook:
        """The book that a supervisor of the same version sent. Raises InvalidRequest when it is malformed."""
        return cls(_tenant_of(row) for row in _rows(plain, "tenants"))


def authenticate(book: TenantBook, token: bytes) -> Permit:
    """What a token allows.

    Raises:
        Denied: There is none, or it is unknown. The two are told apart for people; nothing else is.
    """
    if not token:
        raise Denied("this node has tenants and no token was given; pass token= or token_file= (--token-file)")
    permit = book.find(token)
    if permit is None:
        raise Denied("the token is not known here; ask the operator for one, or for a reload of the tenants file")
    return permit


def _tenant_of(row: Mapping[str, Plain]) -> Tenant:
    name, quota_bytes, weight = row.get("name"), row.get("quota_bytes"), row.get("weight")
    if not isinstance(name, str) or not isinstance(quota_bytes, int) or not isinstance(weight, float):
        raise InvalidRequest(f"a tenant was sent as {row!r:.200}")
    return Tenant(name=name, quota_bytes=quota_bytes, weight=weight, tokens=tuple(map(_token_of, _rows(row, "tokens"))))


def _token_of(row: Mapping[str, Plain]) -> Token:
    token_hash, scopes, name = row.get("hash"), row.get("scopes"), row.get("name")
    if not isinstance(token_hash, bytes) or not isinstance(scopes, int) or not isinstance(name, str):
        raise InvalidRequest("a token was sent without its hash, its scopes or its name")
    return Token(hash=token_hash, scopes=Scope(scopes) & ALL_SCOPES, name=name)


def _rows(plain: Mapping[str, Plain], name: str) -> list[Mapping[str, Plain]]:
    rows = plain.get(name)
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        raise InvalidRequest(f"{name} is no list of maps")
    return rows
