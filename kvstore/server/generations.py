"""Namespaces that were dropped while a drive was away: what it still shows of them is hidden when it is back.

Within a worker `DriveSet` does that; here it is done over all workers of a node, whenever one of them begins to serve.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kvstore.errors import KVStoreError
from kvstore.limits import CONTROL_DEADLINE_NS, DIGEST_BYTES
from kvstore.server.worker_handle import WorkerHandle
from kvstore.wire.codec import Plain

log = logging.getLogger(__name__)


async def hide_dropped(workers: Sequence[WorkerHandle]) -> None:
    """Every worker drops what another one has dropped more often. One that does not answer is told when it serves."""
    if len(workers) < 2:
        return
    newest: dict[bytes, int] = {}
    for worker in workers:
        try:
            value = await worker.channel.admin("dropped", {}, deadline_ns=CONTROL_DEADLINE_NS)
        except KVStoreError as error:
            log.debug("not asked for dropped namespaces: %s", error)
            continue
        for digest, generation in _pairs(value.get("digests"), value.get("generations")):
            newest[digest] = max(generation, newest.get(digest, 0))
    if not newest:
        return
    told: dict[str, Plain] = {"digests": b"".join(newest), "generations": list(newest.values())}
    for worker in workers:
        try:
            value = await worker.channel.admin("dropped_set", told, deadline_ns=CONTROL_DEADLINE_NS)
        except KVStoreError as error:
            log.debug("not told of dropped namespaces: %s", error)
            continue
        count = value.get("count")
        if count:
            log.warning("%s namespaces were dropped while a drive was away; they are dropped on it too", count)


def _pairs(digests: Plain, generations: Plain) -> list[tuple[bytes, int]]:
    if not isinstance(digests, bytes) or not isinstance(generations, list):
        return []
    split = [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]
    return [(digest, one) for digest, one in zip(split, generations, strict=False) if isinstance(one, int)]
