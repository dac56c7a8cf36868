"""The tools of OpenAI's Responses: functions, some of them in namespaces or with free text for arguments. Pure.

What the model is offered are functions in one list. How a call of one goes back is kept with the turn (`Shapes`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...domain.client_tools import checked
from ...domain.models import JSON, Block, Tool
from ..common import optional, required, wrong_type
from ..openai import read_tool

# A freeform tool's only argument.
FREEFORM: JSON = {
    "type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"], "additionalProperties": False,
}  # fmt: skip
_KIND = re.compile(r"[a-z][a-z0-9_]{0,63}")


@dataclass(frozen=True, slots=True)
class Shapes:
    """By the name that the model calls: `["custom"]`, or `["namespace", its namespace, its name there]`."""

    of: Mapping[str, list[str]] = field(default_factory=dict)

    def item(self, block: Block, key: str, n: int) -> JSON:
        """A call as its client wants it."""
        name, kind = str(block["name"]), self.of.get(str(block["name"]), ["function"])
        if kind[0] == "custom":
            return {
                "id": f"ctc_{key}_{n}", "type": "custom_tool_call", "status": "completed", "call_id": block["id"],
                "name": name, "input": str(block["input"].get("input", "")),
            }  # fmt: skip
        item = {
            "id": f"fc_{key}_{n}", "type": "function_call", "status": "completed", "call_id": block["id"],
            "name": name, "arguments": json.dumps(block["input"], ensure_ascii=False),
        }  # fmt: skip
        return item | {"namespace": kind[1], "name": kind[2]} if kind[0] == "namespace" else item


@dataclass(frozen=True, slots=True)
class Given:
    """`tools` as the model is offered them, `shown` as the Response lists them, and what is not offered."""

    tools: tuple[Tool, ...]
    shapes: Shapes
    shown: list[JSON]
    ignored: tuple[str, ...]


def flat(namespace: str, name: str) -> str:
    """One name for a tool in a namespace."""
    return f"{namespace}{'' if namespace.endswith('__') else '__'}{name}"


def read(body: Mapping[str, Any], more: list[object]) -> Given:
    """`more` are tools that the conversation itself brought. Raises `InvalidRequest`, which names the field."""
    tools: list[Tool] = []
    shapes: dict[str, list[str]] = {}
    shown: list[JSON] = []
    ignored: list[str] = []
    for at, tool in enumerate([*(optional(body, "tools", list, "a list") or []), *more]):
        here = f"tools[{at}]"
        if not isinstance(tool, dict):
            raise wrong_type(here, "an object")
        kind = optional(tool, "type", str, "a string", where=f"{here}.") or "function"
        if kind == "function":
            tools.append(read_tool(tool, here))
            shown.append(_shown(tools[-1]))
        elif kind == "custom":
            tools.append(_custom(tool, here))
            shapes[tools[-1].name] = ["custom"]
            shown.append(dict(tool))
        elif kind == "namespace":
            space = required(tool, "name", str, "a string", where=f"{here}.")
            for n, inner in enumerate(required(tool, "tools", list, "a list", where=f"{here}.")):
                one = read_tool(inner, f"{here}.tools[{n}]")
                name = flat(space, one.name)
                tools.append(Tool(name, one.description, one.schema, one.strict))
                shapes[name] = ["namespace", space, one.name]
            shown.append(dict(tool))
        else:  # one that OpenAI would run itself, or that a client runs as it likes
            ignored.append(f"tools.{kind}" if _KIND.fullmatch(kind) else here)
            shown.append(dict(tool))
    return Given(checked(tools), Shapes(shapes), shown, tuple(dict.fromkeys(ignored)))


def _custom(tool: Mapping[str, Any], where: str) -> Tool:
    """A tool that takes a text. Its grammar is told in words: the model is asked to keep to it."""
    wanted = optional(tool, "format", dict, "an object", where=f"{where}.") or {}
    description = optional(tool, "description", str, "a string", where=f"{where}.") or ""
    grammar = optional(wanted, "definition", str, "a string", where=f"{where}.format.")
    if grammar:
        syntax = optional(wanted, "syntax", str, "a string", where=f"{where}.format.") or "given"
        description += f"\n\n`input` must match this {syntax} grammar:\n\n{grammar}"
    name = required(tool, "name", str, "a string", where=f"{where}.")
    return Tool(name, description.strip(), FREEFORM, strict=True)


def _shown(tool: Tool) -> JSON:
    return {
        "type": "function", "name": tool.name, "description": tool.description, "parameters": tool.schema,
        "strict": tool.strict,
    }  # fmt: skip


def choice(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """The body with a `tool_choice` of a function where it names another kind: of a freeform tool, or a hosted one,
    which is not offered."""
    wanted = body.get("tool_choice")
    if not isinstance(wanted, dict) or wanted.get("type") in (None, "function", "allowed_tools"):
        return body
    named = {"type": "function", "name": wanted.get("name")} if wanted["type"] == "custom" else "auto"
    return {**body, "tool_choice": named}
