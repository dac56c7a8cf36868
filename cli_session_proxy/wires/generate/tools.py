"""The client's tools in Google's generateContent. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...domain.client_tools import checked
from ...domain.models import JSON, Tool, ToolChoice
from ...errors import InvalidRequest
from ..fields import FIELD, hosted_tool, objects, optional, required
from ..google import checked_mode, either, json_schema, lowered


def read_tools(body: Mapping[str, Any]) -> tuple[tuple[Tool, ...], tuple[str, ...]]:
    """(the client's own tools, names of those that Google would run: not offered). Raises `InvalidRequest`."""
    tools = either(body, "tools", list) or []
    found: list[Tool] = []
    hosted: list[str] = []
    for where, tool in objects(tools, "tools"):
        declared = either(tool, "functionDeclarations", list, where)
        for here, one in objects(declared or [], f"{where}.functionDeclarations"):
            schema: JSON | None = either(one, "parametersJsonSchema", dict, here, expected="a JSON Schema")
            if schema is not None:
                schema = lowered(schema)
            else:
                older = either(one, "parameters", dict, here, expected="a schema")
                schema = json_schema(older) if older else {"type": "object", "properties": {}}
            description = optional(one, "description", str, here) or ""
            found.append(Tool(required(one, "name", str, here), description, schema))
        others = [name for name in tool if name not in ("functionDeclarations", "function_declarations")]
        if declared is None and not others:
            raise InvalidRequest(f"{where}: send functionDeclarations", param=where)
        hosted += [hosted_tool(name, where, FIELD) for name in others]
    return checked(found), tuple(dict.fromkeys(hosted))


def read_choice(body: Mapping[str, Any], tools: tuple[Tool, ...]) -> ToolChoice:
    config = either(body, "toolConfig", dict) or {}
    calling = either(config, "functionCallingConfig", dict, "toolConfig") or {}
    mode = str(either(calling, "mode", str, "functionCallingConfig") or "AUTO").upper()
    allowed = either(calling, "allowedFunctionNames", list, "functionCallingConfig")
    where = "toolConfig.functionCallingConfig"
    return checked_mode(mode.removeprefix("MODE_UNSPECIFIED") or "AUTO", allowed, tools, where)
