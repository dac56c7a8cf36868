"""What a turn says to the model: the client's input, behind what its conversation holds. Pure, no I/O."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...domain.models import JSON, THINKING, Item, Message, Turn, TurnRequest
from ...domain.reminders import reminder
from ...errors import InvalidRequest
from . import body as responses
from .body import ResponsesCall
from .items import NONE_WRITTEN, ConversationItem, entry_of, input_entries, output_entries
from .tools import with_brought


@dataclass(frozen=True, slots=True)
class OpenDialogue:
    """What a conversation holds: the turns of the path with the items of each, and `free`, which no turn on the path
    has taken in. `removed` are the ids of items that were taken out."""

    metadata: JSON
    removed: frozenset[str]
    path: Sequence[Turn]
    said: Sequence[Sequence[ConversationItem]]
    free: Sequence[Item]
    written: Mapping[str, Item] = field(default_factory=lambda: NONE_WRITTEN)

    @property
    def entries(self) -> list[ConversationItem]:
        there = [entry for entries in self.said for entry in entries if entry.id not in self.removed]
        return there + [entry_of(item) for item in self.free]

    def rest(self) -> tuple[Turn | None, list[ConversationItem]]:
        """The last turn before anything was taken out, and what was said after it but for that."""
        touched = (at for at, said in enumerate(self.said) if any(entry.id in self.removed for entry in said))
        start = next(touched, len(self.path))
        left = [[entry for entry in said if entry.id not in self.removed] for said in self.said]
        # An answer whose question was taken out belongs to the answer before it.
        while start:
            roles = (entry.message.role for said in left[start:] for entry in said if entry.message is not None)
            if next(roles, "user") == "user":
                break
            start -= 1
        return self.path[start - 1] if start else None, [entry for said in left[start:] for entry in said]


def entries_of(turn: Turn, written: Mapping[str, Item] = NONE_WRITTEN) -> list[ConversationItem]:
    return [*input_entries(turn, written), *output_entries(turn, written)]


def carried(parent: Turn | None) -> tuple[str, ...]:
    """System texts that hold on after a turn: items do, `instructions` do not; another wire's system prompt does."""
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
    held: OpenDialogue | None = None,
    rest: Sequence[ConversationItem] = (),
) -> TurnRequest:
    """What the client asks behind the turn `ran`, whose system texts and tools hold on in a `delta`.

    `rest` is what the conversation holds behind the turn `continues`, and goes in front with its free items.
    """
    said = _Said(dict.fromkeys(carried(ran)) if delta else {}, begun=delta and ran is not None)
    if held is not None:
        for entry in itertools.chain.from_iterable(held.said):
            if entry.id in held.removed and entry.system is not None:
                said.holds.pop(entry.system, None)
        said.again(rest, held.written)
        said.free(held.free)
    said.asked(call)
    if not said.messages or said.messages[-1].role != "user":
        raise InvalidRequest("input must end with a user message, or a function_call_output", param="input")
    request = call.request
    tools, kept = request.options.tools, request.call or {}
    if said.begun and ran is not None:
        tools, kept = with_brought(tools, kept, ran.call or {})
    instructions = (call.instructions,) if call.instructions and call.instructions.strip() else ()
    return replace(
        request,
        continues=continues,
        messages=tuple(said.messages),
        items=tuple(said.ids),
        takes=tuple(said.takes),
        system="\n\n".join((*instructions, *said.holds)) or None,
        options=replace(request.options, tools=tools),
        call={**kept, **said.kept()},
    )


class _Said:
    """A turn's messages as they are put together. `begun`: the conversation has a system prompt already.

    `holds`: the texts of the system prompt, with the id of each hand-written one.
    """

    def __init__(self, holds: dict[str, str | None], *, begun: bool) -> None:
        self.holds = holds
        self.begun = begun
        self.messages: list[Message] = []
        self.ids: list[str | None] = []  # of the items that these are
        self.takes: list[str] = []  # hand-written items
        self._sent: list[tuple[str, str | None]] = []  # system texts that this turn lists, with their ids
        self._beside: list[str] = []  # hand-written items that are no message

    def again(self, entries: Sequence[ConversationItem], written: Mapping[str, Item]) -> None:
        """What stood on the path. Thinking was sealed for the answer that is left: nobody can vouch for it here."""
        for entry in entries:
            if entry.id in written:
                self.takes.append(entry.id)
            if entry.message is not None:
                if any(block.get("type") not in THINKING for block in entry.message.content):
                    self._add(entry.message, entry.id)
            elif entry.id in written:
                self._beside.append(entry.id)
            elif entry.system is not None:
                self._sent.append((entry.system, entry.id))

    def free(self, items: Sequence[Item]) -> None:
        for item in items:
            entry = entry_of(item)
            self.takes.append(item.id)
            text = entry.system if entry.system and entry.system.strip() else None
            if entry.message is not None:
                self._add(entry.message, item.id)
            elif text is not None and (self.begun or self.messages):
                self._add(reminder(text), item.id)
            else:
                self._beside.append(item.id)
                if text is not None:
                    self.holds[text] = item.id

    def asked(self, call: ResponsesCall) -> None:
        """The client's own input. A system text stays where it is said, where the conversation has begun."""
        for text in call.system:
            if text in self.holds or not self.begun:
                self.holds.setdefault(text, None)
                self._sent.append((text, None))
            else:
                self._add(reminder(text), None)
        for message in call.request.messages:
            self._add(message, None)
        if not self.begun and not self.messages and self.holds:  # nothing else was said: the last is what is asked
            text, item_id = self.holds.popitem()
            if item_id is None:
                self._sent.pop()
            else:
                self._beside.remove(item_id)
            self._add(reminder(text), item_id)

    def _add(self, message: Message, item_id: str | None) -> None:
        self.messages.append(message)
        self.ids.append(item_id)

    def kept(self) -> JSON:
        kept: JSON = {"system_sent": [text for text, _ in self._sent], "system_items": list(self.holds)}
        if any(item_id is not None for _, item_id in self._sent):
            kept["system_ids"] = [item_id for _, item_id in self._sent]
        return {**kept, "beside": self._beside} if self._beside else kept
