"""What a node or relay says of itself and its targets: entries of the cluster store that live as long as its lease."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from kvstore.cluster.plain import Plain, PlainFields, decode, encode
from kvstore.cluster.view import Relay, Target, TargetId, TargetState
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayRegistration:
    """One relay. The attributes mean what they mean in `Relay`; `wants_drain`: nothing new goes by it."""

    id: str
    data: tuple[str, ...]
    node_id: str = ""
    label: str = ""
    boot_id: str = ""
    session: str = ""
    wants_drain: bool = False

    def as_relay(self) -> Relay:
        """The relay in a view."""
        return Relay(
            id=self.id,
            data=self.data,
            state=TargetState.DRAINING if self.wants_drain else TargetState.SERVING,
            node_id=self.node_id,
            label=self.label,
            boot_id=self.boot_id,
            session=self.session,
        )

    def to_plain(self) -> dict[str, Plain]:
        """Plain data that `from_plain` reads."""
        return {
            "id": self.id,
            "data": list(self.data),
            "node_id": self.node_id,
            "label": self.label,
            "boot_id": self.boot_id,
            "session": self.session,
            "wants_drain": self.wants_drain,
        }

    @classmethod
    def from_plain(cls, plain: Plain) -> Self:
        """Raises InvalidRequest when a field is missing, unknown or of the wrong kind."""
        fields = PlainFields(plain, what="relay registration")
        registration = cls(
            id=fields.text("id"),
            data=fields.texts("data", count_max=RAILS_MAX),
            node_id=fields.text("node_id", ""),
            label=fields.text("label", ""),
            boot_id=fields.text("boot_id", ""),
            session=fields.text("session", ""),
            wants_drain=fields.flag("wants_drain", False),
        )
        fields.finish()
        return registration


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeNote:
    """Where people and tools ask a node about itself; clients do not need it. `grpc` is "host:port"."""

    node_id: str
    grpc: str
    version: str = ""

    def to_plain(self) -> dict[str, Plain]:
        """Plain data that `from_plain` reads."""
        return {"node_id": self.node_id, "grpc": self.grpc, "version": self.version}

    @classmethod
    def from_plain(cls, plain: Plain) -> Self:
        """Raises InvalidRequest when a field is missing, unknown or of the wrong kind."""
        fields = PlainFields(plain, what="node note")
        note = cls(node_id=fields.text("node_id"), grpc=fields.text("grpc"), version=fields.text("version", ""))
        fields.finish()
        return note


def encode_registration(registration: Registration | RelayRegistration | NodeNote) -> str:
    """As it stands in a cluster store: canonical JSON."""
    return encode(registration.to_plain())


def decode_registration(text: str) -> Registration:
    """Inverse of `encode_registration`. Raises InvalidRequest."""
    return Registration.from_plain(decode(text, what="registration", bytes_max=CLUSTER_VALUE_BYTES_MAX))


def decode_relay(text: str) -> RelayRegistration:
    """Inverse of `encode_registration` for a relay. Raises InvalidRequest."""
    return RelayRegistration.from_plain(decode(text, what="relay registration", bytes_max=CLUSTER_VALUE_BYTES_MAX))


def decode_note(text: str) -> NodeNote:
    """Inverse of `encode_registration` for a node. Raises InvalidRequest."""
    return NodeNote.from_plain(decode(text, what="node note", bytes_max=CLUSTER_VALUE_BYTES_MAX))
