"""`kvstore explain` over a cluster: every node is asked, and one answer says where a chunk belongs and what each said.

Asking only the places of a chunk would be enough for a chunk that lies where it belongs. One that does not, since the
view changed or somebody wrote by an old one, is the reason why people ask; so all nodes are, and a chunk on a node
where no lookup goes is told as what it is: a miss, with the place where it lies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from kvstore.cluster.placement import Places
from kvstore.cluster.run_places import NO_PLACE, RunPlaces, copies_of
from kvstore.cluster.view import View
from kvstore.errors import KVStoreError, Retryable
from kvstore.limits import COPIES_MAX, DIGEST_BYTES, EXPLAIN_NAMESPACES_MAX, STATUS_NODES_AT_ONCE
from kvstore.server.explain import HIDDEN, summary_of
from kvstore.server.report import Answer, KeyAnswer, NamespaceAnswer, NodeWhere, Question
from kvstore.types.keys import KeyChain
from kvstore.types.namespace import Manifest

_HIT: Final = "hit"
_ABSENT: Final = "absent"
_UNAVAILABLE: Final = "unavailable"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSaid:
    """What one node answered; `failure` says why it did not."""

    node_id: str
    grpc: str
    answer: Answer | None
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterAnswer:
    """As `Answer`, for all nodes together: a key's text says where it belongs and what each node said of it."""

    summary: str
    namespace_known: bool
    namespaces: tuple[NamespaceAnswer, ...]
    nodes: tuple[NodeSaid, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Where:
    """The nodes of one chunk: where it belongs, where it was before, and all that some lookup may ask."""

    now: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    asked: frozenset[str] | None = None  # None: its place is not known, since its position in a prompt is not


def ask_nodes(nodes: Sequence[NodeWhere], ask: Callable[[NodeWhere], Answer]) -> tuple[NodeSaid, ...]:
    """Every node's answer, in their order.

    Args:
        ask: asks one node, within a deadline. Called on several threads.

    Raises:
        KVStoreError: the question itself is wrong, or may not be asked.
    """

    def said(node: NodeWhere) -> NodeSaid:
        try:
            return NodeSaid(node_id=node.node_id, grpc=node.grpc, answer=ask(node))
        except KVStoreError as error:
            if not isinstance(error, Retryable):
                raise
            return NodeSaid(node_id=node.node_id, grpc=node.grpc, answer=None, failure=str(error))

    with ThreadPoolExecutor(STATUS_NODES_AT_ONCE) as threads:
        return tuple(threads.map(said, nodes))


def merge(question: Question, view: View, nodes: Sequence[NodeSaid]) -> ClusterAnswer:
    """One answer of what all nodes said. Pure."""
    answers = {one.node_id: one.answer for one in nodes if one.answer is not None}
    is_known = any(answer.namespace_known for answer in answers.values())
    heard = {node: answer for node, answer in answers.items() if answer.namespace_known or not is_known}
    places = RunPlaces(view)
    found = [_merged(question, view, places, nodes, by_node) for by_node in _by_namespace(heard)]
    found.sort(key=lambda one: len(one.differences))
    namespaces = tuple(found[:EXPLAIN_NAMESPACES_MAX])
    silent = [one.node_id for one in nodes if one.answer is None]
    where = f"any of the {len(answers)} nodes that answered"
    summary = summary_of(question, namespaces, is_known=is_known, where=where)
    if silent:
        summary += f"; no answer from {', '.join(silent)}"
    return ClusterAnswer(summary=summary, namespace_known=is_known, namespaces=namespaces, nodes=tuple(nodes))


def _by_namespace(answers: Mapping[str, Answer]) -> Iterator[dict[str, NamespaceAnswer]]:
    """What each node said, one namespace after another."""
    found: dict[bytes, dict[str, NamespaceAnswer]] = {}
    for node, answer in answers.items():
        for one in answer.namespaces:
            found.setdefault(one.namespace.digest, {})[node] = one
    yield from found.values()


def _merged(
    question: Question,
    view: View,
    places: RunPlaces,
    nodes: Sequence[NodeSaid],
    by_node: Mapping[str, NamespaceAnswer],
) -> NamespaceAnswer:
    first = next(iter(by_node.values()))
    count = max(len(one.keys) for one in by_node.values())
    wheres = _wheres(question, view, places, first) if count else []
    # a drop that one node knows of hides what was stored there until then
    dropped = any(one.namespace.dropped for one in by_node.values())
    keys = tuple(
        _of_key(where, {node: one.keys[at] for node, one in by_node.items() if one.keys}, nodes, dropped=dropped)
        for at, where in zip(range(count), wheres, strict=True)
    )
    return replace(first, namespace=replace(first.namespace, dropped=dropped), keys=keys)


def _wheres(question: Question, view: View, places: RunPlaces, answer: NamespaceAnswer) -> list[_Where]:
    """Where each chunk of the question belongs."""
    if not question.tokens:
        return [_Where()] * (len(question.keys) // DIGEST_BYTES)
    layout = Manifest.decode(answer.namespace.manifest).layout
    chain = KeyChain.from_tokens(
        answer.namespace.digest,
        question.tokens,
        chunk_tokens=layout.chunk_tokens,
        chunks_per_run=layout.chunks_per_run,
    )
    node_of = {target.id: target.node_id for target in view.targets}
    names = [node_of[targets[0]] for targets in places.workers]
    indexes = np.arange(len(chain), dtype=np.intp) // chain.chunks_per_run
    heads = chain.run_heads()
    copies = copies_of(places.replicas, indexes, None)
    now, all_of = places.newest(heads, copies), places.everywhere(heads, copies)
    # a namespace may have more copies than the policy says: whoever uses it so asks there as well
    asked = places.everywhere(heads, np.full(len(chain), COPIES_MAX, np.intp))
    return [
        _Where(
            now=(here := _names(names, now, at)),
            before=tuple(name for name in _names(names, all_of, at) if name not in here),
            asked=frozenset(_names(names, asked, at)),
        )
        for at in range(len(chain))
    ]


def _names(names: Sequence[str], places: Places, at: int) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names[number] for number in places[at].tolist() if number != NO_PLACE))


def _of_key(where: _Where, said: Mapping[str, KeyAnswer], nodes: Sequence[NodeSaid], *, dropped: bool) -> KeyAnswer:
    """One chunk: the best that was said where lookups ask, and in words all of it."""
    silent = {one.node_id for one in nodes if one.answer is None}
    order = list(dict.fromkeys((*where.now, *where.before, *(one.node_id for one in nodes))))
    asked = [node for node in order if where.asked is None or node in where.asked]
    heard = [said[node] for node in asked if node in said]
    best = min(heard, key=_rank, default=None)
    if best is None:
        best = KeyAnswer(key=next(iter(said.values())).key, status=_ABSENT, text="", ago_ns=0)
    if best.status != _HIT and silent.intersection(where.now or asked):
        best = replace(best, status=_UNAVAILABLE)
    return replace(best, text="; ".join(_sentences(where, said, order, silent, dropped=dropped)))


def _rank(answer: KeyAnswer) -> int:
    """A hit first; then whoever knows what became of it."""
    return 0 if answer.status == _HIT else 2 if answer.status == _ABSENT and not answer.ago_ns else 1


def _sentences(
    where: _Where, said: Mapping[str, KeyAnswer], order: Sequence[str], silent: set[str], *, dropped: bool
) -> Iterator[str]:
    if where.now:
        before = f", was on {', '.join(where.before)} before" if where.before else ""
        yield f"belongs on {', '.join(where.now)}{before}"
    expected = {*where.now, *where.before}
    unknowing = []
    for node in order:
        answer = said.get(node)
        if answer is not None and _rank(answer) < 2:
            lost = where.asked is not None and node not in where.asked and answer.status == _HIT
            yield f"{node}: {answer.text}{' (but no lookup asks there)' if lost else ''}"
        elif node in silent:
            if node in expected or not expected:
                yield f"{node}: no answer"
        elif node in expected or not expected:
            unknowing.append(node)
    if unknowing:
        yield f"{', '.join(unknowing)}: never written there, or gone before they remember{HIDDEN if dropped else ''}"
