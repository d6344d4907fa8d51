"""What stands where in a cluster store: names of entries, and what the entries mean together. Pure.

    view                the view (`encode_view`)
    targets/ID          registrations, each under its node's lease
    cluster/id, /peers  what `kvstore.cluster.charter` says
    tenants/NAME        documents, by tenant:  who may do what
    quota/NAME                                 how much of the SSDs
    policy/NAME         how many copies (policy/replicas), and the like

Nothing here grows with chunks or namespaces. Names that people choose are percent-encoded.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from enum import StrEnum
from typing import Final
from urllib.parse import quote, unquote

from kvstore.cluster.plain import decode
from kvstore.cluster.registration import Registration, decode_registration
from kvstore.cluster.store import Entry
from kvstore.cluster.view import ReplicaPolicy, TargetId, View, decode_view
from kvstore.errors import InvalidRequest
from kvstore.limits import CLUSTER_VALUE_BYTES_MAX

log = logging.getLogger(__name__)

VIEW_NAME: Final = "view"
TARGETS: Final = "targets/"


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
    found: dict[TargetId, Registration] = {}
    for name, entry in entries.items():
        target_id = target_of(name)
        if target_id is None:
            continue
        try:
            registration = decode_registration(entry.value)
        except InvalidRequest as error:
            log.warning("registration %s is left out: %s", name, error)
            continue
        if registration.id == target_id:
            found[target_id] = registration
        else:
            log.warning("registration %s is left out: it says that it is target %s", name, registration.id)
    return found
