"""One box for everything that was said: from the page's address to the words, by mouse, by keyboard and by a link."""

from __future__ import annotations

import pytest
import pytest_asyncio
from playwright.async_api import expect

from ..matrix import rest_in_full
from .conftest import World, an_agent, barriers, imported, page_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

SECRET = "sk-ant-api03-abcdefghijklmnop"


@pytest_asyncio.fixture(scope="module", loop_scope="session", autouse=True)
async def _filled(world: World) -> None:
    for number in range(25):
        agent = await an_agent(world.engine, f"agent-{number}")
        await imported(world.engine, agent, [("what is the colour?", f"colour {number} it is"), ("thanks", "bye")])
    said = [("Where did we leave the <b>zebra</b>?", f"In the yard of Porto, with {SECRET}."), ("and then?", "home")]
    await imported(world.engine, await an_agent(world.engine, "trip/planner"), said)


async def test_words_lead_to_the_turn_that_has_them_and_back(world: World) -> None:
    async with page_of(world.browser, world.url, at="#/agent-3") as page:
        await expect(page.locator("#chain .row")).to_have_count(2)
        await page.keyboard.press("/")
        await page.keyboard.type("zebra por")
        hit = page.locator("#found .row")
        await expect(hit).to_have_count(1)
        await expect(hit).to_contain_text("trip/planner #1")
        await expect(hit.locator("mark")).to_have_text("zebra")
        await expect(page.locator("#found .says")).to_have_text("1 hit in 26 agents (52 turns).")
        assert await hit.locator("b").count() == 0
        await page.keyboard.press("Enter")
        await expect(hit).to_be_focused()
        await page.keyboard.press("Enter")
        await expect(page.locator("#turn h2")).to_contain_text("Turn 1")
        await expect(page.locator("#turn")).to_contain_text("In the yard of Porto, with [redacted].")
        await expect(page.locator("#chain h1")).to_have_text("trip/planner")
        await expect(page.locator("#found")).to_be_hidden()
        await page.go_back()
        await expect(hit).to_have_count(1)
        await page.go_back()
        await expect(page.locator("#chain h1")).to_have_text("agent-3")


async def test_a_search_is_a_link_and_nothing_found_says_among_how_many(world: World) -> None:
    async with page_of(world.browser, world.url, at="#/?q=zebra") as page:
        await expect(page.locator("#search")).to_have_value("zebra")
        await expect(page.locator("#found mark")).to_have_text("zebra")
        await page.locator("#search").fill("unicorn")
        await expect(page.locator("#found .says")).to_have_text("None of 26 agents (52 turns) has it.")
        assert page.url.endswith("#/?q=unicorn")
        await page.locator("#search").press("Escape")
        await expect(page.locator("#found")).to_be_hidden()
        await expect(page.locator("#chains .row")).to_have_count(26)
        await expect(page.locator("#search")).to_have_value("")


async def test_agents_and_turns_are_found_by_a_part_of_their_names(world: World) -> None:
    agent = await world.engine.store.agent("local", "agent-7")
    assert agent is not None
    assert agent.head is not None
    async with page_of(world.browser, world.url) as page:
        await page.locator("#search").fill("GENT-7")
        await expect(page.locator("#chains .row")).to_have_count(1)
        await page.locator("#search").fill(agent.head[3:])
        await expect(page.locator('#found .row[data-kind="turn"]')).to_have_count(1)
        await expect(page.locator("#chains .row")).to_have_count(0)
        await page.locator("#found .row").click()
        await expect(page.locator("#turn dl.facts code").first).to_have_text(agent.head)


async def test_filters_ask_for_turns_of_a_kind(world: World) -> None:
    async with page_of(world.browser, world.url, at="#/?q=colour&status=completed") as page:
        await expect(page.locator("#found .row")).to_have_count(20)
        await page.locator("select[name=status]").select_option("failed")
        await expect(page.locator("#found .says")).to_have_text("None of 26 agents (52 turns) has it.")
        await page.locator("select[name=status]").select_option("")
        await page.locator("input[name=model]").fill("opus")
        await expect(page.locator("#found .row")).to_have_count(0)
        await page.locator("input[name=model]").fill("sonnet")
        await expect(page.locator("#found .row")).to_have_count(20)
        assert "model=sonnet" in page.url
        await page.locator("input[name=repaired]").check()
        await expect(page.locator("#found .row")).to_have_count(0)


async def test_a_search_that_is_refused_says_why(world: World) -> None:
    async with page_of(world.browser, world.url, at="#/?q=zebra&since=soon", failing="400") as page:
        await expect(page.locator("#fault")).to_contain_text("since must be 30m, 12h, 7d, or a date")


@pytest.mark.parametrize("scheme", rest_in_full("dark", "light"))
async def test_the_search_has_no_barrier(world: World, axe: str, scheme: str) -> None:
    for width in (1440, 1024, 390):
        async with page_of(world.browser, world.url, scheme=scheme, width=width, at="#/?q=zebra") as page:
            await expect(page.locator("#found mark")).to_have_text("zebra")
            assert await barriers(page, axe) == [], f"at {width}"
            assert await page.evaluate("document.body.scrollWidth <= innerWidth")
