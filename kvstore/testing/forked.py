"""Work in a forked child, for tests of what a fork, or another user, may do."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable


def in_child(work: Callable[[], None]) -> None:
    """Runs `work` after os.fork and waits for it; fails the test when it raises there."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:  # noqa: BLE001  the child's root
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
