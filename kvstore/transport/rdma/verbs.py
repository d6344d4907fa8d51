"""What we need of RDMA verbs, and no more; `backends.open_verbs` gives an implementation.

Numbers are those of the kernel's stable interface (`<infiniband/verbs.h>`, `IBV_*`), so that backends pass them on as
they are. All failures are `VerbsFailure` from here on; no exception of a backend's library leaves it.

Objects must be closed in the opposite order of their making: queue pairs, then regions and completion queues, then the
device. Nothing here is thread-safe but `QueuePair.close`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Final, NamedTuple, Protocol, TypeAlias

from kvstore.errors import Unavailable


class VerbsFailure(Unavailable):
    """A verb was refused; `errno` says by what, 0 if the library does not tell.

    Attributes:
        verb: Its name in `<infiniband/verbs.h>` without prefix, as "reg_mr".
        errno: Of errno.h.
    """

    def __init__(self, verb: str, number: int, about: str) -> None:
        reason = os.strerror(number) if number else "no reason given"
        super().__init__(f"ibv_{verb} failed for {about}: {reason}")
        self.verb = verb
        self.errno = number


class Access(IntFlag):
    """Who may do what with a region (IBV_ACCESS_*). A region that somebody reads only needs no LOCAL_WRITE."""

    LOCAL_READ = 0
    LOCAL_WRITE = 1
    REMOTE_WRITE = 2
    REMOTE_READ = 4


class Work(IntEnum):
    """Kinds of work requests (IBV_WR_*)."""

    WRITE = 0
    SEND = 2
    READ = 4


class PortState(IntEnum):
    """Of a port (IBV_PORT_*)."""

    NOP = 0
    DOWN = 1
    INIT = 2
    ARMED = 3
    ACTIVE = 4
    ACTIVE_DEFER = 5


class PairState(IntEnum):
    """Of a queue pair (IBV_QPS_*), as far as reliable connections have them."""

    RESET = 0
    INIT = 1
    READY_TO_RECEIVE = 2
    READY_TO_SEND = 3
    ERROR = 6


SUCCESS: Final = 0
"""Status of a completion (IBV_WC_SUCCESS); `statuses` has the others."""

ETHERNET: Final = 2
"""Link layer of a port (IBV_LINK_LAYER_ETHERNET): addressed by GID. Anything else is InfiniBand: by LID."""

MTU_CODES: Final = {256: 1, 512: 2, 1024: 3, 2048: 4, 4096: 5}
"""IBV_MTU_* by bytes."""
MTU_BYTES: Final = {code: length for length, code in MTU_CODES.items()}

Piece: TypeAlias = tuple[int, int, int, int, int]
"""One contiguous transfer: local address, length in bytes, local key, remote address, remote key. A plain tuple, since
one is made for each work request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLimits:
    """What one device takes (ibv_query_device(3))."""

    region_bytes_max: int
    regions_max: int
    pairs_max: int
    work_requests_max: int  # of one queue
    completions_max: int  # of one completion queue
    reads_max: int  # outstanding at a queue pair, as the one that asks


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """One port (ibv_query_port(3)). `state` is a number so that one we do not know is no failure."""

    number: int
    state: int
    mtu_bytes: int  # active
    lid: int
    link_layer: int
    gid_count: int  # places in its table, most of them empty


@dataclass(frozen=True, slots=True, kw_only=True)
class PairEnd:
    """Where a queue pair is reached: what the other side must know of it."""

    number: int
    packet_number: int  # the first that it sends, 24 bits
    lid: int  # 0 on Ethernet
    gid: bytes  # 16 bytes, zeros for none


@dataclass(frozen=True, slots=True, kw_only=True)
class PairPath:
    """All that a reliable connection is made with (ibv_modify_qp(3)).

    `timeout_exponent`: 4.096 us * 2 ** it until a packet is sent again. `traffic_class` stands in what *this* side
    sends, answers to the other's reads included.
    """

    port: int
    gid_index: int
    mtu_bytes: int
    traffic_class: int
    service_level: int
    packet_number: int
    reads_out: int
    reads_in: int
    timeout_exponent: int
    retry_count: int
    remote: PairEnd
    remote_access: Access


class Completion(NamedTuple):
    """How a work request ended (ibv_poll_cq(3)). Only `work_id`, `pair_number` and `status` hold when it failed."""

    work_id: int
    status: int
    pair_number: int
    length_bytes: int


class MemoryRegion(Protocol):
    """Registered memory. Whoever registered it keeps the memory until `close`."""

    @property
    def address(self) -> int:
        """Where it begins for both keys."""

    @property
    def length_bytes(self) -> int:
        """Its length."""

    @property
    def local_key(self) -> int:
        """For our own work requests."""

    @property
    def remote_key(self) -> int:
        """For the other side's."""

    def close(self) -> None:
        """Deregisters it: the device touches the memory no more once this returns. Idempotent. Raises VerbsFailure."""


class CompletionQueue(Protocol):
    """Where work requests end. Its descriptor is readable when one ended since `arm`."""

    def fileno(self) -> int:
        """For select or epoll."""

    def arm(self) -> None:
        """Asks for one wake-up. Poll afterwards: what ended before is not told. Raises VerbsFailure."""

    def take_events(self) -> None:
        """Takes the wake-ups that made the descriptor readable; does nothing when there are none."""

    def poll(self, count: int) -> list[Completion]:
        """At most `count` that have ended. Raises VerbsFailure."""

    def close(self) -> None:
        """Ends it. Idempotent. Raises VerbsFailure: a queue pair still uses it."""


class QueuePair(Protocol):
    """One end of a reliable connection."""

    @property
    def number(self) -> int:
        """24 bits, the device's choice."""

    def state(self) -> int:
        """What the device says it is in, a PairState if it is one that we use. Raises VerbsFailure."""

    def connect(self, path: PairPath) -> None:
        """From RESET to READY_TO_SEND. Raises VerbsFailure."""

    def fail(self) -> None:
        """To ERROR: what was posted is flushed. Raises VerbsFailure."""

    def post(self, kind: Work, pieces: Sequence[Piece], work_id: int) -> None:
        """Posts a chain, in one call; its last work request is signalled and has this id, the others have 0.

        A chain is at most CHAIN_REQUESTS_MAX long. It ends in one completion, or in one for each of its requests from
        the first that failed on: that of the last says that the chain touches no memory any more. For SEND the remote
        half of a piece is ignored.

        Raises:
            VerbsFailure: Some or none of it was posted; `fail` or close the queue pair.
        """

    def post_receive(self, piece: Piece, work_id: int) -> None:
        """Memory for one SEND of the other side, the local half of a piece. Raises VerbsFailure."""

    def close(self) -> None:
        """Destroys it: the device touches no memory for it once this returns. Idempotent. Raises VerbsFailure.

        The one call that may be made in another thread, and may take long; see `closing`.
        """


class Device(Protocol):
    """One open device, with one protection domain."""

    @property
    def name(self) -> str:
        """As in /sys/class/infiniband."""

    @property
    def limits(self) -> DeviceLimits:
        """What it takes."""

    def port(self, number: int) -> Port:
        """The port as it is now. Raises VerbsFailure."""

    def gid(self, port: int, index: int) -> bytes:
        """An entry of a port's table, 16 bytes. Raises VerbsFailure: the place is empty."""

    def register(self, address: int, length_bytes: int, access: Access) -> MemoryRegion:
        """Memory of this process, which the caller keeps until the region is closed. Raises VerbsFailure."""

    def register_dmabuf(self, descriptor: int, *, offset_bytes: int, length_bytes: int, access: Access) -> MemoryRegion:
        """Memory behind a dma-buf, a GPU's say. Work requests name it by its offset there (the region's `address`).

        Raises VerbsFailure: EOPNOTSUPP where the device cannot.
        """

    def completion_queue(self, count: int) -> CompletionQueue:
        """Room for that many completions, with a descriptor of its own. Raises VerbsFailure."""

    def queue_pair(self, completions: CompletionQueue, *, sends_max: int, receives_max: int) -> QueuePair:
        """In RESET. `completions` is one of this device's. Raises VerbsFailure."""

    def close(self) -> None:
        """Ends it. Idempotent. Raises VerbsFailure: something of it is still open."""


class Verbs(Protocol):
    """A library that speaks to devices."""

    @property
    def name(self) -> str:
        """Of the backend, for people."""

    def device_names(self) -> list[str]:
        """What there is. Raises VerbsFailure: the kernel has no RDMA."""

    def open(self, name: str) -> Device:
        """Raises VerbsFailure, also for a name that is not there."""
