"""Tools of the CLI that wait for a person's approval, in the proxy that runs their turn.

- A request is stored with its turn before it is shown, and its verdict before the CLI gets it. Both are stored under
  the turn's lease, so a proxy that has lost the agent lets no tool run any more.
- The first verdict counts; each later one raises `ApprovalAnswered`.
- A request without a verdict in time is refused. So is one whose verdict cannot be stored.
- Requests end with their turn. The CLI that asked has ended then, and has not run the tool; a new attempt of the turn
  asks again, under another id.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, Self

from .. import logs
from ..backends.base import PermissionAsked
from ..domain.approvals import LARGEST, MOST, Approval, PendingApproval, Verdict, in_one_line
from ..domain.models import Agent
from ..errors import ApprovalAnswered, ProxyError
from .live import LiveTurn

log = logs.get(__name__)

# How many answered requests are remembered, so that a second answer gets `ApprovalAnswered`.
KNOWN = 1000


@dataclass(slots=True, eq=False)
class Question:
    """One request. `over` is set once the CLI has the verdict, or can no longer get one: see `ended` or `fault`."""

    agent: Agent
    turn_id: str
    waiting: PendingApproval
    verdict: asyncio.Future[Verdict]
    over: asyncio.Event = field(default_factory=asyncio.Event)
    ended: Approval | None = None
    fault: ProxyError | None = None


class Approvals:
    """Tool calls that wait for approval in this proxy. One per engine."""

    def __init__(self) -> None:
        self.open: dict[str, Question] = {}  # by id
        self._ended: OrderedDict[str, int] = OrderedDict()  # the key of its agent, by id

    def of(self, owner: str) -> list[Question]:
        """In the order of asking."""
        return [question for question in self.open.values() if question.agent.owner == owner]

    async def answer(self, agent_key: int, approval_id: str, verdict: Verdict) -> Approval | None:
        """Give a verdict on a request, and wait until the CLI has it. None if no such request of this agent waits here.

        Raises `ApprovalAnswered`, and `StoreUnavailable` or `LeaseLost` if the verdict could not be stored: then the
        tool was refused.
        """
        question = self.open.get(approval_id)
        if agent_key != (self._ended.get(approval_id) if question is None else question.agent.key):
            return None
        if question is not None and not question.verdict.done():
            question.verdict.set_result(verdict)
            await question.over.wait()
            if question.fault is not None:
                raise question.fault
            if question.ended is not None:
                return question.ended
        raise ApprovalAnswered("this was answered already, or its time is over: the first answer holds")

    def close(self, question: Question) -> None:
        approval_id = question.waiting.approval.id
        self.open.pop(approval_id, None)
        self._ended[approval_id] = question.agent.key
        while len(self._ended) > KNOWN:
            self._ended.popitem(last=False)
        question.over.set()


class Asking:
    """The requests of one attempt of a turn. At the end of `async with`, open requests are refused if the attempt
    succeeded; else the CLI is ended and needs no verdict.

    `note` stores a request with the turn. `earlier`: the turn's requests so far. `timeout` is in seconds.
    """

    def __init__(
        self,
        table: Approvals,
        live: LiveTurn,
        agent: Agent,
        *,
        note: Callable[[Approval], Awaitable[None]],
        own: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        earlier: tuple[Approval, ...],
        timeout: float,
    ) -> None:
        self._table = table
        self._live = live
        self._agent = agent
        self._note = note
        self._own = own
        self._earlier = earlier
        self._timeout = timeout
        self._tasks: set[asyncio.Task[None]] = set()
        self._by_backend: dict[str, Question] = {}  # by the backend's own id
        self._for_turn: dict[str, Verdict] = {}  # by tool: it may run until the turn ends
        self._storing = asyncio.Lock()  # each write holds all of the turn's requests: the last one is the newest
        self._count = len(earlier)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, failed: object, *_: object) -> None:
        for question in self._by_backend.values():
            if failed is None and not question.verdict.done():  # the CLI runs on, and would wait for ever
                question.verdict.set_result(Verdict("withdrawn", word="The turn has ended: this was not run."))
        for task in self._tasks:
            if failed is not None:
                task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def ask(self, asked: PermissionAsked) -> None:
        now, line = self._live.now(), in_one_line(asked.input)
        attempt = len(self._live.attempts)
        self._count += 1
        word = f"{MOST} calls of this turn needed a permission already: this was not run."
        if self._count <= MOST:
            is_large = len(json.dumps(asked.input, ensure_ascii=False)) > LARGEST
            word = (
                f"A call of more than {LARGEST:,} characters is shown to nobody: this was not run." if is_large else ""
            )
        if word:  # refused at once: neither stored nor shown
            asked.answer(Verdict("denied", word=word))
            return
        approval = Approval(f"appr_{uuid.uuid4().hex}", asked.tool, line, now, attempt, asked.call)
        before = next(
            (
                one.ended_at
                for one in reversed(self._earlier)
                if one.outcome in ("allowed", "allowed_for_turn") and (one.tool, one.asked) == (asked.tool, line)
            ),
            None,
        )
        waiting = PendingApproval(approval, asked.input, now + self._timeout, asked.agent, before)
        question = Question(self._agent, self._live.turn.id, waiting, asyncio.get_running_loop().create_future())
        self._by_backend[asked.id] = question
        task = self._own(self._settle(question, asked))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def withdraw(self, backend_id: str) -> None:
        """The CLI no longer needs the approval."""
        question = self._by_backend.pop(backend_id, None)
        if question is not None and not question.verdict.done():
            question.verdict.set_result(Verdict("withdrawn"))

    async def _settle(self, question: Question, asked: PermissionAsked) -> None:
        approval, tool = question.waiting.approval, asked.tool
        agent = {"owner": self._agent.owner, "agent": self._agent.agent_id}
        context = {**agent, "turn_id": self._live.turn.id, "approval": approval.id, "tool": tool}
        try:
            try:
                verdict = await self._verdict(question, context)
                ended = replace(
                    approval, outcome=verdict.outcome, by=verdict.by, word=verdict.word, ended_at=self._live.now()
                )
                await self._stored(ended)
            except ProxyError as exc:
                log.warning("approval_not_stored", **context, error=exc.message)
                question.fault = exc
                asked.answer(
                    Verdict("withdrawn", word=f"It could not be stored whether {tool} may run: it was not run.")
                )
                return
            # Nothing may come between the store and the CLI: the caller's task ends at an await only.
            asked.answer(verdict)
            question.ended = ended
            if verdict.outcome == "allowed_for_turn":
                self._for_turn[tool] = verdict
                for other in self._by_backend.values():
                    if other.waiting.approval.tool == tool and not other.verdict.done():
                        other.verdict.set_result(verdict)
            log.info("approval_ended", **context, outcome=verdict.outcome, by=verdict.by)
        finally:
            self._by_backend.pop(asked.id, None)
            self._live.asking.pop(approval.id, None)
            self._table.close(question)
            self._show(question)

    async def _verdict(self, question: Question, context: dict[str, str]) -> Verdict:
        approval = question.waiting.approval
        if question.verdict.done():
            return question.verdict.result()
        if approval.tool in self._for_turn:
            return self._for_turn[approval.tool]
        await self._stored(approval)
        self._live.asking[approval.id] = question.waiting
        self._show(question)
        self._table.open[approval.id] = question
        log.info("approval_asked", **context)
        await asyncio.wait({question.verdict}, timeout=self._timeout)
        if not question.verdict.done():
            why = f"Nobody answered within {self._timeout:g} s whether {approval.tool} may run: it was not run."
            question.verdict.set_result(Verdict("timed_out", word=why))
        return question.verdict.result()

    async def _stored(self, approval: Approval) -> None:
        async with self._storing:
            await self._note(approval)

    def _show(self, question: Question) -> None:
        """Show watchers what the turn does now."""
        ended = question.ended
        if self._live.asking:
            self._live.now_doing("approval", {"name": next(iter(self._live.asking.values())).approval.tool})
        elif ended is not None and ended.outcome in ("allowed", "allowed_for_turn"):
            self._live.now_doing("tool", {"name": ended.tool})
        else:
            self._live.now_doing("answering" if self._live.output_sent else "thinking")
