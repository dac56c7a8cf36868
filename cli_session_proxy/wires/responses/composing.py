"""Composes a turn's prompt: the conversation's items, then the client's input. Pure, no I/O."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...domain.models import JSON, THINKING, Item, Message, Turn, TurnRequest
from ...domain.system_prompts import reminder
from ...errors import InvalidRequest
from . import body as responses
from .body import ResponsesCall
from .items import NO_ITEMS, ConversationItem, entry_of, input_entries, output_entries
from .tools import with_brought


@dataclass(frozen=True, slots=True)
class OpenDialogue:
    """A conversation at one of its turns. `path`, `items_by_turn` and `own_items` are empty where they are not needed
    (see `Dialogues._dialogue_at`)."""

    metadata: JSON
    removed: frozenset[str]  # ids of removed items
    path: Sequence[Turn]  # the turns so far
    items_by_turn: Sequence[Sequence[ConversationItem]]  # the items of each turn on the path
    unsent: Sequence[Item]  # the client's own items that no turn on the path has sent yet
    own_items: Mapping[str, Item] = field(default_factory=lambda: NO_ITEMS)  # all of the client's own, by id

    @property
    def entries(self) -> list[ConversationItem]:
        """All items that are not removed, in order."""
        on_path = [entry for entries in self.items_by_turn for entry in entries if entry.id not in self.removed]
        return on_path + [entry_of(item) for item in self.unsent]

    def split_at_removed(self) -> tuple[Turn | None, list[ConversationItem]]:
        """The last turn before any removed item, and the remaining items after that turn."""
        has_removed = (any(entry.id in self.removed for entry in entries) for entries in self.items_by_turn)
        start = next((at for at, touched in enumerate(has_removed) if touched), len(self.path))
        kept = [[entry for entry in entries if entry.id not in self.removed] for entries in self.items_by_turn]
        # An answer whose prompt was removed belongs to the answer before it.
        while start:
            roles = (entry.message.role for entries in kept[start:] for entry in entries if entry.message is not None)
            if next(roles, "user") == "user":
                break
            start -= 1
        return self.path[start - 1] if start else None, [entry for entries in kept[start:] for entry in entries]


def entries_of(turn: Turn, own_items: Mapping[str, Item] = NO_ITEMS) -> list[ConversationItem]:
    return [*input_entries(turn, own_items), *output_entries(turn, own_items)]


def lasting_system_texts(parent: Turn | None) -> tuple[str, ...]:
    """System texts that still apply after a turn: items, and another wire's system prompt, but not `instructions`."""
    if parent is None:
        return ()
    call = parent.call or {}
    if call.get("wire") == responses.WIRE:
        return tuple(call.get("system_items", ()))
    return (parent.system,) if parent.system else ()


def compose(
    call: ResponsesCall,
    ran: Turn | None,
    *,
    continues: str | None = None,
    delta: bool = True,
    dialogue: OpenDialogue | None = None,
    rest: Sequence[ConversationItem] = (),
) -> TurnRequest:
    """The request that follows the turn `ran`. With `delta` the system texts and tools of that turn still apply.

    `dialogue`: the conversation, if the call names one. `rest`: its items after the turn `continues`. They come first,
    then its unsent items.
    """
    composed = _Composition(
        dict.fromkeys(lasting_system_texts(ran)) if delta else {}, has_turns=delta and ran is not None
    )
    if dialogue is not None:
        for entry in itertools.chain.from_iterable(dialogue.items_by_turn):
            if entry.id in dialogue.removed and entry.system is not None:
                composed.system_texts.pop(entry.system, None)
        composed.add_path(rest, dialogue.own_items)
        composed.add_unsent_items(dialogue.unsent)
    composed.add_input(call)
    if not composed.messages or composed.messages[-1].role != "user":
        raise InvalidRequest("input must end with a user message, or a function_call_output", param="input")
    request = call.request
    tools, fields = request.options.tools, request.call or {}
    if composed.has_turns and ran is not None:
        tools, fields = with_brought(tools, fields, ran.call or {})
    instructions = (call.instructions,) if call.instructions and call.instructions.strip() else ()
    return replace(
        request,
        continues=continues,
        messages=tuple(composed.messages),
        items=tuple(composed.ids),
        own_items=tuple(composed.own_items),
        system="\n\n".join((*instructions, *composed.system_texts)) or None,
        options=replace(request.options, tools=tools),
        call={**fields, **composed.call_fields()},
    )


class _Composition:
    """Collects a turn's messages and the parts of its system prompt. Once the conversation has turns, its system prompt
    stays as it is: a new system text is shown as a reminder among the messages."""

    def __init__(self, system_texts: dict[str, str | None], *, has_turns: bool) -> None:
        self.system_texts = system_texts  # the parts of the system prompt; with an id if one is an item of the client
        self.has_turns = has_turns
        self.messages: list[Message] = []
        self.ids: list[str | None] = []  # for each message the id of its item
        self.own_items: list[str] = []  # ids of the client's own items
        self._system_sent: list[tuple[str, str | None]] = []  # system texts that this turn lists, with their item ids
        self._other_items: list[str] = []  # the client's own items that are no messages

    def add_path(self, entries: Sequence[ConversationItem], own_items: Mapping[str, Item]) -> None:
        """Add items of the path. Thinking is left out: its signature is only valid in its own answer."""
        for entry in entries:
            if entry.id in own_items:
                self.own_items.append(entry.id)
            if entry.message is not None:
                if any(block.get("type") not in THINKING for block in entry.message.content):
                    self._add(entry.message, entry.id)
            elif entry.id in own_items:
                self._other_items.append(entry.id)
            elif entry.system is not None:
                self._system_sent.append((entry.system, entry.id))

    def add_unsent_items(self, items: Sequence[Item]) -> None:
        """Add items of the client that no turn has sent."""
        for item in items:
            entry = entry_of(item)
            self.own_items.append(item.id)
            text = entry.system if entry.system and entry.system.strip() else None
            if entry.message is not None:
                self._add(entry.message, item.id)
            elif text is not None and (self.has_turns or self.messages):
                self._add(reminder(text), item.id)
            else:
                self._other_items.append(item.id)
                if text is not None:
                    self.system_texts[text] = item.id

    def add_input(self, call: ResponsesCall) -> None:
        """Add the client's input. After the first turn a new system text becomes a reminder at its place."""
        for text in call.system:
            if text in self.system_texts or not self.has_turns:
                self.system_texts.setdefault(text, None)
                self._system_sent.append((text, None))
            else:
                self._add(reminder(text), None)
        for message in call.request.messages:
            self._add(message, None)
        if not self.has_turns and not self.messages and self.system_texts:
            # No other message: the last system text is the prompt.
            text, item_id = self.system_texts.popitem()
            if item_id is None:
                self._system_sent.pop()
            else:
                self._other_items.remove(item_id)
            self._add(reminder(text), item_id)

    def _add(self, message: Message, item_id: str | None) -> None:
        self.messages.append(message)
        self.ids.append(item_id)

    def call_fields(self) -> JSON:
        """The fields of `Turn.call` by which this turn's items are listed later."""
        fields: JSON = {"system_sent": [text for text, _ in self._system_sent], "system_items": list(self.system_texts)}
        if any(item_id is not None for _, item_id in self._system_sent):
            fields["system_ids"] = [item_id for _, item_id in self._system_sent]
        return {**fields, "beside": self._other_items} if self._other_items else fields
