"""Tools that Anthropic defines and the client runs: its models know them by type and date, ours get these schemas.

Schemas as in Anthropic's documentation ("Bash tool", "Text editor tool", "Memory tool", "Computer use tool") and in the
types of anthropic 2.12. A later date gets the newest schema. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...domain.models import JSON, Tool
from ..common import optional, required

_TEXT: JSON = {"type": "string"}
_NUMBER: JSON = {"type": "integer"}
_PLACE: JSON = {"type": "array", "items": _NUMBER, "minItems": 2, "maxItems": 2}
_FILES = {"path": _TEXT, "file_text": _TEXT, "old_str": _TEXT, "new_str": _TEXT, "insert_line": _NUMBER}
_ACTIONS = (
    "key", "type", "mouse_move", "left_click", "left_click_drag", "right_click", "middle_click", "double_click",
    "screenshot", "cursor_position",
)  # fmt: skip
_LATER_ACTIONS = ("left_mouse_down", "left_mouse_up", "scroll", "hold_key", "wait", "triple_click")


def read(kind: str, tool: Mapping[str, Any], where: str) -> Tool | None:
    """The tool for the model; None for a type that the client does not run. Raises `InvalidRequest`."""
    family, _, date = kind.rpartition("_")
    if family not in _FAMILIES or not date.isdigit():
        return None
    description, schema = _FAMILIES[family](tool, date, where)
    name = required(tool, "name", str, where)
    return Tool(name, description, schema, strict=bool(optional(tool, "strict", bool, where)))


def _object(names: Mapping[str, JSON], *wanted: str) -> JSON:
    return {"type": "object", "properties": dict(names), "required": list(wanted)}


def _bash(tool: Mapping[str, Any], date: str, where: str) -> tuple[str, JSON]:  # noqa: ARG001 - as its neighbours
    return (
        "Run commands in a bash session that the caller keeps open: the working directory and variables stay. Send a "
        "command, or restart: true to begin a new session.",
        _object({"command": _TEXT, "restart": {"type": "boolean"}}),
    )


def _text_editor(tool: Mapping[str, Any], date: str, where: str) -> tuple[str, JSON]:
    commands = ["view", "create", "str_replace", "insert"]
    if date < "20250429":
        commands.append("undo_edit")
    limit = optional(tool, "max_characters", int, where)
    names = {"command": {"enum": commands}, **_FILES, "insert_text": _TEXT, "view_range": _PLACE}
    if date < "20250728":
        del names["insert_text"]  # called new_str before
    return (
        "View, create and edit text files. view shows a file (view_range: its first and last line, -1 for the end) "
        "or lists "
        "a directory; create writes file_text; str_replace replaces old_str, which must stand there once, with "
        "new_str; "
        f"insert puts {'insert_text' if 'insert_text' in names else 'new_str'} after line insert_line."
        + (f" A view has at most {limit} characters." if limit else ""),
        _object(names, "command", "path"),
    )


def _memory(tool: Mapping[str, Any], date: str, where: str) -> tuple[str, JSON]:  # noqa: ARG001 - as its neighbours
    commands = ["view", "create", "str_replace", "insert", "delete", "rename"]
    moved = {"old_path": _TEXT, "new_path": _TEXT}
    return (
        "Files below /memories that outlast this conversation. Look there before a task, and note what is worth "
        "keeping. "
        "view shows a file or lists a directory; create writes file_text; str_replace replaces old_str with new_str; "
        "insert "
        "puts insert_text after line insert_line; delete removes path; rename moves old_path to new_path.",
        _object(
            {"command": {"enum": commands}, **_FILES, "insert_text": _TEXT, "view_range": _PLACE, **moved}, "command"
        ),
    )


def _computer(tool: Mapping[str, Any], date: str, where: str) -> tuple[str, JSON]:
    wide, high = (required(tool, f"display_{name}_px", int, where) for name in ("width", "height"))
    zooms = bool(optional(tool, "enable_zoom", bool, where))
    actions = [*_ACTIONS, *(() if date < "20250124" else _LATER_ACTIONS), *(("zoom",) if zooms else ())]
    names: dict[str, JSON] = {"action": {"enum": actions}, "coordinate": _PLACE, "text": _TEXT}
    if date >= "20250124":
        names |= {
            "start_coordinate": _PLACE, "scroll_direction": {"enum": ["up", "down", "left", "right"]},
            "scroll_amount": _NUMBER, "duration": {"type": "number"},
        }  # fmt: skip
    if zooms:
        names["region"] = {"type": "array", "items": _NUMBER, "minItems": 4, "maxItems": 4}
    return (
        f"Use a screen of {wide} x {high} pixels with a mouse and a keyboard; coordinates are [x, y] from the top "
        "left. Take a "
        "screenshot to see it. text is what to type, or the keys (as in xdotool) of key and hold_key, or those held "
        "in a click "
        "or scroll.",
        _object(names, "action"),
    )


_FAMILIES: Mapping[str, Callable[[Mapping[str, Any], str, str], tuple[str, JSON]]] = {
    "bash": _bash, "text_editor": _text_editor, "memory": _memory, "computer": _computer,
}  # fmt: skip
