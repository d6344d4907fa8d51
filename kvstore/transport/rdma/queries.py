"""What the libraries answer about devices and ports, which both call by the names of `<infiniband/verbs.h>`."""

from __future__ import annotations

from typing import Protocol, SupportsInt

from kvstore.transport.rdma.verbs import MTU_BYTES, DeviceLimits, Port


class DeviceAnswer(Protocol):
    """struct ibv_device_attr, as far as we ask."""

    max_mr_size: int
    max_mr: int
    max_qp: int
    max_qp_wr: int
    max_cqe: int
    max_qp_rd_atom: int


class PortAnswer(Protocol):
    """struct ibv_port_attr, as far as we ask."""

    state: SupportsInt
    active_mtu: SupportsInt
    lid: int
    link_layer: SupportsInt
    gid_tbl_len: int


def limits_of(found: DeviceAnswer) -> DeviceLimits:
    """ibv_query_device(3)."""
    return DeviceLimits(
        region_bytes_max=found.max_mr_size,
        regions_max=found.max_mr,
        pairs_max=found.max_qp,
        work_requests_max=found.max_qp_wr,
        completions_max=found.max_cqe,
        reads_max=found.max_qp_rd_atom,
    )


def port_of(number: int, found: PortAnswer) -> Port:
    """ibv_query_port(3)."""
    return Port(
        number=number,
        state=int(found.state),
        mtu_bytes=MTU_BYTES.get(int(found.active_mtu), 0),
        lid=found.lid,
        link_layer=int(found.link_layer),
        gid_count=found.gid_tbl_len,
    )
