"""The client's tools in the Messages API. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ...domain.client_tools import checked, checked_choice
from ...domain.models import Tool, ToolChoice
from ...errors import InvalidRequest
from ..common import objects, optional, required
from . import published

_MODES: Mapping[str, Any] = {"auto": "auto", "any": "required", "none": "none"}


# The type of a tool that Anthropic runs, such as `web_search_20250305`.
_HOSTED = re.compile(r"[a-z][a-z0-9_]{0,63}")


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
        elif (known := published.read(kind, tool, here)) is not None:
            own.append(known)
        else:
            hosted.append(f"tools.{kind}" if _HOSTED.fullmatch(kind) else here)
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
