"""Decision 24 on real nodes: a stale read is answered, a stale write refused, and a fenced node takes no write."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import pytest

from kvstore.cluster.view import View
from kvstore.errors import StaleView, Unavailable
from kvstore.limits import SECOND_NS
from kvstore.server.batch import pack_u32
from kvstore.testing.etcd_process import EtcdProcess
from kvstore.testing.plane_lab import LabClient, PlaneLab
from kvstore.testing.serve_process import ServeProcess
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore.types.results import ItemStatus, RefusedReason
from kvstore.wire.codec import unpack_plain
from kvstore.wire.header import FrameType
from kvstore.wire.messages import (
    Delete,
    Drop,
    End,
    Get,
    Result,
    ViewReply,
    ViewRequest,
    WriterCommit,
    WriterOpen,
    WriterOpened,
)

SPACE = Namespace(
    tenant="default", model="m", weights="w", layout=KVLayout.opaque(chunk_bytes=64 * 1024, chunk_tokens=1)
)
STORED, EXISTS, FENCED = ItemStatus.STORED, ItemStatus.EXISTS, RefusedReason.FENCED


class Line:
    """What a lab's client needs, with a real node at the other end."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)))
        self.client = LabClient(cast(PlaneLab, self), self.socket)
        self.client.hello()
        self.client.register(SPACE.manifest())

    def turn_until(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            assert select.select([self.socket], [], [], 20)[0], "the node does not answer"

    def view(self) -> View:
        reply = self.client.call(ViewRequest(known_epoch=0), ViewReply)
        return View.from_plain(unpack_plain(reply.view, what="view"))

    def put(self, number: int, *, epoch: int = 0) -> tuple[int, str]:
        """Status and detail. Raises StaleView."""
        self.client.start(self.client.offer(SPACE.digest, [bytes([number]) * 32], [b"v" * 5000]), epoch=epoch)
        return self.client.end_put([b"v" * 5000])[0]

    def get(self, number: int, *, epoch: int) -> tuple[bytes, int]:
        """What END says of it, and the epoch in the frame."""
        key = bytes([number]) * 32
        request = Get(namespace=SPACE.digest, keys=key, deadline_ns=10 * SECOND_NS, credit_bytes=1 << 20)
        self.client.start(request, epoch=epoch)
        while (frame := self.client.receive()).type is not FrameType.END:
            pass
        return End.decode(frame.body).statuses, frame.epoch


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdProcess]:
    with EtcdProcess(tmp_path / "etcd") as made:
        yield made


def serve(stack: ExitStack, folder: Path, etcd: EtcdProcess, name: str) -> ServeProcess:
    (folder / name).mkdir()
    place = ("--cluster", f"etcd://{etcd.members}/epochs", "--node-id", name, "--lease-ttl", "2s")
    return stack.enter_context(ServeProcess(folder / name, *place))


def until_it_takes_puts(line: Line, number: int) -> None:
    while line.put(number)[0] not in (STORED, EXISTS):
        pass  # until the view has the node it is fenced


def test_a_stale_read_is_answered_with_the_newer_epoch_and_a_stale_write_is_refused(
    tmp_path: Path, etcd: EtcdProcess
) -> None:
    with ExitStack() as stack:
        line = Line(serve(stack, tmp_path, etcd, "a").wait_ready().data[0])
        until_it_takes_puts(line, 1)
        old = line.view().epoch
        assert line.put(2, epoch=old)[0] == STORED
        serve(stack, tmp_path, etcd, "b").wait_ready()
        while (now := line.view()).epoch == old or len(now.targets) < 2:
            pass
        with pytest.raises(StaleView, match=str(old)):
            line.put(3, epoch=old)
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
        assert line.get(3, epoch=old)[0] != b"\0", "the refused write left nothing"
        status, epoch = line.get(2, epoch=old)
        assert (status, epoch >= now.epoch) == (b"\0", True)
        while (status_now := line.put(3, epoch=line.view().epoch)[0]) not in (STORED, EXISTS):
            assert status_now == FENCED


def test_a_fenced_node_refuses_each_kind_of_write_and_goes_on_reading(tmp_path: Path, etcd: EtcdProcess) -> None:
    with ExitStack() as stack:
        line = Line(serve(stack, tmp_path, etcd, "a").wait_ready().data[0])
        until_it_takes_puts(line, 1)
        opening = WriterOpen(
            namespace=SPACE.digest,
            keys=bytes([9]) * 32,
            lengths=pack_u32([4096]),
            block_bytes=pack_u32([4096]),
            deadline_ns=60 * SECOND_NS,
        )
        opened = line.client.call(opening, WriterOpened)
        assert list(opened.statuses) == [ItemStatus.GRANTED]
        etcd.kill_all()
        while (answer := line.put(2))[0] in (STORED, EXISTS):
            pass
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
        assert line.get(1, epoch=0)[0] == b"\0"
