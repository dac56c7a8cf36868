"""Does it work, what does it cost, must somebody act: for `status` and the page's first line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..domain import times
from ..domain.forms import Recorded
from ..domain.models import FINISHED, JSON
from ..domain.plan import Plan
from ..stores.base import Forgotten, TurnFacts
from .words import count, money

WEEK = 7
# What to do about errors that the next turn would also get.
PERSISTENT_ERRORS: Mapping[str, str] = {
    "claude_not_logged_in": "the CLI is not logged in: run `cli-session-proxy login`",
    "claude_unavailable": "the CLI cannot be run: `cli-session-proxy doctor` says why",
}
# Why no turn is accepted, by `engine.readiness.State`.
UNREADY: Mapping[str, str] = {
    "store_unavailable": "the store cannot be written: check its disk and its database",
    "draining": "it is stopping, and takes no new turns",
}


@dataclass(frozen=True, slots=True)
class Remembered(Recorded):
    """How many earlier turns the newest requests of some agents should have contained, and did."""

    agents: int
    turns: int
    sent: int


@dataclass(frozen=True, slots=True)
class ProxyStatus(Recorded):
    """The state of a proxy. `problem`: why the next turn would fail, and what to do; None if it would run. `cli`: the
    CLI's version and its self-check, in words. Costs are in USD; those of seven days include today. `plan`: the windows
    of a subscription. `put_off`: how many turns wait for the end of a limit. `login`: in words, if known."""

    problem: str | None
    cli: str | None
    running: int
    waiting: int
    cost_today: float
    cost_week: float
    remembered: Remembered | None
    plan: Plan | None = None
    put_off: int = 0
    login: str | None = None

    def as_json(self) -> JSON:
        return {"working": self.problem is None, **super(ProxyStatus, self).as_json()}


def unready(state: str, why: str | None) -> str | None:
    """Why no turn is accepted in this state, in words; None if turns are accepted. `why`: the store's error, if it
    cannot be written."""
    return (state == "store_unavailable" and why) or UNREADY.get(state)


def persistent_error(facts: Sequence[TurnFacts]) -> str | None:
    """The error of the newest ended turn in words, if the next turn would get it, too. `facts`: newest first."""
    newest = next((one for one in facts if one.status in FINISHED and one.status != "cancelled"), None)
    return None if newest is None else PERSISTENT_ERRORS.get(newest.code or "")


def answered_since(facts: Sequence[TurnFacts], since: float) -> bool:
    """Whether a turn was answered that was accepted after this time."""
    return any(one.created_at > since and one.status in ("completed", "requires_action") for one in facts)


def costs(facts: Sequence[TurnFacts], now: float, forgotten: Sequence[Forgotten] = ()) -> tuple[float, float]:
    """The cost of today, and of the last seven days including today, in USD. `forgotten`: of deleted one-shots."""
    today, week = (times.begins(times.days(now, days)[0]) for days in (1, WEEK))  # when these periods began
    spent = [(one.created_at, one.cost_usd or 0.0) for one in facts] + [(one.at, one.cost_usd) for one in forgotten]
    return sum(cost for at, cost in spent if at >= today), sum(cost for at, cost in spent if at >= week)


def lines(status: ProxyStatus, served: str | None) -> Iterator[str]:
    """For the terminal. `served`: the address of a server on this store."""
    yield "working" if status.problem is None and served is not None else f"NOT WORKING: {status.problem}"
    if served is not None:
        waiting = f", {status.waiting} waiting" if status.waiting else ""
        waiting += f", {status.put_off} until a limit is over" if status.put_off else ""
        yield f"server      {served}/ui, {count(status.running, 'turn')} running{waiting}"
    if status.login is not None:
        yield f"login       {status.login}"
    if status.cli is not None:
        yield f"CLI         {status.cli}"
    week = f"{money(status.cost_week) or '$0'} in the last {WEEK} days ({times.name()})"
    yield f"cost        {money(status.cost_today) or '$0'} today, {week}"
    if status.plan is not None:
        yield f"plan        {windows(status.plan)}"
    if status.remembered is not None:
        yield f"memory      {remembered(status.remembered)}"


# Names of a subscription's windows for people.
_WINDOWS: Mapping[str, str] = {"five_hour": "five hours", "seven_day": "week"}


def windows(plan: Plan) -> str:
    """How much of each window is used, and when it is reset."""
    texts = []
    for one in plan.windows:
        used = "" if one.used is None else f" {100 * one.used:.0f} % used"
        until = "" if one.resets_at is None else f" until {times.written(one.resets_at)}"
        reached = " LIMIT REACHED" if one.status == "rejected" else ""
        texts.append(f"{_WINDOWS.get(one.name, one.name.replace('_', ' '))}:{used}{until}{reached}")
    return ", ".join(texts) or plan.status.replace("_", " ")


def remembered(memory: Remembered) -> str:
    """Whether the newest requests had all earlier turns, in one line."""
    agents = count(memory.agents, "agent")
    counts = f"{memory.sent} of {count(memory.turns, 'turn')} sent in the newest request of {agents}"
    if memory.sent == memory.turns:
        return f"nothing forgotten: {counts}"
    return f"SOMETHING IS MISSING: {counts}; see `verify`"
