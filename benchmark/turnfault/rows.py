"""What is broken: each row tells some facts, breaks one thing, and asks once more.

A row says what it needs of a target: its files, its processes, a conversation that it keeps (`id`) or one that the
client sends as a whole (`history`). What a target does not offer is left out, and told as such.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import files
from .provider.script import Behaviour, Cut, ErrorEvent, Fail, HeldReply, Refusal
from .provider.upstream import Upstream
from .score import Fact
from .talk import RequestRefused
from .targets import AnyTalk, ServerTalk, Surface, Target, transcript_of

TOLD = 3  # acknowledged turns before it breaks
AT_ONCE = 6
# Seconds that a prompt may take to reach the model.
ARRIVES = 60.0


class NotHereError(Exception):
    """The target has nothing of the kind that the row breaks. The text says what."""


@dataclass
class Lab:
    """A row's conversation, with the target and the provider behind it."""

    name: str
    target: Target
    upstream: Upstream
    talk: AnyTalk

    def another(self, name: str) -> AnyTalk:
        return self.target.talk(f"{self.name}-{name}", by_id=not isinstance(self.talk, ServerTalk) or self.talk.by_id)

    async def restart(self, *, kill: bool = False) -> None:
        await self.target.down(kill=kill)
        await self.target.up()

    def transcript(self) -> Path:
        found = transcript_of(self.target.config, self.talk)
        if found is None:
            raise NotHereError("it keeps no transcript")
        return found


Breaks = Callable[[Lab], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Row:
    """`by_id`: the client sends only what is new."""

    group: str
    name: str
    breaks: Breaks
    needs: frozenset[Surface] = frozenset()
    by_id: bool = True

    def __str__(self) -> str:
        return f"{self.group}: {self.name}"


async def nothing(lab: Lab) -> None:
    """The next turn follows."""


# --- files and processes


def _broken(how: Callable[[Path], None], *, restarted: bool = False) -> Breaks:
    async def run(lab: Lab) -> None:
        path = lab.transcript()
        if restarted:
            await lab.target.down()
        await asyncio.to_thread(how, path)
        if restarted:
            await lab.target.up()

    return run


async def restarted(lab: Lab) -> None:
    await lab.restart()


async def killed(lab: Lab) -> None:
    await lab.restart(kill=True)


async def cli_killed_while_idle(lab: Lab) -> None:
    if not lab.target.kill_clis():
        raise NotHereError("it keeps no CLI between turns")


async def cli_killed_while_it_answers(lab: Lab) -> None:
    """The client gets an error, or waits; where it gets one it sends the same again."""
    gate, fact = HeldReply(), lab.talk.new_fact()
    lab.upstream.when(fact.key, gate)
    telling = asyncio.ensure_future(lab.talk.tell(fact, tries=4))
    await _reached(gate, telling)
    if not lab.target.kill_clis():
        gate.open()
        await telling
        raise NotHereError("it runs no CLI")
    gate.open()
    await telling


async def killed_while_it_answers(lab: Lab) -> None:
    gate, fact = HeldReply(), lab.talk.new_fact()
    lab.upstream.when(fact.key, gate)
    telling = asyncio.ensure_future(lab.talk.tell(fact))
    await _reached(gate, telling)
    await lab.target.down(kill=True)
    gate.open()
    with suppress(RequestRefused):
        await telling
    await lab.target.up()
    if fact.key not in [known.key for known in lab.talk.facts]:
        await lab.talk.tell(fact, tries=3)


async def three_alternate_over_a_restart(lab: Lab) -> None:
    others = [lab.another(str(number)) for number in range(2)]
    for _ in range(2):
        for other in others:
            await other.tell()
    await lab.restart()
    for other in others:
        await other.tell()


async def _reached(gate: HeldReply, telling: asyncio.Future[Fact]) -> None:
    reached = asyncio.ensure_future(gate.reached.wait())
    either: tuple[asyncio.Future[Any], ...] = (reached, telling)
    async with asyncio.timeout(ARRIVES):
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    reached.cancel()
    if telling.done():
        await telling


# --- clients and provider


async def client_leaves_and_sends_again(lab: Lab) -> None:
    gate, fact = HeldReply(), lab.talk.new_fact()
    lab.upstream.when(fact.key, gate)
    lab.talk.leave_after = gate.reached
    with suppress(RequestRefused):
        await lab.talk.tell(fact)
    lab.talk.leave_after = None
    gate.open()
    if fact.key not in [known.key for known in lab.talk.facts]:
        await lab.talk.tell(fact, tries=3)


def _fails_once(behaviour: Behaviour) -> Breaks:
    """One request of the CLI's; it, or the client, asks again."""

    async def run(lab: Lab) -> None:
        fact = lab.talk.new_fact()
        lab.upstream.when(fact.key, behaviour)
        await lab.talk.tell(fact, tries=3)

    return run


def _fails_then_resent(behaviour: Behaviour) -> Breaks:
    """All requests, until the client has its error and sends the same again."""

    async def run(lab: Lab) -> None:
        fact = lab.talk.new_fact()
        lab.upstream.when(fact.key, behaviour, times=None)
        try:
            await lab.talk.tell(fact)
        except RequestRefused:
            lab.upstream.heal()
            await lab.talk.tell(fact, tries=2)

    return run


def _given_up(behaviour: Behaviour) -> Breaks:
    """The client has its error, and says something else. What it was told as an answer is none that counts."""

    async def run(lab: Lab) -> None:
        fact = lab.talk.new_fact()
        lab.upstream.when(fact.key, behaviour, times=None)
        with suppress(RequestRefused):
            await lab.talk.tell(fact)
        lab.upstream.heal()
        lab.talk.facts = [known for known in lab.talk.facts if known.key != fact.key]
        if isinstance(lab.talk, ServerTalk):
            lab.talk.history = [pair for pair in lab.talk.history if fact.key not in pair[0]]

    return run


async def six_at_once(lab: Lab) -> None:
    """Answers may overtake each other on the way to the client: the order is the one the model was asked in."""
    told, asked = len(lab.talk.facts), len(lab.upstream.requests)
    await asyncio.gather(*(lab.talk.tell() for _ in range(AT_ONCE)))
    arrived = [seen.raw.decode("utf-8", "replace") for seen in lab.upstream.requests[asked:]]
    order = {fact.key: next((n for n, raw in enumerate(arrived) if fact.key in raw), -1) for fact in lab.talk.facts}
    lab.talk.facts[told:] = sorted(lab.talk.facts[told:], key=lambda fact: order[fact.key])


async def two_alternate(lab: Lab) -> None:
    other = lab.another("other")
    for _ in range(2):
        await other.tell()
        await lab.talk.tell()


# --- words and models


def _says(text: str) -> Breaks:
    async def run(lab: Lab) -> None:
        with suppress(RequestRefused):
            await lab.talk.tell(Fact(text, text))

    return run


async def other_models(lab: Lab) -> None:
    usual = lab.talk.model
    for model in ("haiku", "opus", usual):
        lab.talk.model = model
        await lab.talk.tell()


# --- the client sends the whole history


async def an_earlier_turn_is_edited(lab: Lab) -> None:
    """The client goes back to its second turn and says something else there."""
    assert isinstance(lab.talk, ServerTalk)
    lab.talk.facts, lab.talk.history = lab.talk.facts[:1], lab.talk.history[:1]
    await lab.talk.tell()
    lab.talk.before = lab.talk.sound = None  # another path: no request before it is its beginning


async def a_stranger_says_the_same(lab: Lab) -> None:
    """Another client's conversation begins with the same words, and goes on with others."""
    assert isinstance(lab.talk, ServerTalk)
    other = lab.another("stranger")
    assert isinstance(other, ServerTalk)
    other.facts, other.history = list(lab.talk.facts), list(lab.talk.history)
    for _ in other.facts:
        other.new_fact()  # numbers that are taken
    await other.tell()
    await lab.talk.tell()


async def the_history_is_anothers(lab: Lab) -> None:
    """Its exchanges were made somewhere else: the target has never seen them."""
    assert isinstance(lab.talk, ServerTalk)
    facts = [lab.talk.new_fact() for _ in range(TOLD)]
    lab.talk.facts = [Fact(fact.text, fact.key, f"Noted {fact.key} there.") for fact in facts]
    lab.talk.history = [(fact.text, fact.answer) for fact in lab.talk.facts]
    lab.talk.before = lab.talk.sound = None


PROCESS: frozenset[Surface] = frozenset({"process"})
FILES: frozenset[Surface] = frozenset({"files"})
COLD = FILES | PROCESS
_RECORD = '{"type":"user","uuid":"00000000-0000-4000-8000-000000000000","parentUuid":null,"message":{"role":"user"}}'
_PLANES = "".join(chr(plane * 0x10000 + 0x123) for plane in (0, 1, 2, 3, 14, 15, 16)) + "é é \u202e \ufeff. \u2028 ."

ROWS = (
    Row("nothing breaks", "one more turn", nothing),
    Row("files", "transcript deleted", _broken(files.delete), FILES),
    Row("files", "transcript deleted, restarted", _broken(files.delete, restarted=True), COLD),
    Row("files", "a middle line removed, restarted", _broken(files.remove_a_middle_line, restarted=True), COLD),
    Row("files", "last line cut, restarted", _broken(files.cut_the_last_line, restarted=True), COLD),
    Row("files", "emptied, restarted", _broken(files.empty, restarted=True), COLD),
    Row("files", "all transcripts wiped, restarted", _broken(files.wipe, restarted=True), COLD),
    Row("process", "restarted", restarted, PROCESS),
    Row("process", "killed and started again", killed, PROCESS),
    Row("process", "killed while it answers, sent again", killed_while_it_answers, PROCESS),
    Row("process", "its CLI killed while idle", cli_killed_while_idle, PROCESS),
    Row("process", "its CLI killed while it answers", cli_killed_while_it_answers, PROCESS),
    Row("process", "three agents alternate over a restart", three_alternate_over_a_restart, PROCESS),
    Row("client", "it leaves while it waits, and sends again", client_leaves_and_sends_again),
    Row("client", "two agents alternate", two_alternate),
    Row("client", "6 at once to one agent", six_at_once, frozenset({"id"})),
    Row("upstream", "400, sent again", _fails_then_resent(Fail(400))),
    Row("upstream", "400, given up", _given_up(Fail(400))),
    Row("upstream", "500 once", _fails_once(Fail(500))),
    Row("upstream", "529 once", _fails_once(Fail(529))),
    Row("upstream", "cut mid-stream once", _fails_once(Cut(after=2))),
    Row("upstream", "an error event mid-stream", _fails_once(ErrorEvent(after=2))),
    Row("poison", "a refused prompt, given up", _given_up(Refusal("scripted", "not this"))),
    Row("model", "haiku → opus → back", other_models),
    Row("text", "`/clear`", _says("/clear")),
    Row("text", "`@file`", _says("look at @secret.txt please")),
    Row("text", "leading `--`", _says("--resume=00000000-0000-4000-8000-000000000000 --help")),
    Row("text", "transcript-like JSON", _says(_RECORD)),
    Row("text", "every Unicode plane", _says(_PLANES)),
    Row("text", "200 KB", _says("word and " * 22_000 + "end")),
    Row("full history", "one more turn", nothing, by_id=False),
    Row("full history", "an earlier turn edited", an_earlier_turn_is_edited, by_id=False),
    Row("full history", "a stranger begins with the same words", a_stranger_says_the_same, by_id=False),
    Row("full history", "a history made elsewhere", the_history_is_anothers, by_id=False),
    Row("full history", "restarted", restarted, PROCESS, by_id=False),
)
