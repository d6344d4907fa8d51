"""Whose drives a node serves: alone, in a cluster, when it joins one, and when the store does not answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.cluster.node_file import NodeFile
from kvstore.cluster.store_address import parse_store_address
from kvstore.engine.identity import NO_CLUSTER
from kvstore.errors import Unavailable
from kvstore.server.drive_check import note_drives, noted_drives
from kvstore.server.drive_owner import DriveOwner, NotedOwner, note_owner, noted_owner, owner_alone, owner_in
from kvstore.server.node_record import NodeRecord, open_record
from kvstore.server.seat import is_out_of_reach

OWN, OURS, THEIRS = "11" * 16, "aa" * 16, "bb" * 16
NOTHING = NotedOwner()
ALONE = NotedOwner(id=OWN, own_id=OWN)
MEMBER = NotedOwner(id=OURS, own_id=OWN, cluster="prod")


def raw(text: str) -> bytes:
    return bytes.fromhex(text)


@pytest.mark.parametrize(
    ("noted", "answer", "expected"),
    [
        (NOTHING, OURS, DriveOwner(id=raw(OURS), cluster="prod")),
        (ALONE, OURS, DriveOwner(id=raw(OURS), own_id=raw(OWN), cluster="prod")),
        (MEMBER, OURS, DriveOwner(id=raw(OURS), own_id=raw(OWN), cluster="prod")),
        (MEMBER, "", DriveOwner(id=raw(OURS), own_id=raw(OWN), cluster="prod")),
        (MEMBER, THEIRS, DriveOwner(id=raw(THEIRS), own_id=raw(OWN), cluster="prod")),
        (NotedOwner(id=THEIRS, cluster="test"), OURS, DriveOwner(id=raw(OURS), cluster="prod")),
    ],
)
def test_in_a_cluster_the_store_says_it_and_else_what_was_noted(
    noted: NotedOwner, answer: str, expected: DriveOwner
) -> None:
    assert owner_in("prod", noted, answer, has_record=True) == expected


@pytest.mark.parametrize("noted", [NOTHING, ALONE, NotedOwner(id=THEIRS, cluster="test")])
def test_who_was_never_in_the_cluster_needs_its_store(noted: NotedOwner) -> None:
    with pytest.raises(Unavailable, match="never in that cluster"):
        owner_in("prod", noted, "", has_record=True)


def test_where_nothing_can_be_noted_any_drive_is_taken() -> None:
    assert owner_in("prod", NOTHING, "", has_record=False).id == NO_CLUSTER
    assert owner_alone(NOTHING, [], has_record=False).id == NO_CLUSTER
    assert owner_alone(NOTHING, [], has_record=True).id != NO_CLUSTER


def test_what_is_noted_is_read_again(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    record = open_record([str(tmp_path / "a"), str(tmp_path / "gone")])
    assert record is not None
    assert noted_owner(record) == NOTHING
    note_owner(record, owner_alone(ALONE, [], has_record=True))
    assert noted_owner(record) == ALONE
    note_owner(record, DriveOwner(id=raw(OURS), own_id=raw(OWN), cluster="prod"))
    assert noted_owner(record) == MEMBER
    note_owner(record, owner_alone(MEMBER, [], has_record=True))  # it is started without its cluster once
    assert noted_owner(record) == MEMBER, "what it was in stays known"


def test_a_place_that_the_node_has_no_more_is_forgotten_and_a_missing_disk_is_not(tmp_path: Path) -> None:
    record = NodeRecord([NodeFile(tmp_path / "node.json")])
    note_drives(record, {"/a": "1", "/b": "2", "/c": "3"}, ["/a", "/b", "/c"])
    note_drives(record, {"/a": "1"}, ["/a", "/b"])
    assert noted_drives(record) == {"/a": "1", "/b": "2"}, "b is missed, c is not configured any more"
    note_drives(record, {"/a": "2"}, ["/a", "/b"])
    assert noted_drives(record) == {"/a": "2"}, "b's disk is at a now"


@pytest.mark.parametrize(
    ("hosts", "cluster", "expected"),
    [
        (("127.0.0.1",), "etcd://e1:2379,e2:2379", True),
        (("127.0.0.1", "::1"), "etcd://10.0.0.1:2379", True),
        (("127.0.0.1",), "etcd://127.0.0.1:2379,[::1]:2379", False),
        (("127.0.0.1",), "file:///c.json", False),
        (("127.0.0.1", "10.0.0.2"), "etcd://e1:2379", False),
        (("0.0.0.0",), "etcd://e1:2379", False),
    ],
)
def test_a_node_on_loopback_is_out_of_reach_of_a_cluster_elsewhere(
    hosts: tuple[str, ...], cluster: str, expected: bool
) -> None:
    assert is_out_of_reach(hosts, parse_store_address(cluster)) is expected


@pytest.mark.parametrize(
    ("order", "node_id"),
    [
        (("a", "b", "theirs"), ""),
        (("theirs", "a", "b"), ""),
        (("a", "theirs"), ""),
        (("a", "new", "theirs"), ""),
        (("theirs", "a"), "n1"),
    ],
)
def test_the_record_of_another_node_is_neither_read_nor_written(
    tmp_path: Path, order: tuple[str, ...], node_id: str
) -> None:
    for name in order:
        (tmp_path / name).mkdir()
    theirs = NodeFile(tmp_path / "theirs" / "node.json")
    for key, value in (("node/id", "n9"), ("node/boots", "7"), ("cluster/id", THEIRS)):
        theirs.put(key, value)
    for name in ("a", "b"):
        if name in order:
            NodeFile(tmp_path / name / "node.json").put("node/id", "n1")
    before = (tmp_path / "theirs" / "node.json").read_bytes()
    record = open_record([str(tmp_path / name) for name in order], node_id)
    assert record is not None
    assert (record.get("node/id"), noted_owner(record)) == ("n1", NOTHING)
    note_owner(record, DriveOwner(id=raw(OURS)))
    assert (tmp_path / "theirs" / "node.json").read_bytes() == before
    for name in set(order) - {"theirs"}:
        assert NodeFile(tmp_path / name / "node.json").get("cluster/id") == OURS


def test_the_record_of_an_adopted_drive_is_taken_over_and_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, drops in (("adopted", "[]"), ("moved", "[]"), ("drops", '["bWFuaWZlc3Q="]')):
        (tmp_path / name).mkdir()
        theirs = NodeFile(tmp_path / name / "node.json")
        for key, value in (("node/id", "n9"), ("node/boots", "7"), ("cluster/name", "test"), ("drops", drops)):
            theirs.put(key, value)
    (tmp_path / "a").mkdir()
    paths = [str(tmp_path / name) for name in ("a", "adopted", "moved", "drops")]
    NodeFile(tmp_path / "a" / "node.json").put("node/id", "n1")
    record = open_record(paths, "n1")
    assert record is not None
    note_owner(record, DriveOwner(id=raw(OURS)))
    record.take_over({str(tmp_path / "adopted"), str(tmp_path / "drops")})
    record.put("node/boots", "8")
    assert NodeFile(tmp_path / "adopted" / "node.json").all() == NodeFile(tmp_path / "a" / "node.json").all()
    for name in ("moved", "drops"):
        assert NodeFile(tmp_path / name / "node.json").get("node/id") == "n9"
        assert f"{tmp_path / name}/node.json is left as it is" in caplog.text
    caplog.clear()
    again = open_record(paths[:2], "n1")
    assert again is not None
    again.take_over({str(tmp_path / "adopted")})
    assert not caplog.text, "once is enough"


def test_a_first_folder_that_cannot_be_written_keeps_nobody_from_starting(tmp_path: Path) -> None:
    for name in ("full", "a", "adopted"):
        (tmp_path / name).mkdir()
    NodeFile(tmp_path / "a" / "node.json").put("node/id", "n1")
    NodeFile(tmp_path / "adopted" / "node.json").put("node/id", "n9")
    record = open_record([str(tmp_path / name) for name in ("full", "a", "adopted")], "n1")
    assert record is not None
    (tmp_path / "full").rmdir()
    record.put("node/id", "n1")
    record.put("node/boots", "1")
    record.take_over({str(tmp_path / "adopted")})
    assert NodeFile(tmp_path / "adopted" / "node.json").get("node/id") == "n1"
