"""Converts the `messages` of Ollama's chat and the `prompt` of its generate to blocks of the Messages API. Pure.

A tool's result has the `tool_call_id` (since Ollama 0.12.10), only the `tool_name`, or neither. Without an id it
belongs to the oldest call of that tool, or of any tool, in the answer before it that has no result yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...domain.models import Block, Message
from ...errors import InvalidRequest
from ..blocks import OpenCalls, base64_image, from_base64
from ..conversation import Instructions, by_role, checked_conversation, tool_result
from ..fields import objects, optional, required, wrong_type

ROLES = ("system", "user", "assistant", "tool")

# The first bytes of each image type of the Messages API: Ollama's images come without a type.
_FIRST_BYTES = (
    (b"\x89PNG\r\n\x1a\n", "image/png"), (b"\xff\xd8\xff", "image/jpeg"), (b"GIF8", "image/gif"),
    (b"RIFF", "image/webp"),
)  # fmt: skip
# The characters of base64 that contain the longest of them.
_FIRST_CHARACTERS = 12


def read(messages: object) -> tuple[str | None, tuple[Message, ...]]:
    """(system prompt, conversation). The conversation is empty if the list is. Raises `InvalidRequest`."""
    if not isinstance(messages, list):
        raise wrong_type("messages", "a list of messages")
    instructions = Instructions()
    conversation: list[tuple[str, Message]] = []
    calls = OpenCalls()
    for where, role, message in by_role(messages):
        text = optional(message, "content", str, where) or ""
        images = optional(message, "images", list, where) or []
        if images and role not in ("user", "tool"):
            raise InvalidRequest(f"{where}.images: only a user or a tool shows images", param=f"{where}.images")
        if role == "system":
            instructions.place(text, where, conversation)
        elif role == "user":
            conversation.append((where, user_message(text, images, f"{where}.images")))
        elif role == "assistant":
            if conversation and conversation[-1][1].role != "assistant":
                calls.next_answer()
            conversation.append((where, Message("assistant", (*_text(text), *_calls(message, where, calls)))))
        elif role == "tool":
            blocks = user_message(text, images, f"{where}.images").content
            is_text = len(blocks) == 1 and blocks[0]["type"] == "text"
            content = blocks[0]["text"] if is_text else list(blocks) or ""
            call_id, tool_name = (optional(message, name, str, where) or None for name in ("tool_call_id", "tool_name"))
            result = tool_result(calls.result(call_id, tool_name), content)
            conversation.append((where, Message("user", (result,))))
        else:
            raise InvalidRequest(f"{where}.role must be one of {', '.join(ROLES)}", param=f"{where}.role")
    instructions.use_as_prompt(conversation)
    system = "\n\n".join(instructions.system) or None
    return system, checked_conversation(conversation) if messages else ()


def user_message(text: str, images: list[Any], where: str) -> Message:
    """A blank text beside images is left out, because the Messages API refuses it."""
    image_blocks = tuple(_image(image, f"{where}[{index}]") for index, image in enumerate(images))
    if image_blocks and not text.strip():
        return Message("user", image_blocks)
    return Message("user", (*image_blocks, *_text(text)))


def _text(text: str) -> tuple[Block, ...]:
    return ({"type": "text", "text": text},) if text else ()


def _image(data: object, where: str) -> Block:
    if not isinstance(data, str):
        raise wrong_type(where, "an image in base64")
    first_bytes = from_base64(data[:_FIRST_CHARACTERS], where)
    for beginning, media_type in _FIRST_BYTES:
        if first_bytes.startswith(beginning):
            return base64_image(media_type, data, where)
    raise InvalidRequest(f"{where} must be a PNG, JPEG, GIF or WebP image in base64", param=where)


def _calls(message: Mapping[str, Any], where: str, calls: OpenCalls) -> list[Block]:
    blocks: list[Block] = []
    for place, call in objects(optional(message, "tool_calls", list, where) or [], f"{where}.tool_calls"):
        function = required(call, "function", dict, place)
        name = required(function, "name", str, f"{place}.function")
        arguments = optional(function, "arguments", dict, f"{place}.function") or {}
        call_id = calls.call(optional(call, "id", str, place), name)
        blocks.append({"type": "tool_use", "id": call_id, "name": name, "input": arguments})
    return blocks
