"""The `system` and `messages` of Anthropic's Messages API, field by field. Pure.

Blocks are kept as the chain keeps them: without `cache_control`, `citations` and what else only the provider reads.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...domain import limits
from ...domain.models import Block, Message
from ...errors import InvalidRequest
from ..blocks import (
    BY_DATA,
    Part,
    Reader,
    base64_file,
    base64_image,
    checked_conversation,
    document,
    is_web_address,
    telling,
    typed_blocks,
)
from ..common import optional, required, wrong_type


def read(body: Part, *, answered: bool = True) -> tuple[str | None, tuple[Message, ...]]:
    """(system, conversation). With `answered`, the last message must ask something. Raises `InvalidRequest`.

    System messages inside `messages` count wherever they stand, after `system`, joined in order.
    """
    system = [system_text(body.get("system"))]
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages must be a list with at least one message", param="messages")
    limits.at_most(messages, limits.MESSAGES, "messages")
    conversation: list[tuple[str, Message]] = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            raise wrong_type(where, "an object")
        role = required(message, "role", str, "a string", where=f"{where}.")
        if role == "system":
            system.append("".join(block["text"] for block in _blocks(message, where, {"text": _text})))
        elif role == "user":
            conversation.append((where, Message("user", telling(_blocks(message, where, _USER)))))
        elif role == "assistant":
            conversation.append((where, Message("assistant", _blocks(message, where, _ASSISTANT))))
        else:
            raise InvalidRequest(f"{where}.role must be user or assistant", param=f"{where}.role")
    joined = "\n\n".join(text for text in system if text.strip()) or None
    if not answered:
        return joined, tuple(message for _, message in conversation)
    return joined, checked_conversation(conversation)


def system_text(system: object) -> str:
    if system is None or isinstance(system, str):
        return system or ""
    if not isinstance(system, list):
        raise wrong_type("system", "a string or a list of text blocks")
    return "\n\n".join(block["text"] for block in typed_blocks(system, "system", {"text": _text}))


def _blocks(message: Part, where: str, kinds: Mapping[str, Reader]) -> tuple[Block, ...]:
    content = message.get("content")
    if isinstance(content, str):
        return ({"type": "text", "text": content},) if content else ()
    if not isinstance(content, list):
        raise wrong_type(f"{where}.content", "a string or a list of blocks")
    return tuple(typed_blocks(content, f"{where}.content", kinds))


def _text(block: Part, where: str) -> Block | None:
    text = required(block, "text", str, "a string", where=f"{where}.")
    return {"type": "text", "text": text} if text else None


def _image(block: Part, where: str) -> Block:
    source = required(block, "source", dict, "an object", where=f"{where}.")
    inner = f"{where}.source"
    kind = required(source, "type", str, "a string", where=f"{inner}.")
    if kind == "url":
        url = required(source, "url", str, "a string", where=f"{inner}.")
        if not is_web_address(url):
            raise InvalidRequest(f"{inner}.url must be an http(s) URL", param=f"{inner}.url")
        return {"type": "image", "source": {"type": "url", "url": url}}
    if kind != "base64":
        raise InvalidRequest(f"{inner}.type must be base64 or url: there are no files here", param=f"{inner}.type")
    media_type = required(source, "media_type", str, "a string", where=f"{inner}.")
    return base64_image(media_type, required(source, "data", str, "a string", where=f"{inner}."), f"{inner}.data")


def _document(block: Part, where: str) -> Block:
    source = required(block, "source", dict, "an object", where=f"{where}.")
    inner = f"{where}.source"
    kind = required(source, "type", str, "a string", where=f"{inner}.")
    title = optional(block, "title", str, "a string", where=f"{where}.")
    if kind == "base64":
        media_type = required(source, "media_type", str, "a string", where=f"{inner}.")
        data = required(source, "data", str, "a string", where=f"{inner}.")
        return base64_file(media_type, data, f"{inner}.data", title)
    if kind == "text":
        text: str = required(source, "data", str, "a string", where=f"{inner}.")
        if not text.strip():
            raise InvalidRequest(f"{inner}.data holds no words", param=f"{inner}.data")
        return document({"type": "text", "media_type": "text/plain", "data": text}, title)
    raise InvalidRequest(f"{inner}: {BY_DATA}, or a text", param=f"{inner}.type")


def _thinking(block: Part, where: str) -> Block:
    return {
        "type": "thinking",
        "thinking": optional(block, "thinking", str, "a string", where=f"{where}.") or "",
        "signature": optional(block, "signature", str, "a string", where=f"{where}.") or "",
    }


def _redacted_thinking(block: Part, where: str) -> Block:
    return {"type": "redacted_thinking", "data": required(block, "data", str, "a string", where=f"{where}.")}


def _tool_use(block: Part, where: str) -> Block:
    return {
        "type": "tool_use",
        "id": required(block, "id", str, "a string", where=f"{where}."),
        "name": required(block, "name", str, "a string", where=f"{where}."),
        "input": required(block, "input", dict, "an object", where=f"{where}."),
    }


def _tool_result(block: Part, where: str) -> Block:
    content = block.get("content")
    result: str | list[Block]
    if content is None or isinstance(content, str):
        result = content or ""
    elif isinstance(content, list):
        result = typed_blocks(content, f"{where}.content", {"text": _text, "image": _image, "document": _document})
    else:
        raise wrong_type(f"{where}.content", "a string or a list of blocks")
    call_id = required(block, "tool_use_id", str, "a string", where=f"{where}.")
    read: Block = {"type": "tool_result", "tool_use_id": call_id, "content": result}
    if optional(block, "is_error", bool, "true or false", where=f"{where}."):
        read["is_error"] = True
    return read


_USER: dict[str, Reader] = {
    "text": _text, "image": _image, "document": _document, "tool_result": _tool_result,
}  # fmt: skip
_ASSISTANT: dict[str, Reader] = {
    "text": _text, "thinking": _thinking, "redacted_thinking": _redacted_thinking, "tool_use": _tool_use,
}  # fmt: skip
