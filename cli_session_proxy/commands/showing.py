"""What the commands do, beside a running server or without one: they read the store's file themselves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from typing import ClassVar, cast, get_args

import click
import httpx
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.markdown import CodeBlock, Markdown, MarkdownElement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..domain.models import JSON, Agent, ChainSummary, Status
from ..domain.searching import moment
from ..engine.engine import Engine
from ..engine.subscription import Follower
from ..errors import ConfigError, NotFound, UpstreamError, did_you_mean, from_dict, printable
from ..export import FORMATS, live
from ..export.chain_json import chain_json
from ..export.markdown import markdown
from ..export.summaries import DAY, LISTED, ONE_SHOT_SHOWN, summary_json
from ..export.words import count, visible
from ..http.keys import Keys
from ..http.served import Served, served_at
from ..sandbox import LOCAL_OWNER, Sandboxes
from ..settings import Settings
from ..stores.auto import is_new, place_of, store_for
from ..stores.base import Store, TurnPage
from ..wires.common import encoded_agent_id
from .migrating import migrating

Write = Callable[[str], None]

# A server on this machine answers /healthz in milliseconds; deleting may wait for a turn to end.
ANSWER_TIMEOUT = 60.0
HEALTH_TIMEOUT = 2.0
# Columns of a table that goes into a file or a pipe: nothing is cut there.
WIDE = 1000
# Seconds until `--watch` looks again.
AGAIN = 2.0
# Seconds until an agent that is not there yet is looked for again; a turn of it has been asked for.
LOOK = 0.25
NOT_THERE = 404
# Lines of an answer that is being made.
SAID_LINES = 6
# The forms of which a part can be written.
PARTS = {"json": chain_json, "markdown": markdown}


@asynccontextmanager
async def opened(settings: Settings) -> AsyncIterator[Store | None]:
    """The store, or None where nothing was ever kept: looking must not create it."""
    if is_new(settings):
        yield None
        return
    async with made(settings) as store:
        yield store


@asynccontextmanager
async def made(settings: Settings) -> AsyncIterator[Store]:
    """The store, new where there is none."""
    store = store_for(settings, migrating)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


@dataclass(frozen=True, slots=True)
class Listed:
    """`one_shots`: how many of the last day have no row, and what they cost."""

    rows: list[JSON]
    one_shots: int = 0
    cost_usd: float = 0.0


async def chains(settings: Settings, wanted: Wanted) -> Listed:
    """A row for each agent of every owner, last active first."""
    async with opened(settings) as store:
        if store is None:
            return Listed([])
        now = time.time()
        folded = None if wanted.one_shots else now - ONE_SHOT_SHOWN
        rows = [summary_json(row) async for row in store.summaries(folded=folded) if wanted.holds(row)]
        if folded is None:
            return Listed(rows)
        return Listed(rows, *await store.one_shots(None, since=now - DAY, until=folded))


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which chains are listed."""

    search: str = ""
    since: float = 0.0
    status: Status | None = None
    side: bool = False
    one_shots: bool = False

    @staticmethod
    def parse(
        search: str | None, since: str | None, status: str | None, *, side: bool = False, one_shots: bool = False
    ) -> Wanted:
        """Raises `ConfigError` for a time or a status that there is not."""
        known = get_args(Status)
        if status is not None and status not in known:
            raise ConfigError(f"--status must be one of {', '.join(known)}{did_you_mean(status, known)}")
        at = 0.0 if since is None else moment_of("--since", since)
        return Wanted((search or "").casefold(), at, cast(Status | None, status), side, one_shots)

    def holds(self, row: ChainSummary) -> bool:
        named = self.search in row.agent.agent_id.casefold() and (self.side or not row.side)
        return named and row.last_at >= self.since and self.status in (None, row.state)


def moment_of(option: str, text: str) -> float:
    """UTC seconds. Raises `ConfigError`."""
    try:
        return moment(text, time.time())
    except (ValueError, OverflowError):
        raise ConfigError(f"{option} {text!r}: use 30m, 12h, 7d, or a date such as 2026-11-20") from None


async def watch_chains(settings: Settings, wanted: Wanted, limit: int) -> None:
    """The list as it changes. Never ends by itself."""
    while True:
        listed = await chains(settings, wanted)
        click.clear()
        print_chains(listed, limit)
        await asyncio.sleep(AGAIN)


def print_chains(listed: Listed, limit: int = LISTED) -> None:
    """A table that fits a terminal of 80 columns: the names are cut there, in a file nothing is. A line of totals, and
    one of the one-shots that have no row."""
    rows = listed.rows
    folded = f"{count(listed.one_shots, 'one-shot')} today, ${listed.cost_usd:.2f} (--one-shots lists them)"
    if not rows:
        print(folded if listed.one_shots else "no chains yet")
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDE
    owned = any(row["owner"] != LOCAL_OWNER for row in rows)
    # Who has an agent is told where there are several that could.
    held = len({row["host"] for row in rows} - {None}) > 1 or any(row["address"] for row in rows)
    table = Table(box=None, pad_edge=False)
    beside = [name for name, wanted in (("owner", owned), ("host", held)) if wanted]
    for name in ("agent", *beside, "state", "turns", "repairs", "cost", "size", "active"):
        numeric = name in {"turns", "repairs", "cost", "size"}
        # Where there is not enough room it is the names that are cut.
        table.add_column(name, justify="right" if numeric else "left", no_wrap=name != "agent")
    for row in rows[:limit]:
        state = f"{row['state'] or '-'}".replace("_", " ")
        cells = [
            row["agent_id"], *(row[name] or "-" for name in beside), state, row["turns"], row["repairs"],
            f"${row['cost_usd']:.4f}", _size(row["bytes"]), _ago(row["last_at"]) if console.is_terminal
            else datetime.fromtimestamp(row["last_at"], UTC).strftime("%Y-%m-%d %H:%M UTC"),
        ]  # fmt: skip
        # Text as it is: an agent's name is no markup, and its control characters stay out of the terminal.
        table.add_row(*(Text(printable(str(cell)), no_wrap=True, overflow="ellipsis") for cell in cells))
    console.print(table)
    shown = f"{limit} of " if limit < len(rows) else ""
    turns, repairs, cost, size = (sum(row[name] for row in rows) for name in ("turns", "repairs", "cost_usd", "bytes"))
    total = f"{shown}{count(len(rows), 'agent')}, {count(turns, 'turn')}, {count(repairs, 'repair')}"
    console.print(Text(f"{total}, ${cost:.4f}, {_size(size)}", style="dim"))
    if listed.one_shots:
        console.print(Text(folded, style="dim"))


def _size(number: float) -> str:
    unit = "B"
    for larger in ("KB", "MB", "GB"):
        if number < 1024:
            break
        number, unit = number / 1024, larger
    return f"{number:.{1 if unit == 'GB' else 0}f} {unit}"


def _ago(at: float) -> str:
    """How long ago, for a person."""
    seconds = max(0.0, time.time() - at)
    for length, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= length:
            return f"{seconds // length:.0f} {name} ago"
    return "just now"


@dataclass(frozen=True, slots=True)
class Shown:
    """How a chain is printed. `verbatim`: secrets in what was said are left as they are. `last`: so many of the newest
    turns; `turn`: this one alone."""

    format: str = "json"
    verbatim: bool = False
    last: int | None = None
    turn: str | None = None


async def dump(settings: Settings, owner: str, agent_id: str, shown: Shown, write: Write) -> None:
    """Write the agent's chain piece by piece. Raises `NotFound`, `ConfigError`."""
    async for text in _dumped(settings, owner, agent_id, shown):
        write(text)


class Said(CodeBlock):
    """What was said, wrapped and indented. Rich's own block cuts letters off where it wraps (13.9.4)."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Padding(Text(str(self.text).rstrip(), overflow="fold"), (0, 0, 0, 4))


class Pages(Markdown):
    elements: ClassVar[dict[str, type[MarkdownElement]]] = {**Markdown.elements, "code_block": Said, "fence": Said}


def dump_by_the_page(settings: Settings, owner: str, agent_id: str, shown: Shown) -> None:
    """Show it in the terminal's pager, Markdown with colours. A long chain is drawn as far as somebody reads.

    Raises `NotFound`, `ConfigError`.
    """
    console = Console()
    pieces = _dumped(settings, owner, agent_id, shown)

    async def following() -> str | None:
        return await anext(pieces, None)

    async def done() -> None:
        await pieces.aclose()

    def drawn(runner: asyncio.Runner) -> Iterator[str]:
        while (text := runner.run(following())) is not None:
            with console.capture() as page:
                console.print(Pages(text, hyperlinks=False))
            yield page.get()

    with asyncio.Runner() as runner:
        pages = drawn(runner)
        try:
            first = next(pages)  # what is refused opens no pager
            click.echo_via_pager(chain((first,), pages), color=True)
        finally:
            runner.run(done())


async def _dumped(settings: Settings, owner: str, agent_id: str, shown: Shown) -> AsyncGenerator[str, None]:
    if shown.format not in FORMATS:
        raise ConfigError(f"--format must be one of {', '.join(FORMATS)}{did_you_mean(shown.format, FORMATS)}")
    async with opened(settings) as there:
        store, agent = await agent_in(settings, there, owner, agent_id)
        sandbox = str(Sandboxes(settings).path(agent.dir))
        if shown.last is None and shown.turn is None:
            written = FORMATS[shown.format].write(store, agent, sandbox=sandbox, verbatim=shown.verbatim)
        elif shown.format in PARTS:
            part = await _part(store, agent, shown)
            written = PARTS[shown.format](store, agent, sandbox=sandbox, verbatim=shown.verbatim, part=part)
        else:
            raise ConfigError(f"--last and --turn take --format {' or '.join(PARTS)}")
        async for text in written:
            yield text


async def _part(store: Store, agent: Agent, shown: Shown) -> TurnPage:
    """Raises `NotFound` for a turn that the agent does not have."""
    if shown.turn is None:
        return await store.page(agent.key, before_seq=None, limit=shown.last or 1)
    turn = await store.turn(shown.turn)
    if turn is None or turn.agent_key != agent.key:
        raise NotFound(f"agent {agent.agent_id!r} has no turn {shown.turn!r}: see `find`")
    return await store.page(agent.key, before_seq=turn.seq + 1, limit=1)


async def follow(settings: Settings, owner: str, agent_id: str, shown: Shown, write: Write) -> None:
    """Write each turn and repair as it happens, in any proxy; ends when the agent is deleted.

    In a terminal what the running server's turns do and say stands below, as long as they run.
    """
    forms = {"json": live.json_line, "markdown": live.lines}
    if shown.format not in forms:
        raise ConfigError(f"--follow takes --format {' or '.join(forms)}")
    async with opened(settings) as there:
        store, agent = await agent_in(settings, there, owner, agent_id)
        console = Console(highlight=False)
        served = served_at(settings.var)
        watching: asyncio.Task[None] | None = None

        async def watch(served: Served, key: dict[str, str]) -> None:
            async with client_of(served, httpx.Timeout(ANSWER_TIMEOUT, read=None), key) as http:
                await show_progress(http, agent_id, console)

        if console.is_terminal and shown.format == "markdown" and served is not None and await alive(served):
            with contextlib.suppress(ConfigError):  # without a key for the server the file is read all the same
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
    """Draw what the turns that run do and have said, below what is printed meanwhile. Ends with the server."""
    with Live(console=console, transient=True, auto_refresh=False) as below:
        async for going in progress_of(http, agent_id):
            lines = []
            for one in going:
                lines.append(Text(f"{one['turn_id']}  {printable(one['says'])}", style="bold"))
                said = visible(one["text"]).splitlines()[-SAID_LINES:]
                lines += [Text(f"    {line}", style="dim", overflow="fold") for line in said]
            below.update(Group(*lines), refresh=True)


async def progress_of(http: httpx.AsyncClient, agent_id: str) -> AsyncGenerator[list[JSON], None]:
    """The turns of the agent that wait or run in that server, whenever they do something else or say more.

    An agent that is not there yet is waited for. Ends when the server does.
    """
    while True:
        try:
            path = f"/v1/chains/{encoded_agent_id(agent_id)}/events?live=1"
            async with http.stream("GET", path) as stream:
                lines = stream.aiter_lines()
                async for line in lines:
                    if line == "event: progress":
                        told: list[JSON] = json.loads((await anext(lines)).removeprefix("data: "))["turns"]
                        yield told
                if stream.status_code != NOT_THERE:
                    return
        except httpx.HTTPError:
            return
        await asyncio.sleep(LOOK)


async def agent_in(settings: Settings, store: Store | None, owner: str, agent_id: str) -> tuple[Store, Agent]:
    agent = None if store is None else await store.agent(owner, agent_id)
    if store is None or agent is None:
        raise NotFound(f"there is no agent {agent_id!r} of {owner!r} in {place_of(settings)}: see `chains`")
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
        raise NotFound(f"there is no agent {agent_id!r} in {place_of(settings)}: see `chains`")


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
