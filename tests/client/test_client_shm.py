"""Memory that a client shares with `kvstore serve`: real processes, real drives, and clients that die or cheat."""

from __future__ import annotations

import os
import random
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.errors import InvalidRequest, Unavailable
from kvstore.limits import PAGE_BYTES, REGIONS_PER_CONNECTION_MAX, KiB, MiB
from kvstore.testing.metrics_page import metric, wait_for_metric
from kvstore.testing.serve_process import Ready, ServeProcess
from kvstore.transport.shm import create_memory
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore.types.results import MissReason, RefusedReason
from kvstore.wire.header import FrameType
from kvstore_client import Exists, Hit, KVClient, Miss, Refused, Stored
from kvstore_client.namespace_handle import BoundNamespace

CHUNK = 256 * KiB
COUNT = 16


def namespace_of(client: KVClient, model: str, chunk_bytes: int = CHUNK) -> BoundNamespace:
    layout = KVLayout.opaque(chunk_bytes=chunk_bytes, chunk_tokens=16)
    return client.namespace(Namespace(tenant="default", model=model, weights="w", layout=layout))


def noise(length: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(length)


@pytest.fixture(scope="module", params=["drive", "cache"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ready]:
    cache = "0" if request.param == "drive" else "64MiB"
    with ServeProcess(tmp_path_factory.mktemp("node"), "--cache", cache, "--capacity", "256MiB") as process:
        yield process.wait_ready()


@pytest.fixture
def client(served: Ready) -> Iterator[KVClient]:
    with KVClient.connect(served.grpc, transport="shm") as made:
        yield made


def buffers_of(memory: memoryview, size: int) -> list[memoryview]:
    return [memory[at : at + size] for at in range(0, len(memory), size)]


@pytest.mark.parametrize("size", [PAGE_BYTES, 64 * KiB, CHUNK, 5 * MiB])
def test_records_are_put_from_and_read_into_shared_memory(served: Ready, client: KVClient, size: int) -> None:
    count = 4 if size > MiB else COUNT
    ns = namespace_of(client, f"size {size} {os.urandom(4).hex()}", size)
    keys = ns.keys(list(range(16 * count)))
    memory = client.alloc(count * size)
    memory[:] = expected = noise(count * size, size)
    buffers = buffers_of(memory, size)
    assert all(isinstance(one, Stored) for one in ns.put(keys, buffers))
    assert set(ns.put(keys, buffers)) == {Exists()}
    memory[:] = bytes(len(memory))
    assert [one.length_bytes for one in ns.get_into(keys, buffers) if isinstance(one, Hit)] == [size] * count
    assert memory == expected
    assert metric(served, "kvstore_shared_memory_bytes") > 0
    assert set(client.transports().values()) == {"shm"}, "connections that only ask for the view are no targets"


def test_memory_that_is_not_shared_works_too(client: KVClient) -> None:
    ns = namespace_of(client, f"mixed {os.urandom(4).hex()}")
    keys = ns.keys(list(range(16 * 6)))
    values = [noise(CHUNK, seed) for seed in range(6)]
    memory = client.alloc(2 * CHUNK + PAGE_BYTES)
    memory[PAGE_BYTES : PAGE_BYTES + CHUNK] = values[0]
    sources = [memory[PAGE_BYTES : PAGE_BYTES + CHUNK], *values[1:]]
    assert all(isinstance(one, Stored) for one in ns.put(keys, sources))
    into = [
        memory[:CHUNK],
        bytearray(CHUNK),
        memory[CHUNK + 1 : 2 * CHUNK + 1],  # shared, but no pages of its own
        [bytearray(1000), bytearray(CHUNK - 1000)],
        bytearray(CHUNK),
        client.alloc(CHUNK),
    ]
    assert all(isinstance(one, Hit) for one in ns.get_into(keys, into))
    found = [b"".join(map(bytes, one)) if isinstance(one, list) else bytes(one) for one in into]
    assert found == values


def test_records_of_other_lengths_are_told_from_misses(client: KVClient) -> None:
    ns = namespace_of(client, f"lengths {os.urandom(4).hex()}")
    keys = ns.keys(list(range(16 * 3)))
    assert all(isinstance(one, Stored) for one in ns.put(keys[:2], [noise(CHUNK, 1), noise(1000, 2)]))
    memory = client.alloc(3 * CHUNK)
    buffers = [memory[:PAGE_BYTES], memory[CHUNK : 2 * CHUNK], memory[2 * CHUNK :]]
    results = ns.get_into(keys, buffers)
    assert isinstance(results[0], Miss)
    assert results[0].reason is MissReason.LAYOUT
    assert not any(memory[:CHUNK]), "a record that has no room is not written"
    assert isinstance(results[1], Hit)
    assert results[1].length_bytes == 1000
    assert bytes(memory[CHUNK : CHUNK + 1000]) == noise(1000, 2)
    assert isinstance(results[2], Miss)
    assert results[2].reason is MissReason.ABSENT


def test_tcp_never_shares_and_says_so(served: Ready) -> None:
    with KVClient.connect(served.grpc, transport="tcp") as client:
        ns = namespace_of(client, f"tcp {os.urandom(4).hex()}")
        memory = client.alloc(CHUNK)
        assert all(isinstance(one, Stored) for one in ns.put(ns.keys(list(range(16))), [memory]))
        assert set(client.transports().values()) == {"tcp: transport tcp is set"}


def test_an_unknown_transport_is_named(served: Ready, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequest, match="carrier pigeon"):
        KVClient.connect(served.grpc, transport="carrier pigeon")
    monkeypatch.setenv("KVSTORE_CLIENT_TRANSPORT", "smoke")
    with pytest.raises(InvalidRequest, match="smoke"):
        KVClient.connect(served.grpc)


def test_without_a_socket_auto_falls_back_and_shm_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ServeProcess(tmp_path, "--transport", "tcp") as process:
        ready = process.wait_ready()
        with KVClient.connect(ready.grpc, transport="auto") as client, caplog.at_level("INFO", "kvstore_client"):
            ns = namespace_of(client, "m")
            assert all(isinstance(one, Stored) for one in ns.put(ns.keys(list(range(16))), [client.alloc(CHUNK)]))
            assert client.stats()["shm_fallbacks"] > 0
            said = [one.getMessage() for one in caplog.records if "without shared memory" in one.getMessage()]
            assert len(said) == 1, "once, not for each connection"
            assert any("no socket" in words for words in client.transports().values())
        with KVClient.connect(ready.grpc, transport="shm") as client:
            ns = namespace_of(client, "m")
            (result,) = ns.put(ns.keys(list(range(16))), [bytes(CHUNK)])
            assert isinstance(result, Refused)
            assert "transport shm cannot be used" in result.detail
            (words,) = client.transports().values()
            assert words.startswith("none: transport shm cannot be used: the node has no socket"), words


def test_freed_memory_is_let_go_of(served: Ready, client: KVClient) -> None:
    ns = namespace_of(client, f"freed {os.urandom(4).hex()}")
    keys = ns.keys(list(range(16)))
    before = metric(served, "kvstore_shared_memory_bytes")
    for _ in range(20):
        memory = client.alloc(CHUNK)
        assert not any(isinstance(one, Refused) for one in ns.put(keys, [memory]))
        assert isinstance(ns.get_into(keys, [memory])[0], Hit)
        del memory
    # one at most for each connection: what was freed is told with the next call
    assert metric(served, "kvstore_shared_memory_bytes") <= before + 2 * CHUNK
    client.close()
    wait_for_metric(served, "kvstore_connections_shared", 0)
    wait_for_metric(served, "kvstore_shared_memory_bytes", 0)


def test_a_node_that_is_restarted_is_found_again(tmp_path: Path) -> None:
    ports = ("--grpc-port", str(free_port()), "--data-port", str(free_port()))
    with ServeProcess(tmp_path, "--capacity", "256MiB", *ports) as process:
        ready = process.wait_ready()
        client = KVClient.connect(ready.grpc, transport="auto")
        ns = namespace_of(client, "m")
        keys = ns.keys(list(range(16 * COUNT)))
        memory = client.alloc(COUNT * CHUNK)
        memory[:] = expected = noise(COUNT * CHUNK, 3)
        assert all(isinstance(one, Stored) for one in ns.put(keys, buffers_of(memory, CHUNK)))
        os.killpg(process.process.pid, signal.SIGKILL)
        process.wait_exit()
        process.ready_path.unlink()
        assert all(isinstance(one, Miss) for one in ns.get_into(keys, buffers_of(memory, CHUNK), deadline=1))
    with ServeProcess(tmp_path, "--capacity", "256MiB", *ports) as process:
        process.wait_ready()
        end = time.monotonic() + 20
        while not all(isinstance(one, Hit) for one in ns.get_into(keys, buffers_of(memory, CHUNK), deadline=2)):
            assert time.monotonic() < end
        assert memory == expected
        assert "shm" in client.transports().values()
        client.close()


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


# --- clients that die or cheat
VICTIM = """
    import os, sys
    from kvstore_client import KVClient, KVLayout, Namespace
    address, verb = sys.argv[1:]
    client = KVClient.connect(address, transport="shm")
    layout = KVLayout.opaque(chunk_bytes={chunk}, chunk_tokens=16)
    ns = client.namespace(Namespace(tenant="default", model="victim", weights="w", layout=layout))
    memory = client.alloc({count} * {chunk}, prefault=True)
    buffers = [memory[at : at + {chunk}] for at in range(0, len(memory), {chunk})]
    keys = ns.keys(list(range(16 * {count})))
    ns.put(keys, buffers)
    print("begins", flush=True)
    while True:
        if verb == "get":
            ns.get_into(keys, buffers)
        else:
            memory[:64] = os.urandom(64)
            ns.put(ns.keys_from_hashes([os.urandom(32) for _ in range({count})], algorithm="x"), buffers)
"""


@pytest.mark.parametrize("verb", ["get", "put"])
def test_a_client_that_is_killed_leaves_nothing_behind(served: Ready, verb: str) -> None:
    script = textwrap.dedent(VICTIM.format(chunk=CHUNK, count=32))
    for round_number in range(3):
        victim = subprocess.Popen(
            [sys.executable, "-c", script, served.grpc, verb], stdout=subprocess.PIPE, env=dict(os.environ)
        )
        assert victim.stdout is not None
        assert victim.stdout.readline() == b"begins\n"
        time.sleep(0.003 * round_number)  # anywhere in a call
        victim.kill()
        victim.wait()
        victim.stdout.close()
    wait_for_metric(served, "kvstore_connections_shared", 0)
    wait_for_metric(served, "kvstore_shared_memory_bytes", 0)
    wait_for_metric(served, "kvstore_staging_bytes", 0)
    with KVClient.connect(served.grpc, transport="shm") as client:
        ns = namespace_of(client, f"after {os.urandom(4).hex()}")
        memory = client.alloc(CHUNK)
        memory[:] = noise(CHUNK, 9)
        assert isinstance(ns.put(ns.keys(list(range(16))), [memory])[0], Stored)
        memory[:] = bytes(CHUNK)
        assert isinstance(ns.get_into(ns.keys(list(range(16))), [memory])[0], Hit)
        assert memory == noise(CHUNK, 9)


def test_bytes_that_change_after_the_offer_are_not_stored(served: Ready, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node copies, then checks its copy: what does not match the table is refused, never stored."""
    from kvstore_client import stores

    with KVClient.connect(served.grpc, transport="shm") as client:
        ns = namespace_of(client, f"changed {os.urandom(4).hex()}")
        keys = ns.keys(list(range(16 * 2)))
        memory = client.alloc(2 * CHUNK)
        memory[:] = noise(2 * CHUNK, 5)
        offer_from = stores.offer_from

        def change_then_offer(offer: object, places: bytes) -> object:
            memory[100] ^= 1  # after the checksums were made
            return offer_from(offer, places)  # type: ignore[arg-type]

        monkeypatch.setattr(stores, "offer_from", change_then_offer)
        results = ns.put(keys, buffers_of(memory, CHUNK))
        assert isinstance(results[0], Refused)
        assert results[0].reason is RefusedReason.INVALID
        assert isinstance(results[1], Stored)
        monkeypatch.undo()
        first, second = ns.get_into(keys, [bytearray(CHUNK), bytearray(CHUNK)])
        assert isinstance(first, Miss)
        assert isinstance(second, Hit)


def test_places_of_a_read_that_ends_too_early_are_taken_back(client: KVClient) -> None:
    """What a drive still writes after the return does not reach the caller."""
    ns = namespace_of(client, f"late {os.urandom(4).hex()}")
    keys = ns.keys(list(range(16 * COUNT)))
    memory = client.alloc(COUNT * CHUNK)
    memory[:] = expected = noise(COUNT * CHUNK, 6)
    buffers = buffers_of(memory, CHUNK)
    assert all(isinstance(one, Stored) for one in ns.put(keys, buffers))
    for round_number in range(30):
        memory[:] = bytes(len(memory))
        results = ns.get_into(keys, buffers, soft_deadline=0.0002 * (round_number + 1))
        late = [at for at, one in enumerate(results) if isinstance(one, Miss)]
        for at in late:
            buffers[at][:] = b"mine" * (CHUNK // 4)
        for at, one in enumerate(results):
            if isinstance(one, Hit):
                assert buffers[at] == expected[at * CHUNK : (at + 1) * CHUNK]
        ns.contains(keys)  # a round trip, in which a late read would land
        for at in late:
            assert bytes(buffers[at]) == b"mine" * (CHUNK // 4)
    assert all(isinstance(one, Hit) for one in ns.get_into(keys, buffers))
    assert memory == expected


class RawPeer:
    """A client of the wire that does what a test says."""

    def __init__(self, served: Ready) -> None:
        from kvstore.wire.frames import FrameReader
        from kvstore.wire.header import VERSION
        from kvstore.wire.messages import Feature, Hello, Welcome
        from kvstore.wire.shared import Local, LocalReply

        self._hello = Hello(
            version_min=VERSION,
            version_max=VERSION,
            features=Feature.SHARED_MEMORY,
            client_id=os.urandom(16),
            boot_id=bytes(16),
            token=b"",
            flow=0,
        )
        host, _, port = served.data[0].rpartition(":")
        self.socket = socket.create_connection((host, int(port)))
        self._reader = FrameReader()
        self._id = 0
        assert Feature.SHARED_MEMORY in Feature(Welcome.decode(self.call(self._hello)).features)
        reply = LocalReply.decode(self.call(Local()))
        self.socket.close()
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(reply.path)
        self._reader = FrameReader()
        self._id = 0
        Welcome.decode(self.call(self._hello))

    def call(self, message: object, *fds: int) -> bytes:
        """Sends a request, and gives the body of the answer. Raises what an ERROR says."""
        from kvstore.wire.failures import error_of
        from kvstore.wire.header import FrameType, encode_head
        from kvstore.wire.messages import ErrorReply

        head = encode_head(message.TYPE, self._id, message.encode())  # type: ignore[attr-defined]
        self._id += 1
        if fds:
            socket.send_fds(self.socket, [head], list(fds))
        else:
            self.socket.sendall(head)
        while True:
            count = self.socket.recvmsg_into(self._reader.buffers())[0]
            if not count:
                raise Unavailable("closed")
            for frame in self._reader.advance(count):
                if frame.type is FrameType.ERROR:
                    reply = ErrorReply.decode(frame.body)
                    raise error_of(reply.code, reply.text)
                return bytes(frame.body)


class Garbled:
    """A request that says anything."""

    def __init__(self, kind: FrameType, body: bytes) -> None:
        self.TYPE = kind
        self.body = body

    def encode(self) -> bytes:
        return self.body


def test_a_hostile_client_only_hurts_itself(served: Ready) -> None:
    from kvstore.errors import KVStoreError, Overloaded
    from kvstore.wire.messages import End
    from kvstore.wire.shared import GetInto, Place, Region, encode_places

    peer = RawPeer(served)
    unsealed = os.memfd_create("x")
    os.ftruncate(unsealed, 64 * KiB)
    small = create_memory(PAGE_BYTES)
    for fd in (unsealed, small, os.open("/dev/null", os.O_RDWR), os.open("/proc/self/exe", os.O_RDONLY)):
        with pytest.raises(InvalidRequest, match=r"refused|is no memfd"):
            peer.call(Region(region=1, length_bytes=64 * KiB), fd)
        os.close(fd)
    with pytest.raises(InvalidRequest, match="SCM_RIGHTS"):
        peer.call(Region(region=1, length_bytes=64 * KiB))
    good = create_memory(64 * KiB)
    for body in (b"\xc1", Region(region=1, length_bytes=1).encode()):
        with pytest.raises(InvalidRequest):
            peer.call(Garbled(Region.TYPE, body), good)
        with pytest.raises(InvalidRequest, match="SCM_RIGHTS"):
            peer.call(Region(region=1, length_bytes=64 * KiB))  # it does not get the other one's memory
    End.decode(peer.call(Region(region=1, length_bytes=64 * KiB), good))
    with pytest.raises(InvalidRequest, match="in use"):
        peer.call(Region(region=1, length_bytes=64 * KiB), good)
    for place in (Place(2, 0, 4096), Place(1, 60 * KiB, 8 * KiB), Place(1, 1, 10), Place(1, (1 << 64) - 4096, 4096)):
        with pytest.raises(InvalidRequest, match="region"):
            peer.call(GetInto(namespace=bytes(32), keys=bytes(32), deadline_ns=10**9, places=encode_places([place])))
    refused = 0
    for number in range(2, REGIONS_PER_CONNECTION_MAX + 20):
        try:
            peer.call(Region(region=number, length_bytes=4096), good)
        except Overloaded:
            refused += 1
    assert refused == 19
    os.close(good)
    peer.socket.sendall(struct.pack("<I", 0xFFFFFFFF) * 100)
    with pytest.raises((KVStoreError, OSError)):
        peer.call(Region(region=1, length_bytes=4096))
    peer.socket.close()
    wait_for_metric(served, "kvstore_connections_shared", 0)
    wait_for_metric(served, "kvstore_shared_memory_bytes", 0)


def test_alloc_says_once_that_its_memory_is_not_shared(
    served: Ready, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with KVClient.connect(served.grpc, transport="shm") as client:
        monkeypatch.setattr(client.memory, "allocate", lambda *_, **__: None)  # as where /dev/shm is full
        assert len(client.alloc(5000)) == len(client.alloc(5000)) == 5000
    assert caplog.text.count("5000 bytes are private memory although transport is shm") == 1
