"""The `contents` of Google's generateContent in the blocks of the Messages API. Pure.

Names of fields are accepted as the JSON form of protobuf allows: camelCase and snake_case.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby

from ...domain import limits
from ...domain.models import Block, Message
from ...errors import InvalidRequest
from ..blocks import OpenCalls, base64_file, is_web_address
from ..conversation import checked_conversation, tool_result, without_blank_texts
from ..fields import Part, objects, wrong_type
from ..google import either, standard_base64

_KINDS = "text, inlineData, fileData, functionCall or functionResponse"


def read(body: Part, *, answered: bool = True) -> tuple[str | None, tuple[Message, ...]]:
    """(system, conversation). With `answered`, the last content must ask something. Raises `InvalidRequest`."""
    contents = body.get("contents")
    if not isinstance(contents, list) or not contents:
        raise InvalidRequest("contents must be a list with at least one content", param="contents")
    limits.at_most(contents, limits.MESSAGES, "contents")
    calls = OpenCalls()
    conversation: list[tuple[str, Message]] = []
    answer: list[Block] | None = None  # the blocks of the model's contents in a row
    for index, (where, content) in enumerate(objects(contents, "contents")):
        role = either(content, "role", str, where) or "user"
        if role == "model":
            if answer is None:
                answer = []
                calls.next_answer()
            answer += _blocks(content, where, calls)
            continue
        if role not in ("user", "function"):
            raise InvalidRequest(f"{where}.role must be user or model", param=f"{where}.role")
        if answer is not None:
            conversation.append((f"contents[{index - 1}]", Message("assistant", _joined(answer))))
            answer = None
        conversation.append((where, Message("user", without_blank_texts(tuple(_blocks(content, where, calls))))))
    if answer is not None:
        conversation.append((f"contents[{len(contents) - 1}]", Message("assistant", _joined(answer))))
    system = either(body, "systemInstruction")
    if isinstance(system, dict):
        system = "\n\n".join(block["text"] for block in _blocks(system, "systemInstruction", None))
    elif system is not None and not isinstance(system, str):
        raise wrong_type("systemInstruction", "a content or a string")
    if not answered:
        return system or None, tuple(message for _, message in conversation)
    return system or None, checked_conversation(conversation)


def _joined(blocks: Sequence[Block]) -> tuple[Block, ...]:
    """The blocks of an answer, with adjacent texts joined. Chats of google-genai keep a content for each chunk of a
    stream: unjoined, no streamed answer would be recognised."""
    joined: list[Block] = []
    for is_text, group in groupby(blocks, lambda block: block["type"] == "text"):
        some = list(group)
        joined += [{"type": "text", "text": "".join(block["text"] for block in some)}] if is_text else some
    return tuple(joined)


def _blocks(content: Part, where: str, calls: OpenCalls | None) -> list[Block]:
    """The blocks of a content's parts; without `calls` (a system instruction) only texts."""
    parts = content.get("parts")
    if isinstance(parts, dict):  # older clients send a single part so
        parts = [parts]
    if not isinstance(parts, list):
        raise wrong_type(f"{where}.parts", "a list of parts")
    blocks: list[Block] = []
    for here, part in objects(parts, f"{where}.parts"):
        if (block := _block(part, here, calls)) is not None:
            blocks.append(block)
    return blocks


def _block(part: Part, where: str, calls: OpenCalls | None) -> Block | None:
    text = either(part, "text", str, where)
    if either(part, "thought", bool, where):
        return None  # a summary; the chain has the signed thinking itself
    if text is not None:
        return {"type": "text", "text": text} if text else None
    if calls is None:
        raise InvalidRequest(f"{where} must be a text", param=where)
    if (data := either(part, "inlineData", dict, where)) is not None:
        here = f"{where}.inlineData"
        mime, encoded = (either(data, name, str, here) or "" for name in ("mimeType", "data"))
        return base64_file(mime, standard_base64(encoded), f"{here}.data", either(data, "displayName", str, here))
    if (data := either(part, "fileData", dict, where)) is not None:
        here = f"{where}.fileData"
        uri, mime = either(data, "fileUri", str, here) or "", either(data, "mimeType", str, here) or "image/"
        if not is_web_address(uri) or not mime.startswith("image/"):
            raise InvalidRequest(
                f"{here}.fileUri must be the http(s) URL of an image; of other files send inlineData",
                param=f"{here}.fileUri",
            )
        return {"type": "image", "source": {"type": "url", "url": uri}}
    if (call := either(part, "functionCall", dict, where)) is not None:
        name, given = _named(call, f"{where}.functionCall")
        arguments = either(call, "args", dict, f"{where}.functionCall") or {}
        return {"type": "tool_use", "id": calls.call(given, name), "name": name, "input": arguments}
    if (result := either(part, "functionResponse", dict, where)) is not None:
        name, given = _named(result, f"{where}.functionResponse")
        response = either(result, "response", dict, f"{where}.functionResponse") or {}
        return tool_result(calls.result(given, name), json.dumps(response, ensure_ascii=False))
    if either(part, "thoughtSignature") is not None:
        return None  # only a signature
    raise InvalidRequest(f"{where} is not supported; send {_KINDS}", param=where)


def _named(call: Part, where: str) -> tuple[str, str | None]:
    name = either(call, "name", str, where)
    if not name:
        raise InvalidRequest(f"{where}.name is missing: it must be a string", param=f"{where}.name")
    return name, either(call, "id", str, where) or None
