"""The page at its largest: 20,000 turns opened, jumped through and linked to, 5,000 agents listed, and a search that
nearly everything fits. In Debian's chromium, whose own clock measures."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from playwright.async_api import Browser, async_playwright

from cli_session_proxy.domain.models import Message, Record, Turn
from cli_session_proxy.settings import Settings
from cli_session_proxy.stores.auto import store_for
from cli_session_proxy.stores.base import WholeTurn

from .chains import store_chain
from .figures import figure
from .plan import Bench, Row

FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
# Bytes of scripts' own objects, after the collector has run.
MB = 1024 * 1024
OPEN, FIRST, LINK = "page: a long chain opened", "page: its first turn reached", "page: a link into its middle"
AGENTS, HEAP, WIDE = "page: the list of many agents", "page: memory of its scripts", "a search that nearly all fits"

# Does something in the page and waits, frame by frame, until a text is seen there: milliseconds.
_UNTIL = """async ([act, selector, text]) => {
    const began = act === "load" ? 0 : performance.now();
    if (act.startsWith("#")) location.hash = act;
    else if (act !== "load") document.body.dispatchEvent(new KeyboardEvent("keydown", { key: act, bubbles: true }));
    for (;;) {
        await new Promise(requestAnimationFrame);
        const found = [...document.querySelectorAll(selector)];
        if (found.some((one) => one.textContent.startsWith(text))) return performance.now() - began;
        if (performance.now() - began > 60000) throw new Error(`${text} is not to be seen`);
    }
}"""


async def page(bench: Bench) -> list[Row]:
    program = shutil.which("chromium")
    if program is None:
        print("there is no chromium: the page is not measured", file=sys.stderr)
        return []
    turns, agents, times = bench.plan.dump_turns, bench.plan.page_agents, max(1, bench.plan.dumps)
    folder = bench.place.folder
    await store_chain(folder / "page" / "var", turns)
    await _store_agents(folder / "page-agents" / "var", agents)
    found: dict[str, list[float]] = {}
    async with async_playwright() as playwright:
        # Its socket lies in TMPDIR, and the path of a socket has to be short.
        env: dict[str, str | float | bool] = {"HOME": str(folder), "PATH": os.environ["PATH"], "TMPDIR": "/tmp"}
        browser = await playwright.chromium.launch(executable_path=Path(program), args=list(FLAGS), env=env)
        try:
            for _ in range(times):
                await _long(bench, browser, turns, found)
                await _many(bench, browser, found)
        finally:
            await browser.close()
    return [
        Row(name, "chromium", "MB" if name == HEAP else "ms", figure(values), agents if name == AGENTS else turns)
        for name, values in found.items()
    ]


async def _long(bench: Bench, browser: Browser, turns: int, found: dict[str, list[float]]) -> None:
    proxy = await bench.proxy("page")
    try:
        at = f"http://127.0.0.1:{proxy.connections.port}"
        shown = await (await browser.new_context()).new_page()
        await shown.goto(f"{at}/ui")
        await shown.evaluate(_UNTIL, ["load", "#chains .name", "long"])
        took: Any = await shown.evaluate(_UNTIL, ["#/long", "#chain .asked", f"question {turns - 1}:"])
        found.setdefault(OPEN, []).append(took)
        took = await shown.evaluate(_UNTIL, ["G", "#chain .asked", "question 0:"])
        found.setdefault(FIRST, []).append(took)
        session = await shown.context.new_cdp_session(shown)
        await session.send("HeapProfiler.collectGarbage")
        heap = await session.send("Runtime.getHeapUsage")
        found.setdefault(HEAP, []).append(heap["usedSize"] / MB)
        middle = turns // 2
        about = await (await shown.context.request.get(f"{at}/v1/chains/long/turns?from={middle}&limit=1")).json()
        await shown.context.close()
        turn_id = about["data"][0]["id"]
        linked = await browser.new_context()
        page = await linked.new_page()
        await page.goto(f"{at}/ui#/long/{turn_id}", wait_until="commit")
        took = await page.evaluate(_UNTIL, ["load", "#chain .row.open .asked", f"question {middle - 1}:"])
        found.setdefault(LINK, []).append(took)
        while True:
            began = time.perf_counter()
            answer = await (await linked.request.get(f"{at}/v1/search?q=q")).json()
            if answer["indexed"]["done"] == answer["indexed"]["total"]:
                break
        found.setdefault(WIDE, []).append((time.perf_counter() - began) * 1000)
        await linked.close()
    finally:
        await proxy.close()


async def _many(bench: Bench, browser: Browser, found: dict[str, list[float]]) -> None:
    proxy = await bench.proxy("page-agents")
    try:
        context = await browser.new_context()
        page = await context.new_page()
        await page.goto(f"http://127.0.0.1:{proxy.connections.port}/ui", wait_until="commit")
        took: Any = await page.evaluate(_UNTIL, ["load", "#chains .name", "agent"])
        found.setdefault(AGENTS, []).append(took)
        await context.close()
    finally:
        await proxy.close()


async def _store_agents(var: Path, number: int) -> None:
    """So many agents of one turn each."""
    await asyncio.to_thread(var.mkdir, parents=True, mode=0o700)
    store = store_for(Settings(var=var))
    await store.open()
    try:
        turns = []
        for n in range(number):
            agent = await store.ensure_agent("local", f"agent {n}", f"agent-{n}", named=True, now=time.time())
            said = ({"type": "text", "text": f"answer {n}"},)
            asked = (Message.user(f"question {n}"),)
            now = time.time()
            turn = Turn(
                f"turn_{n}", 0, agent.key, None, "completed", "sonnet", asked, now, output=said, delivery="delivered",
                origin="imported", depth=1, finished_at=now,
            )  # fmt: skip
            turns.append(WholeTurn(turn, (Record("{}"),)))
        await store.import_turns(turns)
    finally:
        await store.close()
