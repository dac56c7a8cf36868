"""Tools that OpenAI defines and the client runs: its models know them by type, ours get these schemas. Pure.

A call is sent to the client as an item of the tool's own type. When the client sends that item back, it is read as the
same call, so that its history is recognised. Types as in openai 2.54.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...domain.models import JSON, Block, Message, Tool
from ..blocks import image_block
from ..common import optional, required, tool_result

_TEXT: JSON = {"type": "string"}
_NUMBER: JSON = {"type": "integer"}
_TEXTS: JSON = {"type": "array", "items": _TEXT, "minItems": 1}
_POINT: JSON = {"type": "object", "properties": {"x": _NUMBER, "y": _NUMBER}, "required": ["x", "y"]}


@dataclass(frozen=True, slots=True)
class Published:
    """`name` is what the model calls, `key` the item's field that holds the arguments; `prefix` begins the item's "
    "id."""

    name: str
    key: str
    prefix: str
    tool: Callable[[Mapping[str, Any], str], Tool | None]
    shown: Callable[[JSON], JSON] = dict
    read: Callable[[JSON], JSON] = dict

    def item(self, kind: str, block: Block, key: str, n: int) -> JSON:
        """A call as an item for the client."""
        item: JSON = {"id": f"{self.prefix}_{key}_{n}", "type": f"{kind}_call", "status": "completed"}
        item |= {"call_id": block["id"], self.key: self.shown(block["input"])}
        return {**item, "pending_safety_checks": []} if kind == "computer" else item

    def message(self, item: Mapping[str, Any], where: str) -> Message:
        """The message of such an item in a client's history."""
        call_id = item.get("call_id") or required(item, "id", str, where)
        given = optional(item, self.key, dict, where) or {}
        return Message(
            "assistant", ({"type": "tool_use", "id": str(call_id), "name": self.name, "input": self.read(given)},)
        )


def _object(names: Mapping[str, JSON], *wanted: str) -> JSON:
    return {"type": "object", "properties": dict(names), "required": list(wanted), "additionalProperties": False}


def _shell(tool: Mapping[str, Any], where: str) -> Tool | None:
    """The shell tool; None if OpenAI would run its container."""
    environment = optional(tool, "environment", dict, where) or {}
    if environment.get("type") not in (None, "local"):
        return None
    return Tool(
        "shell",
        "Run shell commands on the caller's machine, each in turn; what each prints and its exit code come back.",
        _object({"commands": _TEXTS, "timeout_ms": _NUMBER, "max_output_length": _NUMBER}, "commands"),
        strict=True,
    )


def _local_shell(tool: Mapping[str, Any], where: str) -> Tool:  # noqa: ARG001 - as its neighbours
    names = {"command": _TEXTS, "working_directory": _TEXT, "timeout_ms": _NUMBER}
    return Tool(
        "local_shell",
        "Run one command on the caller's machine: a program and its arguments, not a line for a shell.",
        _object(names, "command"),
        strict=True,
    )


def _apply_patch(tool: Mapping[str, Any], where: str) -> Tool:  # noqa: ARG001 - as its neighbours
    kinds = {"enum": ["create_file", "update_file", "delete_file"]}
    return Tool(
        "apply_patch",
        "Create, update or delete one file. diff is a V4A diff: for a new file every line with + in front; for an "
        "update "
        "sections that begin with @@ and a line to find the place by, then lines with a space (context), - or + in "
        "front; "
        "for a deletion empty.",
        _object({"type": kinds, "path": _TEXT, "diff": _TEXT}, "type", "path", "diff"),
        strict=True,
    )


def _computer(tool: Mapping[str, Any], where: str) -> Tool:
    wide, high = (required(tool, f"display_{name}", int, where) for name in ("width", "height"))
    system = required(tool, "environment", str, where)
    kinds = ["click", "double_click", "drag", "keypress", "move", "screenshot", "scroll", "type", "wait"]
    names: dict[str, JSON] = {
        "type": {"enum": kinds}, "x": _NUMBER, "y": _NUMBER, "text": _TEXT, "keys": _TEXTS, "scroll_x": _NUMBER,
        "scroll_y": _NUMBER, "path": {"type": "array", "items": _POINT},
        "button": {"enum": ["left", "right", "wheel", "back", "forward"]},
    }  # fmt: skip
    return Tool(
        "computer",
        f"Use a screen ({system}) of {wide} x {high} pixels with a mouse and a keyboard, one action a call; x and y "
        "count from "
        "the top left. click takes x, y and button; double_click and move x and y; scroll x, y, scroll_x and "
        "scroll_y; drag a "
        "path; keypress keys; type a text. Each call is answered with a screenshot.",
        _object(names, "type"),
        strict=True,
    )


def _executed(given: JSON) -> JSON:
    return {"type": "exec", "env": {}, **given}


def _execution(action: JSON) -> JSON:
    return {name: value for name, value in action.items() if name not in ("type", "env") and value is not None}


def _operation(given: JSON) -> JSON:
    return {name: value for name, value in given.items() if name != "diff" or given.get("type") != "delete_file"}


def _patched(operation: JSON) -> JSON:
    return {**operation, "diff": operation.get("diff") or ""}


def _without_nulls(action: JSON) -> JSON:
    return {name: value for name, value in action.items() if value is not None}


# By tool type, except for `computer_use_preview`, whose items are `computer_call`.
PUBLISHED: Mapping[str, Published] = {
    "shell": Published("shell", "action", "sh", _shell, read=_without_nulls),
    "local_shell": Published("local_shell", "action", "lsh", _local_shell, _executed, _execution),
    "apply_patch": Published("apply_patch", "operation", "apc", _apply_patch, _operation, _patched),
    "computer": Published("computer", "action", "cu", _computer, read=_without_nulls),
}
TYPES: Mapping[str, str] = {
    **{kind: kind for kind in PUBLISHED if kind != "computer"},
    "computer_use_preview": "computer",
}


def result(item: Mapping[str, Any], where: str) -> Message:
    """The result of such a tool: a shell's outputs, or a computer's screenshot."""
    call_id = item.get("call_id") or required(item, "id", str, where)
    output = item.get("output")
    content: str | list[Block]
    if isinstance(output, dict):
        url = required(output, "image_url", str, f"{where}.output")
        content = [image_block(url, f"{where}.output.image_url")]
    elif output is None or isinstance(output, str):
        content = output or ""
    else:
        content = json.dumps(output, ensure_ascii=False)
    return Message("user", (tool_result(str(call_id), content, is_error=item.get("status") == "failed"),))
