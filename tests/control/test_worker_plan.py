"""How drives and addresses are divided over workers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvstore.engine.identity import ContentKind, DriveContent
from kvstore.server.drive_check import CheckedDrives
from kvstore.server.drive_owner import DriveOwner
from kvstore.server.drive_record import judge
from kvstore.server.node import divide_workers, plan_workers
from kvstore.server.report import DriveState
from kvstore.settings import NodeSettings, load_node_settings
from kvstore.testing.serve_process import ServeProcess

NOWHERE = DriveOwner(id=bytes(16))


def settings(drives: int, hosts: int = 1, **flags: object) -> NodeSettings:
    dirs = ",".join(f"/d{at}" for at in range(drives))
    names = ",".join(f"127.0.0.{at}" for at in range(1, hosts + 1))
    return load_node_settings({"data_dir": dirs, "capacity": "8GiB", "host": names} | flags)


@pytest.mark.parametrize(
    ("drives", "hosts", "workers", "expected"),
    [
        (3, 1, 0, [("127.0.0.1", 7401, "/d0,/d1,/d2")]),
        (3, 1, 2, [("127.0.0.1", 7401, "/d0,/d2"), ("127.0.0.1", 7403, "/d1")]),
        (2, 1, 9, [("127.0.0.1", 7401, "/d0"), ("127.0.0.1", 7403, "/d1")]),
        (4, 2, 0, [("127.0.0.1,127.0.0.2", 7401, "/d0,/d2"), ("127.0.0.2,127.0.0.1", 7403, "/d1,/d3")]),
        (
            4,
            2,
            4,
            [
                ("127.0.0.1,127.0.0.2", 7401, "/d0"),
                ("127.0.0.2,127.0.0.1", 7403, "/d1"),
                ("127.0.0.1,127.0.0.2", 7404, "/d2"),
                ("127.0.0.2,127.0.0.1", 7405, "/d3"),
            ],
        ),
        (4, 2, 1, [("127.0.0.1,127.0.0.2", 7401, "/d0,/d1,/d2,/d3")]),
    ],
)
def test_drives_and_addresses_are_divided(
    drives: int, hosts: int, workers: int, expected: list[tuple[str, int, str]]
) -> None:
    launches = divide_workers(settings(drives, hosts, workers=workers), "node")
    assert [(",".join(one.hosts), one.data_port, ",".join(one.data_dirs)) for one in launches] == expected
    assert {one.drives_of_node for one in launches} == {drives}


def test_any_free_port_stays_one() -> None:
    assert {one.data_port for one in divide_workers(settings(3, workers=3, data_port="0"), "node")} == {0}


def test_a_drive_that_is_not_ours_is_given_to_no_worker() -> None:
    checked = CheckedDrives(
        paths=frozenset({"/d0"}), refused=(), owner=DriveOwner(id=b"\xab" * 16, own_id=b"\x11" * 16)
    )
    launches = plan_workers(settings(2, workers=2), "node", checked)
    assert [one.data_dirs for one in launches] == [("/d0",)]
    assert (launches[0].cluster_id, launches[0].own_id) == ("ab" * 16, "11" * 16)


def test_an_empty_place_is_formatted_only_where_no_disk_was() -> None:
    empty, fresh = DriveContent(kind=ContentKind.EMPTY), DriveContent(kind=ContentKind.FRESH)
    expected = {"new": DriveState.SERVING, "known": DriveState.EMPTY}
    found = {
        name: judge("/d", empty, expected_id=disk_id, owner=NOWHERE, places={}).state
        for name, disk_id in (("new", ""), ("known", "d" * 32))
    }
    assert found == expected
    assert judge("/d", fresh, expected_id="d" * 32, owner=NOWHERE, places={}).is_good


def test_two_workers_of_one_address_serve(tmp_path: Path) -> None:
    dirs = f"{tmp_path / 'a'},{tmp_path / 'b'}"
    with ServeProcess(tmp_path, "--data-dir", dirs, "--capacity", "128MiB", "--workers", "2") as process:
        ready = process.wait_ready()
        assert len(set(ready.data)) == 2
        noted = json.loads((tmp_path / "a" / "node.json").read_text())["values"]
        assert sorted(json.loads(noted["node/drives"])) == [str(tmp_path / "a"), str(tmp_path / "b")]
        assert json.loads((tmp_path / "b" / "node.json").read_text())["values"] == noted
        process.terminate()
        assert process.wait_exit() == 0
