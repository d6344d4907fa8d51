"""All checks of a machine for one node, in the order of the table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from kvstore.cluster.store_address import parse_store_address
from kvstore.doctor.compiled import check_compiled, read_compiled
from kvstore.doctor.etcd import check_etcd, read_etcd
from kvstore.doctor.finding import Finding, Fix, Status
from kvstore.doctor.machine import check_machine, read_machine
from kvstore.doctor.network import (
    check_dscp_rules,
    check_queue,
    check_tcp,
    read_dscp_rules,
    read_queues,
    read_tcp,
    served_netdevs,
)
from kvstore.doctor.ports import PortFacts, check_advertised, check_port, read_advertised, read_ports
from kvstore.doctor.rdma import check_rdma
from kvstore.doctor.start import check_limits, read_places, read_rdma_of
from kvstore.doctor.storage import check_places, check_trial
from kvstore.doctor.storage_trial import try_place
from kvstore.doctor.system import LinuxSystem, System
from kvstore.doctor.topology import check_topology, read_topology
from kvstore.errors import InvalidRequest
from kvstore.settings import NodeSettings, inspect_node_settings


def _no_more(_: NodeSettings) -> Sequence[str]:
    return ()


def examine(
    flags: Mapping[str, object],
    *,
    config: Path | None = None,
    system: System | None = None,
    more_faults: Callable[[NodeSettings], Sequence[str]] = _no_more,
) -> list[Finding]:
    """Every check, for a node with these settings; missing or wrong ones are findings themselves.

    Takes up to some seconds where addresses do not answer. Writes nothing but a file without a name into each data
    dir, for as long as it tries I/O on it.

    Args:
        flags, config: as for `load_node_settings`.
        system: the machine to read from; None is this one.
        more_faults: what else would keep a node with these settings from starting, one line each: of files that only
            the server can read.
    """
    system = system or LinuxSystem()
    settings, faults = inspect_node_settings(flags, config=config)
    rdma, places = read_rdma_of(system, settings), read_places(system, settings)
    netdevs = served_netdevs(system, settings.host)
    dscp = read_dscp_rules(system)
    findings = [check_settings(settings, [*faults, *_faults_of_cluster(settings), *more_faults(settings)])]
    findings += check_machine(read_machine(system, memory_wanted_bytes=settings.cache + settings.staging))
    findings.append(check_compiled(read_compiled()))
    findings += check_limits(system, settings, rdma)
    findings += check_places(places)
    for facts in places:
        if not facts.problem:
            findings += check_trial(try_place(system, facts.path, mode_wanted=settings.device))
    findings += [check_port(facts) for facts in _ports(system, settings)]
    advertised = read_advertised(hosts=settings.host, advertise=settings.advertise, port=settings.data_port)
    findings += [check_advertised(facts) for facts in advertised]
    findings += check_etcd(read_etcd(settings.cluster))
    findings += check_tcp(read_tcp(system))
    findings += [check_queue(facts) for facts in read_queues(system, netdevs, dscp.rules)]
    findings.append(check_dscp_rules(dscp))
    findings += check_rdma(rdma)
    findings += check_topology(read_topology(system, netdevs=netdevs, drives=[facts.drive for facts in places]))
    return findings


def _faults_of_cluster(settings: NodeSettings) -> list[str]:
    """What is wrong with the text of the setting `cluster`; who answers there is another line's."""
    if not settings.cluster:
        return []
    try:
        parse_store_address(settings.cluster)
    except InvalidRequest as error:
        return [str(error)]
    return []


def check_settings(settings: NodeSettings, faults: Sequence[str]) -> Finding:
    """Whether a node would start with these settings."""
    missing = [name for name, value in (("data_dir", settings.data_dir), ("capacity", settings.capacity)) if not value]
    if not faults and not missing:
        return Finding(check="settings", status=Status.OK, found="complete", needed="complete and within bounds")
    unknown = "drives" if "data_dir" in missing else "space"
    unset = f"{' and '.join(missing)} not set, so the lines about {unknown} say less"
    return Finding(
        check="settings",
        status=Status.FAILING if faults else Status.WARNING,
        found="; ".join([*faults, *([unset] if missing else [])]),
        needed="complete and within bounds",
        fix=_FIX_OF_FAULTS if faults else _FIX_OF_MISSING,
    )


_FIX_OF_FAULTS: Final = Fix(
    shell="give other values, as the line says, in the flag, the environment or the config file; kvstore serve --help "
    "names each setting",
    systemd="Environment=KVSTORE_NAME=VALUE with another value, or the file of KVSTORE_CONFIG; then systemctl "
    "daemon-reload and restart",
    kubernetes="another value in the values of the chart",
)
_FIX_OF_MISSING: Final = Fix(
    shell="kvstore doctor with the flags (or --config FILE) that kvstore serve gets; kvstore serve --help",
    systemd="Environment=KVSTORE_DATA_DIR=... and KVSTORE_CAPACITY=..., or KVSTORE_CONFIG=FILE",
    kubernetes="the values of the chart; kubectl exec POD -- kvstore doctor has the node's own settings",
)


def _ports(system: System, settings: NodeSettings) -> list[PortFacts]:
    ports = [
        ("grpc_port", settings.grpc_port),
        ("data_port", settings.data_port),
        ("metrics_port", settings.metrics_port),
    ]
    return read_ports(system, hosts=settings.host, ports=ports, data_dirs=settings.data_dir)
