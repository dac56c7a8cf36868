"""What the provider says of a subscription's windows, as it is kept."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from cli_session_proxy.engine.plan import SUBJECT, PlanWatch, stored
from cli_session_proxy.stores.sqlite.store import FILE, SqliteStore


async def test_it_is_kept_once_at_a_time_however_often_it_is_told(tmp_path: Path) -> None:
    """A shell in its CLI's place could have any number of writes begun."""
    begun: list[asyncio.Task[None]] = []
    most = 0

    def own(work: Any) -> asyncio.Task[None]:
        nonlocal most
        begun.append(asyncio.create_task(work))
        most = max(most, sum(not task.done() for task in begun))
        return begun[-1]

    store = SqliteStore(tmp_path / FILE)
    await store.open()
    try:
        watch = PlanWatch(store, own)
        for number in range(1000):
            watch.report({"status": ("allowed", "rejected")[number % 2]})
            await asyncio.sleep(0)
        await asyncio.gather(*begun)
        assert most == 1
        watch.report({"status": "allowed_warning"})
        await asyncio.gather(*begun)
        kept = await stored(store)
        assert kept is not None
        assert kept.status == "allowed_warning"
        assert len(await store.findings(SUBJECT)) == 1
    finally:
        await store.close()
