"""Each line of the doctor has a test with a faked system, and a real one where a machine can be put into that state."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.doctor.test_doctor_command import checks_in_code

TESTS = Path(__file__).parents[1]
OTHER_ROOMS = {"guest": TESTS / "rdma" / "guest" / "test_doctor_in_guest.py"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """Tests of one line, as "module::test", the module without `test_doctor_`.

    Attributes:
        faked: of a system that says what the test wants.
        real: of a machine, process or namespace that was put into the state.
        why_not: why some states are only faked; "" when all of them are real too.
    """

    faked: tuple[str, ...]
    real: tuple[str, ...] = ()
    why_not: str = ""


HARDWARE = "it would take other hardware"
LINES = {
    "settings": Shown(
        faked=("command::test_the_whole_examination_of_a_machine_of_files",),
        real=(
            "command::test_without_settings_it_looks_at_the_machine",
            "command::test_settings_come_from_the_file_too",
            "command::test_a_setting_that_is_refused_is_told_once",
        ),
    ),
    "kernel": Shown(faked=("machine::test_kernels",), real=("machine::test_a_real_process_that_sees_an_old_kernel",)),
    "clocksource": Shown(
        faked=("machine::test_clocksources",), real=("machine::test_a_real_process_that_sees_another_machine",)
    ),
    "clock": Shown(
        faked=("machine::test_wall_clock",),
        real=("machine::test_this_machine_tells_all_of_it",),
        why_not="the clock is the whole machine's: a test must not take it out of step",
    ),
    "huge_pages": Shown(
        faked=("machine::test_huge_pages", "machine::test_a_kernel_without_huge_pages"),
        real=("machine::test_a_real_process_that_sees_another_machine",),
    ),
    "memory": Shown(
        faked=("machine::test_memory_that_others_have_taken",),
        real=("machine::test_a_real_process_that_sees_another_machine",),
    ),
    "compiled_parts": Shown(
        faked=("compiled::test_a_part_of_another_build_is_not_used_and_named",),
        real=("compiled::test_a_missing_part_is_named_with_what_is_slower",),
    ),
    "memlock": Shown(
        faked=("process::test_eight_mebibytes_are_too_few_for_io_uring_and_rdma", "process::test_enough_may_be_locked"),
        real=("process::test_a_real_process_that_may_lock_little",),
    ),
    "open_files": Shown(
        faked=("process::test_open_files",), real=("process::test_a_real_process_with_few_open_files",)
    ),
    "data_dir": Shown(
        faked=("storage::test_a_place_that_cannot_be_used_is_said_once",),
        real=("storage::test_a_real_drive_raw_and_mounted", "storage::test_a_real_folder_that_may_not_be_written"),
    ),
    "file_system": Shown(
        faked=("storage::test_file_systems",),
        real=("storage::test_a_real_tmpfs", "storage::test_a_real_ext4_and_its_journal"),
        why_not="a file system over a network, or of a container's layers, is only faked",
    ),
    "drive": Shown(faked=("storage::test_drives",), real=("storage::test_a_real_drive_that_spins_by_its_own_word",)),
    "space": Shown(
        faked=(
            "storage::test_capacity_that_is_not_there_fails_and_own_files_count",
            "storage::test_data_dirs_on_one_file_system_share_its_space",
        ),
        real=("storage::test_a_real_tmpfs", "command::test_serve_says_at_the_start_what_doctor_says_and_serves"),
    ),
    "device_mode": Shown(
        faked=("storage::test_the_device_mode_and_its_reason", "storage::test_without_io_uring"),
        real=("storage::test_a_real_process_without_io_uring",),
    ),
    "direct_io": Shown(
        faked=("storage::test_direct_io_and_its_alignment",),
        real=("storage::test_a_real_tmpfs", "storage::test_a_real_ext4_and_its_journal"),
    ),
    "port": Shown(
        faked=("ports::test_verdicts_on_a_port", "ports::test_a_port_that_outgoing_connections_may_take"),
        real=(
            "ports::test_a_real_port_free_and_in_use",
            "ports::test_a_real_port_of_another_process_is_named_by_its_command",
            "ports::test_a_real_address_that_is_not_of_this_machine",
            "ports::test_a_real_port_below_1024_as_an_ordinary_user",
        ),
    ),
    "advertised": Shown(
        faked=("ports::test_verdicts_on_an_advertised_address",),
        real=(
            "ports::test_a_real_address_is_dialled_back",
            "ports::test_a_real_name_that_does_not_resolve",
            "ports::test_a_real_name_that_leads_to_another_program",
            "ports::test_a_real_address_that_only_this_machine_reaches",
        ),
    ),
    "etcd": Shown(
        faked=(
            "etcd::test_one_of_three_out_of_reach_is_a_warning_all_are_a_failure",
            "etcd::test_a_slow_one_is_a_warning",
        ),
        real=(
            "etcd::test_a_real_etcd_healthy_frozen_and_gone",
            "etcd::test_a_real_etcd_with_certificates",
            "etcd::test_a_real_healthy_server",
            "etcd::test_a_real_port_where_nobody_listens",
            "etcd::test_a_real_server_of_another_protocol",
            "etcd::test_a_real_server_that_is_not_healthy",
            "etcd::test_a_real_server_that_never_answers_ends_by_its_deadline",
        ),
    ),
    "congestion_control": Shown(
        faked=("network::test_each_setting_of_tcp_that_is_wrong_has_its_fix",),
        real=("network::test_a_real_namespace_with_small_values",),
    ),
    "tcp_buffers": Shown(
        faked=("network::test_each_setting_of_tcp_that_is_wrong_has_its_fix",),
        real=("network::test_a_real_namespace_with_small_values",),
    ),
    "accept_backlog": Shown(
        faked=("network::test_each_setting_of_tcp_that_is_wrong_has_its_fix",),
        real=("network::test_a_real_namespace_with_small_values",),
    ),
    "qdisc": Shown(
        faked=("network::test_verdicts_on_a_queue",),
        real=(
            "network::test_a_real_veth_queues_nothing_by_itself",
            "network::test_a_real_htb_without_filter_has_classes_for_nobody",
            "network::test_a_real_htb_with_a_filter",
        ),
    ),
    "dscp_rules": Shown(
        faked=(
            "network::test_verdicts_on_rules",
            "network::test_targets_of_iptables_count_only_where_its_mangle_table_is_in_use",
        ),
        real=("network::test_real_rules_of_nftables",),
    ),
    "rdma_port": Shown(
        faked=(
            "rdma::test_the_doctor_shows_ports_and_choice",
            "rdma::test_a_small_mtu_and_a_port_that_is_down_are_warnings",
            "rdma::test_a_port_goes_down_and_comes_back",
        ),
        real=("guest::test_both_devices_with_their_tables_and_the_choice",),
        why_not=f"ports of InfiniBand and of several rates: {HARDWARE}",
    ),
    "rdma_choice": Shown(
        faked=("rdma::test_the_choice_of_gid_and_port", "rdma::test_no_device"),
        real=("guest::test_both_devices_with_their_tables_and_the_choice",),
        why_not=f"ports of InfiniBand and of several rates: {HARDWARE}",
    ),
    "topology": Shown(
        faked=(
            "topology::test_where_everything_sits",
            "topology::test_a_drive_on_the_other_socket",
            "topology::test_a_link_below_its_maximum",
        ),
        real=("topology::test_this_machine",),
        why_not=f"a second socket, a slow link, a GPU: {HARDWARE}",
    ),
}


@cache
def names_of(module: str) -> frozenset[str]:
    """The names of a module's tests."""
    path = OTHER_ROOMS.get(module, TESTS / "doctor" / f"test_doctor_{module}.py")
    return frozenset(node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef))


def test_the_table_has_every_line() -> None:
    assert set(LINES) == checks_in_code()


@pytest.mark.parametrize("check", sorted(LINES))
def test_a_line_is_shown(check: str) -> None:
    shown = LINES[check]
    assert shown.faked, f"{check} has no test with a faked system"
    assert shown.real or shown.why_not, f"{check} has no real test, and nothing says why it cannot have one"
    for name in (*shown.faked, *shown.real):
        module, _, test = name.partition("::")
        assert test in names_of(module), f"{check}: there is no test {name}"


def test_the_table_names_every_real_test() -> None:
    named = {name for shown in LINES.values() for name in shown.real}
    modules = [path.stem.removeprefix("test_doctor_") for path in (TESTS / "doctor").glob("test_doctor_*.py")]
    real = {f"{module}::{name}" for module in modules for name in names_of(module) if name.startswith("test_a_real_")}
    assert real - named == set()
