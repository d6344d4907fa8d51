"""What the tests of writes have in common: keys, and a layer-wise writer as its client speaks of it."""

from __future__ import annotations

from kvstore.engine.api import NamespaceRef
from kvstore.limits import SECOND_NS
from kvstore.server.batch import pack_u32
from kvstore.testing.dict_engine import DictEngine
from kvstore.testing.plane_lab import LabClient, results_of
from kvstore.types.checksum import crc_table
from kvstore.wire.header import FrameType
from kvstore.wire.messages import End, Result, WriterCommit, WriterOpen
from kvstore.wire.slices import NO_CONTENT_ID, Slice


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "little")


def stored(engine: DictEngine, namespace: NamespaceRef, number: int) -> bytes | None:
    record = engine.records.get((namespace.id, 0, key_of(number)))
    return None if record is None else bytes(record.data)


def opening(namespace: NamespaceRef, numbers: list[int], length: int, **fields: object) -> WriterOpen:
    plain: dict[str, object] = {
        "namespace": namespace.digest,
        "keys": b"".join(key_of(number) for number in numbers),
        "lengths": pack_u32([length] * len(numbers)),
        "block_bytes": pack_u32([4096]),
        "deadline_ns": 5 * SECOND_NS,
    }
    return WriterOpen(**(plain | fields))  # type: ignore[arg-type]


def write(client: LabClient, writer_id: int, value: bytes, start: int, stop: int) -> bytes:
    client.session.start(FrameType.WRITER_WRITE)
    piece = value[start:stop]
    one = Slice(writer_id, start, len(piece), 0, False, NO_CONTENT_ID, len(value), 4096, crc_table(piece, 4096))
    client.send_slices([one], piece, frame_type=FrameType.WRITER_WRITE)
    return client.expect(End).statuses


def commit(
    client: LabClient, writer_ids: list[int], values: list[bytes], **fields: object
) -> list[tuple[int, int, str]]:
    tables = b"".join(crc_table(value, 4096) for value in values)
    plain: dict[str, object] = {"writer_ids": pack_u32(writer_ids), "crc_tables": tables, "deadline_ns": 5 * SECOND_NS}
    client.start(WriterCommit(**(plain | fields)))  # type: ignore[arg-type]
    ended = []
    while (frame := client.receive()).type is FrameType.RESULT:
        ended += results_of(Result.decode(frame.body))
    return sorted(ended)
