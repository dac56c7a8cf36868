"""What every reader of a stored block relies on, and a block in the form of a stream. Pure.

Blocks come from clients, from the CLI, and from imports; earlier versions imported them unchecked. A block of an
unknown type is fine, as a newer model may say one: readers leave it out, or show it as it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from .models import JSON, Block

# By a block's type, the fields that it must have.
_FIELDS: Mapping[str, Mapping[str, type]] = {
    "text": {"text": str}, "thinking": {"thinking": str}, "tool_use": {"id": str, "name": str, "input": dict},
    "tool_result": {"tool_use_id": str}, "image": {"source": dict}, "document": {"source": dict},
}  # fmt: skip
_SOURCE: Mapping[str, type] = {"type": str, "media_type": str, "data": str}
_URL_SOURCE: Mapping[str, type] = {"url": str}
# Fields that such a block may have.
_OPTIONAL: Mapping[str, type] = {"signature": str, "title": str}


def check(block: JSON) -> JSON:
    """Returns the block. Raises `ValueError` if readers cannot show it. Blocks in a tool's result are not checked."""
    _require("block", block, {"type": str})
    kind = block["type"]
    _require(kind, block, _FIELDS.get(kind, {}))
    if kind in _FIELDS:
        _require(kind, block, {name: type_ for name, type_ in _OPTIONAL.items() if block.get(name) is not None})
    if kind in ("image", "document"):
        by_url = kind == "image" and block["source"].get("type") == "url"
        _require("source", block["source"], _URL_SOURCE if by_url else _SOURCE)
    return block


def _require(what: str, value: JSON, types: Mapping[str, type]) -> None:
    """Raises `ValueError` if a field is missing or has another type. `what`: the value's name in the message."""
    wrong = next((name for name, type_ in types.items() if not isinstance(value.get(name), type_)), None)
    if wrong is not None:
        raise ValueError(f"{what}.{wrong} is missing, or no {types[wrong].__name__}")


def sound(block: Block) -> Block:
    """The block or, if readers could not show it, a text that says so. The same for blocks in a tool's result."""
    if type(block.get("text")) is str and block.get("type") == "text":  # nearly every block
        return block
    try:
        check(block)
    except ValueError as exc:
        return _placeholder(str(exc))
    content = block.get("content")
    if block["type"] != "tool_result" or content is None or isinstance(content, str):
        return block
    if not isinstance(content, list):
        return {**block, "content": [_placeholder("the content of a result is no text and no list")]}
    inner = [sound(one) if isinstance(one, dict) else _placeholder("it is no object") for one in content]
    return block if inner == content else {**block, "content": inner}


def all_sound(blocks: Iterable[Block]) -> tuple[Block, ...]:
    return tuple(map(sound, blocks))


def _placeholder(why: str) -> Block:
    return {"type": "text", "text": f"[a block that cannot be shown: {why}]"}


def contents(result: Block) -> list[Block]:
    """The blocks in a call's result."""
    content = result.get("content")
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [block for block in content or () if isinstance(block, dict)]


def as_stream(block: Block) -> tuple[Block, list[Block]]:
    """A whole block in the form of a stream: its start and its deltas."""
    match block.get("type"):
        case "text":
            return {**block, "text": ""}, [{"type": "text_delta", "text": block.get("text", "")}]
        case "thinking":
            deltas: list[Block] = [{"type": "thinking_delta", "thinking": block.get("thinking", "")}]
            if block.get("signature"):
                deltas.append({"type": "signature_delta", "signature": block["signature"]})
            return {**block, "thinking": "", "signature": ""}, deltas
        case "tool_use":
            arguments = json.dumps(block.get("input", {}), ensure_ascii=False)
            return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": arguments}]
    return dict(block), []
