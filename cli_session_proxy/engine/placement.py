"""Step 1 of a request: which agent and turn does it continue, and is it a repeat of an earlier request?"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple

from ..aside.media import Media
from ..aside.pool import Aside
from ..backends.base import Backend
from ..domain import client_tools, lineage
from ..domain.client_tools import calls_of
from ..domain.evidence import Evidence, ExternalOrigin, Note, NoteCode
from ..domain.forms import replace
from ..domain.lineage import HistoryEnding, Past
from ..domain.models import (
    FINISHED,
    JSON,
    ON_PATH,
    ONCE,
    THINKING,
    Agent,
    Block,
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
from .live import ComposedTurn

# Seconds after a turn's end in which an equal request counts as its retry. Later it is a new turn. The SDKs retry after
# at most 60 s (the longest Retry-After that they follow).
RETRY_WINDOW = 90.0

HOUR = 3600.0

# A request of up to this many messages and characters is hashed on the event loop (about 3 ms); a larger one in a
# thread.
INLINE_MESSAGES = 500
INLINE_CHARACTERS = 512 * 1024
# Turns of a client's history that are stored in one transaction, which takes 20 ms.
IMPORT_BATCH = 100


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
        redirect: Callable[[Agent], Awaitable[None]] | None = None,
    ) -> Turn | tuple[Agent, Turn]:
        """The existing turn that this request repeats, or the agent and a new turn to accept. The history of a new turn
        is stored first.

        A repeat is recognised by its idempotency key, as a retry, or as a claim of an undelivered answer. `passed_over`
        is a turn that the conversation continued without: the request is no repeat of it.

        `redirect` is called once the agent is known; it raises if another proxy should run the turn. `admit` is called
        before anything is stored; it raises if there is no room for the turn.
        """
        if not request.kept:
            for contradicts, why in (
                (request.agent_id, "a named agent is kept: leave out its name"),
                (request.continues, "it cannot continue an id: send the whole conversation"),
                ((request.call or {}).get("background"), "the answer of a background turn is kept"),
            ):
                if contradicts:
                    raise InvalidRequest(f"X-Chain: none keeps nothing: {why}", param="X-Chain")
        latest, known = await self._store.arrival(request.owner, request.fingerprint, request.agent_id)
        earlier: Turn | None = None
        if latest is not None or request.idempotency_key is not None:
            earlier = await self._earlier(request, latest, self._clock())
        if earlier is not None and (passed_over is None or earlier.id != passed_over.id):
            return earlier
        if redirect is not None and known is not None:
            await redirect(known)
        admit()
        fitting = MediaFitting(self._aside)
        for block in request.messages[-1].content if request.messages else ():
            if block.get("type") == "document":
                await fitting.check(block)
        agent, turn, imported = await self.place(request, known)
        if redirect is not None and known is None:
            await redirect(agent)
        if imported:
            turn = replace(await self._store_history(agent, turn, imported, fitting), created_at=self._clock())
        return agent, turn

    async def place(self, request: TurnRequest, agent: Agent | None = None) -> tuple[Agent, Turn, tuple[Message, ...]]:
        """Decide which turn of which agent the request continues. Returns the agent, the new turn, and the messages of
        the history that become turns before it. `agent`: the agent that the request names, if it exists."""
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
            # A history without an answer cannot contain a turn.
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
        if not placed.at_head and lineage.is_side_call(request, placed.rule, match[0] if match else None):
            placed = replace(placed, side=True)
        if agent is None:
            agent = await self._ensure(request.owner, new_id("auto" if request.kept else ONCE), named=False)
        imported, new = placed.parts(messages)
        if match is not None and parent == match[0].id:
            # The matched answer as the client has it: its calls may have other ids than in the chain.
            run = itertools.takewhile(lambda message: message.role == "assistant", reversed(messages[: match[1].end]))
            clients_answer = [block for message in reversed(list(run)) for block in message.content]
            if imported:
                at = next(at for at, message in enumerate(imported) if message.role == "assistant")
                imported = (*client_tools.in_our_ids(imported[:at], clients_answer, match[0].output), *imported[at:])
            else:
                new = client_tools.in_our_ids(new, clients_answer, match[0].output)
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
        """The result of `match`; the request's messages without exchanges that the model refused here; and the last
        refused turn.

        A refused turn is on no path: a message after it continues the turn before it.
        """
        refused: Turn | None = None
        messages = request.messages
        while (match := await self.match(request.owner, messages, agent)) and match[0].status == "refused":
            refused, end = match[0], match[1].end
            begin = max((at for _, _, at in list(lineage.runs(messages[:end]))[:-2]), default=0)
            messages = (*messages[:begin], *messages[end:])
        return match, messages, refused

    async def _ensure(self, owner: str, agent_id: str, *, named: bool) -> Agent:
        directory = directory_name(owner, agent_id)
        return await self._store.ensure_agent(owner, agent_id, directory, named=named, now=self._clock())

    async def match(
        self, owner: str, messages: tuple[Message, ...], agent: Agent | None
    ) -> tuple[Turn, HistoryEnding] | None:
        """The deepest turn whose path equals the beginning of the history, and where it ends there. The turn is one of
        the given agent; None: of an unnamed agent."""
        if _is_short(messages):
            endings = lineage.endings(messages)
        else:
            endings = await self._aside.thread(lineage.endings, messages)
        by_hash = {ending.hash: ending for ending in endings}
        turn = await self._store.deepest(owner, list(by_hash), agent.key if agent else None) if by_hash else None
        return (turn, by_hash[turn.path_hash]) if turn and turn.path_hash else None

    async def place_composed(
        self, agent: Agent, turn: Turn, composed: TurnRequest, before: Turn | None
    ) -> ComposedTurn:
        """Place a turn whose prompt was composed when it ran. Exchanges in the composed messages are stored as turns
        before this one. `before` is the last turn of the path."""
        parent, placed = lineage.decide(
            composed.messages, named=True, fresh=False, continues=composed.continues, match=None, keep_system=False
        )
        imported, new = placed.parts(composed.messages)
        composed_turn = replace(
            turn,
            parent_id=parent,
            input=new,
            system=composed.system,
            placed=replace(turn.placed, messages=len(composed.messages), imported=len(imported)),
            options=composed.options,
        )
        turn_of_item = dict.fromkeys(composed.own_items, turn.id)
        call, items = composed.call or {}, list(composed.items[len(imported) :])
        if any(items):
            call = {**call, "items": {"input": items}}
        if imported:
            itemised = _by_exchange(imported, composed.items)
            for exchange in itemised:
                turn_of_item |= {item: exchange.turn_id for item in exchange.items if item in turn_of_item}
            fitting = MediaFitting(self._aside)
            composed_turn = await self._store_history(agent, composed_turn, imported, fitting, itemised)
        if before is not None and composed_turn.parent_id != before.id:
            call = {**call, "behind": before.id}
        return ComposedTurn(composed, replace(composed_turn, call=call), tuple(turn_of_item.items()))

    async def _store_history(
        self,
        agent: Agent,
        turn: Turn,
        imported: Sequence[Message],
        fitting: MediaFitting,
        itemised: Sequence[_ExchangeItems] = (),
    ) -> Turn:
        """Store the exchanges of the history that the chain does not have, as turns. Returns `turn` as the child of the
        last one. `itemised`: one per exchange, if the messages have items.

        In several transactions, so that others can write between them. If this is interrupted, the same request later
        finds the deepest stored turn and continues there.
        """
        ancestor = await self._store.turn(turn.parent_id) if turn.parent_id else None
        path_records = await self._store.records(ancestor.id) if ancestor else []
        as_sent = await self._aside.thread(lambda: lineage.past(imported))
        has_calls = any(calls_of(exchange.output) for exchange in as_sent)
        path = await self._store.path_texts(ancestor.id) if ancestor and has_calls else []
        exchanges = await self._aside.thread(lambda: client_tools.with_unique_ids(as_sent, path))
        fitted = [await fitting.fit(exchange) for exchange in exchanges]
        records = self._backend.history_records(agent, ancestor, path_records, fitted, turn.model)
        turns = _imported(zip(exchanges, records, strict=True), turn, ancestor, self._clock(), itemised)
        parent = turn.parent_id
        while batch := await self._aside.thread(lambda: list(itertools.islice(turns, IMPORT_BATCH))):
            await self._store.import_turns(batch)
            parent = batch[-1].turn.id
        new = client_tools.in_our_ids(turn.input, as_sent[-1].output, exchanges[-1].output)
        return replace(turn, parent_id=parent, input=new)

    async def _earlier(self, request: TurnRequest, latest: Turn | None, now: float) -> Turn | None:
        """The turn that this request repeats; None if it is a new one. `latest`: the newest turn with an equal
        request."""
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
            if request.is_retry or latest.delivery in ("undelivered", "uncertain"):
                return latest
            left = await self._was_left(latest) or await self._is_gone(latest.instance)
            return latest if left else None
        if latest.status in ON_PATH and latest.delivery == "undelivered":
            return latest
        # The answer may have arrived. A repeat claims it while idempotency keys are kept; later it is a new turn.
        recent = now - (latest.finished_at or now) < self._hours * HOUR
        may_be_left = latest.status in ON_PATH and latest.delivery in ("pending", "uncertain") and recent
        if may_be_left and await self._was_left(latest):
            return latest
        if (latest.error or {}).get("code") == Interrupted.code:
            return latest  # its proxy crashed
        return latest if request.is_retry and now - (latest.finished_at or now) < RETRY_WINDOW else None


@dataclass
class MediaFitting:
    """Makes images and documents of a client's history smaller if the model would refuse them: one that is too large
    would fail every later request. One per request, so that equal data is checked once.

    Only the copy for the model is smaller. The chain keeps the originals, by which it recognises the history.
    """

    aside: Aside

    @cached_property
    def _media(self) -> Media:
        return Media(self.aside)

    async def check(self, document: Block) -> None:
        """Raises `InvalidRequest` for an unreadable PDF in the newest message, before it becomes part of the chain."""
        source = document.get("source")
        if not isinstance(source, dict) or source.get("type") != "base64":
            return
        why = await self._media.document_error(source)
        if why is not None:
            raise InvalidRequest(
                f"the PDF in the newest message cannot be read: {why}. Nothing was sent to the model; send the "
                "message without it, or a PDF that can be read",
                param="messages",
            )

    async def fit(self, past: Past) -> Past:
        """The exchange as the model accepts it, with notes of what was changed."""
        changed: Counter[NoteCode] = Counter()
        fitted = tuple([Message(one.role, await self._media.fitted(one.content, changed)) for one in past.input])
        notes = tuple(Note(code, number) for code, number in changed.items())
        return replace(past, input=fitted, notes=(*past.notes, *notes)) if notes else past


def _is_short(messages: Sequence[Message]) -> bool:
    """Whether they can be hashed on the event loop, in a few milliseconds."""
    if len(messages) > INLINE_MESSAGES:
        return False
    texts = (block.get("text", "") for message in messages for block in message.content)
    images = any(block.get("type") in ("image", "document") for message in messages for block in message.content)
    return not images and sum(len(str(text)) for text in texts) <= INLINE_CHARACTERS


def _imported(
    history: Iterable[tuple[Past, tuple[Record, ...]]],
    own: Turn,
    ancestor: Turn | None,
    now: float,
    itemised: Sequence[_ExchangeItems],
) -> Iterator[WholeTurn]:
    """Exchanges of a client's history, with their records, as turns between `ancestor` and the request's `own` turn.
    Each is the child of the one before it."""
    parent, path_hash, depth = (ancestor.id, ancestor.path_hash, ancestor.depth) if ancestor else (None, None, 0)
    for at, (exchange, records) in enumerate(history):
        with_items = itemised[at] if itemised else None
        path_hash = lineage.path_hash(path_hash, exchange.input, exchange.output)
        depth += 1
        turn = Turn(
            id=new_id("turn") if with_items is None else with_items.turn_id,
            seq=0,
            agent_key=own.agent_key,
            parent_id=parent,
            status="completed",
            model=own.model,
            input=exchange.input if with_items is None else with_items.split(exchange.input),
            output=tuple(block for block in exchange.output if block.get("type") not in THINKING),
            created_at=now,
            finished_at=now,
            delivery="delivered",
            origin="imported",
            path_hash=path_hash,
            depth=depth,
            placed=Placed(own.placed.rule, side=own.placed.side),
            evidence=Evidence(ExternalOrigin("client")),
            call=None if with_items is None else with_items.call,
        )
        yield WholeTurn(turn, records)
        parent = turn.id


class _ExchangeItems(NamedTuple):
    """The items (`TurnRequest.items`) of an exchange in a composed prompt. The exchange becomes a turn."""

    turn_id: str
    sizes: tuple[int, ...]  # how many blocks each input message has
    items: tuple[str, ...]  # ids
    call: JSON  # for `Turn.call`

    def split(self, merged: Sequence[Message]) -> tuple[Message, ...]:
        """The merged input, split into its original messages."""
        blocks = itertools.chain.from_iterable(message.content for message in merged)
        return tuple(Message("user", tuple(itertools.islice(blocks, size))) for size in self.sizes)


def _by_exchange(messages: Sequence[Message], items: Sequence[str | None]) -> list[_ExchangeItems]:
    """The items of each exchange. `messages` end with an answer; `items` has one entry for each message."""
    exchanges: list[_ExchangeItems] = []
    sizes: tuple[int, ...] = ()
    input_items: list[str | None] = []
    start = 0
    for role, _, end in lineage.runs(messages):
        if role == "user":
            sizes = tuple(len(message.content) for message in messages[start:end])
            input_items = list(items[start:end])
        else:
            output_items = [  # one for each block of the answer
                item
                for message, item in zip(messages[start:end], items[start:end], strict=True)
                for block in message.content
                if block.get("type") not in THINKING
            ]
            ids = tuple(item for item in (*input_items, *output_items) if item is not None)
            call: JSON = {"items": {"input": input_items, "output": output_items}}
            exchanges.append(_ExchangeItems(new_id("turn"), sizes, ids, call))
            sizes, input_items = (), []
        start = end
    return exchanges
