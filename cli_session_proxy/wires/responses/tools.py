"""The tools of OpenAI's Responses: functions, also in namespaces or with free text as arguments, and tools of OpenAI
that the client runs (`published`). Pure.

The model gets one list of functions. How each call is sent back to the client is stored with the turn (`Shapes`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...domain.client_tools import checked
from ...domain.models import JSON, Block, Tool
from ...errors import InvalidRequest
from ..fields import hosted_tool, objects, optional, required
from ..openai import custom_tool, read_tool
from . import published


@dataclass(frozen=True, slots=True)
class Shapes:
    """By the model's name of a tool: [`function`, `custom_tool` or a name of `published`, its namespace or "", its name
    there]."""

    of: Mapping[str, list[str]] = field(default_factory=dict)

    def item(self, block: Block, key: str, n: int) -> JSON:
        """A call as an item for the client."""
        name = str(block["name"])
        kind, namespace, name = self.of.get(name, ["function", "", name])
        if kind in published.PREFIXES:
            return published.item_of(kind, block, f"{published.PREFIXES[kind]}_{key}_{n}")
        item: JSON = {"type": f"{kind}_call", "status": "completed", "call_id": block["id"], "name": name}
        if namespace:
            item["namespace"] = namespace
        if kind == "custom_tool":
            return {"id": f"ctc_{key}_{n}", **item, "input": str(block["input"].get("input", ""))}
        return {"id": f"fc_{key}_{n}", **item, "arguments": json.dumps(block["input"], ensure_ascii=False)}


@dataclass(frozen=True, slots=True)
class ParsedTools:
    """Parsed tools: `tools` for the model, `shown` for the Response, and names of tools that are not offered. The last
    `brought` of `shown` came with an item, and so apply to later turns, too."""

    tools: tuple[Tool, ...]
    shapes: Shapes
    shown: list[JSON]
    ignored: tuple[str, ...]
    brought: int = 0

    @property
    def kept(self) -> JSON:
        """The part that is stored with the turn."""
        out: JSON = {"tools": self.shown}
        if self.shapes.of:
            out["shapes"] = dict(self.shapes.of)
        return {**out, "brought": self.brought} if self.brought else out


def flat(namespace: str, name: str) -> str:
    """A single name for a tool in a namespace."""
    return f"{namespace}{'' if namespace.endswith('__') else '__'}{name}"


def read(body: Mapping[str, Any], more: list[object]) -> ParsedTools:
    """Parse the tools. `more`: from items of the conversation. Raises `InvalidRequest`, which names the field."""
    collector = _ToolCollector()
    for here, tool in objects([*(optional(body, "tools", list) or []), *more], "tools"):
        collector.add(tool, here)
    ignored = tuple(dict.fromkeys(collector.ignored))
    return ParsedTools(checked(collector.tools), Shapes(collector.shapes), collector.shown, ignored, len(more))


def with_brought(
    tools: tuple[Tool, ...], call: JSON, previous_call: Mapping[str, Any]
) -> tuple[tuple[Tool, ...], JSON]:
    """Add tools of earlier items to a request with only the new message, and to its `call`, unless their names are
    already used. `previous_call`: the call of the turn that it continues."""
    count = previous_call.get("brought", 0)
    if not count:
        return tools, call
    more = read({}, previous_call["tools"][-count:])
    names = {tool.name for tool in tools}
    shapes = {**more.shapes.of, **call.get("shapes", {})}
    shown = [*call["tools"], *(one for one in more.shown if one not in call["tools"])]
    held = len(shown) - len(call["tools"]) + call.get("brought", 0)
    offered = checked([*tools, *(tool for tool in more.tools if tool.name not in names)])
    return offered, {**call, "tools": shown, "brought": held, **({"shapes": shapes} if shapes else {})}


class _ToolCollector:
    """Collects the tools of one body."""

    def __init__(self) -> None:
        self.tools: list[Tool] = []
        self.shapes: dict[str, list[str]] = {}
        self.shown: list[JSON] = []
        self.ignored: list[str] = []

    def add(self, tool: JSON, here: str) -> None:
        if tool.get("type") != "namespace":
            parsed = self._offered(tool, here, "")
            shown: JSON = dict(tool)
            if parsed is not None and tool.get("type") in (None, "function"):
                shown = {"type": "function", "name": parsed.name, "description": parsed.description}
                shown |= {"parameters": parsed.schema, "strict": parsed.strict}
            self.shown.append(shown)
            return
        namespace = required(tool, "name", str, here)
        for place, inner in objects(required(tool, "tools", list, here), f"{here}.tools"):
            self._offered(inner, place, namespace)
        self.shown.append(dict(tool))

    def _offered(self, tool: Mapping[str, Any], here: str, namespace: str) -> Tool | None:
        """The tool for the model; None for one that OpenAI would run, or without a known schema."""
        kind = optional(tool, "type", str, here) or "function"
        if kind in published.NAMES and not namespace and (known := published.tool_of(kind, tool, here)) is not None:
            self.shapes[known.name] = [known.name, "", known.name]
            self.tools.append(known)
            return known
        if kind not in ("function", "custom"):
            self.ignored.append(hosted_tool(kind, here))
            return None
        parsed = read_tool(tool, here) if kind == "function" else custom_tool(tool, here)
        name = flat(namespace, parsed.name) if namespace else parsed.name
        if namespace or kind == "custom":
            self.shapes[name] = ["function" if kind == "function" else "custom_tool", namespace, parsed.name]
        parsed = replace(parsed, name=name)
        self.tools.append(parsed)
        return parsed


def choice(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """The body with its `tool_choice` converted to functions. Raises `InvalidRequest` if it forces a tool that is not
    offered."""
    wanted = body.get("tool_choice")
    if not isinstance(wanted, dict):
        return body
    if wanted.get("type") == "allowed_tools" and isinstance(wanted.get("tools"), list):
        listed = [_as_function(one) if isinstance(one, dict) else one for one in wanted["tools"]]
        return {**body, "tool_choice": {**wanted, "tools": [one for one in listed if one is not None]}}
    if wanted.get("type") in ("allowed_tools", None):
        return body  # `read_choice` takes it as it is, or refuses it
    if (named := _as_function(wanted)) is None:
        raise InvalidRequest(
            f"tool_choice: {wanted['type']!r} is a tool that OpenAI runs itself, and is not offered here",
            param="tool_choice",
        )
    return {**body, "tool_choice": named}


def _as_function(wanted: JSON) -> JSON | None:
    """A tool of a choice as a function; None if it is not offered."""
    kind = optional(wanted, "type", str, "tool_choice") or "function"
    if kind in ("function", "custom"):
        return {**wanted, "type": "function"}
    return {"type": "function", "name": published.NAMES[kind]} if kind in published.NAMES else None
