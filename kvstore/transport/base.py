"""The contract between the data plane and whatever moves bytes.

The node moves the payload: it delivers verified pieces of records to the client, and fetches the payload of granted
puts into its own memory. On TCP both are DATA frames on the connection itself; where the node can reach the client's
memory (shared memory, RDMA) it writes and reads there, and the frames carry descriptors only. Either way the data plane
sees `NodeChannel`, and one scheduler, on the node, owns the order on the wire.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from kvstore.wire.frames import Frame
from kvstore.wire.schema import Message
from kvstore.wire.shared import Place
from kvstore.wire.slices import Slice


class Channel(Protocol):
    """A non-blocking stream of frames, driven by one thread from readiness events.

    Whoever owns the loop calls `on_readable` when `fileno()` is readable and `on_writable` when it is writable.
    """

    def fileno(self) -> int:
        """For select or epoll."""

    @property
    def peer(self) -> str:
        """Whom it is connected to, for messages."""

    @property
    def pending_bytes(self) -> int:
        """Queued and not taken by the kernel yet."""

    def on_readable(self) -> list[Frame]:
        """Receives what has arrived, at most one receive buffer of it; returns the frames that are complete.

        Raises:
            Unavailable: The peer closed or the connection broke.
            InvalidRequest, FormatUnsupported, ChecksumMismatch: The stream is defective: answer ERROR, then close.
        """

    def on_writable(self) -> bool:
        """Sends queued bytes until none is left (True) or the kernel takes no more (False). Raises Unavailable."""

    def send(self, message: Message, request_id: int, *, epoch: int = 0) -> None:
        """Queues a message."""

    def close(self) -> None:
        """Closes; every `on_sent` that is outstanding is called: of what a device moves, once it does no longer.

        Idempotent.
        """


class Landing(NamedTuple):
    """Where the payload of one granted put belongs. `buffer` is the node's memory, of the record's exact length.

    A tuple, not a dataclass: one is made for each record.
    """

    item: int
    buffer: memoryview


class FetchEvents(Protocol):
    """Who is told about the payload of granted puts."""

    def arrived(self, one: Slice, arrived_bytes: int) -> None:
        """So many bytes of a slice are in its landing: told now and then while it arrives, at the end with all of it.

        The bytes are in the CPU's cache now, so this is the moment to check them.
        """

    def fetched(self, item: int) -> None:
        """All bytes of a landing are there."""

    def came(self, items: Sequence[int], tables: bytes, *, are_good: bool) -> None:
        """All bytes of these landings, of one shape, are there, and their CRC tables are `tables`, one after the other.

        What `arrived` and `fetched` say, for several. `are_good`: the bytes have been checked already, and are right.
        """


class NodeChannel(Channel, Protocol):
    """The node's end: moves payload for the call in progress."""

    @property
    def held_bytes(self) -> int:
        """Memory that is held until the peer has sent what it was granted, and has read what is queued, about."""

    def deliver(
        self,
        slices: Sequence[Slice],
        payload: Sequence[memoryview],
        request_id: int,
        *,
        payload_bytes: int,
        epoch: int = 0,
        on_sent: Callable[[], None],
    ) -> None:
        """Queues pieces of records for the client: at most SLICES_PER_FRAME_MAX, and FRAME_PAYLOAD_BYTES_MAX of what is
        to be moved. What lies in its place already (`ReadSpec.places`) is told of only, and counts for nothing.

        `payload` holds the bytes of the slices that have any, in order, and stays as it is until `on_sent`.
        """

    def fetch(
        self,
        landings: Sequence[Landing],
        request_id: int,
        events: FetchEvents,
        *,
        epoch: int = 0,
        block_bytes: int = 0,
    ) -> None:
        """Grants puts: their payload is moved into the landings, which are written until `fetched` or `unfetch`.

        Args:
            block_bytes: the checksum block of all of them, where they have one length and their CRC words come with
                the data; else 0.
        """

    def share_of(self, landings: list[Landing], request_id: int) -> tuple[list[Landing], list[Landing]]:
        """What to `fetch` in this turn of the connection, and what in its next ones."""

    def unfetch(self, on_quiet: Callable[[], None] | None = None) -> None:
        """Forgets all landings: the call is over, and payload on its way is thrown away.

        Args:
            on_quiet: called once no landing is written any more: from within, but where a device has to be waited for.
        """


class PlaceChannel(NodeChannel, Protocol):
    """A node's end that reaches into the client's memory: calls name places there, and payload goes by itself."""

    @property
    def has_room(self) -> bool:
        """More may be delivered now; when there is room again, the connection gets a turn to send."""

    @property
    def is_moving(self) -> bool:
        """Some of what was delivered is not in its place yet; the connection gets a turn to send when it is."""

    def drop_regions(self, regions: Sequence[int]) -> None:
        """The client does not name these regions any more; unknown ones are passed over."""

    def place_into(self, places: Sequence[Place], request_id: int, *, count: int) -> Sequence[memoryview] | None:
        """What is delivered for this request goes into these places, which are those of `count` items.

        Returns:
            Their memory, for reads from the drive straight into it; None where there is none to be had.

        Raises:
            InvalidRequest: A place outside of the client's regions, or too many of them.
        """

    def take_from(self, places: Sequence[Place], request_id: int, *, count: int) -> None:
        """What this request puts is fetched from these places, those of `count` items. Raises InvalidRequest."""

    def halt(self) -> None:
        """The read in progress is given up: from now on nothing of what was delivered is moved."""

    def cancelled_late(self, request_id: int) -> None:
        """The client gave up a read that had ended by then, and did not know."""
