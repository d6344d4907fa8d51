"""`kvstore explain` over a cluster: one answer of what all nodes said. test_cluster_tenants.py asks real nodes."""

from __future__ import annotations

import pytest

from kvstore.cli.cluster_explain import NodeSaid, ask_nodes, merge
from kvstore.cluster.run_places import RunPlaces
from kvstore.cluster.view import ReplicaPolicy, Target, TargetState, View
from kvstore.errors import Denied, Unavailable
from kvstore.server.control import describe
from kvstore.server.report import Answer, Difference, KeyAnswer, NamespaceAnswer, NodeWhere, Question
from kvstore.types.keys import KeyChain
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Manifest, Namespace

LAYOUT = KVLayout.opaque(chunk_bytes=4096, chunk_tokens=1, run_bytes=4096)
MINE = Namespace(tenant="acme", model="m", weights="w", layout=LAYOUT)
REPORT = describe(Manifest.decode(MINE.manifest()), generation=1, dropped=False)
NODES = ["a", "b", "c", "d", "e", "f", "g", "h"]
VIEW = View(
    epoch=3,
    node_id="",
    cluster="c",
    targets=tuple(
        Target(id=f"t{name}", data=(f"{name}:1",), weight=1.0, state=TargetState.SERVING, node_id=name)
        for name in NODES
    ),
    replicas=ReplicaPolicy(copies=1, head_copies=1, head_runs=1),
)
CHAIN = KeyChain.from_tokens(REPORT.digest, (7,), chunk_tokens=1)
QUESTION = Question(tenant="acme", manifest=MINE.manifest(), tokens=(7,))


def key(status: str, text: str, ago_ns: int = 0) -> KeyAnswer:
    return KeyAnswer(key=CHAIN.digests, status=status, text=text, ago_ns=ago_ns)


STORED = key("hit", "stored, 4096 bytes", 5)
EVICTED = key("evicted", "evicted about 5 minutes ago to make room", 5)
ABSENT = key("absent", "never written here, or gone before this drive was opened")


def ranked() -> list[str]:
    """The nodes of the chunk, the one where it belongs first."""
    import numpy as np

    places = RunPlaces(VIEW)
    order = places.newest(CHAIN.run_heads(), np.full(1, len(NODES), np.intp))[0].tolist()
    names = {f"t{name}": name for name in NODES}
    return [names[places.workers[number][0]] for number in order]


def said(node: str, *keys: KeyAnswer, known: bool = True, differences: tuple[Difference, ...] = ()) -> NodeSaid:
    one = NamespaceAnswer(namespace=REPORT, differences=differences, keys=keys)
    answer = Answer(summary="", namespace_known=known, namespaces=(one,) if keys or differences else ())
    return NodeSaid(node_id=node, grpc=f"{node}:7400", answer=answer)


def silent(node: str) -> NodeSaid:
    return NodeSaid(node_id=node, grpc=f"{node}:7400", answer=None, failure="it was silent for 3 s")


def everywhere(**others: NodeSaid) -> list[NodeSaid]:
    return [others.get(node) or said(node, ABSENT) for node in NODES]


def test_a_chunk_that_one_node_has_is_stored_whoever_else_never_saw_it() -> None:
    place = ranked()[0]
    answer = merge(QUESTION, VIEW, everywhere(**{place: said(place, STORED)}))
    assert answer.namespace_known
    assert answer.summary.startswith("the 1 chunk is stored")
    (found,) = answer.namespaces[0].keys
    assert (found.status, found.key) == ("hit", CHAIN.digests)
    assert found.text == f"belongs on {place}; {place}: stored, 4096 bytes"


def test_one_that_lies_where_no_lookup_goes_is_a_miss_and_its_place_is_told() -> None:
    order = ranked()
    answer = merge(QUESTION, VIEW, everywhere(**{order[-1]: said(order[-1], STORED)}))
    (found,) = answer.namespaces[0].keys
    assert found.status == "absent"
    assert f"{order[-1]}: stored, 4096 bytes (but no lookup asks there)" in found.text
    assert f"{order[0]}: never written there" in found.text
    assert "0 of 1 chunk is stored" in answer.summary


def test_a_further_copy_counts_since_a_namespace_may_have_more_of_them() -> None:
    order = ranked()
    answer = merge(QUESTION, VIEW, everywhere(**{order[2]: said(order[2], STORED)}))
    assert answer.namespaces[0].keys[0].status == "hit"


def test_who_knows_what_became_of_it_speaks_before_who_never_saw_it() -> None:
    order = ranked()
    answer = merge(QUESTION, VIEW, everywhere(**{order[0]: said(order[0], EVICTED)}))
    assert answer.namespaces[0].keys[0].status == "evicted"
    assert "evicted about 5 minutes ago" in answer.summary


def test_a_miss_is_no_answer_while_its_place_is_silent() -> None:
    order = ranked()
    answer = merge(QUESTION, VIEW, everywhere(**{order[0]: silent(order[0])}))
    (found,) = answer.namespaces[0].keys
    assert found.status == "unavailable"
    assert f"{order[0]}: no answer" in found.text
    assert answer.summary.endswith(f"; no answer from {order[0]}")
    elsewhere = merge(QUESTION, VIEW, everywhere(**{order[-1]: silent(order[-1])}))
    assert elsewhere.namespaces[0].keys[0].status == "absent", "nobody would have asked there"


def test_nodes_that_do_not_know_the_namespace_hide_nothing() -> None:
    differs = (Difference(field="weights", asked="w", stored="v"),)
    nodes = [said("a", known=False, differences=differs), said("b", STORED), *(said(node, ABSENT) for node in "cdefgh")]
    keyed = Question(tenant="acme", manifest=MINE.manifest(), keys=CHAIN.digests)
    answer = merge(keyed, VIEW, nodes)
    assert answer.namespace_known
    assert [one.differences for one in answer.namespaces] == [()]
    (found,) = answer.namespaces[0].keys
    assert found.status == "hit", "without its prompt the place of a chunk is not known: any node may be asked"
    assert found.text == "b: stored, 4096 bytes; a, c, d, e, f, g, h: never written there, or gone before they remember"


def test_where_no_node_knows_it_the_most_alike_of_all_is_named() -> None:
    near = (Difference(field="weights", asked="w", stored="v"),)
    nodes = [said("a", known=False), said("b", known=False, differences=near)]
    answer = merge(QUESTION, VIEW, nodes)
    assert not answer.namespace_known
    assert "the most alike stored one differs in: weights" in answer.summary
    nobody = merge(QUESTION, VIEW, [said("a", known=False), silent("b")])
    assert "nothing of it was ever written to any of the 1 nodes that answered; no answer from b" in nobody.summary


def test_a_wrong_question_is_refused_and_a_silent_node_is_not() -> None:
    nodes = [NodeWhere(node_id=name, grpc=f"{name}:7400") for name in "ab"]

    def ask(node: NodeWhere) -> Answer:
        if node.node_id == "b":
            raise Unavailable("b: connection refused")
        return Answer(summary="", namespace_known=False, namespaces=())

    assert [one.failure for one in ask_nodes(nodes, ask)] == ["", "b: connection refused"]

    def deny(node: NodeWhere) -> Answer:
        raise Denied("not yours")

    with pytest.raises(Denied):
        ask_nodes(nodes, deny)
