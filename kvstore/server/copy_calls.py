"""The verbs by which nodes keep copies: PULL, HEADS and FORGET (wire/replicas.py)."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, Protocol

from kvstore.engine.api import Engine
from kvstore.engine.heads import Head
from kvstore.limits import DIGEST_BYTES, REQUEST_NS_MAX
from kvstore.server.batch import pack_u32
from kvstore.server.call import Answer, Call, shielded
from kvstore.server.copier import Copier, HeadsFound
from kvstore.telemetry.metrics import Verb
from kvstore.types.results import MissReason, RefusedReason
from kvstore.wire.frames import Frame
from kvstore.wire.header import FrameType
from kvstore.wire.messages import ID_BYTES, End
from kvstore.wire.replicas import KEY_PREFIX_BYTES, Forget, Heads, HeadsReply, Pull

if TYPE_CHECKING:
    from kvstore.server.connection import Connection

_NOTHING: Final = Head(
    payload_bytes=0,
    block_bytes=0,
    position=0,
    part=0,
    run_head=bytes(DIGEST_BYTES),
    parent=bytes(DIGEST_BYTES),
    content_id=bytes(ID_BYTES),
)


class CopyPlane(Protocol):
    """What the verbs need of the data plane: see `DataPlane`."""

    copier: Copier | None
    is_draining: bool
    fenced_from_ns: int
    now_ns: int

    def wake_engine(self) -> None:
        """The engine has work."""


class CopyVerbs:
    """The handlers of these verbs."""

    def __init__(
        self, plane: CopyPlane, *, serving: Callable[[Connection], Engine], check_fence: Callable[[], None]
    ) -> None:
        """
        Args:
            serving: The engine as a connection may see it. Raises Unavailable.
            check_fence: Raises Unavailable on a fenced node.
        """
        self._plane = plane
        self._serving = serving
        self._check_fence = check_fence

    def handlers(self) -> Mapping[FrameType, Callable[[Connection, Frame], None]]:
        """What carries out each verb."""
        return {FrameType.PULL: self._pull, FrameType.HEADS: self._heads, FrameType.FORGET: self._forget}

    def _pull(self, connection: Connection, frame: Frame) -> None:
        plane = self._plane
        refusal = RefusedReason.DRAINING if plane.is_draining else None
        if plane.now_ns >= plane.fenced_from_ns:
            refusal = RefusedReason.FENCED
        pull(connection, frame.body, self._serving(connection), plane.copier, refusal=refusal, now_ns=plane.now_ns)
        plane.wake_engine()

    def _heads(self, connection: Connection, frame: Frame) -> None:
        plane = self._plane
        heads(connection, frame.body, self._serving(connection), plane.copier, now_ns=plane.now_ns)
        plane.wake_engine()

    def _forget(self, connection: Connection, frame: Frame) -> None:
        plane = self._plane
        self._check_fence()
        forget(connection, frame.body, self._serving(connection), plane.copier, now_ns=plane.now_ns)
        plane.wake_engine()


def pull(
    connection: Connection,
    body: bytes | bytearray,
    engine: Engine,
    copier: Copier | None,
    *,
    refusal: RefusedReason | None,
    now_ns: int,
) -> None:
    """PULL: answered at once, while the records are still to come."""
    connection.metrics.calls[Verb.OTHER] += 1
    request = Pull.decode(body)
    count = len(request.keys) // DIGEST_BYTES
    namespace = engine.namespace(request.namespace)
    if refusal is not None:
        connection.answer(End(statuses=bytes([refusal]) * count))
    elif namespace is None:
        connection.answer(End(statuses=bytes([RefusedReason.UNKNOWN_NAMESPACE]) * count))
    elif copier is None:  # a node on its own: there is nobody to get anything from
        connection.answer(End(statuses=bytes([RefusedReason.INVALID]) * count))
    else:
        before = len(copier.queue)
        statuses = copier.want(engine, namespace, request.keys, request.source, now_ns)
        connection.answer(End(statuses=bytes(statuses), value=len(copier.queue) - before))


def heads(
    connection: Connection, body: bytes | bytearray, engine: Engine, copier: Copier | None, *, now_ns: int
) -> None:
    """HEADS: answered when the drives have told."""
    connection.metrics.calls[Verb.OTHER] += 1
    request = Heads.decode(body)
    keys = [request.keys[at : at + DIGEST_BYTES] for at in range(0, len(request.keys), DIGEST_BYTES)]
    if copier is None or engine.namespace(request.namespace) is None:
        nothing = HeadsFound(heads=[MissReason.ABSENT] * len(keys), generation=0, manifest=b"")
        connection.answer(reply_of(nothing))
        return
    call = HeadsCall(connection, now_ns=now_ns)
    connection.call = call
    copier.heads(request.namespace, keys, call.done)


def forget(
    connection: Connection, body: bytes | bytearray, engine: Engine, copier: Copier | None, *, now_ns: int
) -> None:
    """FORGET: answered once it is on the drives. Raises InvalidRequest when the manifest is not taken."""
    connection.metrics.calls[Verb.OTHER] += 1
    request = Forget.decode(body)
    if copier is None:
        connection.answer(End())
        return
    namespace = engine.add_namespace(request.manifest)
    prefixes = [request.keys[at : at + KEY_PREFIX_BYTES] for at in range(0, len(request.keys), KEY_PREFIX_BYTES)]
    ages_ns = [age_ns for (age_ns,) in struct.iter_unpack("<Q", request.ages_ns)]
    call = Answer(connection, Verb.OTHER, count=0, now_ns=now_ns, deadline_ns=now_ns + REQUEST_NS_MAX)
    connection.call = call
    copier.forget(
        namespace.digest,
        generation=request.generation,
        prefixes=prefixes,
        ages_ns=ages_ns,
        on_done=call.done,
    )


class HeadsCall(Call):
    """A HEADS in progress."""

    __slots__ = ()

    def __init__(self, connection: Connection, *, now_ns: int) -> None:
        super().__init__(connection, Verb.OTHER, now_ns=now_ns, deadline_ns=now_ns + REQUEST_NS_MAX)

    @shielded
    def done(self, found: HeadsFound) -> None:
        """The drives have answered."""
        self.finish(reply_of(found))


def reply_of(found: HeadsFound) -> HeadsReply:
    """What is said of records, as a message."""
    rows = [one if isinstance(one, Head) else _NOTHING for one in found.heads]
    return HeadsReply(
        statuses=bytes(0 if isinstance(one, Head) else one for one in found.heads),
        generation=found.generation,
        copies=found.copies,
        manifest=found.manifest,
        lengths=pack_u32([row.payload_bytes for row in rows]),
        block_bytes=pack_u32([row.block_bytes for row in rows]),
        positions=pack_u32([row.position for row in rows]),
        parts=bytes(row.part for row in rows),
        run_heads=b"".join([row.run_head for row in rows]),
        parents=b"".join([row.parent for row in rows]),
        content_ids=b"".join([row.content_id for row in rows]),
    )
