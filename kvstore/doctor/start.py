"""What every start of a node looks at: the few checks that cost milliseconds. Imports no more than they need."""

from __future__ import annotations

import logging

from kvstore.doctor.finding import Finding, Status
from kvstore.doctor.machine import check_machine, read_machine
from kvstore.doctor.process import check_process, read_process
from kvstore.doctor.rdma import RdmaFacts, check_rdma, read_rdma
from kvstore.doctor.storage import PlaceFacts, check_places
from kvstore.doctor.storage_reading import read_place
from kvstore.doctor.system import LinuxSystem, System
from kvstore.settings import NodeSettings

log = logging.getLogger(__name__)


def examine_start(settings: NodeSettings, *, system: System | None = None) -> list[Finding]:
    """What fails, of the checks that take a start no more than some milliseconds: no I/O on drives, nobody is dialled.

    Ports, and the way each drive is driven, are not among them: the start tries those itself, and tells.
    """
    system = system or LinuxSystem()
    findings = check_machine(read_machine(system, memory_wanted_bytes=settings.cache + settings.staging))
    rdma = read_rdma_of(system, settings)
    findings += check_limits(system, settings, rdma)
    findings += check_places(read_places(system, settings))
    findings += check_rdma(rdma)
    return [finding for finding in findings if finding.status is Status.FAILING]


def log_start(settings: NodeSettings, *, system: System | None = None) -> None:
    """Log a line for each finding of `examine_start`. Never keeps a node from starting: it tells what will go wrong."""
    for finding in examine_start(settings, system=system):
        log.error("doctor: %s", finding.sentence)


def read_rdma_of(system: System, settings: NodeSettings) -> RdmaFacts:
    """The RDMA devices, for the addresses that this node tells."""
    told = (*settings.host, settings.advertise) if settings.advertise else settings.host
    return read_rdma(system, transport=settings.transport, hosts=told)


def check_limits(system: System, settings: NodeSettings, rdma: RdmaFacts) -> list[Finding]:
    """The limits of this process, for what this node registers and opens."""
    facts = read_process(
        system,
        locked_bytes=settings.cache + settings.staging,
        rdma_wanted=settings.transport == "rdma",
        rdma_present=bool(rdma.ports) and settings.transport == "auto",
        registers_for_drives=settings.device != "threads",
    )
    return check_process(facts)


def read_places(system: System, settings: NodeSettings) -> list[PlaceFacts]:
    """Where the data dirs of this node lie."""
    needed_bytes = settings.capacity_each_bytes if settings.data_dir else 0
    return [read_place(system, path, needed_bytes=needed_bytes) for path in settings.data_dir]
