"""The first page: what needs a look, what was spent, and the list with its order, filters, totals and previews."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import expect
from pydantic import SecretStr

from cli_session_proxy.domain.models import Link, Message, Status, Usage
from cli_session_proxy.domain.models import Session as CliSession
from cli_session_proxy.stores.base import ChainPart, NewChain, WholeTurn

from ..fakes import SESSION, turn
from ..matrix import rest_in_full
from ..serving import serving
from ..talking import running
from .conftest import World, an_agent, barriers, imported, page_of, store_only

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(scope="module", loop_scope="session", autouse=True)
async def _filled(world: World) -> None:
    now = time.time()
    for n in range(3):
        await imported(world.engine, await an_agent(world.engine, f"calm-{n}"), [(f"what is {n}?", f"it is {n}")])

    async def lived(name: str, *states: Status, cost: float, links: tuple[Link, ...] = ()) -> None:
        parts: list[ChainPart] = []
        for n, state in enumerate(states, 1):
            error = {"code": "overloaded", "message": "busy"} if state == "failed" else None
            row = turn(
                n, id=f"{name}-{n}", parent_id=f"{name}-1" if n > 1 else None, status=state, created_at=now - 60,
                finished_at=now - 50, error=error, cost_usd=cost, usage=Usage(10, 5, 90, 0),
                input=(Message.user(f"{name} asks {n}"),),
            )  # fmt: skip
            parts.append(WholeTurn(row, ()))
        if links:
            parts += [CliSession(SESSION, 0, f"{name}-1", "", "2.1.329", 1.0), *links]
        new = NewChain("local", name, name, True, 1.0, now, lambda: f"{name}-1")
        await world.engine.store.import_chain(new, parts)

    await lived("stuck", "completed", "failed", "failed", cost=0.25)
    await lived("well again", "failed", "completed", cost=1.5)
    link = Link(SESSION, SESSION, "mended-1", "rebuilt", {"found": "missing"}, now - 55)
    await lived("mended", "completed", "completed", cost=0.0, links=(link,))


async def test_agents_that_need_a_look_are_named_with_the_reason_and_lead_to_the_turn(world: World) -> None:
    async with page_of(world.browser, world.url) as page:
        needs = page.locator("#overview .needs li")
        await expect(needs).to_have_count(3)
        await expect(needs.nth(0)).to_contain_text("stuck its last 2 turns in a row came to nothing (overloaded)")
        await expect(needs.nth(1)).to_contain_text("well again 1 turn of the last day came to nothing (overloaded)")
        await expect(needs.nth(2)).to_contain_text("mended repaired 1 time within 1 day")
        await needs.nth(2).get_by_role("link").click()
        await expect(page.locator("#turn h2")).to_contain_text("Turn 1")
        await expect(page.locator("#turn .link.card")).to_contain_text("The session's transcript was gone")
        await page.evaluate("location.hash = '#/stuck'")
        await expect(page.locator("#chain .summary p")).to_contain_text("3 turns, $0.75")


async def test_charts_say_what_they_show_and_need_nothing_from_elsewhere(world: World) -> None:
    async with page_of(world.browser, world.url) as page:
        charts = page.locator("#overview .chart")
        await expect(charts).to_have_count(4)
        await expect(charts.nth(0).locator("figcaption")).to_have_text("Cost $3.75")
        await expect(charts.nth(2).locator("figcaption")).to_have_text("Read from the cache 90 %")
        await expect(charts.nth(3).locator("figcaption")).to_have_text("Repairs and failures 1 repair, 3 failed")
        await expect(charts.nth(0).locator("svg g")).to_have_count(14)
        high = "bars => bars.map(bar => Number(bar.getAttribute('height'))).filter(px => px > 0).length"
        assert await charts.nth(0).locator("rect.series-0").evaluate_all(high) == 1
        await charts.nth(3).locator("summary").click()
        await expect(charts.nth(3).locator("td").last).to_have_text("1 repair, 3 failed, 0 refused")
        await page.locator("#overview .models summary").click()
        await expect(page.locator("#overview .models tbody tr")).to_contain_text("sonnet")
        await expect(page.locator("#overview .days h2")).to_contain_text("store")


async def test_an_operator_is_shown_what_every_key_spends_and_others_their_own(
    world: World, tmp_path: Path, axe: str
) -> None:
    keys = {"alice": "alice-has-a-long-key", "bob": "bob-has-another-long-key"}
    given = {"keys": {name: SecretStr(key) for name, key in keys.items()}, "operators": ("bob",)}
    settings = store_only(tmp_path).model_copy(update=given)
    async with running(settings) as engine, serving(engine, settings) as url:
        for n, owner in enumerate(keys, 1):
            row = turn(
                n, id=f"{owner}-1", parent_id=None, created_at=time.time(), cost_usd=float(n),
                usage=Usage(10, 5, 85, 0),
            )  # fmt: skip
            new = NewChain(owner, f"{owner}s agent", owner, True, 1.0, time.time(), lambda: None)
            await engine.store.import_chain(new, [WholeTurn(row, ())])
        for owner, key in keys.items():
            async with page_of(world.browser, url, failing="401") as page:
                await page.locator("#key").fill(key)
                await page.keyboard.press("Enter")
                days = page.locator("#overview .days")
                every = page.locator("#overview .models", has=page.get_by_text("By key"))
                if owner == "alice":
                    await expect(days.locator("h2")).to_contain_text("The last 14 days of key alice")
                    await expect(days.locator("figcaption").first).to_have_text("Cost $1.00")
                    await expect(every).to_have_count(0)
                    await expect(days.locator(".chart")).to_have_count(4)
                    assert "bob" not in await page.locator("body").inner_text()
                else:
                    await expect(days.locator("h2")).to_contain_text("The last 14 days of all keys")
                    await expect(days.locator("figcaption").first).to_have_text("Cost $3.00")
                    await every.locator("summary").click()
                    await expect(every.locator("tbody tr")).to_contain_text(["bob1$2.00", "alice1$1.00"])
                    by_key = {"Cost": ("$3.00", "bob $2.00, alice $1.00"), "Tokens": ("200", "bob 100, alice 100")}
                    for what, (whole, newest) in by_key.items():
                        chart = days.locator(".chart", has=page.get_by_text(f"{what} by key", exact=True))
                        await expect(chart.locator("figcaption")).to_have_text(f"{what} by key {whole}")
                        await expect(chart.locator(".key")).to_have_text(["bob", "alice"])
                        await chart.locator("summary").click()
                        await expect(chart.locator("td").last).to_have_text(newest)
                        await expect(chart.locator("td").first).to_have_text("nothing")
                    assert await barriers(page, axe) == []
                await expect(page.locator("#chains .name")).to_have_text([f"{owner}s agent"])


async def test_the_list_is_ordered_filtered_and_summed_up(world: World) -> None:
    async with page_of(world.browser, world.url) as page:
        rows, totals = page.locator("#chains .row"), page.locator("#chains .totals")
        await expect(rows).to_have_count(6)
        await expect(totals).to_contain_text("6 agents, 10 turns, 1 repair, 3 failures, $3.75")
        await page.locator("select[name=order]").select_option("cost_usd")
        await expect(rows.first.locator(".name")).to_have_text("well again")
        await page.locator("select[name=order]").select_option("failures")
        await expect(rows.first.locator(".name")).to_have_text("stuck")
        # what failed once stays to be seen, though the last turn went well
        await expect(rows.nth(1)).to_contain_text("well again")
        await expect(rows.nth(1)).to_contain_text("completed")
        await expect(rows.nth(1).locator(".failed")).to_have_text("1 failed")
        await page.locator("select[name=only]").select_option("repaired")
        await expect(rows.locator(".name")).to_have_text(["mended"])
        await expect(totals).to_contain_text("1 agent of 6, 2 turns")
        await page.locator("select[name=only]").select_option("waiting")
        await expect(page.locator("#chains .empty")).to_have_text("No agent is like that.")


async def test_a_row_shows_the_newest_words_and_how_long_ago(world: World) -> None:
    async with page_of(world.browser, world.url) as page:
        row = page.locator('#chains .row[data-agent="calm-2"]')
        await expect(row.locator(".preview")).to_have_text("what is 2? → it is 2")
        await expect(row.locator("time")).to_have_text("just now")


@pytest.mark.parametrize(
    ("scheme", "width"),
    rest_in_full(
        ("light", 1440), ("dark", 390), ("light", 1024), ("dark", 1440), ("light", 390), ("dark", 1024), quick=3
    ),
)
async def test_the_first_page_has_no_barrier(world: World, axe: str, scheme: str, width: int) -> None:
    async with page_of(world.browser, world.url, scheme=scheme, width=width) as page:
        await expect(page.locator("#overview .needs li")).to_have_count(3)
        await expect(page.locator('#chains .row[data-agent="calm-2"] .preview')).to_contain_text("it is 2")
        await page.locator("#overview .models summary").click()
        await page.locator("#overview .chart summary").first.click()
        assert await barriers(page, axe) == []
        assert await page.evaluate("document.body.scrollWidth <= innerWidth")
