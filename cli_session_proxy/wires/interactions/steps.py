"""Converts steps of Google's Interactions to blocks of the Messages API and back. Pure."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable

from ...domain import limits
from ...domain.models import JSON, Block, Message, Turn
from ...errors import InvalidRequest
from ..blocks import BY_DATA, base64_file, base64_image, in_base64, is_web_address
from ..conversation import checked_conversation, tool_result, without_blank_texts
from ..fields import Part, objects, optional, required, wrong_type
from ..google import standard_base64

_STEPS = ("user_input", "model_output", "function_call", "function_result")
_CONTENTS = ("text", "image", "audio", "document", "video")


def read(given: object) -> tuple[Message, ...]:
    """The `input` of an interaction: a text, a content, a list of contents, or a list of steps.

    Thoughts are dropped: the chain has the signed thinking itself. Raises `InvalidRequest`.
    """
    if isinstance(given, str):
        given = [{"type": "text", "text": given}]
    elif isinstance(given, dict):
        given = [given]
    if not isinstance(given, list) or not given:
        raise InvalidRequest("input must be a text, a content, or a list of contents or steps", param="input")
    limits.at_most(given, limits.MESSAGES, "input")
    if all(isinstance(part, dict) and part.get("type") in _CONTENTS for part in given):
        return checked_conversation([("input", Message("user", without_blank_texts(_contents(given, "input"))))])
    conversation: list[tuple[str, Message]] = []
    for where, step in objects(given, "input"):
        if (message := _step(step, where)) is not None:
            conversation.append((where, message))
    return checked_conversation(conversation)


def _step(step: Part, where: str) -> Message | None:
    kind, role = step.get("type"), step.get("role")
    if kind is None and role in ("user", "model"):  # as in this API's first version
        kind = "user_input" if role == "user" else "model_output"
    if kind == "thought":
        return None
    if kind == "user_input":
        return Message("user", without_blank_texts(_content_of(step, where)))
    if kind == "model_output":
        return Message("assistant", _content_of(step, where))
    if kind == "function_call":
        call_id, name = (required(step, key, str, where) for key in ("id", "name"))
        given = required(step, "arguments", dict, where)
        return Message("assistant", ({"type": "tool_use", "id": call_id, "name": name, "input": given},))
    if kind != "function_result":
        raise InvalidRequest(f"{where}.type must be one of {', '.join(_STEPS)} or thought", param=f"{where}.type")
    result = step.get("result")
    content: str | list[Block]
    if isinstance(result, str):
        content = result
    elif isinstance(result, list):
        content = list(_contents(result, f"{where}.result"))
    elif isinstance(result, dict):
        content = json.dumps(result, ensure_ascii=False)
    else:
        raise wrong_type(f"{where}.result", "a text, an object or a list of contents")
    call_id = required(step, "call_id", str, where)
    return Message("user", (tool_result(call_id, content, is_error=optional(step, "is_error", bool, where)),))


def _content_of(step: Part, where: str) -> tuple[Block, ...]:
    """The blocks of a step's `content`: a text, a content, or a list of contents."""
    content = step.get("content")
    if isinstance(content, str):
        return ({"type": "text", "text": content},) if content else ()
    if isinstance(content, dict):
        content = [content]
    if not isinstance(content, list):
        raise wrong_type(f"{where}.content", "a list of contents")
    return _contents(content, f"{where}.content")


def _contents(parts: Iterable[object], where: str) -> tuple[Block, ...]:
    blocks: list[Block] = []
    for here, part in objects(parts, where):
        kind = part.get("type")
        if kind == "text":
            if text := required(part, "text", str, here):
                blocks.append({"type": "text", "text": text})
        elif kind in ("image", "document"):
            blocks.append(_file(part, kind, here))
        else:
            raise InvalidRequest(
                f"{here}: send text, image or document, the Claude CLI takes no other content", param=here
            )
    return tuple(blocks)


def _file(part: Part, kind: str, where: str) -> Block:
    uri = optional(part, "uri", str, where)
    if uri is not None:
        if kind == "document":
            raise InvalidRequest(f"{where}.uri: {BY_DATA}", param=f"{where}.uri")
        if not is_web_address(uri):
            raise InvalidRequest(f"{where}.uri must be an http(s) URL", param=f"{where}.uri")
        return {"type": "image", "source": {"type": "url", "url": uri}}
    mime = required(part, "mime_type", str, where)
    data = required(part, "data", str, where)
    read = base64_image if kind == "image" else base64_file
    return read(mime, standard_base64(data), f"{where}.data")


# --- writing ----------------------------------------------------------------------------------------------


def output_steps(turn: Turn, *, summaries: bool) -> list[JSON]:
    """The steps of an answer. Tool calls only if they wait for the client: others were run by the CLI."""
    made = (step_of(block, summaries=summaries) for block in turn.output)
    calls = turn.status == "requires_action"
    return [step for step in made if step is not None and (calls or step["type"] != "function_call")]


def step_of(block: Block, *, summaries: bool) -> JSON | None:
    """The step; None for an empty text, a thought without summary and signature, and other blocks."""
    kind = block.get("type")
    if kind == "text" and block["text"]:
        return {"type": "model_output", "content": [{"type": "text", "text": block["text"]}]}
    if kind == "thinking":
        step: JSON = {"type": "thought"}
        if summaries and block.get("thinking"):
            step["summary"] = [{"type": "text", "text": block["thinking"]}]
        if block.get("signature"):
            step["signature"] = signature(block["signature"])
        return step if len(step) > 1 else None
    if kind == "tool_use":
        return {"type": "function_call", "id": block["id"], "name": block["name"], "arguments": block["input"]}
    return None


def signature(signed: str) -> str:
    """In base64, as in Google's types."""
    return base64.b64encode(signed.encode("utf-8", "surrogatepass")).decode()


def input_steps(turn: Turn) -> list[JSON]:
    return [{"type": "user_input", "content": _shown(message.content)} for message in turn.input]


def _shown(blocks: Iterable[Block]) -> list[JSON]:
    shown: list[JSON] = []
    for block in blocks:
        if block["type"] == "image":
            source = block["source"]
            if source["type"] == "url":
                shown.append({"type": "image", "uri": source["url"]})
            else:
                shown.append({"type": "image", "mime_type": source["media_type"], "data": source["data"]})
        elif block["type"] == "document":
            source = block["source"]
            shown.append({"type": "document", "mime_type": source["media_type"], "data": in_base64(source)})
        else:
            text = block["text"] if block["type"] == "text" else json.dumps(block, ensure_ascii=False)
            shown.append({"type": "text", "text": text})
    return shown
