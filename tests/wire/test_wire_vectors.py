"""Golden frames: bytes that another language must produce and read. Changing one is a new protocol version."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from kvstore import errors
from kvstore.types.results import ItemStatus, MissReason, RefusedReason
from kvstore.wire.failures import ERROR_CODES, code_of, error_of
from kvstore.wire.frames import Frame, FrameReader
from kvstore.wire.header import FrameType, encode_head
from kvstore.wire.messages import MESSAGES as PLAIN_MESSAGES
from kvstore.wire.pairs import PAIR_MESSAGES
from kvstore.wire.replicas import REPLICA_MESSAGES
from kvstore.wire.shared import SHARED_MESSAGES
from kvstore.wire.slices import FLAG_FINAL, Slice, encode_slices

MESSAGES = PLAIN_MESSAGES | SHARED_MESSAGES | REPLICA_MESSAGES | PAIR_MESSAGES
VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "wire.json").read_text())


class Keep:
    """A sink that keeps the payload in one buffer."""

    def place(self, frame: Frame) -> list[memoryview]:
        return [memoryview(bytearray(frame.payload_bytes))]


def value_of(raw: object) -> object:
    return bytes.fromhex(raw["hex"]) if isinstance(raw, dict) else raw


def read_one(wire: bytes) -> Frame:
    reader = FrameReader(Keep())
    reader.allow_final_data()
    view = reader.buffers()[0]
    view[: len(wire)] = wire
    (frame,) = reader.advance(len(wire))
    return frame


@pytest.mark.parametrize("vector", VECTORS["frames"], ids=lambda vector: vector["name"])
def test_a_golden_frame_is_written_and_read(vector: dict[str, object]) -> None:
    frame_type = FrameType[str(vector["type"])]
    wire = bytes.fromhex(str(vector["wire"]))
    payload = bytes.fromhex(str(vector.get("payload", "")))
    flags = 0
    if "slices" in vector:
        slices = [Slice(**{name: value_of(raw) for name, raw in one.items()}) for one in vector["slices"]]  # type: ignore[attr-defined]
        body, flags = encode_slices(slices), len(slices) | (FLAG_FINAL if vector.get("final") else 0)
    else:
        kind = MESSAGES[frame_type]
        message = kind(**{name: value_of(raw) for name, raw in vector["fields"].items()})  # type: ignore[attr-defined]
        assert list(vector["fields"]) == [field.name for field in fields(kind)]  # type: ignore[arg-type, call-overload]
        body = message.encode()
    head = encode_head(
        frame_type,
        vector["request_id"],  # type: ignore[arg-type]
        body,
        payload_bytes=len(payload),
        epoch=vector["epoch"],  # type: ignore[arg-type]
        flags=flags,
    )
    assert (head + payload).hex() == wire.hex()
    frame = read_one(wire)
    assert (frame.type, frame.request_id, frame.epoch) == (frame_type, vector["request_id"], vector["epoch"])
    assert b"".join(frame.payload) == payload
    if "slices" in vector:
        assert frame.slices == slices
        assert frame.is_final is vector.get("final", False)
    else:
        assert kind.decode(frame.body) == message


def test_every_frame_type_has_a_golden_frame() -> None:
    assert {vector["type"] for vector in VECTORS["frames"]} == {kind.name for kind in FrameType}


def test_codes_are_those_of_the_tables() -> None:
    codes = VECTORS["codes"]
    assert codes["miss"] == {reason.name: reason.value for reason in MissReason}
    assert codes["refused"] == {reason.name: reason.value for reason in RefusedReason}
    assert codes["status"] == {status.name: status.value for status in ItemStatus}
    assert codes["error"] == {kind.__name__: code for code, kind in ERROR_CODES.items()}
    assert codes["frame"] == {kind.name: kind.value for kind in FrameType}
    taken = [*codes["miss"].values(), *codes["refused"].values(), *codes["status"].values()]
    assert len(set(taken)) == len(taken), "one status byte has one meaning"


@pytest.mark.parametrize("kind", sorted(ERROR_CODES.values(), key=lambda kind: kind.__name__))
def test_an_error_comes_back_as_what_it_was(kind: type[errors.KVStoreError]) -> None:
    back = error_of(code_of(kind("why")), "why")
    assert type(back) is kind
    assert str(back) == "why"


def test_errors_without_a_code_travel_as_their_nearest_kind() -> None:
    assert type(error_of(code_of(errors.ForkedClient("x")), "x")) is errors.Closed
    assert type(error_of(code_of(errors.Retryable("x")), "x")) is errors.Internal
    assert type(error_of(9999, "x")) is errors.Unavailable
