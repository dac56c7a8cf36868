"""The first page: health, agents that need attention, running turns, and the costs of the last days."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from ...backends.base import Login
from ...domain import times
from ...domain.models import ANSWERED, FINISHED, JSON, Agent
from ...engine.engine import Engine
from ...errors import DamagedRow, QueueFull
from ...export import explain, feed, status
from ...export.explain import Attention
from ...export.lists import DAY, DAYS, TURNS, summed
from ...export.status import ProxyStatus, Remembered
from ...stores.base import Forgotten, Store, TurnFacts
from .views import preview

# Sums are cached for 2 seconds, or for 50 times as long as they took: an open page costs at most 2 % of a core.
SUMS_KEPT = 2.0
SUMS_KEPT_TIMES = 50
# Seconds after which a running turn is listed, and a turn that still waits for its client's tool results.
RUNS_LONG = 300.0
RESULTS_OVERDUE = 600.0
# Consecutive failed turns after which an agent counts as stuck.
STUCK_AFTER = 2
# Seconds after which the CLI is asked for its login again.
LOGIN_KEPT = 600.0
# Agents of which the newest request is compared with the chain.
AGENTS_COMPARED = 5
# Characters that are shown of an unfinished answer.
ANSWER_SHOWN = 300
# The most agents that are listed by name. Others are counted.
AGENTS_NAMED = 50


# Returns the login of the backend's program. It may start the program.
AskLogin = Callable[[], Awaitable[Login]]


@dataclass(slots=True)
class _Sums:
    """Cached sums over `facts`, the turns of the last days. `made_at` and `took`: monotonic seconds."""

    made_at: float
    took: float
    facts: list[TurnFacts]
    forgotten: list[Forgotten]
    days: list[JSON]
    models: list[JSON]
    keys: list[JSON]


async def title_of(store: Store, agent: Agent) -> str:
    """The title of an agent, for people: its name, or its first question if it is unnamed."""
    if agent.named:
        return agent.agent_id
    first = (await store.page(agent.key, before_seq=None, limit=1, newest=1)).turns
    return preview(block for turn in first for one in turn.input for block in one.content) or agent.agent_id


class Overview:
    """One per app."""

    def __init__(self, engine: Engine, ask: AskLogin) -> None:
        self._engine = engine
        self._ask_login = ask
        self._sums: dict[str | None, _Sums] = {}
        self._one_at_a_time = asyncio.Lock()
        self._login = Login("unknown", None)  # as of `_login_checked_at`
        self._login_checked_at: float | None = None
        self._compared: dict[str, Remembered] = {}  # by turn

    async def of(self, owner: str, *, of_all: bool, wait: bool = True) -> JSON:
        """The answer of the route. `of_all`: sum over all owners. Of other owners only sums are shown, and the number
        and size of all processes. `wait`: ask the CLI for its login if the cached one is too old."""
        now = time.time()
        sums_of = None if of_all else owner
        async with self._one_at_a_time:
            sums = self._sums.get(sums_of)
            if sums is None or time.monotonic() - sums.made_at > max(SUMS_KEPT, SUMS_KEPT_TIMES * sums.took):
                began = time.monotonic()
                since = times.begins(times.days(now, DAYS)[0])
                facts = await self._engine.store.facts(sums_of, since=since, limit=TURNS)
                forgotten = await self._engine.store.forgotten(sums_of, since)
                days, models, keys = await asyncio.to_thread(summed, facts, now, forgotten)
                done = time.monotonic()
                sums = self._sums[sums_of] = _Sums(done, done - began, facts, forgotten, days, models, keys)
            summary = await self._status(owner, sums, now, wait=wait)
        attention = in_need_of_attention([one for one in sums.facts if one.owner == owner], now)
        names: dict[int, JSON] = {}
        for key, *_ in attention[:AGENTS_NAMED]:
            try:
                agent = await self._engine.store.agent_by_key(key)
                if agent is not None:  # else it was deleted since the sums were made
                    names[key] = {"agent_id": agent.agent_id, "title": await title_of(self._engine.store, agent)}
            except DamagedRow as exc:
                names[key] = {"agent_id": "", "title": exc.message}
        counts = self._engine.backend.counts()
        return {
            "object": "overview",
            "owner": owner,
            "at": now,
            "status": summary.as_json(),
            "turns": len(sums.facts),
            "is_whole": len(sums.facts) < TURNS,
            "days": sums.days,
            "timezone": times.name(),
            "models": sums.models,
            "keys": sums.keys if of_all else None,
            "budgets": await self._engine.budgets.shown(self._engine.store, sums_of, None, now),
            "attention": [
                {**names[key], "turn_id": turn_id, "at": at, "code": code, "says": says}
                for key, turn_id, at, code, says in attention[:AGENTS_NAMED]
                if key in names
            ],
            "more": max(0, len(attention) - AGENTS_NAMED),
            "running": await self._running(owner),
            "processes": {**counts._asdict(), "each": await self._processes(owner)},
            "cli": summary.cli,
            "store_bytes": await self._engine.store.size(),
        }

    async def _status(self, owner: str, sums: _Sums, now: float, *, wait: bool) -> ProxyStatus:
        """Costs are those of `sums`. `remembered` is about this owner's agents."""
        facts = sums.facts
        if wait and (self._login_checked_at is None or now - self._login_checked_at > LOGIN_KEPT):
            self._login, self._login_checked_at = await self._ask_login(), now
        if self._login.advice is not None and status.answered_since(facts, self._login_checked_at or now):
            self._login = Login("unknown", None)  # somebody has logged in meanwhile
        program = self._engine.backend.program()
        today, week = status.costs(facts, now, sums.forgotten)
        unready = status.unready(await self._engine.state(), self._engine.readiness.why)
        return ProxyStatus(
            problem=unready or self._login.advice or status.persistent_error(facts),
            cli=None if program is None else explain.program(program),
            running=self._engine.running(), waiting=self._engine.queued(), cost_today=today, cost_week=week,
            remembered=await self._remembered([one for one in facts if one.owner == owner]),
            plan=self._engine.plan.now(), put_off=self._engine.waiting_for_limit(),
            login=explain.login(self._login.kind),
        )  # fmt: skip

    async def _remembered(self, facts: Sequence[TurnFacts]) -> Remembered | None:
        """How much of the path the newest requests held, for the agents answered last. Each turn is examined once."""
        newest: dict[int, str] = {}
        for one in facts:
            if one.status in ANSWERED and len(newest) < AGENTS_COMPARED:
                newest.setdefault(one.agent_key, one.id)
        examined: dict[str, Remembered] = {}
        for turn_id in newest.values():
            if (known := self._compared.get(turn_id)) is not None:
                examined[turn_id] = known
                continue
            examined[turn_id] = Remembered(0, 0, 0)
            # The turn's page shows a damage. Where memory is full of other conversations, this one is not compared.
            with suppress(DamagedRow, QueueFull):
                turn = await self._engine.store.turn(turn_id)
                ran = turn is not None and turn.session_id is not None  # an imported turn sent no request
                request = await self._engine.backend.request_of(turn) if turn is not None and ran else None
                if request is not None:
                    examined[turn_id] = Remembered(1, request.turns, request.turns - len(request.missing))
        self._compared = examined
        sums = [sum(getattr(one, name) for one in examined.values()) for name in ("agents", "turns", "sent")]
        return Remembered(*sums) if sums[0] else None

    async def _running(self, owner: str) -> list[JSON]:
        rows = []
        progresses = self._engine.progress()
        for one, shown in zip(progresses, feed.progress(progresses), strict=True):
            agent = await self._agent(one.turn.agent_key)
            if agent is not None and agent.owner == owner:
                about: JSON = {"agent_id": agent.agent_id, "title": await title_of(self._engine.store, agent)}
                about |= {"model": one.turn.model}
                shown.pop("approvals")  # their texts are long, and `says` mentions them
                rows.append({**about, **shown, "text": feed.ending(shown["text"], ANSWER_SHOWN)})
        if not self._engine.store.spans_hosts:
            return rows
        local_ids = {one.turn.id for one in progresses}
        async for turn in self._engine.store.unfinished():
            agent = None if turn.id in local_ids else await self._agent(turn.agent_key)
            proxy = await self._engine.store.proxy(turn.instance or "") if agent is not None else None
            if agent is not None and agent.owner == owner:
                about = {"agent_id": agent.agent_id, "title": await title_of(self._engine.store, agent)}
                about |= {"model": turn.model, "at": turn.created_at, "turn_id": turn.id}
                says = explain.elsewhere(turn.status, None if proxy is None else proxy.host)
                since = turn.started_at or turn.created_at
                rows.append({**about, "doing": "elsewhere", "says": says, "since": since, "text": "", "skipped": 0})
        return rows

    async def _agent(self, key: int) -> Agent | None:
        with suppress(DamagedRow):  # the log names the row, and this list leaves it out
            return await self._engine.store.agent_by_key(key)
        return None

    async def _processes(self, owner: str) -> list[JSON]:
        """The processes that serve the owner's agents, and spares."""
        rows: list[JSON] = []
        for one in self._engine.backend.processes():
            session = None
            if one.session_id is not None:
                with suppress(DamagedRow):
                    session = await self._engine.store.session(one.session_id)
            agent = None if session is None else await self._agent(session.agent_key)
            if one.state != "spare" and (agent is None or agent.owner != owner):
                continue
            rows.append({**one._asdict(), "agent_id": None if agent is None else agent.agent_id})
        return rows


def in_need_of_attention(facts: Sequence[TurnFacts], now: float) -> list[tuple[int, str, float, Attention, str]]:
    """Agents that need attention, by severity, then newest first: key, turn, time, code, and a sentence.

    Failures of the last day are listed even if later turns succeeded. Repairs and single refusals are not. Pure.
    """
    by_agent: dict[int, list[TurnFacts]] = defaultdict(list)
    for one in facts:  # newest first
        by_agent[one.agent_key].append(one)
    found: list[tuple[int, str, float, Attention, str]] = []

    def note(one: TurnFacts, code: Attention, **detail: object) -> None:
        at = one.finished_at or one.created_at
        found.append((one.agent_key, one.id, at, code, explain.attention(code, detail)))

    for turns in by_agent.values():
        ended = [one for one in turns if one.status in FINISHED and one.status != "cancelled"]
        unsuccessful = [one for one in ended if one.status in ("failed", "refused")]
        in_a_row = next((n for n, one in enumerate(ended) if one.status not in ("failed", "refused")), len(ended))
        today = [one for one in unsuccessful if one.status == "failed" and one.created_at > now - DAY]
        failed = [one for one in unsuccessful[:in_a_row] if one.status == "failed"]
        if len(failed) >= STUCK_AFTER:
            note(failed[0], "stuck", turns=len(failed), why=failed[0].code)
        elif unsuccessful and unsuccessful[0] in failed:
            note(unsuccessful[0], "failed", why=unsuccessful[0].code)
        elif in_a_row - len(failed) >= STUCK_AFTER:
            note(unsuccessful[0], "refused", turns=in_a_row - len(failed))
        elif today:
            note(today[0], "failures", turns=len(today), why=today[0].code)
        open_ones = [one for one in turns if one.status in ("queued", "running") and one.created_at < now - RUNS_LONG]
        if open_ones:
            note(open_ones[-1], "long")
        if turns[0].status == "requires_action" and (turns[0].finished_at or now) < now - RESULTS_OVERDUE:
            note(turns[0], "results")
    order: tuple[Attention, ...] = ("stuck", "failed", "long", "refused", "failures", "results")
    return sorted(found, key=lambda row: (order.index(row[3]), -row[2]))
