"""A history: who talks, and what happens, step by step. Made from a seed before anything runs, so that it can be
printed, run again and shrunk.

Steps run in order. One that names a turn or a proxy that is not there does nothing, so that any part of a history is
a history. Times in a step are part of what happens (a pause, a kill some milliseconds after a request), never a way to
wait for something.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

from ..release.keeping import SPEAKERS, TURNS
from .client import Again, Edit, Naming, Speaker
from .doors import WIRES, WITH_HISTORY, WITH_IDS, Wire
from .model import LIMITS, FaultKind, Hold

Cli = Literal["2", "1"]
Damage = Literal["delete", "empty", "truncate", "cut last line", "flip", "swap"]
DAMAGES: tuple[Damage, ...] = ("delete", "empty", "truncate", "cut last line", "flip", "swap")
FAULTS: tuple[FaultKind, ...] = ("500", "529", "429", "cut", "event", "stall", "broken")
HOLDS: tuple[Hold, ...] = ("start", "words", "end")

# Longer than a lease: another proxy takes the paused one's agents over.
LONG_PAUSE = 20.0
SHORT_PAUSE = 1.5
# Shorter than a lease, and longer than the store's clients wait for a connection.
MIDDLE_PAUSE = 8.0
# Seconds by which a host's clock goes wrong: less than an idempotency key lives.
SKEWS = (-7200.0, -30.0, 30.0, 7200.0)
# What an interface of a host leads to, which it can be cut off from: PostgreSQL, Redis, the other hosts.
Network = Literal["store", "registry", "peers"]
# How the database server goes away: its fast shutdown, or kill -9.
Ending = Literal["restart", "kill"]
# Characters of a long answer: more than the kernel holds for a slow reader (4 MiB, tcp_wmem).
LONG_ANSWER = 5_000_000


@dataclass(frozen=True, slots=True)
class Shape:
    """What kind of history. `wrapper`: the CLI is behind a script that does not `exec` it. `hosts`: each proxy is on a
    host of its own, and the chains are in PostgreSQL (see `cluster`). `wide`: every wire, pictures, edited histories,
    rewinding, deleting and moving of chains. `agents`: so many of them; 0: two or three. `release`: the chains were
    begun by the release before. `long`: plain turns, with a compaction and a proxy that dies in each hundred."""

    proxies: int = 1
    tools: bool = False
    cli: Cli = "2"
    wrapper: bool = False
    length: int = 20
    pauses: bool = True
    # Not in the text that older seeds are made of:
    hosts: bool = field(default=False, repr=False)
    wide: bool = field(default=False, repr=False)
    agents: int = field(default=0, repr=False)
    release: bool = field(default=False, repr=False)
    long: bool = field(default=False, repr=False)


@dataclass(frozen=True, slots=True)
class Say:
    """Agent `agent` says something new at a proxy.

    The step ends with the attempt, or when the upstream holds the answer; with `wait` off it ends at once.
    `leave_after`: the client leaves so many seconds after it sent the request. `wire`, `edit`: see `Client.next`.
    `picture`: the prompt shows one. `full`: the context is full with the answer.
    """

    turn: int
    agent: int
    proxy: int
    keyed: bool = False
    calls: int = 0
    fault: FaultKind | None = None
    hold: Hold | None = None
    wait: bool = True
    back: int = 0
    slow: bool = False
    size: int = 240
    leave_after: float | None = None
    wire: Wire | None = None
    edit: Edit | None = None
    picture: bool = False
    full: bool = False


@dataclass(frozen=True, slots=True)
class Repeat:
    """The request of a turn once more. `how`: under its key, as an SDK's retry, or as it is.

    The step ends with the attempt; with `wait` off at once, or with `attached` when the chain says that somebody waits
    for the answer again.
    """

    turn: int
    proxy: int
    how: Again = "key"
    wait: bool = True
    attached: bool = False


@dataclass(frozen=True, slots=True)
class Leave:
    """The client of a turn disconnects. `noticed`: the step ends when the chain says that the answer did not arrive."""

    turn: int
    noticed: bool = False


@dataclass(frozen=True, slots=True)
class Open:
    """The upstream goes on with a turn that it holds."""

    turn: int


@dataclass(frozen=True, slots=True)
class Join:
    """Wait for every attempt of a turn, or of all."""

    turn: int | None = None


@dataclass(frozen=True, slots=True)
class Kill:
    """kill -9 of a proxy. `after`: seconds since the step before."""

    proxy: int
    after: float = 0.0


@dataclass(frozen=True, slots=True)
class Terminate:
    """SIGTERM of a proxy; the step ends when it has begun to stop."""

    proxy: int


@dataclass(frozen=True, slots=True)
class Start:
    """A proxy that ended starts again."""

    proxy: int


@dataclass(frozen=True, slots=True)
class Pause:
    """SIGSTOP of a proxy."""

    proxy: int


@dataclass(frozen=True, slots=True)
class Wake:
    """SIGCONT, when it was paused for `seconds`."""

    proxy: int
    seconds: float = LONG_PAUSE


@dataclass(frozen=True, slots=True)
class KillCli:
    """kill -9 of every CLI of a proxy."""

    proxy: int
    after: float = 0.0


@dataclass(frozen=True, slots=True)
class Spoil:
    """Damage to the newest transcript of an agent. `swap` exchanges it with the one of `other`. `after`: seconds since
    the step before."""

    agent: int
    damage: Damage
    other: int = 0
    after: float = 0.0


@dataclass(frozen=True, slots=True)
class Cut:
    """A host's packets on this network, to it and from it, are lost from now on."""

    proxy: int
    network: Network = "store"


@dataclass(frozen=True, slots=True)
class Mend:
    """They arrive again, when they were lost for `seconds`."""

    proxy: int
    network: Network = "store"
    seconds: float = LONG_PAUSE


@dataclass(frozen=True, slots=True)
class Database:
    """The database server ends, and starts again after `seconds`."""

    how: Ending
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Registry:
    """Redis is killed, and starts again, empty, after `seconds`."""

    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Rewind:
    """The last `turns` turns of a named agent are taken off its path, at a moment when it is asked nothing."""

    agent: int
    proxy: int
    turns: int = 1


@dataclass(frozen=True, slots=True)
class Delete:
    """A named agent is deleted, at a moment when it is asked nothing: its next turn begins a chain."""

    agent: int
    proxy: int


@dataclass(frozen=True, slots=True)
class Carry:
    """A named agent is exported, deleted, and imported again: its conversation goes on."""

    agent: int
    proxy: int


@dataclass(frozen=True, slots=True)
class Expire:
    """Nobody has used a named agent for longer than chains are kept: it is gone when the proxy has started again."""

    agent: int
    proxy: int


@dataclass(frozen=True, slots=True)
class Commit:
    """A named agent's attempt is committed: the next one that it begins is told of it."""

    turn: int
    agent: int
    proxy: int


@dataclass(frozen=True, slots=True)
class Skew:
    """A host's clock is wrong by so many seconds from now on."""

    proxy: int
    seconds: float


Step = (
    Say
    | Repeat
    | Leave
    | Open
    | Join
    | Kill
    | Terminate
    | Start
    | Pause
    | Wake
    | KillCli
    | Spoil
    | Cut
    | Mend
    | Database
    | Registry
    | Skew
    | Rewind
    | Delete
    | Carry
    | Expire
    | Commit
)


@dataclass(frozen=True, slots=True)
class History:
    seed: int
    shape: Shape
    speakers: tuple[Speaker, ...]
    steps: tuple[Step, ...]

    def only(self, steps: Sequence[int]) -> History:
        return replace(self, steps=tuple(self.steps[at] for at in steps))

    def lines(self) -> Iterator[str]:
        """As `read` takes it."""
        yield f"- {told(self.shape)}"
        for at, part in [*enumerate(self.speakers), *enumerate(self.steps)]:
            yield f"{at:3} {told(part)}"


def told(part: Step | Speaker | Shape) -> str:
    """In one line: what differs from the defaults."""
    said = [
        f"{field.name}={getattr(part, field.name)!r}"
        for field in fields(part)
        if getattr(part, field.name) != field.default
    ]
    return f"{type(part).__name__}({', '.join(said)})"


_TOLD = re.compile(r"^(?:-| *\d+) (\w+\(.*\))$", re.MULTILINE)
_PARTS = {one.__name__: one for one in (Shape, Speaker, *get_args(Step))}


def read(text: str, seed: int) -> History:
    """The history of a printed report, whatever the seed would make today."""
    parts = [_part(found) for found in _TOLD.findall(text)]
    [shape] = [part for part in parts if isinstance(part, Shape)]
    speakers = tuple(part for part in parts if isinstance(part, Speaker))
    return History(seed, shape, speakers, tuple(part for part in parts if isinstance(part, Step)))


def _part(said: str) -> Any:
    call = ast.parse(said, mode="eval").body
    assert isinstance(call, ast.Call)
    assert isinstance(call.func, ast.Name)
    given = {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}
    return _PARTS[call.func.id](**given)


# --- made at random -----------------------------------------------------------------------------------------

NAMES = ("ada", "Bo b/ß", "cy", "dee", "eve")


def made(seed: int, shape: Shape) -> History:
    """The history of this seed: the same for the same shape, for ever."""
    return _Maker(seed, shape).history()


class _Maker:
    """Chooses scenes of a few steps each until there are enough, some of them entangled with another agent's."""

    def __init__(self, seed: int, shape: Shape) -> None:
        self._seed = seed
        self._shape = shape
        self._dice = random.Random(f"{seed} {shape}" + " hosts" * shape.hosts + f" {shape.agents}" * (shape.agents > 0))
        self._turns = 0
        self._up = set(range(shape.proxies))
        names = NAMES[: self._dice.randint(2, 3)]
        if shape.agents:
            names = tuple(f"agent {number}" for number in range(shape.agents))
        self._speakers = tuple(self._speaker(name) for name in names)
        if shape.release:
            self._speakers, self._turns = SPEAKERS, len(SPEAKERS) * TURNS

    def history(self) -> History:
        steps: list[Step] = [self._say(agent) for agent in range(len(self._speakers))]
        while self._shape.long and len(steps) < self._shape.length:
            steps += self._hundred(self._agent())
        while len(steps) < self._shape.length:
            scene = self._scene()(self._agent())
            if self._dice.random() < 0.3:
                scene = self._entangled(scene, self._calm(self._agent()))
            steps += scene
            if self._dice.random() < 0.5:
                steps += self._calm(self._agent())
        return History(self._seed, self._shape, self._speakers, tuple(steps))

    def _speaker(self, name: str) -> Speaker:
        dice = self._dice
        naming: Naming = dice.choice(("name", "name", "name", "history", "both", "ids"))
        wires: tuple[Wire, ...] = ("responses",) if naming == "ids" else ("chat", "messages")
        if naming == "name":
            wires = ("chat", "responses", "messages")
        if self._shape.wide:
            wires = WITH_IDS if naming == "ids" else WIRES if naming == "name" else WITH_HISTORY
        wire, stream = dice.choice(wires), dice.random() < 0.7
        tools = self._shape.tools and dice.random() < 0.8
        return Speaker(name, naming, wire, stream, tools, self._shape.hosts and dice.random() < 0.3)

    def _scene(self) -> Callable[[int], list[Step]]:
        scenes = [
            (self._calm, 3), (self._several_at_once, 2), (self._killed_in_mid_answer, 4), (self._killed_at_random, 4),
            (self._left_and_came_again, 4), (self._cli_killed, 2), (self._spoilt, 4), (self._upstream_fails, 3),
            (self._stopped, 1), (self._branched, 1), (self._slow_reader, 1), (self._replayed, 1), (self._refused, 3),
        ]  # fmt: skip
        if self._shape.pauses:
            scenes.append((self._paused, 2))
        if self._shape.hosts:
            scenes += [(self._cut_off, 4), (self._database_gone, 3), (self._clock_skewed, 2)]
            scenes += [(self._alone, 5), (self._registry_gone, 2)]
        if self._shape.tools:
            scenes += [(self._tool_loop, 4), (self._killed_at_calls, 5)]
        if self._shape.wide:
            scenes += [(self._edited, 4), (self._rewound, 3), (self._deleted, 1), (self._carried, 1)]
            scenes += [(self._by_other_doors, 2), (self._fallen_back, 3), (self._committed, 2)]
            if self._shape.cli == "2":  # 1.0.120 sums the newest prompt up as well: the proxy does it itself
                scenes.append((self._compacted, 3))
            if not self._shape.hosts:
                scenes += [(self._clock_skewed, 2), (self._expired, 1)]
        return self._dice.choices([scene for scene, _ in scenes], [weight for _, weight in scenes])[0]

    # --- the parts

    def _agent(self) -> int:
        return self._dice.randrange(len(self._speakers))

    def _proxy(self, other_than: int | None = None) -> int:
        up = sorted(self._up - {other_than}) or sorted(self._up) or [0]
        return self._dice.choice(up)

    def _say(self, agent: int, **more: object) -> Say:
        self._turns += 1
        calls = 0
        if self._speakers[agent].tools and "calls" not in more and self._dice.random() < 0.3:
            calls = self._dice.randint(1, 3)
        given: dict[str, object] = {"proxy": self._proxy(), "keyed": self._dice.random() < 0.5, "calls": calls}
        if self._shape.wide:
            if self._dice.random() < 0.3:
                given["wire"] = self._dice.choice(self._wires(self._speakers[agent]))
            given["picture"] = self._dice.random() < 0.2
        return Say(self._turns, agent, **(given | more))  # type: ignore[arg-type]

    def _wires(self, speaker: Speaker) -> tuple[Wire, ...]:
        """By which a client may go on that began with another wire. generateContent has results as objects: told in
        the history of another wire they are other words."""
        if speaker.naming == "name":
            return WIRES
        if not speaker.tools:
            return WITH_HISTORY
        return ("generate",) if speaker.wire == "generate" else ("chat", "messages", "ollama")

    def _repeat(self, say: Say, *, other_than: int | None = None, wait: bool = True) -> Repeat:
        how: Again = "key" if say.keyed else self._dice.choice(("count", "count", "plain"))
        return Repeat(say.turn, self._proxy(other_than), how, wait)

    def _down(self, proxy: int) -> None:
        self._up.discard(proxy)

    def _back(self, proxy: int) -> list[Step]:
        self._up.add(proxy)
        return [Start(proxy)]

    def _entangled(self, one: list[Step], other: list[Step]) -> list[Step]:
        """Both in their own order, mixed; what waits in one must not wait for the other."""
        out: list[Step] = []
        left, right = list(one), list(other)
        while left or right:
            source = left if not right or (left and self._dice.random() < 0.6) else right
            out.append(source.pop(0))
        return out

    # --- scenes

    def _calm(self, agent: int) -> list[Step]:
        return [self._say(agent) for _ in range(self._dice.randint(1, 2))]

    def _hundred(self, agent: int) -> list[Step]:
        say = self._say(agent, wait=False)
        full = self._dice.randrange(97)
        steps: list[Step] = [self._say(agent, full=at == full) for at in range(97)]
        spoil: list[Step] = [Spoil(agent, self._dice.choice(DAMAGES))] * (self._dice.random() < 0.5)
        return [
            *steps,
            say,
            Kill(say.proxy, after=round(self._dice.uniform(0, 0.2), 3)),
            *spoil,
            Start(say.proxy),
            Join(),
        ]

    def _several_at_once(self, agent: int) -> list[Step]:
        said: list[Step] = [self._say(agent, wait=False, calls=0) for _ in range(self._dice.randint(2, 4))]
        return [*said, Join()]

    def _killed_in_mid_answer(self, agent: int) -> list[Step]:
        """The proxy dies while the upstream holds the answer; the client comes again, goes on, or both."""
        say = self._say(agent, hold=self._dice.choice(HOLDS), wait=True)
        steps: list[Step] = [say]
        if self._dice.random() < 0.3:
            steps.append(self._say(agent, wait=False, calls=0, proxy=self._proxy()))
        steps.append(Kill(say.proxy))
        self._down(say.proxy)
        if not self._up or self._dice.random() < 0.5:
            steps += self._back(say.proxy)
        if self._dice.random() < 0.3:
            steps.append(Open(say.turn))
        if self._dice.random() < 0.7:
            steps.append(self._repeat(say, wait=False))
        steps += [Open(say.turn), Join(say.turn)]
        if say.proxy not in self._up:
            steps += [*self._calm(agent), *self._back(say.proxy)]
        return steps

    def _killed_at_random(self, agent: int) -> list[Step]:
        say = self._say(agent, wait=False)
        steps: list[Step] = [say, Kill(say.proxy, after=round(self._dice.uniform(0, 0.4), 3))]
        self._down(say.proxy)
        steps += self._back(say.proxy) if not self._up or self._dice.random() < 0.5 else []
        steps += [self._repeat(say)] if self._dice.random() < 0.7 else []
        steps += self._calm(agent)
        return steps + (self._back(say.proxy) if say.proxy not in self._up else [])

    def _left_and_came_again(self, agent: int) -> list[Step]:
        say = self._say(agent, hold=self._dice.choice(HOLDS))
        steps: list[Step] = [say, Leave(say.turn, noticed=self._dice.random() < 0.5)]
        waiting = self._dice.random()
        if waiting < 0.4:
            steps.append(self._say(agent, wait=False, calls=0))
        again = self._repeat(say, other_than=say.proxy if self._dice.random() < 0.6 else None, wait=False)
        steps.append(replace(again, attached=self._dice.random() < 0.5))
        if waiting > 0.8:
            steps.append(self._say(agent, wait=False, calls=0))
        return [*steps, Open(say.turn), Join(), self._say(agent)]

    def _cli_killed(self, agent: int) -> list[Step]:
        if self._dice.random() < 0.3:
            return [KillCli(self._proxy()), self._say(agent)]
        say = self._say(agent, hold=self._dice.choice(HOLDS))
        steps: list[Step] = [say, KillCli(say.proxy), Open(say.turn), Join(say.turn)]
        return [*steps, self._repeat(say), self._say(agent)]

    def _spoilt(self, agent: int) -> list[Step]:
        spoil = Spoil(agent, self._dice.choice(DAMAGES), self._agent())
        chosen = self._dice.random()
        if chosen < 0.3:  # while a CLI is started for the session, or has just loaded it
            later = replace(spoil, after=round(self._dice.uniform(0, 0.8), 3))
            say = self._say(agent, wait=False)
            return [KillCli(say.proxy), say, later, Join(say.turn), self._say(agent)]
        if chosen < 0.5:
            return [spoil, self._say(agent)]
        if chosen < 0.65:
            return [KillCli(self._proxy()), spoil, self._say(agent)]
        say = self._say(agent, hold=self._dice.choice(HOLDS), wait=self._dice.random() < 0.6)
        return [say, spoil, Open(say.turn), Join(say.turn), self._say(agent)]

    def _upstream_fails(self, agent: int) -> list[Step]:
        say = self._say(agent, fault=self._dice.choice(FAULTS))
        return [say, *([self._repeat(say)] if self._dice.random() < 0.5 else []), self._say(agent)]

    def _refused(self, agent: int) -> list[Step]:
        """The model refuses a prompt, or the results of its own calls, perhaps while its CLI or its proxy dies."""
        calls = self._speakers[agent].tools and self._dice.random() < 0.6
        steps: list[Step] = [self._say(agent, calls=self._dice.randint(1, 3))] if calls else []
        say = self._say(agent, calls=0, fault="refusal", hold=self._dice.choice((None, None, *HOLDS)))
        steps.append(say)
        dies = self._dice.random()
        steps += _deaths(say, dies)
        steps += [Open(say.turn), Join(say.turn)]
        if self._dice.random() < 0.4:
            steps.append(self._repeat(say))
        return [*steps, self._say(agent, calls=0), self._say(agent)]

    def _stopped(self, agent: int) -> list[Step]:
        say = self._say(agent, wait=self._dice.random() < 0.5, hold=self._dice.choice((None, *HOLDS)))
        steps: list[Step] = [say, Terminate(say.proxy)]
        self._down(say.proxy)
        steps += self._back(say.proxy) if not self._up else []
        return [*steps, self._repeat(say, wait=False), Open(say.turn), Join(), *self._back(say.proxy), self._say(agent)]

    def _branched(self, agent: int) -> list[Step]:
        """Back to an older turn, where the client names what it continues; else it is one more turn."""
        return [self._say(agent), self._say(agent), self._say(agent, back=self._dice.randint(1, 2)), self._say(agent)]

    def _slow_reader(self, agent: int) -> list[Step]:
        """A client that takes a long answer slowly; another turn builds on it; it leaves and comes again."""
        say = self._say(agent, slow=True, size=LONG_ANSWER, keyed=True, calls=0)
        goes_on = self._say(agent, wait=self._dice.random() < 0.7, calls=0)
        leave = Leave(say.turn, noticed=self._dice.random() < 0.5)
        return [say, goes_on, leave, Repeat(say.turn, self._proxy()), Join(), self._say(agent)]

    def _replayed(self, agent: int) -> list[Step]:
        say = self._say(agent, keyed=True)
        return [say, Repeat(say.turn, self._proxy()), self._say(agent), Repeat(say.turn, self._proxy())]

    def _paused(self, agent: int) -> list[Step]:
        """A proxy stands still, perhaps in mid-answer, while the others are asked; then it goes on."""
        say = self._say(agent, hold=self._dice.choice((None, *HOLDS)), wait=self._dice.random() < 0.7)
        paused = say.proxy
        steps: list[Step] = [say, Pause(paused)]
        seconds = LONG_PAUSE if len(self._up) > 1 and self._dice.random() < 0.6 else SHORT_PAUSE
        self._down(paused)
        if self._up:
            if self._dice.random() < 0.5:
                steps += [Leave(say.turn), self._repeat(say, wait=False)]
            steps.append(self._say(agent, wait=False, calls=0))
            steps.append(self._say(self._agent(), wait=seconds == LONG_PAUSE))
        if self._dice.random() < 0.5:
            steps.append(Open(say.turn))
        self._up.add(paused)
        return [*steps, Wake(paused, seconds), Open(say.turn), Join(), self._say(agent, proxy=paused), self._say(agent)]

    def _cut_off(self, agent: int) -> list[Step]:
        """A host does not reach the store, perhaps in mid-answer, while it and the others are asked."""
        say = self._say(agent, hold=self._dice.choice((None, *HOLDS)), wait=self._dice.random() < 0.7)
        cut = say.proxy
        steps: list[Step] = [say, Cut(cut)]
        if self._dice.random() < 0.3:
            steps.append(self._say(agent, proxy=cut, wait=False, calls=0))
        self._down(cut)
        if self._up:
            if self._dice.random() < 0.5:
                steps += [Leave(say.turn), self._repeat(say, wait=False)]
            steps.append(self._say(agent, wait=False, calls=0))
        if self._dice.random() < 0.5:
            steps.append(Open(say.turn))
        self._up.add(cut)
        seconds = self._dice.choice((LONG_PAUSE, LONG_PAUSE, MIDDLE_PAUSE, SHORT_PAUSE))
        end: list[Step] = [Open(say.turn), Join(), self._say(agent, proxy=cut), self._say(agent)]
        return [*steps, Mend(cut, seconds=seconds), *end]

    def _alone(self, agent: int) -> list[Step]:
        """A host does not reach the others, or Redis, while it has the agent warm: what comes in elsewhere cannot be
        passed on to it, or the answer of what was passed on is lost on its way."""
        network: Network = self._dice.choice(("peers", "peers", "registry"))
        say = self._say(agent, hold=self._dice.choice((None, *HOLDS)), wait=self._dice.random() < 0.7)
        passed = self._say(agent, hold=self._dice.choice((None, *HOLDS)), proxy=self._proxy(other_than=say.proxy))
        steps: list[Step] = [say]
        if self._dice.random() < 0.5:  # under way when the packets are lost
            steps += [Open(say.turn), Join(say.turn), passed, Cut(say.proxy, network)]
        else:
            steps += [Cut(say.proxy, network), replace(passed, wait=False)]
        if self._dice.random() < 0.4:
            steps += [Leave(passed.turn), self._repeat(passed, wait=False)]
        steps += [Open(say.turn), Open(passed.turn)]
        if self._dice.random() < 0.5:
            steps += [Join(passed.turn), *self._calm(agent)]
        seconds = self._dice.choice((LONG_PAUSE, MIDDLE_PAUSE, SHORT_PAUSE))
        mended: list[Step] = [Mend(say.proxy, network, seconds), Join()]
        again = [self._repeat(passed)] if self._dice.random() < 0.5 else []
        return [*steps, *mended, *again, self._say(agent, proxy=say.proxy), self._say(agent)]

    def _registry_gone(self, agent: int) -> list[Step]:
        """Redis forgets who has the agent, perhaps while the turn that was passed on runs."""
        first = self._say(agent)
        say = self._say(agent, hold=self._dice.choice((None, *HOLDS)), proxy=self._proxy(other_than=first.proxy))
        gone = Registry(self._dice.choice((0.0, SHORT_PAUSE)))
        return [first, say, gone, Open(say.turn), Join(say.turn), self._say(agent), self._say(agent)]

    def _database_gone(self, agent: int) -> list[Step]:
        """The database server ends while a turn runs, and while others are accepted."""
        say = self._say(agent, hold=self._dice.choice((None, *HOLDS)), wait=self._dice.random() < 0.6)
        steps: list[Step] = [say]
        if self._dice.random() < 0.4:
            steps += [self._say(self._agent(), wait=False, calls=0), Open(say.turn)]
        steps.append(Database(self._dice.choice(get_args(Ending)), self._dice.choice((0.0, SHORT_PAUSE, LONG_PAUSE))))
        steps += [Open(say.turn), Join()]
        return [*steps, *([self._repeat(say)] if self._dice.random() < 0.6 else []), self._say(agent), self._say(agent)]

    def _clock_skewed(self, agent: int) -> list[Step]:
        """A host's clock jumps while it holds the agent; the conversation goes on there and elsewhere."""
        say = self._say(agent, hold=self._dice.choice((None, "words")), calls=0)
        skew = Skew(say.proxy, self._dice.choice(SKEWS))
        steps: list[Step] = [say, skew, Open(say.turn), Join(say.turn), self._say(agent, proxy=say.proxy, calls=0)]
        # A retry without a key is one for some minutes, by the store's clock: on one host that is the one that jumped.
        again = [self._repeat(say)] if self._shape.hosts or say.keyed else []
        return [*steps, self._say(agent), *again, self._say(agent)]

    def _tool_loop(self, agent: int) -> list[Step]:
        steps: list[Step] = []
        for _ in range(self._dice.randint(1, 3)):
            steps.append(self._say(agent, calls=self._dice.randint(1, 3)))
            if self._dice.random() < 0.3:
                steps.append(KillCli(self._proxy()))
        return [*steps, self._say(agent, calls=0), self._say(agent, calls=0)]

    def _killed_at_calls(self, agent: int) -> list[Step]:
        """The proxy dies as calls are made, while they wait, while their results run, or after those."""
        calls = self._dice.randint(1, 3)
        say = self._say(agent, calls=calls, **({"hold": "end"} if self._dice.random() < 0.2 else {}))
        where = self._dice.choice(("as made", "waiting", "results", "after"))
        other = self._proxy(other_than=say.proxy)
        kill: list[Step] = [Kill(say.proxy, after=round(self._dice.uniform(0, 0.15), 3) if where == "as made" else 0.0)]
        alone = self._up == {say.proxy}
        if alone:
            kill.append(Start(say.proxy))
        if where == "as made":
            say = replace(say, wait=say.hold is not None)
            steps = [say, *kill, Open(say.turn), Join(say.turn), self._repeat(say, other_than=say.proxy)]
        elif where == "waiting":
            steps = [say, *kill]
        else:
            result = self._say(agent, calls=0, proxy=other, hold=None if where == "after" else "words")
            steps = [
                say,
                result,
                *kill,
                Open(result.turn),
                Join(result.turn),
                self._repeat(result, other_than=say.proxy),
            ]
        steps += [self._say(agent, calls=0, proxy=other), self._say(agent, calls=0, proxy=other)]
        return steps if alone else [*steps, Start(say.proxy)]

    # what only wide histories have

    def _edited(self, agent: int) -> list[Step]:
        """The client changes the history that it brings, perhaps twice at once, and goes on from it."""
        steps: list[Step] = [self._say(agent), self._say(agent), self._say(agent, calls=0)]
        edit: Edit = self._dice.choice(get_args(Edit))
        if self._dice.random() < 0.3:
            twins = [self._say(agent, calls=0, edit=edit, wait=False) for _ in range(2)]
            return [*steps, *twins, Join(), self._say(agent)]
        edited = self._say(agent, edit=edit, calls=0)
        if self._dice.random() < 0.3:
            steps.append(Spoil(agent, "delete"))
        return [*steps, edited, self._say(agent), self._say(agent)]

    def _rewound(self, agent: int) -> list[Step]:
        steps: list[Step] = [self._say(agent, calls=0), self._say(agent, calls=0), Join()]
        steps.append(Rewind(agent, self._proxy(), self._dice.randint(1, 2)))
        dies = self._dice.random()
        if dies < 0.3:
            steps.append(KillCli(self._proxy()))
        elif dies < 0.6:
            killed = self._proxy()
            steps += [Kill(killed), Start(killed)]
        return [*steps, self._say(agent), self._say(agent)]

    def _by_other_doors(self, agent: int) -> list[Step]:
        """Over a WebSocket, and from an application with an engine of its own, which may die in mid-answer."""
        if self._speakers[agent].naming != "name" or self._shape.hosts:
            return self._calm(agent)
        plain = {"calls": 0, "picture": False, "keyed": False}
        steps: list[Step] = [self._say(agent, **plain)]
        # An application that offers no tools asks with another head than a client that does.
        doors: tuple[Wire, ...] = ("socket", "chat")
        if not self._speakers[agent].tools:
            doors = ("socket", "engine", "litellm", "chat", "sdk")
        for wire in self._dice.sample(doors, len(doors)):
            say = self._say(agent, wire=wire, hold=self._dice.choice((None, None, "words")), **plain)
            steps.append(say)
            if say.hold is not None and self._dice.random() < 0.5:
                steps.append(Leave(say.turn))
            steps += [Open(say.turn), Join(say.turn)]
        return [*steps, self._say(agent), self._say(agent)]

    def _deleted(self, agent: int) -> list[Step]:
        return [self._say(agent, calls=0), Join(), Delete(agent, self._proxy()), self._say(agent), self._say(agent)]

    def _fallen_back(self, agent: int) -> list[Step]:
        """Claude is at its limit before its first word, or amid the answer; perhaps at results of a tool. Another model
        answers, perhaps while its proxy dies, and from the limit's reset on Claude again."""
        tools = self._speakers[agent].tools
        calls = {"calls": self._dice.randint(1, 2)} if tools and self._dice.random() < 0.6 else {}
        steps: list[Step] = [self._say(agent, **calls)]
        say = self._say(agent, fault=self._dice.choice((*LIMITS, "limit")), hold=self._dice.choice((None, *HOLDS)))
        steps.append(say)
        dies = self._dice.random()
        steps += _deaths(say, dies)
        if 0.4 <= dies < 0.6:
            steps.append(Leave(say.turn, noticed=self._dice.random() < 0.5))
        steps += [Open(say.turn), Join(say.turn)]
        if self._dice.random() < 0.4:
            steps.append(self._repeat(say))
        steps += [self._say(agent) for _ in range(self._dice.randint(1, 3))]
        if self._dice.random() < 0.3:
            steps.append(Spoil(agent, self._dice.choice(DAMAGES)))
        return [*steps, self._say(agent), self._say(agent, calls=0), self._say(agent)]

    def _compacted(self, agent: int) -> list[Step]:
        """The context is full: the CLI has the conversation summed up before the next turn, perhaps when something
        happened to its session, or while it or its proxy dies."""
        steps: list[Step] = [self._say(agent), self._say(agent), self._say(agent, full=True)]
        before, say = self._dice.random(), self._say(agent, wait=False)
        if before < 0.2:
            steps.append(Spoil(agent, self._dice.choice(DAMAGES)))
        elif before < 0.4:
            steps.append(KillCli(say.proxy))
        dies = self._dice.random()
        if dies < 0.2:
            steps += [say, Kill(say.proxy, after=round(self._dice.uniform(0, 0.4), 3)), Start(say.proxy)]
        elif dies < 0.4:
            steps += [say, KillCli(say.proxy, after=round(self._dice.uniform(0, 0.4), 3))]
        else:
            steps.append(replace(say, wait=True))
        steps += [Join(say.turn), self._say(agent, back=self._dice.choice((0, 0, 1, 2)))]
        if self._dice.random() < 0.4:
            steps.append(Spoil(agent, self._dice.choice(DAMAGES)))
        return [*steps, self._say(agent), self._say(agent)]

    def _expired(self, agent: int) -> list[Step]:
        """One agent is forgotten as nobody uses it, while another one is asked."""
        expire = Expire(agent, self._proxy())
        other = self._say(self._agent(), hold="words")
        return [self._say(agent, calls=0), Join(), other, expire, Open(other.turn), Join(), *self._calm(agent)]

    def _committed(self, agent: int) -> list[Step]:
        """An agent's attempts are committed, and the next one begins; perhaps another agent is asked meanwhile."""
        steps: list[Step] = [self._say(agent, calls=0), self._say(agent, calls=0), Join()]
        for _ in range(self._dice.randint(1, 2)):
            self._turns += 1
            number = self._turns
            if self._dice.random() < 0.5:
                steps.append(self._say(self._agent(), wait=False, calls=0))
            steps += [Commit(number, agent, self._proxy()), self._say(agent, calls=0), Join()]
        if self._dice.random() < 0.7:
            steps.append(Delete(agent, self._proxy()))
        return [*steps, self._say(agent), self._say(agent)]

    def _carried(self, agent: int) -> list[Step]:
        return [self._say(agent, calls=0), Join(), Carry(agent, self._proxy()), self._say(agent), self._say(agent)]


def _deaths(say: Say, dice: float) -> list[Step]:
    """While this turn runs: of five such turns one loses its CLI, and one its proxy."""
    if dice < 0.2:
        return [KillCli(say.proxy)]
    return [Kill(say.proxy), Start(say.proxy)] if dice < 0.4 else []
