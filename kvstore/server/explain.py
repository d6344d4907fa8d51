"""The answer to "why was this a miss?": which namespace field differs from what is stored, or what became of the keys.

Everything stays within one tenant: the caller passes that tenant's namespaces only.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from kvstore.errors import InvalidRequest
from kvstore.limits import DIGEST_BYTES, EXPLAIN_KEYS_MAX, EXPLAIN_NAMESPACES_MAX
from kvstore.server.report import Answer, Difference, KeyAnswer, NamespaceAnswer, NamespaceReport, Question
from kvstore.types.keys import KeyChain, part_keys, shard_keys
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Manifest

KeyAsker = Callable[[bytes, bytes], Awaitable[list[KeyAnswer]]]
"""Namespace digest and record keys (n * 32 bytes) to one answer per key."""

_FIELDS: Final = ("model", "weights", "adapter", "adapter_revision")
_NO_KEY: Final = "absent"
_HIT: Final = "hit"
HIDDEN: Final = ", or hidden by the drop of the namespace"
"""Behind what is said of a key of which nothing is known, where its namespace was dropped before."""


async def explain(question: Question, namespaces: Sequence[NamespaceReport], ask: KeyAsker) -> Answer:
    """Answer a question about the namespaces of its tenant.

    Raises:
        InvalidRequest: keys or tokens beyond EXPLAIN_KEYS_MAX, or a manifest that is malformed or of another tenant.
    """
    asked = _asked_manifest(question)
    digest = asked.digest if asked else question.namespace
    known = next((namespace for namespace in namespaces if namespace.digest == digest), None)
    if known is not None:
        answer = NamespaceAnswer(namespace=known, differences=(), keys=await _ask_keys(question, known, ask))
        summary = summary_of(question, (answer,), is_known=True)
        return Answer(summary=summary, namespace_known=True, namespaces=(answer,))
    ranked = [(_differences(question, asked, namespace), namespace) for namespace in namespaces]
    ranked.sort(key=lambda pair: len(pair[0]))
    answers = tuple(
        [
            NamespaceAnswer(
                namespace=namespace,
                differences=differences,
                keys=await _ask_keys(question, namespace, ask) if _could_be(question, digest, differences) else (),
            )
            for differences, namespace in ranked[:EXPLAIN_NAMESPACES_MAX]
        ]
    )
    summary = summary_of(question, answers, is_known=False)
    return Answer(summary=summary, namespace_known=False, namespaces=answers)


def summary_of(
    question: Question, answers: Sequence[NamespaceAnswer], *, is_known: bool, where: str = "this node"
) -> str:
    """One sentence: the answer in short.

    Args:
        answers: the namespaces, most alike first.
        is_known: the first of them is the one that was asked about.
        where: who was asked.
    """
    return _summary_of_known(question, answers[0]) if is_known else _summary_of_unknown(question, answers, where)


def _asked_manifest(question: Question) -> Manifest | None:
    if not question.manifest:
        return None
    manifest = Manifest.decode(question.manifest, expected_digest=question.namespace or None)
    if manifest.tenant != question.tenant:
        raise InvalidRequest(
            f"the manifest is of tenant {manifest.tenant!r}, the question of {question.tenant!r}; "
            "an explanation stays within one tenant"
        )
    return manifest


def _could_be(question: Question, digest: bytes, differences: Sequence[Difference]) -> bool:
    """Whether to look for the keys here: every field that was given fits, or tokens say what to look for anywhere."""
    return bool(question.tokens) or (not digest and not differences)


def _differences(question: Question, asked: Manifest | None, namespace: NamespaceReport) -> tuple[Difference, ...]:
    if asked is not None:
        stored = Manifest.decode(namespace.manifest)
        return tuple(_difference(name, asked, stored) for name in asked.differences(stored))
    found = [
        Difference(field=name, asked=getattr(question, name), stored=getattr(namespace, name))
        for name in _FIELDS
        if getattr(question, name) and getattr(question, name) != getattr(namespace, name)
    ]
    if question.layout_digest and question.layout_digest != namespace.layout_digest:
        asked_layout, stored_layout = question.layout_digest.hex(), namespace.layout_digest.hex()
        found.append(Difference(field="layout", asked=asked_layout, stored=f"{stored_layout} ({namespace.layout})"))
    return tuple(found)


def _difference(name: str, asked: Manifest, stored: Manifest) -> Difference:
    if name == "salt":
        return Difference(field=name, asked="(another one)", stored="(secret)")
    return Difference(field=name, asked=_value(name, asked), stored=_value(name, stored))


def _value(name: str, manifest: Manifest) -> str:
    if not name.startswith("layout."):
        return str(getattr(manifest, name))
    path = name.split(".")[1:]
    if path == ["parts"]:
        return "+".join(part.name for part in manifest.layout.parts)
    if path[0] == "parts":
        part = next(part for part in manifest.layout.parts if part.name == path[1])
        return str(getattr(part, path[2]))
    return str(getattr(manifest.layout, path[0]))


async def _ask_keys(question: Question, namespace: NamespaceReport, ask: KeyAsker) -> tuple[KeyAnswer, ...]:
    """What became of each chunk. Of several shards the first that is not a hit speaks for its chunk.

    Where a chunk has several records, all are listed behind that, also those of sparse parts if so many may be asked
    about. A part alone makes no miss: it is there only where the engine made a checkpoint.
    """
    layout = Manifest.decode(namespace.manifest).layout
    digests = _chunk_digests(question, namespace.digest, layout)
    count = len(digests) // DIGEST_BYTES
    if count * layout.shards > EXPLAIN_KEYS_MAX:
        raise InvalidRequest(
            f"{count} chunks of {layout.shards} shards, at most {EXPLAIN_KEYS_MAX} records at once; "
            "ask for fewer tokens or keys"
        )
    if not count:
        return ()
    if namespace.dropped:
        ask = _of_dropped(ask)
    dense = {
        _name("", shard, layout): await ask(namespace.digest, shard_keys(digests, shard=shard, shards=layout.shards))
        for shard in range(layout.shards)
    }
    sparse: dict[str, list[KeyAnswer]] = {}
    if count * layout.shards * (1 + len(layout.sparse_parts)) <= EXPLAIN_KEYS_MAX:
        chain = KeyChain(digests)
        sparse = {
            _name(part.name, shard, layout): await ask(namespace.digest, part_keys(chain, part=part.name, shard=shard))
            for part in layout.sparse_parts
            for shard in range(layout.shards)
        }
    return tuple(
        replace(
            _of_chunk(
                {name: answers[at] for name, answers in dense.items()},
                {name: answers[at] for name, answers in sparse.items()},
            ),
            key=digests[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES],
        )
        for at in range(count)
    )


def _of_dropped(ask: KeyAsker) -> KeyAsker:
    async def asked(namespace: bytes, keys: bytes) -> list[KeyAnswer]:
        return [
            replace(answer, text=answer.text + HIDDEN) if answer.status == _NO_KEY and not answer.ago_ns else answer
            for answer in await ask(namespace, keys)
        ]

    return asked


def _name(part: str, shard: int, layout: KVLayout) -> str:
    """What people call a record of a chunk."""
    names = [*([f"part {part}"] if part else []), *([f"shard {shard}"] if layout.shards > 1 else [])]
    return " ".join(names) or "dense"


def _of_chunk(dense: Mapping[str, KeyAnswer], sparse: Mapping[str, KeyAnswer]) -> KeyAnswer:
    """One answer for all records of a chunk, by name."""
    speaker = next((name for name, answer in dense.items() if answer.status != _HIT), next(iter(dense)))
    answer = dense[speaker]
    records = {**dense, **sparse}
    if len(records) == 1:
        return answer
    by_status: dict[str, list[str]] = {}
    for name, one in records.items():
        by_status.setdefault(one.status, []).append(name)
    listed = "; ".join(f"{status}: {', '.join(names)}" for status, names in by_status.items())
    before = f"{speaker}: {answer.text}" if len(dense) > 1 else answer.text
    return replace(answer, text=f"{before} ({listed})")


def _chunk_digests(question: Question, namespace: bytes, layout: KVLayout) -> bytes:
    if not question.tokens:
        return question.keys
    return KeyChain.from_tokens(namespace, question.tokens, chunk_tokens=layout.chunk_tokens).digests


def _summary_of_known(question: Question, answer: NamespaceAnswer) -> str:
    before = (
        "; the namespace was dropped before, which hid what was stored until then" if answer.namespace.dropped else ""
    )
    if not answer.keys and question.tokens:
        return _words_of_few_tokens(question, answer.namespace) + before
    if not answer.keys:
        return f"the namespace is known here; pass tokens or keys to learn what became of them{before}"
    summary = _summary_of_keys(answer.keys)
    is_told = HIDDEN in summary or all(key.status == _HIT for key in answer.keys)
    return summary if is_told else summary + before


def _words_of_few_tokens(question: Question, namespace: NamespaceReport) -> str:
    chunk_tokens = Manifest.decode(namespace.manifest).layout.chunk_tokens
    given = "1 token makes" if len(question.tokens) == 1 else f"{len(question.tokens)} tokens make"
    return f"{given} no chunk: a chunk of this namespace has {chunk_tokens} tokens, and only full ones are stored"


def _summary_of_keys(keys: Sequence[KeyAnswer]) -> str:
    misses = [(at, key) for at, key in enumerate(keys) if key.status != _HIT]
    if not misses:
        stored = "the 1 chunk is" if len(keys) == 1 else f"all {len(keys)} chunks are"
        return f"{stored} stored: a lookup now is a hit"
    at, first = misses[0]
    chunks = "chunk is" if len(keys) == 1 else "chunks are"
    stored = f"{len(keys) - len(misses)} of {len(keys)} {chunks} stored"
    return f"{stored}; the first miss is chunk {at}: {first.text or first.status}"


def _summary_of_unknown(question: Question, answers: Sequence[NamespaceAnswer], where: str) -> str:
    if not answers:
        return f"tenant {question.tenant!r} has no namespace here: nothing of it was ever written to {where}"
    nearest = answers[0]
    if (question.namespace or question.manifest) and not nearest.differences:
        return "the namespace is not known here: nothing of it was ever written; its manifest would tell the difference"
    if nearest.differences:
        names = ", ".join(difference.field for difference in nearest.differences)
        others = ""
        if any(key.status == _HIT for answer in answers for key in answer.keys):
            others = "; the hits below are of other namespaces, which a lookup under yours does not see"
        return f"never written under this namespace; the most alike stored one differs in: {names}{others}"
    speaking = next((answer for answer in answers if any(key.status != _NO_KEY for key in answer.keys)), nearest)
    if speaking.keys:
        return _summary_of_keys(speaking.keys)
    if question.tokens:
        return _words_of_few_tokens(question, nearest.namespace)
    count = sum(not answer.differences for answer in answers)
    fitting = "1 namespace fits" if count == 1 else f"{count} namespaces fit"
    return f"{fitting} the given fields; pass tokens or keys to learn what became of them"
