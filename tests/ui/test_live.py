"""A running turn on the page: its words as they come, what it waits for, and its end by hand."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from playwright.async_api import Browser, expect

from cli_session_proxy.backends.base import Retried, Used
from cli_session_proxy.domain.models import Usage
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.export.feed import ending

from ..scripted import RETRY, Scripted, delta
from ..serving import serving
from ..talking import request
from .conftest import barriers, page_of, store_only

pytestmark = pytest.mark.asyncio(loop_scope="session")

HOSTILE = "<img src=x onerror=alert(1)> teal"


@asynccontextmanager
async def watched(tmp_path: Path) -> AsyncIterator[tuple[Engine, Scripted, str]]:
    settings = store_only(tmp_path)
    used = Used(Usage(20, 40, 1200, 14))
    backend = Scripted([used, delta("The colour "), None, Retried(RETRY), None, delta(HOSTILE), None])
    engine = Engine(settings, backend=backend)
    await engine.start()
    try:
        async with serving(engine, settings) as url:
            yield engine, backend, url
    finally:
        for _ in backend.steps:
            backend.go.release()
        await engine.stop()


async def test_words_appear_as_they_come_and_waits_are_told(browser: Browser, tmp_path: Path, axe: str) -> None:
    async with watched(tmp_path) as (engine, backend, url):
        answer = await engine.submit(request("what is the colour?"))
        await backend.reached.acquire()
        async with page_of(browser, url) as page:
            await expect(page.locator("#overview .status")).to_contain_text("1 turn running")
            await expect(page.locator("#overview .running li")).to_contain_text("a answers")
            await page.locator("#chains .row").click()
            pane = page.locator(".pane")
            await expect(pane.locator(".said-so-far")).to_have_text("The colour ")
            await page.locator("#chain .pane a").click()
            # the opened turn has it now: there is one pane, and one way to end the turn
            await expect(page.locator("#turn .pane .said-so-far")).to_have_text("The colour ")
            await expect(pane).to_have_count(1)
            await expect(page.locator("#turn section:has-text('what is the colour?') ~ .now .pane")).to_have_count(1)
            await expect(pane.locator(".elapsed")).to_have_text(re.compile(r"^\d+ s$"))
            await expect(page.get_by_role("button", name="Cancel")).to_have_count(1)
            backend.go.release()
            await expect(pane.locator(".doing")).to_have_text(
                "the provider asks to wait 30 s, retry 2 of 3 (429 rate_limit_error)"
            )
            assert await barriers(page, axe) == []
            backend.go.release()
            await expect(pane.locator(".said-so-far")).to_have_text(f"The colour {HOSTILE}")
            await expect(pane.locator(".written")).to_have_text(
                f" · {len('The colour ' + HOSTILE)} characters · 1,234 tokens read, 40 written"
            )
            assert await page.locator("main img").count() == 0
            backend.go.release()
            await answer.turn()
            answer.acknowledge()
            await expect(page.locator("#turn h2 .badge")).to_have_text(["head"])
            await expect(pane).to_have_count(0)
            falls = page.locator("#turn .waterfall .what", has_text="the provider asks to wait 30 s")
            await expect(falls).to_have_count(1)
            await expect(page.locator('#turn .fall[data-failed="true"]')).to_have_count(1)


async def test_the_pane_follows_what_is_said_but_not_under_somebody_who_reads_above(
    browser: Browser, tmp_path: Path
) -> None:
    async with watched(tmp_path) as (engine, backend, url):
        lines = "\n".join(f"line {n}" for n in range(200))
        backend.steps = [delta(lines), None, delta("\nthe end"), None, delta("\nand more"), None]
        answer = await engine.submit(request("count"))
        await backend.reached.acquire()
        async with page_of(browser, url, at="#/a") as page:
            said = page.locator(".pane .said-so-far")
            await expect(said).to_contain_text("line 199")
            at_its_end = "one => one.scrollHeight - one.scrollTop - one.clientHeight < 2"
            assert await said.evaluate(at_its_end)
            backend.go.release()
            await expect(said).to_contain_text("the end")
            assert await said.evaluate(at_its_end)
            await said.evaluate("one => { one.scrollTop = 0; }")
            backend.go.release()
            await expect(said).to_contain_text("and more")
            assert await said.evaluate("one => one.scrollTop") == 0
            backend.go.release()
            await answer.turn()
            answer.acknowledge()


async def test_the_end_of_a_long_answer_begins_with_a_whole_word() -> None:
    assert ending("one two three", 100) == "one two three"
    assert ending("one two three", 8) == "three"
    assert ending("onetwothree", 5) == "three"


async def test_a_turn_is_cancelled_from_the_page_when_it_is_confirmed(browser: Browser, tmp_path: Path) -> None:
    async with watched(tmp_path) as (engine, backend, url):
        answer = await engine.submit(request("what is the colour?"))
        await backend.reached.acquire()
        async with page_of(browser, url, at="#/a") as page:
            card = page.locator("#chain .pane")
            await card.get_by_role("button", name="Cancel").click()
            await card.get_by_role("button", name="Let it run").click()
            assert engine.progress()
            await card.get_by_role("button", name="Cancel").click()
            await card.get_by_role("button", name="Cancel the turn").click()
            await expect(page.locator('#chain .row .badge[data-state="cancelled"]')).to_have_count(1)
            await expect(card).to_have_count(0)
            turn = await engine.store.turn(answer.turn_id)
            assert turn is not None
            assert (turn.error or {})["detail"] == {"by": "operator"}
            answer.leave()
