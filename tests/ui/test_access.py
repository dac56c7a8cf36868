"""The page for everybody: by keyboard, on a small screen, with a screen reader; and nothing under a wrong name."""

from __future__ import annotations

import time

import pytest
import pytest_asyncio
from playwright.async_api import Page, expect

from cli_session_proxy.domain.models import Message, Record
from cli_session_proxy.domain.models import Session as CliSession
from cli_session_proxy.stores.base import ChainPart, NewChain, WholeTurn

from ..export.told import every_repair
from ..fakes import SESSION, turn
from ..matrix import rest_in_full
from .conftest import World, an_agent, barriers, imported, page_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

LONG_NAME = "an-agent-with-a-very-long-name-" * 6


@pytest_asyncio.fixture(scope="module", loop_scope="session", autouse=True)
async def _filled(world: World) -> None:
    await imported(world.engine, await an_agent(world.engine, "alpha"), [("alpha asks", "alpha hears")])
    beta = [("beta 1", "yes"), ("w" * 3000, "no `code` " * 300), ("beta 3", "maybe")]
    await imported(world.engine, await an_agent(world.engine, "beta"), beta)
    await imported(world.engine, await an_agent(world.engine, LONG_NAME), [("hello", "hi")])
    rows, links = every_repair()
    parts: list[ChainPart] = [WholeTurn(row, (Record("{}"),)) for row in rows]
    error = {"code": "upstream_error", "message": "the provider failed"}
    broken = turn(90, status="failed", parent_id=rows[-1].id, input=(Message.user("will fail"),), error=error)
    parts += [WholeTurn(broken, ()), CliSession(SESSION, 0, rows[-1].id, "", "2.1.329", 1.0), *links]
    new = NewChain("local", "mended", "mended", True, 1.0, time.time(), lambda: rows[-1].id)
    await world.engine.store.import_chain(new, parts)


async def turn_of(world: World, agent_id: str) -> str:
    agent = await world.engine.store.agent("local", agent_id)
    assert agent is not None
    assert agent.head is not None
    return agent.head


async def test_a_turn_of_another_agent_is_never_shown_under_this_name(world: World) -> None:
    mine, other = await turn_of(world, "alpha"), await turn_of(world, "beta")
    async with page_of(world.browser, world.url, at=f"#/alpha/{mine}", failing="404") as page:
        opened = page.locator("#turn")
        await expect(opened).to_contain_text("alpha hears")
        await page.evaluate(f"location.hash = '#/beta/{mine}'")
        await expect(opened.locator("h2")).to_have_text("No such turn")
        await expect(opened).not_to_contain_text("alpha hears")
        await page.evaluate("location.hash = '#/nosuch/turn_x'")
        await expect(page.locator("#chain .empty")).to_contain_text("There is no agent of this name.")
        await expect(opened.locator("h2")).to_have_text("No such turn")
        assert "alpha" not in await opened.inner_text()
        await page.evaluate("location.hash = '#/alpha%E4'")  # cut by whoever sent it
        await expect(page.locator("#chain .empty")).to_contain_text("There is no agent of this name.")
        await page.evaluate(f"location.hash = '#/beta/{other}'")
        await expect(opened.locator("h2")).to_contain_text("Turn 3")
        await expect(opened.locator(".said").first).to_contain_text("beta 3")


async def test_what_one_view_says_of_a_fault_stays_while_others_work(world: World) -> None:
    async with page_of(world.browser, world.url, at="#/alpha", failing="500") as page:
        await expect(page.locator("#chain .row")).to_have_count(1)
        failed = {"status": 500, "json": {"error": {"message": "the disk is full"}}}
        await page.route("**/v1/chains/alpha/turns/*", lambda route: route.fulfill(**failed))
        async with page.expect_response("**/v1/chains?*"):
            await page.locator("#chain .row").click()
        async with page.expect_response("**/v1/chains?*"):
            pass
        await expect(page.locator("#fault")).to_have_text("the disk is full")
        await page.unroute("**/v1/chains/alpha/turns/*")


async def test_an_agent_that_is_not_there_yet_is_shown_when_it_is(world: World) -> None:
    async with page_of(world.browser, world.url, at="#/soon", failing="404") as page:
        await expect(page.locator("#chain .empty")).to_contain_text("There is no agent of this name.")
        # other tests count the agents of this world: the first turn of another one is taken for its
        await page.route(
            "**/v1/chains/soon/*", lambda route: route.continue_(url=route.request.url.replace("soon", "alpha"))
        )
        await expect(page.locator("#chain .empty")).to_be_hidden()
        await expect(page.locator("#chain .asked")).to_have_text("alpha asks")


async def test_looking_at_the_search_box_leads_nowhere(world: World) -> None:
    async with page_of(world.browser, world.url, at=f"#/alpha/{await turn_of(world, 'alpha')}") as page:
        await expect(page.locator("#turn")).to_contain_text("alpha hears")
        before = page.url
        await page.locator("#search").focus()
        await page.locator("#search").click()
        await expect(page.locator("#turn")).to_contain_text("alpha hears")
        assert page.url == before


async def test_what_is_on_no_path_is_told_and_not_struck_through(world: World) -> None:
    async with page_of(world.browser, world.url, at="#/mended") as page:
        row = page.locator("#chain .row", has_text="will fail")
        await expect(row.locator(".badge", has_text="failed")).to_have_count(1)
        struck = "rows => rows.filter(row => getComputedStyle(row).textDecorationLine !== 'none').length"
        assert await page.locator("#chain .asked, #chain .answered").evaluate_all(struck) == 0


async def test_every_row_is_a_link_in_a_list_and_the_list_has_a_heading(world: World) -> None:
    async with page_of(world.browser, world.url) as page:
        await expect(page.get_by_role("heading", level=1)).to_have_text("Agents")
        rows = page.locator("#chains").get_by_role("listitem").get_by_role("link")
        await expect(rows).to_have_count(4)
        await page.locator('#chains .row[data-agent="beta"]').click()
        await expect(page.locator("#chain").get_by_role("listitem").get_by_role("link")).to_have_count(3)


async def too_wide(page: Page) -> list[str]:
    """Elements that reach past the window, and cannot be scrolled to by themselves."""
    found: list[str] = await page.evaluate(
        """() => [...document.querySelectorAll('body, body > *, main > section')]
            .filter(one => one.getBoundingClientRect().right > innerWidth + 1 || one.scrollWidth > one.clientWidth + 1)
            .map(one => `${one.tagName}#${one.id} ${one.scrollWidth} > ${one.clientWidth}`)"""
    )
    return found


async def test_a_small_screen_shows_one_view_with_a_way_back(world: World) -> None:
    async with page_of(world.browser, world.url, width=390) as page:
        await expect(page.locator("#chains .row")).to_have_count(4)
        assert await too_wide(page) == []
        await page.locator('#chains .row[data-agent="beta"]').click()
        await expect(page.locator("#chains")).to_be_hidden()
        await expect(page.locator("#chain .row")).to_have_count(3)
        assert await too_wide(page) == []
        await page.locator("#chain .row").nth(1).click()
        await expect(page.locator("#turn h2")).to_contain_text("Turn 2")
        assert await too_wide(page) == []
        await page.locator("#crumbs").get_by_role("link", name="beta").click()
        await expect(page.locator("#chain .row")).to_have_count(3)
        await page.locator("#crumbs").get_by_role("link", name="Agents").click()
        await expect(page.locator("#chains .row")).to_have_count(4)
        await page.locator("#chains .row", has_text=LONG_NAME).click()
        await expect(page.locator("#chain .row")).to_have_count(1)
        assert await too_wide(page) == []


@pytest.mark.parametrize(
    ("scheme", "widths"), rest_in_full(("light", (1024, 390)), ("light", (1440,)), ("dark", (1440, 1024, 390)))
)
@pytest.mark.full
async def test_no_view_has_a_barrier(world: World, axe: str, scheme: str, widths: tuple[int, ...]) -> None:
    repaired = await turn_of(world, "mended")
    for width in widths:
        async with page_of(world.browser, world.url, scheme=scheme, width=width) as page:
            await expect(page.locator("#chains .row")).to_have_count(4)
            assert await barriers(page, axe) == [], f"agents at {width}"
            await page.evaluate("location.hash = '#/mended'")
            await expect(page.locator("#chain .row").first).to_be_visible()
            await page.locator(".timeline summary").click()
            await expect(page.locator(".timeline li").first).to_be_visible()
            assert await barriers(page, axe) == [], f"an agent at {width}"
            await page.evaluate(f"location.hash = '#/mended/{repaired}'")
            await expect(page.locator("#turn h2")).to_contain_text("Turn")
            if width > 1000:  # what was repaired has room beside the opened turn
                told = await page.locator("#chain .all-told .told").first.bounding_box()
                assert told is not None
                assert told["width"] > 250
            assert await barriers(page, axe) == [], f"a turn at {width}"
            await page.locator("#help-button").click()
            assert await barriers(page, axe) == [], f"help at {width}"
