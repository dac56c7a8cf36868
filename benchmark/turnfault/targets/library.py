"""A Python class, in a process of its own and by an interpreter of its own: killed, it keeps what it wrote."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import TargetError
from ..provider.upstream import Upstream
from ..talk import RequestRefused, Talk
from .base import START, TURN, Surface
from .program import Program

HOST = Path(__file__).parent / "host.py"


@dataclass
class LibraryTarget:
    """`spec`: `FILE.py:Class` or `module:Class`, see `host`. `python`: the interpreter that has what it needs."""

    spec: str
    upstream: Upstream
    folder: Path
    python: str = sys.executable
    model: str = "sonnet"
    config: Path | None = None
    _program: Program | None = field(default=None, repr=False)
    _waiting: dict[int, asyncio.Future[str]] = field(default_factory=dict, repr=False)
    _reading: asyncio.Task[None] | None = field(default=None, repr=False)
    _numbers: Any = field(default_factory=itertools.count, repr=False)

    @property
    def surfaces(self) -> frozenset[Surface]:
        return frozenset(("id", "process", "files") if self.config else ("id", "process"))

    def talk(self, agent: str, *, by_id: bool) -> LibraryTalk:  # noqa: ARG002 - it has no other way
        return LibraryTalk(self, agent)

    async def up(self) -> None:
        kept = self.folder / "kept"
        kept.mkdir(exist_ok=True)
        command = shlex.join([self.python, str(HOST), self.spec, str(kept)])
        self._program = Program(command, self.upstream, self.folder, self.config, None)
        process = await self._program.start(piped=True)
        assert process.stdout is not None
        try:
            async with asyncio.timeout(START):
                line = await process.stdout.readline()
        except TimeoutError:
            line = b""
        if not line:
            await self.down(kill=True)
            raise TargetError(f"{self.spec} does not start: {self._program.said()}")
        self._reading = asyncio.ensure_future(self._read(process.stdout))

    async def _read(self, answers: asyncio.StreamReader) -> None:
        while line := await answers.readline():
            data = json.loads(line)
            waiting = self._waiting.pop(data["id"], None)
            if waiting is None or waiting.done():
                continue
            if "error" in data:
                waiting.set_exception(RequestRefused(data["error"]))
            else:
                waiting.set_result(data["answer"])
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(RequestRefused("connection lost"))
        self._waiting.clear()

    async def ask(self, agent: str, words: str, model: str) -> str:
        """Raises `RequestRefused`."""
        process = None if self._program is None else self._program.process
        if process is None or process.stdin is None or self._reading is None or self._reading.done():
            raise RequestRefused("connection lost")
        number = next(self._numbers)
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        stdin = process.stdin

        def send(data: dict[str, Any]) -> None:
            stdin.write(json.dumps({"id": number, **data}).encode() + b"\n")

        try:
            send({"agent": agent, "words": words, "model": model})
            async with asyncio.timeout(TURN):
                return await answer
        except TimeoutError as exc:
            raise RequestRefused("no answer in time") from exc
        except OSError as exc:
            raise RequestRefused("connection lost") from exc
        finally:
            if self._waiting.pop(number, None) is not None:  # its client has left
                with contextlib.suppress(OSError):
                    send({"cancel": True})

    async def down(self, *, kill: bool = False) -> None:
        if self._program is not None:
            await self._program.end(by_kill=kill)
        if self._reading is not None:
            await self._reading
            self._reading = None

    def kill_clis(self) -> bool:
        return self._program is not None and self._program.kill_clis()


class LibraryTalk(Talk):
    def __init__(self, target: LibraryTarget, agent: str) -> None:
        super().__init__(target.upstream, target.model)
        self.target = target
        self.agent = agent

    async def _say(self, said: str) -> str:
        count = len(self.upstream.requests)
        answer = await self.unless_left(self.target.ask(self.agent, said, self.model))
        if not answer:
            raise RequestRefused("an empty answer")
        self.noted(said, count)
        return answer
