"""A turn while it runs: what it tells its clients, and who of them is still there."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence

from .. import errors
from ..domain.models import (
    JSON,
    Block,
    BlockDelta,
    BlockStart,
    BlockStop,
    CancelledBy,
    Finished,
    Started,
    Turn,
    TurnEvent,
)
from ..errors import Interrupted, LeaseLost, ProxyError, TurnCancelled, TurnTimeout
from ..stores.base import Lease


class LiveTurn:
    """One turn's events, from the first one on, for any number of clients that come and go.

    The events are kept while the turn lives, because a retry may attach at any time; their size is the answer's.
    What one client was given every client gets: a stream that broke off is read on from where it was.
    `on_empty` is called `grace` seconds after the last client left a turn that is not finished. `on_delivery`
    tells whether the answer has arrived: True = a client has it (said once, last), False = all left without it,
    also while it is still being made; `on_return`, that somebody waits for it again.
    """

    def __init__(
        self,
        turn: Turn,
        agent_id: str,
        *,
        grace: float,
        on_empty: Callable[[], None],
        on_delivery: Callable[[bool], None],
        on_return: Callable[[], None] = lambda: None,
    ) -> None:
        self.turn = turn
        self.attempts: list[JSON] = list(turn.attempts)
        self.evidence = turn.evidence  # as it was stored last
        self._steps: dict[str, float] = {}
        self._accepted = time.time()
        self.agent_id = agent_id
        self.cancelled_by: CancelledBy | None = None
        self.lease: Lease | None = None  # under which it runs
        self.task: asyncio.Task[None] | None = None
        self.begun = False  # a task cancelled before its first step would never run its own clean-up
        self._events: list[TurnEvent] = []
        self._given = 0  # how many of them some client was given
        self._error: ProxyError | None = None
        self._done = False
        self._waiters: list[asyncio.Future[None]] = []
        self._finished = asyncio.Event()
        self._clients = 0
        self._acknowledged = False
        self._grace = grace
        self._on_return = on_return
        self._on_empty = on_empty
        self._on_delivery = on_delivery
        self._timer: asyncio.TimerHandle | None = None

    # what the engine says

    def publish(self, event: TurnEvent) -> None:
        self._events.append(event)
        self._wake()

    def withdraw(self, blocks: Collection[int]) -> list[Block]:
        """Take back of these blocks what no client was given; the blocks as far as one was, each with its end."""
        given, rest = self._events[: self._given], self._events[self._given :]
        shown: dict[int, Block] = {}
        pieces: dict[int, list[Block]] = {}
        ended: set[int] = set()
        for event in given:
            if isinstance(event, BlockStart) and event.index in blocks:
                shown[event.index], pieces[event.index] = dict(event.block), []
            elif isinstance(event, BlockDelta) and event.index in shown:
                pieces[event.index].append(event.delta)
            elif isinstance(event, BlockStop):
                ended.add(event.index)
        for index, block in shown.items():
            for name in ("text", "thinking", "signature"):
                if name in block:
                    block[name] += "".join(str(piece.get(name, "")) for piece in pieces[index])
        ends = [BlockStop(index) for index in shown if index not in ended]
        self._events = [*given, *ends, *(event for event in rest if getattr(event, "index", None) not in blocks)]
        self._wake()
        return [block for block in shown.values() if block["type"] not in ("text", "thinking") or block[block["type"]]]

    def finish(self, turn: Turn) -> None:
        self.turn = turn
        self._done = True
        self._stop_timer()
        self._finished.set()
        self.publish(Finished(turn))

    def fail(self, error: ProxyError) -> None:
        if self._done:
            return
        self._error = error
        self._done = True
        self._stop_timer()
        self._finished.set()
        self._wake()

    @property
    def abandoned(self) -> bool:
        """Every client has left, and none has acknowledged."""
        return self._clients == 0 and not self._acknowledged

    @property
    def spoke(self) -> bool:
        """Something of the answer was passed on: the turn cannot be run again unnoticed."""
        return any(isinstance(event, BlockStart) for event in self._events)

    @property
    def next_block(self) -> int:
        """The number of a block behind all that were passed on."""
        return 1 + max((event.index for event in self._events if isinstance(event, BlockStart)), default=-1)

    @property
    def done(self) -> bool:
        return self._done

    def cancel(self, by: CancelledBy) -> None:
        """End the turn: its task is cancelled, and fails with `cancelled(by)`."""
        if self._done or self.cancelled_by is not None:
            return
        self.cancelled_by = by
        if self.task is not None and self.begun:
            self.task.cancel()

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def at(self, step: str) -> None:
        """The turn has come this far: queued, session_ready, first_block, result, committed. The last attempt counts,
        but it was queued until its first one; `committed` is when the commit begins, as it is a part of it."""
        if step not in self._steps or step != "queued":
            self._steps[step] = time.time()

    @property
    def timings(self) -> JSON:
        """Milliseconds from the acceptance to the end of each step."""
        return {step: round((at - self._accepted) * 1000, 1) for step, at in self._steps.items()}

    def attempt_ended(self, how: JSON) -> None:
        self.attempts = with_end(self.attempts, how)

    # what its clients do

    def attach(self, *, replayed: bool = False, timeout: float | None = None) -> Answer:
        """`timeout` (seconds) is how long this client waits; then its answer is a `TurnTimeout`."""
        if self._timer is not None:
            self._on_return()
        self._stop_timer()
        self._clients += 1
        return Answer(self, replayed=replayed, timeout=timeout)

    def _detach(self, *, acknowledged: bool) -> None:
        self._clients -= 1
        if acknowledged and not self._acknowledged:
            self._acknowledged = True
            self._on_delivery(True)
        if self._clients or self._acknowledged:
            return
        self._on_delivery(False)
        if not self._done:
            self._timer = asyncio.get_running_loop().call_later(self._grace, self._on_empty)

    async def _follow(self, patience: _Patience) -> AsyncIterator[Sequence[TurnEvent]]:
        at = 0
        while True:
            while at < len(self._events):
                there = self._events[at:]
                at += len(there)
                self._given = max(self._given, at)
                yield there
            if self._done:
                self._raise_error()
                return
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await patience.wait(waiter)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise errors.from_dict(self._error.as_dict())


def with_end(attempts: Sequence[JSON], how: JSON) -> list[JSON]:
    """Complete the entry of the attempt that was under way; of one that never began, make it."""
    if attempts and "status" not in attempts[-1]:
        return [*attempts[:-1], attempts[-1] | how]
    return [*attempts, how]


class _Patience:
    """How long one client waits in all."""

    def __init__(self, timeout: float | None) -> None:
        self._timeout = timeout
        self._until = None if timeout is None else asyncio.get_running_loop().time() + timeout

    async def wait(self, what: Awaitable[object]) -> None:
        if self._until is None:
            await what
            return
        try:
            async with asyncio.timeout_at(self._until):
                await what
        except TimeoutError as exc:
            raise TurnTimeout(
                f"no answer within the {self._timeout:g} s of the request: send the same again to go on waiting"
            ) from exc


class Answer:
    """One client's view of a running (or replayed) turn. `replayed`: the answer was there before it asked.

    Whoever holds one calls `leave` in the end (a `finally` is the place), after `acknowledge` where it applies.
    """

    def __init__(self, live: LiveTurn, *, replayed: bool, timeout: float | None = None) -> None:
        self._live = live
        self.agent_id = live.agent_id
        self.turn_id = live.turn.id
        self._patience = _Patience(timeout)
        self._open = True
        self.replayed = replayed

    def another(self) -> Answer:
        """One more view of the same turn, for one more client."""
        return self._live.attach(replayed=self.replayed)

    @property
    def accepted(self) -> Turn:
        """The turn as it is known now; at the latest since `events` or `turn` has ended, the committed one."""
        return self._live.turn

    async def events(self) -> AsyncIterator[TurnEvent]:
        """All events of the turn from its first one, however late this client came; ends with `Finished`.

        Raises the turn's `ProxyError` when it failed or was cancelled.
        """
        async for there in self.batches():
            for event in there:
                yield event

    def batches(self) -> AsyncIterator[Sequence[TurnEvent]]:
        """The same events; those that are there at once come together, and none waits for the next one."""
        return self._live._follow(self._patience)

    async def turn(self) -> Turn:
        """The committed turn. Raises the turn's `ProxyError` when it failed or was cancelled."""
        await self._patience.wait(self._live._finished.wait())
        self._live._raise_error()
        return self._live.turn

    def acknowledge(self) -> None:
        """The finish event (or the whole body) was handed to the client. Idempotent."""
        if self._open:
            self._open = False
            self._live._detach(acknowledged=True)

    def leave(self) -> None:
        """This client went away. When the last one leaves an unfinished turn, `disconnect_grace` starts.

        A no-op after `acknowledge`. Idempotent, so it can stand in a `finally`.
        """
        if self._open:
            self._open = False
            self._live._detach(acknowledged=False)

    def cancel(self) -> None:
        """End the turn now: a queued one is removed from its lane, a running one is interrupted."""
        self._live.cancel("client")


# Seconds after which a proxy that was stopped to be started again answers, with some to spare.
RESTART = 5.0
_WHY: Mapping[CancelledBy, str] = {
    "client": "cancelled by the client",
    "left": "every client has left",
    "deletion": "the agent was deleted",
}


def cancelled(by: CancelledBy) -> ProxyError:
    """The error of a turn that was ended from outside. Clients send again what was not their own doing."""
    if by == "stopping":
        why = "the proxy stopped before this turn was finished, and nothing of it was kept: send it again"
        return Interrupted(why, retry_after=RESTART)
    if by == "takeover":
        return LeaseLost("another proxy has taken this agent over: send it again", retry_after=1.0)
    return TurnCancelled(f"{_WHY[by]}; nothing of this turn was kept", detail={"by": by})


def replay(live: LiveTurn) -> None:
    """Give a finished turn's answer again, as if it had just been said."""
    turn = live.turn
    at = turn.session_id or "", turn.continuity or "started"
    told = turn.evidence.unmet, turn.evidence.notes
    live.publish(Started(live.agent_id, turn.id, *at, *told, turn.backend, turn.told_model if turn.backend else None))
    for event in said(turn.output):
        live.publish(event)
    live.finish(turn)


def said(output: Sequence[Block], first: int = 0) -> Iterator[TurnEvent]:
    """The events of an answer that is there as a whole, its blocks numbered from `first`."""
    for index, block in enumerate(output, first):
        yield BlockStart(index, _opening(block))
        for delta in _deltas(block):
            yield BlockDelta(index, delta)
        yield BlockStop(index)


def _opening(block: dict[str, object]) -> dict[str, object]:
    kind = block.get("type")
    if kind == "text":
        return {"type": "text", "text": ""}
    if kind == "thinking":
        return {"type": "thinking", "thinking": "", "signature": ""}
    if kind == "tool_use":
        return {**block, "input": {}}
    return dict(block)


def _deltas(block: dict[str, object]) -> list[dict[str, object]]:
    if block.get("type") == "text":
        return [{"type": "text_delta", "text": block["text"]}]
    if block.get("type") == "thinking":
        deltas: list[dict[str, object]] = [{"type": "thinking_delta", "thinking": block.get("thinking", "")}]
        if block.get("signature"):
            deltas.append({"type": "signature_delta", "signature": block["signature"]})
        return deltas
    if block.get("type") == "tool_use":
        return [{"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)}]
    return []


async def or_left(accepting: asyncio.Task[Answer]) -> Answer:
    """Its answer; when the caller goes away meanwhile, the answer is left as by any client."""
    try:
        return await asyncio.shield(accepting)
    except asyncio.CancelledError:
        accepting.add_done_callback(_leave)
        raise


def _leave(accepting: asyncio.Task[Answer]) -> None:
    if not accepting.cancelled() and accepting.exception() is None:
        accepting.result().leave()


async def kept(answer: Answer) -> None:
    """Wait for the answer in place of a client."""
    try:
        await answer.turn()
        answer.acknowledge()
    except ProxyError:
        answer.leave()  # the failure is stored with the turn
    except asyncio.CancelledError:
        answer.leave()
        raise
