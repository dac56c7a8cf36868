"""The client's tools in Google's generateContent. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...domain.client_tools import checked
from ...domain.models import JSON, Tool, ToolChoice
from ...errors import InvalidRequest
from ..common import optional, required, wrong_type
from ..google import checked_mode, either, json_schema


def read_tools(body: Mapping[str, Any]) -> tuple[Tool, ...]:
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


def read_choice(body: Mapping[str, Any], tools: tuple[Tool, ...]) -> ToolChoice:
    config = either(body, "toolConfig", dict, "an object") or {}
    calling = either(config, "functionCallingConfig", dict, "an object", where="toolConfig.") or {}
    mode = str(either(calling, "mode", str, "a string", where="functionCallingConfig.") or "AUTO").upper()
    allowed = either(calling, "allowedFunctionNames", list, "a list", where="functionCallingConfig.")
    where = "toolConfig.functionCallingConfig"
    return checked_mode(mode.removeprefix("MODE_UNSPECIFIED") or "AUTO", allowed, tools, where)
