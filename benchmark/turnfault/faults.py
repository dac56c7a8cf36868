"""What breaks: each fault happens to a conversation that was told some facts.

A fault says by `NotHereError` that the target has nothing of the kind. Where it happens (after how many pieces of an
answer, at which line) is drawn from the conversation's dice.
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
from .talk import RequestRefused, Talk
from .targets.base import Target, transcript_of
from .targets.server import ServerTalk

AT_ONCE = 6
# Seconds that a prompt may take to reach the model.
ARRIVES = 60.0
# Pieces of an answer after which it is cut, held or ends in an error: at most this many.
PIECES = 4


class NotHereError(Exception):
    """The target has nothing of the kind that the row breaks. The text says what."""


@dataclass
class Lab:
    """A row's conversation, with the target and the provider behind it."""

    name: str
    target: Target
    upstream: Upstream
    talk: Talk

    def another(self, name: str) -> Talk:
        by_id = not isinstance(self.talk, ServerTalk) or self.talk.by_id
        other = self.target.talk(f"{self.name}-{name}", by_id=by_id)
        other.dice, other.log = self.talk.dice, self.talk.log
        return other

    def note(self, what: str) -> None:
        """Into the trace."""
        self.talk.log.append({"event": "fault", "what": what})

    def held(self) -> HeldReply:
        """An answer that stops before its first piece, or after some."""
        return HeldReply(after=self.talk.dice.randint(0, PIECES))

    async def restart(self, *, kill: bool = False) -> None:
        self.note("killed" if kill else "restarted")
        await self.target.down(kill=kill)
        await self.target.up()

    def transcript(self) -> Path:
        found = transcript_of(self.target.config, self.talk)
        if found is None:
            raise NotHereError("it keeps no transcript")
        return found


Breaks = Callable[[Lab], Awaitable[None]]


async def nothing(lab: Lab) -> None:
    """The next turn follows."""


# --- files and processes


async def transcript(lab: Lab, damage: str, *, restarted: bool = False) -> None:
    """`damage`: a function of `files`."""
    path = lab.transcript()
    if restarted:
        await lab.target.down()
    try:
        await asyncio.to_thread(getattr(files, damage), path)
    except (ValueError, IndexError) as exc:
        raise NotHereError("its transcripts have another form") from exc
    finally:
        lab.note(f"transcript: {damage}")
        if restarted:
            await lab.target.up()


async def restarted(lab: Lab, *, killed: bool = False) -> None:
    await lab.restart(kill=killed)


async def cli_killed_while_idle(lab: Lab) -> None:
    if not lab.target.kill_clis():
        raise NotHereError("it keeps no CLI between turns")


async def cli_killed_while_it_answers(lab: Lab) -> None:
    """The client gets an error, or waits; where it gets one it sends the same again."""
    gate, fact = lab.held(), lab.talk.new_fact()
    lab.upstream.when(fact.key, gate)
    telling = asyncio.ensure_future(lab.talk.tell(fact, tries=4))
    await reached(gate, telling)
    lab.note("its CLI killed")
    if not lab.target.kill_clis():
        gate.open()
        await telling
        raise NotHereError("it runs no CLI")
    gate.open()
    await telling


async def killed_while_it_answers(lab: Lab) -> None:
    gate, fact = lab.held(), lab.talk.new_fact()
    lab.upstream.when(fact.key, gate)
    telling = asyncio.ensure_future(lab.talk.tell(fact))
    await reached(gate, telling)
    lab.note("killed")
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


async def reached(gate: HeldReply, telling: asyncio.Future[Any]) -> None:
    reached = asyncio.ensure_future(gate.reached.wait())
    either: tuple[asyncio.Future[Any], ...] = (reached, telling)
    async with asyncio.timeout(ARRIVES):
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    reached.cancel()
    if telling.done():
        await telling


# --- clients and provider


async def client_leaves_and_sends_again(lab: Lab) -> None:
    gate, fact = lab.held(), lab.talk.new_fact()
    lab.upstream.when(fact.key, gate)
    lab.talk.leave_after = gate.reached
    with suppress(RequestRefused):
        await lab.talk.tell(fact)
    lab.talk.leave_after = None
    gate.open()
    if fact.key not in [known.key for known in lab.talk.facts]:
        await lab.talk.tell(fact, tries=3)


def behaviour(
    lab: Lab, status: int | None = None, *, cut: bool = False, error_event: bool = False, refusal: bool = False
) -> Behaviour:
    """What the provider does instead of an answer."""
    after = lab.talk.dice.randint(1, PIECES)
    if status is not None:
        what: Behaviour = Fail(status)
    elif cut:
        what = Cut(after=after)
    elif error_event:
        what = ErrorEvent(after=after)
    else:
        assert refusal
        what = Refusal("scripted", "not this")
    lab.note(f"the provider: {type(what).__name__} {status or after}")
    return what


async def fails_once(lab: Lab, **how: Any) -> None:
    """One request of the CLI's; it, or the client, asks again."""
    fact = lab.talk.new_fact()
    lab.upstream.when(fact.key, behaviour(lab, **how))
    await lab.talk.tell(fact, tries=3)


async def fails_then_resent(lab: Lab, **how: Any) -> None:
    """All requests, until the client has its error and sends the same again."""
    fact = lab.talk.new_fact()
    lab.upstream.when(fact.key, behaviour(lab, **how), times=None)
    try:
        await lab.talk.tell(fact)
    except RequestRefused:
        lab.upstream.heal()
        await lab.talk.tell(fact, tries=2)


async def given_up(lab: Lab, **how: Any) -> None:
    """The client has its error, and says something else. What it was told as an answer is none that counts."""
    fact = lab.talk.new_fact()
    lab.upstream.when(fact.key, behaviour(lab, **how), times=None)
    with suppress(RequestRefused):
        await lab.talk.tell(fact)
    lab.upstream.heal()
    lab.talk.facts = [known for known in lab.talk.facts if known.key != fact.key]
    if isinstance(lab.talk, ServerTalk):
        lab.talk.history = [pair for pair in lab.talk.history if fact.key not in pair[0]]


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


async def says(lab: Lab, text: str, *, times: int = 1, end: str = "") -> None:
    words = text * times + end
    with suppress(RequestRefused):
        await lab.talk.tell(Fact(words, words))


async def other_models(lab: Lab, models: list[str]) -> None:
    usual = lab.talk.model
    for model in (*models, usual):
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
    facts = [lab.talk.new_fact() for _ in range(len(lab.talk.facts))]
    lab.talk.facts = [Fact(fact.text, fact.key, f"Noted {fact.key} there.") for fact in facts]
    lab.talk.history = [(fact.text, fact.answer) for fact in lab.talk.facts]
    lab.talk.before = lab.talk.sound = None
