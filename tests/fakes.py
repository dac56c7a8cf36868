"""An engine without a CLI, for the tests of the doors: it tells the events it was given, and notes what was done."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from cli_session_proxy.aside.pool import Aside
from cli_session_proxy.domain.models import (
    Agent,
    Block,
    BlockDelta,
    BlockStart,
    BlockStop,
    Chain,
    ChainSummary,
    Finished,
    Link,
    Message,
    Session,
    Started,
    Turn,
    TurnEvent,
    TurnRequest,
    Usage,
)
from cli_session_proxy.engine.budgets import Budgets
from cli_session_proxy.engine.engine import Engine, HasLeft
from cli_session_proxy.errors import ProxyError
from cli_session_proxy.settings import BudgetSettings
from cli_session_proxy.stores.base import Store, TurnOutline
from cli_session_proxy.stores.held import Holds

# An event of a script: something to tell, an error to raise, or something to wait for.
Step = TurnEvent | Exception | asyncio.Event

SESSION = "5e551011-0000-4000-8000-000000000001"
OTHER_SESSION = "5e552022-0000-4000-8000-000000000002"
AGENT = Agent(1, "local", "a", "a", True, "turn_1", 1_790_000_000.0)
TURN = Turn(
    id="turn_1",
    seq=1,
    agent_key=1,
    parent_id=None,
    status="completed",
    model="sonnet",
    input=(Message.user("hello"),),
    created_at=1_790_000_000.0,
    output=({"type": "text", "text": "Hello there."},),
    stop_reason="end_turn",
    session_id=SESSION,
    continuity="warm",
    usage=Usage(input_tokens=3, output_tokens=2),
    cost_usd=0.01,
)


def started(agent_id: str = "a") -> Started:
    return Started(agent_id, "turn_1", SESSION, "warm")


def text(*pieces: str) -> list[Step]:
    deltas: list[Step] = [BlockDelta(0, {"type": "text_delta", "text": piece}) for piece in pieces]
    return [BlockStart(0, {"type": "text", "text": ""}), *deltas, BlockStop(0)]


def hello() -> list[Step]:
    """A whole turn: what most tests need."""
    return [started(), *text("Hello ", "there."), Finished(TURN)]


class FakeAnswer:
    """One answer. `done` is set when the door is finished with it: `acknowledged` says how."""

    def __init__(self, agent_id: str, steps: Sequence[Step]) -> None:
        self.agent_id = agent_id
        self.turn_id = "turn_1"
        self.accepted = TURN
        self.replayed = False
        self.acknowledged = False
        self.left = False
        self.done = asyncio.Event()
        self._steps = list(steps)

    async def events(self) -> AsyncIterator[TurnEvent]:
        for step in self._steps:
            if isinstance(step, Exception):
                raise step
            if isinstance(step, asyncio.Event):
                await step.wait()
            else:
                yield step

    async def batches(self) -> AsyncIterator[list[TurnEvent]]:
        async for event in self.events():
            yield [event]

    wait = None

    async def turn(self, *, patience: float | None = None) -> Turn:
        async for event in self.events():
            if isinstance(event, Finished):
                return event.turn
        raise AssertionError("a script without an end")

    def acknowledge(self) -> None:
        assert not self.left
        self.acknowledged = True
        self.done.set()

    def leave(self) -> None:
        if not self.acknowledged:
            self.left = True
        self.done.set()

    def cancel(self) -> None:
        raise AssertionError("a door never cancels")


class FakeStore:
    """Just what the doors read."""

    def __init__(self) -> None:
        self.agents: dict[str, Agent] = {}
        self.rows: list[Turn] = []
        self.sessions: list[Session] = []
        self.links: list[Link] = []
        self.fail_after: int | None = None

    async def agent(self, owner: str, agent_id: str) -> Agent | None:
        return self.agents.get(agent_id) if owner == "local" else None

    async def one_shots(self, owner: str | None, *, since: float, until: float) -> tuple[int, float]:
        return 0, 0.0

    async def summaries(self, owner: str | None = None, *, since: float | None = None) -> AsyncIterator[ChainSummary]:
        for agent in self.agents.values():
            yield ChainSummary(agent, len(self.rows), 1, 0, "completed", 0.02, 2048, 1_790_000_100.0)

    async def chain(self, key: int) -> Chain | None:
        for agent in self.agents.values():
            if agent.key == key:
                return Chain(agent, tuple(self.sessions), tuple(self.links))
        return None

    async def turns(self, agent_key: int, *, after_seq: int = 0) -> AsyncIterator[Turn]:
        for number, turn in enumerate(self.rows):
            if number == self.fail_after:
                raise ProxyError("the store failed")
            yield turn

    async def outlines(self, agent_key: int) -> AsyncIterator[TurnOutline]:
        async for turn in self.turns(agent_key):
            yield TurnOutline(*(getattr(turn, name) for name in TurnOutline.__slots__))


class FakeEngine:
    """`script` makes an answer's steps of its request, or raises what `submit` raises."""

    def __init__(self, script: Callable[[TurnRequest], Sequence[Step]] | None = None) -> None:
        self.script = script or (lambda _request: hello())
        self.requests: list[TurnRequest] = []
        self.answers: list[FakeAnswer] = []
        self.deleted: list[str] = []
        self.ready = True
        self.aside = Aside()
        self.fake_store = FakeStore()
        self.observers: list[object] = []
        self.budgets = Budgets(BudgetSettings())
        self.registry = None  # there is nothing beside the store
        self.holds = Holds()
        self.plan = SimpleNamespace(now=lambda: None)  # no subscription

    def kill(self) -> None:
        raise AssertionError("it ends by itself")

    async def state(self) -> str:
        return "ready" if self.ready else "draining"

    @property
    def store(self) -> Store:
        return cast(Store, self.fake_store)

    view = store

    async def submit(self, request: TurnRequest, has_left: HasLeft | None = None) -> FakeAnswer:
        self.requests.append(request)
        steps = self.script(request)
        answer = FakeAnswer(request.agent_id or "chat-1", steps)
        self.answers.append(answer)
        return answer

    async def delete(self, owner: str, agent_id: str) -> bool:
        self.deleted.append(agent_id)
        return self.fake_store.agents.pop(agent_id, None) is not None

    agent_named = Engine.agent_named

    def as_engine(self) -> Engine:
        return cast(Engine, self)


def turn(number: int, **fields: Any) -> Turn:
    parent = f"turn_{number - 1}" if number > 1 else None
    return replace(TURN, **{"id": f"turn_{number}", "seq": number, "parent_id": parent, **fields})


def block(words: str) -> Block:
    return {"type": "text", "text": words}
