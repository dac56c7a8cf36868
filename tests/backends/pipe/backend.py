"""A backend for that program: all that a second CLI needs, in one folder."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal

from cli_session_proxy.backends.base import (
    Adoptable,
    AnswerBlocks,
    Answered,
    Backend,
    Completed,
    Counts,
    Event,
    Execution,
    Job,
    Lost,
    ProcessHooks,
    SessionSeen,
)
from cli_session_proxy.domain.evidence import Evidence
from cli_session_proxy.domain.lineage import Past
from cli_session_proxy.domain.models import (
    JSON,
    Agent,
    Block,
    BlockDelta,
    BlockStart,
    BlockStop,
    Continuity,
    Link,
    Message,
    Record,
    Session,
    Turn,
    Usage,
)
from cli_session_proxy.domain.options import ParameterName
from cli_session_proxy.errors import UpstreamError
from cli_session_proxy.sandbox import Sandboxes
from cli_session_proxy.settings import Settings
from cli_session_proxy.stores.base import KeptTurn, Store

PROGRAM = Path(__file__).with_name("program.py")
NAME = "pipe"


def exchange(asked: Sequence[Message], said: Sequence[Block]) -> list[str]:
    """Both messages as the program writes them."""
    content = [block for message in asked for block in message.content]
    return [json.dumps({"role": "user", "content": content}), json.dumps({"role": "assistant", "content": [*said]})]


class PipeBackend(Backend):
    """A program for each session that is warm. Its file is compared with the path before every turn."""

    name = NAME

    def __init__(self, settings: Settings, store: Store, sandboxes: Sandboxes, hooks: ProcessHooks) -> None:
        self.store = store
        self.url = settings.claude_env["ANTHROPIC_BASE_URL"]
        self.folder = settings.var / NAME
        self.programs: dict[str, asyncio.subprocess.Process] = {}  # by session
        self.agents: dict[str, int] = {}  # of a session

    def file(self, session_id: str) -> Path:
        return self.folder / f"{session_id}.jsonl"

    def kept(self, session_id: str) -> list[str]:
        with suppress(FileNotFoundError):
            return self.file(session_id).read_text().splitlines()
        return []

    async def told(self, parent: Turn | None) -> list[str]:
        """What the program's file has to hold for the path to this turn."""
        path = await self.store.path(parent.id) if parent is not None else []
        return [line for turn in path for line in exchange(turn.input, turn.output)]

    async def prepare(self, job: Job) -> Execution | Adoptable:
        told, was, parent = await self.told(job.parent), job.session, job.parent
        before = was.id if was is not None else parent.session_id if parent is not None else None
        continuity: Continuity
        if was is not None and self.kept(was.id) == told:
            continuity = "warm" if was.id in self.programs else "resumed"
            return _Exchange(self, job, was.id, continuity, ())
        reason: Literal["started", "branched", "rebuilt"] = (
            "started" if before is None else "branched" if was is None else "rebuilt"
        )
        session_id = str(uuid.uuid4())
        self.folder.mkdir(exist_ok=True)
        self.file(session_id).write_text("".join(f"{line}\n" for line in told))
        link = Link(before, session_id, job.turn.id, reason, {}, job.turn.created_at)
        return _Exchange(self, job, session_id, reason, (link,))

    async def program_of(self, session_id: str, model: str) -> asyncio.subprocess.Process:
        if session_id not in self.programs:
            self.programs[session_id] = await asyncio.create_subprocess_exec(
                sys.executable, "-I", str(PROGRAM), str(self.file(session_id)), self.url, model, env={},
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
        return self.programs[session_id]

    async def end(self, session_id: str) -> None:
        if (program := self.programs.pop(session_id, None)) is not None:
            with suppress(ProcessLookupError):
                program.kill()
            await program.communicate()

    async def recover_turn(self, agent: Agent, turn: Turn) -> tuple[Turn, KeptTurn] | None:
        if turn.session_id is None:
            return None
        told = await self.told(await self.store.turn(turn.parent_id) if turn.parent_id else None)
        kept = self.kept(turn.session_id)
        if len(kept) != len(told) + 2 or kept[:-2] != told or kept[-2] != exchange(turn.input, ())[0]:
            return None
        session = Session(turn.session_id, agent.key, turn.id, "", "", turn.created_at)
        links = () if told else (Link(None, session.id, turn.id, "started", {}, turn.created_at),)
        output = tuple(json.loads(kept[-1])["content"])
        answered = replace(turn, output=output, stop_reason="end_turn")
        return answered, KeptTurn(tuple(map(Record, kept[-2:])), session, links)

    def history_records(
        self, agent: Agent, parent: Turn | None, path: Sequence[Record], exchanges: Sequence[Past], model: str
    ) -> Iterator[tuple[Record, ...]]:
        for past in exchanges:
            yield tuple(map(Record, exchange(past.input, past.output)))

    async def retire(self, agent: Agent) -> None:
        for session_id in [one for one, key in self.agents.items() if key == agent.key]:
            await self.end(session_id)

    async def forget(self, agent: Agent, session_ids: Sequence[str]) -> None:
        await self.retire(agent)
        for session_id in session_ids:
            self.file(session_id).unlink(missing_ok=True)

    async def close(self) -> None:
        for session_id in list(self.programs):
            await self.end(session_id)

    def kill(self) -> None:
        for program in self.programs.values():
            with suppress(ProcessLookupError):
                os.kill(program.pid, 9)

    def counts(self) -> Counts:
        return Counts(0, len(self.programs), 0, 0)


class _Exchange:
    """`base.Execution`."""

    backend = NAME
    who = "the program"
    keeps_path = False
    evidence = Evidence()
    unmet: Sequence[ParameterName] = ()

    def __init__(
        self, owner: PipeBackend, job: Job, session_id: str, continuity: Continuity, links: Sequence[Link]
    ) -> None:
        self._owner = owner
        self._job = job
        self.session_id = session_id
        self.continuity = continuity
        self.links = links

    async def say(self) -> AsyncGenerator[Event, None]:
        program = await self._owner.program_of(self.session_id, self._job.model)
        self._owner.agents[self.session_id] = self._job.agent.key
        yield SessionSeen(self.session_id)
        assert program.stdin is not None
        assert program.stdout is not None
        asked = [block for message in self._job.turn.input for block in message.content]
        with suppress(ConnectionError):  # it has ended: its output has too
            program.stdin.write(json.dumps(asked).encode() + b"\n")
            await program.stdin.drain()
        if not (line := await program.stdout.readline()):
            raise Lost("the program ended", UpstreamError("the program ended without an answer; send it again"))
        found: JSON = json.loads(line)
        if "error" in found:
            raise UpstreamError(found["error"])
        for index, block in enumerate(found["content"]):
            yield BlockStart(index, {**block, "text": ""})
            yield BlockDelta(index, {"type": "text_delta", "text": block["text"]})
            yield BlockStop(index)
        yield AnswerBlocks(tuple(found["content"]), self._job.model)
        yield Completed("end_turn", Usage(found["usage"]["input_tokens"], found["usage"]["output_tokens"]))

    async def interrupt(self) -> None:
        """Its answers come whole."""

    async def keep(self, answered: Answered) -> tuple[KeptTurn, Evidence]:
        job = self._job
        session = Session(self.session_id, job.agent.key, job.turn.id, "", "", job.turn.created_at)
        return KeptTurn(tuple(map(Record, exchange(job.turn.input, answered.output))), session), Evidence(
            records="model"
        )

    async def release(self) -> None:
        """The program waits for the next turn."""

    async def discard(self, *, owned: bool) -> None:
        await self._owner.end(self.session_id)
