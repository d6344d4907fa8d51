"""`AsyncKVClient`: the same verbs with `await`, over the same sessions. Arguments and results are those of KVClient."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeAlias

from kvstore.errors import Closed, InvalidRequest
from kvstore.limits import UNPIN_NS_MAX
from kvstore.types.flow import FlowClass
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore.types.results import Exists, Hit, Miss, Refused, Stored
from kvstore_client import read_verbs, write_verbs, writer_verbs
from kvstore_client.aio_driver import AsyncDriver
from kvstore_client.client import client_options
from kvstore_client.core import ClientCore
from kvstore_client.match import MatchView
from kvstore_client.namespace_handle import NamespaceKeys
from kvstore_client.options import DURABILITIES, WAITS, ClientOptions, choice, deadline_after, group_of, pin_ttl_ns
from kvstore_client.outcomes import count_stores
from kvstore_client.planner import Keys, chain_in
from kvstore_client.process import ProcessState
from kvstore_client.ranges import Ranges
from kvstore_client.read_shape import incoming_records
from kvstore_client.read_verbs import MatchAnswer
from kvstore_client.regions import Item, allocate, refuse_repeated
from kvstore_client.rounds import first_view, try_ways
from kvstore_client.shm_ways import Transport
from kvstore_client.stats import Counters
from kvstore_client.writer_verbs import OpenRequest, WriterState

AsyncSession: TypeAlias = ProcessState[AsyncDriver]


class AsyncKVClient:
    """A client for the tasks of one event loop. `client = await AsyncKVClient.connect(...)`, then `close`.

    A cancelled call closes its connection before the task ends, so its buffers are not touched afterwards. Use it in
    the process that made it: a forked child gets ForkedClient.
    """

    def __init__(self, addresses: tuple[str, ...], options: ClientOptions) -> None:
        """Connects nowhere yet; see `connect`."""
        self._counters = Counters()
        core = ClientCore(addresses, options, self._counters)
        self._session: AsyncSession = ProcessState(core, AsyncDriver(core))
        self.options = options

    @classmethod
    async def connect(
        cls,
        address: str | Sequence[str],
        *,
        flow: str | FlowClass = FlowClass.DECODE_READ,
        token: str | bytes = b"",
        token_file: str | Path | None = None,
        deadline: float | None = None,
        lazy: bool = False,
        transport: str | Transport | None = None,
        options: ClientOptions | None = None,
    ) -> Self:
        """As `KVClient.connect`."""
        addresses = (address,) if isinstance(address, str) else tuple(address)
        client = cls(
            addresses,
            client_options(
                flow=flow, token=token, token_file=token_file, deadline=deadline, transport=transport, base=options
            ),
        )
        if not lazy:
            try:
                await client.refresh()
                await client.check_ways()
            except BaseException:
                client.close()
                raise
        return client

    def namespace(self, namespace: Namespace, *, copies: int | None = None) -> AsyncNamespace:
        """As `KVClient.namespace`."""
        if self.options.traces:
            from kvstore_client.tracing import TracedAsyncNamespace  # only those who trace have its package

            return TracedAsyncNamespace(self, namespace, copies=copies)
        return AsyncNamespace(self, namespace, copies=copies)

    async def refresh(self) -> None:
        """Asks for the view now. Raises Unavailable, DeadlineExceeded or Denied when no node gave it."""
        session = self.session()
        until_ns = time.monotonic_ns() + self.options.deadline_ns
        failure = await session.driver.run(first_view(session.core, until_ns))
        if failure is not None:
            raise failure

    async def check_ways(self) -> None:
        """As `KVClient.check_ways`."""
        if self.options.transport is Transport.RDMA:
            session = self.session()
            until_ns = time.monotonic_ns() + self.options.deadline_ns
            failure = await session.driver.run(try_ways(session.core, until_ns))
            if failure is not None:
                raise failure

    def alloc(self, length_bytes: int, *, prefault: bool = False) -> memoryview:
        """Memory that suits transfers: writable, page-aligned, freed with the last view of it."""
        return allocate(length_bytes, prefault=prefault)

    def stats(self) -> Mapping[str, int]:
        """The client's counters by name."""
        return self._counters.snapshot()

    def session(self) -> AsyncSession:
        """Core and driver. Raises Closed, or ForkedClient in a forked child."""
        self._session.check_process()
        if self._session.is_closed:
            raise Closed("the client is closed; make a new one")
        return self._session

    def close(self) -> None:
        """Ends calls in progress with Closed and closes all connections. Idempotent."""
        if self._session.is_usable:
            self._session.is_closed = True
            self._session.driver.close()
            self._session.core.rdma.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncNamespace(NamespaceKeys):
    """The verbs of one namespace; see `BoundNamespace` for arguments, results and errors."""

    def __init__(self, client: AsyncKVClient, namespace: Namespace, *, copies: int | None = None) -> None:
        super().__init__(namespace, copies=client.options.copies if copies is None else copies)
        self._client = client

    def match(
        self,
        keys: Keys,
        *,
        shards: int | Sequence[int] | None = None,
        need: Sequence[str] = (),
        pin_ttl: float | None = None,
        group: bytes = b"",
        deadline: float | None = None,
    ) -> AsyncMatchCall:
        """`async with ns.match(keys) as m: ...`, or `m = await ns.match(keys)` and `await m.release()`."""
        session = self._client.session()
        verb = read_verbs.match(
            session.core,
            self.namespace,
            keys,
            shards=shards,
            need=need,
            copies=self._copies,
            group=group_of(group),
            pin_ttl_ns=pin_ttl_ns(pin_ttl),
            deadline_ns=self._deadline_ns(deadline),
        )

        async def ask() -> AsyncMatch:
            return AsyncMatch(session, await session.driver.run(verb), self.layout)

        return AsyncMatchCall(ask)

    async def get_into(
        self,
        keys: Keys,
        buffers: Sequence[Item],
        *,
        ranges: Ranges | None = None,
        layers: Sequence[int] | None = None,
        shards: int | Sequence[int] | None = None,
        part: str | None = None,
        content_ids: Sequence[bytes] | None = None,
        deadline: float | None = None,
        soft_deadline: float | None = None,
        accept_pending: bool = False,
    ) -> list[Hit | Miss]:
        """As `BoundNamespace.get_into`. A cancelled call leaves the buffers undefined, and alone."""
        session = self._client.session()
        until_ns = self._deadline_ns(deadline)
        is_soft = False
        if soft_deadline is not None:
            soft_ns = self._deadline_ns(soft_deadline, name="soft_deadline")
            is_soft, until_ns = soft_ns < until_ns, min(soft_ns, until_ns)
        chain = chain_in(self.namespace, keys)
        refuse_repeated(buffers)
        shape = self._shape(len(chain), shards=shards, part=part, layers=layers, ranges=ranges)
        rows = incoming_records(shape, buffers, content_ids, key_count=len(chain))
        results = await session.driver.run(
            self._load(session.core, shape, chain, rows, accept_pending=accept_pending, until_ns=until_ns)
        )
        if is_soft and time.monotonic_ns() >= until_ns:
            session.core.counters.soft_deadlines += 1
        return results

    async def put(
        self,
        keys: Keys,
        buffers: Sequence[Item],
        *,
        wait: str = "durable",
        durability: str = "commit",
        shards: int | Sequence[int] | None = None,
        part: str | None = None,
        deadline: float | None = None,
    ) -> list[Stored | Exists | Refused]:
        """As `BoundNamespace.put`."""
        session = self._client.session()
        request = self._request_of_put(keys, buffers, wait=wait, durability=durability, shards=shards, part=part)
        until_ns = self._deadline_ns(deadline)
        return await session.driver.run(
            write_verbs.store(session.core, self.namespace, self._manifest, request, until_ns)
        )

    async def contains(
        self,
        keys: Keys,
        *,
        shards: int | Sequence[int] | None = None,
        part: str | None = None,
        deadline: float | None = None,
    ) -> list[bool]:
        """As `BoundNamespace.contains`."""
        found = await self._lookup(keys, shards, part, deadline, waits=False)
        return [isinstance(one, Hit) for one in found]

    async def wait(
        self,
        keys: Keys,
        deadline: float | None = None,
        *,
        shards: int | Sequence[int] | None = None,
        part: str | None = None,
    ) -> list[Hit | Miss]:
        """As `BoundNamespace.wait`."""
        return await self._lookup(keys, shards, part, deadline, waits=True)

    async def prefetch(
        self,
        keys: Keys,
        *,
        shards: int | Sequence[int] | None = None,
        part: str | None = None,
        deadline: float | None = None,
    ) -> int:
        """As `BoundNamespace.prefetch`."""
        session = self._client.session()
        until_ns = self._deadline_ns(deadline)
        return await session.driver.run(
            read_verbs.prefetch(
                session.core,
                self.namespace,
                keys,
                shards=shards,
                part=part,
                copies=self._copies,
                deadline_ns=until_ns,
            )
        )

    async def delete(
        self, keys: Keys, *, shards: int | Sequence[int] | None = None, deadline: float | None = None
    ) -> list[Hit | Miss]:
        """As `BoundNamespace.delete`."""
        session = self._client.session()
        until_ns = self._deadline_ns(deadline)
        return await session.driver.run(
            write_verbs.delete(session.core, self.namespace, keys, shards=shards, deadline_ns=until_ns)
        )

    async def drop(self, *, deadline: float | None = None) -> bool:
        """As `BoundNamespace.drop`."""
        session = self._client.session()
        failure = await session.driver.run(
            write_verbs.drop(session.core, self.namespace, self._manifest, self._deadline_ns(deadline))
        )
        if isinstance(failure, InvalidRequest):
            raise failure
        return failure is None

    async def writer(
        self,
        keys: Keys,
        *,
        shards: int | Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        part: str | None = None,
        ttl: float | None = None,
        deadline: float | None = None,
    ) -> AsyncWriter:
        """As `BoundNamespace.writer`: `async with await ns.writer(keys) as writer: ...`."""
        session = self._client.session()
        request = OpenRequest(keys=keys, shards=shards, lengths=lengths, part=part, ttl=ttl, copies=self._copies)
        state = await session.driver.run(
            writer_verbs.open_writer(session.core, self.namespace, self._manifest, request, self._deadline_ns(deadline))
        )
        return AsyncWriter(session, state)

    async def _lookup(
        self,
        keys: Keys,
        shards: int | Sequence[int] | None,
        part: str | None,
        deadline: float | None,
        *,
        waits: bool,
    ) -> list[Hit | Miss]:
        session = self._client.session()
        return await session.driver.run(
            self._look_up(
                session.core, keys, shards=shards, part=part, until_ns=self._deadline_ns(deadline), waits=waits
            )
        )

    def _deadline_ns(self, seconds: float | None, *, name: str = "deadline") -> int:
        return deadline_after(time.monotonic_ns(), seconds, self._client.options.deadline_ns, name=name)


class AsyncMatch(MatchView):
    """What a match found; its pins are given back by `release` or at the end of the `async with` block."""

    def __init__(self, session: AsyncSession, answer: MatchAnswer, layout: KVLayout) -> None:
        super().__init__(session.core, answer, layout)
        self._session = session

    async def release(self) -> None:
        """Gives the pins back now. Harmless when repeated; never raises for a node's trouble."""
        pins = self.take_pins()
        if pins and self._session.is_usable:
            until_ns = time.monotonic_ns() + UNPIN_NS_MAX
            await self._session.driver.run(read_verbs.unpin(self._session.core, pins, until_ns))


class AsyncMatchCall:
    """A match that is yet to be awaited."""

    def __init__(self, ask: Callable[[], Coroutine[object, None, AsyncMatch]]) -> None:
        self._ask = ask
        self._match: AsyncMatch | None = None

    def __await__(self) -> Generator[object, None, AsyncMatch]:
        return self._ask().__await__()

    async def __aenter__(self) -> AsyncMatch:
        self._match = await self._ask()
        return self._match

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._match is not None:
            await self._match.release()


class AsyncWriter:
    """Chunks written layer by layer; see `Writer`. For one task at a time."""

    def __init__(self, session: AsyncSession, state: WriterState) -> None:
        self._session = session
        self._state = state
        self._is_over = False

    @property
    def statuses(self) -> list[Stored | Exists | Refused]:
        """As `Writer.statuses`."""
        return self._state.results()

    async def write(
        self,
        index: int,
        buffer: Item,
        *,
        layer: int | None = None,
        offset: int | None = None,
        part: str | None = None,
        deadline: float | None = None,
    ) -> None:
        """As `Writer.write`. After a cancelled write the chunk is incomplete: abort, or let it run out."""
        self._check_open()
        await self._session.driver.run(
            writer_verbs.write(
                self._session.core,
                self._state,
                index,
                buffer,
                layer=layer,
                offset=offset,
                part=part,
                deadline_ns=self._deadline_ns(deadline),
            )
        )

    async def commit(
        self, *, wait: str = "durable", durability: str = "commit", deadline: float | None = None
    ) -> list[Stored | Exists | Refused]:
        """As `Writer.commit`."""
        self._check_open()
        self._is_over = True
        results = await self._session.driver.run(
            writer_verbs.commit(
                self._session.core,
                self._state,
                durability=choice("durability", durability, DURABILITIES),
                wait=choice("wait", wait, WAITS),
                deadline_ns=self._deadline_ns(deadline),
            )
        )
        count_stores(results, self._state.lengths(), self._session.core.counters)
        return results

    async def abort(self) -> None:
        """As `Writer.abort`."""
        if not self._is_over:
            self._is_over = True
            if self._session.is_usable:
                until_ns = time.monotonic_ns() + UNPIN_NS_MAX
                await self._session.driver.run(writer_verbs.abort(self._session.core, self._state, until_ns))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.abort()

    def _check_open(self) -> None:
        if self._is_over:
            raise Closed("the writer was committed or aborted; open a new one")
        self._session.check_process()

    def _deadline_ns(self, seconds: float | None) -> int:
        return deadline_after(time.monotonic_ns(), seconds, self._session.core.options.deadline_ns)
