"""One opened turn: what a model wrote as it means it, copied as it wrote it, and nothing of it alive."""

from __future__ import annotations

import pytest
from playwright.async_api import expect

from .conftest import World, an_agent, barriers, imported, page_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

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
    slow = ("[" * 9000 + "*" * 9000 + "`a" * 4500 + "|" * 4000 + "\n|-" * 2000 + "> " * 2000)[:45000]
    last = await imported(world.engine, await an_agent(world.engine, "slow"), [("x", slow)])
    async with page_of(world.browser, world.url, at=f"#/slow/{last}") as page:
        await expect(page.locator("#turn h2")).to_contain_text("Turn 1")
        await expect(page.locator('#turn section[aria-label="Output"] .markdown')).to_be_visible()
