"""python -m tests.faults.faulty_serve ...: `kvstore ...`, with workers whose drive a test can hurt."""

from __future__ import annotations

import kvstore.server.launch

kvstore.server.launch.WORKER_MODULE = "tests.faults.faulty_worker"  # type: ignore[misc]

from kvstore.cli.main import main  # noqa: E402 -- the supervisor binds the name when it is imported

if __name__ == "__main__":
    main()
