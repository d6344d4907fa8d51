"""The metrics port: /metrics for Prometheus, /healthz for probes, / for people. HTTP/1.1, GET and HEAD only.

On a node with tenants the numbers are an admin's: all but /healthz needs a token of scope admin.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from kvstore.errors import Denied
from kvstore.limits import EDGE_CONNECTIONS_MAX, EDGE_FIRST_BYTES_NS, HTTP_HEAD_BYTES_MAX, SECOND_NS
from kvstore.server.access import NodeAccess
from kvstore.server.fleet import Fleet
from kvstore.server.report import TenantReport
from kvstore.server.status_page import status_page
from kvstore.server.tenants import Permit, Scope
from kvstore.telemetry import prometheus
from kvstore.telemetry.tenants import TenantNumbers

log = logging.getLogger(__name__)

_TEXT: Final = "text/plain; charset=utf-8"
_HTML: Final = "text/html; charset=utf-8"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Response:
    status: HTTPStatus
    content_type: str
    body: bytes


class HttpEdge:
    """Owns the listening sockets; one request for each connection."""

    def __init__(self, fleet: Fleet, *, access: NodeAccess | None = None) -> None:
        """
        Args:
            access: The node's tenants; None is an open node.
        """
        self._fleet = fleet
        self._access = access or NodeAccess(None)
        self._servers: list[asyncio.Server] = []
        self._open = 0

    async def start(self, listeners: Sequence[socket.socket]) -> None:
        """Take requests from these sockets, from now on."""
        for listener in listeners:
            self._servers.append(await asyncio.start_server(self._connected, sock=listener, limit=HTTP_HEAD_BYTES_MAX))

    def stop(self) -> None:
        """Take no new requests."""
        for server in self._servers:
            server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            if self._open > EDGE_CONNECTIONS_MAX:
                return
            async with asyncio.timeout(EDGE_FIRST_BYTES_NS / SECOND_NS):
                head = await _read_head(reader)
            method, response = await self._respond(head)
            writer.write(_encode(response, with_body=method != "HEAD"))
            await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            log.debug("connection on the metrics port ended: %s", error)
        except asyncio.CancelledError:  # the loop ends; asyncio would log a trace of a cancelled handler
            log.debug("connection on the metrics port ends with the node")
        except Exception:  # the root of a request: a defect is that request's failure, not the node's
            log.exception("a request on the metrics port failed by a defect of ours")
        finally:
            self._open -= 1
            writer.close()

    async def _respond(self, head: bytes) -> tuple[str, _Response]:
        pieces = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        if len(pieces) != 3 or not pieces[2].startswith("HTTP/1."):
            return "GET", _text(HTTPStatus.BAD_REQUEST, "this port speaks HTTP/1.1")
        method, path = pieces[0], pieces[1].partition("?")[0]
        if method not in ("GET", "HEAD"):
            return method, _text(HTTPStatus.METHOD_NOT_ALLOWED, f"{method} is not allowed here; use GET")
        if path != "/healthz":
            try:
                _require_admin(self._access.permit_of(_bearer_of(head)))
            except Denied as error:
                return method, _text(HTTPStatus.UNAUTHORIZED, str(error))
        return method, await self._page(path)

    async def _page(self, path: str) -> _Response:
        match path:
            case "/metrics":
                report = await self._fleet.report()
                body = prometheus.render(report.numbers, [_tenant_numbers(use) for use in report.tenants])
                return _Response(status=HTTPStatus.OK, content_type=prometheus.CONTENT_TYPE, body=body)
            case "/healthz":
                status = HTTPStatus.OK if self._fleet.serving else HTTPStatus.SERVICE_UNAVAILABLE
                return _text(status, self._fleet.state)
            case "/":
                body = status_page(await self._fleet.report()).encode()
                return _Response(status=HTTPStatus.OK, content_type=_HTML, body=body)
        return _text(HTTPStatus.NOT_FOUND, f"nothing at {path}; there are /metrics, /healthz and /")


def _tenant_numbers(use: TenantReport) -> TenantNumbers:
    return TenantNumbers(
        name=use.name,
        used_bytes=use.used_bytes,
        quota_bytes=use.share_bytes or use.quota_bytes,
        refused_records=use.refused_records,
    )


def _require_admin(permit: Permit | None) -> None:
    """Numbers of a node tell of all its tenants together. Raises Denied."""
    if permit is not None:
        permit.require(Scope.ADMIN, "the metrics port")


def _bearer_of(head: bytes) -> bytes:
    """The token of an Authorization header (RFC 6750, section 2.1), empty where there is none."""
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        scheme, _, token = value.strip().partition(b" ")
        if name.strip().lower() == b"authorization" and scheme.lower() == b"bearer":
            return token.strip()
    return b""


async def _read_head(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        return b""  # answered as a bad request


def _text(status: HTTPStatus, text: str) -> _Response:
    return _Response(status=status, content_type=_TEXT, body=f"{text}\n".encode())


def _encode(response: _Response, *, with_body: bool) -> bytes:
    challenge = "WWW-Authenticate: Bearer\r\n" if response.status is HTTPStatus.UNAUTHORIZED else ""
    head = (
        f"HTTP/1.1 {response.status.value} {response.status.phrase}\r\n"
        f"Content-Type: {response.content_type}\r\n"
        f"Content-Length: {len(response.body)}\r\n"
        "Cache-Control: no-store\r\n"
        f"{challenge}"
        "Connection: close\r\n\r\n"
    )
    return head.encode("latin-1") + (response.body if with_body else b"")
