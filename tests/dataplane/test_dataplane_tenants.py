"""Tenants on the data plane: whose token, which scope, and that another tenant's chunks might as well not exist."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.engine.engine import DriveEngine, EngineSettings
from kvstore.errors import Denied, InvalidRequest, KVStoreError, UnknownNamespace
from kvstore.limits import MANIFESTS_SHARE_TENANT, NAMESPACES_PER_TENANT_MAX, SECOND_NS, MiB
from kvstore.server.admission import SCOPE_OF, TokenAdmission
from kvstore.server.batch import pack_u32
from kvstore.server.tenants import Scope, Tenant, TenantBook, Token, hash_of
from kvstore.telemetry.metrics import DataplaneMetrics, DeniedKind
from kvstore.testing.plane_lab import LabClient, PlaneLab, error_raised
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore.types.results import ItemStatus, MissReason, RefusedReason
from kvstore.wire.header import FrameType
from kvstore.wire.messages import (
    Admin,
    AdminReply,
    Delete,
    Drop,
    End,
    Feature,
    Get,
    Manifest,
    Match,
    MatchReply,
    Ping,
    Pong,
    Prefetch,
    Unpin,
    ViewReply,
    ViewRequest,
    Wait,
    WriterAbort,
    WriterCommit,
    WriterOpen,
    WriterOpened,
)
from kvstore.wire.replicas import Forget, Heads, HeadsReply
from kvstore.wire.schema import Message
from kvstore.wire.shared import Place, encode_places, get_into
from kvstore.wire.slices import NO_CONTENT_ID, Slice

LAYOUT = KVLayout.opaque(chunk_bytes=2 * MiB, chunk_tokens=16)
OURS = Namespace(tenant="ours", model="m", weights="w", layout=LAYOUT)
THEIRS = Namespace(tenant="theirs", model="m", weights="w", layout=LAYOUT)
NEVER = Namespace(tenant="theirs", model="never registered", weights="w", layout=LAYOUT)
ALL = Scope.READ | Scope.WRITE
TOKENS = {
    b"ours, all of it": ("ours", ALL),
    b"ours, to look at": ("ours", Scope.READ),
    b"ours, to write to": ("ours", Scope.WRITE),
    b"ours, to administer": ("ours", Scope.ADMIN),
    b"theirs, all of it": ("theirs", ALL),
}
KEY = bytes([7]) * 32
VALUE = os.urandom(5000)
ABSENT = bytes([MissReason.ABSENT])
FREE = {
    FrameType.HELLO,
    FrameType.PING,
    FrameType.VIEW,
    FrameType.CANCEL,
    FrameType.ADMIN,
    FrameType.PAIR,
    FrameType.PROBE,
    FrameType.REGIONS,
} | {
    FrameType.LOCAL,
    FrameType.REGION,
    FrameType.REGION_DROP,
}
"""Verbs that need no scope: they touch no chunk. ADMIN is refused to everybody but the supervisor."""


def book_of(*tokens: bytes) -> TenantBook:
    """The tenants, each with those of its tokens that are listed."""
    return TenantBook(
        Tenant(
            name=name,
            tokens=tuple(
                Token(hash=hash_of(token), scopes=scopes)
                for token, (tenant, scopes) in TOKENS.items()
                if tenant == name and token in tokens
            ),
        )
        for name in ("ours", "theirs")
    )


class Guarded:
    """A data plane that knows tenants, with chunks of both in it."""

    def __init__(self, folder: Path) -> None:
        settings = EngineSettings(
            capacity_bytes=64 * MiB,
            segment_bytes=8 * MiB,
            cache_bytes=16 * MiB,
            staging_bytes=32 * MiB,
            device="threads",
            prefault=False,
        )
        self.engine = DriveEngine.open(folder, settings, now_ns=time.monotonic_ns())
        self.metrics = DataplaneMetrics()
        self.admission = TokenAdmission(self.metrics)
        self.admission.tell(book_of(*TOKENS))
        self.lab = PlaneLab(self.engine, admission=self.admission)
        self.lab.metrics.denied = self.metrics.denied
        for token, namespace in ((b"ours, all of it", OURS), (b"theirs, all of it", THEIRS)):
            client = self.client(token)
            client.register(namespace.manifest())
            assert client.put(namespace.digest, [KEY], [VALUE]) == {0: (ItemStatus.STORED, "")}

    def client(self, token: bytes, *, client_id: bytes = b"C" * 16, features: Feature = Feature.NONE) -> LabClient:
        made = LabClient(self.lab, socket.create_connection(("127.0.0.1", self.lab.port)))
        made.hello(token=token, client_id=client_id, features=features)
        return made

    def denied(self, kind: DeniedKind) -> int:
        return self.metrics.denied[kind]

    def close(self) -> None:
        self.lab.plane.close()
        self.lab.turn_until(lambda: self.engine.idle)
        self.lab.close()
        self.engine.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Guarded]:
    made = Guarded(tmp_path)
    yield made
    made.close()


# --- every verb, on another tenant's namespace ------------------------------------------------------------------------
def messages(digest: bytes) -> dict[FrameType, Message]:
    """A request of each verb that names a namespace and is answered by one frame."""
    return {
        FrameType.MATCH: Match(namespace=digest, keys=KEY, touch=True, count=True, pin_ttl_ns=SECOND_NS),
        FrameType.WAIT: Wait(namespace=digest, keys=KEY, deadline_ns=SECOND_NS),
        FrameType.DELETE: Delete(namespace=digest, keys=KEY),
        FrameType.PREFETCH: Prefetch(namespace=digest, keys=KEY),
        FrameType.DROP: Drop(namespace=digest),
        FrameType.WRITER_OPEN: WriterOpen(
            namespace=digest,
            keys=KEY,
            lengths=pack_u32([8192]),
            block_bytes=pack_u32([4096]),
            deadline_ns=SECOND_NS,
        ),
    }


def answer(client: LabClient, message: Message) -> tuple[FrameType, object, str]:
    """All that a client learns of a request: what kind of answer, its bytes, its error without the digest in it."""
    client.start(message)
    try:
        frame = client.receive()
    except KVStoreError as error:
        return FrameType.ERROR, type(error), str(error).replace(message.namespace.hex(), "X")  # type: ignore[attr-defined]
    body = bytes(frame.body).replace(message.namespace.hex().encode(), b"X")  # type: ignore[attr-defined]
    return frame.type, body, ""


def test_another_tenants_namespace_is_answered_as_one_that_never_was(node: Guarded) -> None:
    client = node.client(b"ours, all of it")
    for theirs, never in zip(messages(THEIRS.digest).values(), messages(NEVER.digest).values(), strict=True):
        assert answer(client, theirs) == answer(client, never), theirs.TYPE.name
    assert client.get(THEIRS.digest, [KEY]) == client.get(NEVER.digest, [KEY]) == (ABSENT, {})
    refused = [client.put(one.digest, [KEY], [VALUE])[0] for one in (THEIRS, NEVER)]
    assert [status for status, _ in refused] == [RefusedReason.UNKNOWN_NAMESPACE] * 2
    assert node.denied(DeniedKind.FOREIGN_NAMESPACE) == len(messages(b"")) + 2, "each try is counted"
    owner = node.client(b"theirs, all of it")
    assert owner.get(THEIRS.digest, [KEY]) == (b"\0", {0: VALUE}), "and nothing has happened to what is there"
    assert owner.call(Match(namespace=THEIRS.digest, keys=KEY, touch=False, count=False), MatchReply).statuses == b"\0"


def test_ones_own_namespace_is_served_by_every_verb(node: Guarded) -> None:
    client = node.client(b"ours, all of it")
    assert client.get(OURS.digest, [KEY]) == (b"\0", {0: VALUE})
    reply = client.call(messages(OURS.digest)[FrameType.MATCH], MatchReply)
    assert reply.statuses == b"\0"
    assert reply.pinned
    client.call(Unpin(pin_id=reply.pin_id), End)
    assert client.call(messages(OURS.digest)[FrameType.DELETE], End).statuses == b"\0"
    client.call(messages(OURS.digest)[FrameType.DROP], End)


@pytest.mark.parametrize("features", [Feature.NONE, Feature.FINAL_DATA])
def test_the_lane_of_single_reads_keeps_to_the_tenant(node: Guarded, features: Feature) -> None:
    theirs, ours = (
        node.client(b"theirs, all of it", features=features),
        node.client(b"ours, all of it", features=features),
    )
    for _ in range(3):  # the lane remembers what it has judged
        assert theirs.get(THEIRS.digest, [KEY])[1] == {0: VALUE}
        assert ours.get(THEIRS.digest, [KEY]) == (ABSENT, {})
        assert ours.get(OURS.digest, [KEY])[1] == {0: VALUE}
        assert ours.get(THEIRS.digest, [KEY]) == (ABSENT, {})


def test_a_manifest_of_another_tenant_is_denied_known_or_not(node: Guarded) -> None:
    client = node.client(b"ours, all of it")
    texts = []
    for namespace in (THEIRS, NEVER):
        error = error_raised(lambda: client.register(namespace.manifest()))  # noqa: B023 -- called at once
        assert isinstance(error, Denied)
        texts.append(str(error))
    assert texts[0] == texts[1]
    assert "'theirs'" in texts[0]


def test_a_client_id_means_nothing_to_another_tenant(node: Guarded) -> None:
    """Pins and writers belong to a client id, which a peer chooses."""
    owner, thief = (node.client(token, client_id=b"S" * 16) for token in (b"theirs, all of it", b"ours, all of it"))
    pinned = owner.call(messages(THEIRS.digest)[FrameType.MATCH], MatchReply)
    message = WriterOpen(
        namespace=THEIRS.digest,
        keys=bytes([8]) * 32,
        lengths=pack_u32([4096]),
        block_bytes=pack_u32([4096]),
        deadline_ns=SECOND_NS,
    )
    opened = owner.call(message, WriterOpened)
    assert opened.statuses == bytes([ItemStatus.GRANTED])
    thief.call(Unpin(pin_id=pinned.pin_id), End)
    thief.call(WriterAbort(writer_ids=opened.writer_ids), End)
    node.engine.update_gauges(time.monotonic_ns())
    assert node.engine.metrics.pinned_bytes, "the pin is still held"
    assert node.engine.metrics.open_writers == 1, "the writer is still open"


# --- scopes -------------------------------------------------------------------------------------------------------
def needing(scope: Scope) -> dict[FrameType, Message]:
    """A request of every verb that needs a scope, on a namespace of one's own."""
    all_messages = messages(OURS.digest) | {
        FrameType.UNPIN: Unpin(pin_id=1),
        FrameType.MANIFEST: Manifest(manifest=OURS.manifest()),
        FrameType.WRITER_COMMIT: WriterCommit(writer_ids=pack_u32([1]), crc_tables=b"", deadline_ns=SECOND_NS),
        FrameType.WRITER_ABORT: WriterAbort(writer_ids=pack_u32([1])),
    }
    return {kind: message for kind, message in all_messages.items() if SCOPE_OF.get(kind) is scope}


@pytest.mark.parametrize(("token", "missing"), [(b"ours, to look at", Scope.WRITE), (b"ours, to write to", Scope.READ)])
def test_a_verb_needs_its_scope(node: Guarded, token: bytes, missing: Scope) -> None:
    client = node.client(token)
    before = node.denied(DeniedKind.SCOPE)
    for message in needing(missing).values():
        error = error_raised(lambda: (client.start(message), client.receive()))  # noqa: B023 -- called at once
        assert isinstance(error, Denied)
        assert message.TYPE.name in str(error)
    assert node.denied(DeniedKind.SCOPE) == before + len(needing(missing))
    client.call(Ping(), Pong)


def test_a_read_only_token_reads_and_each_of_its_puts_is_refused(node: Guarded) -> None:
    client = node.client(b"ours, to look at")
    for _ in range(2):
        assert client.get(OURS.digest, [KEY])[1] == {0: VALUE}
    outcome = client.put(OURS.digest, [bytes([8]) * 32, bytes([9]) * 32], [VALUE, VALUE])
    assert [status for status, _ in outcome.values()] == [RefusedReason.DENIED] * 2
    assert "may not write" in outcome[0][1]
    opened = client.call(messages(OURS.digest)[FrameType.WRITER_OPEN], WriterOpened)
    assert opened.statuses == bytes([RefusedReason.DENIED])


def test_a_read_only_token_cannot_write_slices_to_a_writer_of_its_own_client(node: Guarded) -> None:
    client = node.client(b"ours, to look at")
    one = Slice(1, 0, 4096, 0, False, NO_CONTENT_ID, 4096, 4096, bytes(4))
    client.start(WriterAbort(writer_ids=b""))
    with pytest.raises(Denied):
        client.receive()
    client.session.start(FrameType.WRITER_WRITE)
    client.send_slices([one], bytes(4096), frame_type=FrameType.WRITER_WRITE)
    with pytest.raises(Denied):
        client.receive()


@pytest.mark.parametrize("features", [Feature.NONE, Feature.FINAL_DATA])
@pytest.mark.parametrize("token", [b"ours, to write to", b"ours, to administer"])
def test_payload_is_for_those_who_may_read(node: Guarded, token: bytes, features: Feature) -> None:
    client = node.client(token, features=features)
    with pytest.raises(Denied, match="GET needs scope read"):
        client.get(OURS.digest, [KEY])


def test_nothing_is_written_into_the_memory_of_who_may_not_read(node: Guarded) -> None:
    client = node.client(b"ours, to write to")
    client.start(
        get_into(Get(namespace=OURS.digest, keys=KEY, deadline_ns=SECOND_NS), encode_places([Place(1, 0, 4096)]))
    )
    with pytest.raises(Denied, match="GET_INTO needs scope read"):
        client.receive()


def test_every_verb_has_its_scope(node: Guarded) -> None:
    answered_per_item = {FrameType.OFFER, FrameType.OFFER_FROM, FrameType.WRITER_OPEN}
    assert set(node.lab.plane.handlers) == set(SCOPE_OF) | FREE | answered_per_item


# --- tokens -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("token", "kind", "words"),
    [
        (b"", DeniedKind.NO_TOKEN, "no token was given"),
        (b"a token nobody has", DeniedKind.WRONG_TOKEN, "not known"),
        (b"ours, all of i", DeniedKind.WRONG_TOKEN, "not known"),
    ],
)
def test_who_has_no_good_token_gets_no_further_than_hello(
    node: Guarded, token: bytes, kind: DeniedKind, words: str
) -> None:
    with pytest.raises(Denied, match=words):
        node.client(token)
    assert node.denied(kind) == 1


def test_before_it_was_told_of_tenants_a_node_admits_nobody() -> None:
    admission = TokenAdmission(DataplaneMetrics())
    assert not admission.is_told
    admission.tell(book_of())
    assert admission.is_told


def test_a_connection_whose_token_is_revoked_is_closed_and_others_go_on(node: Guarded) -> None:
    revoked, kept = node.client(b"ours, all of it"), node.client(b"ours, to look at")
    node.admission.tell(book_of(b"ours, to look at"))
    node.lab.plane.renew_permits(node.admission.renewed)
    with pytest.raises(Denied, match="revoked"):
        revoked.receive()
    assert revoked.is_closed
    assert node.denied(DeniedKind.REVOKED) >= 1
    assert kept.get(OURS.digest, [KEY])[1] == {0: VALUE}
    with pytest.raises(Denied):
        node.client(b"ours, all of it")


# --- nodes of the same cluster ----------------------------------------------------------------------------------------
PEER = b"a secret of the nodes of this cluster"


@pytest.mark.parametrize("features", [Feature.NONE, Feature.FINAL_DATA])
def test_a_peer_reads_and_writes_what_is_of_any_tenant_and_no_more(node: Guarded, features: Feature) -> None:
    with pytest.raises(Denied, match="not known"):
        node.client(PEER)
    node.admission.tell_peer_token(PEER)
    for at, token in enumerate((PEER[:-1], PEER + b"x", b"")):
        with pytest.raises(Denied):
            node.client(token)
        assert node.denied(DeniedKind.WRONG_TOKEN) + node.denied(DeniedKind.NO_TOKEN) == 2 + at
    peer = node.client(PEER, features=features)
    for namespace in (OURS, THEIRS):
        for _ in range(3):  # the lane judges the first request of a form
            assert peer.get(namespace.digest, [KEY]) == (b"\0", {0: VALUE})
        assert peer.put(namespace.digest, [KEY[::-1]], [VALUE])[0][0] in (ItemStatus.STORED, ItemStatus.EXISTS)
    peer.register(NEVER.manifest())
    assert node.engine.namespace(NEVER.digest) is not None
    with pytest.raises(Denied, match="supervisor"):
        peer.call(Admin(verb="drain", arguments=b"\x80"), AdminReply)
    ours = node.client(b"ours, all of it")
    assert ours.get(THEIRS.digest, [KEY]) == (ABSENT, {}), "it is the peer's permit, not the tenants'"


def test_a_peer_token_that_is_replaced_closes_what_was_opened_with_it(node: Guarded) -> None:
    node.admission.tell_peer_token(PEER)
    peer, tenant = node.client(PEER), node.client(b"ours, all of it")
    node.admission.tell(book_of(b"ours, all of it"))
    node.lab.plane.renew_permits(node.admission.renewed)
    assert peer.call(Ping(), Pong) == Pong(), "a reload of the tenants is nothing to it"
    node.admission.tell_peer_token(b"another secret of the nodes")
    node.lab.plane.renew_permits(node.admission.renewed)
    with pytest.raises(Denied, match="revoked"):
        peer.receive()
    assert tenant.get(OURS.digest, [KEY])[1] == {0: VALUE}
    with pytest.raises(Denied):
        node.client(PEER)
    assert node.client(b"another secret of the nodes").get(THEIRS.digest, [KEY])[1] == {0: VALUE}


def test_what_nodes_speak_among_themselves_is_denied_to_every_tenant(node: Guarded) -> None:
    node.admission.tell_peer_token(PEER)
    heads = Heads(namespace=OURS.digest, keys=KEY)
    forget = Forget(manifest=OURS.manifest(), generation=1, keys=b"", ages_ns=b"")
    client = node.client(b"ours, all of it")
    for message in (heads, forget):
        with pytest.raises(Denied, match="nodes of this cluster only"):
            client.call(message, End)
    assert node.denied(DeniedKind.SCOPE) == 2
    peer = node.client(PEER)
    assert peer.call(heads, HeadsReply).statuses == ABSENT, "this plane has no copier"
    assert peer.call(forget, End) == End()


def test_one_tenant_cannot_use_up_the_table_of_namespaces(node: Guarded) -> None:
    known = {"ours": NAMESPACES_PER_TENANT_MAX, "theirs": 1}
    node.lab.plane.namespace_count = lambda tenant: known[tenant]
    ours, theirs = node.client(b"ours, all of it"), node.client(b"theirs, all of it")
    another = Namespace(tenant="ours", model="one too many", weights="w", layout=LAYOUT)
    with pytest.raises(InvalidRequest, match="the limit of one tenant"):
        ours.register(another.manifest())
    assert node.engine.namespace(another.digest) is None
    ours.register(OURS.manifest())  # one that is known is no news
    theirs.register(NEVER.manifest())
    known["ours"] -= 1
    ours.register(another.manifest())
    assert [node.engine.store.namespaces.count_of(tenant) for tenant in known] == [2, 2]


def test_one_tenant_cannot_use_up_what_a_drive_keeps_of_manifests(node: Guarded) -> None:
    table = node.engine.store.namespaces
    node.lab.plane.manifests_share = table.manifests_share_of
    ours, theirs = node.client(b"ours, all of it"), node.client(b"theirs, all of it")

    def space(tenant: str, number: int) -> bytes:
        return Namespace(tenant=tenant, model="m" * 255, weights=f"w{number}", layout=LAYOUT).manifest()

    number = 0
    while table.manifests_share_of("ours") < MANIFESTS_SHARE_TENANT:
        ours.register(space("ours", number))
        number += 1
    with pytest.raises(InvalidRequest, match="25% of what the drive keeps of manifests"):
        ours.register(space("ours", number))
    assert MANIFESTS_SHARE_TENANT <= table.manifests_share_of("ours") < MANIFESTS_SHARE_TENANT + 0.1
    ours.register(space("ours", 0))  # one that is known is no news
    theirs.register(space("theirs", 0))


def with_scopes(token: bytes, scopes: Scope) -> TenantBook:
    return TenantBook([Tenant(name="ours", tokens=(Token(hash=hash_of(token), scopes=scopes),))])


@pytest.mark.parametrize("features", [Feature.NONE, Feature.FINAL_DATA])
def test_scopes_that_change_hold_for_open_connections(node: Guarded, features: Feature) -> None:
    token = b"ours, all of it"
    client = node.client(token, features=features)
    assert client.get(OURS.digest, [KEY])[1] == {0: VALUE}
    steps: list[tuple[Scope, Callable[[], object]]] = [
        (Scope.WRITE, lambda: client.get(OURS.digest, [KEY])),
        (Scope.READ, lambda: client.call(Delete(namespace=OURS.digest, keys=KEY), End)),
    ]
    for scopes, act in steps:
        node.admission.tell(with_scopes(token, scopes))
        node.lab.plane.renew_permits(node.admission.renewed)
        assert isinstance(error_raised(act), Denied)
    assert client.get(OURS.digest, [KEY])[1] == {0: VALUE}


def test_a_token_that_changes_hands_is_revoked_for_its_old_tenant(node: Guarded) -> None:
    client = node.client(b"ours, all of it")
    node.admission.tell(
        TenantBook([Tenant(name="theirs", tokens=(Token(hash=hash_of(b"ours, all of it"), scopes=ALL),))])
    )
    node.lab.plane.renew_permits(node.admission.renewed)
    with pytest.raises(Denied, match="revoked"):
        client.receive()


def test_the_view_is_for_every_tenant(node: Guarded) -> None:
    node.client(b"ours, to administer").call(ViewRequest(known_epoch=0), ViewReply)


def test_an_unknown_namespace_is_still_told_apart_where_a_verb_must(node: Guarded) -> None:
    client = node.client(b"ours, all of it")
    with pytest.raises(UnknownNamespace):
        client.call(Drop(namespace=NEVER.digest), End)
