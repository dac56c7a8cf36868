"""The dumps that a browser draws: whole, offline, and never more than text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, Page

from cli_session_proxy.domain.evidence import Evidence
from cli_session_proxy.domain.models import Link, Message, Session
from cli_session_proxy.export.formats import FORMATS
from cli_session_proxy.export.outline import MOST_BOXES

from ..conftest import ROOT, required
from ..fakes import AGENT, OTHER_SESSION, SESSION, FakeStore, block, turn
from .test_dumps import store_of

HOSTILE = (
    "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    "</style></pre></details><style>body{display:none}</style><a href=\"javascript:document.title='owned'\">x</a>"
    "\x1b[31m\x00]]>--><svg onload=document.title='owned'>&lt;b&gt;'\""
)
MENDED = Link(SESSION, SESSION, "turn_2", "rebuilt", {"note": "no transcript at /x"}, 2.0)


def branched() -> FakeStore:
    """1 - 2 (rebuilt) - 3, and 4 after 1, failed; the head is 3."""
    links = (
        Link(None, SESSION, "turn_1", "started", {}, 1.0),
        MENDED,
        Link(SESSION, OTHER_SESSION, "turn_4", "branched", {}, 4.0),
    )
    rows = (
        turn(1), turn(2, continuity="rebuilt"), turn(3, output=(block(HOSTILE),)),
        turn(4, parent_id="turn_1", status="failed", error={"code": "x", "message": HOSTILE}, session_id=OTHER_SESSION),
    )  # fmt: skip
    store = store_of(*rows, links=links)
    store.agents["a"] = store.agents["a"].__class__(
        AGENT.key, AGENT.owner, HOSTILE, AGENT.dir, AGENT.named, "turn_3", AGENT.created_at
    )
    store.sessions.append(Session(OTHER_SESSION, 1, "turn_4", "/t/s2.jsonl", "2.1.329", 4.0))
    return store


async def text_of(store: FakeStore, format: str) -> str:
    (agent,) = store.agents.values()
    pieces = FORMATS[format].write(store, agent, sandbox=HOSTILE)  # type: ignore[arg-type]  # a fake
    return "".join([piece async for piece in pieces])


async def shown(browser: Browser, path: Path, **context: object) -> tuple[Page, list[str]]:
    """The file in a browser without a network; every request and every fault is noted."""
    tab = await (await browser.new_context(offline=True, **context)).new_page()  # type: ignore[arg-type]
    noted: list[str] = []
    tab.on("pageerror", lambda error: noted.append(str(error)))
    tab.on("console", lambda said: noted.append(said.text))
    tab.on("request", lambda request: noted.append(request.url) if request.url != path.as_uri() else None)
    await tab.goto(path.as_uri())
    return tab, noted


@pytest.mark.asyncio(loop_scope="session")
async def test_a_page_opens_offline_and_a_hostile_text_stays_text(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "x.html"
    path.write_text(await text_of(branched(), "html"), "utf-8")
    page, noted = await shown(browser, path)
    assert noted == []
    visible = HOSTILE.replace("\x1b", "\ufffd").replace("\x00", "\ufffd")
    assert await page.title() == visible
    assert await page.locator("h1").text_content() == f"Agent {visible}"
    assert await page.locator("#turn_3 pre").nth(1).text_content() == visible
    assert await page.locator("script, img, svg, a[href^=javascript]").count() == 0
    assert await page.locator("#turn_3").is_visible()


@pytest.mark.asyncio(loop_scope="session")
async def test_a_page_shows_tree_timeline_and_repairs(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "x.html"
    path.write_text(await text_of(branched(), "html"), "utf-8")
    page, _ = await shown(browser, path)
    tree = await page.locator("#tree + nav li").all_text_contents()
    assert len(tree) == 4
    assert "repaired: the session was rebuilt" in tree[1]
    assert "after 1" in tree[3]
    assert "failed" in tree[3]
    assert await page.locator("#tree + nav li.l1").count() == 1
    row = await page.locator("#timeline + div tr").nth(2).text_content()
    assert row is not None
    assert "no transcript at /x" in row
    await page.locator("#tree + nav a").nth(1).click()
    assert await page.locator("#turn_2 summary").first.text_content() is not None
    assert await page.evaluate("location.hash") == "#turn_2"
    light = await page.evaluate("getComputedStyle(document.body).backgroundColor")
    dark, _ = await shown(browser, path, color_scheme="dark")
    assert await dark.evaluate("getComputedStyle(document.body).backgroundColor") != light


async def test_what_a_file_brought_is_escaped_wherever_it_stands() -> None:
    """A chain may be imported: its names of statuses and reasons are a stranger's too."""
    named: Any = "<b id='x'>\n# x"
    row = turn(
        1, status=named, continuity=named, model=named, session_id=named, input=(Message(named, (block("x"),)),),
        error={"code": named, "message": named},
    )  # fmt: skip
    links = (Link(named, named, "turn_1", named, {}, 1.0),)
    store = store_of(row, turn(2, origin=named, continuity=None), links=links)
    html = await text_of(store, "html")
    assert "&lt;b id=" in html
    assert "<b id=" not in html
    markdown = await text_of(store, "markdown")
    assert "<b id=" not in re.sub("`.*?`", "", markdown.replace("\\<", ""))
    assert "\n# x" not in markdown


@pytest.mark.parametrize("format", ["markdown", "html"])
async def test_nothing_steers_a_terminal_and_every_script_stays_whole(format: str) -> None:
    steering = "\x1b[2J\x07\x7f\x9b31m\u202e"
    whole = "👨‍👩‍👧 می‌خواهم\ttab"
    text = await text_of(store_of(turn(1, output=(block(f"{steering}|{whole}"),))), format)
    assert not set(steering) - set("[2J31m") & set(text)
    assert f"|{whole}" in text


async def test_a_page_of_a_long_chain_is_written_turn_by_turn() -> None:
    store = store_of(*(turn(number) for number in range(1, 2001)))
    (agent,) = store.agents.values()
    pieces = [piece async for piece in FORMATS["html"].write(store, agent, sandbox="x")]  # type: ignore[arg-type]  # a fake
    assert sum("<details id='turn_" in piece for piece in pieces) == 2000
    assert max(len(piece) for piece in pieces if "<details id='turn_" in piece) < 3000


async def test_only_what_was_said_is_shown_without_redaction() -> None:
    secret = "sk-ant-api03-abcdef123456"
    row = turn(
        1,
        input=(Message.user(secret),),
        output=(block("fine"),),
        error={"message": secret},
        evidence=Evidence(other={"x": secret}),
    )
    (agent,) = (store := store_of(row)).agents.values()
    for name in ("json", "markdown", "html"):
        write = FORMATS[name].write
        said = "".join([piece async for piece in write(store, agent, sandbox="x", verbatim=True)])  # type: ignore[arg-type]  # a fake
        assert said.count(secret) == 1


# --- mermaid


async def test_a_graph_has_a_box_for_each_run_and_names_its_repairs() -> None:
    links = (Link(None, SESSION, "turn_1", "started", {}, 1.0), Link(SESSION, SESSION, "turn_4", "rebuilt", {}, 2.0))
    text = await text_of(store_of(*(turn(number) for number in range(1, 7)), links=links), "mermaid")
    assert 'b1["turns 1 to 3<br/>session 5e551011"]' in text
    assert 'b2["turns 4 to 6<br/>session 5e551011"]' in text
    assert "b1 -->|rebuilt| b2" in text
    assert "b3" not in text


async def test_new_ids_of_an_old_cli_are_no_boxes() -> None:
    links = [Link(f"s{n}", f"s{n + 1}", f"turn_{n + 1}", "forked_by_cli", {}, 1.0) for n in range(1, 9)]
    rows = [turn(number, session_id=f"s{number}") for number in range(1, 10)]
    text = await text_of(store_of(*rows, links=tuple(links)), "mermaid")
    assert 'b1["turns 1 to 9<br/>session s1 and 8 more"]' in text


async def test_a_graph_of_a_long_chain_stays_drawable() -> None:
    links = tuple(Link(SESSION, SESSION, f"turn_{n}", "rebuilt", {}, 1.0) for n in range(1, 1001))
    text = await text_of(store_of(*(turn(number) for number in range(1, 1001)), links=links), "mermaid")
    assert text.count("-->") <= MOST_BOXES + 1
    assert "750 earlier boxes left out" in text
    assert len(text) < 50_000


@pytest.fixture(scope="session")
def mermaid_js() -> Path:
    path = ROOT / ".tools" / "mermaid" / "node_modules" / "mermaid" / "dist" / "mermaid.min.js"
    return required(path, "make tools", what="mermaid from npm")


@pytest.mark.asyncio(loop_scope="session")
async def test_mermaid_draws_the_graph(browser: Browser, tmp_path: Path, mermaid_js: Path) -> None:
    text = await text_of(branched(), "mermaid")
    (tmp_path / "x.html").write_text("<!doctype html><meta charset=utf-8><title>graph</title><div id=out></div>")
    page, noted = await shown(browser, tmp_path / "x.html")
    await page.add_script_tag(path=mermaid_js)
    drawn = await page.evaluate("text => mermaid.render('g', text).then(made => made.svg)", text)
    await page.evaluate("svg => { document.getElementById('out').innerHTML = svg }", drawn)
    labels = await page.locator("#out .nodeLabel").all_text_contents()
    assert any(label.startswith("agent <script>document.title") for label in labels)
    assert [label for label in labels if label.startswith("turn")] == [
        "turn 1session 5e551011", "turns 2 to 3session 5e551011head", "turn 4session 5e552022failed",
    ]  # fmt: skip
    assert await page.locator("#out .edgeLabel").all_text_contents() != []
    assert await page.title() == "graph"
    assert noted == []
