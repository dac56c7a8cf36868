"""What is left of a budget is told beside what was spent: of the key on the first page, of the agent in its head."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from playwright.async_api import Browser, expect

from cli_session_proxy.settings import Settings
from cli_session_proxy_store_conformance.samples import a_begin, a_commit, a_turn, accepted, an_agent

from ..serving import serving
from ..talking import running
from .conftest import barriers, page_of

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_budgets_are_shown_where_spend_is(browser: Browser, tmp_path: Path, axe: str) -> None:
    budgets = {"each_key": {"usd_per_month": 5.0, "requests_per_month": 1}, "agents": {"ada": {"usd_per_month": 1.0}}}
    settings = Settings(var=tmp_path / "var", port=0, budgets=budgets)  # type: ignore[arg-type]
    async with running(settings) as engine, serving(engine, settings) as url:
        agent = await an_agent(engine.store, "ada")
        of, now = engine.budgets.of("local", "ada"), time.time()
        turn = await accepted(engine.store, a_turn(agent, "t1", at=now, budgets=of))
        await engine.store.begin(**a_begin(turn))
        await engine.store.commit(**a_commit(turn, agent, cost_usd=0.25, finished_at=now, budgets=of))
        async with page_of(browser, url) as page:
            told = page.locator("#overview .budgets li")
            await expect(told).to_have_text(
                ["Budget of key local: $0.25 of $5.00 a month", "Budget of key local: 1 of 1 requests a month, used up"]
            )
            assert await barriers(page, axe) == []
        async with page_of(browser, url, at="#/ada") as page:
            await expect(page.locator("#chain .summary p")).to_contain_text("$0.25 of $1.00 a month")
