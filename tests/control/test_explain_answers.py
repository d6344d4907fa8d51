"""The answer to "why was this a miss?", decided over made-up namespaces: pure, no node."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvstore.errors import InvalidRequest
from kvstore.limits import DIGEST_BYTES, EXPLAIN_KEYS_MAX
from kvstore.server.control import describe
from kvstore.server.explain import explain
from kvstore.server.report import Answer, KeyAnswer, NamespaceReport, Question
from kvstore.types.keys import part_keys, shard_keys
from kvstore.types.layout import KVLayout, Part, PartKind
from kvstore.types.namespace import Manifest, Namespace

LAYOUT = KVLayout(chunk_tokens=4, dtype="bf16", layers=2, parts=(Part(name="kv", entry_bytes=1024),))
MINE = Namespace(tenant="acme", model="org/m", weights="sha256:1", layout=LAYOUT)
TOKENS = tuple(range(12))


def report(namespace: Namespace, *, dropped: bool = False) -> NamespaceReport:
    """What a node would say of a namespace."""
    return describe(Manifest.decode(namespace.manifest()), generation=1, dropped=dropped)


class Records:
    """Stands for the workers: statuses by namespace and record key; everything else is absent."""

    def __init__(self) -> None:
        self.statuses: dict[tuple[bytes, bytes], KeyAnswer] = {}

    def put(self, namespace: bytes, key: bytes, status: str = "hit", text: str = "") -> None:
        self.statuses[namespace, key] = KeyAnswer(key=key, status=status, text=text, ago_ns=0)

    async def ask(self, namespace: bytes, keys: bytes) -> list[KeyAnswer]:
        pieces = [keys[at : at + DIGEST_BYTES] for at in range(0, len(keys), DIGEST_BYTES)]
        absent = KeyAnswer(key=b"", status="absent", text="it was never written here", ago_ns=0)
        return [self.statuses.get((namespace, key), replace(absent, key=key)) for key in pieces]


def ask(question: Question, *namespaces: NamespaceReport, records: Records | None = None) -> Answer:
    """The answer of a node that knows these namespaces."""
    return asyncio.run(explain(question, namespaces, (records or Records()).ask))


def test_each_field_that_differs_is_named() -> None:
    others = {
        "weights": replace(MINE, weights="sha256:2"),
        "adapter": replace(MINE, adapter="lora"),
        "salt": replace(MINE, salt=b"s"),
        "layout.dtype": replace(MINE, layout=replace(LAYOUT, dtype="fp8_e4m3")),
        "layout.chunk_tokens": replace(MINE, layout=replace(LAYOUT, chunk_tokens=8)),
        "layout.parts.kv.entry_bytes": replace(MINE, layout=replace(LAYOUT, parts=(Part(name="kv", entry_bytes=512),))),
    }
    for field, other in others.items():
        answer = ask(Question(tenant="acme", manifest=MINE.manifest()), report(other))
        assert not answer.namespace_known
        names = [difference.field for difference in answer.namespaces[0].differences]
        assert field in names, names
        assert field in answer.summary


def test_the_values_stand_beside_the_field_and_the_salt_stays_secret() -> None:
    other = replace(MINE, weights="sha256:2", salt=b"secret salt")
    answer = ask(Question(tenant="acme", manifest=MINE.manifest()), report(other))
    by_field = {difference.field: difference for difference in answer.namespaces[0].differences}
    assert (by_field["weights"].asked, by_field["weights"].stored) == ("sha256:1", "sha256:2")
    assert "secret salt" not in repr(answer)


def test_the_most_alike_namespace_comes_first() -> None:
    far, near = replace(MINE, model="x", weights="y", adapter="z"), replace(MINE, weights="y")
    answer = ask(Question(tenant="acme", manifest=MINE.manifest()), report(far), report(near))
    assert [item.namespace.digest for item in answer.namespaces] == [near.digest, far.digest]


def test_fields_alone_find_the_namespace_that_fits_and_its_chunks() -> None:
    keys = MINE.keys(TOKENS)
    records = Records()
    records.put(MINE.digest, keys[0].digest)
    records.put(MINE.digest, keys[1].digest, "evicted", "it was evicted")
    question = Question(tenant="acme", model="org/m", weights="sha256:1", tokens=TOKENS)
    answer = ask(question, report(replace(MINE, weights="sha256:2")), report(MINE), records=records)
    first = answer.namespaces[0]
    assert first.namespace.digest == MINE.digest
    assert not first.differences
    assert [key.status for key in first.keys] == ["hit", "evicted", "absent"]
    assert answer.summary == "1 of 3 chunks are stored; the first miss is chunk 1: it was evicted"


@pytest.mark.parametrize(
    ("tokens", "summary"),
    [
        ((1, 2, 3), "3 tokens make no chunk: a chunk of this namespace has 4 tokens, and only full ones are stored"),
        ((), "1 namespace fits the given fields; pass tokens or keys to learn what became of them"),
    ],
)
def test_fields_alone_say_what_is_missing_to_the_question(tokens: tuple[int, ...], summary: str) -> None:
    assert ask(Question(tenant="acme", model="org/m", tokens=tokens), report(MINE)).summary == summary


def test_a_known_namespace_tells_of_its_keys_only() -> None:
    keys = MINE.keys(TOKENS)
    records = Records()
    for key in keys:
        records.put(MINE.digest, key.digest)
    question = Question(tenant="acme", namespace=MINE.digest, keys=keys.digests)
    answer = ask(question, report(replace(MINE, salt=b"x")), report(MINE), records=records)
    assert answer.namespace_known
    assert len(answer.namespaces) == 1
    assert answer.summary == "all 3 chunks are stored: a lookup now is a hit"


def test_of_several_shards_the_missing_one_speaks() -> None:
    sharded = replace(MINE, layout=replace(LAYOUT, shards=4))
    keys = sharded.keys(TOKENS)
    records = Records()
    for shard in (0, 1, 3):
        for key in (keys[at].digest for at in range(3)):
            records.put(sharded.digest, shard_keys(key, shard=shard, shards=4))
    question = Question(tenant="acme", namespace=sharded.digest, keys=keys.digests)
    (found,) = ask(question, report(sharded), records=records).namespaces
    assert [key.status for key in found.keys] == ["absent"] * 3
    assert found.keys[0].text.startswith("shard 2: ")
    assert [key.key for key in found.keys] == [key.digest for key in keys]


def test_every_record_of_a_chunk_is_listed() -> None:
    state = Part(name="state", entry_bytes=64, entries=1, kind=PartKind.SPARSE)
    layout = replace(LAYOUT, shards=2, parts=(*LAYOUT.parts, state))
    namespace = replace(MINE, layout=layout)
    keys = namespace.keys(TOKENS[:8])
    records = Records()
    for shard in (0, 1):
        records.put(namespace.digest, shard_keys(keys[0].digest, shard=shard, shards=2), text="in memory")
    records.put(namespace.digest, shard_keys(keys[1].digest, shard=0, shards=2))
    records.put(namespace.digest, part_keys(keys[1:], part="state", shard=1), "evicted")
    question = Question(tenant="acme", namespace=namespace.digest, keys=keys.digests)
    answer = ask(question, report(namespace), records=records)
    first, second = answer.namespaces[0].keys
    assert first.status == "hit", "a chunk without a checkpoint misses nothing"
    assert first.text == "shard 0: in memory (hit: shard 0, shard 1; absent: part state shard 0, part state shard 1)"
    assert second.status == "absent"
    assert second.text.startswith("shard 1: it was never written here (")
    assert "hit: shard 0; absent: shard 1, part state shard 0; evicted: part state shard 1" in second.text
    many = Question(tenant="acme", namespace=namespace.digest, keys=keys.digests * (EXPLAIN_KEYS_MAX // 4))
    assert "state" not in ask(many, report(namespace)).namespaces[0].keys[0].text, "parts only if so many may be asked"


def test_a_namespace_that_was_dropped_before_says_so_of_each_key_of_which_nothing_is_known() -> None:
    later = report(MINE, dropped=True)
    keys = MINE.keys(TOKENS)
    records = Records()
    records.put(MINE.digest, keys[0].digest)
    answer = ask(Question(tenant="acme", namespace=MINE.digest, tokens=TOKENS), later, records=records)
    texts = [key.text for key in answer.namespaces[0].keys]
    assert "dropp" not in texts[0]
    assert {text.endswith(", or hidden by the drop of the namespace") for text in texts[1:]} == {True}
    assert answer.summary.count("drop") == 1
    records.put(MINE.digest, keys[1].digest, "evicted")
    evicted = ask(Question(tenant="acme", namespace=MINE.digest, tokens=TOKENS), later, records=records)
    assert "drop" not in evicted.namespaces[0].keys[1].text
    assert evicted.summary.endswith("dropped before, which hid what was stored until then")


def test_nothing_of_the_tenant_was_ever_written() -> None:
    assert "no namespace here" in ask(Question(tenant="acme", model="m")).summary


def test_an_unknown_digest_asks_for_the_manifest() -> None:
    answer = ask(Question(tenant="acme", namespace=bytes(32)), report(MINE))
    assert not answer.namespace_known
    assert "manifest" in answer.summary
    assert not answer.namespaces[0].keys


def test_a_layout_digest_is_compared() -> None:
    answer = ask(Question(tenant="acme", layout_digest=bytes(32)), report(MINE))
    assert [difference.field for difference in answer.namespaces[0].differences] == ["layout"]


def test_a_manifest_of_another_tenant_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="one tenant"):
        ask(Question(tenant="other", manifest=MINE.manifest()), report(MINE))


def test_too_many_records_are_refused_with_the_number() -> None:
    question = Question(tenant="acme", namespace=MINE.digest, tokens=(1,) * 4 * (EXPLAIN_KEYS_MAX + 1))
    with pytest.raises(InvalidRequest, match=str(EXPLAIN_KEYS_MAX)):
        ask(question, report(MINE))
