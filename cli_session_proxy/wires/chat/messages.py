"""The `messages` of Chat Completions in the blocks of the Messages API. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...domain import limits
from ...domain.models import Block, Message
from ...errors import InvalidRequest
from ..blocks import (
    BY_DATA,
    Instructions,
    Part,
    Reader,
    arguments,
    checked_arguments,
    checked_conversation,
    image_block,
    named_file,
    telling,
    typed_blocks,
)
from ..common import optional, required, wrong_type


def read(messages: object) -> tuple[str | None, tuple[Message, ...]]:
    """(system, conversation). System and developer messages in front are the system prompt, joined in order; later
    ones stay where they are.

    Messages of one role in a row stay apart, as they came. An empty assistant message stays, without blocks.
    """
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages must be a list with at least one message", param="messages")
    limits.at_most(messages, limits.MESSAGES, "messages")
    instructions = Instructions()
    conversation: list[tuple[str, Message]] = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            raise wrong_type(where, "an object")
        role = required(message, "role", str, "a string", where=f"{where}.")
        if role in ("system", "developer"):
            said = "".join(block["text"] for block in _blocks(message, where, {"text": _text}))
            instructions.place(said, where, conversation)
        elif role in _READERS:
            conversation.append((where, _READERS[role](message, where)))
        else:
            raise InvalidRequest(
                f"{where}.role must be system, developer, user, assistant or tool", param=f"{where}.role"
            )
    instructions.alone("messages", conversation)
    messages = checked_conversation(conversation)
    checked_arguments(messages, "messages")
    return "\n\n".join(instructions.system) or None, messages


def _user(message: Part, where: str) -> Message:
    return Message("user", telling(_blocks(message, where, {"text": _text, "image_url": _image, "file": _file})))


def _assistant(message: Part, where: str) -> Message:
    for name in ("function_call", "audio"):
        if message.get(name) is not None:
            raise InvalidRequest(f"{where}.{name} is not supported; leave it out", param=f"{where}.{name}")
    blocks: tuple[Block, ...] = ()
    if message.get("content") is not None:
        blocks = _blocks(message, where, {"text": _text, "refusal": _refusal})
    calls = optional(message, "tool_calls", list, "a list", where=f"{where}.") or []
    uses = tuple(_tool_use(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls))
    return Message("assistant", blocks + uses)


def _tool(message: Part, where: str) -> Message:
    call_id = required(message, "tool_call_id", str, "a string", where=f"{where}.")
    content = message.get("content")
    result: str | list[Block]
    if isinstance(content, str):
        result = content
    else:
        result = list(_blocks(message, where, {"text": _text, "image_url": _image, "file": _file}))
    return Message("user", ({"type": "tool_result", "tool_use_id": call_id, "content": result},))


_READERS: dict[str, Callable[[Part, str], Message]] = {"user": _user, "assistant": _assistant, "tool": _tool}


def _blocks(message: Part, where: str, kinds: Mapping[str, Reader]) -> tuple[Block, ...]:
    content = message.get("content")
    if isinstance(content, str):
        return ({"type": "text", "text": content},) if content else ()
    if not isinstance(content, list):
        raise wrong_type(f"{where}.content", "a string or a list of parts")
    return tuple(typed_blocks(content, f"{where}.content", kinds))


def _text(part: Part, where: str) -> Block | None:
    text = required(part, "text", str, "a string", where=f"{where}.")
    return {"type": "text", "text": text} if text else None


def _refusal(part: Part, where: str) -> Block | None:
    text = required(part, "refusal", str, "a string", where=f"{where}.")
    return {"type": "text", "text": text} if text else None


def _image(part: Part, where: str) -> Block:
    image = required(part, "image_url", dict, "an object", where=f"{where}.")
    url: str = required(image, "url", str, "a string", where=f"{where}.image_url.")
    return image_block(url, f"{where}.image_url.url")


def _file(part: Part, where: str) -> Block:
    file = required(part, "file", dict, "an object", where=f"{where}.")
    data = optional(file, "file_data", str, "a string", where=f"{where}.file.")
    if data is None:
        raise InvalidRequest(f"{where}.file: {BY_DATA}", param=f"{where}.file.file_data")
    name = optional(file, "filename", str, "a string", where=f"{where}.file.")
    return named_file(data, name, f"{where}.file.file_data")


def _tool_use(call: object, where: str) -> Block:
    if not isinstance(call, dict):
        raise wrong_type(where, "an object")
    if call.get("type", "function") != "function":
        raise InvalidRequest(f"{where}.type must be function", param=f"{where}.type")
    function = required(call, "function", dict, "an object", where=f"{where}.")
    given = optional(function, "arguments", str, "a string", where=f"{where}.function.")
    return {
        "type": "tool_use",
        "id": required(call, "id", str, "a string", where=f"{where}."),
        "name": required(function, "name", str, "a string", where=f"{where}.function."),
        "input": arguments(given, f"{where}.function.arguments"),
    }
