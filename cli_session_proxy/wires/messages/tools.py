"""The client's tools in the Messages API. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...domain.client_tools import checked, checked_choice
from ...domain.models import Tool, ToolChoice
from ...errors import InvalidRequest
from ..common import optional, required, wrong_type

_MODES: Mapping[str, Any] = {"auto": "auto", "any": "required", "none": "none"}


def read_tools(body: Mapping[str, Any]) -> tuple[Tool, ...]:
    """Raises `InvalidRequest`, also for tools that Anthropic itself would run."""
    tools = optional(body, "tools", list, "a list") or []
    return checked([_tool(tool, f"tools[{at}]") for at, tool in enumerate(tools)])


def _tool(tool: object, where: str) -> Tool:
    if not isinstance(tool, dict):
        raise wrong_type(where, "an object")
    if tool.get("type") not in (None, "custom"):
        raise InvalidRequest(
            f"{where}: {tool['type']!r} is no tool of the client's; give the agent the CLI's tools by a profile",
            param=f"{where}.type",
        )
    return Tool(
        name=required(tool, "name", str, "a string", where=f"{where}."),
        description=optional(tool, "description", str, "a string", where=f"{where}.") or "",
        schema=required(tool, "input_schema", dict, "a JSON Schema", where=f"{where}."),
        strict=bool(optional(tool, "strict", bool, "true or false", where=f"{where}.")),
    )


def read_choice(body: Mapping[str, Any], tools: tuple[Tool, ...]) -> ToolChoice:
    wanted = optional(body, "tool_choice", dict, "an object") or {"type": "auto"}
    kind = wanted.get("type")
    single = bool(optional(wanted, "disable_parallel_tool_use", bool, "true or false", where="tool_choice."))
    if kind == "tool":
        name = required(wanted, "name", str, "a string", where="tool_choice.")
        return checked_choice(ToolChoice("required", (name,), not single), tools)
    if not isinstance(kind, str) or kind not in _MODES:
        raise InvalidRequest("tool_choice.type must be auto, any, tool or none", param="tool_choice.type")
    return checked_choice(ToolChoice(_MODES[kind], None, not single), tools)
