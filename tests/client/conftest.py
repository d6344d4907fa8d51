"""A node made of threads and a dict, that can be told to misbehave: the client's counterpart on a real socket."""

from __future__ import annotations

import os
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from kvstore import limits
from kvstore.errors import InvalidRequest, KVStoreError, UnknownNamespace
from kvstore.limits import (
    BATCH_ITEMS_MAX,
    DROPS_AHEAD_MAX,
    FRAME_PAYLOAD_BYTES_MAX,
    INLINE_PUT_BYTES_MAX,
    SLICE_BYTES_MAX,
)
from kvstore.types.checksum import crc_table
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Manifest as StoredManifest
from kvstore.types.namespace import Namespace
from kvstore.types.results import ItemStatus, MissReason
from kvstore.wire import messages as m
from kvstore.wire.codec import pack_plain
from kvstore.wire.failures import code_of
from kvstore.wire.frames import Frame, FrameReader
from kvstore.wire.header import FrameType, encode_head
from kvstore.wire.messages import MESSAGES
from kvstore.wire.ranges import decode_ranges
from kvstore.wire.replicas import REPLICA_MESSAGES, Pull
from kvstore.wire.slices import FLAG_FINAL, Slice, encode_slices
from kvstore_client import KVClient, Stored
from tests.client.stored_chunks import SIZE, TOKENS

U32 = struct.Struct("<I")


@dataclass(kw_only=True)
class StoredRecord:
    """One record of the dict."""

    payload: bytes
    block_bytes: int
    content_id: bytes


class Gone(Exception):
    """The connection is over."""


@dataclass(kw_only=True)
class ScriptedNode:
    """Answers the data plane's verbs from a dict.

    Attributes:
        script: Called with the link and the frame before each request is answered; returns True when it answered.
        corrupt: Called with each outgoing DATA frame's parts; may change them.
        generation: That the last DROP has begun; 0 does not say.
        is_brief: Answers a GET of whole records that are all hits with one final DATA frame.
        calls: Verbs in the order in which they came.
    """

    records: dict[tuple[bytes, bytes], StoredRecord] = field(default_factory=dict)
    generation: int = 0
    manifests: set[bytes] = field(default_factory=set)
    wanted_copies: dict[bytes, int] = field(default_factory=dict)
    pulls: list[Pull] = field(default_factory=list)
    groups: list[bytes] = field(default_factory=list)
    pending: set[bytes] = field(default_factory=set)
    pins: set[int] = field(default_factory=set)
    pinning: bool = True
    writers: dict[int, tuple[bytes, bytes, int, bytearray]] = field(default_factory=dict)
    calls: list[FrameType] = field(default_factory=list)
    hellos: list[m.Hello] = field(default_factory=list)
    batch_items_max: int = BATCH_ITEMS_MAX
    slice_bytes: int = SLICE_BYTES_MAX
    epoch: int = 1
    is_brief: bool = False
    script: Callable[[Link, Frame], bool] | None = None
    garble: Callable[[list[Slice], list[bytes]], None] | None = None
    data: tuple[str, ...] = ()
    node_id: str = "scripted"
    boot_id: bytes = field(default_factory=lambda: os.urandom(16))
    next_id: int = 1
    lock: threading.Lock = field(default_factory=threading.Lock)
    links: list[Link] = field(default_factory=list)
    _listener: socket.socket | None = None
    port: int = 0

    def start(self) -> None:
        """Listens, on the same port as before if there was one."""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen(64)
        self.port = listener.getsockname()[1]
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def stop(self) -> None:
        """Stops listening and breaks every connection."""
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        for link in list(self.links):
            link.kill()
        self.links.clear()

    def restart(self, *, forget_manifests: bool = True) -> None:
        """As after kill -9: another boot id; records stay, pins and writers do not."""
        self.stop()
        self.boot_id = os.urandom(16)
        self.pins.clear()
        self.writers.clear()
        if forget_manifests:
            self.manifests.clear()
        self.start()

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self.port}"

    def view(self) -> bytes:
        """One target, this node."""
        target = {"id": "t0", "data": list(self.data or (self.address,)), "weight": 1.0, "state": "serving"}
        return pack_plain({"epoch": self.epoch, "node_id": "scripted", "targets": [target]})

    def count(self, verb: FrameType) -> int:
        """How often a verb came."""
        return self.calls.count(verb)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connected, _ = listener.accept()
            except OSError:
                return
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link = Link(self, connected)
            self.links.append(link)
            threading.Thread(target=link.serve, daemon=True).start()


class Link:
    """One connection of a ScriptedNode."""

    def __init__(self, node: ScriptedNode, connected: socket.socket) -> None:
        self.node = node
        self.socket = connected
        self.reader = FrameReader(self)
        self.frames: list[Frame] = []

    def place(self, frame: Frame) -> Sequence[memoryview]:
        """Payload of puts lands in memory of its own."""
        return [memoryview(bytearray(frame.payload_bytes))]

    def kill(self) -> None:
        """Breaks the connection with a reset."""
        with suppress(OSError):
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def serve(self) -> None:
        """Until the client goes."""
        with suppress(Gone, OSError):
            while True:
                frame = self.next_frame()
                self.node.calls.append(frame.type)
                if self.node.script is not None and self.node.script(self, frame):
                    continue
                try:
                    self.answer(frame)
                except KVStoreError as error:
                    self.send(frame, m.ErrorReply(code=code_of(error), text=str(error), closing=False))
        self.socket.close()

    def next_frame(self) -> Frame:
        """The next frame of the client."""
        while not self.frames:
            count = self.socket.recvmsg_into(self.reader.buffers())[0]
            if not count:
                raise Gone
            self.frames += self.reader.advance(count)
        return self.frames.pop(0)

    def send(self, request: Frame, message: m.Message) -> None:
        """One message of the answer."""
        head = encode_head(message.TYPE, request.request_id, message.encode(), epoch=self.node.epoch)
        self.socket.sendall(head)

    def send_data(self, request: Frame, slices: list[Slice], payloads: list[bytes], *, is_final: bool = False) -> None:
        """One DATA frame, garbled when the node was told to."""
        if self.node.garble is not None:
            self.node.garble(slices, payloads)
        payload = b"".join(payloads)
        head = encode_head(
            FrameType.DATA,
            request.request_id,
            encode_slices(slices),
            payload_bytes=len(payload),
            flags=len(slices) | (FLAG_FINAL if is_final else 0),
        )
        self.socket.sendall(head + payload)

    def answer(self, frame: Frame) -> None:
        """The right answer to any verb."""
        if frame.type is FrameType.WRITER_WRITE:
            self._writer_write(frame)
            return
        handler = getattr(self, f"_{frame.type.name.lower()}")
        handler(frame, (MESSAGES | REPLICA_MESSAGES)[frame.type].decode(frame.body))

    def _hello(self, frame: Frame, hello: m.Hello) -> None:
        self.node.hellos.append(hello)
        welcome = m.Welcome(
            version=1,
            features=(m.Feature.FINAL_DATA if self.node.is_brief else m.Feature.NONE) | m.Feature.PULL,
            node_id=self.node.node_id,
            boot_id=self.node.boot_id,
            epoch=self.node.epoch,
            body_bytes_max=4 << 20,
            payload_bytes_max=FRAME_PAYLOAD_BYTES_MAX,
            batch_items_max=self.node.batch_items_max,
            inline_put_bytes_max=INLINE_PUT_BYTES_MAX,
            put_credit_bytes=0,
        )
        self.send(frame, welcome)

    def _cancel(self, frame: Frame, _: m.Cancel) -> None:
        """The call that it would end is over."""

    def _view(self, frame: Frame, _: m.ViewRequest) -> None:
        self.send(frame, m.ViewReply(epoch=self.node.epoch, view=self.node.view()))

    def _manifest(self, frame: Frame, message: m.Manifest) -> None:
        digest = StoredManifest.decode(message.manifest).digest
        self.node.manifests.add(digest)
        self.node.wanted_copies[digest] = message.copies
        self.send(frame, m.End())

    def _status(self, namespace: bytes, key: bytes) -> int:
        if key in self.node.pending:
            return MissReason.PENDING
        return 0 if (namespace, key) in self.node.records else MissReason.ABSENT

    def _statuses(self, namespace: bytes, keys: bytes) -> bytes:
        return bytes(self._status(namespace, key) for key in split(keys))

    def _match(self, frame: Frame, message: m.Match) -> None:
        statuses = self._statuses(message.namespace, message.keys)
        self.node.groups.append(message.group)
        hits = [key for key, status in zip(split(message.keys), statuses, strict=True) if not status]
        hit_bytes = sum(len(self.node.records[message.namespace, key].payload) for key in hits)
        pin_id = 0
        if message.pin_ttl_ns and self.node.pinning:
            with self.node.lock:
                pin_id = self.node.next_id
                self.node.next_id += 1
                self.node.pins.add(pin_id)
        self.send(
            frame,
            m.MatchReply(
                statuses=statuses, pin_id=pin_id, pinned=pin_id > 0, hit_bytes=hit_bytes, load_ns=hit_bytes * 10
            ),
        )

    def _pull(self, frame: Frame, message: Pull) -> None:
        self.node.pulls.append(message)
        self.send(frame, m.End(statuses=bytes(len(message.keys) // 32)))

    def _unpin(self, frame: Frame, message: m.Unpin) -> None:
        self.node.pins.discard(message.pin_id)
        self.send(frame, m.End())

    def _wait(self, frame: Frame, message: m.Wait) -> None:
        self.send(frame, m.End(statuses=self._statuses(message.namespace, message.keys)))

    def _delete(self, frame: Frame, message: m.Delete) -> None:
        statuses = self._statuses(message.namespace, message.keys)
        for key in split(message.keys):
            self.node.records.pop((message.namespace, key), None)
        self.send(frame, m.End(statuses=statuses))

    def _drop(self, frame: Frame, message: m.Drop) -> None:
        self._require(message.namespace)
        for key in [key for key in self.node.records if key[0] == message.namespace]:
            del self.node.records[key]
        node = self.node
        if message.generation > node.generation + DROPS_AHEAD_MAX:
            raise InvalidRequest(f"DROP begins generation {message.generation}, too far from {node.generation}")
        if node.generation:  # else it does not say
            node.generation = max(node.generation + 1, message.generation)
        self.send(frame, m.End(value=node.generation))

    def _prefetch(self, frame: Frame, message: m.Prefetch) -> None:
        statuses = self._statuses(message.namespace, message.keys)
        self.send(frame, m.End(value=statuses.count(0)))

    def _get(self, frame: Frame, get: m.Get) -> None:
        ranges = decode_ranges(get)
        statuses = bytearray(self._statuses(get.namespace, get.keys))
        if self.node.is_brief and ranges is None and not any(statuses) and not get.content_ids:
            records = [self.node.records[get.namespace, key] for key in split(get.keys)]
            slices = [_whole_slice(item, record) for item, record in enumerate(records)]
            self.send_data(frame, slices, [record.payload for record in records], is_final=True)
            return
        for item, key in enumerate(split(get.keys)):
            wanted = get.content_ids[item * 16 : item * 16 + 16]
            if not statuses[item] and wanted not in (b"", bytes(16), self.node.records[get.namespace, key].content_id):
                statuses[item] = MissReason.ABSENT
            if statuses[item]:
                self.send_data(frame, [Slice(item, 0, 0, statuses[item], True, bytes(16), 0, 0, b"")], [])
                continue
            record = self.node.records[get.namespace, key]
            spans = [(0, len(record.payload))] if ranges is None else ranges[item if len(ranges) > 1 else 0]
            self._send_record(frame, item, record, spans)
        self.send(frame, m.End(statuses=bytes(statuses)))

    def _send_record(self, frame: Frame, item: int, record: StoredRecord, spans: list[tuple[int, int]]) -> None:
        size, total = record.block_bytes, len(record.payload)
        step = max(size, self.node.slice_bytes // size * size)
        pieces: list[tuple[int, int]] = []
        for offset, length in spans:
            low = offset // size * size
            high = min(total, -(-(offset + length) // size) * size)
            pieces += [(at, min(at + step, high)) for at in range(low, high, step)]
        for at, (low, high) in enumerate(pieces or [(0, 0)]):
            payload = record.payload[low:high]
            last = at >= len(pieces) - 1
            one = Slice(item, low, high - low, 0, last, record.content_id, total, size, crc_table(payload, size))
            self.send_data(frame, [one], [payload])

    def _require(self, namespace: bytes) -> None:
        if namespace not in self.node.manifests:
            raise UnknownNamespace("send the manifest")

    def _offer(self, frame: Frame, offer: m.Offer) -> None:
        self._require(offer.namespace)
        keys = split(offer.keys)
        lengths = [n for (n,) in U32.iter_unpack(offer.lengths)]
        blocks = [n for (n,) in U32.iter_unpack(offer.block_bytes)] * (len(keys) if len(offer.block_bytes) == 4 else 1)
        payloads: dict[int, bytes] = {}
        exists = [(offer.namespace, key) in self.node.records for key in keys]
        if offer.inline:
            whole, at = b"".join(frame.payload), 0
            for item, length in enumerate(lengths):
                payloads[item] = whole[at : at + length]
                at += length
        else:
            granted = [item for item, known in enumerate(exists) if not known and lengths[item]]
            self.send(frame, m.Grant(items=b"".join(map(U32.pack, granted))))
            parts: dict[int, bytes] = dict.fromkeys(granted, b"")
            while any(len(parts[item]) < lengths[item] for item in granted):
                data = self.next_frame()
                whole, at = b"".join(data.payload), 0
                for one in data.slices:
                    assert one.offset == len(parts[one.item])
                    parts[one.item] += whole[at : at + one.length_bytes]
                    at += one.length_bytes
            payloads = parts | {item: b"" for item, length in enumerate(lengths) if not length}
        tables, at = offer.crc_tables, 0
        statuses, ids = bytearray(), b""
        for item, key in enumerate(keys):
            words = 4 * -(-lengths[item] // blocks[item])
            table, at = tables[at : at + words], at + words
            if exists[item]:
                statuses.append(ItemStatus.EXISTS)
                ids += bytes(16)
                continue
            assert crc_table(payloads[item], blocks[item]) == table
            content_id = offer.content_ids[16 * item : 16 * item + 16] or os.urandom(16)
            self.node.records[offer.namespace, key] = StoredRecord(
                payload=payloads[item], block_bytes=blocks[item], content_id=content_id
            )
            statuses.append(ItemStatus.STORED if offer.wait else ItemStatus.RECEIVED)
            ids += content_id
        self.send(
            frame,
            m.Result(items=b"".join(map(U32.pack, range(len(keys)))), statuses=bytes(statuses), content_ids=ids),
        )
        self.send(frame, m.End())

    def _writer_open(self, frame: Frame, message: m.WriterOpen) -> None:
        self._require(message.namespace)
        ids, statuses = b"", bytearray()
        (block,) = U32.unpack(message.block_bytes)
        for key, (length,) in zip(split(message.keys), U32.iter_unpack(message.lengths), strict=True):
            if (message.namespace, key) in self.node.records:
                statuses.append(ItemStatus.EXISTS)
                ids += U32.pack(0)
                continue
            with self.node.lock:
                number = self.node.next_id
                self.node.next_id += 1
            self.node.writers[number] = (message.namespace, key, block, bytearray(length))
            self.node.pending.add(key)
            statuses.append(ItemStatus.GRANTED)
            ids += U32.pack(number)
        self.send(frame, m.WriterOpened(writer_ids=ids, statuses=bytes(statuses)))

    def _writer_write(self, frame: Frame) -> None:
        whole, at = b"".join(frame.payload), 0
        for one in frame.slices:
            _, _, block, memory = self.node.writers[one.item]
            payload = whole[at : at + one.length_bytes]
            at += one.length_bytes
            assert one.offset % block == 0
            assert crc_table(payload, block) == one.crcs
            memory[one.offset : one.offset + len(payload)] = payload
        self.send(frame, m.End())

    def _writer_commit(self, frame: Frame, message: m.WriterCommit) -> None:
        at, count = 0, len(message.writer_ids) // 4
        for item, (number,) in enumerate(U32.iter_unpack(message.writer_ids)):
            namespace, key, block, memory = self.node.writers.pop(number)
            words = 4 * -(-len(memory) // block)
            assert crc_table(memory, block) == message.crc_tables[at : at + words]
            at += words
            self.node.pending.discard(key)
            self.node.records[namespace, key] = StoredRecord(
                payload=bytes(memory),
                block_bytes=block,
                content_id=message.content_ids[16 * item :][:16] or os.urandom(16),
            )
        items = b"".join(map(U32.pack, range(count)))
        self.send(frame, m.Result(items=items, statuses=bytes([ItemStatus.STORED]) * count))
        self.send(frame, m.End())

    def _writer_abort(self, frame: Frame, message: m.WriterAbort) -> None:
        for (number,) in U32.iter_unpack(message.writer_ids):
            _, key, _, _ = self.node.writers.pop(number)
            self.node.pending.discard(key)
        self.send(frame, m.End())


def _whole_slice(item: int, record: StoredRecord) -> Slice:
    total, size = len(record.payload), record.block_bytes
    return Slice(item, 0, total, 0, True, record.content_id, total, size, crc_table(record.payload, size))


def split(keys: bytes) -> list[bytes]:
    """A blob of keys, one by one."""
    return [keys[at : at + 32] for at in range(0, len(keys), 32)]


class Nodes:
    """Scripted nodes with one view of all."""

    def __init__(self, nodes: list[ScriptedNode]) -> None:
        self.nodes = nodes
        self.epoch = 0
        self.show()

    def show(
        self, *, copies: int = 1, states: dict[int, str] | None = None, previous: list[dict] | None = None
    ) -> None:
        self.epoch += 1
        targets = [
            {
                "id": f"t{at}",
                "data": [one.address],
                "weight": 1.0,
                "state": (states or {}).get(at, "serving"),
                "node_id": f"n{at}",
            }
            for at, one in enumerate(self.nodes)
            if (states or {}).get(at) != "away"
        ]
        view = {
            "epoch": self.epoch,
            "node_id": "",
            "cluster": "c",
            "targets": targets,
            "replicas": {"copies": copies, "head_copies": copies},
            "previous": [{"epoch": self.epoch, "keep_ns": 10**9, "weights": weights} for weights in previous or []],
        }
        packed = pack_plain(view)
        for at, one in enumerate(self.nodes):
            one.node_id = f"n{at}"
            one.epoch = self.epoch
            one.view = lambda: packed

    def clear_calls(self) -> None:
        for one in self.nodes:
            one.calls.clear()

    def counts(self, verb: FrameType) -> list[int]:
        return [one.count(verb) for one in self.nodes]


@pytest.fixture
def node() -> Iterator[ScriptedNode]:
    """A node that behaves, until it is told otherwise."""
    made = ScriptedNode()
    made.start()
    yield made
    made.stop()


@pytest.fixture
def opaque() -> Namespace:
    """Chunks of plain bytes, at most 300,000 each."""
    layout = KVLayout.opaque(chunk_bytes=300_000, chunk_tokens=16)
    return Namespace(tenant="default", model="opaque", weights="w1", layout=layout)


@pytest.fixture
def cluster(node: ScriptedNode) -> Iterator[Nodes]:
    """Three nodes that behave, with one view of all."""
    made = [node, ScriptedNode(), ScriptedNode()]
    for one in made[1:]:
        one.start()
    yield Nodes(made)
    for one in made[1:]:
        one.stop()


@pytest.fixture
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of the times after which a target is taken for dead."""
    for name in (
        "planned_read.LAST_SILENCE_NS",
        "rounds.CONNECT_NS_MAX",
        "rounds.BREAKER_SILENCE_NS",
        "retry.BREAKER_SILENCE_NS",
        "retry.DOUBT_NS",
    ):
        monkeypatch.setattr(f"kvstore_client.{name}", getattr(limits, name.partition(".")[2]) // 8)


@pytest.fixture
def client(node):
    with KVClient.connect(node.address, deadline=20) as made:
        yield made


@pytest.fixture
def stored(client, opaque):
    """A namespace with eight chunks of SIZE bytes, their keys and payloads."""
    ns = client.namespace(opaque)
    keys = ns.keys(TOKENS)
    payloads = [random.Random(at).randbytes(SIZE) for at in range(8)]
    assert all(isinstance(one, Stored) for one in ns.put(keys, payloads))
    return ns, keys, payloads
