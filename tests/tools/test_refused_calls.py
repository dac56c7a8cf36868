"""A provider that refuses calls of earlier turns ends no conversation: they are left out, and words stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli_session_proxy.settings import Profile
from turnfault.provider import upstream as provider
from turnfault.provider.rules import JSON, Rules, refusal
from turnfault.provider.script import Fail, ToolUse
from turnfault.provider.seen import parts
from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings
from ..talking import ask, heard, running
from .test_loops import TOOLS, both, calls, result, results

# CLI 2.1.x has words of its own for each of these.
WHYS = (
    "`tool_use` ids were found without `tool_result` blocks immediately after: toolu_1",
    "unexpected `tool_use_id` found in `tool_result` blocks: toolu_1",
    "`tool_use` ids must be unique",
)


@pytest.fixture
def refuses(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """From now on the provider refuses requests with calls of these tools, and says why."""
    whys: dict[str, str] = {}

    def check(rules: Rules, raw: bytes, body: JSON) -> Fail | None:
        for at, message in enumerate(body["messages"]):
            for block in parts(message["content"]):
                if (why := whys.get(block.get("name", ""))) is not None:
                    return Fail(400, message=f"messages.{at}: {why}")
        return refusal(rules, raw, body)

    monkeypatch.setattr(provider, "refusal", check)
    return whys


async def test_what_tools_said_stays_where_the_provider_refuses_their_calls(
    claude: Path, make_settings: MakeSettings, upstream: Upstream, refuses: dict[str, str]
) -> None:
    profile = Profile(tools=("Bash(echo *)",))
    settings = make_settings(claude_bin=claude, profiles={"coder": profile}, profile="coder")
    upstream.when("look", ToolUse([("Bash", {"command": f"echo {said}"}) for said in ("hail", "snow")], text="I look."))
    async with running(settings) as engine:
        await ask(engine, "hello")
        await ask(engine, "look")
        refuses["Bash"] = WHYS[0]
        turn = await ask(engine, "word-3")
        assert ("calls_left_out", 4) in [(note.code, note.count) for note in turn.evidence.notes]
        refused = len(upstream.refused)
        before = upstream.requests[-1]
        await ask(engine, "word-4")
        assert upstream.requests[-1].prefix_kept(before) == 1.0
    async with running(settings) as engine:
        await ask(engine, "word-5")
    said = [one.rstrip() for one in heard(upstream)]
    one, another = said[3], said[5]  # CLI 1.0.120 runs them in any order
    assert {one, another} == {"hail", "snow"}
    assert said == [
        "hello", "look", "[The result of that call:]", one, "[The result of that call:]", another,
        "word-3", "word-4", "word-5",
    ]  # fmt: skip
    assert "I look." in upstream.requests[-1].raw.decode()
    assert len(upstream.refused) == refused


@pytest.mark.parametrize(("restarted", "why"), [(False, WHYS[1]), (True, WHYS[2])])
async def test_results_that_the_client_brings_are_words_where_their_calls_are_refused(
    restarted: bool, why: str, claude_2: Path, make_settings: MakeSettings, upstream: Upstream, refuses: dict[str, str]
) -> None:
    settings = make_settings(claude_bin=claude_2)
    async with running(settings) as engine:
        weather, time = calls(await both(engine, upstream))
        refuses["mcp__client__get_weather"] = why
        if not restarted:
            await ask(engine, results(result(weather, "sunny"), result(time, "noon")), tools=TOOLS)
    async with running(settings) as engine:
        if restarted:
            await ask(engine, results(result(weather, "sunny"), result(time, "noon")), tools=TOOLS)
        refused = len(upstream.refused)
        await ask(engine, "go on", tools=TOOLS)
    assert [said.rstrip() for said in heard(upstream)] == [
        "where", "[The result of that call:]", "sunny", "[The result of that call:]", "noon", "go on",
    ]  # fmt: skip
    assert "Let me look." in upstream.requests[-1].raw.decode()
    assert len(upstream.refused) == refused
