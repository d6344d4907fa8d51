"""A real etcd with TLS on both sides, and one that asks who we are; and what address texts may say."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from kvstore.cluster.store import ClusterStore
from kvstore.cluster.store_address import (
    EtcdAddress,
    FileAddress,
    open_cluster_store,
    parse_store_address,
)
from kvstore.errors import Denied, InvalidRequest, Unavailable
from kvstore.testing.etcd_process import Certificates, EtcdProcess, make_certificates


def with_store(text: str, body: Callable[[ClusterStore], Awaitable[None]]) -> None:
    """Opens the store at an address as a node does, and closes it."""

    async def main() -> None:
        store = open_cluster_store(parse_store_address(text))
        try:
            await body(store)
        finally:
            await store.close()

    asyncio.run(main())


async def write_and_watch(store: ClusterStore) -> None:
    """Everything that goes over the connection: calls, a stream of one answer, a watch."""
    image = await store.load()
    lease = await store.grant(ttl_ns=60 * 10**9)
    await store.put("targets/t", "x", lease=lease.id, expected=0)
    await store.renew(lease.id)
    changes = store.watch(image)
    async with asyncio.timeout(30):
        assert [change.name for change in await anext(changes)] == ["targets/t"]
    await changes.aclose()  # type: ignore[attr-defined]
    await store.revoke(lease.id)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def tls_etcd(tmp_path_factory: pytest.TempPathFactory, certificates: Certificates) -> Iterator[EtcdProcess]:
    with EtcdProcess(tmp_path_factory.mktemp("etcd"), certificates=certificates) as etcd:
        yield etcd


def test_tls_with_certificates_on_both_sides(tls_etcd: EtcdProcess, certificates: Certificates) -> None:
    own = f"ca={certificates.ca}&cert={certificates.cert}&key={certificates.key}"
    with_store(f"etcd://{tls_etcd.members}/tls?{own}", write_and_watch)


def test_a_node_without_its_certificate_is_not_heard(tls_etcd: EtcdProcess, certificates: Certificates) -> None:
    async def body(store: ClusterStore) -> None:
        with pytest.raises(Unavailable, match="TLS"):
            await store.load()

    with_store(f"etcd://{tls_etcd.members}/tls?ca={certificates.ca}", body)


def test_an_etcd_that_the_authority_does_not_vouch_for_is_not_spoken_with(
    tls_etcd: EtcdProcess, certificates: Certificates, tmp_path: Path
) -> None:
    async def body(store: ClusterStore) -> None:
        with pytest.raises(Unavailable):
            await store.load()

    other = make_certificates(tmp_path / "other")
    with_store(f"etcd://{tls_etcd.members}/tls?ca={other.ca}&cert={other.cert}&key={other.key}", body)


def test_an_etcd_that_asks_who_we_are(tmp_path: Path) -> None:
    password, wrong = tmp_path / "password", tmp_path / "wrong"
    password.write_text("s3cret\n")
    wrong.write_text("guess\n")
    with EtcdProcess(tmp_path / "etcd") as etcd:
        guard(etcd)
        with_store(f"etcd://{etcd.members}/guarded?user=kv&password_file={password}", write_and_watch)

        async def refused(store: ClusterStore) -> None:
            with pytest.raises(Denied):
                await store.load()

        with_store(f"etcd://{etcd.members}/guarded?user=kv&password_file={wrong}", refused)
        with_store(f"etcd://{etcd.members}/guarded", refused)
        with_store(f"etcd://{etcd.members}/elsewhere?user=kv&password_file={password}", refused)

        async def outlives_its_token(store: ClusterStore) -> None:
            await store.load()
            # etcd forgets all tokens, as it does after a while, and when a member is another one
            await asyncio.to_thread(etcd.kill_all)
            await asyncio.to_thread(etcd.restart_all)
            await store.load()
            changes = store.watch(await store.load())
            await store.put("a", "b")
            async with asyncio.timeout(30):
                assert len(await anext(changes)) == 1

        with_store(f"etcd://{etcd.members}/guarded?user=kv&password_file={password}", outlives_its_token)


def guard(etcd: EtcdProcess) -> None:
    """Users, roles, and from then on nobody without one: by etcd's own JSON gateway."""
    for user, secret in (("root", "r00t"), ("kv", "s3cret")):
        etcd.post(0, "/v3/auth/user/add", {"name": user, "password": secret})
    etcd.post(0, "/v3/auth/role/add", {"name": "root"})
    etcd.post(0, "/v3/auth/user/grant", {"user": "root", "role": "root"})
    etcd.post(0, "/v3/auth/role/add", {"name": "kv"})
    permission = {"permType": 2, "key": _base64("/kvstore/guarded/"), "range_end": _base64("/kvstore/guarded0")}
    etcd.post(0, "/v3/auth/role/grant", {"name": "kv", "perm": permission})
    etcd.post(0, "/v3/auth/user/grant", {"user": "kv", "role": "kv"})
    etcd.post(0, "/v3/auth/enable", {})


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def test_addresses_say_where_and_how(tmp_path: Path) -> None:
    assert parse_store_address("etcd://h1:2379") == EtcdAddress(members=("h1:2379",))
    full = "etcd://h1:2379,[fe80::1]:2379,h-3.etcd.svc:2379/prod?ca=/a&cert=/b&key=/c&user=u&password_file=/d%20e"
    assert parse_store_address(full) == EtcdAddress(
        members=("h1:2379", "[fe80::1]:2379", "h-3.etcd.svc:2379"),
        cluster="prod",
        ca="/a",
        cert="/b",
        key="/c",
        user="u",
        password_file="/d e",
    )
    assert "d e" not in str(parse_store_address(full))
    assert parse_store_address("file:///var/lib/x%20y") == FileAddress(path="/var/lib/x y")

    async def body(store: ClusterStore) -> None:
        assert await store.put("a", "b") > 0

    with_store(f"file://{tmp_path}/cluster.json", body)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "h1:2379",
        "http://h1:2379",
        "etcd://",
        "etcd://h1",
        "etcd://h1:0",
        "etcd://h1:99999",
        "etcd://h1:2379,",
        "etcd://h1:2379,h1:2379",
        "etcd://user:password@h1:2379",
        "etcd://h1:2379/a/b",
        "etcd://h1:2379#x",
        "etcd://h1:2379?colour=blue",
        "etcd://h1:2379?ca=",
        "etcd://h1:2379?cert=/a&key=/b",
        "etcd://h1:2379?ca=/a&cert=/b",
        "etcd://h1:2379?user=u",
        "etcd://" + ",".join(f"h{at}:2379" for at in range(20)),
        "file://relative",
        "file:///x?y=z",
        "file:///x#y",
    ],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="etcd://HOST:PORT"):
        parse_store_address(text)


def test_a_password_in_an_address_is_not_repeated() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_store_address("etcd://root:s3cret@h1:2379,h2:2379")
    assert "s3cret" not in str(caught.value)
    assert "h2:2379" in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"ca .*missing\.pem"):
        open_cluster_store(parse_store_address(f"etcd://h:1?ca={tmp_path}/missing.pem"))
