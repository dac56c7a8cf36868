"""What somebody meets who has just started `serve`: its banner, and the bare address."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from asyncio.subprocess import DEVNULL, PIPE
from pathlib import Path

import httpx
import pytest

from cli_session_proxy.http.served import Served
from cli_session_proxy.http.server import banner
from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings
from ..fakes import FakeEngine
from ..serving import serving

SOON = 200.0


async def test_the_banner_shows_the_page_and_a_line_that_works_when_pasted(
    tmp_path: Path, claude_2: Path, claude_env: dict[str, str], upstream: Upstream
) -> None:
    env = claude_env | {"PATH": os.defpath, "LANG": "C.UTF-8", "CLI_SESSION_PROXY_SELF_CHECK": "false"}
    places = ("--var", tmp_path / "var", "--claude-bin", claude_2, "--claude-config-dir", tmp_path / "config")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "cli_session_proxy", "serve", "--port", "0", *map(str, places), stdout=PIPE, env=env
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(SOON):
            lines = [(await process.stdout.readline()).decode() for _ in range(4)]
            listening, page, tried, claude = lines
            address = re.match(r"listening on (http://127\.0\.0\.1:\d+) ", listening)
            assert address, lines
            assert page == f"page: {address[1]}/ui\n"
            assert claude.startswith("claude 2.1.")
            pasted = await asyncio.create_subprocess_exec(
                "bash", "-c", tried.removeprefix("try: "), stdin=DEVNULL, stdout=PIPE, env={"PATH": os.defpath}
            )
            answer, _ = await pasted.communicate()
    finally:
        process.terminate()
        await asyncio.wait_for(process.wait(), SOON)
    assert b"You said: Hello (1)" in answer


def test_with_keys_the_line_has_a_place_for_one_and_shows_none() -> None:
    assert "Bearer YOUR-KEY" in "\n".join(banner(Served("http://127.0.0.1:1"), needs_key=True))
    assert "Bearer" not in "\n".join(banner(Served("http://127.0.0.1:1"), needs_key=False))


BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


@pytest.mark.parametrize("keys", [{}, {"alice": "alices-secret-0123456789"}])
async def test_the_bare_address_leads_a_browser_to_the_page_and_tells_others_what_there_is(
    make_settings: MakeSettings, keys: dict[str, str]
) -> None:
    settings = make_settings(keys=keys)
    async with (
        serving(FakeEngine(), settings) as url,
        httpx.AsyncClient(base_url=url.removesuffix("/v1"), trust_env=False) as http,
    ):
        led = await http.get("/", headers={"Accept": BROWSER}, follow_redirects=True)
        assert (led.url.path, led.status_code) == ("/ui", 200)
        assert led.headers["content-type"].startswith("text/html")
        told = await http.get("/")
        assert told.status_code == 200
        there = told.json()
        assert there["base_url"]["openai"] == "/v1"
        assert (await http.get(there["page"])).status_code == 200
        assert (await http.get(there["health"])).status_code == 200
        looked = await http.head("/")  # Claude Code's own first look
        assert (looked.status_code, looked.content) == (200, b"")
        lost = await http.get("/nowhere")
        assert lost.status_code == (401 if keys else 404)
        if not keys:
            assert "GET / lists the routes" in lost.json()["error"]["message"]
