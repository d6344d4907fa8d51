"""Spans around a client's calls, by OpenTelemetry: the same verbs, each within one. Loaded when a client asks for it.

The tracer is that of the program, which says where spans go; without that they go nowhere. Calls to the node carry no
context: a node's part in a call is not told apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from opentelemetry.trace import Span, SpanKind, get_tracer

from kvstore.types.results import Exists, Hit, Miss, Refused, Stored
from kvstore_client.aio import AsyncMatch, AsyncMatchCall, AsyncNamespace
from kvstore_client.match import MatchView
from kvstore_client.namespace_handle import BoundNamespace, NamespaceKeys

_TRACER: Final = "kvstore_client"
_Arguments = ParamSpec("_Arguments")
_Answer = TypeVar("_Answer")


@contextmanager
def _span(
    verb: str, namespace: NamespaceKeys, arguments: tuple[object, ...], named: Mapping[str, object]
) -> Iterator[Span]:
    """The span of a call, a child of the one that is open here. An error of the call is its error."""
    keys = arguments[0] if arguments else named.get("keys", ())
    about = {"kvstore.namespace": namespace.digest.hex(), "kvstore.model": namespace.namespace.model}
    with get_tracer(_TRACER).start_as_current_span(f"kvstore.{verb}", kind=SpanKind.CLIENT, attributes=about) as span:
        if span.is_recording():
            span.set_attribute("kvstore.keys", len(keys) if hasattr(keys, "__len__") else 0)
        yield span


def _note(span: Span, answer: object) -> None:
    """What came of it: how many items had which outcome, and the bytes that arrived."""
    if not span.is_recording():
        return
    if isinstance(answer, MatchView):
        span.set_attributes({"kvstore.chunks": answer.chunks, "kvstore.pinned": answer.pinned})
        if answer.reason is not None:
            span.set_attribute("kvstore.miss", answer.reason.name.lower())
    elif isinstance(answer, list):
        for word, count in Counter(map(_word_of, answer)).items():
            span.set_attribute(f"kvstore.{word}", count)
        if arrived := sum(one.length_bytes for one in answer if isinstance(one, Hit)):
            span.set_attribute("kvstore.bytes", arrived)
    elif isinstance(answer, bool | int):
        span.set_attribute("kvstore.answer", answer)


def _word_of(outcome: Hit | Miss | Stored | Exists | Refused | bool) -> str:
    if isinstance(outcome, bool):  # of contains
        return "hit" if outcome else "miss"
    kind = type(outcome).__name__.lower()
    return f"{kind}.{outcome.reason.name.lower()}" if isinstance(outcome, Miss | Refused) else kind


def _spanned(
    verb: Callable[Concatenate[BoundNamespace, _Arguments], _Answer],
) -> Callable[Concatenate[BoundNamespace, _Arguments], _Answer]:
    @wraps(verb)
    def call(self: BoundNamespace, /, *args: _Arguments.args, **named: _Arguments.kwargs) -> _Answer:
        with _span(verb.__name__, self, args, named) as span:
            answer = verb(self, *args, **named)
            _note(span, answer)
            return answer

    return call


def _spanned_async(
    verb: Callable[Concatenate[AsyncNamespace, _Arguments], Coroutine[Any, Any, _Answer]],
) -> Callable[Concatenate[AsyncNamespace, _Arguments], Coroutine[Any, Any, _Answer]]:
    @wraps(verb)
    async def call(self: AsyncNamespace, /, *args: _Arguments.args, **named: _Arguments.kwargs) -> _Answer:
        with _span(verb.__name__, self, args, named) as span:
            answer = await verb(self, *args, **named)
            _note(span, answer)
            return answer

    return call


def _spanned_match(
    verb: Callable[Concatenate[AsyncNamespace, _Arguments], AsyncMatchCall],
) -> Callable[Concatenate[AsyncNamespace, _Arguments], AsyncMatchCall]:
    @wraps(verb)
    def call(self: AsyncNamespace, /, *args: _Arguments.args, **named: _Arguments.kwargs) -> AsyncMatchCall:
        begun = verb(self, *args, **named)

        async def ask() -> AsyncMatch:
            with _span(verb.__name__, self, args, named) as span:
                found = await begun
                _note(span, found)
                return found

        return AsyncMatchCall(ask)

    return call


class TracedNamespace(BoundNamespace):
    """See `BoundNamespace`. The span of `match` ends with its answer, that of `writer` when the writer is open."""

    match = _spanned(BoundNamespace.match)
    get_into = _spanned(BoundNamespace.get_into)
    put = _spanned(BoundNamespace.put)
    contains = _spanned(BoundNamespace.contains)
    wait = _spanned(BoundNamespace.wait)
    prefetch = _spanned(BoundNamespace.prefetch)
    delete = _spanned(BoundNamespace.delete)
    drop = _spanned(BoundNamespace.drop)
    writer = _spanned(BoundNamespace.writer)


class TracedAsyncNamespace(AsyncNamespace):
    """See `AsyncNamespace` and `TracedNamespace`."""

    match = _spanned_match(AsyncNamespace.match)
    get_into = _spanned_async(AsyncNamespace.get_into)
    put = _spanned_async(AsyncNamespace.put)
    contains = _spanned_async(AsyncNamespace.contains)
    wait = _spanned_async(AsyncNamespace.wait)
    prefetch = _spanned_async(AsyncNamespace.prefetch)
    delete = _spanned_async(AsyncNamespace.delete)
    drop = _spanned_async(AsyncNamespace.drop)
    writer = _spanned_async(AsyncNamespace.writer)
