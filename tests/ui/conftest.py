"""A real browser on the page of a real server; most tests fill the store themselves and need no CLI."""

from __future__ import annotations

import shutil
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from playwright.async_api import Browser, BrowserContext, Page, async_playwright

from cli_session_proxy.domain.models import Agent, Message, Record
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.settings import Settings
from cli_session_proxy.stores.base import ImportedTurn

from ..conftest import required

CHROMIUM = "/usr/bin/chromium"
# No sandbox: CI runs as root in a container. The rest keeps it from talking to anybody but the page's server.
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
WIDE = {"width": 1360, "height": 860}


@pytest.fixture(scope="session")
def chromium() -> Path:
    found = shutil.which("chromium") or CHROMIUM
    return required(Path(found), "apt-get install chromium (make tools does it for root)", what="chromium")


@pytest.fixture
async def browser(chromium: Path, tmp_path: Path) -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        # Playwright gives every browser a fresh user-data-dir under TMPDIR and removes it.
        browser = await playwright.chromium.launch(
            executable_path=chromium, args=list(FLAGS), env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
        )
        try:
            yield browser
        finally:
            await browser.close()


@asynccontextmanager
async def page_of(browser: Browser, url: str, *, scheme: str = "light", refused: bool = False) -> AsyncIterator[Page]:
    """The page at `/ui`; whatever it reports as an error fails the test (a 401 does not where it is `refused`)."""
    context: BrowserContext = await browser.new_context(
        viewport=WIDE,  # type: ignore[arg-type]
        color_scheme=scheme,  # type: ignore[arg-type]
        reduced_motion="reduce",
    )
    page = await context.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda said: faults.append(said.text) if said.type == "error" else None)
    page.on("dialog", lambda dialog: faults.append(f"dialog: {dialog.message}"))
    try:
        await page.goto(f"{url.removesuffix('/v1')}/ui")
        yield page
        assert [fault for fault in faults if not (refused and "401" in fault)] == []
    finally:
        await context.close()


async def an_agent(engine: Engine, agent_id: str) -> Agent:
    return await engine.store.ensure_agent("local", agent_id, f"dir-{abs(hash(agent_id))}", named=True, now=time.time())


async def imported(
    engine: Engine, agent: Agent, said: Sequence[tuple[str, str]], *, parent: str | None = None, mark: str = "t"
) -> str:
    """Turns with these questions and answers, one after another; the last one's id, which is the head."""
    turns: list[ImportedTurn] = []
    now = time.time() - len(said)
    for number, (asked, answered) in enumerate(said, 1):
        turns.append(
            ImportedTurn(
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
        parent = turns[-1].id
    await engine.store.import_turns(turns, head=parent)
    assert parent is not None
    return parent


def store_only(tmp_path: Path) -> Settings:
    """Settings for an engine that never starts a CLI."""
    return Settings(var=tmp_path / "var", port=0, claude_config_dir=tmp_path / "claude-config")
