"""What the commands do, beside a running server or without one: they read the store's file themselves."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .dumps import FORMATS
from .dumps.summaries import summary_json
from .errors import InvalidRequest, NotFound, UpstreamError, from_dict
from .models import JSON
from .protocols.common import encoded_agent_id
from .sandbox import LOCAL_OWNER, Sandboxes
from .served import served_at
from .settings import Settings
from .stores.base import Store
from .stores.sql import FILE, store_for
from .turns import Engine

# A server on this machine answers /healthz in milliseconds; deleting may wait for a turn to end.
ANSWER_TIMEOUT = 60.0
HEALTH_TIMEOUT = 2.0
# Columns of a table that goes into a file or a pipe: nothing is cut there.
WIDE = 1000


@asynccontextmanager
async def _opened(settings: Settings) -> AsyncIterator[Store | None]:
    """The store, or None where nothing was ever kept: looking must not create it."""

    if not (settings.var / FILE).exists():
        yield None
        return
    store = store_for(settings)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


async def chains(settings: Settings) -> list[JSON]:
    """A row for each agent of every owner, last active first."""
    async with _opened(settings) as store:
        return [] if store is None else [summary_json(row) async for row in store.summaries()]


def print_chains(rows: list[JSON]) -> None:
    if not rows:
        print("no chains yet")
        return
    table = Table(box=None, pad_edge=False)
    for name in ("agent", "owner", "turns", "sessions", "repairs", "state", "cost", "size", "last activity"):
        table.add_column(name, justify="right" if name in {"turns", "sessions", "repairs", "cost", "size"} else "left")
    for row in rows:
        table.add_row(*(_plain(cell) for cell in _cells(row)))
    console = Console()
    if not console.is_terminal:
        console.width = WIDE
    console.print(table)


def _cells(row: JSON) -> list[Any]:
    last = datetime.fromtimestamp(row["last_at"], UTC).strftime("%Y-%m-%d %H:%M UTC")
    return [
        row["agent_id"], row["owner"], row["turns"], row["sessions"], row["repairs"], row["state"] or "-",
        f"${row['cost_usd']:.4f}", _size(row["bytes"]), last,
    ]  # fmt: skip


def _plain(cell: object) -> Any:
    """Text as it is: an agent's name is no markup, and its control characters stay out of the terminal."""

    return Text("".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in str(cell)))


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GB"


async def dump(settings: Settings, owner: str, agent_id: str, format: str, write: Callable[[str], None]) -> None:
    """Write the agent's chain piece by piece. Raises `NotFound`, `InvalidRequest`."""

    if format not in FORMATS:
        raise InvalidRequest(f"--format must be one of {', '.join(FORMATS)}", param="format")
    async with _opened(settings) as store:
        agent = None if store is None else await store.agent(owner, agent_id)
        if store is None or agent is None:
            raise NotFound(f"there is no agent {agent_id!r} of {owner!r} in {settings.var}: see `chains`")
        sandbox = str(Sandboxes(settings).path(agent.dir))
        async for text in FORMATS[format].write(store, agent, sandbox=sandbox):
            write(text)


async def delete(settings: Settings, agent_id: str) -> None:
    """Remove the agent: through the server that runs on this `var`, else here. Raises `NotFound`."""

    url = served_at(settings.var)
    if url is not None and await _alive(url):
        await _delete_there(url, agent_id)
        return
    async with _opened(settings) as store:
        known = store is not None and await store.agent(LOCAL_OWNER, agent_id) is not None
    if not known or not await _delete_here(settings, agent_id):
        raise NotFound(f"there is no agent {agent_id!r} in {settings.var}: see `chains`")


async def _alive(url: str) -> bool:

    try:
        async with httpx.AsyncClient(trust_env=False, timeout=HEALTH_TIMEOUT) as client:
            return (await client.get(f"{url}/healthz")).status_code == 200
    except httpx.HTTPError:
        return False


async def _delete_there(url: str, agent_id: str) -> None:

    async with httpx.AsyncClient(trust_env=False, timeout=ANSWER_TIMEOUT) as client:
        try:
            answer = await client.delete(f"{url}/v1/chains/{encoded_agent_id(agent_id)}")
            error = None if answer.status_code == 200 else answer.json()["error"]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as exc:
            raise UpstreamError(f"{url} (from serve.json in --var) does not answer as a server of ours does") from exc
    if error is not None:
        raise from_dict(error)


async def _delete_here(settings: Settings, agent_id: str) -> bool:

    engine = Engine(settings)
    try:
        await engine.start()
        return await engine.delete(LOCAL_OWNER, agent_id)
    finally:
        await engine.stop()
