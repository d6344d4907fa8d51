"""Client processes, which may hold several connections: their open writers, and when they are gone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from kvstore.limits import REQUESTS_BYTES_PER_CLIENT_MAX
from kvstore.server.writer import Writer
from kvstore.wire.body import MemoryBudget


class Client:
    """One client process, by the id of its HELLO.

    Attributes:
        id: 16 bytes.
        connections: how many it holds.
        writers: its layer-wise writers by writer id.
        writer_bytes: sum of their lengths.
        requests_memory: its share of what the requests of all may hold.
        openings: what ends a WRITER_OPEN that is in progress, by its opening id.
    """

    __slots__ = ("_last_writer_id", "connections", "id", "openings", "requests_memory", "writer_bytes", "writers")

    def __init__(self, client_id: bytes, requests_memory: MemoryBudget) -> None:
        self.id = client_id
        self.requests_memory = requests_memory
        self.openings: dict[bytes, Callable[[], None]] = {}
        self.connections = 0
        self.writers: dict[int, Writer] = {}
        self.writer_bytes = 0
        self._last_writer_id = 0

    def add_writer(self, writer: Writer) -> int:
        """The id of a writer that was opened; 0 is never one."""
        self._last_writer_id = self._last_writer_id % 0xFFFF_FFFF + 1
        self.writers[self._last_writer_id] = writer
        self.writer_bytes += writer.record_bytes
        return self._last_writer_id

    def take_writer(self, writer_id: int) -> Writer | None:
        """Removes a writer that is committed or given up."""
        writer = self.writers.pop(writer_id, None)
        if writer is not None:
            self.writer_bytes -= writer.record_bytes
        return writer

    def forget_opening(self, opening_id: bytes) -> None:
        """The client asks again for what it has had no answer to: what was, or is to be, opened for that ends.

        Unless it has gone on with it: then this is an earlier try, which a silent way delivers late.
        """
        end = self.openings.pop(opening_id, None)
        if end is not None:
            end()
        self.doom(
            at for at, writer in self.writers.items() if writer.opening.id == opening_id and not writer.opening.is_heard
        )

    def doom_unknown(self, writer_ids: Sequence[int]) -> None:
        """The answer that named these may not have reached it: those end, unless it has gone on with one."""
        self.doom(at for at in writer_ids if at in self.writers and not self.writers[at].opening.is_heard)

    def doom(self, writer_ids: Iterable[int]) -> None:
        """Nobody will go on with these; unknown ids are ignored."""
        for writer in [self.take_writer(writer_id) for writer_id in list(writer_ids)]:
            if writer is not None:
                writer.doom()


class Clients:
    """All clients that hold a connection or have unfinished writers."""

    def __init__(self, requests_memory: MemoryBudget) -> None:
        self._clients: dict[bytes, Client] = {}
        self._requests_memory = requests_memory

    def enter(self, client_id: bytes) -> Client:
        """A connection of the client has greeted."""
        client = self._clients.get(client_id)
        if client is None:
            share = MemoryBudget(REQUESTS_BYTES_PER_CLIENT_MAX, whose="one client", whole=self._requests_memory)
            client = self._clients[client_id] = Client(client_id, share)
        client.connections += 1
        return client

    def leave(self, client: Client) -> bool:
        """A connection has closed; True when it was the client's last."""
        client.connections -= 1
        self._drop_if_unused(client)
        return not client.connections

    def expire_writers(self, now_ns: int) -> Iterator[Writer]:
        """Takes out the writers whose owner has not written for their time to live."""
        for client in list(self._clients.values()):
            for writer_id, writer in list(client.writers.items()):
                if writer.expires_ns <= now_ns and not writer.receiving:
                    client.take_writer(writer_id)
                    yield writer
            self._drop_if_unused(client)

    def __iter__(self) -> Iterator[Client]:
        return iter(self._clients.values())

    def _drop_if_unused(self, client: Client) -> None:
        if not client.connections and not client.writers:
            self._clients.pop(client.id, None)
