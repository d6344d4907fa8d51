"""What a cluster draws once for all of its nodes: its id, which its drives bear, and the secret of its peers.

    cluster/id          32 hex digits
    cluster/peers       the token that nodes show each other; whoever can read it is a node

The first node writes each by compare-and-set, and every other one takes what is there. To change the token, delete its
entry or write another one: connections that were made with the old one are closed, and made again with the new one.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from typing import Final

from kvstore.cluster.store import ABSENT, ClusterStore, Entry
from kvstore.errors import OutcomeUnknown, StaleView
from kvstore.limits import CLUSTER_ID_BYTES, TOKEN_BYTES_MAX, TOKEN_BYTES_MIN

log = logging.getLogger(__name__)

CLUSTER_ID_NAME: Final = "cluster/id"
PEER_TOKEN_NAME: Final = "cluster/peers"

_TOKEN_RANDOM_BYTES: Final = 32


def new_cluster_id() -> str:
    """An id for a cluster that has none, in hex."""
    return secrets.token_hex(CLUSTER_ID_BYTES)


def new_peer_token() -> str:
    """A secret for a cluster that has none."""
    return secrets.token_urlsafe(_TOKEN_RANDOM_BYTES)


def cluster_id_of(entries: Mapping[str, Entry]) -> str:
    """The cluster's id, in hex; "" when there is none, or one that makes no sense, which is logged."""
    entry = entries.get(CLUSTER_ID_NAME)
    if entry is None:
        return ""
    return checked_cluster_id(entry.value)


def checked_cluster_id(text: str) -> str:
    """`text` if it is an id, in lower case; else "", which is logged."""
    try:
        found = bytes.fromhex(text.strip())
    except ValueError:
        found = b""
    if len(found) != CLUSTER_ID_BYTES or not any(found):
        log.error("%s in the cluster store is %.80r, not %d hex digits", CLUSTER_ID_NAME, text, 2 * CLUSTER_ID_BYTES)
        return ""
    return found.hex()


def peer_token_of(entries: Mapping[str, Entry]) -> bytes:
    """The token of peers; empty when there is none, or one that nobody should trust, which is logged."""
    entry = entries.get(PEER_TOKEN_NAME)
    token = entry.value.strip().encode() if entry is not None else b""
    if token and not TOKEN_BYTES_MIN <= len(token) <= TOKEN_BYTES_MAX:
        log.error(
            "%s in the cluster store has %d bytes, not %d to %d; delete it, and a node draws another one",
            PEER_TOKEN_NAME,
            len(token),
            TOKEN_BYTES_MIN,
            TOKEN_BYTES_MAX,
        )
        return b""
    return token


async def draw(store: ClusterStore, name: str, candidate: str) -> str:
    """What stands under `name`, for good: `candidate` where nobody was faster.

    Raises:
        Unavailable, DeadlineExceeded, Denied, Closed: as the store does; perhaps it was written.
    """
    while True:
        entry = (await store.load()).entries.get(name)
        if entry is not None:
            return entry.value
        try:
            await store.put(name, candidate, expected=ABSENT)
        except (StaleView, OutcomeUnknown):
            continue  # somebody was faster, or we were and did not hear: look
        return candidate
