"""The backend of `without_cli` asks as the real CLI does, as far as the tests on it look."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cli_session_proxy.domain.models import Message, Tool
from cli_session_proxy.engine.engine import Engine
from turnfault.provider.script import Reply, ToolUse
from turnfault.provider.upstream import Upstream

from .conftest import MakeSettings
from .talking import ask, running, text
from .without_cli import running_without_cli

WEATHER = Tool("get_weather", "The weather of a city", {"type": "object", "properties": {"city": {"type": "string"}}})
CALLS = [("mcp__client__get_weather", {"city": city}) for city in ("Rome", "Oslo")]


async def talk(engine: Engine, upstream: Upstream) -> list[Any]:
    """What became of each turn, and what the model was asked for it."""
    upstream.clear()
    upstream.when("where", ToolUse(CALLS, text="Let me look."))
    upstream.when("think", Reply("I have.", thinking="Let me think."))
    more: dict[str, Any] = {"system": "Be brief.", "tools": (WEATHER,)}
    turns = [await ask(engine, "where", **more)]
    calls = [block["id"] for block in turns[0].output if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call, "content": f"rain {n}"} for n, call in enumerate(calls)]
    turns.append(await ask(engine, Message("user", tuple(results[::-1])), **more))
    for said in ("think", "list"):
        turns.append(await ask(engine, said, **more))
    turns.append(await ask(engine, "begun elsewhere", "I see.", "recall", agent=None, **more))
    turns.append(await ask(engine, "begun elsewhere", "I see.", "recall", text(turns[-1]), "list", agent=None, **more))
    by_chance = ("id", "signature")
    became = [
        (
            turn.status,
            turn.stop_reason,
            [{name: value for name, value in block.items() if name not in by_chance} for block in turn.output],
        )
        for turn in turns
    ]
    asked = [
        (seen.texts(), [tool["name"] for tool in seen.body["tools"]], "Be brief." in str(seen.body["system"]))
        for seen in upstream.requests
    ]
    return [*became, *asked]


async def test_the_same_conversation_is_the_same_turns_and_the_same_requests(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream, tmp_path: Path
) -> None:
    async with running(make_settings(claude_bin=claude_2)) as engine:
        by_the_cli = await talk(engine, upstream)
    async with running_without_cli(make_settings(var=tmp_path / "other"), upstream) as engine:
        without = await talk(engine, upstream)
    for one, other in zip(without, by_the_cli, strict=True):
        assert one == other
