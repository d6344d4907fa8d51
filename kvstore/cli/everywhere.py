"""Commands for every node of a cluster: each is asked, and one that does not answer keeps nobody from answering."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvstore.errors import KVStoreError, Retryable
from kvstore.limits import STATUS_NODES_AT_ONCE
from kvstore.server.report import NodeWhere

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDid(Generic[T]):
    """What became of a command on one node; `failure` says why it was not done there."""

    node_id: str
    result: T | None
    failure: str = ""


def on_every_node(nodes: Sequence[NodeWhere], act: Callable[[NodeWhere], T]) -> tuple[NodeDid[T], ...]:
    """What each node did, in their order.

    Args:
        act: Commands one node, within a deadline. Called on several threads.

    Raises:
        KVStoreError: The command itself is wrong, or may not be given.
    """

    def did(node: NodeWhere) -> NodeDid[T]:
        try:
            return NodeDid(node_id=node.node_id, result=act(node))
        except KVStoreError as error:
            if not isinstance(error, Retryable):
                raise
            return NodeDid(node_id=node.node_id, result=None, failure=str(error))

    with ThreadPoolExecutor(STATUS_NODES_AT_ONCE) as threads:
        return tuple(threads.map(did, nodes))


def words_of_scrub(found: Sequence[NodeDid[bool]]) -> str:
    """One line for people."""
    groups = (
        ("scrub started on", [one.node_id for one in found if one.result]),
        ("in progress already on", [one.node_id for one in found if one.result is False]),
        ("no answer from", [one.node_id for one in found if one.result is None]),
    )
    return "; ".join(f"{words} {', '.join(names)}" for words, names in groups if names)
