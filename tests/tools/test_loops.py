"""The client's own tools through the real CLI: calls come out, results go back, and the model sees each once."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from cli_session_proxy.domain.models import BlockDelta, BlockStart, Message, Tool, ToolChoice, Turn
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.errors import InvalidRequest
from cli_session_proxy.settings import Profile
from turnfault.provider.script import Reply, ToolUse
from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings
from ..matrix import rest_in_full
from ..talking import ask, claude, request, running, text

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = Tool("get_weather", "The weather of a city", SCHEMA)
TIME = Tool("get_time", "The time in a city", SCHEMA)
TOOLS = (WEATHER, TIME)


def calls(turn: Turn) -> list[dict[str, Any]]:
    return [block for block in turn.output if block["type"] == "tool_use"]


def result(call: dict[str, Any], content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call["id"], "content": content, **more}


def results(*blocks: dict[str, Any]) -> Message:
    return Message("user", tuple(blocks))


def called(name: str, city: str = "Rome") -> tuple[str, dict[str, str]]:
    return f"mcp__client__{name}", {"city": city}


def tool_blocks(upstream: Upstream) -> list[tuple[str, str]]:
    """Every call and result of the last request that reached the model, in order."""
    found = []
    for message in upstream.requests[-1].messages:
        for block in message["content"] if isinstance(message["content"], list) else []:
            if block["type"] == "tool_use":
                found.append(("call", block["id"]))
            if block["type"] == "tool_result":
                found.append(("result", block["tool_use_id"]))
    return found


def told(upstream: Upstream) -> list[tuple[str, str]]:
    return upstream.requests[-1].texts()


async def both(engine: Engine, upstream: Upstream, **more: Any) -> Turn:
    upstream.when("where", ToolUse([called("get_weather"), called("get_time")], text="Let me look."))
    return await ask(engine, "where", tools=TOOLS, **more)


async def test_calls_come_out_together_and_their_results_go_back_in_any_order(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    async with running(make_settings(claude_bin=claude_2)) as engine:
        turn = await both(engine, upstream)
        weather, time = calls(turn)
        assert (turn.status, turn.stop_reason, text(turn)) == ("requires_action", "tool_use", "Let me look.")
        assert (weather["name"], weather["input"], time["name"]) == ("get_weather", {"city": "Rome"}, "get_time")
        assert weather["id"].startswith("toolu_")
        answered = await ask(engine, results(result(time, "noon"), result(weather, "sunny")), tools=TOOLS)
        assert (answered.status, answered.continuity, answered.parent_id) == ("completed", "warm", turn.id)
        assert text(answered) == "The tool said: noon"
        last = await ask(engine, "list", tools=TOOLS)
    assert last.continuity == "warm"
    both_ids = [weather["id"], time["id"]]
    assert tool_blocks(upstream) == [*(("call", one) for one in both_ids), *(("result", one) for one in both_ids)]
    assert upstream.requests[-1].user_texts() == ["where", "tool_result: sunny", "tool_result: noon", "list"]
    for before, after in zip(upstream.requests, upstream.requests[1:], strict=False):
        assert after.prefix_kept(before) == 1.0


async def test_a_call_is_given_out_whole(claude_2: Path, make_settings: MakeSettings, upstream: Upstream) -> None:
    upstream.when("where", ToolUse([called("get_weather", "A city with a rather long name, so that it is cut")]))
    async with running(make_settings(claude_bin=claude_2)) as engine:
        answer = await engine.submit(request("where", tools=TOOLS))
        events = [event async for event in answer.events()]
        answer.acknowledge()
    (start,) = [event for event in events if isinstance(event, BlockStart)]
    deltas = [event.delta["partial_json"] for event in events if isinstance(event, BlockDelta)]
    assert (start.block["name"], start.block["input"]) == ("get_weather", {})
    (arguments,) = deltas
    assert "rather long name" in json.loads(arguments)["city"]


# Killed and restarted while calls wait: `test_breakages.py` has both each time.
@pytest.mark.parametrize("how", rest_in_full("retired", "killed", "restarted"))
async def test_the_results_reach_the_model_once_when_the_process_is_gone(
    how: str, claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings(claude_bin=claude_2, tool_timeout=0.2 if how == "retired" else 3600.0)
    async with running(settings) as engine:
        await ask(engine, "hello", tools=TOOLS)
        turn = await both(engine, upstream)
        weather, time = calls(turn)
        process = claude(engine).pool.peek(str(turn.session_id))
        assert process is not None
        if how == "killed":
            os.killpg(process.pid, signal.SIGKILL)
        if how == "retired":
            async with asyncio.timeout(60):
                await process._child.process.wait()
        if how != "restarted":
            answered = await ask(engine, results(result(weather, "sunny"), result(time, "noon")), tools=TOOLS)
            await ask(engine, "list", tools=TOOLS)
    if how == "restarted":
        async with running(settings) as engine:
            answered = await ask(engine, results(result(weather, "sunny"), result(time, "noon")), tools=TOOLS)
            await ask(engine, "list", tools=TOOLS)
    assert answered.continuity == "rebuilt"
    assert text(answered) == "The tool said: noon"
    assert upstream.requests[-1].user_texts() == ["hello", "where", "tool_result: sunny", "tool_result: noon", "list"]
    both_ids = [weather["id"], time["id"]]
    assert tool_blocks(upstream) == [*(("call", one) for one in both_ids), *(("result", one) for one in both_ids)]
    for before, after in zip(upstream.requests, upstream.requests[1:], strict=False):
        assert after.prefix_kept(before) == 1.0


async def test_ten_calls_one_after_the_other(claude_2: Path, make_settings: MakeSettings, upstream: Upstream) -> None:
    upstream.when("go", ToolUse([called("get_weather", "0")]))
    async with running(make_settings(claude_bin=claude_2)) as engine:
        turn = await ask(engine, "go", tools=TOOLS)
        for number in range(1, 10):
            upstream.when(f"done {number - 1}", ToolUse([called("get_weather", str(number))]))
            turn = await ask(engine, results(result(calls(turn)[0], f"done {number - 1}")), tools=TOOLS)
            assert turn.status == "requires_action"
        turn = await ask(engine, results(result(calls(turn)[0], "done 9")), tools=TOOLS)
    assert turn.status == "completed"
    assert upstream.requests[-1].user_texts() == ["go", *(f"tool_result: done {number}" for number in range(10))]
    assert len(upstream.requests) == 11


async def test_a_new_message_instead_of_results_leaves_a_chain_that_works(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    async with running(make_settings(claude_bin=claude_2)) as engine:
        turn = await both(engine, upstream)
        other = await ask(engine, "never mind", tools=TOOLS)
        assert (other.status, other.parent_id) == ("completed", turn.id)
        await ask(engine, "list")
    unanswered = "tool_result: [The client did not answer this call.]"
    assert upstream.requests[-1].user_texts() == ["where", unanswered, unanswered, "never mind", "list"]
    assert "No response requested." not in str(upstream.requests[-1].messages)


async def test_results_that_do_not_fit_are_refused_and_the_calls_stay_open(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    async with running(make_settings(claude_bin=claude_2)) as engine:
        turn = await both(engine, upstream)
        weather, time = calls(turn)
        for said in (
            results(result(weather, "sunny")),
            results(result({"id": "toolu_unknown"}, "?")),
            results(result(weather, "sunny"), result(weather, "rainy"), result(time, "noon")),
        ):
            with pytest.raises(InvalidRequest):
                await ask(engine, said, tools=TOOLS)
        twice = results(result(weather, "sunny"), result(weather, "sunny"), result(time, "noon"))
        answered = await ask(engine, twice, tools=TOOLS)
    assert answered.continuity == "warm"
    assert upstream.requests[-1].user_texts() == ["where", "tool_result: sunny", "tool_result: noon"]


async def test_a_large_result_an_image_and_an_error_arrive_whole(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    png = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
    source = {"type": "base64", "media_type": "image/png", "data": png}
    large = "".join(f"{number:07d} " for number in range(1024 * 128))
    async with running(make_settings(claude_bin=claude_2)) as engine:
        weather, time = calls(await both(engine, upstream))
        said = [{"type": "text", "text": "look"}, {"type": "image", "source": source}]
        upstream.when("look", ToolUse([called("get_weather")]))
        upstream.when("0131071", ToolUse([called("get_weather")]))
        turn = await ask(engine, results(result(weather, large), result(time, said)), tools=TOOLS)
        await ask(engine, results(result(calls(turn)[0], "it broke", is_error=True)), tools=TOOLS)
    said_back = [m["content"] for m in upstream.requests[-1].messages if isinstance(m["content"], list)]
    blocks = [block for content in said_back for block in content if block["type"] == "tool_result"]
    assert blocks[0]["content"] == large
    assert blocks[1]["content"][1]["source"]["data"] == png
    assert blocks[2]["is_error"]
    assert "it broke" in str(blocks[2]["content"])


@pytest.mark.parametrize("side", rest_in_full(3000, 1))
async def test_an_image_in_a_result_brings_no_path_of_this_machine(
    side: int, claude_2: Path, make_settings: MakeSettings, upstream: Upstream, tmp_path: Path
) -> None:
    drawn = io.BytesIO()
    Image.new("RGB", (side, side)).save(drawn, "PNG")
    png = base64.b64encode(drawn.getvalue()).decode()
    source = {"type": "base64", "media_type": "image/png", "data": png}
    async with running(make_settings(claude_bin=claude_2)) as engine:
        weather, time = calls(await both(engine, upstream))
        seen = [{"type": "text", "text": "the sky"}, {"type": "image", "source": source}]
        await ask(
            engine, results(result(weather, seen), result(time, [{"type": "image", "source": source}])), tools=TOOLS
        )
        await ask(engine, "next", tools=TOOLS)
    told = json.dumps([m for m in upstream.requests[-1].messages if m["role"] != "system"])
    assert told.count('"type": "image"') == 2
    assert str(tmp_path) not in told
    assert "[Image" not in told


async def test_a_changed_tool_set_takes_effect_at_the_next_turn(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    def offered() -> dict[str, str]:
        return {tool["name"]: tool["description"] for tool in upstream.requests[-1].body.get("tools") or ()}

    async with running(make_settings(claude_bin=claude_2)) as engine:
        await ask(engine, "one")
        assert offered() == {}
        added = await ask(engine, "two", tools=(WEATHER,))
        assert offered() == {"mcp__client__get_weather": "The weather of a city"}
        removed = await ask(engine, "three", tools=(TIME,))
        assert list(offered()) == ["mcp__client__get_time"]
        changed = await ask(engine, "four", tools=(Tool("get_time", "d" * 5000, SCHEMA),))
        assert "d" * 5000 in str(upstream.requests[-1].body["tools"])
        none = await ask(engine, "five")
        assert offered() == {}
    assert [turn.continuity for turn in (added, removed, changed, none)] == ["warm", "resumed", "resumed", "warm"]
    assert upstream.requests[-1].user_texts() == ["one", "two", "three", "four", "five"]


@pytest.mark.full
async def test_names_are_mapped_and_none_reaches_a_tool_of_the_cli(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    names = ["Bash", "mcp__client__x", "größe des Hauses", "n" * 200, "a.b/c", "n" * 201]
    async with running(make_settings(claude_bin=claude_2)) as engine:
        await ask(engine, "hello", tools=tuple(Tool(name) for name in names))
        offered = [tool["name"] for tool in upstream.requests[-1].body["tools"]]
        assert len(set(offered)) == len(names)
        assert all(name.startswith("mcp__client__") and len(name) <= 64 for name in offered)
        upstream.when("all", ToolUse([(name, {}) for name in sorted(offered)]))
        turn = await ask(engine, "all", tools=tuple(Tool(name) for name in names))
    assert sorted(call["name"] for call in calls(turn)) == sorted(names)


async def test_a_profiles_tools_run_inside_and_the_clients_come_out(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    coder = Profile(tools=("Bash(echo *)",))
    settings = make_settings(claude_bin=claude_2, profiles={"coder": coder}, profile="coder")
    inside = ("Bash", {"command": "echo from-the-shell"})
    upstream.when("go", ToolUse([inside]))
    upstream.when("from-the-shell", ToolUse([called("get_weather"), inside, called("get_time")]))
    async with running(settings) as engine:
        turn = await ask(engine, "go", tools=TOOLS)
        weather, time = calls(turn)
        assert "from-the-shell" in str(turn.tools)
        answered = await ask(engine, results(result(weather, "sunny"), result(time, "noon")), tools=TOOLS)
    assert answered.status == "completed"
    made = tool_blocks(upstream)
    assert len([one for kind, one in made if kind == "call"]) == 4
    assert sorted(one for kind, one in made if kind == "call") == sorted(one for kind, one in made if kind == "result")


async def test_choices_and_strict_schemas_hold(claude_2: Path, make_settings: MakeSettings, upstream: Upstream) -> None:
    strict = (Tool("get_weather", "", SCHEMA, strict=True), TIME)
    two = ToolUse([called("get_weather"), called("get_time")])
    async with running(make_settings(claude_bin=claude_2)) as engine:
        upstream.when("none", two)
        turn = await ask(engine, "none", tools=TOOLS, tool_choice=ToolChoice("none"))
        assert (turn.status, calls(turn)) == ("completed", [])
        upstream.when("single", two)
        turn = await ask(engine, "single", tools=TOOLS, tool_choice=ToolChoice(parallel=False))
        assert [call["name"] for call in calls(turn)] == ["get_weather"]
        await ask(engine, results(result(calls(turn)[0], "sunny")), tools=TOOLS)
        upstream.when("Call: get_time.", two)
        turn = await ask(engine, "named", tools=TOOLS, tool_choice=ToolChoice("required", ("get_time",)))
        assert [call["name"] for call in calls(turn)] == ["get_time"]
        assert "Call: get_time." in upstream.requests[-1].user_texts()[-1]
        await ask(engine, results(result(calls(turn)[0], "noon")), tools=TOOLS)
        upstream.when("strict", ToolUse([("mcp__client__get_weather", {"city": 7})]))
        upstream.when("not valid", ToolUse([called("get_weather")]))
        turn = await ask(engine, "strict", tools=strict)
    assert [call["input"] for call in calls(turn)] == [{"city": "Rome"}]


async def test_a_history_with_calls_begun_elsewhere_goes_on_from_its_results(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    call = {"type": "tool_use", "id": "call_1", "name": "get_weather", "input": {"city": "Rome"}}
    async with running(make_settings(claude_bin=claude_2)) as engine:
        said = ("how is it?", Message("assistant", (call,)), results(result(call, "sunny")))
        turn = await ask(engine, *said, agent=None, tools=TOOLS)
    assert text(turn) == "The tool said: sunny"
    assert tool_blocks(upstream) == [("call", "call_1"), ("result", "call_1")]
    assert "mcp__client__get_weather" in str(upstream.requests[-1].messages)


async def test_an_old_cli_refuses_tools_clearly(claude_1: Path, make_settings: MakeSettings) -> None:
    async with running(make_settings(claude_bin=claude_1)) as engine:
        with pytest.raises(InvalidRequest, match="upgrade the CLI"):
            await ask(engine, "hello", tools=TOOLS)


@pytest.mark.parametrize(
    ("said", "claude"),
    [
        *rest_in_full(("one STOP two", "claude_2"), ("STOP", "claude_2"), ("one ST", "claude_2"), quick=2),
        # That we cut its answers: backends/claude/test_parameters.py, each time.
        *rest_in_full(("STOP", "claude_1"), ("one STOP two", "claude_1"), ("one ST", "claude_1"), quick=0),
    ],
    indirect=["claude"],
)
@pytest.mark.sample(1)
async def test_a_stop_sequence_cuts_the_answer_and_the_model_sees_it_cut(
    said: str, claude: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    upstream.when("count", Reply(said))
    wanted = said.split("STOP", maxsplit=1)[0]
    async with running(make_settings(claude_bin=claude)) as engine:
        turn = await ask(engine, "count", stop=("STOP",))
        await ask(engine, "list")
    assert text(turn).strip() == wanted.strip()
    assert (turn.stop_reason == "stop_sequence") == ("STOP" in said)
    seen = [one for role, one in upstream.requests[-1].texts() if role == "assistant"]
    empty = [] if "bundled" in str(claude) else ["(no content)"]
    assert [one.strip() for one in seen] == ([wanted.strip()] if wanted else empty)
    assert [one.strip() for one in upstream.requests[-1].user_texts()] == ["count", "list"]
    if "bundled" in str(claude) and wanted:
        assert upstream.requests[-1].prefix_kept(upstream.requests[-2]) == 1.0
