"""The page in a real browser: what a person sees of chains, turns and repairs, and how they get there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from playwright.async_api import Browser, Page, Route, expect
from pydantic import SecretStr

from cli_session_proxy.domain.models import Agent
from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings
from ..serving import serving
from ..talking import ask, running
from .conftest import an_agent, imported, page_of, store_only

pytestmark = pytest.mark.asyncio(loop_scope="session")

HOSTILE = (
    "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    "</style></script><svg onload=alert(1)> \" onmouseover='alert(1)' {{7*7}} javascript:alert(1)"
)


def _say_red(transcript: Path) -> None:
    transcript.write_text(transcript.read_text().replace("colour is teal.", "colour is red."))


async def focused(page: Page) -> str:
    """The text of the row that has the keyboard."""
    found: str = await page.evaluate("document.activeElement.innerText")
    return found


async def test_a_hostile_prompt_stays_text(browser: Browser, tmp_path: Path) -> None:
    settings = store_only(tmp_path)
    async with running(settings) as engine, serving(engine, settings) as url:
        await imported(engine, await an_agent(engine, HOSTILE), [(HOSTILE, HOSTILE)])
        async with page_of(browser, url) as page:
            await expect(page.locator("#chains .name")).to_have_text(HOSTILE)
            await page.locator("#chains .row").click()
            await expect(page.locator("#chain h1")).to_have_text(HOSTILE)
            await page.locator("#chain .row").click()
            await expect(page.locator("#turn .said .text").first).to_have_text(HOSTILE)
            assert await page.locator("main script, main img, main style, [onerror], [onload]").count() == 0
            assert await page.title() == f"{HOSTILE} · cli_session_proxy"


async def test_a_name_that_changes_the_direction_of_text_changes_no_words_beside_it(
    browser: Browser, tmp_path: Path
) -> None:
    name = "ab\u202ecd\u2067ef\u0085"
    settings = store_only(tmp_path)
    open_to_others = """() => [...document.querySelectorAll("body *")].filter((one) =>
        [...one.childNodes].some((text) => text.nodeType === Node.TEXT_NODE && text.data.trim())
        && getComputedStyle(one).unicodeBidi !== "isolate").map((one) => one.outerHTML)"""
    async with running(settings) as engine, serving(engine, settings) as url:
        await imported(engine, await an_agent(engine, name), [(name, name)])
        async with page_of(browser, url) as page:
            await expect(page.locator("#chains .name")).to_have_text(name)
            assert await page.evaluate(open_to_others) == []
            await page.locator("#chains .row").click()
            await expect(page.locator("#chain h1")).to_have_text(name)
            await page.locator("#chain .row").click()
            await expect(page.locator("#turn .said .text").first).to_have_text(name)
            assert await page.evaluate(open_to_others) == []


async def test_the_files_allow_nothing_inline_and_nothing_from_elsewhere(tmp_path: Path) -> None:
    settings = store_only(tmp_path)
    async with (
        running(settings) as engine,
        serving(engine, settings) as url,
        httpx.AsyncClient(base_url=url.removesuffix("/v1"), trust_env=False) as http,
    ):
        page = await http.get("/ui")
        assert page.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'; style-src")
        assert "unsafe" not in page.headers["content-security-policy"]
        assert "style=" not in page.text
        assert "http" not in page.text.replace("http-equiv", "")
        assert (await http.get("/ui/main.js")).headers["content-type"].startswith("text/javascript")
        assert (await http.get("/ui/..%2froutes.py")).status_code == 404
        assert (await http.get("/ui/nothing.js")).json()["error"]["code"] == "not_found"


@pytest.mark.full
async def test_of_ten_thousand_turns_those_in_sight_are_drawn_wherever_somebody_jumps(
    browser: Browser, tmp_path: Path
) -> None:
    async with a_long_chain(tmp_path, turns=10_000) as (url, agent), page_of(browser, url) as page:
        rows = page.locator("#chain .row")
        await page.locator("#chains .row").click()
        await expect(page.locator("#chain .asked").first).to_have_text("question 10000")
        assert await rows.count() <= 300
        await page.keyboard.press("Shift+G")
        await expect(page.locator("#chain .row:focus .asked")).to_have_text("question 1")
        await expect(page.locator("#chain .asked").last).to_have_text("question 1")
        await page.keyboard.press("k")
        await expect(page.locator("#chain .row:focus .asked")).to_have_text("question 2")
        await page.keyboard.press("g")
        await expect(page.locator("#chain .row:focus .asked")).to_have_text("question 10000")
        # a link to one in the middle brings it into sight, and Escape leads to it
        await page.evaluate(f"location.hash = '#/long/turn_{agent.key}_t5000'")
        await expect(page.locator("#turn h2")).to_contain_text("Turn 5000")
        await expect(page.locator("#chain .row.open .asked")).to_have_text("question 5000")
        await expect(page.locator("#chain .row.open")).to_be_in_viewport()
        await expect(page.locator("#turn dl.facts").first).to_contain_text("#4999")
        await page.keyboard.press("Escape")
        await expect(page.locator("#chain .row:focus .asked")).to_have_text("question 5000")
        await page.locator("#chain").evaluate("list => (list.scrollTop = list.scrollHeight * 0.75)")
        await expect(page.locator("#chain .asked", has_text="question 2500")).to_have_count(1)
        assert await rows.count() <= 300
        assert await rows.first.evaluate("row => row.parentNode.ariaSetSize") == "10000"


async def test_a_link_into_a_long_chain_shows_its_turn_before_the_shape_of_all_is_known(
    browser: Browser, tmp_path: Path
) -> None:
    async with a_long_chain(tmp_path, turns=2500) as (url, agent):
        async with page_of(browser, url) as page:
            await expect(page.locator("#chains .row")).to_have_count(1)
            known = asyncio.Event()

            async def held(route: Route) -> None:
                await known.wait()
                await route.continue_()

            asked: list[str] = []
            page.on("request", lambda request: asked.append(request.url))
            await page.route("**/tree", held)
            await page.evaluate(f"location.hash = '#/long/turn_{agent.key}_t1250'")
            opened = page.locator("#chain .row.open")
            await expect(opened.locator(".asked")).to_have_text("question 1250")
            await expect(opened).to_be_in_viewport()
            # nothing of the newest ones was asked for
            assert not [one for one in asked if one.endswith("/turns?limit=100") or "from=2" in one]
            known.set()
            await expect(page.locator("#live")).to_have_text("live")
            await expect(opened).to_be_in_viewport()
            await page.keyboard.press("Escape")
            await expect(page.locator("#chain .row:focus .asked")).to_have_text("question 1250")
            await page.keyboard.press("g")
            await expect(page.locator("#chain .row:focus .asked")).to_have_text("question 2500")
            await page.unroute("**/tree")
        # a small screen shows the turn alone, and the list when it is left
        async with page_of(browser, url, width=390, at=f"#/long/turn_{agent.key}_t1250") as page:
            await expect(page.locator("#turn h2")).to_contain_text("Turn 1250")
            await expect(page.locator("#live")).to_have_text("live")
            await page.keyboard.press("Escape")
            await expect(page.locator("#chain .row:focus .asked")).to_have_text("question 1250")
            await expect(page.locator("#chain .row:focus")).to_be_in_viewport()


async def test_a_turn_that_is_new_stands_above_what_somebody_reads(browser: Browser, tmp_path: Path) -> None:
    settings = store_only(tmp_path)
    async with running(settings) as engine, serving(engine, settings) as url:
        agent = await an_agent(engine, "long")
        last = await imported(engine, agent, [(f"question {n}", "a") for n in range(1, 401)])
        async with page_of(browser, url, at=f"#/long/turn_{agent.key}_t200") as page:
            opened = page.locator("#chain .row.open")
            await expect(opened.locator(".asked")).to_have_text("question 200")
            await expect(page.locator("#live")).to_have_text("live")
            # Until then the head of the list has no text and is lower, and the rows above have no text and are higher.
            await expect(page.locator("#chain .summary p")).to_contain_text("400 turns")
            await expect(page.locator("#chain .row.coming")).to_have_count(0)
            before = await opened.bounding_box()
            await imported(engine, agent, [("one more", "b")], parent=last, mark="n")
            await expect(page.locator("#chain .summary p")).to_contain_text("401 turns")
            now = await opened.bounding_box()
            assert before is not None
            assert now is not None
            assert abs(now["y"] - before["y"]) < 2
            await page.keyboard.press("Escape")
            await expect(page.locator("#chain .row:focus .asked")).to_have_text("question 200")
            await page.keyboard.press("g")
            await expect(page.locator("#chain .row:focus .asked")).to_have_text("one more")


async def test_branches_are_drawn_in_lanes_of_their_own(browser: Browser, tmp_path: Path) -> None:
    settings = store_only(tmp_path)
    async with running(settings) as engine, serving(engine, settings) as url:
        agent = await an_agent(engine, "branchy")
        root = await imported(engine, agent, [("root", "r")])
        await imported(engine, agent, [("left 1", "a"), ("left 2", "b")], parent=root, mark="l")
        await imported(engine, agent, [("right", "c")], parent=root, mark="r")
        async with page_of(browser, url) as page:
            await page.locator("#chains .row").click()
            await expect(page.locator("#chain .row")).to_have_count(4)
            dots = await page.locator("#chain .graph circle").evaluate_all(
                "dots => dots.map(dot => dot.getAttribute('cx'))"
            )
            right, left_2, left_1, root_dot = dots
            assert left_2 == left_1 != right == root_dot
            assert await page.locator("#chain .graph circle.head").count() == 1


async def test_a_confirmed_rewind_moves_the_head_and_an_unconfirmed_one_does_not(
    browser: Browser, tmp_path: Path
) -> None:
    settings = store_only(tmp_path)
    async with running(settings) as engine, serving(engine, settings) as url:
        agent = await an_agent(engine, "long")
        last = await imported(engine, agent, [("one", "a"), ("two", "b"), ("three", "c")])
        async with page_of(browser, url) as page:
            await page.locator("#chains .row").click()
            await page.locator("#chain .row").nth(0).click()
            await expect(page.locator("#turn h2")).to_contain_text("head")
            await expect(page.locator("#turn .rewind")).to_have_count(0)
            await page.locator("#chain .row").nth(2).click()
            await page.locator("#turn .rewind button").click()
            await page.locator("#turn .rewind button", has_text="Keep").click()
            assert (await engine.store.agent("local", "long") or agent).head == last
            await page.locator("#turn .rewind button").click()
            await page.locator("#turn .rewind button", has_text="Rewind").click()
            await expect(page.locator("#turn h2")).to_contain_text("head")
            await expect(page.locator("#chain .row").nth(2).locator(".badge.head")).to_have_count(1)
            assert (await engine.store.agent("local", "long") or agent).head == f"turn_{agent.key}_t1"


async def test_the_keyboard_alone_is_enough(browser: Browser, tmp_path: Path) -> None:
    settings = store_only(tmp_path)
    async with running(settings) as engine, serving(engine, settings) as url:
        for name in ("alpha", "beta", "gamma"):
            await imported(engine, await an_agent(engine, name), [(f"{name} {n}", "yes") for n in range(1, 4)])
        async with page_of(browser, url) as page:
            await expect(page.locator("#chains .row")).to_have_count(3)
            await page.keyboard.press("/")
            await page.keyboard.type("BET")
            await expect(page.locator("#chains .row")).to_have_count(1)
            await page.keyboard.press("Enter")
            assert "beta" in await focused(page)
            await page.keyboard.press("Enter")
            await expect(page.locator("#chain .row")).to_have_count(3)
            await expect(page.locator("#chain .row:focus .asked")).to_have_text("beta 3")
            await page.keyboard.press("j")
            await page.keyboard.press("j")
            await page.keyboard.press("k")
            await expect(page.locator("#chain .row:focus .asked")).to_have_text("beta 2")
            await page.keyboard.press("Enter")
            await expect(page.locator("#turn .said .text").first).to_have_text("beta 2")
            await page.keyboard.press("Escape")
            await expect(page.locator("#turn")).to_be_hidden()
            await expect(page.locator("#chain .row:focus .asked")).to_have_text("beta 2")
            await page.keyboard.press("Escape")
            await expect(page.locator("#chain")).to_be_hidden()
            await page.keyboard.press("?")
            await expect(page.locator("#help")).to_be_visible()
            await page.keyboard.press("Escape")
            await expect(page.locator("#help")).to_be_hidden()


async def test_it_is_dark_where_the_system_is(browser: Browser, tmp_path: Path) -> None:
    settings = store_only(tmp_path)
    async with running(settings) as engine, serving(engine, settings) as url:
        backs = {}
        for scheme in ("light", "dark"):
            async with page_of(browser, url, scheme=scheme) as page:
                backs[scheme] = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        light, dark = (sum(map(int, backs[name][4:-1].split(","))) for name in ("light", "dark"))
        assert light > 700
        assert dark < 120


async def test_a_repair_appears_live_with_its_reason_and_evidence(
    browser: Browser, claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings(claude_bin=claude_2)
    async with running(settings) as engine, serving(engine, settings) as url, page_of(browser, url) as page:
        first = await ask(engine, "remember: the colour is teal", agent="live")
        await page.locator("#chains .row").click()
        await expect(page.locator("#chain .row")).to_have_count(1)
        await expect(page.locator("#live")).to_have_text("live")
        session = await engine.store.session(first.session_id or "")
        assert session is not None
        await asyncio.to_thread(Path(session.transcript).unlink)
        second = await ask(engine, "what is the colour?", agent="live")
        row = page.locator(f"#chain .row[data-turn={second.id}]")
        await expect(row.locator(".answered")).to_have_text("colour is teal.")
        await expect(row.locator(".told")).to_have_text(["repair Session file was missing; restored."])
        await row.click()
        opened = page.locator("#turn")
        await expect(opened.locator(".bar span")).to_have_count(5)
        await expect(opened.locator(".evidence")).to_contain_text(
            f"The session's transcript was gone (no transcript at {session.transcript}): it was written again"
        )
        await expect(opened.locator(".evidence")).to_be_hidden()
        await opened.locator(".transcript summary").first.click()
        await expect(opened.locator(".transcript .badge")).to_have_text("equal")
        # and what the transcript loses afterwards is shown as well
        await asyncio.to_thread(_say_red, Path(session.transcript))
        await page.reload()
        await opened.locator(".transcript summary").first.click()
        await expect(opened.locator(".transcript .badge")).to_have_text("different")
        await expect(opened.locator('.transcript tr[data-state="changed"] .file')).to_have_text("colour is red.")


async def test_it_asks_for_the_key_and_shows_only_that_owners_chains(browser: Browser, tmp_path: Path) -> None:
    keys = {"alice": "alice-has-a-long-key", "bob": "bob-has-another-long-key"}
    settings = store_only(tmp_path).model_copy(update={"keys": {name: SecretStr(key) for name, key in keys.items()}})
    async with running(settings) as engine, serving(engine, settings) as url:
        for owner in keys:
            agent = await engine.store.ensure_agent(owner, f"{owner}s agent", owner, named=True, now=1.0)
            await imported(engine, agent, [("hello", "hi")])
        async with page_of(browser, url, failing="401") as page:
            await expect(page.locator("#key")).to_be_focused()
            await page.keyboard.type("wrong-but-long-enough")
            await page.keyboard.press("Enter")
            await expect(page.locator("#key-refused")).to_have_text("The proxy refused this key.")
            # It is marked: what is typed now takes its place.
            await expect(page.locator("#key")).to_have_value("wrong-but-long-enough")
            await expect(page.locator("#key")).to_be_focused()
            await page.keyboard.type(keys["alice"])
            await page.keyboard.press("Enter")
            await expect(page.locator("#chains .name")).to_have_text("alices agent")
            await expect(page.locator("#ask-key")).to_be_hidden()
            await page.locator("#chains .row").click()
            await expect(page.locator("#chain .row")).to_have_count(1)
            await expect(page.locator("#live")).to_have_text("live")
            assert keys["alice"] not in page.url
            await page.reload()
            await expect(page.locator("#chain .row")).to_have_count(1)


async def test_a_name_with_a_slash_is_one_agent_and_pages_are_checked(tmp_path: Path) -> None:
    settings = store_only(tmp_path)
    async with (
        running(settings) as engine,
        serving(engine, settings) as url,
        httpx.AsyncClient(base_url=url, trust_env=False) as http,
    ):
        await imported(engine, await an_agent(engine, "a/turns"), [("one", "1"), ("two", "2"), ("three", "3")])
        page = (await http.get("/chains/a%2Fturns/turns?limit=2")).json()
        assert [row["asked"] for row in page["data"]] == ["three", "two"]
        older = (await http.get(f"/chains/a%2Fturns/turns?before={page['next']}")).json()
        assert ([row["number"] for row in older["data"]], older["next"]) == ([1], None)
        assert (await http.get("/chains/a%2Fturns")).json()["agent_id"] == "a/turns"
        with_two = (await http.get(f"/chains/a%2Fturns/turns?limit=2&with={page['data'][1]['id']}")).json()
        assert [row["asked"] for row in with_two["data"]] == ["two", "one"]
        assert (await http.get("/chains/a%2Fturns/turns?with=turn_of_nobody")).status_code == 404
        for query in ("limit=0", "limit=x", "before=-1", f"before={10**30}", "limit=²"):
            assert (await http.get(f"/chains/a%2Fturns/turns?{query}")).status_code == 400
        assert (await http.get("/chains/a%2Fturns/turns/turn_of_nobody")).status_code == 404
        other = await imported(engine, await an_agent(engine, "other"), [("secret", "of another")])
        assert (await http.get(f"/chains/a%2Fturns/turns/{other}")).status_code == 404


@asynccontextmanager
async def a_long_chain(tmp_path: Path, *, turns: int) -> AsyncIterator[tuple[str, Agent]]:
    """A proxy with one agent, `long`, and so many turns of its: "question 1", …"""
    settings = store_only(tmp_path)
    async with running(settings) as engine, serving(engine, settings) as url:
        agent = await an_agent(engine, "long")
        await imported(engine, agent, [(f"question {n}", "a") for n in range(1, turns + 1)])
        yield url, agent
