"""The machine's own time zone and the one that times are shown in, for a test."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from cli_session_proxy.domain import times


@contextmanager
def machine_in(zone: str, shown: times.Zone = "local") -> Iterator[None]:
    before = os.environ.get("TZ")
    os.environ["TZ"] = zone
    time.tzset()
    times.show_in(shown)
    try:
        yield
    finally:
        times.show_in("local")
        if before is None:
            del os.environ["TZ"]
        else:
            os.environ["TZ"] = before
        time.tzset()
