"""An engine that says what a test scripts, in place of the real one behind the LiteLLM door."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from cli_session_proxy.aside.pool import Aside
from cli_session_proxy.domain.models import (
    BlockDelta,
    BlockStart,
    BlockStop,
    Finished,
    Started,
    Turn,
    TurnEvent,
    TurnRequest,
    Usage,
)
from cli_session_proxy.engine.budgets import Budgets
from cli_session_proxy.engine.engine import HasLeft
from cli_session_proxy.errors import ProxyError
from cli_session_proxy.settings import Settings
from cli_session_proxy.stores.held import Holds


@dataclass
class FakeAnswer:
    """Says `deltas`, then is finished; waits at `gate` where there is one."""

    engine: FakeEngine
    request: TurnRequest
    number: int
    acknowledged: bool = False
    left: asyncio.Event = field(default_factory=asyncio.Event)
    replayed: bool = False

    @property
    def agent_id(self) -> str:
        return self.request.agent_id or "chain-1"

    @property
    def turn_id(self) -> str:
        return f"turn_{self.number}"

    wait = None

    @property
    def accepted(self) -> Turn:
        thinking = "".join(self.engine.thinking)
        blocks: list[dict[str, Any]] = [{"type": "thinking", "thinking": thinking}] if thinking else []
        return Turn(
            id=self.turn_id, seq=self.number, agent_key=1, parent_id=None, status="completed", model="sonnet",
            input=self.request.messages, created_at=1.0, session_id="s-1", continuity="warm",
            output=(*blocks, {"type": "text", "text": "".join(self.engine.deltas)}), stop_reason="end_turn",
            usage=Usage(2, 5, cache_read_tokens=30, cache_write_tokens=400, thinking_tokens=1), cost_usd=0.25,
        )  # fmt: skip

    async def turn(self, *, patience: float | None = None) -> Turn:
        await self.engine.wait()
        return self.accepted

    async def events(self) -> AsyncGenerator[TurnEvent, None]:
        yield Started(self.agent_id, self.turn_id, "s-1", "warm")
        for index, (kind, deltas) in enumerate((("thinking", self.engine.thinking), ("text", self.engine.deltas))):
            yield BlockStart(index, {"type": kind, kind: ""})
            for delta in deltas:
                yield BlockDelta(index, {"type": f"{kind}_delta", kind: delta})
            yield BlockStop(index)
        yield Finished(await self.turn())

    async def batches(self) -> AsyncGenerator[list[TurnEvent], None]:
        async for event in self.events():
            yield [event]

    def acknowledge(self) -> None:
        self.acknowledged = True

    def leave(self) -> None:
        self.left.set()
        self.engine.all_left.set()

    def cancel(self) -> None:
        raise AssertionError("nobody cancels: a caller leaves")


class FakeEngine:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.aside = Aside()
        self.budgets = Budgets(settings.budgets)
        self.deltas: list[str] = ["Hi ", "you"]
        self.thinking: list[str] = []
        self.error: ProxyError | None = None
        self.late_error: ProxyError | None = None
        self.gate: asyncio.Event | None = None
        self.accepting: asyncio.Event | None = None
        self.waiting = threading.Event()
        self.all_left = threading.Event()
        self.answers: list[FakeAnswer] = []
        self.threads: set[str] = set()
        self.starts = self.stops = 0
        self.observers: list[object] = []
        self.holds = Holds()
        self.plan = SimpleNamespace(now=lambda: None)  # no subscription

    async def start(self) -> None:
        self.starts += 1

    async def stop(self) -> None:
        self.stops += 1

    async def submit(self, request: TurnRequest, has_left: HasLeft | None = None) -> FakeAnswer:
        self.threads.add(threading.current_thread().name)
        if self.accepting is not None:
            await self.accepting.wait()
        if self.error is not None:
            raise self.error
        self.answers.append(FakeAnswer(self, request, len(self.answers) + 1))
        return self.answers[-1]

    async def wait(self) -> None:
        if self.gate is not None:
            self.waiting.set()
            await self.gate.wait()
        if self.late_error is not None:
            raise self.late_error

    @property
    def ready(self) -> bool:
        return True

    @property
    def last(self) -> TurnRequest:
        return self.answers[-1].request
