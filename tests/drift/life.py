"""A small life over a change of the CLI: what was acknowledged, what clients were told, and what reached the model.

The real CLI answers first; then it is replaced by one of tomorrow, and a client does what clients do; then the real one
is back. Each turn is answered right, or refused in words that name the CLI, within `PATIENCE`; and nothing that was
acknowledged is missing from any request that led to an answer.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from cli_session_proxy.domain.models import BlockDelta, Finished, Message, Tool, Turn
from cli_session_proxy.domain.options import Parameters
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.errors import ProxyError
from cli_session_proxy.settings import Settings
from turnfault.provider.script import HeldReply, ToolUse
from turnfault.provider.seen import Seen
from turnfault.provider.upstream import Upstream
from turnfault.score import Fact, score

from ..files import files
from ..media import image, picture
from ..talking import request, text
from .cli import ChangingCli
from .tomorrow import VERSION

# Seconds that any turn takes at most: 15, and as long again for a machine that is busy with other tests.
PATIENCE = 30.0
WEATHER = Tool("get_weather", "The weather in a city", {"type": "object", "properties": {"city": {"type": "string"}}})


@dataclass(frozen=True, slots=True)
class Step:
    """One turn. `error` is what its client was told; `fault` what is wrong with that, or with the answer."""

    name: str
    seconds: float
    error: str | None = None
    fault: str | None = None


@dataclass(slots=True)
class Life:
    settings: Settings
    upstream: Upstream
    cli: ChangingCli
    steps: list[Step] = field(default_factory=list)
    facts: dict[str, list[Fact]] = field(default_factory=dict)
    calls: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    new: bool = False  # it is the CLI of tomorrow that answers
    _number: int = 0
    engine: Engine = field(init=False)

    @property
    def faults(self) -> list[str]:
        return [f"{step.name}: {step.fault}" for step in self.steps if step.fault is not None]

    async def up(self) -> None:
        self.engine = Engine(self.settings)
        await self.engine.start()

    async def down(self) -> None:
        await self.engine.stop()

    async def restart(self) -> None:
        await self.down()
        await self.up()

    def replaced(self, name: str | None) -> None:
        self.new = name is not None
        self.cli.becomes(name) if name is not None else self.cli.is_real()

    # --- turns

    def fact(self) -> Fact:
        self._number += 1
        key = f"fact-{self._number}-{self._number:08x}"
        return Fact(f"remember {key} = known", key, f"Noted: {key} is known.")

    async def tell(
        self, name: str, agent: str = "a", *, streams: bool = False, beside: tuple[Any, ...] = (), **more: Any
    ) -> None:
        fact = self.fact()
        prompt = Message("user", (*beside, {"type": "text", "text": fact.text}))

        async def said() -> str | None:
            start = len(self.upstream.requests)
            turn = await self.answered(request(prompt, agent=agent, **more), streams=streams)
            return self.judged(agent, fact, text(turn), start)

        await self.step(name, said)

    async def answered(self, asked: Any, *, streams: bool = False) -> Turn:
        answer = await self.engine.submit(asked)
        try:
            if not streams:
                turn = await answer.turn()
            else:
                told: list[str] = []
                async for event in answer.events():
                    if isinstance(event, BlockDelta) and event.delta.get("type") == "text_delta":
                        told.append(str(event.delta["text"]))
                    if isinstance(event, Finished):
                        turn = event.turn
                assert "".join(told) == text(turn), f"streamed {told}, kept {text(turn)!r}"
            answer.acknowledge()
            return turn
        finally:
            answer.leave()

    def judged(self, agent: str, fact: Fact, answer: str, start: int) -> str | None:
        """What is wrong with an answer, and with the request that led to it. It was acknowledged."""
        known = self.facts.setdefault(agent, [])
        before = list(known)
        known.append(fact)
        if answer != fact.answer:
            return f"the answer is {answer!r} instead of {fact.answer!r}"
        mine = [seen for seen in self.upstream.requests[start:] if fact.key in seen.raw.decode()]
        if not mine:
            return "no request reached the model"
        found = score(mine[-1], before, fact, [])
        return self.missing(agent, mine[-1]) if found.whole else f"the model was shown {found}"

    async def step(self, name: str, act: Callable[[], Awaitable[str | None]]) -> None:
        error = fault = None
        began = time.monotonic()
        try:
            async with asyncio.timeout(PATIENCE):
                fault = await act()
        except TimeoutError:
            fault = f"neither an answer nor an error in {PATIENCE:g} s"
        except AssertionError as wrong:
            fault = str(wrong)
        except ProxyError as exc:
            error = exc.message
            named = self.cli_named(error)
            if not self.new:
                fault = f"refused by the real CLI: {error}"
            elif named:
                fault = f"an error that does not name {named}: {error}"
        self.steps.append(Step(name, time.monotonic() - began, error, fault))

    def cli_named(self, error: str) -> str:
        """What of the CLI an error does not name."""
        wanted = {"its version": VERSION, "its binary": str(self.cli.path)}
        return " and ".join(what for what, words in wanted.items() if words not in error)

    async def call(self, agent: str = "a") -> None:
        """A call of the client's tool, then its result."""
        asked, city, sky = (f"{word}-{len(self.steps)}" for word in ("weather", "city", "sky"))
        self.upstream.when(asked, ToolUse([("mcp__client__get_weather", {"city": city})]))

        async def called() -> str | None:
            turn = await self.answered(request(asked, agent=agent, tools=(WEATHER,)))
            calls = [block for block in turn.output if block.get("type") == "tool_use"]
            if turn.status != "requires_action" or len(calls) != 1:
                return f"no call came out: {turn.status}, {turn.output}"
            result = {"type": "tool_result", "tool_use_id": calls[0]["id"], "content": sky}
            start = len(self.upstream.requests)
            turn = await self.answered(request(Message("user", (result,)), agent=agent, tools=(WEATHER,)))
            if text(turn) != f"The tool said: {sky}":
                return f"the answer to the result is {text(turn)!r}"
            self.calls[agent] += [asked, city, sky]
            return self.missing(agent, self.upstream.requests[start:][-1])

        await self.step("call", called)

    def missing(self, agent: str, seen: Seen) -> str | None:
        """What of the agent's calls and results, and of its facts, is not in this request."""
        told = seen.raw.decode()
        lost = [
            words
            for words in (*self.calls[agent], *(one.key for one in self.facts.get(agent, [])))
            if words not in told
        ]
        return f"the model was not shown {lost}" if lost else None

    async def cancelled(self, agent: str) -> None:
        """A turn that its client cancels in the middle of its answer, and another one."""
        gate, fact = HeldReply(after=1), self.fact()
        self.upstream.when(fact.key, gate)

        async def cancel() -> str | None:
            answer = await self.engine.submit(request(fact.text, agent=agent))
            reached, ended = asyncio.ensure_future(gate.reached.wait()), asyncio.ensure_future(answer.turn())
            try:
                await asyncio.wait({reached, ended}, return_when=asyncio.FIRST_COMPLETED)
                if ended.done():
                    ended.result()
                    return "it ended before the model was asked"
                answer.cancel()
                with suppress(ProxyError):
                    await ended
            finally:
                reached.cancel()
                ended.cancel()
                await asyncio.wait({reached, ended})
                answer.leave()
                gate.open()
            return None

        await self.step("cancelled", cancel)
        await self.tell("after a cancelled one", agent)

    def transcripts(self) -> None:
        """Somebody deletes all of them."""
        for folder in ("projects", "conversations"):
            for file in files(self.settings.claude_config_dir, f"{folder}/*.jsonl*"):
                file.unlink()


async def live(life: Life, change: str) -> None:
    await life.up()
    try:
        await life.tell("before")
        life.replaced(change)
        await life.restart()
        await life.tell("plain")
        await life.tell("stream", streams=True)
        await life.tell("image", beside=(image(picture(8, 8)),))
        await life.tell("parameters", parameters=Parameters(max_tokens=1000, temperature=0.5))
        await life.tell("another system prompt", system="You are long.")
        await life.call()
        await life.cancelled("b")
        life.transcripts()
        await life.tell("transcript deleted")
        await life.restart()
        await life.tell("restart")
        life.replaced(None)
        await life.restart()
        await life.tell("the real one is back")
        await life.tell("the real one is back", "b")
        await life.tell("and again")
    finally:
        await life.down()
