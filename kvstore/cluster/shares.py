"""How much of a tenant's quota each target of a cluster may use: of bytes on the SSDs, copies counted each. Pure.

A target's share is what it uses, and its part, by capacity, of what nobody uses. So all shares together are the quota,
whoever computes them from the same uses, and nobody has to be asked before a put. Where more is used than the quota
allows, each gives up the same part of what it has.

Nodes see each other's uses a moment late, and for that moment their shares may be from two pictures. So a share that
falls holds at once, and one that rises only after it was so for `SHARE_RISE_NS`, by when the others' have fallen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvstore.cluster.plain import Plain, PlainFields, decode, encode
from kvstore.cluster.view import PLACED_STATES, TargetId, View
from kvstore.errors import InvalidRequest
from kvstore.limits import CLUSTER_VALUE_BYTES_MAX, SHARE_RISE_NS, STORE_VALUE_BYTES_MAX, TENANTS_MAX


def shares_of(
    quota_bytes: int, used_bytes: Mapping[TargetId, int], capacity_bytes: Mapping[TargetId, int]
) -> dict[TargetId, int]:
    """Bytes that a tenant may have on each target; all together at most the quota.

    Args:
        used_bytes: what it has on each; a target that is not named has nothing.
        capacity_bytes: of those targets that take new chunks. The others keep what they have and get no more.
    """
    used_all = sum(used_bytes.values())
    names = used_bytes.keys() | capacity_bytes.keys()
    if used_all >= quota_bytes:
        return {name: used_bytes.get(name, 0) * quota_bytes // used_all if used_all else 0 for name in names}
    free_bytes = quota_bytes - used_all
    capacity_all = sum(capacity_bytes.values()) or 1
    return {name: used_bytes.get(name, 0) + free_bytes * capacity_bytes.get(name, 0) // capacity_all for name in names}


def capacities_of(view: View) -> dict[TargetId, int]:
    """Capacity in bytes of the targets that take new chunks."""
    return {target.id: target.capacity_bytes for target in view.targets if target.state in PLACED_STATES}


@dataclass(slots=True)
class RisingShares:
    """The shares that hold: of each, the lowest that was computed in the last `rise_ns`."""

    rise_ns: int = SHARE_RISE_NS
    _computed: dict[tuple[str, TargetId], deque[tuple[int, int]]] = field(default_factory=dict)

    def hold(self, tenant: str, shares: Mapping[TargetId, int], now_ns: int) -> dict[TargetId, int]:
        """What holds now that these are computed for a tenant; of a target that is new, at once."""
        return {name: self._hold((tenant, name), share, now_ns) for name, share in shares.items()}

    def forget_others(self, tenants: set[str], targets: set[TargetId]) -> None:
        """Only these tenants and targets are there any more."""
        self._computed = {key: past for key, past in self._computed.items() if key[0] in tenants and key[1] in targets}

    def _hold(self, key: tuple[str, TargetId], share_bytes: int, now_ns: int) -> int:
        past = self._computed.setdefault(key, deque())
        past.append((now_ns, share_bytes))
        while len(past) > 1 and past[1][0] <= now_ns - self.rise_ns:
            past.popleft()  # the first that stays held when the time began
        return min(share for _, share in past)


def encode_uses(uses: Mapping[str, int]) -> str:
    """What tenants have on a target, as it stands in a cluster store; of at most TENANTS_MAX tenants."""
    assert len(uses) <= TENANTS_MAX, "a worker tells of no more"
    return encode({"tenants": dict(sorted(uses.items()))})


def decode_uses(text: str) -> dict[str, int]:
    """Inverse of `encode_uses`. Raises InvalidRequest."""
    fields = PlainFields(decode(text, what="use of a target", bytes_max=STORE_VALUE_BYTES_MAX), what="use")
    uses = {name: _bytes_of(name, value) for name, value in fields.map("tenants", TENANTS_MAX).items()}
    fields.finish()
    return uses


def decode_quota(text: str) -> int:
    """Bytes of a quota document: {"bytes": N}; 0 is no quota. Raises InvalidRequest."""
    fields = PlainFields(decode(text, what="quota", bytes_max=CLUSTER_VALUE_BYTES_MAX), what="quota")
    quota_bytes = fields.integer("bytes")
    fields.finish()
    return quota_bytes


def _bytes_of(name: str, value: Plain) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InvalidRequest(f"use of tenant {name!r:.80} is {value!r:.80}, not a number of bytes")
    return value
