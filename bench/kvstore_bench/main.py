"""`kvstore-bench`: run a scenario and print what was measured."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from kvstore_bench import report
from kvstore_bench.measure import Row


def main(arguments: list[str] | None = None) -> int:
    """Entry point. Exit status: 0 measured, 1 a must was missed and --gate was given, 2 bad usage or a failed run."""
    parser = argparse.ArgumentParser(
        prog="kvstore-bench", description="Benchmarks of kvstore, stated as ratios to limits taken in the same run."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run a scenario")
    run.add_argument("scenario", choices=["cluster", "micro", "peers", "shm", "transport"])
    run.add_argument("--quick", action="store_true", help="under a minute, rough figures")
    run.add_argument(
        "--only",
        default="",
        metavar="GROUP",
        help="only groups whose name contains this: ram, cold, put, recovery, fast (a drive in memory); of transport: "
        "requests, reads, ibverbs, pyverbs; of peers: ram, ssd, put; of cluster: placement, lookup, throughput, "
        "recovery, recovery:FAULT",
    )
    run.add_argument("--json", type=Path, metavar="FILE", help="also write the rows and the machine as JSON")
    run.add_argument(
        "--folder",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="where data dirs are made; must be on the drive to measure",
    )
    run.add_argument("--gate", action="store_true", help="exit 1 when a must was missed")
    options = parser.parse_args(arguments)
    from kvstore_bench.scenarios import cluster, micro, peers, shm, transport

    scenario = {
        "cluster": cluster.run,
        "micro": micro.run,
        "peers": peers.run,
        "shm": shm.run,
        "transport": transport.run,
    }[options.scenario]
    rows: list[Row] = []
    print(report.LEGEND, flush=True)
    try:
        for row in scenario(quick=options.quick, folder=options.folder, only=options.only):
            rows.append(row)
            print(report.line_of(row), flush=True)
    except RuntimeError as error:
        print(f"kvstore-bench: {error}", file=sys.stderr)
        return 2
    if options.json is not None:
        report.write_json(options.json, options.scenario, rows)
    return 1 if options.gate and any(row.verdict == "missed" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
