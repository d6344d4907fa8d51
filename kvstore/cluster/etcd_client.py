"""Calls of etcd's API, version 3, to whichever member answers: the one file here that knows gRPC.

One member is asked at a time. When it fails or does not answer within STORE_ATTEMPT_NS, the next one is from then on,
and whoever watches the old one is told. A call that may be repeated is, until STORE_CALL_NS are over; one that may not
ends as OutcomeUnknown. So a frozen member costs one attempt, and a lost one a reconnect.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Protocol, Self, TypeAlias, TypeVar

import grpc
from grpc import aio

from kvstore.cluster.store_address import EtcdAddress, EtcdSecrets
from kvstore.errors import (
    Closed,
    DeadlineExceeded,
    Denied,
    Internal,
    InvalidRequest,
    KVStoreError,
    LeaseExpired,
    OutcomeUnknown,
    Overloaded,
    StaleView,
    Unavailable,
)
from kvstore.limits import SECOND_NS, STORE_ATTEMPT_NS, STORE_CALL_NS, STORE_MESSAGE_BYTES_MAX, STORE_PAUSE_NS
from kvstore.v1 import etcd_pb2 as pb

# gRPC waits up to two minutes before it tries a lost member again, unless told otherwise; a dead peer of a quiet watch
# is noticed by pings, which etcd refuses more often than each 5 s.
_CHANNEL_OPTIONS: Final = (
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", STORE_MESSAGE_BYTES_MAX),
)
# A member that has lost the others must not keep a watch open as if nothing happened.
_NEEDS_LEADER: Final = ("hasleader", "true")
_STALE_TOKEN: Final = ("invalid auth token", "revision of auth store is old")


class Message(Protocol):
    """What protobuf makes of a message."""

    def SerializeToString(self, *, deterministic: bool = ...) -> bytes:
        """The message on the wire."""

    @classmethod
    def FromString(cls, s: bytes) -> Self:
        """The message behind bytes from the wire."""


_Stream: TypeAlias = "aio.StreamStreamCall[Any, Any]"
Request = TypeVar("Request", bound=Message)
Reply = TypeVar("Reply", bound=Message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rpc(Generic[Request, Reply]):
    """One call of etcd's API: its path, its messages, and whether doing it twice is the same as once."""

    path: str
    request: type[Request]
    reply: type[Reply]
    repeatable: bool = True


RANGE: Final = Rpc(path="/etcdserverpb.KV/Range", request=pb.RangeRequest, reply=pb.RangeResponse)
TXN: Final = Rpc(path="/etcdserverpb.KV/Txn", request=pb.TxnRequest, reply=pb.TxnResponse, repeatable=False)
PUT: Final = Rpc(path="/etcdserverpb.KV/Put", request=pb.PutRequest, reply=pb.PutResponse)
DELETE: Final = Rpc(path="/etcdserverpb.KV/DeleteRange", request=pb.DeleteRangeRequest, reply=pb.DeleteRangeResponse)
GRANT: Final = Rpc(path="/etcdserverpb.Lease/LeaseGrant", request=pb.LeaseGrantRequest, reply=pb.LeaseGrantResponse)
REVOKE: Final = Rpc(path="/etcdserverpb.Lease/LeaseRevoke", request=pb.LeaseRevokeRequest, reply=pb.LeaseRevokeResponse)
KEEP_ALIVE: Final = Rpc(
    path="/etcdserverpb.Lease/LeaseKeepAlive", request=pb.LeaseKeepAliveRequest, reply=pb.LeaseKeepAliveResponse
)
WATCH: Final = Rpc(path="/etcdserverpb.Watch/Watch", request=pb.WatchRequest, reply=pb.WatchResponse)
AUTHENTICATE: Final = Rpc(
    path="/etcdserverpb.Auth/Authenticate", request=pb.AuthenticateRequest, reply=pb.AuthenticateResponse
)


@dataclass(slots=True, eq=False)
class _Member:
    """One member as we see it. `left` is set when another is asked instead."""

    address: str
    channel: aio.Channel
    left: asyncio.Event = field(default_factory=asyncio.Event)


class EtcdClient:
    """For one event loop. Opens connections with the first call.

    Args:
        address: Members and names.
        secrets: What the files of the address hold.
        clock: Monotonic nanoseconds.
    """

    def __init__(
        self, address: EtcdAddress, secrets: EtcdSecrets, *, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._address = address
        self._secrets = secrets
        self._clock = clock
        self._members: list[_Member] = []
        self._at = 0
        self._token = ""
        self._closed = False

    def __str__(self) -> str:
        return str(self._address)

    async def call(self, rpc: Rpc[Request, Reply], request: Request) -> Reply:
        """One question, one answer. Raises as `ClusterStore` says, and LeaseExpired where etcd knows no such lease."""

        async def ask(member: _Member, timeout_s: float) -> Reply:
            stub = member.channel.unary_unary(
                rpc.path, request_serializer=rpc.request.SerializeToString, response_deserializer=rpc.reply.FromString
            )
            reply: Reply = await stub(request, timeout=timeout_s, metadata=self._metadata())
            return reply

        return await self._ask_members(ask, repeatable=rpc.repeatable)

    async def call_stream(self, rpc: Rpc[Request, Reply], request: Request) -> Reply:
        """As `call`, for what etcd makes a stream of: one message each way."""

        async def ask(member: _Member, timeout_s: float) -> Reply:
            stream = self._stream(member, rpc, timeout_s=timeout_s)
            try:
                await _write(stream, request)
                reply: Reply = _answer(await stream.read(), member)
                return reply
            finally:
                stream.cancel()

        return await self._ask_members(ask, repeatable=rpc.repeatable)

    async def follow(self, rpc: Rpc[Request, Reply], request: Request) -> AsyncGenerator[Reply, None]:
        """Every answer of a stream, until it breaks, or another member is asked instead: then Unavailable.

        The first answer has STORE_ATTEMPT_NS, the others all the time in the world.
        """
        member = self._member()
        try:
            if self._address.user and not self._token:
                await self._log_in(member)
            stream = self._stream(member, rpc, timeout_s=None)
        except aio.AioRpcError as error:
            raise self._gave_up(error, member) from None
        try:
            async with asyncio.timeout(STORE_ATTEMPT_NS / SECOND_NS):
                await self._unless_left(member, _write(stream, request))
                first = _answer(await self._unless_left(member, stream.read()), member)
            yield first
            while True:
                yield _answer(await self._unless_left(member, stream.read()), member)
        except aio.AioRpcError as error:
            raise self._gave_up(error, member) from None
        except TimeoutError:
            self._leave(member)
            raise Unavailable(f"etcd member {member.address} does not answer; another is asked") from None
        finally:
            stream.cancel()

    async def close(self) -> None:
        """Ends calls in progress. Idempotent."""
        self._closed = True
        members, self._members = self._members, []
        for member in members:
            member.left.set()
            await member.channel.close(grace=None)

    async def _ask_members(self, ask: Callable[[_Member, float], Awaitable[Reply]], *, repeatable: bool) -> Reply:
        until_ns = self._clock() + STORE_CALL_NS
        is_token_new = False
        worst: Unavailable | DeadlineExceeded | None = None  # says most: a reason rather than an attempt cut short
        while True:
            member = self._member()
            try:
                if self._address.user and not self._token:
                    is_token_new = True
                    await self._log_in(member)
                return await ask(member, min(STORE_ATTEMPT_NS, until_ns - self._clock()) / SECOND_NS)
            except aio.AioRpcError as error:
                failure = self._failure(error, member)
                if self._token and not is_token_new and _is_of_token(error):
                    self._token = ""
                    continue
                if not isinstance(failure, Unavailable | DeadlineExceeded):
                    raise failure from None
                if not repeatable and not _was_never_sent(error):
                    self._leave(member)
                    raise OutcomeUnknown(f"{failure}; whether it was written is not known") from None
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or not task.cancelling():
                    self._raise_if_closed()  # gRPC's way to say that the channel was closed
                raise
            self._leave(member)
            if worst is None or isinstance(failure, Unavailable):
                worst = failure
            if self._clock() + STORE_PAUSE_NS >= until_ns:
                raise worst
            await asyncio.sleep(STORE_PAUSE_NS / SECOND_NS)

    async def _log_in(self, member: _Member) -> None:
        stub = member.channel.unary_unary(
            AUTHENTICATE.path,
            request_serializer=AUTHENTICATE.request.SerializeToString,
            response_deserializer=AUTHENTICATE.reply.FromString,
        )
        request = pb.AuthenticateRequest(name=self._address.user, password=self._secrets.password)
        reply: pb.AuthenticateResponse = await stub(request, timeout=STORE_ATTEMPT_NS / SECOND_NS)
        self._token = reply.token

    async def _unless_left(self, member: _Member, step: Coroutine[Any, Any, object]) -> object:
        """What `step` gives, unless the member is given up before. Raises Unavailable or Closed then."""
        doing = asyncio.ensure_future(step)
        left = asyncio.ensure_future(member.left.wait())
        try:
            await asyncio.wait((doing, left), return_when=asyncio.FIRST_COMPLETED)
            if doing.done() and not doing.cancelled():
                return doing.result()
            self._raise_if_closed()
            then = "another is asked" if len(self._members) > 1 else "it is asked again"
            raise Unavailable(f"etcd member {member.address} is given up; {then}")
        finally:
            doing.cancel()
            left.cancel()

    def _member(self) -> _Member:
        self._raise_if_closed()
        if not self._members:
            self._members = [
                _Member(address=address, channel=self._channel(address)) for address in self._address.members
            ]
        return self._members[self._at % len(self._members)]

    def _leave(self, member: _Member) -> None:
        """Ask the next one from now on, unless somebody else has said so already."""
        if self._members and self._members[self._at % len(self._members)] is member:
            self._at += 1
            member.left.set()
            member.left = asyncio.Event()

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise Closed(f"cluster store {self} is closed")

    def _channel(self, address: str) -> aio.Channel:
        secrets = self._secrets
        if not secrets.ca:
            return aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
        credentials = grpc.ssl_channel_credentials(secrets.ca, secrets.key or None, secrets.cert or None)
        return aio.secure_channel(address, credentials, options=_CHANNEL_OPTIONS)

    def _stream(self, member: _Member, rpc: Rpc[Request, Reply], *, timeout_s: float | None) -> _Stream:
        stub = member.channel.stream_stream(
            rpc.path, request_serializer=rpc.request.SerializeToString, response_deserializer=rpc.reply.FromString
        )
        stream: _Stream = stub(timeout=timeout_s, metadata=self._metadata())
        return stream

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return (_NEEDS_LEADER, ("token", self._token)) if self._token else (_NEEDS_LEADER,)

    def _gave_up(self, error: aio.AioRpcError, member: _Member) -> KVStoreError:
        """The failure of a stream: another member is asked next where that may help."""
        failure = self._failure(error, member)
        if _is_of_token(error):
            self._token = ""
            return Unavailable(str(failure))
        if isinstance(failure, Unavailable | DeadlineExceeded):
            self._leave(member)
        return failure

    def _failure(self, error: aio.AioRpcError, member: _Member) -> KVStoreError:
        if self._closed:
            return Closed(f"cluster store {self} is closed")
        text = f"etcd member {member.address}: {error.details() or error.code().name}"
        match error.code():
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                return DeadlineExceeded(f"{text}; is it reachable, and has it a quorum?")
            case grpc.StatusCode.UNAUTHENTICATED | grpc.StatusCode.PERMISSION_DENIED:
                return Denied(f"{text}; check user, password_file and the roles in etcd")
            case grpc.StatusCode.NOT_FOUND:
                return LeaseExpired(f"{text}; register again")
            case grpc.StatusCode.OUT_OF_RANGE:
                return StaleView(f"{text}; load again")
            case grpc.StatusCode.RESOURCE_EXHAUSTED:
                return Overloaded(f"{text}; compact and defragment etcd, or raise its quota")
            case grpc.StatusCode.INVALID_ARGUMENT | grpc.StatusCode.FAILED_PRECONDITION:
                is_login = "auth" in text or "user" in text
                return Denied(f"{text}; check user and password_file") if is_login else InvalidRequest(text)
            case grpc.StatusCode.UNIMPLEMENTED | grpc.StatusCode.INTERNAL:
                return Internal(f"{text}; is this an etcd of version 3.4 or newer?")
        # UNAVAILABLE, and UNKNOWN or CANCELLED where a member ends in the middle of a call
        return Unavailable(f"{text}; is it running, and does TLS match?")


async def _write(stream: _Stream, request: Message) -> None:
    """Sends; where the call has failed already, reading says why, which writing does not."""
    try:
        await stream.write(request)
    except asyncio.InvalidStateError:
        pass


def _answer(message: object, member: _Member) -> Any:
    if message is aio.EOF:
        raise Unavailable(f"etcd member {member.address} ended the stream")
    return message


def _is_of_token(error: aio.AioRpcError) -> bool:
    return any(words in (error.details() or "") for words in _STALE_TOKEN)


def _was_never_sent(error: aio.AioRpcError) -> bool:
    """There was no connection to send it on (the words are gRPC's own)."""
    return (error.details() or "").startswith("failed to connect to all addresses")
