"""Turns with tools on the page: calls that wait for the client, their results, and what the CLI ran itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.async_api import Browser, Page, expect

from cli_session_proxy.domain.models import Message, Tool, Turn
from cli_session_proxy.settings import Profile
from turnfault.provider.script import ToolUse
from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings
from ..serving import serving
from ..talking import ask, running
from ..without_cli import running_without_cli
from .conftest import an_agent, imported, page_of, store_only

pytestmark = pytest.mark.asyncio(loop_scope="session")

WEATHER = Tool("get_weather", "The weather of a city", {"type": "object", "properties": {"city": {"type": "string"}}})
SECRET = "sk-ant-api03-abcdef123456"


async def opened(page: Page, turn: Turn) -> None:
    await page.locator(f"#chain .row[data-turn={turn.id}]").click()
    await expect(page.locator("#turn dl.facts code").first).to_have_text(turn.id)


async def test_calls_wait_for_the_client_and_their_results_go_on(
    browser: Browser, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings()
    upstream.when("where", ToolUse([("mcp__client__get_weather", {"city": "<b>Rome</b>"})], text="Let me look."))
    async with (
        running_without_cli(settings, upstream) as engine,
        serving(engine, settings) as url,
        page_of(browser, url) as page,
    ):
        called = await ask(engine, "where", agent="t", tools=(WEATHER,))
        await expect(page.locator("#chains .state")).to_have_text("waits for results")
        await page.locator("#chains .row").click()
        row = page.locator(f"#chain .row[data-turn={called.id}]")
        await expect(row.locator(".badge", has_text="waits for results")).to_have_count(1)
        await expect(row.locator(".answered")).to_have_text("Let me look. [calls get_weather]")
        await opened(page, called)
        call = page.locator('#turn section[aria-label="Output"] .tool')
        await expect(call.locator("summary")).to_contain_text("calls get_weather")
        await expect(call.locator("pre")).to_contain_text('"city": "<b>Rome</b>"')
        block = next(block for block in called.output if block["type"] == "tool_use")
        result = {"type": "tool_result", "tool_use_id": block["id"], "content": "hail, and it broke", "is_error": True}
        answered = await ask(engine, Message("user", (result,)), agent="t", tools=(WEATHER,))
        await expect(page.locator(f"#chain .row[data-turn={answered.id}] .asked")).to_have_text("[result of a tool]")
        await opened(page, answered)
        given = page.locator('#turn section[aria-label="Input"] .tool')
        await expect(given.locator("summary")).to_contain_text("result error")
        await expect(given.locator("summary code")).to_have_text(block["id"])
        await expect(given.locator(".text")).to_have_text("hail, and it broke")
        await expect(page.locator("#turn h2 .badge")).to_have_text(["head"])


async def test_tools_that_the_cli_ran_are_told_in_their_turn(
    browser: Browser, claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    profile = Profile(tools=("Read",))
    settings = make_settings(claude_bin=claude_2, profiles={"reader": profile})
    async with running(settings) as engine, serving(engine, settings) as url, page_of(browser, url) as page:
        sandbox = settings.var / "sandbox" / "agents" / "t"
        sandbox.mkdir(parents=True)
        (sandbox / "note.txt").write_text("the milk is <i>sour</i>")
        upstream.when("read the note", ToolUse([("Read", {"file_path": str(sandbox / "note.txt")})]))
        turn = await ask(engine, "read the note", agent="t", profile="reader")
        await page.locator("#chains .row").click()
        await opened(page, turn)
        tools = page.locator('#turn section[aria-label="Tools of the CLI"] .tool')
        await expect(tools.nth(0).locator("summary")).to_contain_text("calls Read")
        await expect(tools.nth(0).locator("pre")).to_contain_text("note.txt")
        await expect(tools.nth(1)).to_contain_text("the milk is <i>sour</i>")
        await expect(tools).to_have_count(2)


async def test_secrets_are_hidden_until_somebody_asks_for_them(browser: Browser, tmp_path: Path) -> None:
    settings = store_only(tmp_path)
    async with running(settings) as engine, serving(engine, settings) as url:
        agent = await an_agent(engine, "s")
        await imported(engine, agent, [("nothing here", "ok"), (f"my key is {SECRET}", "noted")])
        async with page_of(browser, url) as page:
            await page.locator("#chains .row").click()
            await expect(page.locator("#chain .asked").first).to_have_text("my key is [redacted]")
            await page.locator("#chain .row").first.click()
            words = page.locator("#turn .said .text").first
            await expect(words).to_have_text("my key is [redacted]")
            assert SECRET not in await page.content()
            await page.get_by_role("button", name="Show hidden secrets").click()
            await expect(words).to_have_text(f"my key is {SECRET}")
            await page.get_by_role("button", name="Hide secrets").click()
            await expect(words).to_have_text("my key is [redacted]")
            await page.locator("#chain .row").nth(1).click()
            await expect(words).to_have_text("nothing here")
            await expect(page.locator("#turn .secrets")).to_have_count(0)
