"""Step 1 of a request: which agent and turn does it continue, and is it a repeat of an earlier request?"""

from __future__ import annotations

import itertools
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple

from ..aside.pool import Aside
from ..backends.base import Backend
from ..domain import call_ids, lineage, side_calls
from ..domain.client_tools import calls_of
from ..domain.evidence import Brought, Evidence
from ..domain.lineage import HistoryEnding, Past
from ..domain.models import (
    FINISHED,
    JSON,
    ON_PATH,
    ONCE,
    THINKING,
    Agent,
    Message,
    Placed,
    Record,
    Rule,
    Turn,
    TurnRequest,
)
from ..errors import Interrupted, InvalidRequest, NotFound
from ..sandbox import directory_name
from ..stores.base import Store, WholeTurn
from .fitting import RequestFitting

# Seconds after a turn's end in which an equal request counts as a retry of it. Later it is a new turn. The SDKs retry
# after at most 60 s (the longest Retry-After that they heed).
RETRY_WINDOW = 90.0

HOUR = 3600.0

# Up to so many messages and characters are hashed on the event loop (about 3 ms); larger ones in a thread.
SHORT = 500
SHORT_TEXT = 512 * 1024
# Turns of a client's history that are stored in one transaction: 20 ms of a thread, and of the store.
PIECE = 100


_ROLE = attrgetter("role")


def new_id(kind: str) -> str:
    return f"{kind}_{os.urandom(16).hex()}"


class Placement:
    """Finds or makes the agent, and decides which turn a request continues. One per engine."""

    def __init__(
        self,
        store: Store,
        backend: Backend,
        aside: Aside,
        *,
        instance: str,
        idempotency_hours: float,
        is_gone: Callable[[str | None], Awaitable[bool]],
        was_left: Callable[[Turn], Awaitable[bool]],
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._backend = backend
        self._aside = aside
        self._instance = instance  # this proxy's id
        self._hours = idempotency_hours
        self._is_gone = is_gone  # whether a proxy has ended or does not respond
        self._was_left = was_left  # whether all clients of a turn left without its answer
        self._clock = clock  # seconds since 1970, the same for all proxies of the store

    async def resolve(
        self,
        request: TurnRequest,
        *,
        admit: Callable[[], None],
        passed_over: Turn | None = None,
        send_on: Callable[[Agent], Awaitable[None]] | None = None,
    ) -> Turn | tuple[Agent, Turn]:
        """The existing turn that this request repeats, or a new turn to accept. The history of a new one is stored
        first.

        A repeat is recognised by its idempotency key, as a retry, or as a claim of an undelivered answer; never as
        `passed_over`, a turn that the conversation went on without. `send_on` is called once the agent is known:
        another proxy may have to run it. `admit` is called before anything is stored. Both may raise.
        """
        if not request.kept:
            _check_once(request)
        latest, known = await self._store.arrival(request.owner, request.fingerprint, request.agent_id)
        earlier: Turn | None = None
        if latest is not None or request.idempotency_key is not None:
            earlier = await self._earlier(request, latest, self._clock())
        if earlier is not None and (passed_over is None or earlier.id != passed_over.id):
            return earlier
        if send_on is not None and known is not None:
            await send_on(known)
        admit()
        fitting = RequestFitting(self._aside)
        for block in request.messages[-1].content if request.messages else ():
            if block.get("type") == "document":
                await fitting.check(block)
        agent, turn, imported = await self.place(request, known)
        if send_on is not None and known is None:
            await send_on(agent)
        if imported:
            turn = replace(await self._store_history(agent, turn, imported, fitting), created_at=self._clock())
        return agent, turn

    async def place(self, request: TurnRequest, agent: Agent | None = None) -> tuple[Agent, Turn, tuple[Message, ...]]:
        """Decide which turn of which agent the request continues. Returns the agent, the new turn, and the exchanges of
        the history that are to be stored before it. `agent`: the one that the request names, if that exists."""
        if request.compose is not None:
            assert request.agent_id is not None
            if agent is None:
                agent = await self._ensure(request.owner, request.agent_id, named=True)
            rule: Rule = "fresh" if request.fresh else "head"
            placed = Placed(rule, messages=len(request.messages))
            return agent, self._turn(request, agent, None, request.messages, placed), ()
        if not request.messages or request.messages[-1].role != "user":
            raise InvalidRequest("the last message must be the user's (or a tool's result)", param="messages")
        match = None
        messages, continues = request.messages, request.continues
        if continues is not None:
            agent, continues = await self._named_turn(request)
        else:
            if request.agent_id is not None and agent is None:
                agent = await self._ensure(request.owner, request.agent_id, named=True)
            # Without an answer in the history there is nothing of ours to match.
            if not request.fresh and "assistant" in map(_ROLE, messages):
                match, messages, refused = await self._matched(request, agent)
                known = match[0] if match is not None else refused
                if agent is None and known is not None:
                    agent = await self._store.agent_by_key(known.agent_key)
        parent, placed = lineage.decide(
            messages,
            named=request.agent_id is not None,
            fresh=request.fresh,
            continues=request.continues,
            match=match,
            head=agent.head if agent else None,
            keep_system=request.keep_system,
        )
        if placed.rule == "id":
            parent = continues
        # A turn at the head is never taken for a side call.
        if not placed.at_head and side_calls.suspected(request, placed.rule, match[0] if match else None):
            placed = replace(placed, side=True)
        if agent is None:
            agent = await self._ensure(request.owner, new_id("auto" if request.kept else ONCE), named=False)
        imported, new = placed.parts(messages)
        if match is not None and parent == match[0].id:
            last = itertools.takewhile(lambda one: one.role == "assistant", reversed(messages[: match[1].end]))
            said = [block for message in reversed(list(last)) for block in message.content]
            if imported:
                at = next(at for at, one in enumerate(imported) if one.role == "assistant")
                imported = (*call_ids.in_our_ids(imported[:at], said, match[0].output), *imported[at:])
            else:
                new = call_ids.in_our_ids(new, said, match[0].output)
        return agent, self._turn(request, agent, parent, new, placed), imported

    def _turn(
        self, request: TurnRequest, agent: Agent, parent: str | None, new: tuple[Message, ...], placed: Placed
    ) -> Turn:
        return Turn(
            id=new_id("turn"),
            seq=0,
            agent_key=agent.key,
            parent_id=parent,
            status="queued",
            model=request.model,
            input=new,
            created_at=self._clock(),
            system=request.system,
            effort=request.effort,
            profile=request.profile,
            placed=placed,
            options=request.options,
            origin=request.wire,
            fingerprint=request.fingerprint,
            call=request.call,
            instance=self._instance,
        )

    async def _named_turn(self, request: TurnRequest) -> tuple[Agent, str | None]:
        """The agent of the turn that the request names, and the turn to continue: that one or, if the model refused it,
        its parent."""
        assert request.continues is not None
        turn = await self._store.turn(request.continues)
        agent = await self._store.agent_by_key(turn.agent_key) if turn else None
        if turn is None or agent is None or agent.owner != request.owner:
            raise NotFound(f"no turn {request.continues!r}: send the whole conversation, or an id that you were given")
        while turn is not None and turn.status == "refused":
            turn = await self._store.turn(turn.parent_id) if turn.parent_id else None
        return agent, turn.id if turn else None

    async def _matched(
        self, request: TurnRequest, agent: Agent | None
    ) -> tuple[tuple[Turn, HistoryEnding] | None, tuple[Message, ...], Turn | None]:
        """The result of `match`, the messages without exchanges that the model refused here, and the last refused turn.

        A refused exchange is on no path: the message after it continues the turn before it.
        """
        refused: Turn | None = None
        messages = request.messages
        while (found := await self.match(request.owner, messages, agent)) and found[0].status == "refused":
            refused, end = found[0], found[1].end
            begins = max((at for _, _, at in list(lineage.runs(messages[:end]))[:-2]), default=0)
            messages = (*messages[:begins], *messages[end:])
        return found, messages, refused

    async def _ensure(self, owner: str, agent_id: str, *, named: bool) -> Agent:
        directory = directory_name(owner, agent_id)
        return await self._store.ensure_agent(owner, agent_id, directory, named=named, now=self._clock())

    async def match(
        self, owner: str, messages: tuple[Message, ...], agent: Agent | None
    ) -> tuple[Turn, HistoryEnding] | None:
        """The deepest turn whose path equals the beginning of the history; within the named agent, else of unnamed
        ones."""
        if _is_short(messages):
            found = lineage.endings(messages)
        else:
            found = await self._aside.thread(lineage.endings, messages)
        known = {ending.hash: ending for ending in found}
        turn = await self._store.deepest(owner, list(known), agent.key if agent else None) if known else None
        return (turn, known[turn.path_hash]) if turn and turn.path_hash else None

    async def say(
        self, agent: Agent, turn: Turn, composed: TurnRequest, before: Turn | None
    ) -> tuple[Turn, tuple[tuple[str, str], ...]]:
        """The turn with its composed prompt and its parent, and its items, each with the turn that it belongs to.

        `before` is the end of the path so far. Exchanges that the prompt brings along are stored as turns after it.
        """
        parent, placed = lineage.decide(
            composed.messages, named=True, fresh=False, continues=composed.continues, match=None, keep_system=False
        )
        imported, new = placed.parts(composed.messages)
        at = len(imported)
        said = replace(
            turn,
            parent_id=parent,
            input=new,
            system=composed.system,
            placed=replace(turn.placed, messages=len(composed.messages), imported=at),
            options=composed.options,
        )
        takes = dict.fromkeys(composed.takes, turn.id)
        call, items = composed.call or {}, list(composed.items[at:])
        if any(items):
            call = {**call, "items": {"input": items}}
        if imported:
            pieces = _pieces(imported, composed.items)
            for piece in pieces:
                takes |= {item: piece.turn_id for item in piece.items if item in takes}
            said = await self._store_history(agent, said, imported, RequestFitting(self._aside), pieces)
        if before is not None and said.parent_id != before.id:
            call = {**call, "behind": before.id}
        return replace(said, call=call), tuple(takes.items())

    async def _store_history(
        self,
        agent: Agent,
        turn: Turn,
        imported: Sequence[Message],
        fitting: RequestFitting,
        pieces: Sequence[_Piece] = (),
    ) -> Turn:
        """Store the exchanges of the history that the chain does not have. Returns the turn as the child of the last.

        In several transactions, so that others can write between them. If this is interrupted, the same request later
        finds the deepest stored turn and continues there.
        """
        above = await self._store.turn(turn.parent_id) if turn.parent_id else None
        known = await self._store.records(above.id) if above else []
        said = await self._aside.thread(lambda: lineage.past(imported))
        calls = any(calls_of(one.output) for one in said)
        path = await self._store.path(above.id) if above and calls else []
        found = await self._aside.thread(lambda: call_ids.unique(said, path))
        shown = [await fitting.fit(one) for one in found]
        made = self._backend.imported(agent, above, known, shown, turn.model)
        coming = _imported(zip(found, made, strict=True), turn, above, self._clock(), pieces)
        parent = turn.parent_id
        while some := await self._aside.thread(lambda: list(itertools.islice(coming, PIECE))):
            await self._store.import_turns(some)
            parent = some[-1].turn.id
        own = call_ids.in_our_ids(turn.input, said[-1].output, found[-1].output)
        return replace(turn, parent_id=parent, input=own)

    async def _earlier(self, request: TurnRequest, latest: Turn | None, now: float) -> Turn | None:
        if request.idempotency_key is not None:
            turn = await self._store.turn_by_key(request.owner, request.idempotency_key, now)
            if turn is not None and turn.fingerprint != request.fingerprint:
                raise InvalidRequest(
                    "this Idempotency-Key belongs to another request: use a new key for a new body",
                    param="Idempotency-Key",
                )
            return turn
        if latest is None:
            return None
        if latest.status not in FINISHED:
            left = latest.delivery in ("undelivered", "uncertain") or await self._was_left(latest)
            return latest if request.is_retry or left or await self._is_gone(latest.instance) else None
        if latest.status in ON_PATH and latest.delivery == "undelivered":
            return latest
        # It may have arrived. A repeat claims it while idempotency keys are kept; later it is a new turn.
        recent = now - (latest.finished_at or now) < self._hours * HOUR
        if latest.status in ON_PATH and latest.delivery in ("pending", "uncertain") and recent:
            left = latest.delivery == "uncertain" or await self._was_left(latest)
            if left or await self._is_gone(latest.instance):  # its proxy cannot say any more
                return latest
        if (latest.error or {}).get("code") == Interrupted.code:
            return latest  # its proxy crashed
        return latest if request.is_retry and now - (latest.finished_at or now) < RETRY_WINDOW else None


def _check_once(request: TurnRequest) -> None:
    """Raises `InvalidRequest` if a request with `X-Chain: none` continues something, or is to be asked for later."""
    for given, what in (
        (request.agent_id, "a named agent is kept: leave out its name"),
        (request.continues, "it cannot continue an id: send the whole conversation"),
        ((request.call or {}).get("background"), "the answer of a background turn is kept"),
    ):
        if given:
            raise InvalidRequest(f"X-Chain: none keeps nothing: {what}", param="X-Chain")


def _is_short(messages: Sequence[Message]) -> bool:
    """Whether they can be hashed on the event loop, in a few milliseconds."""
    if len(messages) > SHORT:
        return False
    texts = (block.get("text", "") for message in messages for block in message.content)
    images = any(block.get("type") in ("image", "document") for message in messages for block in message.content)
    return not images and sum(len(str(text)) for text in texts) <= SHORT_TEXT


def _imported(
    history: Iterable[tuple[Past, tuple[Record, ...]]],
    own: Turn,
    above: Turn | None,
    now: float,
    pieces: Sequence[_Piece],
) -> Iterator[WholeTurn]:
    """Exchanges of a client's history as turns in front of its `own` one, each the child of the one before it."""
    parent, path_hash, depth = (above.id, above.path_hash, above.depth) if above else (None, None, 0)
    for at, (exchange, records) in enumerate(history):
        piece = pieces[at] if pieces else None
        path_hash = lineage.path_hash(path_hash, exchange.input, exchange.output)
        depth += 1
        turn = Turn(
            id=new_id("turn") if piece is None else piece.turn_id,
            seq=0,
            agent_key=own.agent_key,
            parent_id=parent,
            status="completed",
            model=own.model,
            input=exchange.input if piece is None else piece.apart(exchange.input),
            output=tuple(block for block in exchange.output if block.get("type") not in THINKING),
            created_at=now,
            finished_at=now,
            delivery="delivered",
            origin="imported",
            path_hash=path_hash,
            depth=depth,
            placed=Placed(own.placed.rule, side=own.placed.side),
            evidence=Evidence(Brought("client")),
            call=None if piece is None else piece.call,
        )
        yield WholeTurn(turn, records)
        parent = turn.id


class _Piece(NamedTuple):
    """The items of one exchange that becomes a turn: how many blocks each input message has, and the items' ids."""

    turn_id: str
    sizes: tuple[int, ...]
    items: tuple[str, ...]
    call: JSON

    def apart(self, merged: Sequence[Message]) -> tuple[Message, ...]:
        """Split the merged input into its original messages."""
        blocks = itertools.chain.from_iterable(message.content for message in merged)
        return tuple(Message("user", tuple(itertools.islice(blocks, size))) for size in self.sizes)


def _pieces(messages: Sequence[Message], items: Sequence[str | None]) -> list[_Piece]:
    """One piece per exchange. `messages` end with an answer; `items` are as in `TurnRequest`, one per answer block."""
    pieces: list[_Piece] = []
    sizes: tuple[int, ...] = ()
    asked_as: list[str | None] = []
    start = 0
    for role, _, end in lineage.runs(messages):
        if role == "user":
            sizes = tuple(len(message.content) for message in messages[start:end])
            asked_as = list(items[start:end])
        else:
            paired = zip(messages[start:end], items[start:end], strict=True)
            said_as = [item for one, item in paired for block in one.content if block.get("type") not in THINKING]
            ids = tuple(item for item in (*asked_as, *said_as) if item is not None)
            call: JSON = {"items": {"input": asked_as, "output": said_as}}
            pieces.append(_Piece(new_id("turn"), sizes, ids, call))
            sizes, asked_as = (), []
        start = end
    return pieces
