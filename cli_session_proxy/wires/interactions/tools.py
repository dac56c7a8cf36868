"""The tool choice of an interaction. The tools themselves are in OpenAI's form. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...domain.models import Tool, ToolChoice
from ..common import optional, wrong_type
from ..google import checked_mode


def read_choice(config: Mapping[str, Any], tools: tuple[Tool, ...]) -> ToolChoice:
    """`generation_config.tool_choice`: a mode, or `{"allowed_tools": {mode, tools}}`."""
    wanted = config.get("tool_choice")
    if wanted is None or isinstance(wanted, str):
        return checked_mode((wanted or "auto").upper(), None, tools, "generation_config.tool_choice")
    if not isinstance(wanted, dict):
        raise wrong_type("generation_config.tool_choice", "a string or an object")
    inner = optional(wanted, "allowed_tools", dict, "tool_choice") or {}
    names = optional(inner, "tools", list, "tool_choice.allowed_tools")
    return checked_mode(str(inner.get("mode") or "auto").upper(), names, tools, "generation_config.tool_choice")
