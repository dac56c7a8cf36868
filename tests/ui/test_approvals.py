"""A person's word on the page: it says what waits, shows what would be done, and sends the answer."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from playwright.async_api import Browser, expect

from cli_session_proxy.backends.base import Event
from cli_session_proxy.domain.approvals import Verdict
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.settings import Profile

from ..matrix import rest_in_full
from ..scripted import Asker, Scripted, delta
from ..serving import serving
from ..talking import request
from ..until import until
from .conftest import barriers, page_of, store_only

pytestmark = pytest.mark.asyncio(loop_scope="session")

HOSTILE = "echo '<img src=x onerror=alert(1)>' \u202e reversed"
EDIT = {"file_path": "/home/ada/notes.md", "old_string": "one\ntwo", "new_string": "one\n2"}


@asynccontextmanager
async def asking(tmp_path: Path, steps: Sequence[Event | None]) -> AsyncIterator[tuple[Engine, Scripted, str]]:
    profiles = {"coder": Profile(tools=("Bash",), approve=("Bash",))}
    settings = store_only(tmp_path).model_copy(update={"profiles": profiles})
    backend = Scripted(steps)
    engine = Engine(settings, backend=backend)
    await engine.start()
    try:
        async with serving(engine, settings) as url:
            yield engine, backend, url
    finally:
        for _ in steps:
            backend.go.release()
        await engine.stop()


@pytest.mark.parametrize("scheme", rest_in_full("light", "dark"))
async def test_what_waits_is_told_on_every_view_and_shown_as_what_it_would_do(
    scheme: str, browser: Browser, tmp_path: Path, axe: str
) -> None:
    asker = Asker()
    both = asker.asks("r1", command=HOSTILE), asker.asks("r2", "Edit", **EDIT)
    steps: list[Event | None] = [delta("I look. "), *both, None]
    async with asking(tmp_path, steps) as (engine, backend, url):
        answer = await engine.submit(request("go"))
        async with page_of(browser, url, scheme=scheme) as page:
            told = page.locator("#asks")
            await expect(told).to_contain_text("2 tools wait for your approval: Bash in a Edit in a")
            await expect(page).to_have_title("(2) agents · cli_session_proxy")
            await expect(page.locator("#overview .running li")).to_contain_text(
                "waits for a person's approval: may Bash run?"
            )
            await told.locator("a").first.click()
            cards = page.locator("#chain .ask")
            await expect(cards).to_have_count(2)
            await expect(cards.first.locator(".wish")).to_have_text(HOSTILE.replace("\u202e", "\ufffd"))
            assert await page.locator("main img").count() == 0
            await expect(cards.first.locator(".left")).to_have_text(re.compile(r"^(9:\d\d|10:00)$"))
            lines = cards.last.locator(".wish span")
            assert [line.rstrip("\n") for line in await lines.all_text_contents()] == [
                "in /home/ada/notes.md", " one", "-two", "+2",
            ]  # fmt: skip
            assert await cards.last.locator('[data-line="-"]').all_text_contents() == ["-two\n"]
            assert await barriers(page, axe) == []
            await cards.first.get_by_role("button", name="Allow once").click()
            await expect(cards).to_have_count(1)
            await expect(page).to_have_title("(1) a · cli_session_proxy")
            word = page.get_by_label("What the model is told")
            await word.fill("not this file")
            await page.locator("#chain .pane .doing").click()  # the opened turn has it now
            word = page.locator("#turn").get_by_label("What the model is told")
            await word.fill("another file")
            await word.press("Enter")
            await expect(told).to_be_hidden()
            await expect(page).to_have_title("a · cli_session_proxy")
        await until(lambda: len(asker.told) == 2)
        assert asker.told == [("r1", Verdict("allowed", "local")), ("r2", Verdict("denied", "local", "another file"))]
        backend.go.release()
        await answer.turn()
        answer.acknowledge()


async def test_what_is_typed_stays_while_the_turn_says_more_and_somebody_else_is_quicker(
    browser: Browser, tmp_path: Path
) -> None:
    asker = Asker()
    steps = [asker.asks("r1"), None, delta("more words"), None]
    async with asking(tmp_path, steps) as (engine, backend, url):
        answer = await engine.submit(request("go"))
        async with page_of(browser, url, at="#/a") as page:
            word = page.get_by_label("What the model is told")
            await word.fill("half a sen")
            backend.go.release()
            await expect(page.locator(".pane .said-so-far")).to_have_text("more words")
            await expect(word).to_have_value("half a sen")
            await expect(word).to_be_focused()
            (question,) = engine.asked("local")
            await engine.approve("local", "a", question.waiting.approval.id, Verdict("denied", "local"))
            await expect(page.locator(".ask")).to_have_count(0)
        backend.go.release()
        await answer.turn()
        answer.acknowledge()


async def test_nobody_allows_what_they_were_not_shown(browser: Browser, tmp_path: Path) -> None:
    asker = Asker()
    steps = [asker.asks("r1", command="y" * 25_000 + "THE END"), None]
    async with asking(tmp_path, steps) as (engine, backend, url):
        answer = await engine.submit(request("go"))
        async with page_of(browser, url, at="#/a") as page:
            once = page.get_by_role("button", name="Allow once")
            await expect(once).to_be_disabled()
            await expect(page.get_by_role("button", name="Deny")).to_be_enabled()
            await page.get_by_role("button", name="Show 5,007 more characters").click()
            await expect(page.locator(".wish")).to_contain_text("THE END")
            await page.get_by_role("button", name="Allow Bash for this turn").click()
            await expect(page.locator(".ask")).to_have_count(0)
        assert asker.outcomes == [("r1", "allowed_for_turn")]
        backend.go.release()
        await answer.turn()
        answer.acknowledge()


async def test_a_page_of_a_proxy_that_lets_nothing_wait_asks_once(browser: Browser, tmp_path: Path) -> None:
    settings = store_only(tmp_path)
    engine = Engine(settings, backend=Scripted([]))
    await engine.start()
    try:
        async with serving(engine, settings) as url, page_of(browser, url) as page:
            asked: list[str] = []
            page.on("request", lambda one: asked.append(one.url))
            for _ in range(2):
                async with page.expect_response("**/v1/overview"):
                    pass
            assert sum("/v1/approvals" in one for one in asked) <= 1
    finally:
        await engine.stop()


async def test_a_hidden_page_tells_by_a_notification(browser: Browser, tmp_path: Path) -> None:
    asker = Asker()
    async with asking(tmp_path, [asker.asks("r1"), None]) as (engine, backend, url):
        async with page_of(browser, url) as page:
            await page.context.grant_permissions(["notifications"])
            await page.evaluate(
                "window.told = []; window.Notification = class { static permission = 'granted';"
                " constructor(title, options) { window.told.push([title, options.body]); } };"
                " Object.defineProperty(document, 'hidden', { get: () => true })"
            )
            answer = await engine.submit(request("go"))
            await expect(page.locator("#asks")).to_be_visible()
            assert await page.evaluate("window.told") == [["Bash waits for your approval", "in a"]]
        backend.go.release()
        await answer.turn()
        answer.acknowledge()
