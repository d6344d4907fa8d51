"""After a fault: reads every key that was ever begun, and compares with the ledger and with the drive's own recount."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.types.results import Hit, Miss
from tests.faults.content import DOCUMENT_CHUNKS, chain, chunk_bytes, document_of, namespace, payload
from tests.faults.ledger import Ledger, Observation
from tests.faults.load import patient_client

DEADLINE_S: Final = 30.0
BATCH_DOCUMENTS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """What reading everything found.

    Attributes:
        observation: against the ledger.
        wrong: keys whose bytes are not theirs.
        hits: how many keys were there, and `hit_bytes` their payload.
        misses: reasons of the others.
    """

    observation: Observation
    wrong: list[str]
    hits: int
    hit_bytes: int
    misses: Counter[str]
    reasons: dict[int, str]

    def describe(self, keys: Sequence[int]) -> str:
        """Keys with the reasons of their misses."""
        return ", ".join(f"{key} ({self.reasons.get(key, 'hit')})" for key in keys[:10])


def audit(address: str, ledger: Ledger, *, beyond_documents: int = 2) -> Audit:
    """Reads all documents of which anything was begun whole, and some that nobody has begun."""
    begun = sorted({document_of(key) for key in ledger.known_keys()})
    first_new = begun[-1] + 1 if begun else 0
    documents = [*begun, *range(first_new, first_new + beyond_documents)]
    found: dict[int, bool] = {}
    wrong: list[str] = []
    reasons: dict[int, str] = {}
    hit_bytes = 0
    with patient_client(address) as client:
        store = client.namespace(namespace())
        for at in range(0, len(documents), BATCH_DOCUMENTS):
            batch = documents[at : at + BATCH_DOCUMENTS]
            keys = [document * DOCUMENT_CHUNKS + chunk for document in batch for chunk in range(DOCUMENT_CHUNKS)]
            chains = [chain(store.namespace, document) for document in batch]
            buffers = [bytearray(b"\xaa" * chunk_bytes(key)) for key in keys]
            results = store.get_into(sum(chains[1:], chains[0]), buffers, deadline=DEADLINE_S)
            for key, buffer, result in zip(keys, buffers, results, strict=True):
                found[key] = isinstance(result, Hit)
                if isinstance(result, Miss):
                    reasons[key] = result.reason.name
                    continue
                hit_bytes += result.length_bytes
                if result.length_bytes != len(buffer) or buffer != payload(key):
                    wrong.append(f"key {key}: wrong bytes in a hit of {result.length_bytes} of {len(buffer)} bytes")
    return Audit(
        observation=ledger.observe(found),
        wrong=wrong,
        hits=sum(found.values()),
        hit_bytes=hit_bytes,
        misses=Counter(reasons.values()),
        reasons=reasons,
    )
