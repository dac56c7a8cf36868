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


async def test_one_line_says_first_whether_it_works_and_what_it_costs(world: World) -> None:
    async with page_of(world.browser, world.url) as page:
        line = page.locator("#overview .status")
        await expect(line.locator("strong")).to_have_text("Working")
        await expect(line).to_contain_text("0 turns running")
        await expect(line.locator(".kept")).to_have_count(0)  # imported turns were sent to nobody
        await expect(line).to_contain_text("$3.75 today, $3.75 in seven days")
        await expect(page.locator("#live")).to_have_text("live")
        told = await (await page.request.get(f"{world.url}/overview")).json()
        told["status"] |= {
            "working": False, "problem": "log in with `cli-session-proxy login`",
            "remembered": {"agents": 2, "turns": 41, "sent": 40}, "put_off": 3,
            "plan": {"status": "rejected", "at": 1.0, "limits": "five_hour", "resets_at": 9e9, "windows": [
                {"name": "five_hour", "used": 1.0, "resets_at": 9e9, "status": "rejected"},
                {"name": "seven_day", "used": 0.301, "resets_at": 9e9, "status": None},
            ]},
        }  # fmt: skip
        await page.route("**/v1/overview", lambda route: route.fulfill(json=told))
        await expect(line.locator("strong")).to_have_text("Not working: log in with `cli-session-proxy login`")
        await expect(line.locator(".kept")).to_have_text("something is missing: 40 of 41 turns sent")
        await expect(line).to_contain_text("0 turns running, 3 until a limit is over")
        await expect(line.locator(".window")).to_have_text(["five hours: 100 % used", "week: 30 % used"])
        red = await page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--bad')")
        rgb = f"rgb({', '.join(str(int(red.strip()[at : at + 2], 16)) for at in (1, 3, 5))})"
        for part in (line.locator("strong"), line.locator(".kept"), line.locator(".window").first):
            assert await part.evaluate("one => getComputedStyle(one).color") == rgb
    async with page_of(world.browser, world.url, failing="503") as page:
        # what it said while the proxy still answered says nothing of now
        await expect(page.locator("#overview .status")).to_contain_text("Working")
        away = {"error": {"message": "the disk is gone"}}
        await page.route("**/v1/overview", lambda route: route.fulfill(status=503, json=away))
        await expect(page.locator("#overview .status")).to_have_text("Not working: the disk is gone")
        await expect(page.locator("#live")).to_have_text("reconnecting")
        await expect(page.locator("#fault")).to_be_hidden()  # it is said once
        await page.evaluate("location.hash = '#/stuck'")
        await expect(page.locator("#fault")).to_have_text("the disk is gone")  # there is no status line here
        await page.evaluate("location.hash = '#/'")
        await expect(page.locator("#fault")).to_be_hidden()
        await page.unroute("**/v1/overview")
        await expect(page.locator("#overview .status")).to_contain_text("Working")


async def test_agents_that_need_a_person_are_counted_by_reason_and_lead_to_the_turn(world: World) -> None:
    async with page_of(world.browser, world.url) as page:
        needs = page.locator("#overview .needs li")
        await expect(page.locator("#overview .needs h2")).to_have_text(
            "Need a look: 1 keeps failing, 1 failed within a day"
        )
        await expect(needs).to_have_count(2)  # what was repaired needs nobody
        await expect(needs.nth(0)).to_contain_text("stuck its last 2 turns failed: the provider was overloaded")
        await expect(needs.nth(1)).to_contain_text(
            "well again 1 turn failed within a day, but not the last: the provider was overloaded"
        )
        await needs.nth(0).get_by_role("link").click()
        await expect(page.locator("#turn h2")).to_contain_text("Turn 3 failed")
        await expect(page.locator("#turn .error")).to_have_text("busy")
        await expect(page.locator("#chain .summary p > span").nth(1)).to_have_text("$0.75")
        await page.evaluate("location.hash = '#/mended/mended-1'")
        await expect(page.locator("#turn .told")).to_have_text("repair Session file was missing; restored.")
        quiet = "one => getComputedStyle(one).color === getComputedStyle(document.querySelector('#turn .role')).color"
        assert await page.locator("#turn .told").evaluate(quiet)


async def test_an_agent_without_a_name_is_titled_by_its_first_question(world: World, tmp_path: Path) -> None:
    now = time.time()
    asked: tuple[tuple[str, Status], ...] = (("How do I centre a div?", "completed"), ("thanks", "failed"))
    rows = [
        turn(
            n,
            id=f"div-{n}",
            parent_id="div-1" if n > 1 else None,
            created_at=now,
            status=state,
            input=(Message.user(words),),
        )
        for n, (words, state) in enumerate(asked, 1)
    ]
    new = NewChain("local", "auto_0123456789abcdef", "auto", False, 1.0, now, lambda: "div-2")
    settings = store_only(tmp_path)
    async with running(settings) as engine, serving(engine, settings) as url:
        await engine.store.import_chain(new, [WholeTurn(row, ()) for row in rows])
        async with page_of(world.browser, url) as page:
            await expect(page.locator("#overview .needs a")).to_have_text("How do I centre a div?")
            await expect(page.locator("#chains .name")).to_have_text("How do I centre a div?")
            await page.locator("#chains .row").click()
            await expect(page.locator("#chain h1")).to_have_text("How do I centre a div?")
            await expect(page.locator("#chain h1")).to_have_attribute("title", "auto_0123456789abcdef")


@pytest.mark.full
async def test_few_days_are_numbers_and_more_are_bars_today_first(world: World, axe: str) -> None:
    async with page_of(world.browser, world.url) as page:
        days = page.locator("#overview .days")
        await expect(days.locator(".numbers")).to_have_text("$3.75 today, 10 turns")
        await expect(days.locator(".chart")).to_have_count(0)
        told = await (await page.request.get(f"{world.url}/overview")).json()
        for ago, cost in ((3, 15.0), (5, 0.0)):
            told["days"][-1 - ago] |= {"turns": 2, "cost_usd": cost}
        await page.route("**/v1/overview", lambda route: route.fulfill(json=told))
        bars = days.locator(".chart .day")
        await expect(bars).to_have_count(14)
        await expect(bars.nth(0)).to_have_attribute("title", "today: $3.75, 10 turns")
        await expect(bars.nth(3)).to_have_attribute("title", f"{told['days'][-4]['day']}: $15.00, 2 turns")
        await expect(days.locator(".axis")).to_have_text("$15.00$0")
        high = await bars.evaluate_all("all => all.map(one => one.querySelector('.height').offsetHeight)")
        assert high[0] == pytest.approx(high[3] / 4, abs=1)
        assert sum(px > 0 for px in high) == 2
        by_day = days.locator(".sums", has_text="By day")
        await by_day.locator("summary").click()
        await expect(by_day.locator("tbody tr").nth(0)).to_contain_text(f"{told['days'][-1]['day']}10$3.75")
        await expect(by_day.locator("tbody tr").nth(1)).to_have_text(told["days"][-2]["day"])  # a day without turns
        await days.locator(".sums", has_text="By model").locator("summary").click()
        await expect(days.locator(".sums", has_text="By model").locator("tbody")).to_contain_text("sonnet")
        assert await barriers(page, axe) == []


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
                every = page.locator("#overview .sums", has=page.get_by_text("By key"))
                if owner == "alice":
                    await expect(days.locator("h2")).to_contain_text("Cost by day of key alice")
                    await expect(days.locator(".numbers")).to_have_text("$1.00 today, 1 turn")
                    await expect(every).to_have_count(0)
                    assert "bob" not in await page.locator("body").inner_text()
                else:
                    await expect(days.locator("h2")).to_contain_text("Cost by day of all keys")
                    await expect(days.locator(".numbers")).to_have_text("$3.00 today, 2 turns")
                    await every.locator("summary").click()
                    await expect(every.locator("tbody tr")).to_contain_text(["bob1$2.00", "alice1$1.00"])
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
        await expect(rows.nth(1).locator(".state")).to_be_empty()
        await expect(rows.nth(1).locator(".lost")).to_have_text("1 failed or refused")
        await page.locator("select[name=only]").select_option("repaired")
        await expect(rows.locator(".name")).to_have_text(["mended"])
        await expect(totals).to_contain_text("1 agent of 6, 2 turns")
        await page.locator("select[name=only]").select_option("waiting")
        await expect(page.locator("#chains .empty")).to_have_text("No agent matches.")


async def test_a_row_shows_the_newest_words_and_how_long_ago(world: World) -> None:
    async with page_of(world.browser, world.url) as page:
        row = page.locator('#chains .row[data-agent="calm-2"]')
        await expect(row.locator(".preview")).to_have_text("what is 2? → it is 2")
        await expect(row.locator("time")).to_have_text("just now")


@pytest.mark.parametrize(
    ("scheme", "width"),
    rest_in_full(
        ("dark", 390), ("light", 1024), ("light", 1440), ("dark", 1440), ("light", 390), ("dark", 1024), quick=2
    ),
)
async def test_the_first_page_has_no_barrier(world: World, axe: str, scheme: str, width: int) -> None:
    async with page_of(world.browser, world.url, scheme=scheme, width=width) as page:
        await expect(page.locator("#overview .needs li")).to_have_count(2)
        await expect(page.locator('#chains .row[data-agent="calm-2"] .preview')).to_contain_text("it is 2")
        for folded in await page.locator("#overview .sums summary").all():
            await folded.click()
        assert await barriers(page, axe) == []
        assert await page.evaluate("document.body.scrollWidth <= innerWidth")
