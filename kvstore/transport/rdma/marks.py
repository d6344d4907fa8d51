"""How flow classes share queue pairs, and how their packets are marked for the network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from kvstore.errors import InvalidRequest
from kvstore.limits import PAIRS_PER_CLIENT_MAX
from kvstore.types.flow import FlowClass

_DSCP_MAX: Final = 63
_SERVICE_LEVEL_MAX: Final = 15
_ECN_CAPABLE: Final = 2
"""ECT(0), RFC 3168: switches mark instead of dropping, which is what RoCE's congestion control (DCQCN) lives on."""


class Lane(IntEnum):
    """The queue pairs that one client process has at one worker; the value is its code on the wire."""

    FOREGROUND = 0
    BACKGROUND = 1


assert len(Lane) == PAIRS_PER_CLIENT_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What the network sees of a class.

    Attributes:
        dscp: 0 to 63, in the IP header or the global route header (RFC 2474).
        service_level: 0 to 15: the priority of VLAN tags on Ethernet, the virtual lane's choice on InfiniBand.
    """

    dscp: int
    service_level: int

    def __post_init__(self) -> None:
        if not 0 <= self.dscp <= _DSCP_MAX or not 0 <= self.service_level <= _SERVICE_LEVEL_MAX:
            raise InvalidRequest(
                f"mark dscp {self.dscp}, service level {self.service_level}: DSCP is 0 to {_DSCP_MAX}, "
                f"a service level 0 to {_SERVICE_LEVEL_MAX}"
            )

    @property
    def traffic_class(self) -> int:
        """The byte that carries the DSCP."""
        return self.dscp << 2 | _ECN_CAPABLE


DEFAULT_MARKS: Final[Mapping[FlowClass, Mark]] = {
    # DSCP 26 with priority 3 is what switches and NICs of RoCE networks treat as lossless unless told otherwise;
    # AF21 and AF11 below it, CS1 is "lower effort" in old networks (RFC 4594)
    FlowClass.DECODE_READ: Mark(dscp=26, service_level=3),
    FlowClass.PREFILL_READ: Mark(dscp=26, service_level=3),
    FlowClass.PREFETCH: Mark(dscp=18, service_level=2),
    FlowClass.WRITEBACK: Mark(dscp=10, service_level=1),
    FlowClass.BACKGROUND: Mark(dscp=8, service_level=1),
}
_LANES: Final = {
    FlowClass.DECODE_READ: Lane.FOREGROUND,
    FlowClass.PREFILL_READ: Lane.FOREGROUND,
    FlowClass.PREFETCH: Lane.BACKGROUND,
    FlowClass.WRITEBACK: Lane.BACKGROUND,
    FlowClass.BACKGROUND: Lane.BACKGROUND,
}
assert set(_LANES) == set(DEFAULT_MARKS) == set(FlowClass)


def lane_of(flow: FlowClass) -> Lane:
    """Which queue pair a class travels on: reads that somebody waits for never queue behind the others."""
    return _LANES[flow]


def mark_of(lane: Lane, marks: Mapping[FlowClass, Mark] = DEFAULT_MARKS) -> Mark:
    """How a queue pair is marked: as the most urgent of the classes that share it, since they cannot be told apart."""
    return marks[min(flow for flow, its_lane in _LANES.items() if its_lane is lane)]
