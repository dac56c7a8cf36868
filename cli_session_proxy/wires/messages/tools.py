"""The client's tools in the Messages API. Pure.

Some tools are defined by Anthropic and run by the client: Anthropic's models know them by type and date, the CLI's get
the schemas below. They are as in Anthropic's documentation ("Bash tool", "Text editor tool", "Memory tool", "Computer
use tool") and in the types of anthropic 2.12. A later date gets the newest schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...domain.client_tools import checked, checked_choice
from ...domain.models import JSON, Tool, ToolChoice
from ...errors import InvalidRequest
from ..fields import hosted_tool, objects, optional, required

_MODES: Mapping[str, Any] = {"auto": "auto", "any": "required", "none": "none"}


def read_tools(body: Mapping[str, Any]) -> tuple[tuple[Tool, ...], tuple[str, ...]]:
    """(the client's own tools, the names of tools that are not offered). Raises `InvalidRequest`."""
    own: list[Tool] = []
    hosted: list[str] = []
    for here, tool in objects(optional(body, "tools", list) or [], "tools"):
        kind = optional(tool, "type", str, here)
        if kind in (None, "custom"):
            own.append(
                Tool(
                    name=required(tool, "name", str, here),
                    description=optional(tool, "description", str, here) or "",
                    schema=required(tool, "input_schema", dict, here, expected="a JSON Schema"),
                    strict=bool(optional(tool, "strict", bool, here)),
                )
            )
        elif (known := read_published(kind, tool, here)) is not None:
            own.append(known)
        else:
            hosted.append(hosted_tool(kind, here))
    return checked(own), tuple(dict.fromkeys(hosted))


def read_choice(body: Mapping[str, Any], tools: tuple[Tool, ...]) -> ToolChoice:
    wanted = optional(body, "tool_choice", dict) or {"type": "auto"}
    kind = wanted.get("type")
    single = bool(optional(wanted, "disable_parallel_tool_use", bool, "tool_choice"))
    if kind == "tool":
        name = required(wanted, "name", str, "tool_choice")
        return checked_choice(ToolChoice("required", (name,), not single), tools)
    if not isinstance(kind, str) or kind not in _MODES:
        raise InvalidRequest("tool_choice.type must be auto, any, tool or none", param="tool_choice.type")
    return checked_choice(ToolChoice(_MODES[kind], None, not single), tools)


# --- tools that Anthropic defines and the client runs

_TEXT: JSON = {"type": "string"}
_NUMBER: JSON = {"type": "integer"}
_POINT: JSON = {"type": "array", "items": _NUMBER, "minItems": 2, "maxItems": 2}
_FILES = {"path": _TEXT, "file_text": _TEXT, "old_str": _TEXT, "new_str": _TEXT, "insert_line": _NUMBER}
_ACTIONS = (
    "key", "type", "mouse_move", "left_click", "left_click_drag", "right_click", "middle_click", "double_click",
    "screenshot", "cursor_position",
)  # fmt: skip
_LATER_ACTIONS = ("left_mouse_down", "left_mouse_up", "scroll", "hold_key", "wait", "triple_click")


def read_published(kind: str, tool: Mapping[str, Any], where: str) -> Tool | None:
    """The tool for the model; None for a type that the client does not run. Raises `InvalidRequest`."""
    family, _, date = kind.rpartition("_")
    if family not in ("bash", "text_editor", "memory", "computer") or not date.isdigit():
        return None
    needed = ["command"]
    properties: dict[str, JSON]
    if family == "bash":
        text = (
            "Run commands in a bash session that the caller keeps open: the working directory and variables stay. Send "
            "a command, or restart: true to begin a new session."
        )
        properties, needed = {"command": _TEXT, "restart": {"type": "boolean"}}, []
    elif family == "memory":
        text = (
            "Files below /memories that outlast this conversation. Look there before a task, and note what is worth "
            "keeping. view shows a file or lists a directory; create writes file_text; str_replace replaces old_str "
            "with new_str; insert puts insert_text after line insert_line; delete removes path; rename moves old_path "
            "to new_path."
        )
        commands = ["view", "create", "str_replace", "insert", "delete", "rename"]
        properties = {
            "command": {"enum": commands}, **_FILES, "insert_text": _TEXT, "view_range": _POINT, "old_path": _TEXT,
            "new_path": _TEXT,
        }  # fmt: skip
    elif family == "text_editor":
        limit = optional(tool, "max_characters", int, where)
        inserted = "insert_text" if date >= "20250728" else "new_str"
        text = (
            "View, create and edit text files. view shows a file (view_range: its first and last line, -1 for the end) "
            "or lists a directory; create writes file_text; str_replace replaces old_str, which must stand there once, "
            f"with new_str; insert puts {inserted} after line insert_line."
        )
        text += f" A view has at most {limit} characters." if limit else ""
        commands = ["view", "create", "str_replace", "insert", *(["undo_edit"] if date < "20250429" else [])]
        properties = {"command": {"enum": commands}, **_FILES, inserted: _TEXT, "view_range": _POINT}
        needed = ["command", "path"]
    else:
        wide, high = (required(tool, f"display_{name}_px", int, where) for name in ("width", "height"))
        text = (
            f"Use a screen of {wide} x {high} pixels with a mouse and a keyboard; coordinates are [x, y] from the top "
            "left. Take a screenshot to see it. text is what to type, or the keys (as in xdotool) of key and hold_key, "
            "or those held in a click or scroll."
        )
        actions = list(_ACTIONS)
        properties = {"action": {"enum": actions}, "coordinate": _POINT, "text": _TEXT}
        if date >= "20250124":
            actions += _LATER_ACTIONS
            properties |= {
                "start_coordinate": _POINT, "scroll_direction": {"enum": ["up", "down", "left", "right"]},
                "scroll_amount": _NUMBER, "duration": {"type": "number"},
            }  # fmt: skip
        if optional(tool, "enable_zoom", bool, where):
            actions.append("zoom")
            properties["region"] = {"type": "array", "items": _NUMBER, "minItems": 4, "maxItems": 4}
        needed = ["action"]
    return Tool(
        required(tool, "name", str, where),
        text,
        {"type": "object", "properties": properties, "required": needed},
        strict=bool(optional(tool, "strict", bool, where)),
    )
