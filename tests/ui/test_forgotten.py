"""Among 25 agents one has a session that somebody edited by hand: which, where, why, and what the model saw."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from playwright.async_api import Browser, Locator, expect

from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings
from ..serving import serving
from ..talking import ask, running
from .conftest import an_agent, imported, page_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

# From the page's address alone.
MOST_CLICKS = 4


async def test_four_clicks_lead_to_what_the_model_saw(
    browser: Browser, claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings(claude_bin=claude_2)
    clicks: list[Locator] = []

    async def click(place: Locator) -> None:
        clicks.append(place)
        await place.click()

    async with running(settings) as engine:
        for number in range(24):
            await imported(engine, await an_agent(engine, f"agent-{number}"), [("hello", "hi")])
        first = await ask(engine, "remember: the colour is teal", agent="edited")
        session = await engine.store.session(first.session_id or "")
        assert session is not None
    file = Path(session.transcript)
    said = await asyncio.to_thread(file.read_text)
    await asyncio.to_thread(file.write_text, said.replace("teal", "rust"))
    async with running(settings) as engine, serving(engine, settings) as url:
        await ask(engine, "what is the colour?", agent="edited")
        await ask(engine, "thank you", agent="edited")
        async with page_of(browser, url) as page:
            await expect(page.locator("#chains .row")).to_have_count(25)
            await click(page.locator("#chains .row", has=page.locator(".repaired", has_text="repair")))
            await expect(page.locator("#chain h1")).to_have_text("edited")
            repaired = page.locator("#chain .row", has=page.locator('.told[data-kind="repair"]'))
            await expect(repaired.locator(".told")).to_have_text("repair Session file had been changed; restored.")
            await click(repaired)
            verdict = page.locator("#turn .verdict")
            await expect(verdict).to_contain_text("nothing forgotten: 2 of 2 turns were sent")
            await click(page.locator("#turn .seen summary"))
            request = page.locator("#turn .seen .said")
            await expect(request.filter(has_text="remember: the colour is teal")).to_have_count(1)
            await expect(request.filter(has_text="rust")).to_have_count(0)
            assert len(clicks) <= MOST_CLICKS
            await page.locator("#turn .transcript summary").first.click()
            command = page.locator("#turn .by-hand code")
            await expect(command).to_contain_text(f"--resume {session.id}")
            await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
            await page.locator("#turn .by-hand .copy").click()
            await expect(page.locator("#turn .by-hand .copy")).to_have_text("copied")
            assert await page.evaluate("navigator.clipboard.readText()") == await command.text_content()
