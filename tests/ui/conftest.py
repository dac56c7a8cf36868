"""A real browser on the page of a real server; most tests fill the store themselves and need no CLI."""

from __future__ import annotations

import shutil
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, async_playwright, expect

from cli_session_proxy.domain.models import Agent, Message, Record
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.settings import Settings
from cli_session_proxy.stores.base import WholeTurn
from cli_session_proxy_store_conformance.samples import a_finished_turn
from turnfault.provider.upstream import Upstream

from ..conftest import ROOT, required
from ..serving import serving
from ..talking import running
from ..until import PATIENCE

# The first that is there: the same engine without windows of its own takes a third less of a processor.
CHROMIUMS = ("chromium-headless-shell", "chromium")
# No sandbox: CI runs as root in a container. The rest keeps it from talking to anybody but the page's server.
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
WIDE = {"width": 1360, "height": 860}
# Playwright's own five seconds are less than a loaded machine takes.
MILLISECONDS = 1000 * PATIENCE
expect.set_options(timeout=MILLISECONDS)


def found() -> Path | None:
    return next((Path(path) for path in map(shutil.which, CHROMIUMS) if path), None)


@pytest.fixture(scope="session")
def chromium() -> Path:
    return required(found(), "apt-get install chromium (make tools does it for root)", what="chromium")


@asynccontextmanager
async def _launched(chromium: Path, home: Path) -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        # Playwright gives every browser a fresh user-data-dir under TMPDIR and removes it.
        browser = await playwright.chromium.launch(
            executable_path=chromium,
            args=list(FLAGS),
            timeout=MILLISECONDS,
            env={"HOME": str(home), "PATH": "/usr/bin:/bin"},
        )
        try:
            yield browser
        finally:
            await browser.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser(chromium: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Browser]:
    """One for all tests of the page, which are on its loop: each has a page of its own in it (`page_of`)."""
    async with _launched(chromium, tmp_path_factory.mktemp("browser")) as browser:
        yield browser
        _idle.clear()


@pytest_asyncio.fixture(loop_scope="session")
async def upstream() -> AsyncIterator[Upstream]:
    async with Upstream() as server:
        yield server


@dataclass(frozen=True)
class World:
    """A server whose store the tests of one module fill and share, and the browser."""

    engine: Engine
    url: str
    browser: Browser


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def world(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """Tests that use it take agents of their own names."""
    settings = store_only(tmp_path_factory.mktemp("world"))
    async with running(settings) as engine, serving(engine, settings) as url:
        yield World(engine, url, browser)


@pytest.fixture(scope="session")
def axe() -> str:
    """The source of axe-core, which finds what somebody with a screen reader, or without a mouse, cannot use."""
    file = ROOT / ".tools" / "axe" / "node_modules" / "axe-core" / "axe.min.js"
    return required(file, "make tools", what="axe-core").read_text()


async def barriers(page: Page, axe: str) -> list[str]:
    """What axe finds serious on the page as it is: the rule, and where."""
    if not await page.evaluate("'axe' in window"):
        await page.evaluate(axe)
    found = await page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
    return [
        f"{one['id']} ({one['impact']}): {node['target']} {node.get('failureSummary', '')}"
        for one in found["violations"]
        if one["impact"] in ("serious", "critical")
        for node in one["nodes"]
    ]


# Pages that a test has left, with nothing of it: a new one takes Chromium a fifth of a second of a processor. Every one
# is in a context of its own.
_idle: list[Page] = []


@asynccontextmanager
async def page_of(
    browser: Browser,
    url: str,
    *,
    scheme: str = "light",
    failing: str = "",
    width: int = WIDE["width"],
    at: str = "",
) -> AsyncIterator[Page]:
    """The page at `/ui`, at this hash; whatever it reports as an error fails the test, but answers with the status
    that is `failing`."""
    page = _idle.pop() if _idle else await browser.new_page()
    page.set_default_timeout(MILLISECONDS)
    await page.set_viewport_size({**WIDE, "width": width})  # type: ignore[typeddict-item]
    await page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # type: ignore[arg-type]
    faults: list[str] = []
    listeners: dict[Any, Callable[[Any], None]] = {
        "pageerror": lambda error: faults.append(str(error)),
        "console": lambda said: faults.append(said.text) if said.type == "error" else None,
        "dialog": lambda dialog: faults.append(f"dialog: {dialog.message}"),
    }
    for event, listener in listeners.items():
        page.on(event, listener)
    left = False
    try:
        await page.goto(f"{url.removesuffix('/v1')}/ui{at}")
        yield page
        told = [fault for fault in faults if not (failing and f"status of {failing}" in fault)]
        assert told == [], told
        await page.evaluate("sessionStorage.clear()")
        await page.goto("about:blank")
        await page.unroute_all()
        await page.context.clear_permissions()
        left = True
    finally:
        for event, listener in listeners.items():
            page.remove_listener(event, listener)
        if left:
            _idle.append(page)
        else:
            await page.context.close()


async def an_agent(engine: Engine, agent_id: str) -> Agent:
    return await engine.store.ensure_agent("local", agent_id, f"dir-{abs(hash(agent_id))}", named=True, now=time.time())


async def imported(
    engine: Engine, agent: Agent, said: Sequence[tuple[str, str]], *, parent: str | None = None, mark: str = "t"
) -> str:
    """Turns with these questions and answers, one after another; the last one's id, which is the head."""
    turns: list[WholeTurn] = []
    now = time.time() - len(said)
    for number, (asked, answered) in enumerate(said, 1):
        turns.append(
            a_finished_turn(
                id=f"turn_{agent.key}_{mark}{number}",
                agent_key=agent.key,
                parent_id=parent,
                model="sonnet",
                input=(Message.user(asked),),
                output=({"type": "text", "text": answered},),
                records=(Record("{}"),),
                created_at=now + number,
                path_hash=None,
                depth=number,
            )
        )
        parent = turns[-1].turn.id
    await engine.store.import_turns(turns, head=parent)
    assert parent is not None
    return parent


def store_only(tmp_path: Path) -> Settings:
    """Settings for an engine that never starts a CLI."""
    return Settings(var=tmp_path / "var", port=0, claude_config_dir=tmp_path / "claude-config")
