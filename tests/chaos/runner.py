"""Runs a history over the real parts, and reports what the checker finds."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import signal
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, unquote

import httpx

from cli_session_proxy.http.relay import REACHABLE_FOR
from cli_session_proxy.settings import Settings
from turnfault.provider.script import Behaviour
from turnfault.provider.seen import Seen
from turnfault.provider.upstream import Upstream

from ..git_memory.repository import Repo
from ..release.keeping import restored
from ..until import until
from .checker import Fault, judge
from .client import Attempt, Caller, Client
from .cluster import cluster
from .doors import APPLICATIONS
from .history import (
    LONG_PAUSE,
    Carry,
    Commit,
    Cut,
    Database,
    Delete,
    Expire,
    History,
    Join,
    Kill,
    KillCli,
    Leave,
    Mend,
    Network,
    Open,
    Pause,
    Registry,
    Repeat,
    Rewind,
    Say,
    Skew,
    Spoil,
    Start,
    Step,
    Terminate,
    Wake,
    told,
)  # fmt: skip
from .journal import JSON, Asked, Committed, Died, Entry, Heard, Hung, Sent, TakenOff, Told, Unserved
from .model import LIMITS, MARK_HEADER, TURN, Model, Plan, filler
from .pictures import with_picture
from .world import Proxy, World

# Seconds after which an attempt that nothing holds back has hung. A proxy's own bounds end it before: a lease, a
# spawn on a busy machine and the model's three requests.
PATIENCE = 45.0
# Seconds more for an application that has to import LiteLLM or the SDK first, on a machine that is busy with CLIs.
IMPORTED = 120.0
# Seconds after which a proxy takes over the agents of one that is away: a lease, and a look at the store each tenth of
# it.
TAKEN_OVER = 1.1 * float(Settings.model_fields["lease"].default)
# Seconds that a proxy is kept away at most: a CLI asks again for a stream that is held back for 30 s.
LONGEST_AWAY = 28.0
# What the judge counts; the rest is what a world noticed.
COUNTED = frozenset({"turns", "acknowledged", "requests"})
# What of a turn's reason tells how it came to its place on the path.
TELLING = ("rule", "left_off", "settled", "repaired", "why", "diverged_at")
# Seconds by which an agent is made older than chains are kept, and within which a proxy that starts has removed it.
LONG_AGO = 2 * 24 * 3600.0
EXPIRED = 30.0
# Seconds in which a proxy notices that a client has left.
NOTICED = 5.0
# How often each agent is asked in the end before it counts as unserved.
TRIES = 4


@dataclass(frozen=True, slots=True)
class Kept:
    """How much of the request before it a request of the same path still began with."""

    share: float
    turn: int
    request: int
    before: int
    why: str
    said: bool  # the dump says why

    @property
    def unexplained(self) -> tuple[int, ...]:
        """The two requests, where nothing accounts for it."""
        return () if self.share >= 0.99 or self.said else (self.before, self.request)


@dataclass(slots=True)
class Report:
    history: History
    faults: list[Fault]
    kept: list[Kept]
    counts: Counter[str]
    done: list[str]
    chains: list[str] = field(default_factory=list)
    logs: dict[str, list[str]] = field(default_factory=dict)
    shown: dict[int, list[JSON]] = field(default_factory=dict)  # the messages of each request that shows a fault

    @property
    def command(self) -> str:
        """What runs this history again."""
        shape = self.history.shape
        said = f"python -m tests.chaos --seed {self.history.seed} --proxies {shape.proxies} --length {shape.length}"
        said += (
            " --hosts" * shape.hosts
            + " --tools" * shape.tools
            + " --wrapper" * shape.wrapper
            + " --wide" * shape.wide
            + f" --agents {shape.agents}" * (shape.agents > 0)
            + " --release" * shape.release
            + " --long" * shape.long
            + " --no-pauses" * (not shape.pauses)
        )
        return said + f" --cli {shape.cli}" * (shape.cli != "2")

    @property
    def median(self) -> float:
        return statistics.median([one.share for one in self.kept] or [1.0])

    @property
    def low(self) -> list[Kept]:
        return [one for one in self.kept if one.share < 0.99]

    @property
    def unexplained(self) -> list[Kept]:
        """Of these, what no turn of a dump accounts for."""
        return [one for one in self.low if not one.said]

    def lines(self) -> Iterator[str]:
        yield f"chaos: {self.command}"
        yield from self.history.lines()
        yield from (f"    {line}" for line in self.done)
        counts = self.counts
        yield (
            f"{counts['turns']} turns, {counts['acknowledged']} acknowledged, {counts['requests']} requests; "
            f"prefix kept: median {self.median:.3f}, {len(self.low)} of {len(self.kept)} below 0.99"
        )
        if noticed := {name: count for name, count in counts.items() if name not in COUNTED}:
            yield f"noticed: {', '.join(f'{name} {count}' for name, count in noticed.items())}"
        for one in self.low:
            yield f"  kept {one.share:.2f} at turn {one.turn} (request {one.request} after {one.before}): {one.why}"
        if self.faults or self.unexplained:
            yield from self.chains
        yield f"{len(self.faults)} faults"
        yield from (f"  {fault}" for fault in self.faults)


def explained(turn: JSON) -> str:
    """What the dump says about a turn: its continuity, and why it is so."""
    return f"{turn['continuity']}: {'; '.join(turn['says']) or 'nothing is said'}"


def drawn(dump: JSON, numbers: Mapping[str, int]) -> Iterator[str]:
    """A chain with the history's numbers: how each turn ended, what it continues, and why."""
    yield f"chain of {dump['agent_id']}"
    for turn in dump["turns"]:
        number, parent = numbers.get(turn["id"], turn["id"][:9]), numbers.get(turn["parent_id"], turn["parent_id"])
        reason = {name: value for name, value in turn["reason"].items() if name in TELLING}
        tries = "".join(f" {one.get('status')}({one.get('code', '')})" for one in turn["attempts"][:-1])
        head = "  <- the head" * (turn["id"] == dump["head"])
        yield (
            f"  {number} after {parent}: {turn['status']}, {turn['delivery']}, {explained(turn)}; "
            f"session {str(turn['session_id'])[:8]}, {reason}{tries}{head}"
        )


class NotDone(Exception):
    """A command of the history failed, in words."""


def path_of(dump: JSON) -> list[int]:
    """The history's numbers of the turns on the path to the head, the newest last."""
    turns = {turn["id"]: turn for turn in dump["turns"]}
    at, path = dump["head"], []
    while at is not None:
        marks = TURN.findall(json.dumps(turns[at]["input"]))
        path += [int(marks[-1])] if marks else []
        at = turns[at]["parent_id"]
    return path[::-1]


async def run(history: History, binary: Path, folder: Path, *, keep: Path | None = None) -> Report:
    """Run a history in a folder that does not exist yet, and remove it afterwards. `keep`: where the transcripts of one
    go in which a prefix fell, with what was salvaged of them."""
    journal: list[Entry] = []
    clients = [Client(speaker) for speaker in history.speakers]
    if history.shape.release:
        clients, told = await asyncio.to_thread(restored, folder)
        journal += told
    model = Model(journal.append, before=max((one.number for one in journal if isinstance(one, Asked)), default=0))
    make = cluster if history.shape.hosts else one_host
    async with make(history, binary, folder, model.behave) as world:
        world.falls_back = any(isinstance(step, Say) and step.fault in LIMITS for step in history.steps)
        world.expires = any(isinstance(step, Expire) for step in history.steps)
        world.commits = any(isinstance(step, Commit) for step in history.steps)
        if world.commits:
            await asyncio.to_thread(Repo, folder / "repository")
        try:
            report = await _Run(history, world, model, journal, clients).run()
            if keep is not None and report.low:
                await asyncio.to_thread(world.keep, keep)
            return report
        finally:
            for proxy in world.proxies:
                proxy.signal(signal.SIGKILL)
                await proxy.ended()
            world.kill_clis()
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


@asynccontextmanager
async def one_host(
    history: History, binary: Path, folder: Path, behave: Callable[[Seen], Behaviour]
) -> AsyncIterator[World]:
    async with Upstream(behave=behave) as upstream:
        world = World(folder, binary, upstream.url, history.shape.proxies, wrapper=history.shape.wrapper)
        world.skews = any(isinstance(step, Skew) for step in history.steps)
        world.checks = history.shape.wide and history.shape.cli == "2" and history.seed % 2 == 1
        yield world


class _Run:
    def __init__(
        self, history: History, world: World, model: Model, journal: list[Entry], clients: list[Client]
    ) -> None:
        self._history = history
        self._world = world
        self._model = model
        self._journal = journal
        self._clients = clients
        self._caller = Caller(journal.append, world.headers, world.ask)
        self._attempts: dict[int, list[Attempt]] = {}
        self._deleted: list[JSON] = []  # chains as they were before they were deleted
        self._whose: dict[int, Client] = {}
        self._told: set[int] = set()  # attempts whose end is in the report
        self._left_open: set[int] = set()  # turns whose proxy died while the upstream held their answer
        self._left_here: dict[int, str] = {}  # turns whose clients have left, all at the proxy with this mark
        self._dice = random.Random(history.seed)
        self._database_back = 0.0  # when the store's server was last started
        self._away: list[tuple[float, float]] = []  # from when to when a proxy was
        self._watching: list[asyncio.Task[None]] = []  # what becomes of proxies that end
        self._done: list[str] = []
        self._began = time.monotonic()

    async def run(self) -> Report:
        try:
            self._world.begun()
            await asyncio.gather(*(proxy.start() for proxy in self._world.proxies))
            await self._world.joined()
            for step in self._history.steps:
                self._say(told(step))
                await self._take(step)
            self._say("the end: everything is let go")
            await self._let_go()
            await self._probe()
            dumps = [*self._deleted, *await self._chains()]
            self._journal += await self._world.faults()
            self._journal += [crash for proxy in self._world.proxies for crash in proxy.crashes]
            await self._stop()
        finally:
            for attempts in self._attempts.values():
                for attempt in attempts:
                    attempt.leave()
            await asyncio.gather(*self._watching)
            await self._caller.close()
        self._journal += [Told(number) for number, seen in self._model.seen.items() if seen.outcome == "answered"]
        verdict = judge(self._journal)
        numbers = self._numbers(dumps)
        turns = {numbers[turn["id"]]: turn for dump in dumps for turn in dump["turns"] if turn["id"] in numbers}
        kept: list[Kept] = []
        for after, before in verdict.extends.items():
            number = verdict.turn_of.get(after)
            # Not one of the release before, and not where another model or an application of the SDK has its own cache.
            if number is not None and before in self._model.seen and self._cache(after) == self._cache(before):
                share = self._model.seen[after].prefix_kept(self._model.seen[before])
                turn = turns.get(number)
                why = "no dump has this turn" if turn is None else explained(turn)
                # Where its own records could not be read, what the turn before came to says why.
                above = turns.get(verdict.turn_of.get(before, 0))
                said = any(one is not None and one["says"] for one in (turn, above))
                kept.append(Kept(share, number, after, before, why, said))
        chains = [line for dump in dumps for line in drawn(dump, numbers)]
        logs = {f"proxy {proxy.number}": proxy.log for proxy in self._world.proxies}
        verdict.counts.update(self._world.noticed)
        wrong = {fault.request for fault in verdict.faults} | {number for one in kept for number in one.unexplained}
        shown = {number: seen.messages for number, seen in self._model.seen.items() if number in wrong}
        return Report(self._history, verdict.faults, kept, verdict.counts, self._done, chains, logs, shown)

    def _cache(self, request: int) -> tuple[str, bool]:
        seen = self._model.seen[request]
        return seen.body["model"], seen.headers.get(MARK_HEADER, "").startswith("sdk-")

    def _say(self, line: str) -> None:
        self._done.append(f"{time.monotonic() - self._began:6.2f} {line}")

    # --- steps

    async def _take(self, step: Step) -> None:
        match step:
            case Say():
                await self._new(step)
            case Repeat():
                await self._repeat(step)
            case Leave():
                await self._leave(step)
            case Open():
                if step.turn in self._model.plans:
                    self._model.plans[step.turn].opened.set()
            case Join():
                turns = list(self._attempts) if step.turn is None else [step.turn]
                for turn in turns:
                    for attempt in self._attempts.get(turn, ()):
                        await self._over(attempt)
            case Spoil():
                await asyncio.sleep(step.after)
                await self._spoil(step)
            case Database():
                await self._world.database(step.how, step.seconds)
                self._database_back = time.monotonic()
            case Registry():
                await self._world.registry(step.seconds)
            case Rewind() | Delete() | Carry() | Expire() | Commit():
                await self._command(step, self._clients[step.agent], self._world.proxies[step.proxy])
            case _:
                await self._to_a_proxy(step, self._world.proxies[step.proxy])

    async def _to_a_proxy(
        self, step: Kill | Terminate | Start | Pause | Wake | KillCli | Cut | Mend | Skew, proxy: Proxy
    ) -> None:
        match step:
            case Kill():
                await asyncio.sleep(step.after)
                await self._kill(proxy)
            case KillCli():
                await asyncio.sleep(step.after)
                await asyncio.to_thread(self._world.kill_clis, proxy.mark)
            case Terminate():
                if proxy.running and not proxy.stopping:
                    proxy.stop()
                    self._watching.append(asyncio.create_task(self._stopped(proxy, proxy.mark)))
            case Start():
                if "store" in proxy.cut:  # it would not start without
                    self._mend(proxy, "store")
                if proxy.paused_at is None:
                    await proxy.start()
            case Pause():
                if proxy.running:
                    await proxy.pause()
            case Wake():
                if proxy.paused_at is not None:
                    await asyncio.sleep(max(0.0, proxy.paused_at + step.seconds - time.monotonic()))
                    if step.seconds >= LONG_PAUSE:
                        await self._overdue(proxy)
                    self._back_again(proxy)
                    proxy.wake()
            case Cut():
                self._world.cut(proxy, step.network)
                proxy.cut[step.network] = time.monotonic()
            case Mend():
                if (since := proxy.cut.get(step.network)) is not None:
                    await asyncio.sleep(max(0.0, since + step.seconds - time.monotonic()))
                    if step.seconds >= LONG_PAUSE and proxy.away_at is not None:
                        await self._overdue(proxy)
                    self._mend(proxy, step.network)
            case Skew():
                self._world.skew(proxy, step.seconds)
                proxy.woke_at = time.monotonic()

    def _back_again(self, proxy: Proxy) -> None:
        if proxy.away_at is not None:
            self._away.append((proxy.away_at, time.monotonic()))

    def _mend(self, proxy: Proxy, network: Network) -> None:
        self._back_again(proxy)
        self._world.mend(proxy, network)
        del proxy.cut[network]
        proxy.woke_at = time.monotonic()

    def _url(self, client: Client, proxy: Proxy) -> str:
        return self._world.front if client.speaker.front else proxy.url

    async def _new(self, say: Say) -> None:
        client, proxy = self._clients[say.agent], self._world.proxies[say.proxy]
        text = f"Turn #{say.turn}# of {client.speaker.name}: {filler(say.turn, 160)}"
        plan = Plan(say.calls if client.speaker.tools else 0, say.fault, say.hold, say.size, say.full)
        self._model.plans[say.turn] = plan
        self._whose[say.turn] = client
        if say.picture:
            text = with_picture(say.turn, text)
        request = client.next(say.turn, text=text, keyed=say.keyed, back=say.back, wire=say.wire, edit=say.edit)
        attempt = self._caller.send(client, request, self._url(client, proxy), say.proxy, slow=say.slow)
        self._attempts[say.turn] = [attempt]
        if say.leave_after is not None:
            asyncio.get_running_loop().call_later(say.leave_after, attempt.leave)
        if say.slow:
            await self._over(attempt, attempt.read)
        elif say.wait:
            await self._over(attempt, plan.reached)

    async def _repeat(self, repeat: Repeat) -> None:
        client = self._whose.get(repeat.turn)
        if client is None:
            return
        # Without a key or a count the same words are the same turn only where a crash left it open, or where it is
        # known that the answer did not arrive: the chain has said so, or the proxy that runs it is the one that is
        # asked again. In all cases only if the conversation has not gone on.
        gone_on = any(turn > repeat.turn and self._whose[turn] is client for turn in self._attempts)
        plan, proxy = self._model.plans[repeat.turn], self._world.proxies[repeat.proxy]
        left_open = repeat.turn in self._left_open
        left_open = left_open or (plan.held and self._left_here.get(repeat.turn) == plan.mark == proxy.mark)
        anew = repeat.how == "plain" and (gone_on or not left_open)
        # A count alone says nothing to a proxy on another host while the first attempt is on its way to the store.
        on_its_way = any(not attempt.task.done() for attempt in self._attempts[repeat.turn])
        anew = anew or (repeat.how == "count" and on_its_way and not plan.asked)
        request, url = client.requests[repeat.turn], self._url(client, proxy)
        attempt = self._caller.send(client, request, url, repeat.proxy, again=repeat.how, anew=anew)
        self._attempts[repeat.turn].append(attempt)
        if repeat.wait:
            await self._over(attempt, plan.reached)
        elif repeat.attached:
            await self._delivery(self._attempts[repeat.turn], "pending")

    async def _leave(self, leave: Leave) -> None:
        here = self._attempts.get(leave.turn, [])
        proxies = {self._world.proxies[attempt.proxy].mark for attempt in here if not attempt.task.done()}
        for attempt in here:
            attempt.leave()
        # A load balancer and a proxy on another host would tell it on, in their own time.
        if len(proxies) == 1 and not self._history.shape.hosts:
            self._left_here[leave.turn] = proxies.pop()
        if leave.noticed and here and here[-1].got is None and await self._delivery(here, "undelivered"):
            self._left_open.add(leave.turn)

    async def _delivery(self, attempts: list[Attempt], wanted: str) -> bool:
        """Wait until the chain says this of a turn's answer; False when it does not within a proxy's reaction."""
        proxy = self._world.proxies[attempts[-1].proxy]
        mark = f"#{attempts[-1].request.turn}#"
        until = time.monotonic() + NOTICED
        async with httpx.AsyncClient(trust_env=False, timeout=NOTICED, headers=self._world.headers) as http:
            while proxy.running and proxy.paused_at is None and time.monotonic() < until:
                answer = await http.get(f"{proxy.url}/v1/chains/{quote(self._agent_id(attempts), safe='')}")
                turns = answer.json()["turns"] if answer.status_code == 200 else []
                mine = [turn for turn in turns if mark in json.dumps(turn["input"])]
                if mine and mine[-1]["delivery"] == wanted:
                    return True
                await asyncio.sleep(0.02)  # what another process does, nobody tells us
        return False

    def _agent_id(self, attempts: list[Attempt]) -> str:
        """The id of the agent in these attempts: its name, or what the proxy called it."""
        told = (attempt.headers["x-agent-id"] for attempt in attempts if "x-agent-id" in attempt.headers)
        return unquote(next(told, quote(self._whose[attempts[0].request.turn].speaker.name)))

    async def _over(self, attempt: Attempt, event: asyncio.Event | None = None) -> None:
        """Wait until the attempt is over or the event is there. What is held back, now or later, is not waited for."""
        client = self._whose[attempt.request.turn]
        until = asyncio.get_running_loop().time() + PATIENCE + IMPORTED * (attempt.request.wire in APPLICATIONS)
        while not (attempt.task.done() or self._blocked(attempt) or (event is not None and event.is_set())):
            plans = [plan for turn, plan in self._model.plans.items() if plan.hold and self._whose[turn] is client]
            held = [plan.reached for plan in plans if not plan.reached.is_set()]
            events = [*held, self._model.next_request, *([event] if event else [])]
            waiting = [asyncio.create_task(one.wait()) for one in events]
            try:
                done, _ = await asyncio.wait(
                    {attempt.task, *waiting},
                    timeout=until - asyncio.get_running_loop().time(),
                    return_when=asyncio.FIRST_COMPLETED,
                )
            finally:
                for task in waiting:
                    task.cancel()
                await asyncio.gather(*waiting, return_exceptions=True)
            if not done:
                self._journal.append(Hung(attempt.number, time.monotonic() - attempt.begun))
                attempt.leave()
                break
        if attempt.task.done():
            self._ended(attempt)

    def _ended(self, attempt: Attempt) -> None:
        if attempt.task.cancelled():
            return
        heard, client = attempt.task.result(), self._whose[attempt.request.turn]
        if heard.outcome != "acknowledged" and attempt.number not in self._told:
            self._told.add(attempt.number)
            self._say(f"  turn {attempt.request.turn}: {heard.outcome} {heard.code}")
        if heard.code.startswith("400") and not isinstance(attempt.request.asked, str):
            assert attempt.request.parent is not None
            client.gave_up.add(attempt.request.parent)

    def _blocked(self, attempt: Attempt, *, taken_over: bool = False) -> bool:
        """Something that the history did keeps it from its end: its proxy is paused, or the upstream holds a turn of
        its agent. `taken_over`: a turn that is held in a proxy that is away is in nobody's way any more."""
        if attempt.task.done():
            return False
        client = self._whose[attempt.request.turn]
        # The load balancer may have chosen any of them.
        asked = self._world.proxies if client.speaker.front else [self._world.proxies[attempt.proxy]]
        if any(proxy.paused_at is not None for proxy in asked):
            return True
        held = [turn for turn, plan in self._model.plans.items() if plan.held and self._whose[turn] is client]
        if taken_over:
            held = [turn for turn in held if turn == attempt.request.turn or not self._in_one_away(turn)]
        return bool(held)

    def _in_one_away(self, turn: int) -> bool:
        """By the CLI whose request the upstream holds: another host may have passed the turn on to its proxy."""
        mark = self._model.plans[turn].mark
        return any(proxy.mark == mark and proxy.away_at is not None for proxy in self._world.proxies)

    async def _overdue(self, away: Proxy) -> None:
        """A proxy was paused or cut off for longer than a lease: whoever asked another one since is answered.

        The bound: `TAKEN_OVER`, and for each turn of the agent that is open, itself one of them, what the slowest turn
        of this history took that nothing held up. So it follows from the lease and the machine. One that was away
        itself takes nothing over until the others had the time of a lease to come back as well.
        """
        assert away.away_at is not None
        for attempts in list(self._attempts.values()):
            for attempt in attempts:
                client, asked = self._whose[attempt.request.turn], self._world.proxies[attempt.proxy]
                if client.speaker.front or asked.cut or attempt.request.wire in APPLICATIONS:
                    continue  # nobody knows whom it asked; one that is cut off itself is to say so, in `PATIENCE`
                if self._history.shape.hosts and attempt.begun < away.away_at + REACHABLE_FOR:
                    continue  # it may have been passed on to that very proxy: given up within two leases
                while not (attempt.task.done() or self._blocked(attempt, taken_over=True)):
                    waited = time.monotonic() - self._since(attempt, away.away_at)
                    bound = TAKEN_OVER + self._open_turns(client) * self._slowest()
                    late = time.monotonic() + bound - waited
                    if waited >= bound:
                        self._journal.append(Hung(attempt.number, waited))
                        break
                    if late > away.away_at + LONGEST_AWAY:
                        self._world.noticed["waits that this machine is too slow to judge"] += 1
                        break
                    await asyncio.wait({attempt.task}, timeout=late - time.monotonic())

    def _since(self, attempt: Attempt, away_at: float) -> float:
        """From when on an attempt waits for nothing but that its agent is taken over."""
        asked, client = self._world.proxies[attempt.proxy], self._whose[attempt.request.turn]
        return max(away_at, attempt.begun, asked.woke_at, self._database_back, self._answered(client))

    def _open_turns(self, client: Client) -> int:
        mine = (all_ for turn, all_ in self._attempts.items() if self._whose[turn] is client)
        return sum(any(not attempt.task.done() for attempt in all_) for all_ in mine)

    def _slowest(self) -> float:
        """Seconds that the slowest turn took which nothing in the history held up."""
        sent = {entry.attempt: entry.at for entry in self._journal if isinstance(entry, Sent)}
        took = 0.0
        for heard in (entry for entry in self._journal if isinstance(entry, Heard) and entry.outcome == "acknowledged"):
            turn = self._turn_of(heard.attempt)
            plan = self._model.plans.get(turn)
            if plan is None or self._whose[turn].requests[turn].wire in APPLICATIONS:
                continue
            disturbed = any(sent[heard.attempt] < till and since < heard.at for since, till in self._away)
            now_away = any(one.away_at is not None and one.away_at < heard.at for one in self._world.proxies)
            if plan.hold is None and plan.fault is None and not (disturbed or now_away):
                took = max(took, heard.at - sent[heard.attempt])
        return took

    def _turn_of(self, attempt: int) -> int:
        return next((turn for turn, all_ in self._attempts.items() if any(one.number == attempt for one in all_)), 0)

    def _answered(self, client: Client) -> float:
        """When the agent was answered last: whoever waited behind that turn begins only then."""
        mine = {one.number for turn, all_ in self._attempts.items() if self._whose[turn] is client for one in all_}
        return max((one.at for one in self._journal if isinstance(one, Heard) and one.attempt in mine), default=0.0)

    async def _command(self, step: Rewind | Delete | Carry | Expire | Commit, client: Client, proxy: Proxy) -> None:
        """Where the agent is asked something now, or nobody could be asked, nothing is done."""
        mine = [one for turn, all_ in self._attempts.items() if self._whose[turn] is client for one in all_]
        if client.speaker.naming != "name" or not mine or not proxy.running or proxy.away_at is not None:
            return
        for attempt in mine:
            await self._over(attempt)
        if not all(attempt.task.done() for attempt in mine):
            return
        name, began = client.speaker.name, time.monotonic()
        try:
            whole = await self._chain(proxy, name)
            before = path_of(whole)
            match step:
                case Rewind():
                    await self._asked(proxy, "POST", f"/v1/chains/{quote(name)}/rewind", {"to": f"-{step.turns}"})
                case Delete():
                    await self._asked(proxy, "DELETE", f"/v1/chains/{quote(name)}")
                case Carry():
                    await self._world.carried(proxy, name)
                case Expire():
                    await self._expired(proxy, name)
                case Commit():
                    await self._committed(step, proxy, name)
            gone = isinstance(step, Delete | Expire)
            self._deleted += [whole] if gone else []
            dump = {"turns": [], "head": None} if gone else await self._chain(proxy, name)
        except (httpx.HTTPError, NotDone) as exc:
            self._say(f"  not done, or nobody knows: {exc}")
            known = frozenset(turn for turn in client.known if not isinstance(step, Carry | Commit))
            self._journal.append(TakenOff(time.monotonic(), name, known, certain=False))
            return
        after = path_of(dump)
        off = frozenset(before) - frozenset(after)
        certain = len(off) == (step.turns if isinstance(step, Rewind) else len(before) if gone else 0)
        self._say(f"  off the path: {sorted(off)}, in {time.monotonic() - began:.1f} s")
        self._journal.append(TakenOff(time.monotonic(), name, off, certain=certain))
        client.tip = after[-1] if after and after[-1] in client.known else None

    async def _expired(self, proxy: Proxy, name: str) -> None:
        """A proxy looks for what is to be removed when it starts."""
        await asyncio.to_thread(self._world.age, name, LONG_AGO)
        proxy.stop()
        await self._stopped(proxy, proxy.mark)
        await proxy.start()
        async with httpx.AsyncClient(trust_env=False, timeout=EXPIRED, headers=self._world.headers) as http:

            async def gone() -> bool:
                return (await http.get(f"{proxy.url}/v1/chains/{quote(name)}")).status_code == 404

            try:
                await until(gone, timeout=EXPIRED)
            except TimeoutError:
                self._journal.append(Unserved(name, (f"still there {EXPIRED:.0f} s after it was to be removed",)))

    async def _committed(self, step: Commit, proxy: Proxy, name: str) -> None:
        asked = f"Turn #{step.turn}# beside the conversation of {name}"
        self._model.plans[step.turn] = Plan(aside=asked)
        self._journal.append(Sent(time.monotonic(), -step.turn, step.turn, name, asked, aside=True))
        self._model.committing = step.turn
        done: JSON = {}
        try:
            done = await self._asked(proxy, "POST", f"/v1/chains/{quote(name)}/commit", {"outcome": "failed"})
        finally:
            self._model.committing = None
            self._journal.append(Heard(time.monotonic(), -step.turn, "unknown"))
            self._journal.append(Committed(time.monotonic(), name, step.turn, certain=bool(done)))
        if f"commit-{step.turn}" not in done["message"]:
            raise NotDone(f"the message is not the model's: {done['message'][:200]!r}")

    async def _chain(self, proxy: Proxy, name: str) -> JSON:
        return await self._asked(proxy, "GET", f"/v1/chains/{quote(name)}?format=json")

    async def _asked(self, proxy: Proxy, method: str, address: str, body: JSON | None = None) -> JSON:
        async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE, headers=self._world.headers) as http:
            answer = await http.request(method, proxy.url + address, json=body)
        if answer.status_code >= 300:
            said = f"{method} {address}: {answer.status_code} {answer.text[:200]}"
            if answer.status_code == 500:
                self._journal.append(Unserved(address, (said,)))
            raise NotDone(said)
        told: JSON = answer.json() if answer.content else {}
        return told

    async def _kill(self, proxy: Proxy) -> None:
        if not proxy.running:
            return
        for turn, plan in self._model.plans.items():
            if plan.held and plan.mark == proxy.mark:
                self._left_open.add(turn)
        mark = proxy.mark
        proxy.signal(signal.SIGKILL)
        proxy.paused_at = None
        await proxy.ended()
        self._journal.append(Died(time.monotonic(), mark))
        self._watching.append(asyncio.create_task(self._gone(mark)))

    async def _stopped(self, proxy: Proxy, mark: str) -> None:
        await proxy.ended()
        self._journal.append(Died(time.monotonic(), mark))
        await self._gone(mark)

    async def _gone(self, mark: str) -> None:
        if (orphans := await self._world.gone(mark)) is not None:
            self._journal.append(orphans)

    async def _spoil(self, spoil: Spoil) -> None:
        mine = self._transcript(self._clients[spoil.agent])
        theirs = self._transcript(self._clients[spoil.other])
        if mine is None:
            return
        try:
            self._say("  " + self._world.spoil(mine, spoil.damage, theirs, self._dice))
        except FileNotFoundError:
            self._say("  it was gone already")

    def _transcript(self, client: Client) -> Path | None:
        for attempts in self._attempts.values():
            for attempt in attempts:
                if self._whose[attempt.request.turn] is client and "x-agent-id" in attempt.headers:
                    return self._world.transcript(unquote(attempt.headers["x-agent-id"]))
        return None

    # --- the end

    async def _let_go(self) -> None:
        for proxy in self._world.proxies:
            for network in list(proxy.cut):
                self._mend(proxy, network)
            if proxy.paused_at is not None:
                proxy.wake()
        for plan in self._model.plans.values():
            plan.opened.set()
        for attempts in self._attempts.values():
            for attempt in attempts:
                attempt.reading_on.set()
        for proxy in self._world.proxies:
            await proxy.start()
        for attempts in list(self._attempts.values()):
            for attempt in attempts:
                await self._over(attempt)
        self._journal += await self._world.ready()

    async def _probe(self) -> None:
        """Two more turns of each agent: what was lost shows in them."""
        turn = max(self._model.plans, default=0)
        for at, client in enumerate(self._clients):
            for _ in range(2):
                codes: list[str] = []
                for _ in range(TRIES):
                    turn += 1
                    await self._new(Say(turn, at, self._dice.randrange(len(self._world.proxies))))
                    [attempt] = self._attempts[turn]
                    if attempt.got is not None:
                        break
                    heard = attempt.task.result() if attempt.task.done() and not attempt.task.cancelled() else None
                    codes.append((heard and heard.code) or "nothing")
                else:
                    self._journal.append(Unserved(client.speaker.name, tuple(codes)))

    async def _chains(self) -> list[JSON]:
        """The dumps of every agent that an answer named."""
        url = next(proxy.url for proxy in self._world.proxies if proxy.running)
        # as the header has it: percent-encoded; an unnamed agent has got an id of its own, or several
        named = {attempt.headers.get("x-agent-id") for attempts in self._attempts.values() for attempt in attempts}
        dumps: list[JSON] = []
        async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE, headers=self._world.headers) as http:
            for agent_id in sorted(filter(None, named)):
                answer = await http.get(f"{url}/v1/chains/{agent_id}", params={"format": "json"})
                answer.raise_for_status()
                dumps.append(answer.json())
        return dumps

    def _numbers(self, dumps: Sequence[JSON]) -> dict[str, int]:
        """Which turn of the history each turn of a dump is, by its words where no client was told its id."""
        told = {
            attempt.headers["x-turn-id"]: number
            for number, attempts in self._attempts.items()
            for attempt in attempts
            if "x-turn-id" in attempt.headers
        }
        turns = (turn for dump in dumps for turn in dump["turns"])
        marks = ((turn["id"], TURN.search(json.dumps(turn["input"]))) for turn in turns)
        read = {turn_id: int(mark[1]) for turn_id, mark in marks if mark is not None}
        return {turn_id: number for turn_id, number in read.items() if number not in told.values()} | told

    async def _stop(self) -> None:
        for proxy in self._world.proxies:
            proxy.stop()
        await asyncio.gather(*(self._stopped(proxy, proxy.mark) for proxy in self._world.proxies))
