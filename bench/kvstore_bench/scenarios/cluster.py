"""Many nodes: how speed grows with targets, what lookups cost, how long faults last, and what `run_bytes` does.

Nodes and etcd are processes of this machine, in network namespaces: it needs root. Placement needs neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from kvstore.server.private_folder import private_folder
from kvstore.testing.net_lab import NamespacesUnavailable
from kvstore_bench.measure import Row
from kvstore_bench.scenarios import cluster_placement, cluster_recovery, cluster_speed

GROUPS: Final[dict[str, Callable[..., Iterator[Row]]]] = {
    "placement": cluster_placement.run,
    "lookup": cluster_speed.lookups,
    "throughput": cluster_speed.throughput,
    "recovery": cluster_recovery.run,
}


def run(*, quick: bool, folder: Path, only: str) -> Iterator[Row]:
    """Rows of the groups whose name contains `only`; "recovery:NAME" is the faults whose names contain NAME.

    Raises:
        RuntimeError: A network cannot be made.
    """
    group_name, _, fault = only.partition(":")
    with private_folder(folder, purpose="cluster") as made:
        for name, group in GROUPS.items():
            if group_name in name:
                more = {"only": fault} if fault else {}
                try:
                    yield from group(quick=quick, folder=made, **more)
                except NamespacesUnavailable as error:
                    raise RuntimeError(str(error)) from error
