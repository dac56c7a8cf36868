"""A backend without a process: the core runs on it in milliseconds, and it shows what a backend has to do.

It remembers nothing but the path that it is given, and answers what `model` says to it. A turn can be told to fail, to
call tools of the client, or to wait. It honours `max_tokens`, a word being a token, and the wish for no thinking; it
does not sample.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from cli_session_proxy.backends.base import (
    Adoptable,
    AnswerBlocks,
    Answered,
    Backend,
    Called,
    Completed,
    Event,
    Execution,
    Job,
    Refused,
)
from cli_session_proxy.domain.client_tools import calls_of
from cli_session_proxy.domain.evidence import Evidence
from cli_session_proxy.domain.lineage import Past
from cli_session_proxy.domain.models import (
    THINKING,
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
from cli_session_proxy.domain.options import ParameterName, Parameters
from cli_session_proxy.stores.base import KeptTurn

# What the model says to a path: blocks of the Messages API, `tool_use` among them, or that it refuses.
Model = Callable[[Sequence[Message]], Awaitable[Sequence[Block] | Refused]]


async def echo(path: Sequence[Message]) -> Sequence[Block]:
    """The newest words, and how many messages of the user's there are."""
    said = [block.get("text", "") for message in path if message.role == "user" for block in message.content]
    return ({"type": "text", "text": f"You said: {said[-1]} ({len(said)})"},)


class MemoryBackend(Backend):
    """See `base.Backend`. `seen` are the paths that reached the model, in order."""

    name = "memory"

    def __init__(self, model: Model = echo) -> None:
        self.model = model
        self.seen: list[tuple[Message, ...]] = []
        self.retired: list[str] = []
        self.paths: dict[str, tuple[Message, ...]] = {}  # by turn; lost with the backend, and told again by the chain
        self.left: dict[str, tuple[Turn, KeptTurn]] = {}  # what a crash left, by turn

    async def prepare(self, job: Job) -> Execution | Adoptable:
        known = job.parent is None or job.parent.id in self.paths
        continuity: Continuity = "started" if job.parent is None else "warm" if known else "rebuilt"
        session_id = job.session.id if job.session else str(uuid.uuid4())
        before = self.paths.get(job.parent.id, ()) if job.parent else ()
        if job.parent is not None and not known:
            before = (*job.parent.input, Message("assistant", job.parent.output))
        return _MemoryExecution(self, job, before, session_id, continuity)

    async def recover_turn(self, agent: Agent, turn: Turn) -> tuple[Turn, KeptTurn] | None:
        return self.left.get(turn.id)

    def history_records(
        self,
        agent: Agent,
        parent: Turn | None,
        path: Sequence[Record],
        exchanges: Sequence[Past],
        model: str,
    ) -> Iterator[tuple[Record, ...]]:
        for past in exchanges:
            yield tuple(Record(json.dumps(message.as_json())) for message in past.input)

    async def retire(self, agent: Agent) -> None:
        self.retired.append(agent.agent_id)


@dataclass(eq=False)
class _MemoryExecution:
    owner: MemoryBackend
    job: Job
    before: tuple[Message, ...]
    session_id: str
    continuity: Continuity
    links: tuple[Link, ...] = ()
    backend: str = MemoryBackend.name
    who: str = "the model"
    keeps_path: bool = False

    def __post_init__(self) -> None:
        wanted = self.job.turn.options.parameters
        sampled: tuple[ParameterName, ...] = ("temperature", "top_p", "top_k", "seed")
        self.unmet = tuple(name for name in sampled if getattr(wanted, name) is not None)
        self.evidence = Evidence()
        if self.continuity in ("started", "rebuilt"):
            was = self.job.session.id if self.job.session else None
            turn = self.job.turn
            self.links = (Link(was, self.session_id, turn.id, self.continuity, {}, turn.created_at),)

    async def say(self) -> AsyncGenerator[Event, None]:
        results = tuple(self.job.results.values())
        path = (*self.before, Message("user", (*results, *self.job.prompt)))
        self.owner.seen.append(path)
        answer = await self.owner.model(path)
        if isinstance(answer, Refused):
            yield answer
            return
        blocks, cut = _as_wanted(answer, self.job.turn.options.parameters)
        for index, block in enumerate(blocks):
            yield BlockStart(index, {**block, "text": ""} if block["type"] == "text" else block)
            if block["type"] == "text":
                yield BlockDelta(index, {"type": "text_delta", "text": block["text"]})
            yield BlockStop(index)
        yield AnswerBlocks(blocks)
        self.path = (*path, Message("assistant", blocks))
        if calls_of(blocks):
            yield Called(blocks, Usage())
        else:
            words = sum(len(str(block.get("text", "")).split()) for block in blocks)
            yield Completed("max_tokens" if cut else "end_turn", Usage(1, words or 1))

    async def interrupt(self) -> None: ...

    async def keep(self, answered: Answered) -> tuple[KeptTurn, Evidence]:
        self.path = (*self.path[:-1], Message("assistant", answered.output))
        self.owner.paths[self.job.turn.id] = self.path
        records = tuple(Record(json.dumps(message.as_json())) for message in self.path[-2:])
        agent, turn = self.job.agent, self.job.turn
        new = Session(self.session_id, agent.key, turn.id, "", "memory", turn.created_at)
        session = replace(self.job.session, tip_turn_id=turn.id) if self.job.session else new
        return KeptTurn(records, session), Evidence(records="memory")

    async def release(self) -> None: ...

    async def discard(self, *, owned: bool) -> None: ...


def _as_wanted(blocks: Sequence[Block], wanted: Parameters) -> tuple[tuple[Block, ...], bool]:
    """The answer as the parameters want it, and whether it was cut."""
    out: list[Block] = []
    left = wanted.max_tokens
    for block in blocks:
        if wanted.thinking is False and block["type"] in THINKING:
            continue
        words = str(block.get("text", "")).split()
        if left is not None and len(words) > left:
            return (*out, {"type": "text", "text": " ".join(words[:left])}), True
        left = None if left is None else left - len(words)
        out.append(block)
    return tuple(out), False
