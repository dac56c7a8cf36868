"""What the stateful wires of OpenAI name: responses and conversations, found and gone on with.

A response is a turn, a conversation is an agent's chain. Ids of another owner are as unknown as made-up ones.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Collection, Sequence
from dataclasses import replace
from weakref import WeakValueDictionary

from ...domain.identifiers import agent_id_of, conversation_id
from ...domain.models import (
    ANSWERED,
    FINISHED,
    JSON,
    Agent,
    Block,
    Conversation,
    Item,
    Message,
    Turn,
    TurnOptions,
    TurnRequest,
)
from ...domain.reminders import reminder
from ...engine.engine import Engine, HasLeft
from ...engine.live import Answer
from ...errors import InvalidRequest, NotFound, PreviousNotFound
from ...sandbox import directory_name
from ..kept import KeptTurns
from . import body as responses
from . import conversations
from . import items as responses_items
from .body import ResponsesCall, response_id, turn_id_of
from .conversations import NewConversation, unknown
from .items import Entry
from .tools import with_brought


def new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


class Dialogues:
    """Over one engine. `owner` is the name of the key that the client came with."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.kept = KeptTurns(engine, turn_id_of, _unknown_response)
        # What a conversation holds is read, then taken in by a turn: one request at a time.
        self._locks: WeakValueDictionary[int, asyncio.Lock] = WeakValueDictionary()

    # --- responses

    async def cancel(self, owner: str, given: str) -> Turn:
        """End the turn. Raises `InvalidRequest` when it has ended in another way."""
        turn = await self.kept.cancel(owner, given)
        if turn.status in FINISHED and turn.status != "cancelled":
            kind = responses.status_of(turn) if (turn.call or {}).get("background") else "synchronous"
            raise InvalidRequest(f"Cannot cancel a {kind} response.", param="response_id")  # OpenAI's own words
        return turn

    async def submit(
        self, call: ResponsesCall, *, own: Collection[str] = (), has_left: HasLeft | None = None
    ) -> Answer:
        """Accept what a client of Responses asks. Raises `ProxyError`.

        `own` are responses that were not to be stored, and that its connection may go on from all the same.
        """
        call = await self._with_items(call)
        if call.conversation is not None:
            agent = await self._conversation_agent(call.naming.owner, call.conversation)
            return await self._in_conversation(call, agent, has_left)
        if call.previous is not None:
            parent = await self._previous(call.naming.owner, call.previous, own)
            return await self._engine.submit(_request(call, call.messages, parent, continues=parent.id), has_left)
        return await self._engine.submit(_request(call, call.messages, await self._head(call)), has_left)

    async def parent(self, call: ResponsesCall) -> Turn | None:
        """The turn that the call would continue, as far as that is known before it runs."""
        if call.conversation is not None:
            agent = await self._conversation_agent(call.naming.owner, call.conversation)
            return await self._engine.store.turn(agent.head) if agent.head else None
        if call.previous is not None:
            return await self._previous(call.naming.owner, call.previous)
        return await self._head(call)

    async def _with_items(self, call: ResponsesCall) -> ResponsesCall:
        """The call with the items that it names by their ids (as the Vercel AI SDK does) in their places."""
        messages: list[Message] = []
        for message in call.messages:
            reference = responses_items.reference_of(message)
            messages.append(message if reference is None else await self._referred(call.naming.owner, reference))
        return replace(call, messages=tuple(messages))

    async def _referred(self, owner: str, reference: Block) -> Message:
        item_id = reference["id"]
        turn_id = responses_items.turn_id_of_item(item_id)
        try:
            turn = await self.kept.turn(owner, response_id(turn_id)) if turn_id else None
        except NotFound:
            turn = None
        for entry in _entries(turn, ()) if turn else ():
            if entry.id == item_id and entry.message is not None:
                return entry.message
        raise InvalidRequest(
            f"Item with id '{item_id}' not found: send the item itself", param=f"{reference['where']}.id"
        )

    async def _head(self, call: ResponsesCall) -> Turn | None:
        if call.agent_id is None or call.naming.fresh:
            return None
        agent = await self._engine.store.agent(call.naming.owner, call.agent_id)
        return await self._engine.store.turn(agent.head) if agent is not None and agent.head else None

    async def _previous(self, owner: str, given: str, own: Collection[str] = ()) -> Turn:
        try:
            turn = await self.kept.turn(owner, given, stored=given not in own)
        except NotFound as exc:
            raise PreviousNotFound(
                f"Previous response with id '{given}' not found.", param="previous_response_id"
            ) from exc
        if turn.status not in ANSWERED:
            raise InvalidRequest(
                f"the previous response is {responses.status_of(turn)}: wait for it, or go on from the one before it",
                param="previous_response_id",
            )
        return turn

    # --- conversations

    async def create(self, owner: str, new: NewConversation) -> JSON:
        name = new_id("conv")
        store = self._engine.store
        agent = await store.ensure_agent(owner, name, directory_name(owner, name), named=True, now=time.time())
        await store.save_conversation(agent.key, Conversation(new.metadata))
        await store.add_items(agent.key, new.items)
        return conversations.conversation(agent, new.metadata)

    async def conversation(self, owner: str, given: str) -> JSON:
        agent = await self._conversation_agent(owner, given)
        return conversations.conversation(agent, (await self._notes(agent)).metadata)

    async def annotate(self, owner: str, given: str, metadata: JSON) -> JSON:
        agent = await self._conversation_agent(owner, given)
        async with self._lock(agent):
            await self._engine.store.save_conversation(agent.key, replace(await self._notes(agent), metadata=metadata))
        return conversations.conversation(agent, metadata)

    async def delete(self, owner: str, given: str) -> None:
        """The conversation is the chain: it goes with everything that is its own."""
        agent = await self._conversation_agent(owner, given)
        await self._engine.delete(owner, agent.agent_id)

    async def items(self, owner: str, given: str) -> list[JSON]:
        """Every item: of the turns on the path to the head, then those written by hand that no turn has taken in."""
        agent = await self._conversation_agent(owner, given)
        return [entry.item for entry in await self._entries(agent)]

    async def add_items(self, owner: str, given: str, new: Sequence[Item]) -> list[JSON]:
        agent = await self._conversation_agent(owner, given)
        await self._engine.store.add_items(agent.key, new)
        return [item.data for item in new]

    async def remove_item(self, owner: str, given: str, item_id: str) -> JSON:
        """Take an item out. One of an earlier turn is on the path no more: the next turn leaves it off."""
        agent = await self._conversation_agent(owner, given)
        async with self._lock(agent):
            store = self._engine.store
            if all(entry.id != item_id for entry in await self._entries(agent)):
                raise NotFound(f"there is no item {item_id!r} in this conversation", param="item_id")
            pending = {item.id for item in await store.items(agent.key, pending=True)}
            notes = await self._notes(agent)
            if item_id in pending:
                await store.remove_item(agent.key, item_id)
            else:
                notes = replace(notes, removed=(*notes.removed, item_id))
                await store.save_conversation(agent.key, notes)
        return conversations.conversation(agent, notes.metadata)

    async def _conversation_agent(self, owner: str, given: str) -> Agent:
        name = agent_id_of(given)
        agent = None if name is None else await self._engine.store.agent(owner, name)
        if agent is None:
            raise unknown(given)
        return agent

    async def _notes(self, agent: Agent) -> Conversation:
        return await self._engine.store.conversation(agent.key) or Conversation({})

    async def _entries(self, agent: Agent) -> list[Entry]:
        path = await self._engine.store.path(agent.head) if agent.head else []
        by_turn = await self._written(agent)
        entries = [entry for turn in path for entry in _entries(turn, by_turn.get(turn.id, []))]
        entries += [Entry(item.data, None) for item in await self._engine.store.items(agent.key, pending=True)]
        removed = set((await self._notes(agent)).removed)
        return [entry for entry in entries if entry.id not in removed]

    async def _written(self, agent: Agent) -> dict[str | None, list[Item]]:
        """The hand-written items by the turn that took them in."""
        by_turn: dict[str | None, list[Item]] = {}
        for item in await self._engine.store.items(agent.key):
            by_turn.setdefault(item.turn_id, []).append(item)
        return by_turn

    def _lock(self, agent: Agent) -> asyncio.Lock:
        return self._locks.setdefault(agent.key, asyncio.Lock())

    # --- a turn in a conversation

    async def _in_conversation(self, call: ResponsesCall, agent: Agent, has_left: HasLeft | None) -> Answer:
        """Continue the head, with what was written by hand since; without what was taken out."""
        lock = self._lock(agent)
        async with lock:
            pending = await self._engine.store.items(agent.key, pending=True)
            added = responses_items.read([item.data for item in pending], "items")
            said = (*added.messages, *call.messages)
            call = replace(
                call,
                agent_id=agent.agent_id,
                system=(*added.system, *call.system),
                call={**call.call, "shown": _shown(pending, call.messages)},
            )
            takes = tuple(item.id for item in pending)
            removed = set((await self._notes(agent)).removed)
            if not removed and all(message.role == "user" for message in said):
                request = _request(call, said, await self._head(call), takes=takes)
                return await self._engine.submit(request, has_left)
            # Exchanges are brought in, or the path is left: that needs a head which does not move meanwhile.
            await self._engine.settled(agent.key)
            agent = await self._conversation_agent(agent.owner, conversation_id(agent.agent_id))
            kept, rest = await self._without(agent, removed)
            head = await self._head(call)
            request = _request(call, (*rest, *said), head, takes=takes, continues=kept.id if kept else None)
            return await self._engine.submit(replace(request, fresh=kept is None), has_left)

    async def _without(self, agent: Agent, removed: set[str]) -> tuple[Turn | None, tuple[Message, ...]]:
        """The last turn before anything was taken out, and what was said after it but for that."""
        path = await self._engine.store.path(agent.head) if agent.head else []
        by_turn = await self._written(agent)
        said = [_entries(turn, by_turn.get(turn.id, [])) for turn in path]
        touched = (at for at, entries in enumerate(said) if any(entry.id in removed for entry in entries))
        start = next(touched, len(path))
        rest = _messages(said[start:], removed)
        # An answer whose question was taken out belongs to the answer before it.
        while start and rest and rest[0].role == "assistant":
            start -= 1
            rest = _messages(said[start:], removed)
        return path[start - 1] if start else None, rest


def _unknown_response(given: str) -> NotFound:
    return NotFound(f"Response with id '{given}' not found.", param="response_id")


def _messages(said: Sequence[Sequence[Entry]], removed: set[str]) -> tuple[Message, ...]:
    entries = (entry for one in said for entry in one if entry.id not in removed)
    return tuple(entry.message for entry in entries if entry.message is not None)


def _entries(turn: Turn, written: Sequence[Item]) -> list[Entry]:
    return [*responses_items.input_entries(turn, written), *responses_items.output_entries(turn)]


def _shown(pending: Sequence[Item], said: Sequence[Message]) -> list[str]:
    """The hand-written items that the turn's own input begins with: those behind the last answer among them."""
    if any(message.role == "assistant" for message in said):
        return []
    behind: list[str] = []
    for item in pending:
        read = responses_items.read([item.data]).messages
        behind = [] if read and read[0].role == "assistant" else [*behind, item.id]
    return behind


def carried(parent: Turn | None) -> tuple[str, ...]:
    """System texts that hold on after a turn: items do, `instructions` do not; another wire's system prompt does."""
    if parent is None:
        return ()
    call = parent.call or {}
    if call.get("wire") == responses.WIRE:
        return tuple(call.get("system_items", ()))
    return (parent.system,) if parent.system else ()


def _request(
    call: ResponsesCall,
    messages: Sequence[Message],
    parent: Turn | None,
    *,
    continues: str | None = None,
    takes: tuple[str, ...] = (),
) -> TurnRequest:
    items = sent = call.system
    tools, kept = call.tools, call.call
    if all(message.role == "user" for message in messages):
        # Only what is new. Where the conversation has begun, its system texts hold, and a new one stays where it is.
        before = carried(parent)
        if parent is not None:
            messages = [*(reminder(text) for text in call.system if text not in before), *messages]
            items, sent = before, tuple(text for text in call.system if text in before)
            tools, kept = with_brought(tools, kept, parent.call or {})
        elif not messages and items:  # nothing else was said: the last of them is what is asked
            items, messages = items[:-1], [reminder(items[-1])]
            sent = items
    if not messages or messages[-1].role != "user":
        raise InvalidRequest("input must end with a user message, or a function_call_output", param="input")
    instructions = (call.instructions,) if call.instructions and call.instructions.strip() else ()
    return TurnRequest(
        model=call.model,
        messages=tuple(messages),
        fingerprint=call.fingerprint,
        owner=call.naming.owner,
        agent_id=call.agent_id,
        system="\n\n".join((*instructions, *items)) or None,
        keep_system=False,
        effort=call.effort,
        fresh=call.naming.fresh,
        continues=continues,
        idempotency_key=call.naming.idempotency_key,
        is_retry=call.naming.is_retry,
        wire=responses.WIRE,
        request_id=call.naming.request_id,
        options=TurnOptions(
            format=call.format,
            tools=tools,
            tool_choice=call.tool_choice,
            parameters=call.wanted,
            metadata=call.call["echo"].get("metadata") or {},
            window=call.naming.window,
        ),
        call={**kept, "system_sent": list(sent), "system_items": list(items)},
        takes=takes,
    )
