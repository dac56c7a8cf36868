"""One agent's life of 17 turns on one CLI: plain, streamed, an image, four at once, the transcript deleted, a stream
that is cut, a restart. What counts is the request that led to each answer: every turn that was acknowledged before,
once, in order.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from cli_session_proxy.backends.claude.process import capability, environment
from cli_session_proxy.domain.models import Block, Message, Turn
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.errors import ProxyError
from cli_session_proxy.settings import Settings
from turnfault.provider.script import Cut, Reply
from turnfault.provider.seen import Seen
from turnfault.provider.upstream import Upstream
from turnfault.score import Fact, score

from ..files import files
from ..media import image, picture
from ..talking import request, text

AGENT = "a"
TURNS = 17
# Seconds of one turn: an old CLI takes a process of its own for each.
PATIENCE = 90.0


@dataclass(slots=True)
class Found:
    """What became of a life on one version."""

    version: str
    said: str = ""  # what it answers to --version
    answered: int = 0
    whole: int = 0  # of the answered, those whose request held all that was acknowledged before
    prefix: float = 1.0  # the least that a request kept of the one before it
    least_at: str = ""  # the turn of that request
    seconds: float = 0.0
    errors: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        return not self.faults


class Life:
    """`short`: without four at once and a stream that is cut, and fewer turns before the breakage."""

    def __init__(self, settings: Settings, upstream: Upstream, version: str, *, short: bool = False) -> None:
        self._short = short
        self.settings, self.upstream = settings, upstream
        self.found = Found(version)
        self.engine = Engine(settings)
        self.told: list[tuple[int, Fact]] = []  # what was acknowledged, by the order of acceptance
        self.before: Seen | None = None
        self._number = 0

    async def run(self) -> Found:
        began = time.monotonic()
        try:
            await self._probe()
            await self.engine.start()
            try:
                await self._turns()
            finally:
                await self.engine.stop()
        except ProxyError as exc:
            self.found.errors.append(exc.message)
        self.found.seconds = time.monotonic() - began
        return self.found

    async def _probe(self) -> None:
        assert self.settings.claude_bin is not None
        tmpdir = self.settings.var / "tmp"
        tmpdir.mkdir(parents=True, exist_ok=True)
        env = environment.build(self.settings, tmpdir=tmpdir, config_dir=environment.config_dir(self.settings))
        self.found.said = (await capability.probe(self.settings.claude_bin, env, tmpdir)).version

    async def _turns(self) -> None:
        for _ in range(1 if self._short else 3):
            await self.tell("plain")
        await self.tell("streamed", streams=True)
        if not self._short:
            await self.tell("streamed", streams=True)
        await self.tell("image", image(picture(8, 8)))
        if not self._short:
            await self.tell("plain")
            await asyncio.gather(*(self.tell("one of four", ordered=False) for _ in range(4)))
            self.before = None
            await self.tell("behind the four")
        self._delete()
        await self.tell("transcript deleted")
        if not self._short:
            await self.tell("stream cut", cut=True)
            await self.tell("plain")
        await self.engine.stop()
        self.engine = Engine(self.settings)
        await self.engine.start()
        await self.tell("restart")
        await self.tell("plain")

    def _delete(self) -> None:
        for file in files(self.settings.claude_config_dir, "projects/*.jsonl"):
            file.unlink()

    async def tell(
        self, name: str, *beside: Block, streams: bool = False, cut: bool = False, ordered: bool = True
    ) -> None:
        self._number += 1
        number = self._number
        key = f"fact-{number}-{number:08x}"
        fact = Fact(f"remember {key} = known", key, f"Noted: {key} is known.")
        if cut:
            self.upstream.when(key, Cut(after=1, reply=Reply(fact.answer)))
        start = len(self.upstream.requests)
        prompt = Message("user", (*beside, {"type": "text", "text": fact.text}))
        try:
            async with asyncio.timeout(PATIENCE):
                turn = await self._answered(prompt, streams=streams)
        except ProxyError as exc:
            binary = str(self.settings.claude_bin)
            self.found.errors.append(f"{name}: {exc.message.replace(binary, '…/claude')}")
            return
        except TimeoutError:
            self.found.faults.append(f"{name}: no answer in {PATIENCE:g} s")
            return
        known = [fact for _, fact in sorted(self.told, key=lambda one: one[0])]
        self.told.append((turn.seq, fact))
        self.found.answered += 1
        self._judge(name, fact, known, turn, start, ordered=ordered)

    async def _answered(self, prompt: Message, *, streams: bool) -> Turn:
        answer = await self.engine.submit(request(prompt, agent=AGENT))
        try:
            if streams:
                async for _ in answer.events():
                    pass
            turn = await answer.turn()
            answer.acknowledge()
            return turn
        finally:
            answer.leave()

    def _judge(self, name: str, fact: Fact, known: list[Fact], turn: Turn, start: int, *, ordered: bool) -> None:
        """Turns at once are judged by the request of the one behind them."""
        if text(turn) != fact.answer:
            self.found.faults.append(f"{name}: the answer is {text(turn)!r}")
            return
        mine = [seen for seen in self.upstream.requests[start:] if fact.key in seen.prompt or fact.key in _newest(seen)]
        if not mine:
            self.found.faults.append(f"{name}: nothing reached the model")
            return
        if not ordered:
            self.found.whole += 1
            return
        score_of = score(mine[-1], known, fact, [self.before] if self.before is not None else [])
        self.before = mine[-1]
        if score_of.prefix is not None and score_of.prefix < self.found.prefix:
            self.found.prefix, self.found.least_at = score_of.prefix, name
        if score_of.whole:
            self.found.whole += 1
        else:
            self.found.faults.append(f"{name}: the model was shown {score_of}")


def _newest(seen: Seen) -> str:
    """The last message of a request, whatever it is made of."""
    return str(seen.messages[-1]) if seen.messages else ""
