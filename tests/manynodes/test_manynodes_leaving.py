"""A node that is told to end while many read from it."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path

from kvstore.testing.cluster_lab import ClusterLab, LabOptions, until
from kvstore.types.results import Exists, Hit, Stored
from kvstore_bench.chains import Chains, ChainShape, content_of
from kvstore_client import KVClient

SEED = 56
READS = 20
PIECE_CHUNKS = 16
RATE_BYTES_S = 10_000_000  # all of them together take two seconds
SHAPE = ChainShape(tokens=READS * PIECE_CHUNKS, chunk_tokens=1, chunk_bytes=65_536, runs=READS)


def test_reads_in_flight_are_served_to_their_end_after_sigterm(tmp_path: Path) -> None:
    options = LabOptions(staging="64MiB", drain_timeout="30s")
    with ClusterLab(tmp_path, nodes=1, store="file", in_namespaces=True, options=options) as lab, ExitStack() as stack:
        clients = [stack.enter_context(KVClient.connect(lab.data_addresses())) for _ in range(READS)]
        chains = Chains(count=1, seed=SEED, shape=SHAPE)
        (chain,) = chains.keys
        until(lambda: all(isinstance(one, Stored | Exists) for one in chains.put(clients[0])), "the node serves")
        place = lab.nodes["n0"].place
        assert lab.net is not None
        assert place is not None
        areas = [bytearray(PIECE_CHUNKS * SHAPE.chunk_bytes) for _ in range(READS)]
        failures: list[str] = []

        def read(at: int) -> None:
            keys = chain[at * PIECE_CHUNKS : (at + 1) * PIECE_CHUNKS]
            view, size = memoryview(areas[at]), SHAPE.chunk_bytes
            buffers = [view[first : first + size] for first in range(0, len(view), size)]
            outcomes = clients[at].namespace(chains.namespace).get_into(keys, buffers, deadline=30.0)
            for key, buffer, outcome in zip(keys, buffers, outcomes, strict=True):
                if not isinstance(outcome, Hit) or buffer != content_of(key.digest, size):
                    failures.append(f"read {at}: {outcome}")

        for client in clients:
            client.namespace(chains.namespace).contains(chain[:1])
        lab.net.limit(place, bytes_per_s=RATE_BYTES_S)
        threads = [threading.Thread(target=read, args=(at,)) for at in range(READS)]
        for thread in threads:
            thread.start()
        until(lambda: all(any(area[:8]) for area in areas), "each read has begun to arrive")
        assert any(thread.is_alive() for thread in threads), "they are in flight"
        lab.terminate("n0")
        for thread in threads:
            thread.join()
        assert not failures, f"seed {SEED}: {failures[:3]}"
        assert lab.wait_exit("n0") == 0, lab.log("n0")
