"""Mooncake's store as a peer: a master, a process that lends memory (with `offloads`, a folder too), and a client here.

The programs and the client come with the package mooncake-transfer-engine-non-cuda (extra `bench`, Linux on x86-64).
Settings are those that worked best here: with `offload_on_evict` what leaves memory goes to the folder.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from kvstore.limits import GiB, MiB
from kvstore_bench.processes import cpu_ns_of

_HOST: Final = "127.0.0.1"
_START_S: Final = 20.0
_PUT_S: Final = 20.0
_LOCAL_BYTES: Final = 64 * MiB
_PROGRAMS: Final = Path(sys.executable).parent


def available() -> bool:
    """Whether the package is installed."""
    return importlib.util.find_spec("mooncake") is not None and (_PROGRAMS / "mooncake_master").exists()


class Mooncake:
    """A store of our own on loopback.

    Args:
        folder: for logs, and for what is offloaded.
        memory_bytes: what the store may hold in memory.
        offloads: what is evicted from there goes to the folder.
    """

    def __init__(self, folder: Path, *, memory_bytes: int, offloads: bool = False) -> None:
        self._children: list[subprocess.Popen[bytes]] = []
        self._log = (folder / "mooncake.log").open("ab")
        rpc, metrics, port = (_free_port() for _ in range(3))
        environment = dict(os.environ)
        master = [f"--rpc_port={rpc}", f"--metrics_port={metrics}", f"--rpc_address={_HOST}", f"--metrics_host={_HOST}"]
        lender = [
            f"--master_server_address={_HOST}:{rpc}", f"--host={_HOST}", "--protocol=tcp", f"--port={port}",
            f"--global_segment_size={memory_bytes // MiB} MB", "--metadata_server=P2PHANDSHAKE",
        ]  # fmt: skip
        if offloads:
            master += ["--enable_offload=true", "--offload_on_evict=true", "--default_kv_lease_ttl=500"]
            lender += ["--enable_offload=true"]
            environment |= {
                "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": str(folder),
                "MOONCAKE_OFFLOAD_STORAGE_BACKEND_DESCRIPTOR": "bucket_storage_backend",
                "MOONCAKE_OFFLOAD_USE_URING": "true",
                "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1",
                "MOONCAKE_OFFLOAD_BUCKET_SIZE_LIMIT_BYTES": str(32 * MiB),
                "MOONCAKE_OFFLOAD_BUCKET_MAX_TOTAL_SIZE": str(20 * GiB),
            }
        try:
            self._start("mooncake_master", master, environment, rpc)
            self._start("mooncake_client", lender, environment, port)
            self._store = _connected(f"{_HOST}:{rpc}")
        except BaseException:
            self.close()
            raise

    def _start(self, program: str, arguments: Sequence[str], environment: dict[str, str], port: int) -> None:
        command = [str(_PROGRAMS / program), *arguments, "--logtostderr"]
        child = subprocess.Popen(command, stdout=self._log, stderr=self._log, env=environment)
        self._children.append(child)
        end = time.monotonic() + _START_S
        while True:
            try:
                socket.create_connection((_HOST, port), timeout=1).close()
                return
            except OSError:
                if child.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"{program} did not listen on port {port}; see {self._log.name}") from None
                time.sleep(0.05)

    def cpu_ns(self) -> int:
        """CPU time of its processes so far."""
        return sum(cpu_ns_of(child.pid) for child in self._children)

    def register(self, memory: memoryview) -> None:
        """Name memory that values are read into and written from; it must live as long as this."""
        self._checked(self._store.register_buffer(_address(memory), len(memory)), "register_buffer")

    def put(self, keys: Sequence[str], values: Sequence[memoryview]) -> None:
        """Store each; what it has no room for at the moment is tried again. Raises RuntimeError after some seconds."""
        left = list(range(len(keys)))
        end = time.monotonic() + _PUT_S
        while True:
            codes = self._store.batch_put_from(
                [keys[at] for at in left], [_address(values[at]) for at in left], [len(values[at]) for at in left]
            )
            left = [at for at, code in zip(left, codes, strict=True) if code]
            if not left:
                return
            if time.monotonic() > end:
                raise RuntimeError(f"mooncake took none of {len(left)} values for {_PUT_S} s: {codes}")
            time.sleep(0.01)

    def get(self, keys: Sequence[str], into: Sequence[memoryview]) -> int:
        """Read each into memory of its length; how many came."""
        sizes = [len(view) for view in into]
        codes = self._store.batch_get_into(list(keys), [_address(view) for view in into], sizes)
        return sum(code == size for code, size in zip(codes, sizes, strict=True))

    @staticmethod
    def _checked(code: int, what: str) -> None:
        if code:
            raise RuntimeError(f"mooncake's {what} failed with {code}")

    def close(self) -> None:
        """End its processes."""
        for child in reversed(self._children):
            child.terminate()
        for child in self._children:
            try:
                child.wait(timeout=_START_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        self._log.close()


def _connected(master: str) -> Any:
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # it tells of every transfer otherwise
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    Mooncake._checked(store.setup(_HOST, "P2PHANDSHAKE", 0, _LOCAL_BYTES, "tcp", "", master), "setup")
    return store


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _free_port() -> int:
    with socket.create_server((_HOST, 0)) as probe:
        port: int = probe.getsockname()[1]
    return port
