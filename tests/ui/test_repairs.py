"""What a person reads on the page of what broke: at its turn in the list, in the opened turn, and on the timeline."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path

import pytest
from playwright.async_api import Browser, Page, expect

from cli_session_proxy.domain.models import Message, Record, Session
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.export import shown, words
from cli_session_proxy.export.formats import FORMATS
from cli_session_proxy.stores.base import ChainPart, NewChain, WholeTurn
from turnfault.provider.script import HeldReply
from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings
from ..continuity.misbehaving import MisbehavingCli
from ..continuity.talk import EngineTalk
from ..export.told import CASES, every_repair
from ..fakes import SESSION, turn
from ..serving import serving
from ..talking import running
from .conftest import page_of, store_only

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def stored(engine: Engine, parts: list[ChainPart], head: str) -> None:
    new = NewChain("local", "mended", "mended", True, 1.0, time.time(), lambda: head)
    await engine.store.import_chain(new, parts)


async def test_every_repair_is_told_at_its_turn_and_on_the_timeline(browser: Browser, tmp_path: Path) -> None:
    settings = store_only(tmp_path)
    rows, links = every_repair()
    async with running(settings) as engine, serving(engine, settings) as url:
        parts: list[ChainPart] = [WholeTurn(row, (Record("{}"),)) for row in rows]
        await stored(engine, [*parts, Session(SESSION, 0, rows[-1].id, "", "2.1.329", 1.0), *links], rows[-1].id)
        async with page_of(browser, url) as page:
            await page.locator("#chains .row").click()
            await expect(page.locator("#chain .row")).to_have_count(len(CASES))
            for number, case in enumerate(CASES, 1):
                made = [link for link in links if link.turn_id == f"turn_{number}"]
                sentences = [*(shown.link(link)["says"] for link in made), *shown.says(rows[number - 1], made)]
                assert " ".join(sentences) == case.says
                row = page.locator(f"#chain .row[data-turn=turn_{number}]")
                short = [f"{kind} {says}" for kind, says in words.in_brief(rows[number - 1], made)]
                await expect(row.locator(".told")).to_have_text(short)
                await row.click()
                await expect(page.locator("#turn h2")).to_contain_text(f"Turn {number} ")
                await expect(page.locator("#turn > .told")).to_have_text(short)
                await expect(page.locator("#turn .evidence")).to_contain_text(sentences)
            links_of = {int((link.turn_id or "").removeprefix("turn_")): link for link in links}
            linked = [(n, case) for n, case in enumerate(CASES, 1) if case.reason not in (None, "started")]
            await page.locator(".timeline summary").click()
            items = page.locator(".timeline li")
            await expect(items).to_have_count(len(linked))
            for at, number in enumerate(reversed([n for n, _ in linked])):
                await expect(items.nth(at)).to_contain_text(words.link_in_brief(links_of[number]).says)
                await expect(items.nth(at).locator("a")).to_have_text(f"turn {number}")
            await items.nth(0).locator("a").click()
            await expect(page.locator("#turn h2")).to_contain_text(f"Turn {linked[-1][0]} ")


async def said(page: Page, turn_id: str, words: str) -> None:
    await expect(page.locator(f"#chain .row[data-turn={turn_id}] .told", has_text=words)).to_have_count(1)


@pytest.mark.full
async def test_repairs_of_the_real_cli_are_told_as_they_happen(
    browser: Browser, claude_2: Path, make_settings: MakeSettings, upstream: Upstream, tmp_path: Path
) -> None:
    cli = MisbehavingCli(tmp_path / "bin", claude_2)
    settings = make_settings(claude_bin=cli.path)
    talk = EngineTalk(settings, upstream)
    await talk.up()
    try:
        async with serving(talk.engine, settings) as url, page_of(browser, url) as page:
            await talk.tell()
            await page.locator("#chains .row").click()
            await expect(page.locator("#live")).to_have_text("live")
            await asyncio.to_thread(talk.transcript.unlink)
            await talk.tell()
            await said(page, talk.turn.id, "repair Session file was missing; restored.")
            lost = talk.projects / "-somewhere-else"
            await asyncio.to_thread(lost.mkdir)
            await asyncio.to_thread(talk.transcript.rename, lost / talk.transcript.name)
            await talk.tell()
            await said(page, talk.turn.id, "repair Session file had been moved; put back.")
            await killed_in_a_turn(talk)
            await said(page, talk.turn.id, "retry 1 attempt failed; asked again.")
            talk.kill()
            await talk.all_dead()
            cli.next("fork")
            await talk.tell()
            await said(page, talk.turn.id, "repair The CLI was started again.")
            await said(page, talk.turn.id, "The CLI continued in a new session.")
            await page.locator(".timeline summary").click()
            await expect(page.locator(".timeline li")).to_have_count(4)
    finally:
        await talk.down()


async def killed_in_a_turn(talk: EngineTalk) -> None:
    gate, fact = HeldReply(), talk.new_fact()
    talk.upstream.when(fact.key, gate)
    asking = asyncio.create_task(talk.tell(fact))
    await gate.reached.wait()
    talk.kill()
    await asking


async def test_a_turn_that_waited_stands_above_the_adopted_one_that_it_continues(
    browser: Browser, tmp_path: Path
) -> None:
    settings = store_only(tmp_path)
    rows = [
        turn(1), turn(2, parent_id="turn_4", input=(Message.user("I waited"),)),
        turn(3, parent_id="turn_1", origin="adopted"), turn(4, parent_id="turn_3", origin="adopted"),
    ]  # fmt: skip
    async with running(settings) as engine, serving(engine, settings) as url:
        await stored(engine, [WholeTurn(row, (Record("{}"),)) for row in rows], "turn_2")
        async with page_of(browser, url) as page:
            await page.locator("#chains .row").click()
            listed = page.locator("#chain .row")
            await expect(listed).to_have_count(4)
            ids = await listed.evaluate_all("rows => rows.map(row => row.dataset.turn)")
            assert ids == ["turn_2", "turn_4", "turn_3", "turn_1"]
            # the number that a dump has, and the API: what was adopted later shifts none
            assert await listed.locator(".number").all_text_contents() == ["#2", "#4", "#3", "#1"]
            agent = await engine.store.agent("local", "mended")
            assert agent is not None
            for form, told in (("markdown", "## Turn "), ("html", "<summary>Turn ")):
                pieces = FORMATS[form].write(engine.store, agent, sandbox="")
                dump = "".join([piece async for piece in pieces])
                assert re.findall(rf"{told}(\d)", dump) == ["1", "3", "4", "2"]
            lanes = await listed.locator("circle").evaluate_all("dots => dots.map(dot => dot.getAttribute('cx'))")
            assert len(set(lanes)) == 1
            await listed.first.click()
            await expect(page.locator("#turn h2")).to_contain_text("Turn 2 ")
            await expect(page.locator("#turn .said .text").first).to_have_text("I waited")
