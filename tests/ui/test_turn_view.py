"""One opened turn: what a model wrote as it means it, copied as it wrote it, and nothing of it alive."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import pytest
from playwright.async_api import Route, expect

from cli_session_proxy.domain.evidence import Evidence
from cli_session_proxy.domain.models import Message, Placed, Turn
from cli_session_proxy.stores.base import NewChain, WholeTurn

from ..fakes import turn
from ..media import image, picture
from ..scripted import RETRY
from .conftest import World, an_agent, barriers, imported, page_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

WRITTEN = """# Plan

Two **bold** words, `code` and *slanted* ones.
A second line.

- one
- two with [a link](https://example.com/a?b=c)
  that goes on

3. three
4. four

| name | price |
|---|---:|
| milk | 1.20 |

> said before

```python
print("<b>*x*</b>")
```
"""
HOSTILE = """<img src=x onerror=alert(1)> [x](javascript:alert(1)) [y](https://e.com" onclick="alert(1))

<script>alert(1)</script>

| <svg onload=alert(1)> |
|---|
| <iframe src=//e.com> |

```</code><script>alert(1)</script>
still code"""


async def test_what_a_model_wrote_is_shown_as_it_means_it(world: World, axe: str) -> None:
    last = await imported(world.engine, await an_agent(world.engine, "writer"), [("* a *plain* prompt", WRITTEN)])
    for scheme in ("light", "dark"):
        async with page_of(world.browser, world.url, scheme=scheme, at=f"#/writer/{last}") as page:
            shown = page.locator('#turn section[aria-label="Output"] .markdown')
            await expect(shown.get_by_role("heading")).to_have_text("Plan")
            await expect(shown.locator("strong")).to_have_text("bold")
            await expect(shown.locator("p code")).to_have_text("code")
            await expect(shown.locator("em")).to_have_text("slanted")
            await expect(shown.locator("ul li")).to_have_count(2)
            await expect(shown.locator("ol")).to_have_attribute("start", "3")
            await expect(shown.locator("ul a")).to_have_attribute("href", "https://example.com/a?b=c")
            await expect(shown.locator("td")).to_have_text(["milk", "1.20"])
            await expect(shown.locator("blockquote")).to_have_text("said before")
            await expect(shown.locator("pre")).to_have_text('print("<b>*x*</b>")')
            # a prompt is what somebody typed
            asked = page.locator('#turn section[aria-label="Input"] .said .text')
            await expect(asked).to_have_text("* a *plain* prompt")
            assert await barriers(page, axe) == []
            await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
            await page.locator('#turn section[aria-label="Output"] .head .copy').first.click()
            copied = page.locator('#turn section[aria-label="Output"] .head .copy').first
            await expect(copied).to_have_text("copied")
            assert await page.evaluate("navigator.clipboard.readText()") == WRITTEN
            await page.get_by_role("button", name="As written").click()
            await expect(page.locator('#turn section[aria-label="Output"] .text')).to_contain_text("**bold**")


async def test_a_verdict_that_something_was_forgotten_is_no_good_news(world: World, axe: str) -> None:
    last = (await kept(world, "forgetful")).id
    said = [{"role": "user", "text": "two"}]
    told = {"verdict": "1 of 2 turns was not sent", "forgotten": True, "missing": ["t1"], "total": 1, "messages": said}
    for scheme in ("light", "dark"):
        async with page_of(world.browser, world.url, scheme=scheme, at=f"#/forgetful/{last}") as page:
            await page.route("**/seen", lambda route: route.fulfill(json=told))
            await page.reload()
            verdict = page.locator("#turn .verdict")
            await expect(verdict).to_have_text("1 of 2 turns was not sent")
            bad = await page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--bad')")
            shown = await verdict.evaluate("one => getComputedStyle(one).color")
            assert shown == f"rgb({', '.join(str(int(bad.strip()[at : at + 2], 16)) for at in (1, 3, 5))})"
            assert await barriers(page, axe) == []


async def test_nothing_that_a_model_wrote_comes_alive(world: World) -> None:
    last = await imported(world.engine, await an_agent(world.engine, "hostile"), [("x", HOSTILE)])
    async with page_of(world.browser, world.url, at=f"#/hostile/{last}") as page:
        shown = page.locator('#turn section[aria-label="Output"] .markdown')
        await expect(shown).to_contain_text("<img src=x onerror=alert(1)> [x](javascript:alert(1))")
        await expect(shown.locator("td")).to_have_text("<iframe src=//e.com>")
        await expect(shown.locator("pre")).to_have_text("still code")
        alive = (
            "main script, main img, main iframe, main svg[onload], main [onclick], main [onerror], main a[href^=java]"
        )
        assert await page.locator(alive).count() == 0


async def test_a_text_that_is_made_to_be_slow_is_not(world: World) -> None:
    slow = ("[" * 9000 + "*" * 9000 + "`a" * 4500 + "|" * 4000 + "\n|-" * 2000 + "> " * 2000)[:35000]
    slow += "\n\na|b\n" + " " * 6000 + "-" + " " * 6000 + "x"  # what could be the line below a table's head
    last = await imported(world.engine, await an_agent(world.engine, "slow"), [("x", slow)])
    async with page_of(world.browser, world.url, at=f"#/slow/{last}") as page:
        await expect(page.locator("#turn h2")).to_contain_text("Turn 1")
        await expect(page.locator('#turn section[aria-label="Output"] .markdown')).to_be_visible()


async def kept(world: World, agent_id: str, **fields: Any) -> Turn:
    """An agent of this one turn."""
    row = turn(1, id=f"{agent_id}-1", parent_id=None, **fields)
    new = NewChain("local", agent_id, agent_id, True, 1.0, time.time(), lambda: row.id)
    await world.engine.store.import_chain(new, [WholeTurn(row, ())])
    return row


async def test_images_are_shown_small_and_nothing_else_of_a_file(world: World, axe: str) -> None:
    drawn, program = picture(300, 200), "PHN2ZyBvbmxvYWQ9ImFsZXJ0KDEpIi8+"
    said = Message("user", (image(drawn), image(program, "image/svg+xml"), image("AAAA", "image/png")))
    row = await kept(world, "painter", input=(said,))
    async with page_of(world.browser, world.url, at=f"#/painter/{row.id}", failing="404") as page:
        shown = page.locator("#turn .thumbnail")
        await expect(shown).to_have_count(3)
        picture_shown = shown.nth(0).locator("img")
        await expect(picture_shown).to_have_js_property("naturalWidth", 300)
        box = await picture_shown.bounding_box()
        assert box is not None
        assert box["width"] <= 224
        # one that is a program, and one that is broken, are words
        for n, words in ((1, "image/svg+xml, 24 B"), (2, "image/png, 3 B")):
            await expect(shown.nth(n)).to_have_text(words)
            await expect(shown.nth(n).locator("img")).to_have_count(0)
        assert await barriers(page, axe) == []
    async with httpx.AsyncClient(base_url=world.url, trust_env=False) as http:
        told = (await http.get(f"/chains/painter/turns/{row.id}")).json()["turn"]["input"][0]["content"]
        whole = await http.get(f"/chains/painter/turns/{row.id}/images/{told[0]['sha256']}")
        assert (whole.status_code, whole.headers["content-type"]) == (200, "image/png")
        assert whole.headers["x-content-type-options"] == "nosniff"
        for other in (told[1]["sha256"], "0" * 64):
            assert (await http.get(f"/chains/painter/turns/{row.id}/images/{other}")).status_code == 404


async def test_tools_attempts_and_retries_are_a_waterfall_in_the_order_of_their_beginning(world: World) -> None:
    at = 1_790_000_000.0
    row = await kept(
        world, "worker", created_at=at, continuity="warm", placed=Placed("head", messages=1, delta=True),
        timings={"queued": 0.0, "session_ready": 1000, "first_block": 3000, "result": 40000, "committed": 40010},
        attempts=(
            {"n": 1, "started_at": at + 1, "ended_at": at + 2, "status": "failed", "why": "it died"},
            {"n": 2, "started_at": at + 2, "ended_at": at + 40, "status": "completed"},
        ),
        tools=(
            {"type": "tool_use", "id": "c1", "name": "Bash", "input": {"command": "make"}, "at": at + 4},
            {"type": "tool_result", "tool_use_id": "c1", "content": "no", "is_error": True, "at": at + 6},
            {"type": "tool_use", "id": "c2", "name": "Old", "input": {}},
        ),
        evidence=Evidence(retries=({**RETRY, "at": at + 8},), verified="equal"),
    )  # fmt: skip
    async with page_of(world.browser, world.url, at=f"#/worker/{row.id}") as page:
        falls = page.locator("#turn .waterfall li")
        await expect(falls.locator(".what")).to_have_text(
            [
                "queued", "session made ready", "until the first word", "attempt 1 (failed)", "attempt 2", "answering",
                "Bash (failed)", "the provider asks to wait 30 s, retry 2 of 3 (429 rate_limit_error)", "committed",
            ]
        )  # fmt: skip
        await expect(falls.filter(has_text="Bash").locator(".took")).to_have_text("2.00 s")
        await expect(falls.filter(has_text="asks to wait").locator(".took")).to_have_text("30.00 s")
        why = page.locator("#turn .placed")
        await expect(why).to_have_text(
            [
                "The client named the agent: this turn continues its last answer.",
                "The client sent only what was new (1 message).",
                "The warm process of the turn before answered.",
                "The transcript was compared with the chain before it was used.",
            ]
        )
        await expect(page.locator("#turn dl.facts").first).not_to_contain_text("came by")


async def test_a_turn_that_takes_long_to_come_says_that_it_loads(world: World) -> None:
    last = await imported(world.engine, await an_agent(world.engine, "heavy"), [("much", "very much")])
    go_on = asyncio.Event()

    async def held(route: Route) -> None:
        await go_on.wait()
        await route.continue_()

    async with page_of(world.browser, world.url) as page:
        await page.route(f"**/v1/chains/heavy/turns/{last}", held)
        await page.evaluate(f"location.hash = '#/heavy/{last}'")
        await expect(page.locator("#turn [role=status]")).to_have_text("Loading this turn…")
        go_on.set()
        await expect(page.locator("#turn h2")).to_contain_text("Turn 1")
        await expect(page.locator("#turn [role=status]")).to_have_count(0)
