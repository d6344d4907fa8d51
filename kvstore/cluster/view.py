"""The view: an immutable picture of the targets that store, and its epoch.

Outside it is plain data (maps, lists, text, numbers), `to_plain` and `from_plain`: as msgpack in VIEW_REPLY
(`kvstore.wire.codec`), as canonical JSON in a cluster store (`encode_view`, `decode_view`). A field or state that a
reader does not know is refused; `kvstore.cluster.plain` says why.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final, Self, TypeAlias

from kvstore.cluster.plain import Plain, PlainFields, amount_of, decode, encode
from kvstore.errors import InvalidRequest
from kvstore.limits import (
    COPIES_MAX,
    PREVIOUS_KEEP_NS_MAX,
    PREVIOUS_PLACEMENTS_MAX,
    RAILS_MAX,
    RELAYS_MAX,
    TARGETS_MAX,
    VIEW_BYTES_MAX,
)

TargetId: TypeAlias = str

EPOCH_MAX: Final = 2**64 - 1


class TargetState(StrEnum):
    """What a target can do now.

    JOINING: new or wiped; takes its share of writes, while its keys may still lie where the previous placement says.
    SERVING: live.
    DRAINING: serves reads, takes no new keys.
    RECOVERING: its worker starts and will serve; nothing may be asked of it yet.
    DOWN: dead as far as anybody knows; neither read nor written, and it may come back with what it held.
    """

    JOINING = "joining"
    SERVING = "serving"
    DRAINING = "draining"
    RECOVERING = "recovering"
    DOWN = "down"


PLACED_STATES: Final = frozenset({TargetState.JOINING, TargetState.SERVING})
"""States in which a target is given new keys."""

READ_STATES: Final = PLACED_STATES | {TargetState.DRAINING}
"""States in which a target answers reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One drive of a worker: what placement ranks.

    Attributes:
        id: name that stays with the drive, over restarts and moves.
        data: "host:port" of its worker's data plane, one for each rail, in order of preference.
        weight: share of keys, relative to the other targets; proportional to its capacity.
        node_id: of the node that serves it.
        label: failure domain: copies of a run go to different labels where there are enough. "" is the node.
        capacity_bytes: what it may use.
        disk_id: of the drive's superblock: another one under the same id holds none of the old keys.
        boot_id: of the worker's life, hex; another one has forgotten pins and writers.
        session: of its registration; after an expired lease or a fence only another session brings it back.
    """

    id: TargetId
    data: tuple[str, ...]
    weight: float
    state: TargetState
    node_id: str = ""
    label: str = ""
    capacity_bytes: int = 0
    disk_id: str = ""
    boot_id: str = ""
    session: str = ""

    @property
    def domain(self) -> str:
        """What fails together with it: its label, else its node, else itself."""
        return self.label or self.node_id or self.id

    @property
    def placed_weight(self) -> float:
        """Its weight in the placement of new keys."""
        return self.weight if self.state in PLACED_STATES else 0.0

    def to_plain(self) -> dict[str, Plain]:
        """Plain data that `from_plain` reads."""
        return {
            "id": self.id,
            "data": list(self.data),
            "weight": self.weight,
            "state": str(self.state),
            "node_id": self.node_id,
            "label": self.label,
            "capacity_bytes": self.capacity_bytes,
            "disk_id": self.disk_id,
            "boot_id": self.boot_id,
            "session": self.session,
        }

    @classmethod
    def from_plain(cls, plain: Plain) -> Self:
        """Raises InvalidRequest when a field is missing, unknown or of the wrong kind."""
        fields = PlainFields(plain, what="target")
        target = cls(
            id=fields.text("id"),
            data=fields.texts("data", count_max=RAILS_MAX),
            weight=fields.amount("weight"),
            state=_state(fields.text("state")),
            node_id=fields.text("node_id", ""),
            label=fields.text("label", ""),
            capacity_bytes=fields.integer("capacity_bytes", 0),
            disk_id=fields.text("disk_id", ""),
            boot_id=fields.text("boot_id", ""),
            session=fields.text("session", ""),
        )
        fields.finish()
        return target


@dataclass(frozen=True, slots=True, kw_only=True)
class Relay:
    """A decode node's agent that reads through its own storage NIC and forwards. Attributes as those of `Target`."""

    id: str
    data: tuple[str, ...]
    state: TargetState
    node_id: str = ""
    label: str = ""
    boot_id: str = ""
    session: str = ""

    def to_plain(self) -> dict[str, Plain]:
        """Plain data that `from_plain` reads."""
        return {
            "id": self.id,
            "data": list(self.data),
            "state": str(self.state),
            "node_id": self.node_id,
            "label": self.label,
            "boot_id": self.boot_id,
            "session": self.session,
        }

    @classmethod
    def from_plain(cls, plain: Plain) -> Self:
        """Raises InvalidRequest when a field is missing, unknown or of the wrong kind."""
        fields = PlainFields(plain, what="relay")
        relay = cls(
            id=fields.text("id"),
            data=fields.texts("data", count_max=RAILS_MAX),
            state=_state(fields.text("state")),
            node_id=fields.text("node_id", ""),
            label=fields.text("label", ""),
            boot_id=fields.text("boot_id", ""),
            session=fields.text("session", ""),
        )
        fields.finish()
        return relay


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviousPlacement:
    """Where keys were placed before the view changed: a lookup asks there too.

    Attributes:
        epoch: of the first view with the placement that came after.
        keep_ns: how long it is to be kept; who ends it counts from when it saw it first, on its own clock.
        weights: of the targets that weighed something else then than they do now, by id; 0 for those without new keys.
    """

    epoch: int
    keep_ns: int
    weights: Mapping[TargetId, float] = field(default_factory=dict)

    def to_plain(self) -> dict[str, Plain]:
        """Plain data that `from_plain` reads."""
        return {"epoch": self.epoch, "keep_ns": self.keep_ns, "weights": dict(sorted(self.weights.items()))}

    @classmethod
    def from_plain(cls, plain: Plain) -> Self:
        """Raises InvalidRequest when a field is missing, unknown or of the wrong kind."""
        fields = PlainFields(plain, what="previous placement")
        weights = fields.map("weights", TARGETS_MAX)
        previous = cls(
            epoch=fields.integer("epoch", high=EPOCH_MAX),
            keep_ns=fields.integer("keep_ns", high=PREVIOUS_KEEP_NS_MAX),
            weights={name: amount_of(weight, name=name, what="weights") for name, weight in weights.items()},
        )
        fields.finish()
        return previous


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPolicy:
    """How many copies of a run are written, each 1 to COPIES_MAX.

    Attributes:
        copies: of a run, where its namespace says nothing else.
        head_copies: of the first `head_runs` runs of a chain, which everybody shares, at least.
        head_runs: how many runs of a chain are its head.
    """

    copies: int = 1
    head_copies: int = 2
    head_runs: int = 1

    def copies_of(self, *, run_index: int, namespace_copies: int | None = None) -> int:
        """Copies to write of the run at `run_index` of its chain, in a namespace that asks for so many."""
        copies = self.copies if namespace_copies is None else namespace_copies
        return max(copies, self.head_copies) if run_index < self.head_runs else copies

    def to_plain(self) -> dict[str, Plain]:
        """Plain data that `from_plain` reads."""
        return {"copies": self.copies, "head_copies": self.head_copies, "head_runs": self.head_runs}

    @classmethod
    def from_plain(cls, plain: Plain) -> Self:
        """Raises InvalidRequest when a field is unknown, of the wrong kind or out of range."""
        fields = PlainFields(plain, what="replica policy")
        policy = cls(
            copies=fields.integer("copies", 1, low=1, high=COPIES_MAX),
            head_copies=fields.integer("head_copies", 2, low=1, high=COPIES_MAX),
            head_runs=fields.integer("head_runs", 1, high=2**32 - 1),
        )
        fields.finish()
        return policy


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """All targets at one epoch. A higher epoch is newer; equal epochs of one store are the same view.

    Attributes:
        node_id: of the node whose own view this is; "" for that of a cluster, which is the same on every node.
        targets: of a cluster in the order of their ids.
        previous: placements that lookups ask too, the newest first.
        cluster: name of the cluster; "" for a node on its own.
    """

    epoch: int
    node_id: str
    targets: tuple[Target, ...]
    relays: tuple[Relay, ...] = ()
    previous: tuple[PreviousPlacement, ...] = ()
    replicas: ReplicaPolicy = ReplicaPolicy()
    cluster: str = ""

    def target(self, target_id: TargetId) -> Target | None:
        """The target of that id, or None."""
        return next((target for target in self.targets if target.id == target_id), None)

    def to_plain(self) -> dict[str, Plain]:
        """Plain data that `from_plain` reads."""
        return {
            "epoch": self.epoch,
            "node_id": self.node_id,
            "targets": [target.to_plain() for target in self.targets],
            "relays": [relay.to_plain() for relay in self.relays],
            "previous": [previous.to_plain() for previous in self.previous],
            "replicas": self.replicas.to_plain(),
            "cluster": self.cluster,
        }

    @classmethod
    def from_plain(cls, plain: Plain) -> Self:
        """The view that `plain` describes.

        Raises:
            InvalidRequest: a field is missing, unknown, of the wrong kind or too long.
        """
        fields = PlainFields(plain, what="view")
        previous = fields.items("previous", PREVIOUS_PLACEMENTS_MAX, ())
        view = cls(
            epoch=fields.integer("epoch", high=EPOCH_MAX),
            node_id=fields.text("node_id"),
            targets=tuple(map(Target.from_plain, fields.items("targets", TARGETS_MAX))),
            relays=tuple(map(Relay.from_plain, fields.items("relays", RELAYS_MAX, ()))),
            previous=tuple(map(PreviousPlacement.from_plain, previous)),
            replicas=ReplicaPolicy.from_plain(fields.plain("replicas", {})),
            cluster=fields.text("cluster", ""),
        )
        fields.finish()
        return view

    def with_targets(self, targets: Iterable[Target]) -> View:
        """The next view: these targets, epoch + 1; the same view when nothing changes."""
        changed = tuple(targets)
        return self if changed == self.targets else replace(self, epoch=self.epoch + 1, targets=changed)


def encode_view(view: View) -> str:
    """The view as it stands in a cluster store: canonical JSON. Raises InvalidRequest above VIEW_BYTES_MAX."""
    text = encode(view.to_plain())
    if len(text.encode()) > VIEW_BYTES_MAX:
        raise InvalidRequest(
            f"view of {len(view.targets)} targets and {len(view.relays)} relays takes {len(text.encode())} bytes, "
            f"the limit is {VIEW_BYTES_MAX}; use fewer and larger targets"
        )
    return text


def decode_view(text: str) -> View:
    """Inverse of `encode_view`. Raises InvalidRequest as `View.from_plain` does."""
    return View.from_plain(decode(text, what="view", bytes_max=VIEW_BYTES_MAX))


def _state(name: str) -> TargetState:
    try:
        return TargetState(name)
    except ValueError:
        known = ", ".join(TargetState)
        raise InvalidRequest(f"state of a target is {name!r}, not one of {known}; upgrade this program") from None
