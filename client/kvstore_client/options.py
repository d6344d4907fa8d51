"""How a client behaves; every field has a default that suits an inference worker."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from numbers import Real
from typing import Final

from kvstore.errors import InvalidRequest
from kvstore.limits import (
    CALL_DEADLINE_NS_DEFAULT,
    CONNECTION_IDLE_NS_MAX,
    CONNECTIONS_PER_WORKER_DEFAULT,
    GROUP_BYTES,
    PIN_TTL_NS_DEFAULT,
    PIN_TTL_NS_MAX,
    REQUEST_NS_MAX,
    SECOND_NS,
    TOKEN_BYTES_MAX,
)
from kvstore.types.flow import FlowClass
from kvstore_client.shm_ways import TRANSPORT_VARIABLE, Transport

WAITS: Final = {"received": 0, "durable": 1}
DURABILITIES: Final = {"commit": 0, "power": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """Attributes:
    flow: Class of reads and lookups.
    write_flow: Class of writes and deletes.
    token: The tenant's token.
    deadline_ns: Of calls that name none.
    connections_per_target: How many calls of this process may talk to one target at a time.
    idle_ns: A connection that was not used for so long is closed.
    copies: Of the records of namespaces that say nothing themselves; None is what the cluster says.
    transport: AUTO shares memory with nodes on this host and uses RDMA with others, TCP does neither, SHM and RDMA fail
        where they cannot be had.
    traces: Each call is a span of OpenTelemetry; needs the extra `otel`.
    """

    flow: FlowClass = FlowClass.DECODE_READ
    write_flow: FlowClass = FlowClass.WRITEBACK
    token: bytes = b""
    deadline_ns: int = CALL_DEADLINE_NS_DEFAULT
    connections_per_target: int = CONNECTIONS_PER_WORKER_DEFAULT
    idle_ns: int = CONNECTION_IDLE_NS_MAX
    copies: int | None = None
    transport: Transport = Transport.TCP
    traces: bool = False

    def __post_init__(self) -> None:
        if len(self.token) > TOKEN_BYTES_MAX:
            raise InvalidRequest(f"token has {len(self.token)} bytes; the limit is {TOKEN_BYTES_MAX}")
        if self.connections_per_target < 1:
            raise InvalidRequest(f"connections_per_target is {self.connections_per_target}; use at least 1")
        if not 0 < self.deadline_ns <= REQUEST_NS_MAX:
            raise InvalidRequest(
                f"deadline of {self.deadline_ns} ns; use above 0 and at most {REQUEST_NS_MAX / SECOND_NS:g} s"
            )
        if self.traces and find_spec("opentelemetry") is None:
            raise InvalidRequest(
                'traces is True and opentelemetry-api is not installed; pip install ".[otel]", or leave it False'
            )


def parse_flow(flow: str | FlowClass) -> FlowClass:
    """The flow class called `flow`. Raises InvalidRequest with the known names."""
    if isinstance(flow, FlowClass):
        return flow
    try:
        return FlowClass.parse(flow)
    except ValueError as error:
        raise InvalidRequest(str(error)) from None


def parse_transport(transport: str | Transport | None) -> Transport:
    """The transport called so; None is what the environment says (KVSTORE_CLIENT_TRANSPORT), else TCP.

    Raises:
        InvalidRequest: There is no such transport.
    """
    name = os.environ.get(TRANSPORT_VARIABLE, "tcp") if transport is None else transport
    try:
        return Transport(name)
    except ValueError:
        known = ", ".join(one.value for one in Transport)
        raise InvalidRequest(f"transport is {name!r:.80}; use one of: {known}") from None


def is_number(value: object) -> bool:
    """Whether it may be compared and multiplied as seconds: int, float, or a number of numpy."""
    return isinstance(value, Real)


def deadline_after(now_ns: int, seconds: float | None, default_ns: int, *, name: str = "deadline") -> int:
    """The monotonic time `seconds` from now, within what a request may last; None is `default_ns` from now.

    Args:
        name: what the argument is called, for the message.

    Raises:
        InvalidRequest: Not a number of seconds. Zero and below are allowed: the deadline has then passed.
    """
    if seconds is None:
        return now_ns + default_ns
    if not is_number(seconds) or not seconds > float("-inf"):
        raise InvalidRequest(f"{name} is {seconds!r:.80}; pass seconds from now, as a number")
    return now_ns + min(int(max(seconds, 0) * SECOND_NS) if seconds < 1e9 else REQUEST_NS_MAX, REQUEST_NS_MAX)


def pin_ttl_ns(seconds: float | None) -> int:
    """A pin's ttl in ns. Raises InvalidRequest above PIN_TTL_NS_MAX or below 0."""
    if seconds is None:
        return PIN_TTL_NS_DEFAULT
    if not is_number(seconds) or not 0 <= seconds * SECOND_NS <= PIN_TTL_NS_MAX:
        raise InvalidRequest(f"pin_ttl is {seconds!r:.80} s; use 0 to {PIN_TTL_NS_MAX / SECOND_NS:g} s")
    return int(seconds * SECOND_NS)


def group_of(group: bytes) -> bytes:
    """The name of a group of ranks. Raises InvalidRequest when it is not 16 bytes, or none."""
    if not isinstance(group, bytes) or len(group) not in (0, GROUP_BYTES):
        raise InvalidRequest(f"group is {group!r:.80}; pass {GROUP_BYTES} bytes, the same in every rank, or none")
    return group


def choice(name: str, value: str, known: dict[str, int]) -> int:
    """The code of one of a few words. Raises InvalidRequest with the known ones."""
    code = known.get(value)
    if code is None:
        raise InvalidRequest(f"{name} is {value!r}; use one of: {', '.join(known)}")
    return code
