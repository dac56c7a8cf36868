"""A running turn on the page: its words as they come, what it waits for, and its end by hand."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from playwright.async_api import Browser, expect

from cli_session_proxy.backends.base import Retried
from cli_session_proxy.engine.engine import Engine

from ..scripted import RETRY, Scripted, delta
from ..serving import serving
from ..talking import request
from .conftest import barriers, page_of, store_only

pytestmark = pytest.mark.asyncio(loop_scope="session")

HOSTILE = "<img src=x onerror=alert(1)> teal"


@asynccontextmanager
async def watched(tmp_path: Path) -> AsyncIterator[tuple[Engine, Scripted, str]]:
    settings = store_only(tmp_path)
    backend = Scripted([delta("The colour "), None, Retried(RETRY), None, delta(HOSTILE), None])
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
            await expect(page.locator("#overview .running li")).to_contain_text("a answers")
            await page.locator("#overview .running a").click()
            opened, listed = page.locator("#turn .now"), page.locator("#chain .going .card")
            for place in (opened, listed):
                await expect(place.locator(".said-so-far")).to_have_text("The colour ")
            backend.go.release()
            for place in (opened, listed):
                await expect(place.locator(".doing")).to_have_text(
                    "the provider asks to wait 30 s, retry 2 of 3 (429 rate_limit_error)"
                )
            assert await barriers(page, axe) == []
            backend.go.release()
            await expect(opened.locator(".said-so-far")).to_have_text(f"The colour {HOSTILE}")
            assert await page.locator("main img").count() == 0
            backend.go.release()
            await answer.turn()
            answer.acknowledge()
            await expect(page.locator("#turn h2 .badge").first).to_have_text("completed")
            await expect(opened).to_have_count(0)
            await expect(listed).to_have_count(0)
            falls = page.locator("#turn .waterfall .what", has_text="the provider asks to wait 30 s")
            await expect(falls).to_have_count(1)
            await expect(page.locator('#turn .fall[data-failed="true"]')).to_have_count(1)


async def test_a_turn_is_cancelled_from_the_page_when_it_is_confirmed(browser: Browser, tmp_path: Path) -> None:
    async with watched(tmp_path) as (engine, backend, url):
        answer = await engine.submit(request("what is the colour?"))
        await backend.reached.acquire()
        async with page_of(browser, url, at="#/a") as page:
            card = page.locator("#chain .going .card")
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
