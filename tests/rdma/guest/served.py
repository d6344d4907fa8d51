"""`kvstore serve --transport rdma` on one machine, a client on another: python -m tests.rdma.guest.served ROLE

The client puts and gets, compares every byte, and breaks what can break: a peer in mid-transfer, a key, a region, the
limit of locked memory, the worker, the wire. It asks the node's side for what only happens there by lines over TCP,
on a second wire.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, ParamSpec, TypeVar

import numpy as np
import pytest

from kvstore.limits import KiB, MiB
from kvstore.testing.serve_process import Ready, ServeProcess
from kvstore.transport.rdma.backends import LIBRARY_VARIABLE, Backend
from kvstore.transport.rdma.regions import HeldMemory
from kvstore.transport.tcp import listen_tcp
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore_client import Hit, KVClient, Stored
from kvstore_client.namespace_handle import BoundNamespace
from kvstore_client.rdma import RdmaPort
from tests.rdma.network import ADDRESSES, ASIDE_ADDRESSES, GID_INDEX
from tests.rdma.served_suite import Node, Way

CONTROL_PORT: Final = 7499
TCP_OF: Final = {Backend.IBVERBS: (ASIDE_ADDRESSES[0], 7400), Backend.PYVERBS: (ADDRESSES[0], 7500)}
"""Where commands go: on a wire of their own, which is there when the wire of RDMA is not; or on the same one."""
CHUNK: Final = 256 * KiB
COUNT: Final = 16
TOTAL: Final = COUNT * CHUNK
WAIT_S: Final = 300
WIRE_RATIO_MAX: Final = 1.03
TRIES: Final = 5
RATE_AGAIN: Final = 0.8  # of what it was before
RETRY_EXCEEDED: Final = "retry_exceeded_err"  # a counter of rxe
PORT: Final = Path("/sys/class/infiniband/rxe0/ports/1")
PORT_STATE: Final = PORT / "state"  # "4: ACTIVE"
POLL_S: Final = 0.05
SIOCGIFFLAGS: Final = 0x8913
SIOCSIFFLAGS: Final = 0x8914
IFF_UP: Final = 1
GUEST: Final = Path(__file__).parent
ETH_P_ALL: Final = 3
ETHERNET_BYTES: Final = 14
SO_RCVBUFFORCE: Final = 33
ROCE_PORT: Final = 4791  # of UDP (RoCEv2)
NOBODY: Final = 65534
LOCKED_BYTES: Final = 8 * MiB
P = ParamSpec("P")
T = TypeVar("T")


# --- the node's side ----------------------------------------------------------------------------------------------
def node() -> None:
    """Serves the client that comes for each library's node, one after the other."""
    listening = listen_tcp(ASIDE_ADDRESSES[0], CONTROL_PORT)
    listening.settimeout(WAIT_S)
    later = list(Backend)
    with contextlib.ExitStack() as stack:
        started: list[ServeProcess] = []

        def start_next() -> None:
            if later:
                started.append(stack.enter_context(start(later.pop(0))))

        start_next()
        while started:
            obey(started[0], listening, start_next)
            del started[0]


def start(backend: Backend) -> ServeProcess:
    """A node that uses this library."""
    folder = Path("/run/tmp") / backend.value
    folder.mkdir()
    host, port = TCP_OF[backend]
    addresses = ["--host", host, "--insecure", "", "--grpc-port", str(port), "--data-port", str(port + 1)]
    usual = ["--transport", "rdma", "--staging", "48MiB", "--capacity", "96MiB", *addresses]
    usual += ["--cache", "32MiB" if backend is Backend.IBVERBS else "0"]
    return ServeProcess(folder, *usual, environment={LIBRARY_VARIABLE: backend.value})


def obey(it: ServeProcess, listening: socket.socket, start_next: Callable[[], None]) -> None:
    """Does what the next client asks for, for as long as it wants the node; on its word the next one starts."""
    ready = it.wait_ready(seconds=WAIT_S)
    assert "RDMA: rxe0:1" in it.log, it.log
    connected, _ = listening.accept()
    connected.settimeout(None)
    with connected, connected.makefile("rw") as lines:
        for line in lines:
            if line == "quit\n":
                break
            if line == "start-next\n":
                start_next()
            lines.write(json.dumps(carry_out(line.split(), ready)) + "\n")
            lines.flush()
    it.terminate()
    assert it.wait_exit() == 0, it.log
    assert "Traceback" not in it.log, it.log


def carry_out(words: list[str], ready: Ready) -> object:
    """What the client asks for."""
    if words[0] == "metrics":
        text = urllib.request.urlopen(f"http://{ready.metrics}/metrics", timeout=60).read().decode()
        return {
            name: float(value)
            for name, value in re.findall(r"^kvstore_rdma_(\w+?)(?:_total)? ([0-9.e+]+)$", text, re.M)
        }
    if words[0] == "start-next":
        return 0
    if words[0] == "count":
        return counter_of(words[1])
    if words[0] == "signal-worker":
        children = Path(f"/proc/{ready.pid}/task/{ready.pid}/children").read_text().split()
        for child in children:
            os.kill(int(child), int(words[1]))
        return len(children)
    subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # of perftest
    return 0


# --- the client's side --------------------------------------------------------------------------------------------
class Bench:
    """A client with what it has stored, and the line to the node's side."""

    def __init__(self, backend: Backend) -> None:
        end = time.monotonic() + WAIT_S
        while True:
            try:
                self._held = socket.create_connection((ASIDE_ADDRESSES[0], CONTROL_PORT), 2)
                break
            except OSError:
                assert time.monotonic() < end, "the node's side never listened"
                time.sleep(0.2)
        self._held.settimeout(WAIT_S)
        self._lines = self._held.makefile("rw")
        self.ask("metrics")  # answered once it serves
        self.client = connect(*TCP_OF[backend])
        self.values = np.random.default_rng(5).integers(0, 256, (COUNT, CHUNK), np.uint8)
        self.ns = namespace_of(self.client)
        self.keys = self.ns.keys(list(range(16 * COUNT)))

    def ask(self, line: str) -> dict[str, float]:
        self._lines.write(line + "\n")
        self._lines.flush()
        answer = json.loads(self._lines.readline())
        return answer if isinstance(answer, dict) else {"answer": answer}

    def quit(self) -> None:
        self.client.close()
        self._lines.write("quit\n")
        self._lines.flush()

    @property
    def port(self) -> RdmaPort:
        [port] = self.client.session().core.rdma._open_ports()
        return port

    def get(self, memory: np.ndarray) -> bool:
        """Reads all; whether all were hits. A hit is compared."""
        memory[:] = 0
        outcomes = self.ns.get_into(self.keys, list(memory))
        for at, outcome in enumerate(outcomes):
            assert not isinstance(outcome, Hit) or np.array_equal(memory[at], self.values[at]), f"wrong bytes in {at}"
        return all(isinstance(one, Hit) for one in outcomes)

    def until_placed(self, memory: np.ndarray, what: str) -> None:
        """Until payload goes one-sided again, whole."""
        end = time.monotonic() + WAIT_S
        while True:
            before = self.ask("metrics")
            if self.get(memory):
                after = self.ask("metrics")
                if after.get("placed_bytes", 0) - before.get("placed_bytes", 0) == TOTAL:
                    return
            assert time.monotonic() < end, f"RDMA did not come back after {what}: {self.client.transports()}"
            time.sleep(0.1)


class NodeElsewhere:
    """`served_suite.Node`, and the fixture that gives it."""

    def __init__(self, bench: Bench, backend: Backend) -> None:
        host, port = TCP_OF[backend]
        self.way = Way(transport="rdma", says="rdma rxe0:1")
        self.address = f"{host}:{port + 1}"
        self._bench = bench
        self._lock = threading.Lock()

    def signal_worker(self, number: int) -> None:
        with self._lock:
            assert self._bench.ask(f"signal-worker {int(number)}")["answer"] == 1

    def moved_bytes(self) -> tuple[float, float]:
        with self._lock:
            found = self._bench.ask("metrics")
        return found["placed_bytes"], found["pulled_bytes"]

    @pytest.fixture(scope="session")
    def node_elsewhere(self) -> Node:
        return self


def connect(host: str, port: int) -> KVClient:
    return KVClient.connect(f"{host}:{port}", transport="rdma", deadline=60)


def namespace_of(client: KVClient, model: str = "m") -> BoundNamespace:
    layout = KVLayout.opaque(chunk_bytes=CHUNK, chunk_tokens=16)
    return client.namespace(Namespace(tenant="default", model=model, weights="w", layout=layout))


def wire_bytes(way: str) -> int:
    return sum(int(Path(f"/sys/class/net/{name}/statistics/{way}_bytes").read_text()) for name in ("eth0", "eth1"))


def packets(way: str) -> int:
    name = {"tx": "sent_pkts", "rx": "rcvd_pkts"}[way]
    return counter_of(name)


def counter_of(name: str) -> int:
    return int((PORT / "hw_counters" / name).read_text())


def client() -> None:
    memory = np.zeros((COUNT, CHUNK), np.uint8)
    for backend in Backend:
        os.environ[LIBRARY_VARIABLE] = backend.value
        bench = timed(Bench, backend)
        timed(moved_both_ways, bench, memory, backend)
        bench.ask("start-next")  # a start takes long: beside what follows
        timed(suite, bench, backend)
        timed(wrong_key, bench)
        timed(freed_in_child, bench, memory)
        if backend is Backend.IBVERBS:
            timed(marked, bench, memory)
            timed(region_gone, bench)
            timed(killed_reader, bench, memory)
            timed(short_of_locked_memory, bench)
            timed(wire_dead, bench, memory)
            timed(perftest, bench)
        timed(bench.quit)


def timed(part: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Runs it, and prints how long it took."""
    begin = time.monotonic()
    try:
        return part(*arguments, **named)
    finally:
        print(f"{part.__name__}: {time.monotonic() - begin:.1f} s")


def moved_both_ways(bench: Bench, memory: np.ndarray, backend: Backend) -> None:
    """All of it goes one-sided, once. A machine that stood still for a while sends packets again: then once more."""

    def put(attempt: int) -> None:
        bench.ns = namespace_of(bench.client, f"m{attempt}")
        bench.keys = bench.ns.keys(list(range(16 * COUNT)))
        outcomes = bench.ns.put(bench.keys, list(bench.values))
        assert all(isinstance(one, Stored) for one in outcomes), outcomes

    def get(_: int) -> None:
        assert bench.get(memory)

    put(TRIES)  # opens the port, and makes a pair
    put_rate, put_ratio = best_of(bench, put, "tx", "pulled_bytes")
    get(0)  # makes the other pair, and registers
    get_rate, get_ratio = best_of(bench, get, "rx", "placed_bytes")
    assert set(bench.client.transports().values()) <= {"rdma rxe0:1", "tcp: transport tcp is set"}
    assert bench.ask("metrics")["pairs"] <= 2
    print(
        f"measured: served, {backend.value}: put {put_rate:.1f} MB/s, get {get_rate:.1f} MB/s; "
        f"wire bytes {put_ratio:.3f} and {get_ratio:.3f} of the payload"
    )


def best_of(bench: Bench, move: Callable[[int], None], way: str, metric: str) -> tuple[float, float]:
    """MB/s of a move of TOTAL bytes, and wire bytes for each of them: of the first that nothing disturbed."""
    ratio = 0.0
    for attempt in range(TRIES):
        before, wire, sent, begin = bench.ask("metrics"), wire_bytes(way), packets(way), time.monotonic()
        move(attempt)
        rate = TOTAL / (time.monotonic() - begin) / 1e6
        ratio, count = (wire_bytes(way) - wire) / TOTAL, packets(way) - sent
        after = bench.ask("metrics")
        is_whole = all(after[name] - before[name] == size for name, size in ((metric, TOTAL), ("fallback_bytes", 0)))
        if is_whole and ratio <= WIRE_RATIO_MAX and count >= TOTAL / 4096:
            return rate, ratio
    raise AssertionError(f"{ratio:.3f} bytes on the wire for each of the payload: {before} {after}")


def suite(bench: Bench, backend: Backend) -> None:
    """The tests that every way of payload passes."""
    light = [
        "-p",
        "no:cacheprovider",
        "-p",
        "no:hypothesispytest",
        f"--confcutdir={GUEST.parent}",
        f"--timeout={WAIT_S}",
    ]
    counts = Counts()
    wanted = [str(GUEST / "test_served_rdma.py"), "-q", "--durations=4", *light]
    assert pytest.main(wanted, plugins=[NodeElsewhere(bench, backend), counts]) == 0
    assert counts.passed > 15
    assert not counts.skipped
    print(f"measured: the suite of served ways, {backend.value}: {counts.passed} tests passed")


class Counts:
    """How many tests of a run passed, and were skipped."""

    def __init__(self) -> None:
        self.passed = self.skipped = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed += report.when == "call" and report.passed
        self.skipped += report.skipped


def marked(bench: Bench, memory: np.ndarray) -> None:
    """Both machines mark their packets: reads as the urgent lane, writes as the other one (RFC 2474)."""
    bench.until_placed(memory, "what was before")
    with sniffed() as found:
        assert isinstance(bench.ns.get_into(bench.keys[:1], [memory[0]])[0], Hit)
    assert found == {(address, 26 << 2 | 2) for address in ADDRESSES}, found
    other = namespace_of(bench.client, "marked")
    with sniffed() as found:
        assert isinstance(other.put(other.keys(list(range(16))), [bench.values[0]])[0], Stored)
    assert found == {(address, 18 << 2 | 2) for address in ADDRESSES}, found


@contextlib.contextmanager
def sniffed() -> Iterator[set[tuple[str, int]]]:
    """Afterwards: source and type of service (DSCP and ECN) of each RDMA packet that passed meanwhile."""
    found: set[tuple[str, int]] = set()
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL)) as raw:
        raw.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 16 * MiB)
        raw.bind(("eth0", ETH_P_ALL))
        yield found
        with contextlib.suppress(BlockingIOError):
            while True:
                packet = raw.recv(64, socket.MSG_DONTWAIT)[ETHERNET_BYTES:]
                is_udp = len(packet) > 24 and packet[0] >> 4 == 4 and packet[9] == socket.IPPROTO_UDP
                if is_udp and int.from_bytes(packet[22:24], "big") == ROCE_PORT:
                    found.add((socket.inet_ntoa(packet[12:16]), packet[1]))


def held_by(bench: Bench, memory: np.ndarray) -> HeldMemory:
    held = bench.port.cache.hold(memoryview(memory).cast("B"))
    bench.port.cache.release(held)
    return held


def wrong_key(bench: Bench) -> None:
    other = np.zeros((COUNT, CHUNK), np.uint8)
    bench.until_placed(np.zeros((COUNT, CHUNK), np.uint8), "what was before")
    held = held_by(bench, other)
    [right] = held.descriptors
    held.descriptors = [right._replace(remote_key=right.remote_key ^ 0x1F00)]
    before = bench.ask("metrics")
    assert bench.get(other)
    after = bench.ask("metrics")
    assert after["fallback_bytes"] > before["fallback_bytes"]
    held.descriptors = [right]
    bench.until_placed(other, "a wrong key was told anew")


def region_gone(bench: Bench) -> None:
    other = np.zeros((COUNT, CHUNK), np.uint8)
    bench.until_placed(np.zeros((COUNT, CHUNK), np.uint8), "what was before")
    held_by(bench, other).deregister()
    before = bench.ask("metrics")
    assert bench.get(other)
    after = bench.ask("metrics")
    assert after["fallback_bytes"] > before["fallback_bytes"]
    assert after["pairs_broken"] >= before["pairs_broken"]


def in_child(work: Callable[[], None]) -> int:
    """Runs it in a fork, whose client is its own; its process id."""
    child = os.fork()
    if not child:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return child


def freed_in_child(bench: Bench, memory: np.ndarray) -> None:
    """What a child lets go of the parent keeps."""

    def let_go() -> None:
        vars(bench).clear()
        gc.collect()

    bench.until_placed(memory, "the start")
    os.waitpid(in_child(let_go), 0)
    bench.until_placed(memory, "a child had let go of everything")


def killed_reader(bench: Bench, memory: np.ndarray) -> None:
    ours, theirs = os.pipe()

    def read_on() -> None:
        while True:
            assert bench.get(memory)  # a private copy of its pages
            os.write(theirs, b".")

    child = in_child(read_on)
    assert os.read(ours, 1) == b"."
    time.sleep(0.05)  # it is in the middle of the next one
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    bench.until_placed(memory, "a client was killed")


def short_of_locked_memory(bench: Bench) -> None:
    def read() -> None:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (LOCKED_BYTES, LOCKED_BYTES))
        os.setuid(NOBODY)
        large = np.zeros((4 * COUNT, CHUNK), np.uint8)
        assert bench.get(large[:COUNT])
        said = "; ".join(bench.client.transports().values())
        assert "ulimit -l unlimited" in said, said
        bench.until_placed(np.zeros((COUNT, CHUNK), np.uint8), "too much memory")

    child = in_child(read)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "the client with 8 MiB of locked memory failed"


def wire_dead(bench: Bench, memory: np.ndarray) -> None:
    """Nothing of RDMA leaves this machine until a pair breaks, and its port goes down and up; then all is as before.

    Packets are dropped, since the emulator may hold back those of a link that is down, and software RDMA waits for
    them. Commands have their own wire, so reads go on, in frames, and no pair stays whole for lack of work.
    """
    rate_before = max(rate_of(bench, memory) for _ in range(3))
    before = bench.ask("metrics")
    exceeded = bench.ask(f"count {RETRY_EXCEEDED}")["answer"]
    areas = [np.zeros((COUNT, CHUNK), np.uint8) for _ in range(2)]
    with reading(bench, areas) as done:
        begin = time.monotonic()
        with dropped_packets():
            assert until(lambda: bench.ask("metrics")["pairs_broken"] > before["pairs_broken"], WAIT_S), "no pair broke"
            broke_s = time.monotonic() - begin
            assert bench.ask(f"count {RETRY_EXCEEDED}")["answer"] > exceeded
            at = len(done)
            assert until(lambda: len(done) >= at + 2 * len(areas), WAIT_S), "reads did not go on in frames"
            for is_up in (False, True):
                set_wire(is_up=is_up)
    begin = time.monotonic()
    bench.until_placed(memory, "the wire was dead")
    again_s = time.monotonic() - begin
    rates = [rate_of(bench, memory)]
    while max(rates) < rate_before * RATE_AGAIN:
        assert time.monotonic() < begin + WAIT_S, f"{rates} MB/s, before {rate_before}"
        rates.append(rate_of(bench, memory))
    print(
        f"measured: wire dead: a pair broke after {broke_s:.1f} s, RDMA again {again_s:.1f} s after the reads, "
        f"get {max(rates):.1f} MB/s at the {len(rates)}. try, before {rate_before:.1f}"
    )


def rate_of(bench: Bench, memory: np.ndarray) -> float:
    """MB/s of one get by RDMA."""
    bench.until_placed(memory, "what was before")
    begin = time.monotonic()
    assert bench.get(memory)
    return TOTAL / (time.monotonic() - begin) / 1e6


@contextlib.contextmanager
def reading(bench: Bench, areas: list[np.ndarray]) -> Iterator[list[float]]:
    """Reads into each of these all the time: in frames if need be, never wrong. Gives when each read was through."""
    has_ended = threading.Event()
    done: list[float] = []

    def read_on(area: np.ndarray) -> None:
        while not has_ended.is_set():
            assert bench.get(area), bench.client.transports()
            done.append(time.monotonic())

    with ThreadPoolExecutor(len(areas)) as pool:
        reads = [pool.submit(read_on, area) for area in areas]
        try:
            yield done
        finally:
            has_ended.set()
        for read in reads:
            read.result()


@contextlib.contextmanager
def dropped_packets() -> Iterator[None]:
    """Nothing leaves by the wire of RDMA meanwhile (tc-netem(8))."""
    subprocess.run(["tc", "qdisc", "add", "dev", "eth0", "root", "netem", "loss", "100%"], check=True)
    try:
        yield
    finally:
        subprocess.run(["tc", "qdisc", "del", "dev", "eth0", "root"], check=True)


def until(is_so: Callable[[], bool], seconds: float) -> bool:
    """Waits for it; whether it came."""
    end = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > end:
            return False
        time.sleep(POLL_S)
    return True


def set_wire(*, is_up: bool) -> None:
    """As `ip link set eth0`, in no time (netdevice(7)); returns when the port says so."""
    name = b"eth0".ljust(16, b"\0")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        _, flags = struct.unpack("16sH", fcntl.ioctl(any_socket, SIOCGIFFLAGS, struct.pack("16sH14x", name, 0))[:18])
        flags = flags | IFF_UP if is_up else flags & ~IFF_UP
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14x", name, flags))
    wanted = "ACTIVE" if is_up else "DOWN"
    assert until(lambda: PORT_STATE.read_text().split()[1] == wanted, WAIT_S), PORT_STATE.read_text()


def perftest(bench: Bench) -> None:
    for program in ("ib_write_bw", "ib_read_bw"):
        usual = f"-d rxe0 -x {GID_INDEX} -s {CHUNK} -n 16 -F"
        bench.ask(f"{program} {usual}")
        for _ in range(100):
            done = subprocess.run([program, *usual.split(), ADDRESSES[0]], capture_output=True, text=True, check=False)
            if done.returncode == 0:
                break
            time.sleep(0.3)
        row = next((line for line in done.stdout.splitlines() if line.split()[:1] == [str(CHUNK)]), "")
        print(f"measured: {program}, 256 KiB: {row.split()[3] if row else done.stderr.strip()} MB/s")


if __name__ == "__main__":
    node() if sys.argv[1] == "node" else client()
    print(f"{sys.argv[1]}: all as it should be")
