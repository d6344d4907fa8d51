"""What a node says of one of its targets: an entry of the cluster store that lives as long as the node's lease."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from kvstore.cluster.plain import Plain, PlainFields, decode, encode
from kvstore.cluster.view import Target, TargetId, TargetState
from kvstore.limits import CLUSTER_VALUE_BYTES_MAX, RAILS_MAX, GiB


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """One target. The attributes mean what they mean in `Target`; `wants_drain`: no new keys, it will leave."""

    id: TargetId
    data: tuple[str, ...]
    capacity_bytes: int
    node_id: str
    label: str
    disk_id: str
    boot_id: str
    session: str
    wants_drain: bool = False

    def as_target(self, state: TargetState) -> Target:
        """The target in a view; its weight is its capacity in GiB."""
        return Target(
            id=self.id,
            data=self.data,
            weight=self.capacity_bytes / GiB,
            state=state,
            node_id=self.node_id,
            label=self.label,
            capacity_bytes=self.capacity_bytes,
            disk_id=self.disk_id,
            boot_id=self.boot_id,
            session=self.session,
        )

    def to_plain(self) -> dict[str, Plain]:
        """Plain data that `from_plain` reads."""
        return {
            "id": self.id,
            "data": list(self.data),
            "capacity_bytes": self.capacity_bytes,
            "node_id": self.node_id,
            "label": self.label,
            "disk_id": self.disk_id,
            "boot_id": self.boot_id,
            "session": self.session,
            "wants_drain": self.wants_drain,
        }

    @classmethod
    def from_plain(cls, plain: Plain) -> Self:
        """Raises InvalidRequest when a field is missing, unknown or of the wrong kind."""
        fields = PlainFields(plain, what="registration")
        registration = cls(
            id=fields.text("id"),
            data=fields.texts("data", count_max=RAILS_MAX),
            capacity_bytes=fields.integer("capacity_bytes"),
            node_id=fields.text("node_id"),
            label=fields.text("label"),
            disk_id=fields.text("disk_id"),
            boot_id=fields.text("boot_id"),
            session=fields.text("session"),
            wants_drain=fields.flag("wants_drain", False),
        )
        fields.finish()
        return registration


def encode_registration(registration: Registration) -> str:
    """As it stands in a cluster store: canonical JSON."""
    return encode(registration.to_plain())


def decode_registration(text: str) -> Registration:
    """Inverse of `encode_registration`. Raises InvalidRequest."""
    return Registration.from_plain(decode(text, what="registration", bytes_max=CLUSTER_VALUE_BYTES_MAX))
