"""The one table between our errors and gRPC status codes, both ways; and the limits of a channel."""

from __future__ import annotations

from typing import Final

import grpc

from kvstore import errors
from kvstore.limits import GRPC_IDLE_NS, GRPC_KEEPALIVE_NS, GRPC_KEEPALIVE_WAIT_NS, GRPC_MESSAGE_BYTES_MAX, MS_NS

STATUS_OF: Final[dict[type[errors.KVStoreError], grpc.StatusCode]] = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.Denied: grpc.StatusCode.PERMISSION_DENIED,
    errors.UnknownNamespace: grpc.StatusCode.NOT_FOUND,
    errors.Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.StaleView: grpc.StatusCode.FAILED_PRECONDITION,
    errors.LeaseExpired: grpc.StatusCode.ABORTED,
    errors.OutcomeUnknown: grpc.StatusCode.UNKNOWN,
    errors.ChecksumMismatch: grpc.StatusCode.DATA_LOSS,
    errors.FormatUnsupported: grpc.StatusCode.UNIMPLEMENTED,
    errors.NoSpace: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Closed: grpc.StatusCode.UNAVAILABLE,
    errors.Internal: grpc.StatusCode.INTERNAL,
}
"""A class that is not here has the status of its nearest base."""

_ERROR_OF: Final = {status: kind for kind, status in reversed(STATUS_OF.items())}
"""Of two classes with one status, the first of the table is read back."""

TOKEN_METADATA: Final = "authorization"
BEARER: Final = b"Bearer "  # before the token, RFC 6750 section 2.1

CHANNEL_OPTIONS: Final = (
    ("grpc.max_receive_message_length", GRPC_MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", GRPC_MESSAGE_BYTES_MAX),
)
SERVER_OPTIONS: Final = (
    *CHANNEL_OPTIONS,
    # one that makes no call is told to go; one that waits in a call proves now and then that it is there
    ("grpc.max_connection_idle_ms", GRPC_IDLE_NS // MS_NS),
    ("grpc.keepalive_time_ms", GRPC_KEEPALIVE_NS // MS_NS),
    ("grpc.keepalive_timeout_ms", GRPC_KEEPALIVE_WAIT_NS // MS_NS),
    ("grpc.http2.max_pings_without_data", 0),
)


def status_of(error: errors.KVStoreError) -> grpc.StatusCode:
    """The status that carries an error."""
    return next(STATUS_OF[kind] for kind in type(error).__mro__ if kind in STATUS_OF)


def error_of(error: grpc.RpcError, address: str) -> errors.KVStoreError:
    """Our error for one that a channel to `address` raised."""
    status, details = error.code(), error.details() or ""
    if status is grpc.StatusCode.UNAVAILABLE and "onnect" in details:
        return errors.Unavailable(f"no kvstore node answers at {address}; is it running, and is this its gRPC address?")
    if status is grpc.StatusCode.UNAVAILABLE and details.startswith("DNS resolution failed"):
        return errors.Unavailable(f"the host of {address} is not known; is the name right?")
    if details.startswith("Received http2 header with status"):  # of an HTTP server, or of a proxy on the way
        return errors.Unavailable(
            f"no kvstore node answers at {address}, but a web server or a proxy ({details}); is this its gRPC address?"
        )
    if status is grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.DeadlineExceeded(f"node {address} did not answer in time: {details}")
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:
        return errors.InvalidRequest(f"the message is larger than gRPC takes; split the batch ({details})")
    return _ERROR_OF.get(status, errors.Internal)(details or f"node {address} answered {status.name}")
