"""Decision 24 on real nodes: a stale read is answered, a stale write refused, and a fenced node takes no write."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from kvstore.errors import StaleView, Unavailable
from kvstore.limits import SECOND_NS
from kvstore.server.batch import pack_u32
from kvstore.testing.etcd_process import EtcdProcess
from kvstore.testing.node_line import NodeLine
from kvstore.testing.serve_process import ServeProcess
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore.types.results import ItemStatus, RefusedReason
from kvstore.wire.messages import (
    Delete,
    Drop,
    End,
    Result,
    WriterCommit,
    WriterOpen,
    WriterOpened,
)

SPACE = Namespace(
    tenant="default", model="m", weights="w", layout=KVLayout.opaque(chunk_bytes=64 * 1024, chunk_tokens=1)
)
STORED, EXISTS, FENCED = ItemStatus.STORED, ItemStatus.EXISTS, RefusedReason.FENCED


VALUE = b"v" * 5000
LEASE_SECONDS = 2


def key_of(number: int) -> bytes:
    return bytes([number]) * 32


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdProcess]:
    with EtcdProcess(tmp_path / "etcd") as made:
        yield made


def serve(stack: ExitStack, folder: Path, etcd: EtcdProcess, name: str) -> ServeProcess:
    (folder / name).mkdir()
    place = ("--cluster", f"etcd://{etcd.members}/epochs", "--node-id", name, "--lease-ttl", f"{LEASE_SECONDS}s")
    return stack.enter_context(ServeProcess(folder / name, *place))


def until_it_takes_puts(line: NodeLine, number: int) -> None:
    while line.put(key_of(number), VALUE)[0] not in (STORED, EXISTS):
        pass  # until the view has the node it is fenced


def put_by_newest_view(line: NodeLine, number: int) -> int:
    """Until it is stored; the epoch that it was planned with. The view may change meanwhile, and the node be fenced."""
    while True:
        epoch = line.view().epoch
        with suppress(StaleView):
            status = line.put(key_of(number), VALUE, epoch=epoch)[0]
            if status in (STORED, EXISTS):
                return epoch
            assert status == FENCED


def test_a_stale_read_is_answered_with_the_newer_epoch_and_a_stale_write_or_delete_is_refused(
    tmp_path: Path, etcd: EtcdProcess
) -> None:
    with ExitStack() as stack:
        line = NodeLine(serve(stack, tmp_path, etcd, "a").wait_ready().data[0], SPACE)
        until_it_takes_puts(line, 1)
        old = put_by_newest_view(line, 2)
        serve(stack, tmp_path, etcd, "b").wait_ready()
        while (now := line.view()).epoch == old or len(now.targets) < 2:
            pass
        with pytest.raises(StaleView, match=str(old)):
            line.put(key_of(3), VALUE, epoch=old)
        opening = WriterOpen(
            namespace=SPACE.digest,
            keys=bytes(32),
            lengths=pack_u32([4096]),
            block_bytes=pack_u32([4096]),
            deadline_ns=SECOND_NS,
        )
        line.client.start(opening, epoch=old)
        with pytest.raises(StaleView):
            line.client.receive()
        for message in (Delete(namespace=SPACE.digest, keys=key_of(2)), Drop(namespace=SPACE.digest)):
            with pytest.raises(StaleView, match=str(old)):
                line.client.call(message, End, epoch=old)
        assert line.get(key_of(3), epoch=old)[0], "the refused write left nothing"
        status, epoch = line.get(key_of(2), epoch=old)
        assert (status, epoch >= now.epoch) == (0, True)
        assert put_by_newest_view(line, 3) > old


def test_a_fenced_node_refuses_each_kind_of_write_and_goes_on_reading(tmp_path: Path, etcd: EtcdProcess) -> None:
    with ExitStack() as stack:
        line = NodeLine(serve(stack, tmp_path, etcd, "a").wait_ready().data[0], SPACE)
        until_it_takes_puts(line, 1)
        opening = WriterOpen(
            namespace=SPACE.digest,
            keys=bytes([9]) * 32,
            lengths=pack_u32([4096]),
            block_bytes=pack_u32([4096]),
            deadline_ns=60 * SECOND_NS,
        )
        while list((opened := line.client.call(opening, WriterOpened)).statuses) != [ItemStatus.GRANTED]:
            assert list(opened.statuses) == [FENCED], "it may lose its lease for a moment"
        etcd.kill_all()
        killed = time.monotonic()
        while (answer := line.put(key_of(2), VALUE))[0] in (
            STORED,
            EXISTS,
        ) or time.monotonic() < killed + LEASE_SECONDS:
            pass  # a renewal from before may be heard of late: after a whole lease none is left
        assert (answer[0], "node a is fenced" in answer[1]) == (FENCED, True)
        assert list(line.client.call(opening, WriterOpened).statuses) == [FENCED]
        commit = WriterCommit(
            writer_ids=opened.writer_ids, crc_tables=bytes(4), deadline_ns=SECOND_NS, durability=0, wait=1
        )
        line.client.start(commit)
        assert list(line.client.expect(Result).statuses) == [FENCED]
        line.client.expect(End)
        for forbidden in (Delete(namespace=SPACE.digest, keys=bytes([1]) * 32), Drop(namespace=SPACE.digest)):
            with pytest.raises(Unavailable, match="is fenced"):
                line.client.call(forbidden, End)
        assert line.get(key_of(1))[0] == 0
