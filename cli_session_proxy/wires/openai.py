"""What OpenAI's wires share: errors, efforts, `tools`, `tool_choice` and `parallel_tool_calls`. Pure.

Chat Completions puts a function's fields under `function`, Responses beside `type`: both are read here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .. import redact
from ..domain.client_tools import checked, checked_choice
from ..domain.models import JSON, Block, Tool, ToolChoice
from ..errors import InvalidRequest, ProxyError
from .base import ErrorShape
from .blocks import BY_DATA, named_file
from .fields import hosted_tool, objects, optional, required, wrong_type
from .schemas import TEXT, TEXT_OR_NULL, error_schema

# OpenAI's efforts → the CLI's (`--effort`, --help of 2.1.329: low, medium, high, xhigh, max). `none`: no thinking.
EFFORTS: Mapping[str, str | None] = {
    "none": None, "minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "xhigh", "max": "max",
}  # fmt: skip

_ERROR_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error",
                405: "invalid_request_error", 409: "conflict_error", 413: "invalid_request_error",
                429: "rate_limit_error", 499: "request_cancelled"}  # fmt: skip
# A freeform tool's only argument.
FREEFORM: JSON = {
    "type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"], "additionalProperties": False,
}  # fmt: skip
_MODES: Mapping[str, Literal["auto", "none", "required"]] = {"auto": "auto", "none": "none", "required": "required"}


def read_file(fields: Mapping[str, Any], where: str) -> Block:
    """A file by its `file_data`. Raises `InvalidRequest`, also for a file by its id."""
    data = optional(fields, "file_data", str, where)
    if data is None:
        raise InvalidRequest(f"{where}: {BY_DATA}", param=f"{where}.file_data")
    return named_file(data, optional(fields, "filename", str, where), f"{where}.file_data")


def openai_error(error: ProxyError) -> JSON:
    """`{"error": {message, type, param, code}}`; `code` is our own."""
    kind = _ERROR_TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return {"error": {"message": redact.text(error.message), "type": kind, "param": error.param, "code": error.code}}


def refuse_logprobs(body: Mapping[str, Any]) -> None:
    optional(body, "logprobs", bool)
    for name in ("logprobs", "top_logprobs"):
        if body.get(name):
            raise InvalidRequest(f"{name}: the Claude CLI gives none; leave it out", param=name)


OPENAI = ErrorShape(
    "openai",
    lambda error, _: openai_error(error),
    error_schema({"message": TEXT, "type": TEXT, "param": TEXT_OR_NULL, "code": TEXT_OR_NULL}),
)


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """The tools of a body. `custom`: the names of those that take a text. `hosted`: tools that the vendor would run, as
    X-Ignored-Params names them; the model is not offered these."""

    tools: tuple[Tool, ...] = ()
    custom: tuple[str, ...] = ()
    hosted: tuple[str, ...] = ()


def read_tools(body: Mapping[str, Any]) -> OfferedTools:
    """The tools of a body. Raises `InvalidRequest`, which names the field."""
    own: list[Tool] = []
    custom: list[str] = []
    hosted: list[str] = []
    for here, tool in objects(optional(body, "tools", list) or [], "tools"):
        kind = optional(tool, "type", str, here)
        if kind in (None, "function"):
            own.append(read_tool(tool, here))
        elif kind == "custom":
            inner = required(tool, "custom", dict, here)
            own.append(custom_tool(inner, f"{here}.custom"))
            custom.append(own[-1].name)
        else:
            hosted.append(hosted_tool(kind, here))
    return OfferedTools(checked(own), tuple(custom), tuple(dict.fromkeys(hosted)))


def custom_tool(tool: Mapping[str, Any], where: str) -> Tool:
    """A tool that takes a text. Its grammar is added to its description: the model is asked to keep to it."""
    tool_format = optional(tool, "format", dict, where) or {}
    tool_format = optional(tool_format, "grammar", dict, f"{where}.format") or tool_format
    description = optional(tool, "description", str, where) or ""
    grammar = optional(tool_format, "definition", str, f"{where}.format")
    if grammar:
        syntax = optional(tool_format, "syntax", str, f"{where}.format") or "given"
        description += f"\n\n`input` must match this {syntax} grammar:\n\n{grammar}"
    name = required(tool, "name", str, where)
    return Tool(name, description.strip(), FREEFORM, strict=True)


def read_tool(tool: Mapping[str, Any], where: str) -> Tool:
    fields, here = _function(tool, where)
    schema = optional(fields, "parameters", dict, here, expected="a JSON Schema")
    return Tool(
        name=required(fields, "name", str, here),
        description=optional(fields, "description", str, here) or "",
        schema=schema or {"type": "object", "properties": {}},
        strict=bool(optional(fields, "strict", bool, here)),
    )


def _function(tool: Mapping[str, Any], where: str) -> tuple[Mapping[str, Any], str]:
    """The object with a function's fields, and its place in the body."""
    kind = tool.get("type") or "function"
    if kind not in ("function", "custom"):
        raise InvalidRequest(
            f"{where}.type must be function or custom: tools of the provider's own are not offered here",
            param=f"{where}.type",
        )
    if kind not in tool:
        return tool, where
    return required(tool, kind, dict, where), f"{where}.{kind}"


def read_choice(body: Mapping[str, Any], tools: tuple[Tool, ...]) -> ToolChoice:
    """Which tools may be called. Raises `InvalidRequest`."""
    choice = body.get("tool_choice")
    parallel = optional(body, "parallel_tool_calls", bool) is not False
    if choice in (None, ""):
        return ToolChoice(parallel=parallel)
    if isinstance(choice, str):
        mode = _MODES.get(choice)
        if mode is None:
            raise InvalidRequest("tool_choice must be auto, none, required or a tool", param="tool_choice")
        return checked_choice(ToolChoice(mode, None, parallel), tools)
    if not isinstance(choice, dict):
        raise wrong_type("tool_choice", "a string or an object")
    if choice.get("type") == "allowed_tools":
        inner = optional(choice, "allowed_tools", dict, "tool_choice") or choice
        allowed = required(inner, "tools", list, "tool_choice")
        functions = [_function(tool, here) for here, tool in objects(allowed, "tool_choice.tools")]
        names = tuple(required(fields, "name", str, here) for fields, here in functions)
        must_call = inner.get("mode") == "required"
        return checked_choice(ToolChoice("required" if must_call else "auto", names, parallel), tools)
    fields, here = _function(choice, "tool_choice")
    name = required(fields, "name", str, here)
    return checked_choice(ToolChoice("required", (name,), parallel), tools)
