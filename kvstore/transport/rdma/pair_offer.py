"""What the two ends of a queue pair tell each other before it exists, and the path that both make of it."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from kvstore.errors import InvalidRequest
from kvstore.limits import PAIR_READS_MAX
from kvstore.transport.rdma.marks import Mark
from kvstore.transport.rdma.verbs import Access, PairEnd, PairPath
from kvstore.transport.rdma_choice import PATH_MTUS_BYTES, path_mtu_bytes

PROBE_WORD_BYTES: Final = 16
_FORM: Final = struct.Struct("<IIH16sHBQI16s")
_NUMBER_MAX: Final = 0xFFFFFF  # queue pair and packet numbers have 24 bits
_TIMEOUT_EXPONENT: Final = 17
"""4.096 us * 2 ** 17 = 0.54 s until a packet is sent again: above the pause of a congested lossless network."""
_RETRY_COUNT: Final = 6
"""With the timeout about 4 s until RETRY_EXCEEDED (devices wait up to four times the timeout). Not 7, the most there
is: rxe tries without end then (`rxe_completer`), and a dead wire would never break a pair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairOffer:
    """One end, as the other must know it.

    Attributes:
        end: number, first packet number, LID and GID.
        mtu_bytes: what its port can do.
        reads_max: READs that it answers, and may ask, at once.
        probe_address, probe_key: PAIR_PROBE_BYTES of memory that the other end may read, filled with `probe_word`; a
            key of 0 with an end that is not probed.
        probe_word: 16 bytes.
    """

    end: PairEnd
    mtu_bytes: int
    reads_max: int
    probe_address: int = 0
    probe_key: int = 0
    probe_word: bytes = bytes(PROBE_WORD_BYTES)

    def encode(self) -> bytes:
        """Fixed length, little-endian."""
        end = self.end
        return _FORM.pack(
            end.number,
            end.packet_number,
            end.lid,
            end.gid,
            self.mtu_bytes,
            self.reads_max,
            self.probe_address,
            self.probe_key,
            self.probe_word,
        )

    @classmethod
    def decode(cls, body: bytes) -> PairOffer:
        """Raises InvalidRequest: what a peer sent is none."""
        if len(body) < _FORM.size:
            raise InvalidRequest(f"an offer of a queue pair has {len(body)} bytes, at least {_FORM.size} are needed")
        number, packet, lid, gid, mtu, reads, address, key, word = _FORM.unpack_from(body)
        if number > _NUMBER_MAX or packet > _NUMBER_MAX or mtu not in PATH_MTUS_BYTES or not reads:
            raise InvalidRequest(
                f"an offer of queue pair {number} from packet {packet} with MTU {mtu} and {reads} reads is none: "
                f"numbers have 24 bits, MTUs are {PATH_MTUS_BYTES}"
            )
        end = PairEnd(number=number, packet_number=packet, lid=lid, gid=gid)
        return cls(end=end, mtu_bytes=mtu, reads_max=reads, probe_address=address, probe_key=key, probe_word=word)


def path_between(
    ours: PairOffer, theirs: PairOffer, *, port: int, gid_index: int, mark: Mark, access: Access
) -> PairPath:
    """What our end is connected with.

    Path MTU and outstanding reads are the lesser of both, so that both ends, each computing for itself, agree.

    Args:
        access: what the other end may do in our memory.
    """
    reads = min(ours.reads_max, theirs.reads_max, PAIR_READS_MAX)
    return PairPath(
        port=port,
        gid_index=gid_index,
        mtu_bytes=path_mtu_bytes(ours.mtu_bytes, theirs.mtu_bytes),
        traffic_class=mark.traffic_class,
        service_level=mark.service_level,
        packet_number=ours.end.packet_number,
        reads_out=reads,
        reads_in=reads,
        timeout_exponent=_TIMEOUT_EXPONENT,
        retry_count=_RETRY_COUNT,
        remote=theirs.end,
        remote_access=access,
    )
