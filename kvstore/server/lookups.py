"""The verbs that are answered by one small message: match, pins, namespaces, wait, delete, prefetch, view."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.engine.api import Engine, NamespaceRef
from kvstore.errors import InvalidRequest, UnknownNamespace
from kvstore.limits import DIGEST_BYTES, DROPS_AHEAD_MAX, REQUEST_NS_MAX
from kvstore.server.call import Answer
from kvstore.server.groups import GroupAnswers, all_absent
from kvstore.telemetry.metrics import Verb
from kvstore.types.results import MissReason
from kvstore.wire.messages import (
    Delete,
    Drop,
    End,
    Manifest,
    Match,
    MatchReply,
    Prefetch,
    Unpin,
    Wait,
)

if TYPE_CHECKING:
    from kvstore.server.connection import Connection

_ABSENT = bytes([MissReason.ABSENT])


def match(connection: Connection, body: bytes | bytearray, engine: Engine, now_ns: int, groups: GroupAnswers) -> None:
    """MATCH. Lookups are what the hit rate counts (case 60)."""
    request = Match.decode(body)
    metrics = connection.metrics
    metrics.calls[Verb.MATCH] += 1
    count = len(request.keys) // DIGEST_BYTES
    namespace = engine.namespace(request.namespace)
    if namespace is None and connection.is_admin:
        # people asking through gRPC are told which it is; to a client both are a miss
        raise UnknownNamespace(f"namespace {request.namespace.hex()} is not known here")
    client_id = connection.client.id if connection.client else b""
    if request.group:
        tenant = connection.permit.tenant if connection.permit else ""
        outcome = groups.match(engine, namespace, request, tenant=tenant, client_id=client_id, now_ns=now_ns)
    elif namespace is None:
        outcome = all_absent(count)
    else:
        outcome = engine.match(
            namespace,
            request.keys,
            now_ns=now_ns,
            touch=request.touch,
            pin_ttl_ns=request.pin_ttl_ns,
            client_id=client_id,
        )
    reply = MatchReply(
        statuses=outcome.statuses,
        pin_id=outcome.pin_id,
        pinned=outcome.pinned,
        hit_bytes=outcome.hit_bytes,
        load_ns=outcome.load_ns,
    )
    if request.count:
        metrics.lookups += 1
        metrics.lookup_keys += count
        metrics.lookup_hits += reply.statuses.count(0)
    metrics.match_ns.observe(connection.clock() - now_ns)
    connection.answer(reply)


def unpin(connection: Connection, body: bytes | bytearray, engine: Engine) -> None:
    """UNPIN."""
    connection.metrics.calls[Verb.OTHER] += 1
    client = connection.client
    engine.unpin(Unpin.decode(body).pin_id, client_id=client.id if client else b"")
    connection.answer(End())


def manifest(connection: Connection, body: bytes | bytearray, engine: Engine) -> None:
    """MANIFEST. Raises InvalidRequest when the engine does not take it."""
    connection.metrics.calls[Verb.OTHER] += 1
    request = Manifest.decode(body)
    engine.add_namespace(request.manifest, copies=request.copies)
    connection.answer(End())


def drop(connection: Connection, body: bytes | bytearray, engine: Engine, now_ns: int) -> None:
    """DROP: answered once it is on the drive, with the generation that has begun."""
    connection.metrics.calls[Verb.DROP] += 1
    request = Drop.decode(body)
    namespace = _known(engine, request.namespace)
    if request.generation > namespace.generation + DROPS_AHEAD_MAX:
        raise InvalidRequest(
            f"DROP begins generation {request.generation}, the namespace has {namespace.generation} here: at most "
            f"{DROPS_AHEAD_MAX} more are allowed; drop it without a generation first"
        )
    call = _begin(connection, Verb.DROP, 0, now_ns)

    def done() -> None:
        fresh = engine.namespace(request.namespace)
        call.done(value=0 if fresh is None else fresh.generation)

    engine.drop_namespace(namespace, done, generation=request.generation)


def wait(connection: Connection, body: bytes | bytearray, engine: Engine, now_ns: int) -> None:
    """WAIT."""
    connection.metrics.calls[Verb.WAIT] += 1
    request = Wait.decode(body)
    count = len(request.keys) // DIGEST_BYTES
    namespace = engine.namespace(request.namespace)
    if namespace is None:
        connection.answer(End(statuses=_ABSENT * count))
        return
    call = _begin(connection, Verb.WAIT, count, now_ns)
    call.end_wait = engine.wait(namespace, request.keys, now_ns + request.deadline_ns, call.done)


def delete(connection: Connection, body: bytes | bytearray, engine: Engine, now_ns: int) -> None:
    """DELETE: answered once it is on the drive."""
    connection.metrics.calls[Verb.DELETE] += 1
    request = Delete.decode(body)
    count = len(request.keys) // DIGEST_BYTES
    namespace = engine.namespace(request.namespace)
    if namespace is None:
        connection.answer(End(statuses=_ABSENT * count))
        return
    engine.delete(namespace, request.keys, _begin(connection, Verb.DELETE, count, now_ns).done)


def prefetch(connection: Connection, body: bytes | bytearray, engine: Engine, now_ns: int) -> None:
    """PREFETCH: answered at once, while records are on their way into memory."""
    connection.metrics.calls[Verb.PREFETCH] += 1
    request = Prefetch.decode(body)
    namespace = engine.namespace(request.namespace)
    count = 0 if namespace is None else engine.prefetch(namespace, request.keys, now_ns=now_ns)
    connection.answer(End(value=count))


def _known(engine: Engine, digest: bytes) -> NamespaceRef:
    namespace = engine.namespace(digest)
    if namespace is None:
        raise UnknownNamespace(f"namespace {digest.hex()} is not known here: nothing of it is stored")
    return namespace


def _begin(connection: Connection, verb: Verb, count: int, now_ns: int) -> Answer:
    call = Answer(connection, verb, count=count, now_ns=now_ns, deadline_ns=now_ns + REQUEST_NS_MAX)
    connection.call = call
    return call
