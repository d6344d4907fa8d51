"""Spans around calls: one for each, with what came of it, below the caller's own; none unless they are asked for."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from kvstore.errors import InvalidRequest
from kvstore_client import AsyncKVClient, KVClient
from kvstore_client.options import ClientOptions

TOKENS = list(range(48))
PAYLOADS = [bytes([at]) * 1_000 for at in range(3)]
TRACED = ClientOptions(traces=True)


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    made = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(made))
    trace.set_tracer_provider(provider)  # once in a process
    return made


@pytest.fixture
def spans(exporter: InMemorySpanExporter) -> Iterator[InMemorySpanExporter]:
    exporter.clear()
    yield exporter
    exporter.clear()


def about(span: ReadableSpan) -> dict[str, object]:
    """Its attributes but for those that say which namespace it is of."""
    return {
        name.removeprefix("kvstore."): value
        for name, value in (span.attributes or {}).items()
        if name not in ("kvstore.namespace", "kvstore.model")
    }


def found(spans: InMemorySpanExporter) -> list[tuple[str, dict[str, object]]]:
    return [(span.name, about(span)) for span in spans.get_finished_spans()]


EXPECTED = [
    ("kvstore.put", {"keys": 3, "stored": 3}),
    ("kvstore.put", {"keys": 1, "exists": 1}),
    ("kvstore.match", {"keys": 3, "chunks": 3, "pinned": True}),
    ("kvstore.get_into", {"keys": 3, "hit": 3, "bytes": 3_000}),
    ("kvstore.delete", {"keys": 1, "hit": 1}),
    ("kvstore.get_into", {"keys": 3, "hit": 2, "miss.absent": 1, "bytes": 2_000}),
    ("kvstore.contains", {"keys": 3, "hit": 2, "miss": 1}),
    ("kvstore.match", {"keys": 3, "chunks": 2, "pinned": True, "miss": "absent"}),
    ("kvstore.drop", {"keys": 0, "answer": True}),
]


def test_each_call_is_a_span_with_its_outcome(node, opaque, spans) -> None:
    memory = [bytearray(1_000) for _ in range(3)]
    with KVClient.connect(node.address, options=TRACED) as client:
        ns = client.namespace(opaque)
        keys = ns.keys(TOKENS)
        ns.put(keys, PAYLOADS)
        ns.put(keys[:1], PAYLOADS[:1])
        with ns.match(keys):
            ns.get_into(keys=keys, buffers=memory)
        ns.delete(keys[2:])
        ns.get_into(keys, memory)
        ns.contains(keys)
        ns.match(keys).release()
        ns.drop()
    assert found(spans) == EXPECTED
    assert {span.attributes["kvstore.namespace"] for span in spans.get_finished_spans()} == {opaque.digest.hex()}


def test_tasks_have_the_same_spans(node, opaque, spans) -> None:
    async def work() -> None:
        memory = [bytearray(1_000) for _ in range(3)]
        async with await AsyncKVClient.connect(node.address, options=TRACED) as client:
            ns = client.namespace(opaque)
            keys = ns.keys(TOKENS)
            await ns.put(keys, PAYLOADS)
            await ns.put(keys[:1], PAYLOADS[:1])
            async with ns.match(keys):
                await ns.get_into(keys=keys, buffers=memory)
            await ns.delete(keys[2:])
            await ns.get_into(keys, memory)
            await ns.contains(keys)
            await (await ns.match(keys)).release()
            await ns.drop()

    asyncio.run(work())
    assert found(spans) == EXPECTED


def test_a_span_is_below_the_callers_own_and_tells_of_an_error(node, opaque, spans) -> None:
    with KVClient.connect(node.address, options=TRACED) as client:
        ns = client.namespace(opaque)
        with trace.get_tracer("engine").start_as_current_span("request") as request:
            ns.contains(ns.keys(TOKENS))
        with pytest.raises(InvalidRequest):
            ns.get_into(ns.keys(TOKENS), [b"read-only"] * 3)
    asked, _, failed = spans.get_finished_spans()
    assert asked.parent is not None
    assert asked.parent.span_id == request.get_span_context().span_id
    assert (failed.name, failed.status.status_code) == ("kvstore.get_into", StatusCode.ERROR)


def test_without_being_asked_for_there_are_none(node, opaque, spans) -> None:
    with KVClient.connect(node.address) as client:
        ns = client.namespace(opaque)
        ns.contains(ns.keys(TOKENS))
    assert found(spans) == []


def test_what_is_asked_for_and_not_installed_is_said() -> None:
    program = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from kvstore.errors import InvalidRequest\n"
        "from kvstore_client.options import ClientOptions\n"
        "try: ClientOptions(traces=True)\n"
        "except InvalidRequest as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert 'pip install ".[otel]"' in done.stdout
