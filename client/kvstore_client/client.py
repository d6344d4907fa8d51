"""`KVClient`: the blocking client, for any number of threads."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from kvstore.errors import Closed, InvalidRequest, KVStoreError
from kvstore.limits import CONNECT_NS_MAX, SECOND_NS
from kvstore.types.flow import FlowClass
from kvstore.types.namespace import Namespace
from kvstore.types.secret import read_token
from kvstore_client.blocking import BlockingDriver
from kvstore_client.core import ClientCore
from kvstore_client.namespace_handle import BoundNamespace
from kvstore_client.options import ClientOptions, is_number, parse_flow, parse_transport
from kvstore_client.process import ProcessState
from kvstore_client.regions import allocate
from kvstore_client.rounds import first_view, is_on_this_host, try_ways
from kvstore_client.shm import SharedMemory
from kvstore_client.shm_ways import Transport
from kvstore_client.stats import Counters
from kvstore_client.writer import Session

__all__ = ["BoundNamespace", "KVClient", "client_options"]

_log = logging.getLogger(__name__)


class KVClient:
    """A client of the store. Make one per process with `connect`; close it, or use it in a `with` block.

    Thread-safe: at most `connections_per_target` calls at a time talk to one target, the others wait within their
    deadlines. After a fork the child opens connections of its own; the parent's stay untouched.
    """

    def __init__(self, addresses: tuple[str, ...], options: ClientOptions) -> None:
        """Connects nowhere yet; see `connect`."""
        self._addresses = addresses
        self._counters = Counters()
        self._is_closed = False
        self._said_private = False
        self._sessions: dict[int, Session] = {}
        self.options = options
        self.session()

    @classmethod
    def connect(
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
        """A client that has seen the view.

        Args:
            address: "host:port" of any node, or several: its gRPC port or a data port. The rest is found by the view.
            flow: Class of this client's reads.
            token: The tenant's token.
            token_file: File that holds it instead, read now; only its owner should be able to.
            deadline: Seconds that a call may take when it names no deadline; None is 30 s.
            lazy: Do not connect now; the first call does. Until a node answers, everything is a miss.
            transport: "auto" shares memory with nodes on this host, uses RDMA with others, and speaks TCP where neither
                is possible; "tcp" never does; "shm" and "rdma" fail where they cannot be had. None is what `options`
                says, else KVSTORE_CLIENT_TRANSPORT of the environment, else "tcp".
            options: The rest; `flow`, `token` and `deadline` replace what it says of them where they are given.

        Raises:
            Unavailable, DeadlineExceeded: No node answered, or RDMA is required and cannot be had (not when `lazy`).
            Denied: The token is not accepted.
            InvalidRequest: An address or option makes no sense, or the token file cannot be read.
        """
        addresses = (address,) if isinstance(address, str) else tuple(address)
        client = cls(
            addresses,
            client_options(
                flow=flow, token=token, token_file=token_file, deadline=deadline, transport=transport, base=options
            ),
        )
        if not lazy:
            try:
                client.refresh()
                client.check_ways()
            except BaseException:
                client.close()
                raise
        return client

    def namespace(self, namespace: Namespace, *, copies: int | None = None) -> BoundNamespace:
        """The verbs of a namespace. Asks nobody: nodes learn of it with the first write.

        Args:
            namespace: Which.
            copies: How many places each record lies on, 1 to 3; all clients of a namespace should say the same. None is
                what `options` say, else what the cluster does. Head runs have at least as many as the cluster says.

        Raises:
            InvalidRequest: `copies` is not 1 to 3.
        """
        if self.options.traces:
            from kvstore_client.tracing import TracedNamespace  # only those who trace have its package

            return TracedNamespace(self, namespace, copies=copies)
        return BoundNamespace(self, namespace, copies=copies)

    def refresh(self) -> None:
        """Asks for the view now. Raises Unavailable, DeadlineExceeded or Denied when no node gave it."""
        session = self.session()
        until_ns = time.monotonic_ns() + self.options.deadline_ns
        failure: KVStoreError | None = session.driver.run(first_view(session.core, until_ns))
        if failure is not None:
            raise failure

    def check_ways(self) -> None:
        """With transport rdma: connects to each worker now. Raises Unavailable where RDMA cannot be had, saying why."""
        if self.options.transport is Transport.RDMA:
            session = self.session()
            until_ns = time.monotonic_ns() + self.options.deadline_ns
            failure: KVStoreError | None = session.driver.run(try_ways(session.core, until_ns))
            if failure is not None:
                raise failure

    def alloc(self, length_bytes: int, *, prefault: bool = False) -> memoryview:
        """Memory that suits transfers: writable, page-aligned, freed with the last view of it.

        With a node on this host it is shared memory: records that lie in whole pages of it are written there, and read
        from there, by the node itself. It is allocated at once, a forked child has the same memory, not a copy, and
        it must not be registered with a driver (see docs/decisions/shared-memory.md).
        """
        if length_bytes > 0 and self.options.transport in (Transport.AUTO, Transport.SHM):
            session = self.session()
            until_ns = time.monotonic_ns() + min(self.options.deadline_ns, CONNECT_NS_MAX)
            if session.driver.run(is_on_this_host(session.core, until_ns)):
                shared = session.core.memory.allocate(length_bytes, prefault=prefault)
                if shared is not None:
                    return shared
            if self.options.transport is Transport.SHM and not self._said_private:
                self._said_private = True  # an engine allocates thousands of buffers
                _log.warning(
                    "alloc: %d bytes are private memory although transport is shm, and further ones may be: no node "
                    "on this host shares memory with this client (client.transports() says why), or there is no room "
                    "for more shared memory",
                    length_bytes,
                )
        return allocate(length_bytes, prefault=prefault)

    @property
    def memory(self) -> SharedMemory:
        """What nodes on this host can reach of this process."""
        return self.session().core.memory

    def transports(self) -> Mapping[str, str]:
        """For each target "shm", "rdma" and the port, "tcp" and why, or "none" and why the required way cannot be had.

        Targets of which that is not known yet, since this process has not connected to them, are left out.
        """
        core = self.session().core
        targets = set(core.target_ids())  # other connections only ask for the view
        return {link.id: words for link in core.links() if link.id in targets and (words := link.words_of_way())}

    def stats(self) -> Mapping[str, int]:
        """The client's counters by name (see `kvstore_client.stats.Counters`), this process's only."""
        return self._counters.snapshot()

    def session(self) -> Session:
        """This process's core and driver; a forked child gets new ones. Raises Closed."""
        if self._is_closed:
            raise Closed("the client is closed; make a new one")
        found = self._sessions.get(os.getpid())
        return found if found is not None else self._begin_session()

    def close(self) -> None:
        """Ends calls in progress with Closed and closes all connections of this process. Idempotent."""
        self._is_closed = True
        session = self._sessions.get(os.getpid())
        if session is not None and not session.is_closed:
            session.is_closed = True
            session.driver.close()
            session.core.rdma.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin_session(self) -> Session:
        """State for this process. What was copied from the parent is forgotten, its connections left alone."""
        inherited = list(self._sessions.values())
        core = ClientCore(self._addresses, self.options, Counters() if inherited else self._counters)
        session = self._sessions.setdefault(core.pid, ProcessState(core, BlockingDriver(core)))
        for old in inherited:
            if old.pid != session.pid and self._sessions.pop(old.pid, None) is not None:
                for link in old.core.links():
                    link.disown()
                old.core.rdma.disown()
        self._counters = session.core.counters
        return session


def client_options(
    *,
    flow: str | FlowClass,
    token: str | bytes,
    token_file: str | Path | None = None,
    deadline: float | None,
    base: ClientOptions | None,
    transport: str | Transport | None = None,
) -> ClientOptions:
    """The options that `connect` was given, as one value. Raises InvalidRequest."""
    known = base or ClientOptions()
    if deadline is not None and (not is_number(deadline) or not 0 < deadline < float("inf")):
        raise InvalidRequest(f"deadline is {deadline!r:.80} s; pass a number above 0")
    if token and token_file is not None:
        raise InvalidRequest("both token and token_file are given; pass one of them")
    if token_file is not None:
        token = read_token(token_file)
    return ClientOptions(
        flow=parse_flow(flow),
        write_flow=known.write_flow,
        token=(token.encode() if isinstance(token, str) else token) or known.token,
        deadline_ns=known.deadline_ns if deadline is None else int(deadline * SECOND_NS),
        connections_per_target=known.connections_per_target,
        idle_ns=known.idle_ns,
        copies=known.copies,
        traces=known.traces,
        transport=known.transport if transport is None and base is not None else parse_transport(transport),
    )
