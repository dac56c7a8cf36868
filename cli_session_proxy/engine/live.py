"""A turn while it runs: its events, its connected clients, and whether its answer arrived."""

from __future__ import annotations

import asyncio
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal, NamedTuple
from weakref import WeakValueDictionary

from .. import errors, logs
from ..domain.approvals import PendingApproval
from ..domain.blocks import as_stream
from ..domain.models import (
    JSON,
    NO_USAGE,
    Agent,
    Block,
    BlockDelta,
    BlockStart,
    BlockStop,
    CancelledBy,
    Compose,
    Delivery,
    Finished,
    LimitWait,
    Link,
    Started,
    Turn,
    TurnEvent,
    TurnRequest,
    Usage,
    Waits,
)
from ..errors import Interrupted, LeaseLost, ProxyError, RateLimited, StoreUnavailable, TurnCancelled, TurnTimeout
from ..stores.base import Lease, Store
from ..tasks import Tasks
from .ownership import Instances
from .passing import VIA

log = logs.get(__name__)

# The W3C trace context of the HTTP request that is being answered: its headers `traceparent` and `tracestate`.
TRACE_CONTEXT: ContextVar[tuple[str, str] | None] = ContextVar("trace_context", default=None)
# What became of the answer. `arrived`: a client has it. `passed on`: so far only another proxy has it, which stores
# whether its own client gets it. `shared`: the same, and another client gets it or another proxy has it, too. `left`:
# all clients left without it, perhaps before it was complete.
Handover = Literal["arrived", "passed on", "shared", "left"]
# What a turn does or waits for, in this order: an earlier turn; another proxy's lease; a slot; its session; the model's
# first word; the rest of the answer; a tool of the CLI; an approval; the next retry; the commit; the end of a limit.
Doing = Literal[
    "lane", "lease", "slot", "preparing", "thinking", "answering", "tool", "approval", "retry", "storing", "limit"
]
# What the turn does after each step.
_AFTER: Mapping[str, Doing] = {
    "queued": "preparing", "session_ready": "thinking", "first_block": "answering", "result": "storing",
    "committed": "storing",
}  # fmt: skip
# The most events that a client is given at once. A program that imitates the CLI can report 600,000; writing them in
# one piece held the event loop for 6 s.
AT_ONCE = 1000
# Seconds until a write of a delivery that failed is tried again, and from its start until requests stop waiting for it.
NOTE_AGAIN, NOTED_WITHIN = 0.5, 10.0
# Characters at the end of an unfinished answer that watchers see: a screenful, and cheap to send again and again.
TAIL = 8000
# Characters before that tail that are also searched for secrets: half a secret would not be recognised.
BEFORE_TAIL = 2000
# The longest Retry-After that the SDKs of OpenAI and Anthropic wait for, in seconds. A client that does not stream
# waits no longer for a limit.
PATIENCE = 60.0


@dataclass(frozen=True, slots=True)
class Requested:
    """Facts of a turn's request for observers. They are not stored: a turn that this proxy ended for a dead one has
    none. `accepted_at`: seconds since 1970; the turn's timings count from it."""

    owner: str
    agent_id: str
    accepted_at: float
    request_id: str | None = None
    trace_context: tuple[str, str] | None = None


class Observer:
    """Receives what the engine did, for metrics and live views. Must not fail or block."""

    def adopted(self, turn: Turn, link: Link) -> None:
        """Turns that a person added to a session were adopted into the chain. `turn` is the last one; `link` has the
        ids of all."""

    def turn_ended(self, turn: Turn, links: Sequence[Link], requested: Requested | None, at: float, /) -> None:
        """A turn was committed with these links, or it failed or was cancelled. It was stored `at` (UTC)."""

    def spawned(self, seconds: float) -> None:
        """A process gave its first output this long after its start."""


@dataclass(frozen=True, slots=True)
class Progress:
    """A snapshot of a turn that waits or runs here, for watchers."""

    turn: Turn
    doing: Doing
    since: float  # when it began to do that
    detail: JSON  # data on that
    text: str  # the end of the answer so far; its secrets are not hidden yet
    skipped: int  # how many characters of the answer come before `text`
    used: Usage  # by this attempt so far
    asking: tuple[PendingApproval, ...] = ()  # tools that wait for approval


@dataclass(slots=True)
class _Tail:
    """The end of the answer so far, updated from event to event."""

    read: int = 0
    length: int = 0
    text: str = ""

    def follow(self, events: Sequence[TurnEvent]) -> None:
        new = "".join(
            str(event.delta["text"])
            for event in events[self.read :]
            if isinstance(event, BlockDelta) and event.delta.get("type") == "text_delta"
        )
        self.read = len(events)
        self.length += len(new)
        self.text = (self.text + new)[-TAIL - BEFORE_TAIL :]


class ComposedTurn(NamedTuple):
    """A turn with the prompt that was composed when it ran (see `Compose`), and placed in the chain."""

    composed: TurnRequest
    turn: Turn  # with this prompt, and its parent
    items: tuple[tuple[str, str], ...]  # the client's items in the prompt: each id, and the turn that has it


class LiveTurn:
    """One turn's events, from the first one on, for any number of clients that come and go.

    The events are kept until the turn has ended, because a retry may attach at any time. Every client gets all events
    that any client got, so that a broken stream can be resumed.

    `on_empty` is called `grace` seconds after the last client left an unfinished turn; `on_return`, if a client comes
    back before that; `on_delivery`, with what became of the answer (see `Handover`).
    """

    def __init__(
        self,
        turn: Turn,
        agent: Agent,
        *,
        grace: float,
        on_empty: Callable[[], object],
        on_delivery: Callable[[Handover], None],
        on_return: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.turn = turn
        self.now = clock  # for all stored times, in seconds since 1970
        self.attempts: list[JSON] = list(turn.attempts)
        self.evidence = turn.evidence  # as last stored
        self._steps: dict[str, float] = {}
        self.accepted_at = clock()
        self._doing: tuple[Doing, float, JSON] = ("lane", time.time(), {})
        self.used = NO_USAGE
        self._tail = _Tail()
        self.asking: dict[str, PendingApproval] = {}  # by id
        self.agent = agent  # as it was when the turn was accepted or found here
        self.cancelled_by: CancelledBy | None = None
        self.requested: Requested | None = None
        self.lease: Lease | None = None  # while it runs
        self.compose: Compose | None = None  # makes its prompt when it runs
        self.composed: TurnRequest | None = None  # its prompt as composed at acceptance: the path may change since
        self.recomposed: ComposedTurn | None = None  # as composed when it ran
        self.task: asyncio.Task[None] | None = None
        self.limit_wait: LimitWait | None = None  # the limit that it waits for, as stored
        self.last_limit_wait: LimitWait | None = None  # the same, also after the wait
        self.runs_unattended = False  # it has waited for a limit here: it runs without clients too
        self.elsewhere = False  # another proxy runs it; while clients wait here, this one follows it (`Store.follow`)
        self.begun = False  # its task has begun: a task cancelled before its first step would skip its clean-up
        self._events: list[TurnEvent] = []
        self._received = 0  # how many of the events any client has received
        self._error: ProxyError | None = None
        self.done = False
        self._waiters: list[asyncio.Future[None]] = []
        self._end_event = asyncio.Event()
        self._end_or_wait_event = asyncio.Event()
        self._answers: set[Answer] = set()  # its clients
        self._handed_early: list[Answer] = []  # of a background turn: other proxies have its id for them
        self._acknowledged = self._arrived = False  # handed to a client; known to have arrived
        self.passed_to = ""  # the proxy that has the answer for its client
        self.may_have_arrived = False  # a client that asked for it before may have it
        self.committing = False  # whether it has clients is read already: one that comes back has to claim the answer
        self._grace = grace
        self._on_return = on_return
        self._on_empty = on_empty
        self._on_delivery = on_delivery
        self._timer: asyncio.TimerHandle | None = None

    # used by the engine

    def publish(self, event: TurnEvent) -> None:
        self._events.append(event)
        if self._waiters:
            self._wake()

    def withdraw(self, blocks: Collection[int]) -> list[Block]:
        """Remove the events of these blocks that no client has received. Returns the parts that one has."""
        if not blocks:
            return []
        start, first = len(self._events), min(blocks)
        for at in reversed(range(start)):  # from the end: there may be very many
            event = self._events[at]
            if isinstance(event, BlockStart):
                start = at if event.index in blocks else start
                if event.index <= first:
                    break
        seen, unseen = self._events[start : self._received], self._events[max(start, self._received) :]
        received, ended = _assembled(event for event in seen if getattr(event, "index", None) in blocks)
        ends = [BlockStop(index) for index in received if index not in ended]
        remaining = (event for event in unseen if getattr(event, "index", None) not in blocks)
        self._events[start:] = [*seen, *ends, *remaining]
        if self._tail.read > start:
            self._tail = _Tail()
        self._wake()
        return [
            block for block in received.values() if block["type"] not in ("text", "thinking") or block[block["type"]]
        ]

    def wait_for(self, wait: LimitWait, *, here: bool = True) -> None:
        """The turn waits for a limit, and its clients are told. `here`: in this proxy. Then the clients may leave."""
        self.limit_wait = self.last_limit_wait = wait
        self.runs_unattended = self.runs_unattended or here
        if here:
            self._stop_timer()
        self.now_doing("limit", {"until": wait.until})
        self._end_or_wait_event.set()
        self.publish(Waits(wait))

    def follow_stored(self, turn: Turn) -> None:
        """Another proxy runs it: follow its stored state."""
        if turn.limit_wait is None:
            self.limit_over()
        elif turn.limit_wait != self.limit_wait:
            self.wait_for(turn.limit_wait, here=False)

    def limit_over(self) -> None:
        """The turn begins: it no longer waits for a limit."""
        if self.limit_wait is not None:
            self.limit_wait = None
            self._end_or_wait_event.clear()

    def finish(self, turn: Turn) -> None:
        self.turn = turn
        self._end()
        self.publish(Finished(turn))

    def fail(self, error: ProxyError) -> None:
        if not self.done:
            self._error = error
            self._end()
            self._wake()

    def _end(self) -> None:
        self.done = True
        self._stop_timer()
        self._end_event.set()
        self._end_or_wait_event.set()
        for answer in self._handed_early:
            self._detach(answer, acknowledged=self._error is None)

    @property
    def abandoned(self) -> bool:
        """Every client has left, and none has acknowledged."""
        return not self._answers and not self._acknowledged

    @property
    def ends_without_clients(self) -> bool:
        """Whether it is being ended or committed as a turn that all clients left. One that comes back waits for its
        end, and then asks for what is stored."""
        return self.cancelled_by == "left" or (self.committing and self.abandoned)

    @property
    def forwarders(self) -> set[str | None]:
        """The proxies that forwarded its clients' requests (see `VIA`); None for clients of this proxy."""
        return {answer.via for answer in self._answers}

    @property
    def delivery(self) -> Delivery:
        """What became of its answer so far."""
        return "delivered" if self._arrived else self.delivery_if_left if self.abandoned else "pending"

    @property
    def delivery_if_left(self) -> Delivery:
        """The delivery to store if all clients left. An "uncertain" answer stays on the path, and the same request
        gets it: after a wait for a limit (clients may leave then), and if an earlier client has or gets it."""
        return "uncertain" if self.runs_unattended or self.may_have_arrived else self.delivery_if_failed

    @property
    def delivery_if_failed(self) -> Delivery:
        """The delivery to store if the turn has an answer, but its clients were told that it failed. Clients of a
        background turn read what the store has."""
        return "uncertain" if self.turn.in_background else "undelivered"

    @property
    def output_sent(self) -> bool:
        """Whether a part of the answer was published: running the turn again would be visible."""
        return any(isinstance(event, BlockStart) for event in self._events)

    def complete(self, output: Sequence[Block]) -> bool:
        """Publish the rest of this answer, if what was published so far is its beginning. Else return False."""
        blocks, ended = _assembled(self._events)
        *whole, (last, begun) = blocks.items()
        if len(blocks) > len(output) or [block for _, block in whole] != list(output[: len(whole)]):
            return False
        final = output[len(whole)]
        if begun != final:
            if not begun.get("type") == final.get("type") == "text" or last in ended:
                return False
            sent, text = str(begun["text"]), str(final["text"])
            if not text.startswith(sent):
                return False
            self.publish(BlockDelta(last, {"type": "text_delta", "text": text[len(sent) :]}))
        if last not in ended:
            self.publish(BlockStop(last))
        for event in answer_events(output[len(blocks) :], last + 1):
            self.publish(event)
        return True

    @property
    def next_block(self) -> int:
        """The number after the last block that was published."""
        return 1 + max((event.index for event in self._events if isinstance(event, BlockStart)), default=-1)

    def cancel(self, by: CancelledBy) -> None:
        """End the turn: cancel its task, which then fails with `cancelled(by)`."""
        if self.done or self.cancelled_by is not None:
            return
        self.cancelled_by = by
        if self.task is not None and self.begun:  # else the task sees `cancelled_by` at its first step
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

    def reached(self, step: str) -> None:
        """Record the time of a step: queued, session_ready, first_block, result, committed.

        The commit stores these times, so `committed` is when it begins. A retry overwrites all but `queued`.
        """
        if step == "queued":
            self._steps.setdefault(step, self.now())
        else:
            self._steps[step] = self.now()
        self.now_doing(_AFTER[step])

    def now_doing(self, what: Doing, detail: JSON | None = None) -> None:
        """Record what the turn does from now on, for watchers."""
        self._doing = (what, time.time(), detail or {})

    def backend_spoke(self) -> None:
        """Record that the provider answers: no tool runs any more."""
        if self._doing[0] in ("tool", "retry"):
            self.now_doing("answering" if self.output_sent else "thinking")

    def progress(self) -> Progress:
        """A snapshot for watchers, who do not count as clients."""
        self._tail.follow(self._events)
        what, since, detail = self._doing
        skipped = self._tail.length - len(self._tail.text)
        asking = tuple(self.asking.values())
        return Progress(self.turn, what, since, detail, self._tail.text, skipped, self.used, asking)

    @property
    def timings(self) -> JSON:
        """When each step was reached, in milliseconds since the acceptance."""
        return {step: round((at - self.accepted_at) * 1000, 1) for step, at in self._steps.items()}

    # used by its clients

    def attach(self, *, replayed: bool = False, timeout: float | None = None) -> Answer:
        """`timeout` (seconds) is how long this client waits; then its answer is a `TurnTimeout`."""
        if self._timer is not None:
            self._on_return()
        self._stop_timer()
        answer = Answer(self, replayed=replayed, timeout=timeout)
        self._answers.add(answer)
        return answer

    def _detach(self, answer: Answer, *, acknowledged: bool) -> None:
        if acknowledged and answer.via is not None and not self.done:
            self._handed_early.append(answer)  # it counts when the turn has ended
            return
        self._answers.discard(answer)
        if acknowledged and not self._arrived:
            how: Handover = "arrived"
            if answer.via is not None:
                how = "shared" if self._acknowledged or self._answers else "passed on"
            self._acknowledged, self._arrived = True, how == "arrived"
            self.passed_to = answer.via or ""
            self._on_delivery(how)
        if self._answers or self._acknowledged:
            return
        self._on_delivery("left")
        if not self.done and not self.runs_unattended and not self.turn.in_background:
            self._timer = asyncio.get_running_loop().call_later(self._grace, self._on_empty)

    async def _follow(self, wait: Callable[[Awaitable[object]], Awaitable[None]]) -> AsyncIterator[Sequence[TurnEvent]]:
        """All events from the first one on, in batches. `wait` waits for the next ones."""
        at = 0
        while True:
            while at < len(self._events):
                batch = self._events[at : at + AT_ONCE]
                at += len(batch)
                self._received = max(self._received, at)
                yield batch
                if len(batch) == AT_ONCE:
                    await asyncio.sleep(0)
            if self._error is not None:
                raise errors.from_dict(self._error.as_dict())
            if self.done:
                return
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await wait(waiter)


def with_end(attempts: Sequence[JSON], end: JSON) -> list[JSON]:
    """These attempts with `end` added to the last one. If that one has ended, the present attempt never began: it
    gets an entry of its own."""
    if attempts and "status" not in attempts[-1]:
        return [*attempts[:-1], attempts[-1] | end]
    return [*attempts, end]


class Answer:
    """One client's view of a running or replayed turn. `replayed`: another request started it. `timeout`: how many
    seconds the client waits in all.

    Its user calls `acknowledge` once the answer is delivered, and always `leave`, in a `finally`.
    """

    def __init__(self, live: LiveTurn, *, replayed: bool, timeout: float | None = None) -> None:
        self._live = live
        self.agent_id = live.agent.agent_id
        self.turn_id = live.turn.id
        self._timeout = timeout
        self._until = None if timeout is None else asyncio.get_running_loop().time() + timeout
        self._open = True
        self.replayed = replayed
        self.via = VIA.get()  # the proxy that forwarded this client's request, if any

    @property
    def accepted(self) -> Turn:
        """The turn as accepted or as it runs; the committed one after `events` or `turn` has ended."""
        return self._live.turn

    async def events(self) -> AsyncIterator[TurnEvent]:
        """All events of the turn from its first one, however late this client came; ends with `Finished`.

        Raises the turn's `ProxyError` when it failed or was cancelled.
        """
        async for batch in self.batches():
            for event in batch:
                yield event

    def batches(self) -> AsyncIterator[Sequence[TurnEvent]]:
        """What `events` gives, in batches: each has all events that are available, without waiting for more."""
        return self._live._follow(self._wait)

    @property
    def limit_wait(self) -> LimitWait | None:
        """The limit that the turn waits for, if any."""
        return self._live.limit_wait

    async def turn(self, *, patience: float | None = None) -> Turn:
        """The committed turn. Raises the turn's `ProxyError` when it failed or was cancelled.

        With `patience` (seconds): raises `RateLimited` at once if it has to wait longer for a limit. The turn stays
        queued.
        """
        live = self._live
        if patience is not None:
            await self._wait(live._end_or_wait_event.wait())
            if live.limit_wait is not None and (left := live.limit_wait.until - live.now()) > patience:
                at = datetime.fromtimestamp(live.limit_wait.until, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
                raise RateLimited(
                    f"{live.limit_wait.why} (this request is kept, and is sent at {at}: send the same again then to "
                    "get its answer)",
                    retry_after=max(1.0, left),
                    detail={"waits_until": live.limit_wait.until},
                    retry=False,
                )
        await self._wait(live._end_event.wait())
        if live._error is not None:
            raise errors.from_dict(live._error.as_dict())
        return live.turn

    async def _wait(self, what: Awaitable[object]) -> None:
        if self._until is None:  # no timeout
            await what
            return
        try:
            async with asyncio.timeout_at(self._until):
                await what
        except TimeoutError as exc:
            raise TurnTimeout(
                f"no answer within the {self._timeout:g} s of the request: send the same again to wait longer"
            ) from exc

    def acknowledge(self) -> None:
        """The finish event (or the whole body) was handed to the client; of a background turn, its id. Idempotent."""
        if self._open:
            self._open = False
            self._live._detach(self, acknowledged=True)

    def leave(self) -> None:
        """This client went away. When the last one leaves an unfinished turn, `disconnect_grace` starts.

        A no-op after `acknowledge`. Idempotent, so it can stand in a `finally`.
        """
        if self._open:
            self._open = False
            self._live._detach(self, acknowledged=False)

    def cancel(self) -> None:
        """End the turn now: a queued one is removed from its lane, a running one is interrupted."""
        self._live.cancel("client")


# A restarted proxy answers again within this many seconds.
RESTART = 5.0
_WHY: Mapping[CancelledBy, str] = {
    "client": "cancelled by the client",
    "operator": "cancelled by hand, on the page or by POST /v1/chains/{agent_id}/cancel",
    "left": "every client has left",
    "deletion": "the agent was deleted",
}


def cancelled(by: CancelledBy) -> ProxyError:
    """The error of a turn that was cancelled. It asks for a retry only if the proxy itself cancelled it."""
    if by == "stopping":
        why = "the proxy stopped before this turn was finished, and nothing of it was kept: send it again"
        return Interrupted(why, retry_after=RESTART)
    if by == "takeover":
        return LeaseLost("another proxy has taken this agent over: send it again", retry_after=1.0)
    return TurnCancelled(f"{_WHY[by]}; nothing of this turn was kept", detail={"by": by})


def replay(live: LiveTurn) -> None:
    """Publish a finished turn's answer again, as if it had just been produced."""
    turn = live.turn
    live.may_have_arrived = turn.delivery in ("pending", "uncertain")
    session = turn.session_id or "", turn.continuity or "started", turn.evidence.unmet, turn.evidence.header_notes
    reported_model = turn.reported_model if turn.backend else None
    live.publish(Started(live.agent.agent_id, turn.id, *session, turn.backend, reported_model))
    for event in answer_events(turn.output):
        live.publish(event)
    live.finish(turn)


def answer_events(output: Sequence[Block], first: int = 0) -> Iterator[TurnEvent]:
    """The events of a complete answer, its blocks numbered from `first`."""
    for index, block in enumerate(output, first):
        opening, deltas = as_stream(block)
        yield BlockStart(index, opening)
        for delta in deltas:
            yield BlockDelta(index, delta)
        yield BlockStop(index)


def _assembled(events: Iterable[TurnEvent]) -> tuple[dict[int, Block], set[int]]:
    """The blocks in these events by their number, as far as they go, and the numbers of those that have ended."""
    blocks: dict[int, Block] = {}
    deltas: dict[int, list[Block]] = {}
    ended: set[int] = set()
    for event in events:
        if isinstance(event, BlockStart):
            blocks[event.index], deltas[event.index] = dict(event.block), []
        elif isinstance(event, BlockDelta) and event.index in deltas:
            deltas[event.index].append(event.delta)
        elif isinstance(event, BlockStop):
            ended.add(event.index)
    for index, block in blocks.items():
        for name in ("text", "thinking", "signature"):
            if pieces := [str(delta[name]) for delta in deltas[index] if name in delta]:
                block[name] = "".join([str(block.get(name, "")), *pieces])
    return blocks, ended


def leave_accepted(accepting: asyncio.Task[Answer]) -> None:
    """Leave the answer of a request whose caller was cancelled while it was accepted."""
    if not accepting.cancelled() and accepting.exception() is None:
        accepting.result().leave()


# --- Deliveries. The next turn needs to know whether an answer arrived, so this is stored as clients come and go.


class Deliveries:
    """Makes live turns that store their delivery. `grace`: seconds that a turn runs on without a client."""

    def __init__(
        self, store: Store, instances: Instances, tasks: Tasks, grace: float, delivered: Callable[[LiveTurn], None]
    ) -> None:
        """`delivered` is called with each turn whose answer has arrived, once that is stored."""
        self._delivered = delivered
        self._store = store
        self._instances = instances
        self._tasks = tasks
        self._grace = grace
        # The last one that was made of each turn, as long as it runs or a client reads its answer.
        self._lives: WeakValueDictionary[str, LiveTurn] = WeakValueDictionary()
        # By turn: its last write of a delivery, until done, and until when requests wait for it (the loop's clock).
        self._writes: dict[str, tuple[asyncio.Task[None], float]] = {}
        self.arrived: set[str] = set()  # ids of turns whose answer a client has, until that is stored
        self.stopping = asyncio.Event()  # a write that fails from now on is not tried again

    def live(self, turn: Turn, agent: Agent, *, elsewhere: bool = False) -> LiveTurn:
        """The turn for its clients. `elsewhere`: another proxy runs it; see `now_runs_here`."""

        def on_delivery(how: Handover) -> None:
            # `elsewhere` as it is now: when this is stored, this proxy may have claimed the answer for other clients.
            self.write(turn.id, partial(self._store_handover, live, how, live.elsewhere))
            if how == "arrived":
                self.arrived.add(turn.id)

        async def return_stored() -> None:
            """A client came back: its answer is awaited again."""
            if live.elsewhere:
                await self._store.follow(turn.id, self._instances.id)
            else:
                await self._store.set_delivery(turn.id, "pending", by=self._instances.id)

        live = LiveTurn(
            turn,
            agent,
            grace=self._grace,
            on_empty=lambda: self._tasks.own(self._give_up(live)),
            on_delivery=on_delivery,
            on_return=partial(self.write, turn.id, return_stored),
            clock=self._instances.now,
        )
        live.elsewhere = elsewhere
        self._lives[turn.id] = live
        return live

    def forwarders(self, turn_id: str) -> set[str | None]:
        """See `LiveTurn.forwarders`; also while the answer of an ended turn is being read."""
        live = self._lives.get(turn_id)
        return set() if live is None else live.forwarders

    async def follow(self, live: LiveTurn) -> None:
        """Store that clients here wait for a turn of another proxy. Raises `StoreUnavailable`."""
        self.write(live.turn.id, partial(self._store.follow, live.turn.id, self._instances.id))
        await self.stored(live.turn.id)

    def now_runs_here(self, live: LiveTurn) -> None:
        """From now on this proxy runs the turn or delivers its answer."""
        live.elsewhere = False
        self.write(live.turn.id, partial(self._store.unfollow, live.turn.id, self._instances.id))
        if live.abandoned:  # since a moment ago
            self.write(live.turn.id, partial(self._store_handover, live, "left", False))

    async def _store_handover(self, live: LiveTurn, how: Handover, elsewhere: bool) -> None:
        turn_id, arrived = live.turn.id, how == "arrived"
        if arrived or (how == "left" and not elsewhere):
            # "delivered" may be stored a little later: the next turn treats "pending" alike. But it leaves an
            # "undelivered" answer off the path, so that is stored at once.
            soon = arrived and live.turn.delivery == "pending"
            delivery: Delivery = "delivered" if arrived else live.delivery_if_left
            await self._store.set_delivery(turn_id, delivery, by=self._instances.id, soon=soon)
        if how == "shared":
            # One proxy that notes that its client left takes the answer from no other client.
            await self._store.set_delivery(turn_id, "uncertain", by=self._instances.id)
        if how == "passed on" and live.passed_to:
            await self._store.hand_on(turn_id, self._instances.id, live.passed_to)
        if elsewhere:
            await self._store.unfollow(turn_id, self._instances.id)
        if arrived:
            self._delivered(live)

    def write(self, turn_id: str, write: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
        """Store the turn's delivery, after its earlier writes. A write that fails or is in doubt is tried again until
        this proxy stops: without a note that its client left, the same request again would be a second turn."""
        earlier_write, _ = self._writes.get(turn_id, (None, 0.0))
        self.arrived.discard(turn_id)  # this write may say otherwise

        async def in_order() -> None:
            try:
                if earlier_write is not None:  # a store may write concurrently
                    await asyncio.wait([earlier_write])
                is_first = True
                while True:
                    try:
                        await write()
                        return
                    except StoreUnavailable as exc:
                        if is_first or self.stopping.is_set():
                            log.warning("delivery_not_noted", turn_id=turn_id, error=exc.message)
                        if self.stopping.is_set():
                            return
                    is_first = False
                    with suppress(TimeoutError):
                        async with asyncio.timeout(NOTE_AGAIN):
                            await self.stopping.wait()
            finally:
                if self._writes.get(turn_id) is writing:
                    del self._writes[turn_id]
                    self.arrived.discard(turn_id)

        until = asyncio.get_running_loop().time() + NOTED_WITHIN
        writing = self._writes[turn_id] = self._tasks.own(in_order()), until
        return writing[0]

    async def stored(self, turn_id: str) -> None:
        """Wait until the turn's delivery is stored. Raises `StoreUnavailable` if that takes longer than `NOTED_WITHIN`
        seconds, whoever waits."""
        if turn_id in self._writes:
            write, until = self._writes[turn_id]
            _, waiting = await asyncio.wait([write], timeout=until - asyncio.get_running_loop().time())
            if waiting:
                raise StoreUnavailable(
                    "it could not be stored yet what became of the last answer to this request: try again",
                    retry_after=1.0,
                )

    async def _give_up(self, live: LiveTurn) -> None:
        """Cancel a turn without clients here, unless a client waits at another proxy (see `Engine._follow`)."""
        turn_id = live.turn.id
        with suppress(StoreUnavailable):
            await self.stored(turn_id)
        waited_for = False
        if not live.elsewhere:
            try:
                waited_for = await self._instances.any_waits(await self._store.followers(turn_id))
            except StoreUnavailable as exc:
                log.warning("delivery_not_noted", turn_id=turn_id, error=exc.message)
        if live.abandoned and not waited_for and not live.runs_unattended:
            live.elsewhere = False  # who comes back waits for its end
            live.cancel("left")
