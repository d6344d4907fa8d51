"""Relayed connections on the gRPC port that nobody uses: they end, and make room for others."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

from kvstore.limits import MS_NS
from kvstore.server.fleet import Fleet
from kvstore.server.wire_edge import WireEdge
from kvstore.telemetry.metrics import SupervisorMetrics
from kvstore.transport.tcp import listen_tcp

Work = Callable[[SupervisorMetrics, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def relay(folder: Path, work: Work, *, idle_ns: int) -> None:
    """Runs `work` with a client of an edge whose gRPC server echoes lines, until one says "bye"."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (line := await reader.readline()) and line != b"bye\n":
            writer.write(line)
        writer.close()

    async def play() -> None:
        metrics = SupervisorMetrics()
        fleet = Fleet(node_id="n", start_epoch=1, metrics=metrics)
        path = str(folder / "grpc")
        edge = WireEdge(fleet, grpc_socket=path, metrics=metrics, idle_ns=idle_ns)
        listening: socket.socket = listen_tcp("127.0.0.1", 0)
        async with await asyncio.start_unix_server(serve, path), asyncio.timeout(60):
            await edge.start([listening])
            reader, writer = await asyncio.open_connection("127.0.0.1", listening.getsockname()[1])
            writer.write(b"PRI\n")
            assert await reader.readline() == b"PRI\n"
            assert metrics.edge_connections == 1
            await work(metrics, reader, writer)
            while metrics.edge_connections:
                await asyncio.sleep(0.01)
            writer.close()
            edge.stop()

    asyncio.run(play())


def test_a_connection_without_traffic_ends(tmp_path: Path) -> None:
    async def work(metrics: SupervisorMetrics, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(5):
            writer.write(b"more\n")
            assert await reader.readline() == b"more\n"
        assert await reader.read() == b""

    relay(tmp_path, work, idle_ns=300 * MS_NS)


def test_a_client_that_stays_after_the_server_has_ended_does_not_hold_its_place(tmp_path: Path) -> None:
    async def work(metrics: SupervisorMetrics, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"bye\n")
        assert await reader.read() == b""

    relay(tmp_path, work, idle_ns=3_600_000 * MS_NS)
