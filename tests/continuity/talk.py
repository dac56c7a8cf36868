"""One agent that is told facts, by the proxy or by a naive driver of the bare CLI; rows break things through it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from cli_session_proxy.backends.claude.process import environment
from cli_session_proxy.domain.models import Block, Link, Message, Turn
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.errors import ProxyError
from cli_session_proxy.settings import Settings
from turnfault.provider.seen import Seen
from turnfault.provider.upstream import Upstream
from turnfault.talk import RequestRefused
from turnfault.talk import Talk as AnyTalk
from turnfault.targets.command import print_mode

from ..talking import claude, request, text
from ..until import until
from .score import Fact, Score, Thinking, summed_up

__all__ = [
    "ASKS_FOR_SUMMARY", "BareTalk", "EngineTalk", "Hand", "RequestRefused", "Talk", "by_hand", "run_by_hand", "talking",
]  # fmt: skip

PATIENCE = 60.0
MODEL = "sonnet"
# A line of the CLI's own request for a summary (1.0.120 and 2.1.330).
ASKS_FOR_SUMMARY = "create a detailed summary"


class Talk(AnyTalk, ABC):
    """With hands on the CLI behind it."""

    bare: bool

    def __init__(self, settings: Settings, upstream: Upstream) -> None:
        super().__init__(upstream, MODEL)
        self.settings = settings
        self.extra: dict[str, Any] = {}
        self.measured: Thinking | None = None
        self.asked: list[list[Seen]] = []  # the requests upstream that each turn took for its prompt

    async def tell(self, fact: Fact | None = None, *, tries: int = 1) -> Fact:
        fact, asked = fact or self.new_fact(), len(self.upstream.requests)
        said = fact.text.strip()
        try:
            return await super().tell(fact, tries=tries)
        finally:
            self.asked.append([seen for seen in self.upstream.requests[asked:] if seen.prompt.strip() == said])

    async def probe(self, fact: Fact | None = None, *, summarised: bool = False) -> Score:
        """See `AnyTalk`. `summarised`: the model knows a summary of what was acknowledged."""
        told, fact, asked = list(self.facts), fact or self.new_fact(), len(self.upstream.requests)
        found = await super().probe(fact)
        seen = self.request_of(fact, asked) if summarised and found.refused is None else None
        return found if seen is None else summed_up(seen, told, fact)

    @abstractmethod
    async def down(self) -> None: ...

    @abstractmethod
    async def up(self, **changes: Any) -> None: ...

    async def restart(self) -> None:
        await self.down()
        await self.up()

    # --- what rows break

    session_id: str

    @property
    @abstractmethod
    def cwd(self) -> Path: ...

    @property
    def projects(self) -> Path:
        assert self.settings.claude_config_dir is not None
        return self.settings.claude_config_dir / "projects"

    @property
    def transcript(self) -> Path:
        slug = re.sub(r"[^a-zA-Z0-9]", "-", os.path.realpath(self.cwd))
        return self.projects / slug / f"{self.session_id}.jsonl"

    @abstractmethod
    def pids(self) -> list[int]:
        """The CLI processes of this agent that live now."""

    def kill(self) -> None:
        for pid in self.pids():
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(pid, signal.SIGKILL)

    async def all_dead(self) -> None:
        await until(lambda: not self.pids())

    def environment(self) -> dict[str, str]:
        tmpdir = self.settings.var / "by-hand"
        tmpdir.mkdir(parents=True, exist_ok=True)
        assert self.settings.claude_config_dir is not None
        return environment.build(self.settings, tmpdir=tmpdir, config_dir=self.settings.claude_config_dir)


class EngineTalk(Talk):
    """Through the proxy's engine."""

    bare = False

    def __init__(self, settings: Settings, upstream: Upstream, agent: str = "a") -> None:
        super().__init__(settings, upstream)
        self.agent = agent
        self.once: dict[str, Any] = {}  # of the next request alone
        self.brings: tuple[Message, ...] = ()  # what the client's next request says before its words
        self.beside: tuple[Block, ...] = ()  # what every prompt holds beside its words
        self.streams = False  # the client takes its answers piece by piece
        self.unnamed = False  # the client names no agent: it brings all that was said
        self._links = 0
        self.engine: Engine
        self.turn: Turn

    async def up(self, **changes: Any) -> None:
        if changes:
            self.settings = self.settings.model_copy(update=changes)
        self.engine = Engine(self.settings)
        await self.engine.start()

    async def down(self) -> None:
        await self.engine.stop()

    async def say_again(self, turn: Turn) -> None:
        """The very request of this turn once more; nothing new is to reach the model."""
        before = self.before
        await self._say(str(turn.input[0].content[0]["text"]))
        self.before = before

    async def _say(self, said: str) -> str:
        try:
            words: Block = {"type": "text", "text": said}
            prompt = (*self._history(), *self.brings, Message("user", (*self.beside, words)))
            asked = request(
                *prompt, agent=None if self.unnamed else self.agent, **{"model": self.model, **self.extra, **self.once}
            )
            self.brings, self.once = (), {}
            answer = await self.engine.submit(asked)
            try:
                if self.streams:
                    async for _ in answer.events():
                        pass
                turn = await answer.turn()
                answer.acknowledge()
            finally:
                answer.leave()
        except ProxyError as exc:
            raise RequestRefused(exc.code) from exc
        self.turn = turn
        self.session_id = turn.session_id or ""
        self.before = self.upstream.requests[-1]
        return text(turn)

    def _history(self) -> Iterator[Message]:
        for fact in self.facts if self.unnamed else ():
            yield Message("user", ({"type": "text", "text": fact.text},))
            yield Message("assistant", ({"type": "text", "text": fact.answer},))

    @property
    def cwd(self) -> Path:
        return self.settings.var / "sandbox" / "agents" / self.agent

    def pids(self) -> list[int]:
        table = claude(self.engine).pool.table
        return [process.pid for process in table.all() if process.alive and process not in table.spares]

    @property
    def next_engine(self) -> Engine:
        """Whose the next turn is."""
        return self.engine

    def busy(self) -> bool:
        """A turn is with the CLI, prompt and all."""
        return any(process.busy for process in claude(self.engine).pool.table.all())

    async def links(self) -> list[Link]:
        """What was linked since the links were last asked for."""
        chain = await self.engine.store.chain(self.turn.agent_key)
        assert chain is not None
        new, self._links = chain.links[self._links :], len(chain.links)
        return list(new)


class BareTalk(Talk):
    """As many a script does it: one `claude -p` a turn, `--resume` of the last id that came back."""

    bare = True

    def __init__(self, settings: Settings, upstream: Upstream) -> None:
        super().__init__(settings, upstream)
        self.session_id = ""
        self._cwd = settings.var / "bare"
        self._cwd.mkdir(parents=True)
        self._children: dict[int, asyncio.subprocess.Process] = {}

    async def up(self, **changes: Any) -> None:
        if "var" in changes:
            self._cwd = changes.pop("var") / "bare"
        self.settings = self.settings.model_copy(update=changes)

    async def down(self) -> None:
        """Nothing of it lives between turns."""

    async def _say(self, said: str) -> str:
        result = await run_by_hand(self, said, self.session_id or None, cwd=self._cwd, children=self._children)
        self.session_id = result["session_id"]
        self.before = self.upstream.requests[-1]
        return str(result["result"])

    @property
    def cwd(self) -> Path:
        return self._cwd

    def pids(self) -> list[int]:
        return sorted(self._children)


async def run_by_hand(
    talk: Talk,
    said: str,
    session_id: str | None,
    *,
    cwd: Path | None = None,
    children: dict[int, asyncio.subprocess.Process] | None = None,
) -> dict[str, Any]:
    """One `claude -p` in the agent's directory, as a person or a script would. Raises `RequestRefused`."""
    assert talk.settings.claude_bin is not None
    return await print_mode(
        talk.settings.claude_bin, said, session_id, model=talk.model,
        system=talk.extra.get("system") or talk.settings.system_prompt, cwd=cwd or talk.cwd, env=talk.environment(),
        children={} if children is None else children,
    )  # fmt: skip


class Hand:
    """A person's own CLI, open on the agent's session: what is typed is typed, commands and all."""

    def __init__(self, child: asyncio.subprocess.Process) -> None:
        self._child = child

    def type(self, said: str) -> None:
        assert self._child.stdin is not None
        frame = {"type": "user", "message": {"role": "user", "content": said}}
        self._child.stdin.write(json.dumps(frame).encode() + b"\n")

    async def result(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        async with asyncio.timeout(PATIENCE):
            while line := await self._child.stdout.readline():
                frame: dict[str, Any] = json.loads(line)
                if frame.get("type") == "result":
                    return frame
        raise AssertionError("the CLI ended without a result")


@asynccontextmanager
async def talking(settings: Settings, upstream: Upstream) -> AsyncIterator[EngineTalk]:
    talk = EngineTalk(settings, upstream)
    await talk.up()
    try:
        yield talk
    finally:
        await talk.down()


@asynccontextmanager
async def by_hand(talk: Talk, cwd: Path | None = None) -> AsyncIterator[Hand]:
    """On the agent's session, in its directory; with `cwd`, on a session of the person's own."""
    argv = [str(talk.settings.claude_bin), "-p", "--input-format", "stream-json", "--output-format", "stream-json"]
    argv += ["--verbose", "--system-prompt", talk.settings.system_prompt]
    argv += [] if cwd else [f"--resume={talk.session_id}"]
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(
        *argv, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL, cwd=cwd or talk.cwd, env=talk.environment(),
        limit=64 * 1024 * 1024,
    )  # fmt: skip
    try:
        yield Hand(child)
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()
