"""What a terminal tells of a running turn: its words below `dump --follow`, and what it waits for in `chat`."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from cli_session_proxy.backends.base import Retried
from cli_session_proxy.commands.chatting import ChatTalk, LocalTalk, RemoteTalk, _watch
from cli_session_proxy.commands.following import show_progress
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.settings import Settings

from ..scripted import RETRY, Scripted, delta
from ..serving import serving
from ..talking import request
from ..until import until

WAITS = "the provider asks to wait 30 s, retry 2 of 3 (429 rate_limit_error)"


@asynccontextmanager
async def served(tmp_path: Path, backend: Scripted) -> AsyncIterator[tuple[Engine, httpx.AsyncClient]]:
    settings = Settings(var=tmp_path / "var", port=0)
    engine = Engine(settings, backend=backend)
    await engine.start()
    try:
        async with (
            serving(engine, settings) as url,
            httpx.AsyncClient(base_url=url.removesuffix("/v1"), trust_env=False, timeout=60) as http,
        ):
            yield engine, http
    finally:
        for _ in backend.steps:
            backend.go.release()
        await engine.stop()


@pytest.mark.parametrize("over", ["engine", "server"])
async def test_chat_tells_what_a_turn_waits_for_once(tmp_path: Path, over: str) -> None:
    backend = Scripted([delta("The "), None, Retried(RETRY), None, delta("end."), None])
    async with served(tmp_path, backend) as (engine, http):
        talk: ChatTalk = (
            LocalTalk(engine, "local", "a", "sonnet", None) if over == "engine" else RemoteTalk(http, "a", "sonnet")
        )
        said: list[str] = []
        told: list[str] = []

        async def speak() -> None:
            async with aclosing(talk.say("hello")) as pieces:
                said.extend([piece async for piece in pieces])

        # as a first line does: the agent is not there yet
        hearing = asyncio.create_task(_watch(talk, told.append, None))
        speaking = asyncio.create_task(speak())
        await backend.reached.acquire()
        backend.go.release()
        await backend.reached.acquire()
        await until(lambda: f"  [{WAITS}]\n" in told)
        backend.go.release()
        await backend.reached.acquire()
        backend.go.release()
        await speaking
        hearing.cancel()
        await asyncio.wait([hearing])
        assert "".join(said) == "The end."
        assert told.count(f"  [{WAITS}]\n") == 1


async def test_follow_draws_the_words_of_a_running_turn_and_takes_them_away(tmp_path: Path) -> None:
    backend = Scripted([delta("The colour\nis \x1b[31mteal"), None])
    screen = io.StringIO()
    async with served(tmp_path, backend) as (engine, http):
        answer = await engine.submit(request("hello"))
        await backend.reached.acquire()
        console = Console(file=screen, force_terminal=True, width=80, color_system=None)
        drawing = asyncio.create_task(show_progress(http, "a", console))
        await until(lambda: "is \N{REPLACEMENT CHARACTER}[31mteal" in screen.getvalue())
        assert f"{answer.turn_id}  answers" in screen.getvalue()
        size = len(screen.getvalue())
        backend.go.release()
        await answer.turn()
        answer.acknowledge()
        await until(lambda: "\x1b[2K" in screen.getvalue()[size:])  # its lines are erased
        drawing.cancel()
        await asyncio.wait([drawing])
