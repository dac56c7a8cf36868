"""What a cold link costs before anything is seen: two files, and the proxy asked at once for what the address names."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from playwright.async_api import Browser, Route, expect

from cli_session_proxy.http.ui.routes import STATIC
from cli_session_proxy.http.ui.script import joined

from ..serving import serving
from ..talking import running
from .conftest import an_agent, imported, page_of, store_only

# Paths of all that was loaded with the page, in the order in which it was asked for, up to the first paint.
UNTIL_PAINTED = """() => {
    const painted = performance.getEntriesByName("first-contentful-paint")[0].startTime;
    return performance.getEntriesByType("resource").filter((one) => one.startTime < painted)
        .map((one) => new URL(one.name)).map((one) => one.pathname + one.search);
}"""


@pytest.mark.asyncio(loop_scope="session")
async def test_a_cold_link_has_asked_for_its_turn_and_those_around_it_when_the_page_is_painted(
    browser: Browser, tmp_path: Path
) -> None:
    settings = store_only(tmp_path)
    async with running(settings) as engine, serving(engine, settings) as url:
        agent = await an_agent(engine, "a b/c")
        await imported(engine, agent, [(f"question {n}", "a") for n in range(1, 6)])
        chain, turn_id = "/v1/chains/a%20b%2Fc", f"turn_{agent.key}_t3"
        asked = {
            f"#/a%20b%2Fc/{turn_id}": [f"{chain}/turns/{turn_id}", f"{chain}/turns?limit=100&with={turn_id}"],
            "#/a%20b%2Fc": [f"{chain}/turns?limit=100"],
            "": ["/v1/overview?wait=0", "/v1/chains?limit=100"],
        }
        for at, first in asked.items():
            async with page_of(browser, url, at=at) as page:
                await expect(page.locator(".row").first).to_be_visible()
                found = await page.evaluate(UNTIL_PAINTED)
                assert {one for one in found if not one.startswith("/v1/")} == {"/ui/style.css", "/ui/main.js"}
                assert [one for one in found if one.startswith("/v1/")][: len(first)] == first
                names = "performance.getEntriesByType('resource').map((one) => new URL(one.name).pathname)"
                files = [one for one in await page.evaluate(names) if one.startswith("/ui")]
                assert sorted(files) == ["/ui/main.js", "/ui/style.css"]


@pytest.mark.asyncio(loop_scope="session")
async def test_whether_it_works_is_shown_before_the_list_of_agents_however_long_that_is(
    browser: Browser, tmp_path: Path
) -> None:
    settings = store_only(tmp_path)
    async with running(settings) as engine, serving(engine, settings) as url, page_of(browser, url) as page:
        await imported(engine, await an_agent(engine, "ada"), [("q", "a")])
        held: asyncio.Queue[Route] = asyncio.Queue()
        await page.route("**/v1/overview*", held.put)
        async with page.expect_response("**/v1/chains?limit=100"):
            await page.reload()
        status = await held.get()
        assert await page.locator("#chains .row").count() == 0
        await expect(page.locator("#chains .empty")).to_be_hidden()  # nor is it said that there are none
        await status.continue_()
        await page.unroute("**/v1/overview*")
        await expect(page.locator("#overview .status strong")).to_have_text("Working")
        await expect(page.locator("#chains .row")).to_have_count(1)
        await expect(page.locator("#chains .totals")).to_contain_text("1 agent, 1 turn")


@pytest.mark.asyncio(loop_scope="session")
async def test_of_a_long_list_it_is_said_that_it_is_a_part_until_the_rest_is_there(
    browser: Browser, tmp_path: Path
) -> None:
    settings = store_only(tmp_path)
    async with running(settings) as engine, serving(engine, settings) as url, page_of(browser, url) as page:
        await imported(engine, await an_agent(engine, "ada"), [("q", "a")])
        (row,) = (await (await page.request.get(f"{url}/chains")).json())["data"]
        rows = [row | {"agent_id": f"agent {n}"} for n in range(101)]
        first, every = ({"data": part, "one_shots": {"count": 0, "cost_usd": 0.0}} for part in (rows[:100], rows))
        held: asyncio.Queue[Route] = asyncio.Queue()
        await page.route("**/v1/chains?limit=100", lambda route: route.fulfill(json=first))
        await page.route("**/v1/chains?limit=20000", held.put)
        await page.reload()
        totals = page.locator("#chains .totals")
        await expect(totals).to_contain_text("first 100 agents, 100 turns")
        await (await held.get()).fulfill(json=every)
        await expect(totals).to_have_text(re.compile("^101 agents, 101 turns"))
        await page.unroute_all()


@pytest.mark.asyncio(loop_scope="session")
async def test_what_was_asked_ahead_is_taken_once(browser: Browser, tmp_path: Path) -> None:
    settings = store_only(tmp_path)
    async with running(settings) as engine, serving(engine, settings) as url:
        agent = await an_agent(engine, "a")
        last = await imported(engine, agent, [("one", "a"), ("two", "b")])
        async with page_of(browser, url, at=f"#/a/{last}") as page:
            await expect(page.locator("#turn dd", has_text="nothing yet")).to_have_count(1)
            await expect(page.locator("#live")).to_have_text("live")
            turn = f"/v1/chains/a/turns/{last}"
            asked = f"performance.getEntriesByType('resource').filter((one) => one.name.endsWith('{turn}')).length"
            assert await page.evaluate(asked) == 1
            # the same view again asks anew, and shows what has come since
            await page.evaluate("location.hash = '#/a'")
            await expect(page.locator("#turn")).to_be_hidden()
            await imported(engine, agent, [("three", "c")], parent=last, mark="n")
            await page.evaluate(f"location.hash = '#/a/{last}'")
            await expect(page.locator("#turn dd", has_text="#3")).to_have_count(1)


def test_every_module_is_in_the_script_once_behind_those_that_it_imports() -> None:
    modules = {path.stem: path.read_text() for path in STATIC.glob("*.js")}
    lines = joined(modules, "main").splitlines()
    order = [line.split()[2].removesuffix(".js") for line in lines if line.startswith("// --- ") and ".js" in line]
    assert sorted(order) == sorted(modules)
    assert order[-1] == "main"
    assert order.index("api") < order.index("where") < order.index("dom") < order.index("chain") < order.index("turn")
    assert not [line for line in lines if line.startswith(("import", "export"))]


def test_modules_that_import_in_a_circle_are_refused_by_their_names() -> None:
    modules = {"main": 'import { a } from "./a.js";\n', "a": 'import { b } from "./b.js";\n', "b": ""}
    assert joined(modules, "main").count("const from_") == 2
    with pytest.raises(ValueError, match="main → a → b → a"):
        joined(modules | {"b": 'import { a } from "./a.js";\n'}, "main")
