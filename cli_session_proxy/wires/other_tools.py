"""The client's tools on the wires of Anthropic and Google. OpenAI's are in `openai_tools`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..domain.client_tools import checked, checked_choice
from ..domain.models import JSON, Tool, ToolChoice
from ..errors import InvalidRequest
from .common import optional, required, wrong_type
from .generate.content import either, json_schema
from .openai_tools import read_tools

# Google's FunctionCallingConfig modes, and what the Interactions call them.
_MODES: Mapping[str, Any] = {"AUTO": "auto", "VALIDATED": "auto", "ANY": "required", "NONE": "none"}


# --- Anthropic's Messages ---------------------------------------------------------------------------------


def messages_tools(body: Mapping[str, Any]) -> tuple[Tool, ...]:
    """Raises `InvalidRequest`, also for tools that Anthropic itself would run."""
    tools = optional(body, "tools", list, "a list") or []
    return checked([_messages_tool(tool, f"tools[{at}]") for at, tool in enumerate(tools)])


def _messages_tool(tool: object, where: str) -> Tool:
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


def messages_choice(body: Mapping[str, Any], tools: tuple[Tool, ...]) -> ToolChoice:
    wanted = optional(body, "tool_choice", dict, "an object") or {"type": "auto"}
    kind = wanted.get("type")
    single = bool(optional(wanted, "disable_parallel_tool_use", bool, "true or false", where="tool_choice."))
    if kind == "tool":
        name = required(wanted, "name", str, "a string", where="tool_choice.")
        return checked_choice(ToolChoice("required", (name,), not single), tools)
    if kind not in ("auto", "any", "none"):
        raise InvalidRequest("tool_choice.type must be auto, any, tool or none", param="tool_choice.type")
    return checked_choice(ToolChoice(_MODES[kind.upper()], None, not single), tools)


# --- Google's generateContent -----------------------------------------------------------------------------


def google_tools(body: Mapping[str, Any]) -> tuple[Tool, ...]:
    """Raises `InvalidRequest`, also for tools that Google itself would run."""
    tools = either(body, "tools", list, "a list") or []
    found: list[Tool] = []
    for at, tool in enumerate(tools):
        where = f"tools[{at}]"
        if not isinstance(tool, dict):
            raise wrong_type(where, "an object")
        declared = either(tool, "functionDeclarations", list, "a list", where=f"{where}.")
        if declared is None:
            raise InvalidRequest(f"{where}: only functionDeclarations are offered here", param=where)
        found += [_declared(one, f"{where}.functionDeclarations[{n}]") for n, one in enumerate(declared)]
    return checked(found)


def _declared(one: object, where: str) -> Tool:
    if not isinstance(one, dict):
        raise wrong_type(where, "an object")
    schema: JSON | None = either(one, "parametersJsonSchema", dict, "a JSON Schema", where=f"{where}.")
    if schema is None:
        older = either(one, "parameters", dict, "a schema", where=f"{where}.")
        schema = json_schema(older) if older else {"type": "object", "properties": {}}
    return Tool(
        name=required(one, "name", str, "a string", where=f"{where}."),
        description=optional(one, "description", str, "a string", where=f"{where}.") or "",
        schema=schema,
    )


def google_choice(body: Mapping[str, Any], tools: tuple[Tool, ...]) -> ToolChoice:
    config = either(body, "toolConfig", dict, "an object") or {}
    calling = either(config, "functionCallingConfig", dict, "an object", where="toolConfig.") or {}
    mode = str(either(calling, "mode", str, "a string", where="functionCallingConfig.") or "AUTO").upper()
    allowed = either(calling, "allowedFunctionNames", list, "a list", where="functionCallingConfig.")
    where = "toolConfig.functionCallingConfig"
    return _choice(mode.removeprefix("MODE_UNSPECIFIED") or "AUTO", allowed, tools, where)


def _choice(mode: str, allowed: list[Any] | None, tools: tuple[Tool, ...], where: str) -> ToolChoice:
    if mode not in _MODES:
        raise InvalidRequest(f"{where}.mode must be one of {', '.join(_MODES)}", param=f"{where}.mode")
    names = tuple(str(name) for name in allowed) if allowed else None
    return checked_choice(ToolChoice(_MODES[mode], names), tools, where)


# --- Google's Interactions --------------------------------------------------------------------------------


def interactions_choice(config: Mapping[str, Any], tools: tuple[Tool, ...]) -> ToolChoice:
    """`generation_config.tool_choice`: a mode, or `{"allowed_tools": {mode, tools}}`."""
    wanted = config.get("tool_choice")
    if wanted is None or isinstance(wanted, str):
        return _choice((wanted or "auto").upper(), None, tools, "generation_config.tool_choice")
    if not isinstance(wanted, dict):
        raise wrong_type("generation_config.tool_choice", "a string or an object")
    inner = optional(wanted, "allowed_tools", dict, "an object", where="tool_choice.") or {}
    names = optional(inner, "tools", list, "a list", where="tool_choice.allowed_tools.")
    return _choice(str(inner.get("mode") or "auto").upper(), names, tools, "generation_config.tool_choice")


interactions_tools = read_tools
