"""`serve` on a host whose clock is wrong: by the seconds in the file that CHAOS_CLOCK names, read again as it changes.

Not libfaketime: a process that is killed while it holds that library's semaphore blocks every program that it started.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path

CLOCK = "CHAOS_CLOCK"
# Seconds that what was read is good for.
READ_AGAIN = 0.05


def clock_by(file: Path) -> Callable[[], float]:
    true = time.time
    offset, until = 0.0, 0.0

    def wrong() -> float:
        nonlocal offset, until
        now = time.monotonic()
        if now >= until:
            offset, until = float(file.read_text()), now + READ_AGAIN
        return true() + offset

    return wrong


if __name__ == "__main__":
    time.time = clock_by(Path(os.environ[CLOCK]))
    sys.argv = ["cli-session-proxy", "serve"]
    runpy.run_module("cli_session_proxy", run_name="__main__", alter_sys=False)
