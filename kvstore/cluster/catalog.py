"""What stands where in a cluster store: names of entries, and what the entries mean together. Pure.

    view                the view (`encode_view`)
    targets/ID          registrations, each under its node's lease
    relays/ID           the same of relays
    nodes/ID            where tools ask a node, under its lease
    use/ID              what tenants have on a target (`kvstore.cluster.shares`); it goes when the target leaves
    cluster/id, /peers  what `kvstore.cluster.charter` says
    tenants/NAME        documents, by tenant:  who may do what
    quota/NAME                                 how much of the SSDs
    policy/NAME         how many copies (policy/replicas), and the like

Nothing here grows with chunks or namespaces. Names that people choose are percent-encoded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Final, TypeVar
from urllib.parse import quote, unquote

from kvstore.cluster.plain import decode
from kvstore.cluster.registration import (
    NodeNote,
    Registration,
    RelayRegistration,
    decode_note,
    decode_registration,
    decode_relay,
)
from kvstore.cluster.shares import decode_uses
from kvstore.cluster.store import Entry
from kvstore.cluster.view import ReplicaPolicy, TargetId, View, decode_view
from kvstore.errors import InvalidRequest
from kvstore.limits import CLUSTER_VALUE_BYTES_MAX

log = logging.getLogger(__name__)

_Value = TypeVar("_Value")

VIEW_NAME: Final = "view"
TARGETS: Final = "targets/"
RELAYS: Final = "relays/"
NODES: Final = "nodes/"
USES: Final = "use/"


class Document(StrEnum):
    """Kinds of documents that operators write: JSON of their own rooms."""

    TENANT = "tenants"
    QUOTA = "quota"
    POLICY = "policy"


REPLICAS_NAME: Final = f"{Document.POLICY}/replicas"
"""The document with the cluster's `ReplicaPolicy`, as JSON."""


def target_name(target_id: TargetId) -> str:
    """Name of the registration of a target."""
    return TARGETS + quote(target_id, safe="")


def target_of(name: str) -> TargetId | None:
    """The target whose registration has this name; None when it is no registration."""
    return unquote(name.removeprefix(TARGETS)) if name.startswith(TARGETS) else None


def relay_name(relay_id: str) -> str:
    """Name of the registration of a relay."""
    return RELAYS + quote(relay_id, safe="")


def node_name(node_id: str) -> str:
    """Name of the note of a node."""
    return NODES + quote(node_id, safe="")


def use_name(target_id: TargetId) -> str:
    """Name of what tenants have on a target."""
    return USES + quote(target_id, safe="")


def document_name(kind: Document, name: str) -> str:
    """Name of a document."""
    return f"{kind}/{quote(name, safe='')}"


def documents_of(entries: Mapping[str, Entry], kind: Document) -> dict[str, str]:
    """All documents of a kind, by the names that people gave them."""
    prefix = f"{kind}/"
    return {
        unquote(name.removeprefix(prefix)): entry.value for name, entry in entries.items() if name.startswith(prefix)
    }


def view_of(entries: Mapping[str, Entry]) -> View | None:
    """The view that is stored; None when there is none. Raises InvalidRequest when it makes no sense to us."""
    entry = entries.get(VIEW_NAME)
    return decode_view(entry.value) if entry is not None else None


def replicas_of(entries: Mapping[str, Entry]) -> ReplicaPolicy | None:
    """How many copies the operator wants; None when nothing is said. A document that makes no sense is logged."""
    entry = entries.get(REPLICAS_NAME)
    if entry is None:
        return None
    try:
        return ReplicaPolicy.from_plain(decode(entry.value, what="replica policy", bytes_max=CLUSTER_VALUE_BYTES_MAX))
    except InvalidRequest as error:
        log.warning("%s is left out: %s", REPLICAS_NAME, error)
        return None


def registrations_of(entries: Mapping[str, Entry]) -> dict[TargetId, Registration]:
    """Who is registered. An entry that makes no sense is logged and left out: one node must not stop the others."""
    return _read(entries, TARGETS, decode_registration, lambda registration: registration.id)


def relays_of(entries: Mapping[str, Entry]) -> dict[str, RelayRegistration]:
    """Which relays are registered, as `registrations_of`."""
    return _read(entries, RELAYS, decode_relay, lambda registration: registration.id)


def notes_of(entries: Mapping[str, Entry]) -> dict[str, NodeNote]:
    """Which nodes are there, as `registrations_of`."""
    return _read(entries, NODES, decode_note, lambda note: note.node_id)


def uses_of(entries: Mapping[str, Entry]) -> dict[TargetId, dict[str, int]]:
    """What tenants have on each target, in bytes. An entry that makes no sense is logged and left out."""
    found: dict[TargetId, dict[str, int]] = {}
    for name, entry in entries.items():
        if name.startswith(USES):
            try:
                found[unquote(name.removeprefix(USES))] = decode_uses(entry.value)
            except InvalidRequest as error:
                log.warning("%s is left out: %s", name, error)
    return found


def _read(
    entries: Mapping[str, Entry], prefix: str, decode_value: Callable[[str], _Value], id_of: Callable[[_Value], str]
) -> dict[str, _Value]:
    """The values below a prefix by id, each under the name of its own id."""
    found: dict[str, _Value] = {}
    for name, entry in entries.items():
        if not name.startswith(prefix):
            continue
        named = unquote(name.removeprefix(prefix))
        try:
            value = decode_value(entry.value)
        except InvalidRequest as error:
            log.warning("%s is left out: %s", name, error)
            continue
        if id_of(value) == named:
            found[named] = value
        else:
            log.warning("%s is left out: it says that it is %s", name, id_of(value))
    return found
