"""The view: an immutable picture of the targets that store, and its epoch.

Outside it is plain data (maps, lists, text, numbers), `to_plain` and `from_plain`: as msgpack in VIEW_REPLY
(`kvstore.wire.codec`), as JSON on disk. Fields that a reader does not know are ignored, so a newer node can say more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, Self, TypeAlias

from kvstore.errors import InvalidRequest
from kvstore.limits import TARGETS_MAX

Plain: TypeAlias = "bool | int | float | str | bytes | Sequence[Plain] | Mapping[str, Plain] | None"

_EPOCH_MAX: Final = 2**64 - 1


class TargetState(StrEnum):
    """What a target can do now."""

    SERVING = "serving"
    RECOVERING = "recovering"
    DRAINING = "draining"
    DOWN = "down"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One drive of a worker: what placement ranks.

    Attributes:
        id: name that stays with the drive, over restarts and moves.
        data: "host:port" of its worker's data plane, one for each rail, in order of preference.
        weight: share of keys, relative to the other targets; proportional to its capacity.
    """

    id: str
    data: tuple[str, ...]
    weight: float
    state: TargetState

    def to_plain(self) -> dict[str, Plain]:
        """Plain data that `from_plain` reads."""
        return {"id": self.id, "data": list(self.data), "weight": self.weight, "state": str(self.state)}

    @classmethod
    def from_plain(cls, plain: Plain) -> Self:
        """Raises InvalidRequest when a field is missing or of the wrong kind; an unknown state reads as down."""
        fields = _map(plain, "target")
        state = _text(fields, "state")
        known = state in TargetState.__members__.values()
        return cls(
            id=_text(fields, "id"),
            data=tuple(_texts(fields, "data")),
            weight=_weight(fields),
            state=TargetState(state) if known else TargetState.DOWN,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """All targets at one epoch. A higher epoch is newer; equal epochs of one store are the same view."""

    epoch: int
    node_id: str
    targets: tuple[Target, ...]

    def to_plain(self) -> dict[str, Plain]:
        """Plain data that `from_plain` reads."""
        targets = [target.to_plain() for target in self.targets]
        return {"epoch": self.epoch, "node_id": self.node_id, "targets": targets}

    @classmethod
    def from_plain(cls, plain: Plain) -> Self:
        """The view that `plain` describes.

        Raises:
            InvalidRequest: a field is missing, of the wrong kind, or there are more than TARGETS_MAX targets.
        """
        fields = _map(plain, "view")
        epoch = fields.get("epoch")
        if not isinstance(epoch, int) or not 0 <= epoch <= _EPOCH_MAX:
            raise InvalidRequest(f"view has epoch {epoch!r}, not a number from 0 to {_EPOCH_MAX}")
        targets = fields.get("targets")
        if not isinstance(targets, list | tuple) or len(targets) > TARGETS_MAX:
            raise InvalidRequest(f"view must have a list of at most {TARGETS_MAX} targets")
        return cls(epoch=epoch, node_id=_text(fields, "node_id"), targets=tuple(map(Target.from_plain, targets)))

    def with_targets(self, targets: Iterable[Target]) -> View:
        """The next view: these targets, epoch + 1; the same view when nothing changes."""
        changed = tuple(targets)
        return self if changed == self.targets else replace(self, epoch=self.epoch + 1, targets=changed)


def _map(plain: Plain, what: str) -> Mapping[str, Plain]:
    if not isinstance(plain, Mapping):
        raise InvalidRequest(f"{what} is {type(plain).__name__}, not a map")
    return plain


def _text(fields: Mapping[str, Plain], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} of the view is {value!r:.80}, not text")
    return value


def _texts(fields: Mapping[str, Plain], name: str) -> list[str]:
    value = fields.get(name)
    if not isinstance(value, list | tuple):
        raise InvalidRequest(f"{name} of the view is {value!r:.80}, not a list")
    return [_text({name: item}, name) for item in value]


def _weight(fields: Mapping[str, Plain]) -> float:
    value = fields.get("weight")
    if not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise InvalidRequest(f"weight of a target is {value!r:.80}, not a number of 0 or more")
    return float(value)
