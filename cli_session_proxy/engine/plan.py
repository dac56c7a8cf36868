"""The subscription's usage windows as the provider reports them: for the page, metrics, headers and the next start."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Coroutine
from typing import Any

from ..domain.models import JSON
from ..domain.plan import Plan
from ..stores.base import Findings
from ..tasks import failures_logged

# The store's key for it, with one value per host.
SUBJECT = "plan"
# Seconds between two stored reports of equal status: the used shares change at every turn.
SELDOM = 30.0


class PlanWatch:
    """One per engine."""

    def __init__(self, store: Findings, own: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]) -> None:
        self._store = store
        self._own = own
        self._plan: Plan | None = None
        self._kept: Plan | None = None
        self._keeping: asyncio.Task[None] | None = None  # one write at a time, however many reports come

    async def load(self) -> None:
        """Load what the provider reported before this start."""
        self._plan = self._kept = await stored(self._store)

    def report(self, detail: JSON) -> None:
        plan = Plan.read(detail, time.time())
        if plan is None:
            return
        self._plan, before = plan, self._kept
        is_news = before is None or before.status != plan.status or plan.at - before.at > SELDOM
        if is_news and (self._keeping is None or self._keeping.done()):
            self._kept = plan
            self._keeping = self._own(self._keep(plan))

    def now(self) -> Plan | None:
        """The plan's current windows; None if none were reported, e.g. for a CLI that is billed by use."""
        return None if self._plan is None else self._plan.current(time.time())

    async def _keep(self, plan: Plan) -> None:
        with failures_logged("plan_not_kept"):
            await self._store.keep_findings(SUBJECT, {socket.gethostname(): plan.as_json()})


async def stored(store: Findings) -> Plan | None:
    """The newest report to any host of the store; None without a report, or if its row is damaged."""
    reports = await store.findings(SUBJECT)
    return Plan.kept(reports[-1].found) if reports else None
