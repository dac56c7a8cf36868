"""`dump --follow`: what happens from now on, in any proxy."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator

import httpx
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from ..domain.models import JSON
from ..engine.subscription import Follower
from ..errors import ConfigError, printable
from ..export import feed
from ..export.words import visible
from ..http.served import Served, served_at
from ..settings import Settings
from ..wires.common import encoded_agent_id
from .asking import ANSWER_TIMEOUT, alive, client_of, key_of
from .dumping import Shown, Write
from .stored import agent_in, opened

# Seconds between looks for an agent that does not exist yet.
LOOK = 0.25
NOT_THERE = 404
# Lines of a growing answer that are shown.
ANSWER_LINES = 6


async def follow(settings: Settings, owner: str, agent_id: str, shown: Shown, write: Write) -> None:
    """Write each turn and repair as it happens, in any proxy; ends when the agent is deleted.

    In a terminal the server's running turns are shown below.
    """
    forms = {"json": feed.json_line, "markdown": feed.lines}
    if shown.format not in forms:
        raise ConfigError(f"--follow takes --format {' or '.join(forms)}")
    async with opened(settings) as existing:
        store, agent = await agent_in(settings, existing, owner, agent_id)
        console = Console(highlight=False)
        served = served_at(settings.var)
        watching: asyncio.Task[None] | None = None

        async def watch(served: Served, key: dict[str, str]) -> None:
            async with client_of(served, httpx.Timeout(ANSWER_TIMEOUT, read=None), key) as http:
                await show_progress(http, agent_id, console)

        if console.is_terminal and shown.format == "markdown" and served is not None and await alive(served):
            with contextlib.suppress(ConfigError):  # without a key for the server only the store is read
                watching = asyncio.create_task(watch(served, key_of(settings, owner)))
        try:
            async for happened in Follower(store, agent).follow():
                for one in happened:
                    write(forms[shown.format](one, verbatim=shown.verbatim))
        finally:
            if watching is not None:
                watching.cancel()
                await asyncio.wait([watching])


async def show_progress(http: httpx.AsyncClient, agent_id: str, console: Console) -> None:
    """Show the running turns and their answers below the printed lines. Ends with the server."""
    with Live(console=console, transient=True, auto_refresh=False) as below:
        async for going in progress_of(http, agent_id):
            lines = []
            for one in going:
                lines.append(Text(f"{one['turn_id']}  {printable(one['says'])}", style="bold"))
                newest = visible(one["text"]).splitlines()[-ANSWER_LINES:]
                lines += [Text(f"    {line}", style="dim", overflow="fold") for line in newest]
            below.update(Group(*lines), refresh=True)


async def progress_of(http: httpx.AsyncClient, agent_id: str) -> AsyncGenerator[list[JSON], None]:
    """The agent's unfinished turns in that server, at each change. Waits for an agent that does not exist yet.

    Ends with the server.
    """
    while True:
        try:
            path = f"/v1/chains/{encoded_agent_id(agent_id)}/events?live=1"
            async with http.stream("GET", path) as stream:
                lines = stream.aiter_lines()
                async for line in lines:
                    if line == "event: progress":
                        running: list[JSON] = json.loads((await anext(lines)).removeprefix("data: "))["turns"]
                        yield running
                if stream.status_code != NOT_THERE:
                    return
        except httpx.HTTPError:
            return
        await asyncio.sleep(LOOK)
