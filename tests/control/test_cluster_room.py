"""The view as a value, and the store of a node on its own."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.cluster.node_file import NodeFile, replace_file
from kvstore.cluster.view import ReplicaPolicy, Target, TargetState, View
from kvstore.errors import Closed, FormatUnsupported, InvalidRequest, Unavailable
from kvstore.wire.codec import pack_plain, unpack_plain

TARGETS = st.lists(
    st.builds(
        Target,
        id=st.text(max_size=20),
        data=st.lists(st.text(max_size=20), max_size=3).map(tuple),
        weight=st.floats(min_value=0, max_value=1e12),
        state=st.sampled_from(TargetState),
    ),
    max_size=5,
).map(tuple)
VIEWS = st.builds(View, epoch=st.integers(0, 2**64 - 1), node_id=st.text(max_size=20), targets=TARGETS)


@given(VIEWS)
def test_a_view_travels_by_msgpack_and_json(view: View) -> None:
    assert View.from_plain(unpack_plain(pack_plain(view.to_plain()), what="view")) == view
    assert View.from_plain(json.loads(json.dumps(view.to_plain()))) == view


@given(VIEWS, TARGETS)
def test_the_epoch_grows_with_each_change_and_only_then(view: View, targets: tuple[Target, ...]) -> None:
    after = view.with_targets(targets)
    assert after.targets == targets
    assert after.epoch == view.epoch + (targets != view.targets)


def test_fields_that_may_be_missing_have_defaults() -> None:
    plain = {"epoch": 3, "node_id": "n", "targets": [{"id": "t", "data": ["h:1"], "weight": 1, "state": "serving"}]}
    view = View.from_plain(plain)
    assert view == View(
        epoch=3,
        node_id="n",
        targets=(Target(id="t", data=("h:1",), weight=1.0, state=TargetState.SERVING),),
    )
    assert (view.relays, view.previous, view.replicas) == ((), (), ReplicaPolicy())


@pytest.mark.parametrize(
    "plain",
    [
        None,
        [],
        {},
        {"epoch": -1, "node_id": "n", "targets": []},
        {"epoch": 2**64, "node_id": "n", "targets": []},
        {"epoch": 1, "node_id": 7, "targets": []},
        {"epoch": 1, "node_id": "n", "targets": {}},
        {"epoch": 1, "node_id": "n", "targets": [{}] * 5000},
        {"epoch": 1, "node_id": "n", "targets": [], "colour": "blue"},
        {"epoch": 1, "node_id": "n", "targets": [], "replicas": {"copies": 4}},
        {"epoch": 1, "node_id": "n", "targets": [], "previous": [{}]},
        {"epoch": 1, "node_id": "n", "targets": [], "relays": [{}]},
        {"epoch": 1, "node_id": "n", "targets": [{"id": "t", "data": [], "weight": 1, "state": "dreaming"}]},
        {"epoch": 1, "node_id": "n", "targets": [{"id": "t", "data": [], "weight": 1, "state": "down", "x": 1}]},
        {"epoch": 1, "node_id": "n", "targets": [{"id": "t", "data": "h:1", "weight": 1, "state": "down"}]},
        {"epoch": 1, "node_id": "n", "targets": [{"id": "t", "data": [], "weight": float("nan"), "state": "down"}]},
        {"epoch": 1, "node_id": "n", "targets": [{"id": "t", "data": [], "weight": -1, "state": "down"}]},
    ],
)
def test_what_is_no_view_is_refused(plain: object) -> None:
    with pytest.raises(InvalidRequest):
        View.from_plain(plain)  # type: ignore[arg-type]


def test_the_store_keeps_values_over_restarts(tmp_path: Path) -> None:
    path = tmp_path / "node.json"
    store = NodeFile(path)
    assert store.get("node/id") is None
    store.put("node/id", "n1")
    store.put("node/boots", "7")
    store.put("node/boots", "8")
    store.close()
    again = NodeFile(path)
    assert (again.get("node/id"), again.get("node/boots")) == ("n1", "8")
    assert [entry.name for entry in tmp_path.iterdir()] == ["node.json"]
    with pytest.raises(Closed):
        store.get("node/id")


def test_the_store_bounds_names_and_values(tmp_path: Path) -> None:
    store = NodeFile(tmp_path / "node.json")
    with pytest.raises(InvalidRequest):
        store.put("../x", "1")
    with pytest.raises(InvalidRequest):
        store.put("node/id", "x" * 70_000)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"version": 9, "values": {}}', b'{"version": 1, "values": {"a": 1}}']
)
def test_a_damaged_store_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "node.json"
    path.write_bytes(content)
    with pytest.raises(FormatUnsupported, match=r"node\.json"):
        NodeFile(path)


def test_a_store_that_cannot_be_written_keeps_the_old_value(tmp_path: Path) -> None:
    store = NodeFile(tmp_path / "gone" / "node.json")
    with pytest.raises(Unavailable, match="cannot be written"):
        store.put("node/id", "n")
    assert store.get("node/id") is None


def test_what_a_killed_process_of_our_number_left_is_in_nobodys_way(tmp_path: Path) -> None:
    path = tmp_path / "node.json"
    half = tmp_path / f".node.json.{os.getpid()}"  # a container's processes have the same numbers at each start
    half.write_bytes(b"the beginning of something longer")
    store = NodeFile(path)
    store.put("node/id", "n")
    assert NodeFile(path).get("node/id") == "n"
    assert [entry.name for entry in tmp_path.iterdir()] == ["node.json"]


def test_a_replaced_file_is_whole_or_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "file"
    replace_file(path, b"one")
    replace_file(path, b"two")
    assert path.read_bytes() == b"two"
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(OSError):
        replace_file(folder, b"three")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "folder"]
