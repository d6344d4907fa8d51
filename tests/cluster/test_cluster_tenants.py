"""Real nodes of one cluster with tenants: the secret of peers, and quotas that hold over all of them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from kvstore.cluster.catalog import USES, Document, document_name
from kvstore.cluster.charter import PEER_TOKEN_NAME
from kvstore.cluster.store import ClusterStore
from kvstore.cluster.store_address import open_cluster_store, parse_store_address
from kvstore.errors import Denied, KVStoreError
from kvstore.server.grpc_edge.client import ControlClient
from kvstore.server.report import TenantReport
from kvstore.server.tenants import hash_of
from kvstore.testing.cluster_suite import until
from kvstore.testing.etcd_process import EtcdProcess
from kvstore.testing.node_line import NodeLine
from kvstore.testing.serve_process import ServeProcess
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore.types.results import Exists, Hit, ItemStatus, Refused, RefusedReason, Stored
from kvstore.wire.messages import End
from kvstore.wire.replicas import Pull
from kvstore_client import KVClient

CHUNK_BYTES = 64 * 1024
TOKENS = {"ours": "ours: everything our inference needs", "theirs": "theirs: everything they need"}
ROOT = "operators: the administration"


class Nodes:
    """Nodes of one cluster, all with the same tenants."""

    def __init__(self, folder: Path, stack: ExitStack, etcd: EtcdProcess, *names: str, quota: str = "0") -> None:
        self.address = f"etcd://{etcd.members}/{folder.name}"
        self.tenants = folder / "tenants.json"
        self.write_tenants(quota)
        self.nodes: dict[str, ServeProcess] = {}
        for name in names:
            (folder / name).mkdir()
            place = ("--cluster", self.address, "--node-id", name, "--tenants", str(self.tenants))
            self.nodes[name] = stack.enter_context(ServeProcess(folder / name, *place, "--lease-ttl", "3s"))
        for node in self.nodes.values():
            node.wait_ready()

    def write_tenants(self, quota: str) -> None:
        tenants: list[object] = [
            {
                "name": name,
                "quota": quota,
                "tokens": [{"scopes": ["read", "write"], "sha256": hash_of(token.encode()).hex()}],
            }
            for name, token in TOKENS.items()
        ]
        tenants.append({"name": "operators", "tokens": [{"scopes": ["admin"], "sha256": hash_of(ROOT.encode()).hex()}]})
        self.tenants.write_text(json.dumps({"tenants": tenants}))

    def open_store(self) -> ClusterStore:
        return open_cluster_store(parse_store_address(self.address))

    def control(self, name: str) -> ControlClient:
        return ControlClient(self.nodes[name].wait_ready().grpc, token=ROOT.encode())

    def client(self, name: str, token: str) -> KVClient:
        return KVClient.connect(self.nodes[name].wait_ready().data[0], token=token, deadline=10)

    def see_each_other(self) -> bool:
        found = []
        for name in self.nodes:
            with self.control(name) as control:
                found.append(sorted(target.node_id for target in control.view().targets))
        return found == [sorted(self.nodes)] * len(self.nodes)


@pytest.fixture
def nodes(tmp_path: Path, shared_etcd: EtcdProcess) -> Iterator[Nodes]:
    with ExitStack() as stack:
        yield Nodes(tmp_path, stack, shared_etcd, "a", "b")


def namespace_of(tenant: str) -> Namespace:
    layout = KVLayout.opaque(chunk_bytes=CHUNK_BYTES, chunk_tokens=1, run_bytes=CHUNK_BYTES)
    return Namespace(tenant=tenant, model="m", weights="w", layout=layout)


def is_admitted(nodes: Nodes, name: str, token: str) -> bool:
    try:
        with nodes.client(name, token):
            return True
    except Denied:
        return False


def test_the_peer_token_opens_every_node_for_peers_and_shows_nowhere(nodes: Nodes) -> None:
    async def body() -> None:
        store = nodes.open_store()
        await until(lambda: _is(nodes.see_each_other()))
        first = (await store.load()).entries[PEER_TOKEN_NAME].value
        await until(lambda: _is(all(is_admitted(nodes, name, first) for name in nodes.nodes)))
        ours = namespace_of("ours")
        with nodes.client("a", TOKENS["ours"]) as client:
            space = client.namespace(ours)
            await until(lambda: _is(isinstance(space.put(space.keys([1]), [b"v" * CHUNK_BYTES])[0], Stored | Exists)))
        with nodes.client("b", first) as peer:
            space = peer.namespace(ours)
            assert [type(one) for one in space.get_into(space.keys([1]), [bytearray(CHUNK_BYTES)])] == [Hit]
        with pytest.raises(KVStoreError), ControlClient(nodes.nodes["a"].wait_ready().grpc, token=first.encode()) as c:
            c.report()  # the control plane knows tenants only
        await store.put(PEER_TOKEN_NAME, "another secret for all the nodes")
        await until(lambda: _is(all(is_admitted(nodes, name, "another secret for all the nodes") for name in "ab")))
        assert not any(is_admitted(nodes, name, first) for name in "ab")
        assert is_admitted(nodes, "a", TOKENS["ours"])
        await store.close()
        for name, node in nodes.nodes.items():
            with nodes.control(name) as control:
                report = control.report()
            shown = [node.log, repr(report), *map(command_line, [report.pid, *(one.pid for one in report.workers)])]
            assert not any(token in text for text in shown for token in (first, "another secret for all the nodes"))

    asyncio.run(body())


def explained(nodes: Nodes, name: str, tenant: str, *arguments: str) -> dict[str, Any]:
    token = nodes.tenants.parent / f"{tenant}.token"
    token.write_text(TOKENS[tenant])
    token.chmod(0o600)
    command = [sys.executable, "-m", "kvstore", "explain", "--json", "--node", nodes.nodes[name].wait_ready().grpc]
    command += ["--tenant", tenant, "--token-file", str(token), *arguments]
    found: dict[str, Any] = json.loads(
        subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    )
    return found


def test_explain_asks_all_nodes_within_one_tenant(nodes: Nodes) -> None:
    tokens = list(range(1, 33))
    asked = ("--tokens", ",".join(map(str, tokens)), "--model", "m")

    async def body() -> None:
        await until(lambda: _is(nodes.see_each_other()))
        with nodes.client("a", TOKENS["ours"]) as client:
            space = client.namespace(namespace_of("ours"))
            values = [b"v" * CHUNK_BYTES for _ in tokens]

            def is_stored() -> bool:
                return all(isinstance(one, Stored | Exists) for one in space.put(space.keys(tokens), values))

            await until(lambda: _is(is_stored()))

    asyncio.run(body())
    found = explained(nodes, "b", "ours", *asked)
    keys = found["namespaces"][0]["keys"]
    assert [key["status"] for key in keys] == ["hit"] * len(tokens)
    belong = {key["text"].partition(";")[0].partition(", was")[0] for key in keys}
    assert belong >= {"belongs on a", "belongs on b"}, "the chunks are spread over both"
    assert [(one["node_id"], one["failure"]) for one in found["nodes"]] == [("a", ""), ("b", "")]
    digest = found["namespaces"][0]["namespace"]["digest"]
    again = explained(nodes, "a", "ours", *asked, "--namespace", digest[:12])
    assert [key["status"] for key in again["namespaces"][0]["keys"]] == ["hit"] * len(tokens), "whoever is asked first"
    others = explained(nodes, "a", "theirs", *asked)
    assert others["namespaces"] == []
    nodes.nodes["b"].process.send_signal(signal.SIGSTOP)
    try:
        left = explained(nodes, "a", "ours", *asked)
    finally:
        nodes.nodes["b"].process.send_signal(signal.SIGCONT)
    lost = {key["status"] for key in left["namespaces"][0]["keys"] if "b: no answer" in key["text"]}
    assert lost, "whatever the view says of b meanwhile"
    assert lost <= {"hit", "unavailable", "absent"}
    assert len([key for key in left["namespaces"][0]["keys"] if key["status"] == "hit"]) < len(tokens)
    assert left["summary"].endswith("; no answer from b")


def command_line(pid: int) -> str:
    return "".join(Path(f"/proc/{pid}/{what}").read_text() for what in ("cmdline", "environ"))


async def _is(value: bool) -> bool:
    return value


QUOTA_BYTES = 16 * 1024 * 1024
QUOTA, OVERLOADED, DEADLINE = RefusedReason.QUOTA, RefusedReason.OVERLOADED, RefusedReason.DEADLINE


def used_of(nodes: Nodes, tenant: str) -> list[TenantReport]:
    """What each node says of a tenant."""
    found = []
    for name in nodes.nodes:
        with nodes.control(name) as control:
            found += [use for use in control.report().tenants if use.name == tenant]
    return found


def put_chunks(client: KVClient, first: int, count: int) -> list[object]:
    space = client.namespace(namespace_of("ours"))
    keys = space.keys(list(range(first, first + count)))
    return [result for at in range(0, count, 8) for result in space.put(keys[at : at + 8], [b"v" * CHUNK_BYTES] * 8)]


def test_a_quota_holds_over_the_nodes_of_a_cluster(tmp_path: Path, shared_etcd: EtcdProcess) -> None:
    async def body() -> None:
        with ExitStack() as stack:
            nodes = Nodes(tmp_path, stack, shared_etcd, "a", "b", "c", quota=str(QUOTA_BYTES))
            await until(lambda: _is(nodes.see_each_other()))

            async def is_divided() -> bool:
                """As soon as everybody has seen the newest node."""
                shares = [use.share_bytes for use in used_of(nodes, "ours")]
                return all(shares) and sum(shares) <= QUOTA_BYTES

            await until(is_divided)
            client = stack.enter_context(nodes.client("a", TOKENS["ours"]))
            await until(lambda: _is(isinstance(put_chunks(client, 0, 8)[-1], Stored | Exists)))
            for first in range(0, 3 * QUOTA_BYTES // CHUNK_BYTES, 64):  # three times as much as it may have
                for result in put_chunks(client, first, 64):
                    assert isinstance(result, Stored | Exists) or (
                        isinstance(result, Refused) and result.reason in (QUOTA, OVERLOADED, DEADLINE)
                    ), result
                used = used_of(nodes, "ours")
                assert sum(use.used_bytes for use in used) <= QUOTA_BYTES * 1.1
            uses = used_of(nodes, "ours")
            assert sum(use.used_bytes for use in uses) > QUOTA_BYTES / 2, "and it may have what it may have"
            assert {use.quota_bytes for use in uses} == {QUOTA_BYTES}
            await until(lambda: _is(all(use.cluster_used_bytes > QUOTA_BYTES / 2 for use in used_of(nodes, "ours"))))
            store = nodes.open_store()
            names = [name for name in (await store.load()).entries if name.startswith(USES)]
            assert len(names) == 3, "an entry for each target, and none for a chunk"
            await store.put(document_name(Document.QUOTA, "ours"), json.dumps({"bytes": QUOTA_BYTES // 4}))
            await until(lambda: _is(sum(use.share_bytes for use in used_of(nodes, "ours")) <= QUOTA_BYTES // 4))
            await until(lambda: _is(sum(use.used_bytes for use in used_of(nodes, "ours")) <= QUOTA_BYTES // 4))
            await store.close()

    asyncio.run(body())


def test_shares_outlive_a_worker_and_a_cluster_store_that_is_gone(tmp_path: Path) -> None:
    async def body() -> None:
        with ExitStack() as stack:
            etcd = stack.enter_context(EtcdProcess(tmp_path / "etcd"))
            nodes = Nodes(tmp_path, stack, etcd, "a", quota=str(QUOTA_BYTES // 2))
            await until(lambda: _is(any(use.share_bytes for use in used_of(nodes, "ours"))))
            client = stack.enter_context(nodes.client("a", TOKENS["ours"]))
            await until(lambda: _is(isinstance(put_chunks(client, 0, 8)[-1], Stored | Exists)))
            with nodes.control("a") as control:
                (worker,) = control.report().workers
            os.kill(worker.pid, signal.SIGKILL)  # the next one is told of the shares before it takes puts
            await until(lambda: _is(isinstance(put_chunks(client, 8, 8)[-1], Stored | Exists)))
            for first in range(0, QUOTA_BYTES // CHUNK_BYTES, 64):
                put_chunks(client, first, 64)
                (use,) = used_of(nodes, "ours")
                assert use.used_bytes <= QUOTA_BYTES // 2
            etcd.kill_all()
            await until(lambda: _is("fenced" in str(put_chunks(client, 5_000, 8)[-1])))
            (use,) = used_of(nodes, "ours")
            assert 0 < use.share_bytes <= QUOTA_BYTES // 2
            assert QUOTA_BYTES // 4 < use.used_bytes <= QUOTA_BYTES // 2, "what is there stays"
            etcd.wipe()
            store = nodes.open_store()
            await until(lambda: _is(isinstance(put_chunks(client, 6_000, 8)[-1], Stored | Exists)))

            async def is_told_again() -> bool:
                return any(name.startswith(USES) for name in (await store.load()).entries)

            await until(is_told_again)
            await store.close()

    asyncio.run(body())


def test_nodes_copy_from_each_other_what_is_of_any_tenant(nodes: Nodes) -> None:
    """PULL, over the peers' own connection: a tenant's token is good for the request, the peer token for the copy."""
    key, value, space = b"k" * 32, b"v" * 50_000, namespace_of("theirs")

    async def body() -> None:
        await until(lambda: _is(nodes.see_each_other()))
        a, b = (nodes.nodes[name].wait_ready().data[0] for name in "ab")
        with closing(NodeLine(a, space, token=TOKENS["theirs"].encode())) as source:
            await until(lambda: _is(source.put(key, value)[0] in (ItemStatus.STORED, ItemStatus.EXISTS)))
            (target,) = [one.id for one in source.view().targets if one.node_id == "a"]
            with closing(NodeLine(b, space, token=TOKENS["theirs"].encode())) as sink:
                pull = Pull(namespace=space.digest, keys=key, source=target)

                async def is_copied() -> bool:
                    sink.client.call(pull, End)  # refused until the view has both
                    return sink.get(key)[0] == 0

                await until(is_copied)

    asyncio.run(body())
