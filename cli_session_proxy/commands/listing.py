"""`chains`: the agents, a row each. For a fast start nothing is imported here that only other commands need."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, cast, get_args

from ..domain import times
from ..domain.budgets import amount
from ..domain.models import JSON, ChainSummary, Status
from ..domain.searching import moment
from ..errors import ConfigError, did_you_mean, printable
from ..export.lists import DAY, DAYS, LISTED, ONE_SHOT_SHOWN, TURNS, summary_json, summed
from ..export.words import count, money
from ..sandbox import LOCAL_OWNER
from ..settings import Settings
from .stored import opened

By = Literal["day", "model", "key"]

# The width of a table in a file or a pipe: nothing is cut there.
WIDE = 1000
# How many unnamed agents get their first question as a title; its characters; characters of a shortened id.
TITLED = 100
WORDS = 60
OF_ID = 9


@dataclass(frozen=True, slots=True)
class Listed:
    """`one_shots`: how many of the last day have no row, and their cost. `titles`: the first questions of unnamed
    agents, by id."""

    rows: list[JSON]
    one_shots: int = 0
    cost_usd: float = 0.0
    titles: Mapping[str, str] = field(default_factory=dict)


async def chains(settings: Settings, only: ChainFilter) -> Listed:
    """A row for each agent of every owner, last active first."""
    async with opened(settings) as store:
        if store is None:
            return Listed([])
        now = time.time()
        one_shots_since = None if only.one_shots else now - ONE_SHOT_SHOWN
        found = [row async for row in store.summaries(since=one_shots_since) if only.holds(row)]
        titles: dict[str, str] = {}
        for agent in [row.agent for row in found if not row.agent.named][:TITLED]:
            from ..export import shown  # noqa: PLC0415 - slow to import, and only needed for titles

            turns = (await store.page(agent.key, before_seq=None, limit=1, newest=1)).turns
            asked = [
                block for turn in turns for message in shown.contents(turn)["input"] for block in message["content"]
            ]
            titles[agent.agent_id] = shown.line(asked, WORDS)
        rows = [summary_json(row) for row in found]
        if one_shots_since is None:
            return Listed(rows, titles=titles)
        return Listed(rows, *await store.one_shots(None, since=now - DAY, until=one_shots_since), titles)


@dataclass(frozen=True, slots=True)
class ChainFilter:
    """Which chains are listed."""

    search: str = ""
    since: float = 0.0
    status: Status | None = None
    side: bool = False
    one_shots: bool = False

    @staticmethod
    def parse(
        search: str | None, since: str | None, status: str | None, *, side: bool = False, one_shots: bool = False
    ) -> ChainFilter:
        """Parse the options. Raises `ConfigError` for a wrong time or status."""
        known = get_args(Status)
        if status is not None and status not in known:
            raise ConfigError(f"--status must be one of {', '.join(known)}{did_you_mean(status, known)}")
        at = 0.0 if since is None else moment_of("--since", since)
        return ChainFilter((search or "").casefold(), at, cast(Status | None, status), side, one_shots)

    def holds(self, row: ChainSummary) -> bool:
        named = self.search in row.agent.agent_id.casefold() and (self.side or not row.side)
        return named and row.last_at >= self.since and self.status in (None, row.state)


def moment_of(option: str, text: str) -> float:
    """UTC seconds. Raises `ConfigError`."""
    try:
        return moment(text, time.time())
    except (ValueError, OverflowError):
        raise ConfigError(f"{option} {text!r}: use 30m, 12h, 7d, or a date such as 2026-11-20") from None


def print_chains(listed: Listed, limit: int = LISTED) -> None:
    """Print a table for 80 columns: names are cut in a terminal, nothing in a file. Then a line of totals, and one of
    the one-shots without a row."""
    rows = listed.rows
    unlisted = f"{count(listed.one_shots, 'one-shot')} today, ${listed.cost_usd:.2f} (--one-shots lists them)"
    if not rows:
        print(unlisted if listed.one_shots else "no chains yet")
        return
    from rich.console import Console  # noqa: PLC0415 - `find` and `show` need no table
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDE
    several_owners = any(row["owner"] != LOCAL_OWNER for row in rows)
    several_hosts = len({row["host"] for row in rows} - {None}) > 1 or any(row["address"] for row in rows)
    table = Table(box=None, pad_edge=False)
    optional = [name for name, is_shown in (("owner", several_owners), ("host", several_hosts)) if is_shown]
    for name in ("agent", *optional, "state", "turns", "repairs", "cost", "size", "active"):
        numeric = name in {"turns", "repairs", "cost", "size"}
        # Without enough room the names are cut.
        table.add_column(name, justify="right" if numeric else "left", no_wrap=name != "agent")
    for row in rows[:limit]:
        name = row["agent_id"]
        if console.is_terminal and listed.titles.get(name):  # `show` takes a part of an id, too
            name = f"{name[:OF_ID]} {listed.titles[name]}"
        state = STATES.get(row["state"], row["state"] or "")
        cells = [
            name, *(row[column] or "" for column in optional), state, row["turns"], row["repairs"] or "",
            money(row["cost_usd"]), _size(row["bytes"]), _ago(row["last_at"]) if console.is_terminal
            else times.written(row["last_at"], 'minutes'),
        ]  # fmt: skip
        # As plain text: an agent's name is no markup, and control characters are removed.
        table.add_row(*(Text(printable(str(cell)), no_wrap=True, overflow="ellipsis") for cell in cells))
    console.print(table)
    part = f"{limit} of " if limit < len(rows) else ""
    turns, repairs, cost, size = (sum(row[name] for row in rows) for name in ("turns", "repairs", "cost_usd", "bytes"))
    total = [f"{part}{count(len(rows), 'agent')}", count(turns, "turn")]
    total += [count(repairs, "repair")] if repairs else []
    console.print(Text(", ".join([*total, money(cost) or "$0", _size(size)]), style="dim"))
    if listed.one_shots:
        console.print(Text(unlisted, style="dim"))


async def spent(settings: Settings, by: By) -> list[JSON]:
    """Usage and cost of all owners' turns in the last 14 days (at most the newest 20,000). Rows of keys also have their
    `budgets`, if any."""
    from ..engine.budgets import Budgets  # noqa: PLC0415 - as above

    now = time.time()
    since = times.begins(times.days(now, DAYS)[0])
    budgets: list[JSON] = []
    async with opened(settings) as store:
        facts = [] if store is None else await store.facts(None, since=since, limit=TURNS)
        forgotten = [] if store is None else await store.forgotten(None, since)
        if store is not None:
            budgets = await Budgets(settings.budgets).shown(store, None, None, now)
    days, models, keys = summed(facts, now, forgotten)
    for row in keys:
        row["budgets"] = [one for one in budgets if one["name"] == row["key"]]
    return {"day": days[::-1], "model": models, "key": keys}[by]


def print_spent(rows: list[JSON], by: By) -> None:
    """Print a table: days newest first, else the most expensive first. Zeros are blank."""
    from rich.console import Console  # noqa: PLC0415 - as above
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table(box=None, pad_edge=False)
    for name in (f"{by} ({times.name()})" if by == "day" else by, "turns", "failed", "repairs", "tokens", "cost"):
        table.add_column(name, justify="left" if name.startswith(by) else "right", no_wrap=True)
    if any(row.get("budgets") for row in rows):
        table.add_column("budgets")
    for row in rows:
        tokens = sum(value for name, value in row.items() if name.endswith("_tokens"))
        numbers = (row["turns"], row["failed"], row["repairs"], tokens)
        cost = f"${row['cost_usd']:.2f}" if row["cost_usd"] else ""
        lines = [
            f"{amount(one['unit'], one['used'])} of {amount(one['unit'], one['limit'])} a {one['per']}"
            for one in row.get("budgets", ())
        ]
        counts = (f"{number:,}" if number else "" for number in numbers)
        table.add_row(Text(printable(row[by])), *counts, cost, *([", ".join(lines)] if lines else []))
    console = Console(highlight=False)
    console.print(table)
    console.print(Text(f"${sum(row['cost_usd'] for row in rows):.2f} in the last {DAYS} days", style="dim"))


# A turn's status in the words of the page; empty if it is fine.
STATES = {"completed": "", "requires_action": "waits"}


def _size(number: float) -> str:
    unit = "B"
    for larger in ("KB", "MB", "GB"):
        if number < 1024:
            break
        number, unit = number / 1024, larger
    return f"{number:.{1 if unit == 'GB' else 0}f} {unit}"


def _ago(at: float) -> str:
    """The time since then, such as `3 h ago`."""
    seconds = max(0.0, time.time() - at)
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit} ago"
    return "just now"
