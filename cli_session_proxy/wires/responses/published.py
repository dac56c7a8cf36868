"""Tools that OpenAI defines and the client runs: its models know them by type, ours get these schemas. Pure.

A call is sent to the client as an item of the tool's own type. When the client sends that item back, it is read as the
same call, so that its history is recognised. Types as in openai 2.54.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from ...domain.models import JSON, Block, Message, Tool
from ..blocks import image_block
from ..conversation import tool_result
from ..fields import Part, optional, required

# The model's name of a tool, by the tool's type. A call's item has the type `{name}_call`.
NAMES: Mapping[str, str] = {
    "shell": "shell", "local_shell": "local_shell", "apply_patch": "apply_patch", "computer_use_preview": "computer",
}  # fmt: skip
# The prefix of the item's id, by the model's name.
PREFIXES: Mapping[str, str] = {"shell": "sh", "local_shell": "lsh", "apply_patch": "apc", "computer": "cu"}

_TEXT: JSON = {"type": "string"}
_NUMBER: JSON = {"type": "integer"}
_TEXTS: JSON = {"type": "array", "items": _TEXT, "minItems": 1}
_POINT: JSON = {"type": "object", "properties": {"x": _NUMBER, "y": _NUMBER}, "required": ["x", "y"]}


def tool_of(kind: str, tool: Part, where: str) -> Tool | None:
    """The tool for the model, of a tool of this type. None if OpenAI would run it: a shell in its own container."""
    properties: dict[str, JSON]
    if kind == "shell":
        environment = optional(tool, "environment", dict, where) or {}
        if environment.get("type") not in (None, "local"):
            return None
        text = "Run shell commands on the caller's machine, each in turn; what each prints and its exit code come back."
        properties = {"commands": _TEXTS, "timeout_ms": _NUMBER, "max_output_length": _NUMBER}
        needed = ["commands"]
    elif kind == "local_shell":
        text = "Run one command on the caller's machine: a program and its arguments, not a line for a shell."
        properties = {"command": _TEXTS, "working_directory": _TEXT, "timeout_ms": _NUMBER}
        needed = ["command"]
    elif kind == "apply_patch":
        text = (
            "Create, update or delete one file. diff is a V4A diff: for a new file every line with + in front; for an "
            "update sections that begin with @@ and a line to find the place by, then lines with a space (context), - "
            "or + in front; for a deletion empty."
        )
        properties = {
            "type": {"enum": ["create_file", "update_file", "delete_file"]}, "path": _TEXT, "diff": _TEXT,
        }  # fmt: skip
        needed = ["type", "path", "diff"]
    else:
        wide, high = (required(tool, f"display_{name}", int, where) for name in ("width", "height"))
        text = (
            f"Use a screen ({required(tool, 'environment', str, where)}) of {wide} x {high} pixels with a mouse and a "
            "keyboard, one action a call; x and y count from the top left. click takes x, y and button; double_click "
            "and move x and y; scroll x, y, scroll_x and scroll_y; drag a path; keypress keys; type a text. Each call "
            "is answered with a screenshot."
        )
        actions = ["click", "double_click", "drag", "keypress", "move", "screenshot", "scroll", "type", "wait"]
        properties = {
            "type": {"enum": actions}, "x": _NUMBER, "y": _NUMBER, "text": _TEXT, "keys": _TEXTS, "scroll_x": _NUMBER,
            "scroll_y": _NUMBER, "path": {"type": "array", "items": _POINT},
            "button": {"enum": ["left", "right", "wheel", "back", "forward"]},
        }  # fmt: skip
        needed = ["type"]
    schema: JSON = {"type": "object", "properties": properties, "required": needed, "additionalProperties": False}
    return Tool(NAMES[kind], text, schema, strict=True)


def item_of(name: str, block: Block, item_id: str) -> JSON:
    """A call of the tool of this name as an item for the client."""
    item: JSON = {"id": item_id, "type": f"{name}_call", "status": "completed", "call_id": block["id"]}
    given: JSON = block["input"]
    if name == "apply_patch":
        deletes = given.get("type") == "delete_file"
        return {**item, "operation": {key: value for key, value in given.items() if key != "diff" or not deletes}}
    if name == "local_shell":
        return {**item, "action": {"type": "exec", "env": {}, **given}}
    return {**item, "action": given, **({"pending_safety_checks": []} if name == "computer" else {})}


def read_call(item: Part, where: str) -> Message:
    """The message of such an item in a client's history: the inverse of `item_of`."""
    name = str(item["type"]).removesuffix("_call")
    call_id = item.get("call_id") or required(item, "id", str, where)
    given = optional(item, "operation" if name == "apply_patch" else "action", dict, where) or {}
    if name == "apply_patch":
        given = {**given, "diff": given.get("diff") or ""}
    else:
        added = ("type", "env") if name == "local_shell" else ()
        given = {key: value for key, value in given.items() if key not in added and value is not None}
    return Message("assistant", ({"type": "tool_use", "id": str(call_id), "name": name, "input": given},))


def read_result(item: Part, where: str) -> Message:
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
