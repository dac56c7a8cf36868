"""`demo`: a conversation over the real CLI, offline, whose session file is deleted half-way.

    OpenAI's chat requests ─▶ our HTTP server ─▶ engine ─▶ the real CLI ─▶ a scripted model on loopback

All its files are in a temporary folder. It uses a fake key, and no login or file of the user.

Also `bench-continuity`: turnfault itself, with the CLI that this proxy would run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from turnfault import bench, cli
from turnfault.provider.upstream import Upstream

from ..backends.claude.process import capability
from ..http.served import place_of
from ..http.server import Server, create_app
from ..settings import Settings
from .stored import engine_in

Say = Callable[[str], None]

AGENT = "demo"
FAKE_KEY = "sk-ant-fake-demo"
# (message, expected answer), before and after the session file is deleted
BEFORE = (
    ("Remember: the colour is teal", "Noted: colour is teal."),
    ("Remember: the number is seven", "Noted: number is seven."),
)
AFTER = (
    ("What is the colour?", "colour is teal."),
    ("recall", "I remember: colour is teal; number is seven."),
)
# Generous: a turn takes about 0.4 s, a cold start of the CLI on a busy machine several.
TURN_TIMEOUT = 60.0


async def demo(claude_bin: Path | None, say: Say) -> bool:
    """Hold the conversation and print it with the links that repaired it. True when everything was recalled."""
    with tempfile.TemporaryDirectory(prefix="csp-demo-") as folder, _bare_environment():
        async with Upstream() as upstream:
            settings = Settings(
                port=0, var=Path(folder, "var"), claude_bin=claude_bin, claude_config_dir=Path(folder, "claude-config"),
                claude_env={
                    "HOME": folder, "ANTHROPIC_API_KEY": FAKE_KEY, "ANTHROPIC_BASE_URL": upstream.url,
                    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
                },
                turn_timeout=TURN_TIMEOUT,
            )  # fmt: skip
            say("A conversation over the real Claude CLI; the model is a script that knows only what it is sent.\n")
            async with _server(settings) as http:
                recalled = await _talk(http, say, BEFORE)
                transcript = Path((await _dump(http))["sessions"][-1]["transcript"])
            # The proxy was stopped, so no process is left that still knows the conversation.
            await asyncio.to_thread(transcript.unlink)
            say(f"  ——     the proxy is stopped, the CLI's session file deleted: {transcript.name}\n")
            async with _server(settings) as http:
                recalled = await _talk(http, say, AFTER) and recalled
                data = await _dump(http)
                number = {turn["id"]: position for position, turn in enumerate(data["turns"], 1)}
                say("The chain's links, from its dump:")
                for link in data["links"]:
                    ids = f"{(link['from_session'] or 'none')[:8]} → {link['to_session'][:8]}"
                    say(f"  turn {number.get(link['turn_id'], '-')}  {link['reason']:14} {ids}  {link['says']}")
    say(f"\n{'Everything was recalled.' if recalled else 'FAILED: something was forgotten.'}")
    return recalled


async def _dump(http: httpx.AsyncClient) -> dict[str, Any]:
    answer = await http.get(f"/v1/chains/{AGENT}")
    answer.raise_for_status()
    data: dict[str, Any] = answer.json()
    return data


@contextlib.contextmanager
def _bare_environment() -> Iterator[None]:
    """Nothing of the user's but PATH can reach the CLI: no key, no provider, no network proxy."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ["PATH"] = before.get("PATH", os.defpath)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.asynccontextmanager
async def _server(settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    """A client of our own server, on a free loopback port."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:
        async with engine_in(settings, log_to_file=True) as engine:
            server = Server(create_app(engine, settings), settings)
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            try:
                await server.ready.wait()
                url = place_of(listener).url
                async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=TURN_TIMEOUT) as http:
                    yield http
            finally:
                server.should_exit = True
                await serving


async def _talk(http: httpx.AsyncClient, say: Say, lines: tuple[tuple[str, str], ...]) -> bool:
    """Send each message in a request of its own, without the ones before it. True if all answers are as expected."""
    as_expected = True
    for message, expected in lines:
        answer = await http.post(
            "/v1/chat/completions",
            headers={"X-Agent-Id": AGENT},
            json={"model": "sonnet", "messages": [{"role": "user", "content": message}]},
        )
        text = answer.json()["choices"][0]["message"]["content"] if answer.status_code == 200 else answer.text
        how = answer.headers.get("x-continuity", f"HTTP {answer.status_code}")
        say(f"  you    {message}\n  agent  {text}   [{how}, session {answer.headers.get('x-session-id', '-')[:8]}]\n")
        as_expected = as_expected and text == expected
    return as_expected


def bench_continuity(settings: Settings, args: Sequence[str]) -> None:
    """Run `turnfault run` with these arguments, and exit with its code; 2 if it cannot be run."""
    claude = ["--claude", str(capability.find(settings))] if bench.BARE in args else []
    cli.main(["run", *args, *claude])
