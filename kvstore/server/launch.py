"""What the supervisor tells a worker on its command line.

The worker is `python -m kvstore.server.worker LAUNCH`, LAUNCH being one JSON object. It inherits the descriptor
`admin_fd`, a Unix stream socket that carries ADMIN frames of the wire protocol. The worker binds its data ports,
recovers its drives, and reports, unasked, `ADMIN{"ready", {"data": ["host:port", ...], "boot_id": bytes}}` or
`ADMIN{"failed", {"message": text}}` before it exits; while it recovers it may report `ADMIN{"recovering", {...}}`.
End of file on that socket means that the supervisor is gone: the worker ends.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Final

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
        hosts: addresses to listen on.
        data_port: port on each of them; 0 is any free one.
        cache_bytes, staging_bytes: of this worker; cache 0 is off.
        device: "auto", "uring", "liburing" or "threads".
        queue_depth: operations in flight for each drive.
        segment_bytes: 0 lets a new drive choose by its capacity; ignored by a drive that is formatted already.
        write_amplification_max: bound of re-insertion.
        endurance_bytes_day: what each drive is rated for; 0 is not set.
        scrub_bytes_second: background verification for each drive; 0 is off.
        drain_ns: how long calls in progress may take after SIGTERM.
    """

    admin_fd: int
    rail: int
    node_id: str
    data_dirs: tuple[str, ...]
    capacity_bytes: int
    hosts: tuple[str, ...]
    data_port: int
    cache_bytes: int
    staging_bytes: int
    device: str
    queue_depth: int
    segment_bytes: int
    write_amplification_max: float
    endurance_bytes_day: int
    scrub_bytes_second: int
    drain_ns: int
    log_level: str
    log_format: str

    def to_argument(self) -> str:
        """The one command line argument that `from_argument` reads."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_argument(cls, argument: str) -> WorkerLaunch:
        """The value behind a command line argument of `to_argument`, from a supervisor of the same version."""
        given = json.loads(argument)
        assert given.keys() == {declared.name for declared in fields(cls)}, sorted(given)
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})
