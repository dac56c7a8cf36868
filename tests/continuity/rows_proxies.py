"""Rows about several proxies on one `var/`: the agent's client comes and goes between them, and one of them dies or
stops to respond. `other` is a proxy in a process of its own."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Awaitable, Callable
from typing import Any

from cli_session_proxy.domain.client_tools import cli_name
from cli_session_proxy.domain.models import JSON, Turn
from turnfault.provider.script import HeldReply, ToolUse

from ..recovery.others import Other, other_proxy
from ..talking import ask, request, text
from ..tools.test_loops import TOOLS, called, result, results
from ..until import until
from .row import NEW, Breaks, Row, void
from .score import Fact
from .talk import EngineTalk, Talk

# Seconds: what another proxy waits for a paused one.
LEASE = {"lease": 1.5}
AT_ONCE = 3

Doing = Callable[[EngineTalk, Other], Awaitable[None]]


def beside(doing: Doing, **started: Any) -> Breaks:
    """With another proxy on the same `var/`, that is killed in the end."""

    async def breaks(talk: Talk) -> None:
        assert isinstance(talk, EngineTalk)
        async with other_proxy(talk.settings, **started) as other:
            await doing(talk, other)

    return breaks


async def tell_at(other: Other, talk: EngineTalk) -> None:
    """One turn at the other proxy."""
    fact = talk.new_fact()
    answer = await other.ask(fact.text)
    assert answer is not None
    talk.remember(fact, answer["text"])
    talk.before = talk.upstream.requests[-1]


async def begun_at(other: Other, talk: EngineTalk, **more: Any) -> tuple[Fact, HeldReply]:
    """A turn at the other proxy of which the first words are out."""
    fact, gate = talk.new_fact(), HeldReply(after=1)
    talk.upstream.when(fact.key, gate)
    await other.tell(fact.text, wait=False, **more)
    await gate.reached.wait()
    return fact, gate


async def turns(talk: EngineTalk) -> list[Turn]:
    agent = await talk.engine.store.agent("local", talk.agent)
    assert agent is not None
    return [turn async for turn in talk.engine.store.turns(agent.key)]


async def take_turns(talk: EngineTalk, other: Other) -> None:
    for _ in range(2):
        await tell_at(other, talk)
        await talk.tell()


async def at_once(talk: EngineTalk, other: Other) -> None:
    """The order is that of acceptance, and a client's answer says which turn is its own."""
    theirs = [talk.new_fact() for _ in range(AT_ONCE)]
    for fact in theirs:
        await other.tell(fact.text, wait=False)
    await asyncio.gather(*(talk.tell() for _ in range(AT_ONCE)))
    for _ in theirs:
        answer = await other.heard()
        assert answer is not None
        [fact] = [fact for fact in theirs if fact.key in answer["text"]]
        talk.remember(fact, answer["text"])
    talk.before = talk.upstream.requests[-1]
    said = [turn.input[0].content[0]["text"] for turn in await turns(talk)]
    talk.facts.sort(key=lambda fact: said.index(fact.text))


async def killed_while_idle(talk: EngineTalk, other: Other) -> None:
    await tell_at(other, talk)
    await other.end(signal.SIGKILL)


async def killed_in_mid_answer(talk: EngineTalk, other: Other) -> None:
    """Its client sends the same words to the proxy that is left."""
    fact, _ = await begun_at(other, talk)
    await other.end(signal.SIGKILL)
    await talk.tell(fact)


async def killed_at_its_step(talk: EngineTalk, other: Other) -> None:
    fact = talk.new_fact()
    assert await other.ask(fact.text, die=True) is None
    store = talk.engine.store
    if store.spans_hosts:
        # Another host learns of it when its lease has expired: until then the same words are said once more.
        dead = (await turns(talk))[-1].instance or ""

        async def known_to_be_dead() -> bool:
            return not await store.responds(dead)

        await until(known_to_be_dead)
    await talk.tell(fact)


async def killed_while_another_turn_waits(talk: EngineTalk, other: Other) -> None:
    """A turn that nobody asks for again is not remembered."""
    await begun_at(other, talk)
    waiting = asyncio.create_task(talk.tell())
    await other.end(signal.SIGKILL)
    await waiting


async def paused_while_idle(talk: EngineTalk, other: Other) -> None:
    await tell_at(other, talk)
    await other.pause(talk.settings)
    await talk.tell()
    other.wake()
    await tell_at(other, talk)


async def paused_in_mid_answer(talk: EngineTalk, other: Other) -> None:
    """It wakes up when the agent is somebody else's: what it was doing is kept by nobody."""
    _, gate = await begun_at(other, talk)
    await other.pause(talk.settings)
    await talk.tell()
    other.wake()
    gate.open()
    answer = await other.heard()
    assert answer is not None
    assert answer["error"] in ("lease_lost", "interrupted")
    await tell_at(other, talk)


async def paused_and_asked_elsewhere(talk: EngineTalk, other: Other) -> None:
    """The same request, with its key, at the proxy that responds: it runs once."""
    fact, gate = await begun_at(other, talk, idempotency_key="k")
    await other.pause(talk.settings)
    talk.extra = {"idempotency_key": "k"}
    await talk.tell(fact)
    talk.extra = {}
    other.wake()
    gate.open()
    assert await other.heard() is not None


async def fetched_elsewhere(talk: EngineTalk, other: Other) -> None:
    """A client leaves this proxy in mid-answer, asks for the same answer at the other, and goes on here."""
    fact, gate = talk.new_fact(), HeldReply(after=1)
    talk.upstream.when(fact.key, gate)
    answer = await talk.engine.submit(request(fact.text, agent=talk.agent, idempotency_key="k"))
    await gate.reached.wait()
    answer.leave()
    await other.tell(fact.text, wait=False, idempotency_key="k")
    gate.open()
    fetched = await other.heard()
    assert fetched is not None
    talk.remember(fact, text(await answer.turn()))
    assert fetched["text"] == talk.facts[-1].answer
    talk.before = talk.upstream.requests[-1]


# --- tools of the client: a call is made at the other proxy, and its result comes to this one


async def called_at(other: Other, talk: EngineTalk) -> JSON:
    """A turn at the other proxy that ends in a call; the call."""
    fact = talk.new_fact()
    talk.upstream.when(fact.key, ToolUse([called("get_weather")]))
    answer = await other.ask(fact.text, tools=[tool.as_json() for tool in TOOLS])
    assert answer is not None
    [call] = answer["output"]
    talk.remember(fact, f"tool_use: {cli_name(call['name'])} {json.dumps(call['input'])}")
    return dict(call)


async def brought(talk: EngineTalk, call: JSON) -> None:
    fact = talk.new_fact()
    talk.extra = {"tools": TOOLS}
    turn = await ask(talk.engine, results(result(call, fact.text)), **talk.extra)
    talk.remember(fact, text(turn))
    talk.before = talk.upstream.requests[-1]


async def killed_while_a_call_waits(talk: EngineTalk, other: Other) -> None:
    call = await called_at(other, talk)
    await other.end(signal.SIGKILL)
    await brought(talk, call)


async def killed_after_its_result_came_here(talk: EngineTalk, other: Other) -> None:
    await brought(talk, await called_at(other, talk))
    await other.end(signal.SIGKILL)


PROXIES = "several proxies"
AGAIN = r"Attempt 1 was cancelled \(interrupted\); attempt 2 sent the prompt again"
# Whether the next turn has to clean up depends on how much its CLI had written by then: it may say so.
NOT_KEPT = {4: r"the proxy stopped before this turn was finished", 5: r""}
FOUND = r"The proxy died after the CLI had finished this turn: the answer was read from the transcript"
ENDED = r"The warm CLI process of this session had ended with exit code -9"
NEW_TOOLS = r"the CLI asked again without 3 thoughts of earlier answers: they are kept in the chain"
GONE = r"The CLI process that waited for these tool results was gone"


def row(name: str, breaks: Breaks, **more: Any) -> Row:
    """A bare CLI has no proxies."""
    return Row(PROXIES, name, breaks, bare=False, **more)


# `tests/recovery` does the same in every run: these are for the table.
ROWS = (
    row("two take turns", beside(take_turns), says=({}, void(6, 8))),
    row("6 at once, three at each", beside(at_once), says=({}, void(6, 10))),
    row("one killed while idle", beside(killed_while_idle)),
    row("one killed in mid-answer", beside(killed_in_mid_answer), says={4: AGAIN}),
    row("one killed in mid-answer, given up", beside(killed_while_another_turn_waits), says=NOT_KEPT),
    row(
        "one killed between the answer and the commit",
        beside(killed_at_its_step, die_at="before commit"),
        says={4: FOUND},
    ),
    row("one killed between the commit and the client", beside(killed_at_its_step, die_at="before acknowledge")),
    row("one paused while idle", beside(paused_while_idle), says=({6: ENDED}, void(6, 7)), settings=LEASE),
    row(
        "one paused in mid-answer",
        beside(paused_in_mid_answer),
        says=(NOT_KEPT, {**NOT_KEPT, **void(7, 7)}),
        settings=LEASE,
    ),
    row(
        "one paused, the same request at the other", beside(paused_and_asked_elsewhere), says={4: AGAIN}, settings=LEASE
    ),
    row("left at one, fetched at the other", beside(fetched_elsewhere)),
    # The tools come only now: the request before it, which had none, is no prefix.
    row(
        "one killed while a call waits, its result to the other",
        beside(killed_while_a_call_waits),
        clis=NEW,
        says={4: NEW_TOOLS, 5: GONE},
        prefix=False,
    ),
    row(
        "a call's result to the other, then its proxy killed",
        beside(killed_after_its_result_came_here),
        clis=NEW,
        says={4: NEW_TOOLS, 5: GONE},
        prefix=False,
    ),
)
