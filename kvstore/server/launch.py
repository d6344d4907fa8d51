"""What the supervisor tells a worker: the command line, and the verbs of the admin socket.

The worker is `python -m kvstore.server.worker LAUNCH`, LAUNCH being one JSON object. It inherits the descriptor
`admin_fd`, a connected Unix stream socket that speaks the wire protocol with the supervisor as the client: HELLO,
WELCOME, then calls, one at a time: ADMIN, and the ordinary MATCH and DROP, on behalf of gRPC. End of file there means
that the supervisor is gone: the worker ends.

Verbs of ADMIN, arguments -> value (msgpack maps); ERROR where it fails:

    ready       {} -> {"data": ["host:port", ...], "boot_id": 16 bytes,
                "targets": [{"id": text, "path": text, "capacity_bytes": int}, ...]}.
                Answered once data ports are bound and drives recovered. An ERROR is a start that failed: its text is
                shown to the operator as it is, and the worker exits with 1.
    stats       {} -> {"metrics": Registry.snapshot(), "state": "serving" | "draining"}
    namespaces  {"after": digest or b"", "limit": int} -> {"namespaces": [{"digest": bytes, "generation": int,
                "dropped": bool (ever), "manifest": bytes}, ...]}, in the order of digests
    explain     {"namespace": digest, "keys": n * 32 bytes} -> {"known": bool,
                "keys": [{"status": int (0 or a MissReason), "text": one sentence, "ago_ns": int}, ...]}
    scrub       {"bytes_second": int} -> {"started": bool}
    drain       {"resume": bool} -> {"draining": bool}
    handover    {} -> {"done": bool, "handed_on": int, "left_behind": int}: of a draining member of a cluster
    hold_writes  {"for_ns": int} -> {}: take puts and deletes for so long; the next one counts from its receipt
    peer_token_set  {"token": bytes} -> {}: by which nodes of the cluster know each other; empty is none
    uses        {} -> {"targets": [{"id": text, "tenants": {name: bytes}}, ...]}: padded bytes on each drive
    shares_set  {"shares": {target id: {tenant: bytes}}} -> {}: in a cluster, instead of the quotas of `tenants_set`
    dropped     {} -> {"digests": n * 32 bytes, "generations": [int, ...]}: of namespaces that were ever dropped
    dropped_set  the same -> {"count": int}: drop what is of an older generation
    count_lookup  {"keys": int, "hits": int} -> {}: a lookup that the supervisor made of several workers
    view_set    the view as plain data -> {}
    shutdown    {"within_ns": int} -> {}: refuse new calls, finish those in progress within the time, close the drives,
                exit 0. The answer comes at once. SIGTERM means the same with `drain_ns`.

SIGINT is ignored: Ctrl-C in a terminal reaches the whole process group, and is for the supervisor, which then drains.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from enum import Enum
from typing import Any, Final


class RdmaMode(Enum):
    """Whether a worker uses RDMA."""

    OFF = "off"
    AUTO = "auto"
    """Where it can be had; else TCP."""
    REQUIRED = "required"


WORKER_MODULE: Final = "kvstore.server.worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLaunch:
    """Everything that one worker needs to start.

    Attributes:
        admin_fd: inherited descriptor of the socket to the supervisor.
        rail: index of this worker among the node's, from 0.
        node_id: name of the node, for logs and WELCOME.
        data_dirs: folders (or raw block devices) that this worker owns; one target for each.
        capacity_bytes: what each of `data_dirs` may use.
        hosts: addresses to listen on, that of its own rail first.
        advertise: name or address to report in place of a wildcard host (0.0.0.0, ::); "" where there is none.
        data_port: port on each of them; 0 is any free one.
        local_socket: path of the Unix socket for clients on this host; "" for none.
        cache_bytes, staging_bytes: of this worker; cache 0 is off.
        device: "auto", "uring" or "threads".
        queue_depth: operations in flight for each drive.
        segment_bytes: 0 lets a new drive choose by its capacity; ignored by a drive that is formatted already.
        write_amplification_max: bound of re-insertion.
        endurance_bytes_day: what each drive is rated for; 0 is not set.
        scrub_bytes_second: background verification for each drive; 0 is off.
        repair_bytes_second: copies from other nodes; 0 is off.
        is_member: of a cluster: puts and deletes are refused but for the time that `hold_writes` gives.
        has_tenants: nobody is admitted before the supervisor has sent the tenants (`tenants_set`).
        cluster_id: of the node, in hex; drives of another one are refused, zeros take any.
        own_id: in hex; drives that bear it are taken too, and become the cluster's; zeros for none.
        drives_of_node: by which a tenant's quota of the node is divided.
        rdma: "off", "auto" or "required" (RdmaMode).
        rdma_port, rdma_gid: which; "" lets the rule choose.
        drain_ns: how long calls in progress may take after SIGTERM.
    """

    admin_fd: int
    rail: int
    node_id: str
    data_dirs: tuple[str, ...]
    capacity_bytes: int
    hosts: tuple[str, ...]
    advertise: str
    data_port: int
    local_socket: str
    cache_bytes: int
    staging_bytes: int
    device: str
    queue_depth: int
    segment_bytes: int
    write_amplification_max: float
    endurance_bytes_day: int
    scrub_bytes_second: int
    repair_bytes_second: int
    drain_ns: int
    has_tenants: bool
    drives_of_node: int
    cluster_id: str
    log_level: str
    log_format: str
    is_member: bool = False
    own_id: str = ""
    rdma: str = "off"
    rdma_port: str = ""
    rdma_gid: str = ""

    def to_argument(self) -> str:
        """The one command line argument that `from_argument` reads."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_argument(cls, argument: str) -> WorkerLaunch:
        """The value behind a command line argument of `to_argument`, from a supervisor of the same version."""
        given: dict[str, Any] = json.loads(argument)
        assert given.keys() == {declared.name for declared in fields(cls)}, sorted(given)
        for name in ("data_dirs", "hosts"):
            given[name] = tuple(given[name])
        return cls(**given)
