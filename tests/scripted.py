"""A backend that says one thing after another, when a test lets it: for who watches a turn run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from cli_session_proxy.backends.base import (
    Adoptable,
    AnswerBlocks,
    Completed,
    Event,
    Execution,
    Job,
    PermissionAsked,
)
from cli_session_proxy.domain.approvals import Outcome, Verdict
from cli_session_proxy.domain.models import BlockDelta, BlockStart, BlockStop, Message, Usage

from .memory_backend import MemoryBackend

RETRY = {
    "attempt": 2, "max_retries": 3, "retry_delay_ms": 30_000, "error_status": 429, "error": "rate_limit_error",
}  # fmt: skip


def delta(text: str) -> BlockDelta:
    return BlockDelta(0, {"type": "text_delta", "text": text})


class Scripted(MemoryBackend):
    """`steps` are events, and None where it waits: `go` lets a wait end, `reached` tells that one began.

    The answer is all the text of the steps.
    """

    def __init__(self, steps: Sequence[Event | None]) -> None:
        super().__init__()
        self.steps = steps
        self.go = asyncio.Semaphore(0)
        self.reached = asyncio.Semaphore(0)

    async def prepare(self, job: Job) -> Execution | Adoptable:
        execution: Any = await super().prepare(job)

        async def say() -> AsyncGenerator[Event, None]:
            said = ""
            yield BlockStart(0, {"type": "text", "text": ""})
            for step in self.steps:
                if step is None:
                    self.reached.release()
                    await self.go.acquire()
                    continue
                if isinstance(step, BlockDelta):
                    said += str(step.delta["text"])
                yield step
            block = {"type": "text", "text": said}
            execution.path = (Message("user", job.prompt), Message("assistant", (block,)))
            yield BlockStop(0)
            yield AnswerBlocks((block,))
            yield Completed("end_turn", Usage(1, 1))

        execution.say = say
        made: Execution = execution
        return made


class Asker:
    """A backend's side of it: what it asks, and the verdicts that it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Verdict]] = []

    def asks(self, id: str, tool: str = "Bash", **given: Any) -> PermissionAsked:
        def answer(verdict: Verdict) -> None:
            self.told.append((id, verdict))

        return PermissionAsked(id, tool, given or {"command": f"run {id}"}, f"toolu_{id}", None, answer)

    @property
    def outcomes(self) -> list[tuple[str, Outcome]]:
        return [(named, verdict.outcome) for named, verdict in self.told]
