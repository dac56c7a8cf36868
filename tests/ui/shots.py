"""Take the screenshots of docs/ui/: `python -m tests.ui.shots docs/ui`, on the real CLI and a scripted model."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from playwright.async_api import Browser, Page, async_playwright, expect

from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.settings import Settings
from turnfault.provider.script import Fail
from turnfault.provider.upstream import Upstream

from ..serving import serving
from ..talking import ask, running
from .conftest import FLAGS, an_agent, found, imported, page_of


def settings_in(folder: Path, upstream: Upstream) -> Settings:
    spec = find_spec("claude_agent_sdk")
    assert spec is not None
    assert spec.origin is not None
    env = {
        "ANTHROPIC_API_KEY": "sk-ant-fake-for-screenshots",
        "ANTHROPIC_BASE_URL": upstream.url,
        "HOME": str(folder / "home"),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_RETRIES": "0",
    }
    return Settings(
        port=0, var=folder / "var", claude_bin=Path(spec.origin).parent / "_bundled" / "claude",
        claude_config_dir=folder / "claude-config", claude_env=env, turn_timeout=60.0, stop_grace=2.0,
    )  # fmt: skip


async def a_life(engine: Engine, upstream: Upstream) -> None:
    """Agents as a busy machine has them: one long, one failed, one repaired and branched."""
    long = await an_agent(engine, "nightly-report")
    await imported(engine, long, [(f"Summarise the log of day {n}.", f"Day {n}: all quiet.") for n in range(1, 1201)])
    await ask(engine, "What does the build do?", agent="team/ops")
    upstream.when("deploy", Fail(500, message="scripted failure"), times=None)
    with contextlib.suppress(Exception):
        await ask(engine, "Now deploy it.", agent="team/ops")
    first = await ask(engine, "Remember: the colour is teal", agent="trip planner")
    second = await ask(engine, "Remember: the city is Lisbon", agent="trip planner")
    await ask(engine, "What is the city?", agent="trip planner", continues=second.id)
    await ask(engine, "Remember: the city is Porto", agent="trip planner", continues=first.id)
    session = await engine.store.session(second.session_id or "")
    assert session is not None
    last = await ask(engine, "What is the city?", agent="trip planner")
    branch = await engine.store.session(last.session_id or "")
    assert branch is not None
    await asyncio.to_thread(Path(branch.transcript).unlink)
    await ask(engine, "What is the colour?", agent="trip planner")
    await ask(engine, "Plan two days with the children: one by the river, one for the museums.", agent="trip planner")
    await ask(engine, "recall", agent="trip planner")


async def shoot(browser: Browser, url: str, folder: Path, scheme: str) -> None:
    async with page_of(browser, url, scheme=scheme) as page:
        await expect(page.locator("#chains .row")).to_have_count(3)
        await expect(page.locator("#overview .needs li").first).to_be_visible()
        await expect(page.locator("#overview .status")).to_contain_text("nothing forgotten")
        await expect(page.locator("#chains .preview").first).not_to_be_empty()
        await page.screenshot(path=folder / f"chains-{scheme}.png")
        await page.locator("#chains .row", has_text="trip planner").click()
        await expect(page.locator("#chain .row")).to_have_count(8)
        await page.screenshot(path=folder / f"chain-{scheme}.png")
        await open_repaired(page)
        await page.screenshot(path=folder / f"turn-{scheme}.png")


async def open_repaired(page: Page) -> None:
    await page.keyboard.press("r")
    await page.keyboard.press("Enter")
    await expect(page.locator("#turn .verdict")).to_contain_text("nothing forgotten")


async def main(folder: Path) -> None:
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="csp-shots-") as place:
        await asyncio.to_thread((Path(place) / "home").mkdir)
        os.environ.update(HOME=f"{place}/home")
        async with Upstream() as upstream, async_playwright() as playwright:
            settings = settings_in(Path(place), upstream)
            browser = await playwright.chromium.launch(executable_path=found(), args=list(FLAGS))
            async with running(settings) as engine, serving(engine, settings) as url:
                await a_life(engine, upstream)
                for scheme in ("light", "dark"):
                    await shoot(browser, url, folder, scheme)
            await browser.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
