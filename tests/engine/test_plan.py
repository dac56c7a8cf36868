"""What the provider says of a subscription's windows, as it is kept."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from cli_session_proxy.domain.plan import Plan, PlanWindow
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


@pytest.mark.parametrize(
    "found", [{}, {"status": "allowed\r\nset-cookie: a=b", "at": 1.0}, {"status": "allowed", "at": "x"}, {"at": 1.0}]
)
async def test_a_row_that_is_no_report_stops_no_start_and_reaches_no_answer(
    tmp_path: Path, found: dict[str, Any]
) -> None:
    store = SqliteStore(tmp_path / FILE)
    await store.open()
    try:
        await store.keep_findings(SUBJECT, {"host": found})
        watch = PlanWatch(store, asyncio.create_task)
        await watch.load()
        assert watch.now() is None
        window = {"name": "five_hour", "used": "much", "resets_at": 9e9, "status": "\n"}
        await store.keep_findings(
            SUBJECT, {"host": {"status": "allowed", "at": 1.0, "windows": [window, 7], "limits": "\n"}}
        )
        assert await stored(store) == Plan("allowed", 1.0, (PlanWindow("five_hour", None, 9e9),))
    finally:
        await store.close()
