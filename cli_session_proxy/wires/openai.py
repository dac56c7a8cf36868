"""What OpenAI's wires share: errors, efforts, `tools`, `tool_choice` and `parallel_tool_calls`. Pure.

Chat Completions puts a function's fields under `function`, Responses beside `type`: both are read here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from .. import redact
from ..domain.client_tools import checked, checked_choice
from ..domain.models import JSON, Tool, ToolChoice
from ..errors import InvalidRequest, ProxyError
from .base import ErrorShape
from .common import optional, required, wrong_type
from .schemas import TEXT, TEXT_OR_NULL, error_schema

# OpenAI's efforts → the CLI's (`--effort`, --help of 2.1.329: low, medium, high, xhigh, max). `none`: no thinking.
EFFORTS: Mapping[str, str | None] = {
    "none": None, "minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "xhigh", "max": "max",
}  # fmt: skip

_ERROR_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error",
                405: "invalid_request_error", 409: "conflict_error", 413: "invalid_request_error",
                429: "rate_limit_error", 499: "request_cancelled"}  # fmt: skip
_MODES: Mapping[str, Literal["auto", "none", "required"]] = {"auto": "auto", "none": "none", "required": "required"}


def openai_error(error: ProxyError) -> JSON:
    """`{"error": {message, type, param, code}}`; `code` is our own."""
    kind = _ERROR_TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return {"error": {"message": redact.text(error.message), "type": kind, "param": error.param, "code": error.code}}


OPENAI = ErrorShape(
    "openai",
    lambda error, _: openai_error(error),
    error_schema({"message": TEXT, "type": TEXT, "param": TEXT_OR_NULL, "code": TEXT_OR_NULL}),
)


def read_tools(body: Mapping[str, Any]) -> tuple[Tool, ...]:
    """The tools of a body. Raises `InvalidRequest`, which names the field."""
    tools = optional(body, "tools", list, "a list")
    if not tools:
        return ()
    return checked([read_tool(tool, f"tools[{at}]") for at, tool in enumerate(tools)])


def read_tool(tool: object, where: str) -> Tool:
    fields, here = _function(tool, where)
    schema = optional(fields, "parameters", dict, "a JSON Schema", where=here)
    return Tool(
        name=required(fields, "name", str, "a string", where=here),
        description=optional(fields, "description", str, "a string", where=here) or "",
        schema=schema or {"type": "object", "properties": {}},
        strict=bool(optional(fields, "strict", bool, "true or false", where=here)),
    )


def _function(tool: object, where: str) -> tuple[Mapping[str, Any], str]:
    if not isinstance(tool, dict):
        raise wrong_type(where, "an object")
    if tool.get("type", "function") != "function":
        raise InvalidRequest(
            f"{where}.type must be function: tools of the provider's own are not offered here", param=f"{where}.type"
        )
    if "function" not in tool:
        return tool, f"{where}."
    return required(tool, "function", dict, "an object", where=f"{where}."), f"{where}.function."


def read_choice(body: Mapping[str, Any], tools: tuple[Tool, ...]) -> ToolChoice:
    """Which tools may be called. Raises `InvalidRequest`."""
    wanted = body.get("tool_choice")
    several = optional(body, "parallel_tool_calls", bool, "true or false")
    parallel = several is not False
    if wanted in (None, ""):
        return ToolChoice(parallel=parallel)
    if isinstance(wanted, str):
        mode = _MODES.get(wanted)
        if mode is None:
            raise InvalidRequest("tool_choice must be auto, none, required or a tool", param="tool_choice")
        return checked_choice(ToolChoice(mode, None, parallel), tools)
    if not isinstance(wanted, dict):
        raise wrong_type("tool_choice", "a string or an object")
    if wanted.get("type") == "allowed_tools":
        inner = optional(wanted, "allowed_tools", dict, "an object", where="tool_choice.") or wanted
        listed = required(inner, "tools", list, "a list", where="tool_choice.")
        found = [_function(tool, f"tool_choice.tools[{at}]") for at, tool in enumerate(listed)]
        names = tuple(required(fields, "name", str, "a string", where=here) for fields, here in found)
        must = inner.get("mode") == "required"
        return checked_choice(ToolChoice("required" if must else "auto", names, parallel), tools)
    fields, here = _function(wanted, "tool_choice")
    name = required(fields, "name", str, "a string", where=here)
    return checked_choice(ToolChoice("required", (name,), parallel), tools)
