"""`turnfault chaos`: random histories on any target, each turn judged as it arrives, and what fails made small.

A history is a list of steps made from a seed before anything runs, so that it can be printed, run again and shrunk: any
part of a history is one. Every agent of it is a new one. A turn whose client had an error is doubtful: it may be on the
path once, or not. Everything acknowledged must be there once, in order, in its role, and nothing of anybody else.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import secrets
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from .bench import Options, Say, target_of
from .errors import TargetError
from .faults import Lab, NotHereError, behaviour, reached, six_at_once, transcript
from .provider.upstream import Upstream
from .running import Trace, bounded, provider, shown
from .score import FAULTS, Fact, Score
from .shrinking import fewest
from .talk import RequestRefused
from .targets.base import Surface, Target

SCHEMA = "turnfault/history/1"
# Seconds that one history may take.
LIMIT = 600.0
LENGTH = 20
AGENTS = 3

Kind = Literal[
    "says",  # an ordinary turn
    "leaves",  # the client goes away while it waits
    "at once",  # several turns at the same time
    "fails",  # the provider fails once; what it calls a mistake of the client's (400), each time
    "restart",
    "kill",
    "kill answering",  # the target is killed while it answers
    "kill cli",  # its CLI is, while it answers
    "damage",  # a transcript
    "model",
]
FAILURES: tuple[Mapping[str, Any], ...] = (
    {"status": 400},
    {"status": 500},
    {"status": 529},
    {"cut": True},
    {"error_event": True},
)
DAMAGES = ("delete", "empty", "cut_the_last_line", "remove_a_middle_line", "wipe")
MODELS = ("haiku", "opus", "sonnet")
NEEDS: Mapping[Kind, Surface] = {
    "restart": "process", "kill": "process", "kill answering": "process", "kill cli": "process", "damage": "files",
    "at once": "id",
}  # fmt: skip
OFTEN: Mapping[Kind, int] = {"says": 8, "leaves": 2, "fails": 3}


@dataclass(frozen=True, slots=True)
class Step:
    """`how`: of the provider's failures, damages or models, which one."""

    kind: Kind
    agent: int
    how: int = 0

    def __str__(self) -> str:
        more = {"fails": FAILURES, "damage": DAMAGES, "model": MODELS}.get(self.kind)
        return f"agent {self.agent}: {self.kind}" + (f" {more[self.how % len(more)]}" if more else "")


@dataclass(frozen=True, slots=True)
class Found:
    """A broken promise: at the step of this number (one more than there are: in the end), by this agent."""

    kinds: tuple[str, ...]
    step: int
    agent: int
    says: str
    trace: Trace = field(default_factory=list, repr=False)


def history(seed: int, surfaces: frozenset[Surface], length: int = LENGTH) -> list[Step]:
    """The steps that this target can be put through."""
    dice = random.Random(seed)
    kinds = [kind for kind in get_args(Kind) if kind not in NEEDS or NEEDS[kind] in surfaces]
    chosen = dice.choices(kinds, [OFTEN.get(kind, 1) for kind in kinds], k=length)
    return [Step(kind, dice.randrange(AGENTS), dice.randrange(60)) for kind in chosen]


class World:
    """One history on one target."""

    def __init__(self, target: Target, upstream: Upstream, seed: int) -> None:
        self.target = target
        self.upstream = upstream
        self._dice = random.Random(f"{seed} chaos")
        self._named = secrets.token_hex(4)
        self._numbers = itertools.count()
        self._labs: dict[int, Lab] = {}
        self._log: Trace = []

    async def run(self, steps: Sequence[Step]) -> Found | None:
        """The first broken promise. In the end each agent is asked once more, with nothing in its way."""
        self.upstream.forget()
        for number, step in enumerate(steps):
            self._log.append({"event": "step", "number": number, "what": str(step)})
            with suppress(NotHereError):
                found = self._judged(number, step.agent, await self._happens(step))
                if found is not None:
                    return found
        self.upstream.heal()
        for agent in list(self._labs):
            score = await self._says(agent)
            if score.refused is not None:  # once more: the first one may have met what a kill left
                score = await self._says(agent)
            if score.refused is not None:
                return Found(("unserved",), len(steps), agent, f"no answer in the end ({score.refused})", self._trace())
            found = self._judged(len(steps), agent, score)
            if found is not None:
                return found
        return None

    def _lab(self, agent: int) -> Lab:
        if agent not in self._labs:
            name = f"chaos-{self._named}-{next(self._numbers)}"
            talk = self.target.talk(name, by_id="id" in self.target.surfaces)
            talk.dice, talk.log = self._dice, self._log
            self._labs[agent] = Lab(name, self.target, self.upstream, talk)
        return self._labs[agent]

    async def _happens(self, step: Step) -> Score | None:
        """The score of the step's last turn, where it has one."""
        lab = self._lab(step.agent)
        match step.kind:
            case "says":
                return await self._says(step.agent)
            case "model":
                lab.talk.model = MODELS[step.how % len(MODELS)]
                return await self._says(step.agent)
            case "fails":
                fact = lab.talk.new_fact()
                how = FAILURES[step.how % len(FAILURES)]
                self.upstream.when(fact.key, behaviour(lab, **how), times=None if how.get("status") == 400 else 1)
                score = await self._says(step.agent, fact)
                self.upstream.heal()
                return score
            case "at once":
                try:
                    await six_at_once(lab)
                except RequestRefused:  # of which of them is not known: somebody new takes this agent's place
                    del self._labs[step.agent]
                    return None
                return await self._says(step.agent)
            case "restart" | "kill":
                await lab.restart(kill=step.kind == "kill")
            case "damage":
                if lab.talk.facts:
                    await transcript(lab, DAMAGES[step.how % len(DAMAGES)], restarted="process" in self.target.surfaces)
            case "leaves" | "kill answering" | "kill cli":
                return await self._interrupted(step.kind, step.agent)
        return None

    async def _says(self, agent: int, fact: Fact | None = None) -> Score:
        talk = self._lab(agent).talk
        fact = fact or talk.new_fact()
        score = await talk.probe(fact)
        if score.refused is not None:
            talk.doubtful.append(fact)
        return score

    async def _interrupted(self, kind: Kind, agent: int) -> Score:
        lab, fact = self._lab(agent), self._lab(agent).talk.new_fact()
        gate = lab.held()
        self.upstream.when(fact.key, gate, times=None)
        if kind == "leaves":
            lab.talk.leave_after = gate.reached
        saying = asyncio.ensure_future(self._says(agent, fact))
        await reached(gate, saying)
        if kind == "kill answering":
            lab.note("killed")
            await self.target.down(kill=True)
        elif kind == "kill cli":
            lab.note("its CLI killed")
            self.target.kill_clis()
        gate.open()
        score = await saying
        lab.talk.leave_after = None
        self.upstream.heal()
        if kind == "kill answering":
            await self.target.up()
        return score

    def _judged(self, number: int, agent: int, score: Score | None) -> Found | None:
        if score is None or score.refused is not None or score.whole:
            return None
        kinds = tuple(name for name in (*FAULTS, "flattened") if getattr(score, name))
        return Found(kinds, number, agent, str(score), self._trace())

    def _trace(self) -> Trace:
        return bounded([*self._log, *shown(self.upstream.requests)])


async def chaos(
    wanted: Options,
    say: Say,
    *,
    minutes: float,
    seed: int,
    length: int = LENGTH,
    replay: Path | None = None,
    output: Path | None = None,
) -> list[dict[str, Any]]:
    """The reports of what failed, each as small as it was made. Raises `TargetError`."""
    until, reports, ran = time.monotonic() + minutes * 60, [], 0
    with tempfile.TemporaryDirectory(prefix="turnfault-", ignore_cleanup_errors=True) as folder:
        async with provider(wanted.upstream_port) as upstream:
            target = target_of(wanted.placed(Path(folder)), upstream, Path(folder))
            await target.up()
            try:
                for at, steps in _histories(target, seed, length, replay):
                    found = await _one(target, upstream, at, steps)
                    ran += 1
                    say(f"history {at}, {len(steps)} steps: {'sound' if found is None else found}")
                    if found is not None:
                        report = await _shrunk(target, upstream, at, steps, found, say, until)
                        reports.append({"schema": SCHEMA, "target": wanted.called, "seed": at, **report})
                        if output is not None:
                            await asyncio.to_thread(_write, output / f"history-{at}.json", reports[-1])
                    if time.monotonic() > until:
                        break
            finally:
                await target.down()
    say(f"{ran} histories, {len(reports)} of them break a promise")
    return reports


def _histories(target: Target, seed: int, length: int, replay: Path | None) -> Iterator[tuple[int, list[Step]]]:
    if replay is None:
        while True:
            yield seed, history(seed, target.surfaces, length)
            seed += 1
    try:
        data = json.loads(replay.read_text(encoding="utf-8"))
        yield data["seed"], [Step(one["kind"], one["agent"], one["how"]) for one in data["steps"]]
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise TargetError(f"{replay} is no history of turnfault: {exc}") from exc


async def _one(target: Target, upstream: Upstream, seed: int, steps: Sequence[Step]) -> Found | None:
    try:
        async with asyncio.timeout(LIMIT):
            return await World(target, upstream, seed).run(steps)
    except TimeoutError:
        return Found(("hung",), len(steps), 0, "no end in time")
    finally:
        upstream.heal()


async def _shrunk(
    target: Target, upstream: Upstream, seed: int, steps: list[Step], found: Found, say: Say, until: float
) -> dict[str, Any]:
    """The fewest steps that still show a fault of these kinds, as far as there is time for it."""

    async def failing(part: list[int]) -> Found | None:
        if time.monotonic() > until:
            return None
        again = await _one(target, upstream, seed, [steps[number] for number in part])
        return again if again is not None and set(again.kinds) & set(found.kinds) else None

    steps = steps[: found.step + 1]
    smaller = await fewest(len(steps), failing, lambda part, one: say(f"  {len(part)} steps: {one.says}"))
    kept, shows = (list(range(len(steps))), found) if smaller is None else smaller
    script = [steps[number] for number in kept]
    say("\n".join(f"  {number}. {step}" for number, step in enumerate(script, 1)))
    return {
        "steps": [asdict(step) for step in script], "fault": {"kinds": list(shows.kinds), "says": shows.says},
        "trace": shows.trace,
    }  # fmt: skip


def _write(file: Path, report: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
