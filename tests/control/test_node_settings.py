"""Settings: where a value comes from, what is refused, and that each refusal names value, limit and fix."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import settings as settings_module
from kvstore.errors import InvalidRequest
from kvstore.limits import MS_NS, SECOND_NS, GiB, MiB
from kvstore.settings import (
    format_duration,
    format_size,
    is_loopback,
    is_wildcard,
    load_node_settings,
    parse_duration,
    parse_size,
)

NEEDED: dict[str, object] = {"data_dir": "/data", "capacity": "1GiB", "cache": "0"}


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in settings_module.NodeSettings.model_fields:
        monkeypatch.delenv(f"KVSTORE_{name.upper()}", raising=False)
    monkeypatch.delenv("KVSTORE_CONFIG", raising=False)


def refusal(**flags: object) -> str:
    """The message with which these flags, on top of the needed ones, are refused."""
    with pytest.raises(InvalidRequest) as caught:
        load_node_settings(NEEDED | flags)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        (17, 17),
        ("8GiB", 8 * GiB),
        ("1.5 GiB", 3 * GiB // 2),
        ("512mib", 512 * MiB),
        ("2GB", 2 * 10**9),
    ],
)
def test_sizes_are_read(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "8 Gx", "-1", "1e9", "0.3B", "8GiB8", -5])
def test_what_is_no_size_is_refused(text: str | int) -> None:
    with pytest.raises(ValueError, match=r"size|whole|negative"):
        parse_size(text)


@given(st.integers(min_value=0, max_value=2**60))
def test_sizes_round_trip(size: int) -> None:
    assert parse_size(format_size(size)) == size


def test_durations_are_read() -> None:
    assert [parse_duration(text) for text in ("30s", "200ms", "1.5s", "2m")] == [
        30 * SECOND_NS,
        200 * MS_NS,
        1500 * MS_NS,
        120 * SECOND_NS,
    ]
    with pytest.raises(ValueError, match="such as 30s"):
        parse_duration("30")


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "node.toml"
    config.write_text(
        'grpc_port = 1\ndata_port = 2\nmetrics_port = 3\ncapacity = "2GiB"\nhost = ["127.0.0.1", "::1"]\n'
    )
    monkeypatch.setenv("KVSTORE_GRPC_PORT", "11")
    monkeypatch.setenv("KVSTORE_DATA_PORT", "12")
    monkeypatch.setenv("KVSTORE_DATA_DIR", "/a,/b")
    found = load_node_settings({"grpc_port": "21", "cache": "0", "staging": None}, config=config)
    assert (found.grpc_port, found.data_port, found.metrics_port) == (21, 12, 3)
    assert found.data_dir == ("/a", "/b")
    assert found.host == ("127.0.0.1", "::1")
    assert found.capacity == 2 * GiB
    assert found.staging == 128 * MiB


def test_the_file_may_be_named_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "node.toml"
    config.write_text("queue_depth = 7")
    monkeypatch.setenv("KVSTORE_CONFIG", str(config))
    assert load_node_settings(NEEDED).queue_depth == 7


def test_every_fault_is_told_one_a_line_whatever_else_is_wrong(tmp_path: Path) -> None:
    config = tmp_path / "node.toml"
    config.write_text('staging = "1KiB"\nqueue_depth = "deep"\n')
    wrong = {
        "data_dir": "/a,/b,/a",
        "capacity": "100MiB",
        "drain_timeout": "2h",
        "lease_ttl": "1ms",
        "host": "0.0.0.0",
        "grpc_port": "7401",
    }
    with pytest.raises(InvalidRequest) as caught:
        load_node_settings(wrong, config=config)
    told = str(caught.value).splitlines()
    assert len(told) == 9
    expected = [
        ("flag --drain-timeout: 2h is not allowed", "give at most 10m"),
        ("flag --lease-ttl: 1ms is not allowed", "give at least 1s"),
        (f"key queue_depth of {config}: 'deep'", "write a whole number"),
        ("data_dir /a,/b,/a names one folder twice", "name each once"),
        ("capacity 100MiB gives each of 3 data dirs 33MiB, at least 64MiB", "set capacity to 192MiB"),
        ("staging 1KiB is below 16MiB", "raise staging"),
        ("host 0.0.0.0 is reachable from other machines", "--tenants FILE"),
        ("host 0.0.0.0 names no place", "--advertise ADDRESS"),
        ("grpc_port, data_port and metrics_port must differ", "[7401, 7401, 7402]"),
    ]
    for fault, fix in expected:
        assert [line for line in told if fault in line and fix in line], fault


def test_what_is_missing_does_not_hide_what_is_wrong() -> None:
    with pytest.raises(InvalidRequest) as caught:
        load_node_settings({"staging": "1KiB"})
    told = str(caught.value).splitlines()
    assert [line.split(" is ")[0] for line in told] == ["data_dir", "capacity", "staging 1KiB"]


@given(st.integers(min_value=0, max_value=2**60))
def test_durations_round_trip(duration_ns: int) -> None:
    assert parse_duration(format_duration(duration_ns)) == duration_ns


def test_capacity_is_shared_by_the_drives() -> None:
    found = load_node_settings(NEEDED | {"data_dir": "/a,/b,/c", "capacity": "1GiB"})
    assert found.capacity_each_bytes == 341 * MiB


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"capacity": "1MiB"}, ["1MiB", "64MiB", "set capacity to 64MiB"]),
        ({"capacity": "100MiB", "data_dir": "/a,/b"}, ["50MiB", "set capacity to 128MiB"]),
        ({"capacity": "8 Gx"}, ["--capacity", "'8 Gx'", "8GiB"]),
        ({"data_dir": ""}, ["data_dir", "name 1 to"]),
        ({"data_dir": "/a,/a/"}, ["twice"]),
        ({"host": "0.0.0.0"}, ["0.0.0.0", "--insecure"]),
        ({"host": "node7.example"}, ["node7.example", "--insecure"]),
        ({"host": "0.0.0.0", "insecure": True}, ["--advertise"]),
        ({"grpc_port": "70000"}, ["--grpc-port", "65535"]),
        ({"grpc_port": "7401"}, ["must differ", "7401"]),
        ({"transport": "carrier pigeon"}, ["--transport", "tcp"]),
        ({"cache": "900TiB"}, ["900TiB", "90 %", "lower cache"]),
        ({"staging": "1MiB"}, ["staging", "16MiB"]),
        ({"segment_bytes": "512MiB"}, ["512MiB", "64MiB", "0 chooses"]),
        ({"segment_bytes": "3000000"}, ["whole MiB"]),
        ({"write_amplification_max": "0.5"}, ["--write-amplification-max", "0.5", "1"]),
        ({"queue_depth": "0"}, ["--queue-depth", "1"]),
        ({"drive_endurance": "2"}, ["2TiB"]),
        ({"drain_timeout": "2h"}, ["--drain-timeout: 2h is not allowed; give at most 10m"]),
        ({"node_id": "n" * 300}, ["300 bytes", "256", "shorter"]),
        ({"device": "tape"}, ["--device", "'threads'"]),
        ({"colour": "blue"}, ["colour", "known are", "data_dir"]),
    ],
)
def test_refusals_name_value_limit_and_fix(flags: dict[str, object], words: list[str]) -> None:
    message = refusal(**flags)
    assert all(word in message for word in words), message


def test_what_is_missing_is_named_with_all_ways_to_set_it() -> None:
    with pytest.raises(InvalidRequest, match=r"capacity is not set; pass --capacity, or set KVSTORE_CAPACITY"):
        load_node_settings({"data_dir": "/a"})


def test_a_refusal_names_where_the_value_came_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "node.toml"
    config.write_text('queue_depth = "deep"')
    monkeypatch.setenv("KVSTORE_GRPC_PORT", "tcp://10.0.0.1:7400")
    with pytest.raises(InvalidRequest) as caught:
        load_node_settings(NEEDED, config=config)
    message = str(caught.value)
    assert "environment variable KVSTORE_GRPC_PORT: 'tcp://10.0.0.1:7400'" in message
    assert f"key queue_depth of {config}" in message


def test_a_file_that_is_missing_or_no_toml_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read: No such file"):
        load_node_settings(NEEDED, config=tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("capacity = ")
    with pytest.raises(InvalidRequest, match="not valid TOML"):
        load_node_settings(NEEDED, config=broken)
    unknown = tmp_path / "unknown.toml"
    unknown.write_text("capacty = 1")
    with pytest.raises(InvalidRequest, match="capacty is not a setting"):
        load_node_settings(NEEDED, config=unknown)


def test_loopback_needs_no_insecure() -> None:
    assert load_node_settings(NEEDED | {"host": "127.0.0.2,::1,localhost"}).host == ("127.0.0.2", "::1", "localhost")
    assert not is_loopback("10.0.0.1")
    assert is_wildcard("::")
    assert not is_wildcard("name")


def test_settings_do_not_change() -> None:
    found = load_node_settings(NEEDED)
    with pytest.raises(ValueError, match="frozen"):
        found.capacity = 1
