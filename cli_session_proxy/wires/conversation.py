"""Reads the messages of a body into blocks of the Messages API. Shared by all wires; pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..domain import limits
from ..domain.models import Block, Message
from ..domain.system_prompts import reminder
from ..errors import InvalidRequest
from .fields import Part, objects, required, wrong_type

# Reads a content part at its place in the body; None if the part is empty.
Reader = Callable[[Part, str], "Block | None"]


def by_role(messages: Sequence[object]) -> Iterator[tuple[str, str, Part]]:
    """(place in the body, role, message) of each message. Raises `InvalidRequest`."""
    limits.at_most(messages, limits.MESSAGES, "messages")
    for where, message in objects(messages, "messages"):
        yield where, required(message, "role", str, where), message


def typed_blocks(parts: Iterable[object], where: str, kinds: Mapping[str, Reader]) -> list[Block]:
    """Read each part with the reader in `kinds` for its `type`; empty parts are left out. Raises `InvalidRequest`."""
    read: list[Block] = []
    for here, part in objects(parts, where):
        kind = required(part, "type", str, here)
        if kind not in kinds:
            raise InvalidRequest(f"{here}: {kind!r} is not supported here; send {' or '.join(kinds)}", param=here)
        if (block := kinds[kind](part, here)) is not None:
            read.append(block)
    return read


def read_content(
    message: Part, where: str, kinds: Mapping[str, Reader], *, name: str = "content", parts: str = "parts"
) -> tuple[Block, ...]:
    """The content of a message, in the field `name`: a text, or a list of `parts` (the wire's word for them). Raises
    `InvalidRequest`."""
    content = message.get(name)
    if isinstance(content, str):
        return ({"type": "text", "text": content},) if content else ()
    if not isinstance(content, list):
        raise wrong_type(f"{where}.{name}", f"a string or a list of {parts}")
    return tuple(typed_blocks(content, f"{where}.{name}", kinds))


def read_text(part: Part, where: str, name: str = "text") -> Block | None:
    """The text block of a part whose field `name` holds the text; None if it is empty."""
    text = required(part, name, str, where)
    return {"type": "text", "text": text} if text else None


def tool_result(call_id: str, content: str | list[Block], *, is_error: object = False) -> Block:
    result: Block = {"type": "tool_result", "tool_use_id": call_id, "content": content}
    return {**result, "is_error": True} if is_error else result


def without_blank_texts(blocks: tuple[Block, ...]) -> tuple[Block, ...]:
    """Without blank text blocks, which the Messages API refuses; unchanged if there are no other blocks."""
    return tuple(block for block in blocks if block["type"] != "text" or block["text"].strip()) or blocks


@dataclass(slots=True)
class Instructions:
    """The system and developer messages of a body: those before the conversation form its system prompt, later ones
    stay at their place as `reminders`."""

    system: list[str] = field(default_factory=list)

    def place(self, text: str, where: str, conversation: list[tuple[str, Message]]) -> None:
        if not text.strip():
            return
        if conversation:
            conversation.append((where, reminder(text)))
        else:
            self.system.append(text)

    def use_as_prompt(self, conversation: list[tuple[str, Message]]) -> None:
        """If the body has no other message, the last instruction becomes the prompt."""
        if self.system and not conversation:
            conversation.append(("messages", reminder(self.system.pop())))


def checked_conversation(conversation: Sequence[tuple[str, Message]]) -> tuple[Message, ...]:
    """The messages without their places in the body. Raises `InvalidRequest` if the last one is no prompt or result."""
    if not conversation:
        raise InvalidRequest("messages must hold a user message", param="messages")
    where, last = conversation[-1]
    if last.role != "user":
        raise InvalidRequest("the last message must be the user's or a tool's", param=f"{where}.role")
    if not any(block["type"] != "text" or block["text"].strip() for block in last.content):
        raise InvalidRequest(f"{where}.content is empty: send a text or an image", param=f"{where}.content")
    # A program that resumes may repeat the results of its last calls: equal ones count once.
    out: list[Message] = []
    results: dict[str, Block] = {}  # results since the model's last message
    for _, message in conversation:
        if message.role == "assistant":
            results = {}
        blocks_kept: list[Block] = []
        for block in message.content:
            if block["type"] == "tool_result":
                call = str(block["tool_use_id"])
                if results.get(call) == block:
                    continue
                results.setdefault(call, block)
            blocks_kept.append(block)
        if len(blocks_kept) == len(message.content):
            out.append(message)
        elif blocks_kept:
            out.append(Message(message.role, tuple(blocks_kept)))
    return tuple(out)
