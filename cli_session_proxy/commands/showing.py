"""What the commands do, beside a running server or without one: they read the store's file themselves."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import get_args

import httpx
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..domain.models import JSON, Agent, ChainSummary, Status
from ..engine.engine import Engine
from ..engine.subscription import Follower
from ..errors import ConfigError, NotFound, UpstreamError, did_you_mean, from_dict
from ..export import FORMATS, live
from ..export.summaries import summary_json
from ..export.words import printable
from ..http.keys import Keys
from ..http.served import Served, served_at
from ..sandbox import LOCAL_OWNER, Sandboxes
from ..settings import Settings
from ..stores.auto import store_for
from ..stores.base import Store
from ..stores.sqlite.store import FILE
from ..wires.common import encoded_agent_id

Write = Callable[[str], None]

# A server on this machine answers /healthz in milliseconds; deleting may wait for a turn to end.
ANSWER_TIMEOUT = 60.0
HEALTH_TIMEOUT = 2.0
# Columns of a table that goes into a file or a pipe: nothing is cut there.
WIDE = 1000


@asynccontextmanager
async def opened(settings: Settings) -> AsyncIterator[Store | None]:
    """The store, or None where nothing was ever kept: looking must not create it."""
    if not (settings.var / FILE).exists():
        yield None
        return
    async with made(settings) as store:
        yield store


@asynccontextmanager
async def made(settings: Settings) -> AsyncIterator[Store]:
    """The store, new where there is none."""
    store = store_for(settings)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


async def chains(settings: Settings, wanted: Wanted) -> list[JSON]:
    """A row for each agent of every owner, last active first."""
    async with opened(settings) as store:
        if store is None:
            return []
        return [summary_json(row) async for row in store.summaries() if wanted.holds(row)]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which chains are listed."""

    search: str = ""
    since: float = 0.0
    status: str | None = None
    side: bool = False

    @staticmethod
    def parse(search: str | None, since: str | None, status: str | None, *, side: bool = False) -> Wanted:
        """Raises `ConfigError` for a time or a status that there is not."""
        known = get_args(Status)
        if status is not None and status not in known:
            raise ConfigError(f"--status must be one of {', '.join(known)}{did_you_mean(status, known)}")
        return Wanted((search or "").casefold(), _since(since), status, side)

    def holds(self, row: ChainSummary) -> bool:
        named = self.search in row.agent.agent_id.casefold() and (self.side or not row.side)
        return named and row.last_at >= self.since and self.status in (None, row.state)


def _since(text: str | None) -> float:
    if text is None:
        return 0.0
    ago = re.fullmatch(r"(\d{1,9})([smhd])", text)
    if ago is not None:
        return time.time() - int(ago[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[ago[2]]
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"--since {text!r}: use 30m, 12h, 7d, or a date such as 2026-11-20") from None
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def print_chains(rows: list[JSON]) -> None:
    if not rows:
        print("no chains yet")
        return
    table = Table(box=None, pad_edge=False)
    for name in ("agent", "owner", "turns", "sessions", "repairs", "state", "cost", "size", "last activity"):
        table.add_column(name, justify="right" if name in {"turns", "sessions", "repairs", "cost", "size"} else "left")
    for row in rows:
        size, unit = float(row["bytes"]), "B"
        for larger in ("KB", "MB", "GB"):
            if size < 1024:
                break
            size, unit = size / 1024, larger
        cells = [
            row["agent_id"], row["owner"], row["turns"], row["sessions"], row["repairs"], row["state"] or "-",
            f"${row['cost_usd']:.4f}", f"{size:.{1 if unit == 'GB' else 0}f} {unit}",
            datetime.fromtimestamp(row["last_at"], UTC).strftime("%Y-%m-%d %H:%M UTC"),
        ]  # fmt: skip
        # Text as it is: an agent's name is no markup, and its control characters stay out of the terminal.
        table.add_row(*(Text(printable(str(cell))) for cell in cells))
    console = Console()
    if not console.is_terminal:
        console.width = WIDE
    console.print(table)


@dataclass(frozen=True, slots=True)
class Shown:
    """How a chain is printed. `verbatim`: secrets in what was said are left as they are."""

    format: str = "json"
    verbatim: bool = False


async def dump(settings: Settings, owner: str, agent_id: str, shown: Shown, write: Write) -> None:
    """Write the agent's chain piece by piece. Raises `NotFound`, `ConfigError`."""
    if shown.format not in FORMATS:
        raise ConfigError(f"--format must be one of {', '.join(FORMATS)}{did_you_mean(shown.format, FORMATS)}")
    async with opened(settings) as there:
        store, agent = await agent_in(settings, there, owner, agent_id)
        sandbox = str(Sandboxes(settings).path(agent.dir))
        async for text in FORMATS[shown.format].write(store, agent, sandbox=sandbox, verbatim=shown.verbatim):
            write(text)


async def follow(settings: Settings, owner: str, agent_id: str, shown: Shown, write: Write) -> None:
    """Write each turn and repair as it happens, in any proxy; ends when the agent is deleted."""
    forms = {"json": live.json_line, "markdown": live.lines}
    if shown.format not in forms:
        raise ConfigError(f"--follow takes --format {' or '.join(forms)}")
    async with opened(settings) as there:
        store, agent = await agent_in(settings, there, owner, agent_id)
        async for happened in Follower(store, agent).follow():
            for one in happened:
                write(forms[shown.format](one, verbatim=shown.verbatim))


async def agent_in(settings: Settings, store: Store | None, owner: str, agent_id: str) -> tuple[Store, Agent]:
    agent = None if store is None else await store.agent(owner, agent_id)
    if store is None or agent is None:
        raise NotFound(f"there is no agent {agent_id!r} of {owner!r} in {settings.var}: see `chains`")
    return store, agent


async def delete(settings: Settings, agent_id: str, owner: str = LOCAL_OWNER) -> None:
    """Remove the agent: through the server that runs on this `var`, else here. Raises `NotFound`."""
    served = served_at(settings.var)
    if served is not None and await alive(served):
        await _asked(served, "DELETE", agent_id, key_of(settings, owner))
        return
    async with opened(settings) as store:
        known = store is not None and await store.agent(owner, agent_id) is not None
    if not known or not await _delete_here(settings, owner, agent_id):
        raise NotFound(f"there is no agent {agent_id!r} in {settings.var}: see `chains`")


def client_of(
    served: Served, timeout: float | httpx.Timeout, headers: dict[str, str] | None = None
) -> httpx.AsyncClient:
    """A client of the server at this place, over its unix socket where it has one."""
    transport = None if served.uds is None else httpx.AsyncHTTPTransport(uds=served.uds)
    return httpx.AsyncClient(
        transport=transport, base_url=served.url, trust_env=False, timeout=timeout, headers=headers or {}
    )


async def alive(served: Served) -> bool:
    try:
        async with client_of(served, HEALTH_TIMEOUT) as client:
            return (await client.get("/healthz")).status_code == 200
    except httpx.HTTPError:
        return False


def key_of(settings: Settings, owner: str) -> dict[str, str]:
    """What a running server asks of this owner."""
    keys = Keys(settings)
    secret = keys.secret_of(owner)
    if keys and secret is None:
        raise ConfigError(f"the server asks for a key and {owner!r} has none: choose an --owner of [keys]")
    return {} if secret is None else {"Authorization": f"Bearer {secret}"}


async def _asked(
    served: Served, method: str, agent_id: str, key: dict[str, str], *, after: str = "", body: JSON | None = None
) -> JSON:
    """What the server answers about this agent. Raises its error."""
    async with client_of(served, ANSWER_TIMEOUT, key) as client:
        try:
            answer = await client.request(method, f"/v1/chains/{encoded_agent_id(agent_id)}{after}", json=body)
            said: JSON = answer.json()
            error = None if answer.status_code == 200 else said["error"]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as exc:
            raise UpstreamError(
                f"{served} (from serve.json in --var) does not answer like a cli-session-proxy server"
            ) from exc
    if error is not None:
        raise from_dict(error)
    return said


async def rewind(settings: Settings, owner: str, agent_id: str, to: str) -> JSON:
    """Move the head back: through the server that runs on this `var`, else here. The answer of the route."""
    served = served_at(settings.var)
    if served is not None and await alive(served):
        return await _asked(served, "POST", agent_id, key_of(settings, owner), after="/rewind", body={"to": to})
    async with opened(settings) as there:
        await agent_in(settings, there, owner, agent_id)
    engine = Engine(settings)
    try:
        await engine.start()
        return (await engine.rewind(owner, agent_id, to)).as_json()
    finally:
        await engine.stop()


async def _delete_here(settings: Settings, owner: str, agent_id: str) -> bool:
    engine = Engine(settings)
    try:
        await engine.start()
        return await engine.delete(owner, agent_id)
    finally:
        await engine.stop()
