"""Finds and continues responses and conversations, for OpenAI's stateful wires.

A response is a turn, a conversation is an agent's chain. Ids of other owners count as unknown.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import suppress
from dataclasses import replace

from ...domain.limits import agent_id_of
from ...domain.models import (
    ANSWERED,
    FINISHED,
    JSON,
    Agent,
    Conversation,
    Item,
    Message,
    Turn,
    TurnRequest,
)
from ...engine.engine import Engine, HasLeft
from ...engine.live import Answer
from ...errors import InvalidRequest, NotFound, PreviousNotFound
from ...sandbox import directory_name
from ..kept import KeptTurns
from . import body as responses
from . import conversations
from . import items as responses_items
from .body import ResponsesCall, response_id, turn_id_of
from .composing import OpenDialogue, compose, entries_of
from .conversations import NewConversation, unknown


def new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


class Dialogues:
    """One per engine. `owner`: the name of the client's key."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.kept = KeptTurns(
            engine,
            turn_id_of,
            lambda given: NotFound(f"Response with id '{given}' not found.", param="response_id"),
        )

    # --- responses

    async def cancel(self, owner: str, given: str) -> Turn:
        """Cancel the turn. Raises `InvalidRequest` if it has ended in another way."""
        turn = await self.kept.cancel(owner, given)
        if turn.status in FINISHED and turn.status != "cancelled":
            kind = responses.status_of(turn) if turn.in_background else "synchronous"
            raise InvalidRequest(f"Cannot cancel a {kind} response.", param="response_id")  # OpenAI's own words
        return turn

    async def submit(
        self, call: ResponsesCall, *, unstored_ids: Collection[str] | None = None, has_left: HasLeft | None = None
    ) -> Answer:
        """Accept a call of a Responses client. Raises `ProxyError`.

        `unstored_ids`: ids of responses with `store: false` that its connection (a WebSocket) may still continue.
        """
        call = await self._with_items(call)
        if call.conversation is not None:
            agent = await self._conversation_agent(call.request.owner, call.conversation)
            return await self._in_conversation(call, agent, has_left)
        if call.previous is not None:
            parent = await self._previous(call.request.owner, call.previous, unstored_ids or ())
            return await self._engine.submit(compose(call, parent, continues=parent.id), has_left)
        asked = call.request
        # Without an answer of the model the input is no history: what the agent was told before still applies.
        delta = all(message.role == "user" for message in asked.messages)
        head = await self._head(call)
        accepted = compose(call, head, continues=head.id if delta and head else None, delta=delta)
        request = replace(accepted, continues=None)
        if delta and asked.agent_id is not None and not asked.fresh:

            async def after_head(current_head: Turn | None) -> TurnRequest:
                """The prompt after the agent's head, which may have moved since acceptance."""
                continues = current_head.id if current_head else None
                return accepted if continues == accepted.continues else compose(call, current_head, continues=continues)

            request = replace(request, compose=after_head, composed=accepted)
        # See `TurnRequest.client`. Over a WebSocket `store: false` still allows the next message to continue.
        is_unstored = asked.agent_id is None and not (asked.call or {})["store"]
        if unstored_ids is None and is_unstored and asked.kept:
            request = replace(request, client=call.client)
        return await self._engine.submit(request, has_left)

    async def parent(self, call: ResponsesCall) -> Turn | None:
        """The turn that the call would continue, if known before it runs."""
        if call.conversation is not None:
            agent = await self._conversation_agent(call.request.owner, call.conversation)
            return await self._engine.tip(agent)
        if call.previous is not None:
            return await self._previous(call.request.owner, call.previous)
        return await self._head(call)

    async def _with_items(self, call: ResponsesCall) -> ResponsesCall:
        """The call with items in place of item references (as the Vercel AI SDK sends)."""
        messages: list[Message] = []
        for message in call.request.messages:
            block = message.content[0] if message.content else {}
            is_id = block.get("type") == "item_reference"  # with its `id` and `where`, as `items` read it
            if not is_id:
                messages.append(message)
                continue
            turn = None  # of an unknown or malformed id: the item is reported as not found
            if turn_id := responses_items.turn_id_of_item(block["id"]):
                with suppress(NotFound):
                    turn = await self.kept.turn(call.request.owner, response_id(turn_id))
            entries = entries_of(turn) if turn is not None else []
            found = next((one.message for one in entries if one.id == block["id"] and one.message is not None), None)
            if found is None:
                raise InvalidRequest(
                    f"Item with id '{block['id']}' not found: send the item itself", param=f"{block['where']}.id"
                )
            messages.append(found)
        return replace(call, request=replace(call.request, messages=tuple(messages)))

    async def _head(self, call: ResponsesCall) -> Turn | None:
        if call.request.agent_id is None or call.request.fresh:
            return None
        agent = await self._engine.store.agent(call.request.owner, call.request.agent_id)
        return await self._engine.store.turn(agent.head) if agent is not None and agent.head else None

    async def _previous(self, owner: str, given: str, unstored_ids: Collection[str] = ()) -> Turn:
        try:
            turn = await self.kept.turn(owner, given, stored=given not in unstored_ids)
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
        await store.annotate(agent.key, new.metadata)
        await store.add_items(agent.key, new.items)
        return conversations.conversation(agent, new.metadata)

    async def conversation(self, owner: str, given: str) -> JSON:
        agent = await self._conversation_agent(owner, given)
        notes = await self._engine.store.conversation(agent.key)
        return conversations.conversation(agent, {} if notes is None else notes.metadata)

    async def annotate(self, owner: str, given: str, metadata: JSON) -> JSON:
        agent = await self._conversation_agent(owner, given)
        await self._engine.store.annotate(agent.key, metadata)
        return conversations.conversation(agent, metadata)

    async def delete(self, owner: str, given: str) -> None:
        """Delete the conversation with its chain and agent."""
        agent = await self._conversation_agent(owner, given)
        await self._engine.delete(owner, agent.agent_id)

    async def whole(self, owner: str, given: str) -> OpenDialogue:
        """The whole conversation at its present head. The files and images of its turns are empty: see `with_files`."""
        agent = await self._conversation_agent(owner, given)
        return await self._dialogue_at(agent.key, await self._engine.tip(agent), whole=True)

    async def with_files(self, dialogue: OpenDialogue, items: Sequence[JSON]) -> AsyncIterator[JSON]:
        """These items of `whole` with their files and images. Turns are read one at a time: many may be large."""
        turn_ids = {
            entry.id: turn.id
            for turn, entries in zip(dialogue.path, dialogue.items_by_turn, strict=True)
            for entry in entries
        }
        loaded_id: str | None = None
        loaded: dict[str, JSON] = {}
        for item in items:
            turn_id = turn_ids.get(item["id"])
            if turn_id is not None and turn_id != loaded_id:
                loaded.clear()  # before the next turn is read
                turn = await self._engine.store.turn(turn_id)
                if turn is None:
                    raise NotFound("this conversation was deleted meanwhile", param="conversation")
                loaded_id, loaded = turn_id, {one.id: one.item for one in entries_of(turn, dialogue.own_items)}
                del turn
            yield item if turn_id is None else loaded[item["id"]]

    async def add_items(self, owner: str, given: str, new: Sequence[Item], *, is_retry: bool) -> list[JSON]:
        """Add the items, and return them as stored. If the first attempt of a retry has added them, and no turn has
        taken them yet, they are not added again."""
        agent = await self._conversation_agent(owner, given)
        store = self._engine.store
        latest = (await store.items(agent.key))[-len(new) :] if is_retry else []
        untaken = [item.data for item in latest if item.turn_id is None]
        if [{**data, "id": None} for data in untaken] == [{**item.data, "id": None} for item in new]:
            return untaken
        await store.add_items(agent.key, new)
        return [item.data for item in new]

    async def remove_item(self, owner: str, given: str, item_id: str) -> JSON:
        """Remove an item. If it belongs to an earlier turn, the next turn leaves it off the path."""
        agent = await self._conversation_agent(owner, given)
        dialogue = await self.whole(owner, given)
        if all(entry.id != item_id for entry in dialogue.entries):
            raise NotFound(f"there is no item {item_id!r} in this conversation", param="item_id")
        await self._engine.store.take_out(agent.key, item_id)
        return conversations.conversation(agent, dialogue.metadata)

    async def _conversation_agent(self, owner: str, given: str) -> Agent:
        name = agent_id_of(given)
        agent = None if name is None else await self._engine.store.agent(owner, name)
        if agent is None:
            raise unknown(given)
        return agent

    async def _dialogue_at(self, agent_key: int, tip: Turn | None, *, whole: bool = False) -> OpenDialogue:
        """The conversation whose next turn continues `tip`.

        Its turns are only read for the `whole` of it, without files and images, or if items were removed or are off the
        path.
        """
        store = self._engine.store
        notes = await store.conversation(agent_key) or Conversation({})
        unsent = await store.items_off(agent_key, None if tip is None else tip.id)
        removed = frozenset(notes.removed)
        if tip is None or not (whole or removed or any(item.turn_id is not None for item in unsent)):
            return OpenDialogue(notes.metadata, removed, (), (), [item for item in unsent if item.id not in removed])
        path = await (store.path_texts if whole else store.path)(tip.id)
        own_items = {item.id: item for item in await store.items(agent_key)}
        request = [entries_of(turn, own_items) for turn in path]
        # After a rewind another turn off the path may have used the items last.
        known_ids = removed | {entry.id for entries in request for entry in entries}
        return OpenDialogue(
            notes.metadata, removed, path, request, [item for item in unsent if item.id not in known_ids], own_items
        )

    # --- a turn in a conversation

    async def _in_conversation(self, call: ResponsesCall, agent: Agent, has_left: HasLeft | None) -> Answer:
        """Continue the head with the client's new items, without removed ones.

        The prompt is composed when the turn runs: then no other turn, in any proxy, moves the head.
        """
        call = replace(call, request=replace(call.request, agent_id=agent.agent_id))

        async def decide(current_head: Turn | None) -> TurnRequest:
            dialogue = await self._dialogue_at(agent.key, current_head)
            last, rest = dialogue.split_at_removed() if dialogue.removed else (current_head, [])
            # Options that still apply come from a turn that was run here, not from imported ones.
            ran = current_head
            while ran is not None and ran.evidence.brought is not None and ran.parent_id is not None:
                ran = await self._engine.store.turn(ran.parent_id)
            return compose(call, ran, continues=last.id if last else None, dialogue=dialogue, rest=rest)

        if call.request.messages:
            request = compose(call, None)  # preliminary, until it runs
        else:  # the client's own items are the prompt
            request = replace(await decide(await self._engine.tip(agent)), messages=(), continues=None)
        return await self._engine.submit(replace(request, compose=decide), has_left)
