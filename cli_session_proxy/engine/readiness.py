"""Can a turn be accepted now? Tested by a write and a read of the store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal

from .. import logs
from ..errors import ProxyError
from ..stores.base import Store
from .executor import Own

log = logs.get(__name__)

State = Literal["ready", "draining", "store_unavailable"]

# The store's timeout in seconds. It usually takes milliseconds; probes have a timeout of their own.
PATIENCE = 2.0
# Seconds that a result is reused: probes may come often, and each test waits for the disk.
KEPT = 1.0


class Readiness:
    """One probe at a time, shared by all callers. One per engine. `why`: the store's error in the last probe."""

    def __init__(self, is_open: Callable[[], bool], store: Store, own: Own) -> None:
        """`is_open`: whether new turns are accepted."""
        self._is_open = is_open
        self._store = store
        self._own = own
        self._probe: asyncio.Task[None] | None = None
        self._until = 0.0  # the loop's time
        self._last: State = "ready"
        self.why: str | None = None

    async def state(self) -> State:
        """The result of the newest probe, at most `PATIENCE` later."""
        if not self._is_open():
            return "draining"
        clock = asyncio.get_running_loop().time
        if clock() >= self._until:
            if self._probe is None or self._probe.done():
                self._probe = self._own(self._store.probe())
            state: State = "ready"
            self.why = None
            try:
                async with asyncio.timeout(PATIENCE):
                    await asyncio.shield(self._probe)
            except TimeoutError:
                state = "store_unavailable"
            except ProxyError as exc:
                log.warning("store_probe_failed", error=exc.message)
                state, self.why = "store_unavailable", exc.message
            if state != self._last:
                log.warning("readiness_changed", state=state, before=self._last)
            self._last, self._until = state, clock() + KEPT
        return self._last
