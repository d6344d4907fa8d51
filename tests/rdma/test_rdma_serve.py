"""`kvstore serve` where RDMA cannot be had: `rdma` says so and ends, `auto` goes on and says why."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest

from kvstore.errors import Unavailable
from kvstore.testing.serve_process import ServeProcess
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore_client import Hit, KVClient, Stored

NOWHERE = ("--rdma-port", "none0")  # so that it is the same where there are devices
CHUNK = 256 * 1024


def test_rdma_that_cannot_be_had_is_a_clear_error_at_the_start(tmp_path: Path) -> None:
    with ServeProcess(tmp_path, "--transport", "rdma", *NOWHERE) as process:
        assert process.wait_exit() != 0
        assert "transport rdma cannot be had: RDMA port 'none0' is not here" in process.log
        assert "use transport auto to fall back to TCP" in process.log


def test_auto_falls_back_once_and_says_why(tmp_path: Path) -> None:
    with ServeProcess(tmp_path, "--transport", "auto", *NOWHERE) as process:
        ready = process.wait_ready()
        assert process.log.count("payload goes by TCP: RDMA port 'none0' is not here") == 1
        metrics = urllib.request.urlopen(f"http://{ready.metrics}/metrics", timeout=10).read().decode()
        assert "kvstore_rdma_fallbacks_total 1" in metrics
        assert "kvstore_rdma_choice_info{choice=\"TCP: RDMA port 'none0' is not here" in metrics
        page = urllib.request.urlopen(f"http://{ready.metrics}/", timeout=10).read().decode()
        assert "TCP: RDMA port" in page
        layout = KVLayout.opaque(chunk_bytes=CHUNK, chunk_tokens=16)
        namespace = Namespace(tenant="default", model="m", weights="w", layout=layout)
        with pytest.raises(Unavailable, match="transport rdma cannot be used: the node does not use RDMA"):
            KVClient.connect(ready.grpc, transport="rdma")
        with KVClient.connect(ready.data[0], transport="auto") as client:
            ns = client.namespace(namespace)
            keys = ns.keys(list(range(16)))
            assert isinstance(ns.put(keys, [b"x" * CHUNK])[0], Stored)
            buffer = bytearray(CHUNK)
            assert isinstance(ns.get_into(keys, [buffer])[0], Hit)
            assert buffer == b"x" * CHUNK
