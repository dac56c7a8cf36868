"""What a request wants of the model's parameters, as it reaches the model through a warm CLI."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from cli_session_proxy.backends.claude.process.parameters import Takes, fields_of
from cli_session_proxy.backends.claude.process.process import ClaudeProcess
from cli_session_proxy.backends.claude.sessions import composing
from cli_session_proxy.backends.claude.transcript import Parsed, Scribe, parse_records
from cli_session_proxy.domain.client_tools import Offers
from cli_session_proxy.domain.models import Message, Tool, ToolChoice, Turn, TurnOptions
from cli_session_proxy.domain.options import Parameters
from cli_session_proxy.settings import Profile
from turnfault.provider.script import Fail, HeldReply, Reply, ToolUse
from turnfault.provider.upstream import Upstream

from ...clis import old_cli_in_full
from ...conftest import MakeSettings
from ...talking import ask, claude, running, text

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = (Tool("get_weather", "The weather of a city", SCHEMA), Tool("get_time", "The time in a city", SCHEMA))
CALL = ToolUse([("mcp__client__get_weather", {"city": "Rome"})])
# Of its generation, the newest that takes everything.
SONNET_4 = "claude-sonnet-4-6"
FIELDS = ("max_tokens", "temperature", "top_p", "top_k", "stop_sequences", "tool_choice")
TOO_LONG = Fail(400, message="prompt is too long: 210000 tokens > 200000 maximum")


def sent(upstream: Upstream, at: int = -1) -> dict[str, Any]:
    body = upstream.requests[at].body
    # 1 is what the CLI sends by itself, where a model that takes it does not think.
    fields = {name: body[name] for name in FIELDS if name in body and (name, body[name]) != ("temperature", 1)}
    return {**fields, "thinks": (body.get("thinking") or {"type": "disabled"})["type"] in ("adaptive", "enabled")}


def one_token(word: str = "One") -> Reply:
    return Reply(word, stop_reason="max_tokens", usage={"output_tokens": 1})


async def test_parameters_hold_for_their_turn_on_one_warm_process_and_break_no_prefix(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    async with running(make_settings(claude_bin=claude_2)) as engine:
        more: dict[str, Any] = {"model": SONNET_4}
        first = await ask(engine, "one", **more)
        cool = Parameters(max_tokens=5000, temperature=0.25, top_k=5, thinking=False)
        turns = [await ask(engine, "two", parameters=cool, stop=("END",), **more), await ask(engine, "three", **more)]
        process = claude(engine).pool.peek(first.session_id or "")
        assert process is not None
    assert [turn.continuity for turn in turns] == ["warm", "warm"]
    assert [turn.session_id for turn in turns] == [first.session_id] * 2
    plain = {"max_tokens": 32000, "thinks": True}
    wanted = {"max_tokens": 5000, "temperature": 0.25, "top_k": 5, "stop_sequences": ["END"], "thinks": False}
    assert [sent(upstream, at) for at in range(3)] == [plain, wanted, plain]
    assert "context_management" not in upstream.requests[1].body  # it is refused without thinking
    assert [upstream.requests[at].prefix_kept(upstream.requests[at - 1]) for at in (1, 2)] == [1.0, 1.0]
    assert turns[0].evidence.unmet == ()


async def test_the_same_parameters_again_cost_no_control_request(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    ask_of = ClaudeProcess._reply

    async def noted(process: ClaudeProcess, subtype: str, **fields: object) -> Any:
        asked.append(subtype)
        return await ask_of(process, subtype, **fields)

    monkeypatch.setattr(ClaudeProcess, "_reply", noted)
    counts = []
    async with running(make_settings(claude_bin=claude_2)) as engine:
        await ask(engine, "begin")
        for wanted in (Parameters(max_tokens=9000), Parameters(max_tokens=9000), Parameters(), Parameters()):
            asked.clear()
            await ask(engine, f"max {wanted}", parameters=wanted)
            counts.append(list(asked))
    assert counts == [["apply_flag_settings"], [], ["apply_flag_settings"], []]


@old_cli_in_full  # the next but two is what the old one does
async def test_the_answer_ends_at_max_tokens_with_its_text_and_count_and_the_model_sees_nothing_else_of_it(
    claude: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    upstream.when("short", one_token())
    async with running(make_settings(claude_bin=claude)) as engine:
        await ask(engine, "begin")
        turn = await ask(engine, "short", parameters=Parameters(max_tokens=1))
        after = await ask(engine, "list")
    assert (text(turn), turn.stop_reason, turn.status) == ("One", "max_tokens", "completed")
    assert turn.usage.output_tokens == 1
    assert text(after).splitlines() == ["1. begin", "2. short", "3. list"]
    seen = upstream.requests[-1]
    assert [said for role, said in seen.texts() if role == "assistant"][1:] == ["One"]
    assert "limit hit" not in json.dumps(seen.messages)
    assert "interrupted" not in json.dumps(seen.messages)
    if "bundled" in str(claude):
        asked = next(one for one in upstream.requests if one.prompt == "short")
        assert asked.body["max_tokens"] == 1
        assert seen.prefix_kept(asked) == 1.0


async def test_an_answer_that_is_cut_in_thinking_or_in_a_call_ends_there_too(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    upstream.when("think", Reply([], thinking="Let me", stop_reason="max_tokens", usage={"output_tokens": 3}))
    upstream.when("call", Reply([*CALL.content], stop_reason="max_tokens"))  # type: ignore[misc]
    upstream.when("both", Reply([{"type": "text", "text": "I"}, *CALL.content], stop_reason="max_tokens"))  # type: ignore[misc]
    async with running(make_settings(claude_bin=claude_2)) as engine:
        turns = [await ask(engine, said, tools=TOOLS) for said in ("think", "call", "both")]
        after = await ask(engine, "list", tools=TOOLS)
    assert [(text(turn), turn.stop_reason, turn.status) for turn in turns] == [
        ("", "max_tokens", "completed"), ("", "max_tokens", "completed"), ("I", "max_tokens", "completed"),
    ]  # fmt: skip
    assert [said.strip() for said in upstream.requests[-1].user_texts()] == ["think", "call", "both", "list"]
    assert after.continuity == "resumed"
    told_to_the_model = json.dumps(upstream.requests[-1].messages)
    assert not any(words in told_to_the_model for words in ("tool_use", "limit hit", "interrupted", "API Error"))


async def test_an_empty_answer_whose_records_were_not_written_yet_leaves_no_words_of_the_clis_own(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a prompt without an answer a CLI that resumes puts "No response requested."."""

    def not_there_yet(path: Path) -> Parsed:
        raise FileNotFoundError(path)

    upstream.when("call", Reply([*CALL.content], stop_reason="max_tokens"))  # type: ignore[misc]
    upstream.when("both", Reply([{"type": "text", "text": "I"}, *CALL.content], stop_reason="max_tokens"))  # type: ignore[misc]
    async with running(make_settings(claude_bin=claude_2)) as engine:
        with monkeypatch.context() as patched:
            patched.setattr("cli_session_proxy.backends.claude.sessions.capture.parse_file", not_there_yet)
            cut = await ask(engine, "call", tools=TOOLS)
        await ask(engine, "both", tools=TOOLS)
        await ask(engine, "list", tools=TOOLS)
    assert (text(cut), cut.stop_reason) == ("", "max_tokens")
    assert [said.strip() for said in upstream.requests[-1].user_texts()] == ["call", "both", "list"]
    assert [said for role, said in upstream.requests[-1].texts() if role == "assistant"] == ["I"]


def test_a_prompt_behind_words_of_the_clis_own_is_kept_where_its_answer_is_cut() -> None:
    scribe = Scribe("00000000-0000-4000-8000-000000000000", Path("/agents/a"), "2.1.330", 0.0, None)
    own = scribe.record(Message("assistant", ({"type": "text", "text": "No response requested."},)), "sonnet")
    asked = scribe.record(Message("user", ({"type": "text", "text": "both"},)), "sonnet")
    said = scribe.record(Message("assistant", ({"type": "text", "text": "I am"},)), "sonnet")
    added = parse_records([own, asked, said]).entries
    *whole, last = composing.cut_answer(added, ({"type": "text", "text": "I"},), scribe, "sonnet", unseen=True)
    assert [record.uuid for record in whole] == [own.uuid, asked.uuid]
    assert json.loads(last.line)["message"]["content"] == [{"type": "text", "text": "I"}]


def test_what_the_old_cli_writes_in_the_place_of_an_answer_that_was_stopped_is_no_part_of_it() -> None:
    """It leaves the answer out where it is stopped early (1.0.120, one of 17 times on a loaded machine)."""
    scribe = Scribe("00000000-0000-4000-8000-000000000000", Path("/agents/a"), "1.0.120", 0.0, None)
    texts = "[Request interrupted by user] was shown", "[Request interrupted by user]"  # a person may say so, too
    asked, stopped = [scribe.record(Message("user", ({"type": "text", "text": said},)), "sonnet") for said in texts]
    added = parse_records([asked, stopped]).entries
    *whole, last = composing.cut_answer(added, ({"type": "text", "text": "word"},), scribe, "sonnet", unseen=True)
    assert [record.uuid for record in whole] == [asked.uuid]
    said = json.loads(last.line)
    assert (said["parentUuid"], said["message"]["content"]) == (asked.uuid, [{"type": "text", "text": "word"}])


async def test_an_old_cli_is_cut_by_us_and_says_what_it_cannot_do(
    claude_1: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    upstream.when("long", Reply("word " * 200))
    async with running(make_settings(claude_bin=claude_1)) as engine:
        turn = await ask(engine, "long", parameters=Parameters(max_tokens=5, temperature=0.5, thinking=False))
        after = await ask(engine, "list")
    assert (text(turn), turn.stop_reason) == ("word " * 4, "max_tokens")
    assert turn.evidence.unmet == ("temperature", "thinking")
    assert text(after).splitlines() == ["1. long", "2. list"]
    assert [said for role, said in upstream.requests[-1].texts() if role == "assistant"] == [text(turn)]


async def test_a_stop_sequence_that_the_provider_heeds_leaves_the_process_warm(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    upstream.when("count", Reply("one two ", stop_reason="stop_sequence", stop_sequence="END"))
    async with running(make_settings(claude_bin=claude_2)) as engine:
        turn = await ask(engine, "count", stop=("END", "  \n"))
        after = await ask(engine, "next")
    assert (text(turn), turn.stop_reason, turn.stop_sequence) == ("one two ", "stop_sequence", "END")
    assert upstream.requests[0].body["stop_sequences"] == ["END"]
    assert after.continuity == "warm"
    assert "stop_sequences" not in upstream.requests[-1].body


async def test_a_tool_choice_reaches_the_model_once(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    async with running(make_settings(claude_bin=claude_2)) as engine:
        for choice, sent_as in (
            (ToolChoice("required"), {"type": "any"}),
            (ToolChoice("required", ("get_time",)), {"type": "tool", "name": "mcp__client__get_time"}),
            (ToolChoice("none"), {"type": "none"}),
            (ToolChoice("auto", None, parallel=False), {"type": "auto", "disable_parallel_tool_use": True}),
        ):
            await ask(engine, "look", tools=TOOLS, tool_choice=choice, model=SONNET_4)
            forced = choice.mode == "required"
            assert sent(upstream) == {"max_tokens": 32000, "tool_choice": sent_as, "thinks": not forced}
            await ask(engine, "next", tools=TOOLS, model=SONNET_4)
            assert sent(upstream) == {"max_tokens": 32000, "thinks": True}


async def test_a_forced_choice_is_gone_when_the_results_go_back_to_the_process_that_waits(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    upstream.next(CALL)
    async with running(make_settings(claude_bin=claude_2)) as engine:
        called = await ask(engine, "look", tools=TOOLS, tool_choice=ToolChoice("required"), model=SONNET_4)
        done = await ask(engine, answered(called), tools=TOOLS, model=SONNET_4)
        await ask(engine, "next", tools=TOOLS, model=SONNET_4)
    assert (called.status, done.continuity) == ("requires_action", "warm")
    assert text(done).startswith("The tool said: 21")
    # What was begun without thinking goes on without: the provider takes no other.
    assert [sent(upstream, at) for at in range(3)] == [
        {"max_tokens": 32000, "tool_choice": {"type": "any"}, "thinks": False},
        {"max_tokens": 32000, "thinks": False},
        {"max_tokens": 32000, "thinks": True},
    ]
    assert upstream.requests[1].prefix_kept(upstream.requests[0]) == 1.0


async def test_a_process_that_died_with_parameters_leaves_none_behind(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    gate = HeldReply(after=1, reply=Reply("too late"))
    upstream.when("hold", gate)
    async with running(make_settings(claude_bin=claude_2)) as engine:
        first = await ask(engine, "begin")
        wanted = Parameters(max_tokens=4000, thinking=False)
        waiting = asyncio.create_task(ask(engine, "hold", parameters=wanted))
        await asyncio.wait_for(gate.reached.wait(), 60)
        process = claude(engine).pool.peek(first.session_id or "")
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        gate.open()
        await asyncio.gather(waiting, return_exceptions=True)
        await ask(engine, "next")
    assert sent(upstream) == {"max_tokens": 128000, "thinks": True}


async def test_a_full_context_is_compacted_without_the_parameters_of_the_turn(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    async with running(make_settings(claude_bin=claude_2)) as engine:
        for at in range(3):
            await ask(engine, f"Remember: fact{at} is {at}")
        upstream.next(TOO_LONG, TOO_LONG)
        before = len(upstream.requests)
        turn = await ask(engine, "recall", parameters=Parameters(max_tokens=4000, temperature=0.5))
    assert turn.evidence.compacted
    assert turn.evidence.unmet == ("temperature",)
    wanted, *plain = upstream.requests[before:]
    assert wanted.body["max_tokens"] == 4000
    assert len(plain) == 3  # refused again, the summary, the answer
    assert all(one.body["max_tokens"] >= 20_000 for one in plain)


async def test_a_profile_with_tools_of_the_cli_tells_it_nothing(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    upstream.when("long", Reply("word " * 200))
    async with running(make_settings(claude_bin=claude_2, profiles={"hands": Profile(tools=("Read",))})) as engine:
        turn = await ask(engine, "long", parameters=Parameters(max_tokens=5, top_k=3), profile="hands")
    assert (text(turn), turn.stop_reason, turn.evidence.unmet) == ("word " * 4, "max_tokens", ("top_k",))
    assert sent(upstream, 0) == {"max_tokens": 128000, "thinks": True}


async def test_what_the_operator_set_stays_under_what_the_turn_says(
    claude_2: Path, make_settings: MakeSettings, claude_env: dict[str, str], upstream: Upstream
) -> None:
    own = {"CLAUDE_CODE_MAX_OUTPUT_TOKENS": "3000", "CLAUDE_CODE_EXTRA_BODY": '{"service_tier": "auto"}'}
    async with running(make_settings(claude_bin=claude_2, claude_env=claude_env | own)) as engine:
        await ask(engine, "one", parameters=Parameters(max_tokens=5000), stop=("END",))
        await ask(engine, "two")
    assert [(one.body["max_tokens"], one.body["service_tier"]) for one in upstream.requests] == [(3000, "auto")] * 2
    assert [one.body.get("stop_sequences") for one in upstream.requests] == [["END"], None]


# --- the rules, without a CLI -------------------------------------------------------------------------------


def rules(model: str, *, choice: ToolChoice | None = None, effort: str | None = None, **wanted: Any) -> Any:
    """(fields of the request, what is not honoured)"""
    asked = TurnOptions(tool_choice=choice or ToolChoice(), parameters=Parameters(**wanted))
    _, body, unmet = fields_of(asked, Offers.of(TOOLS), Takes.of(model), effort=effort)
    return body, unmet


@pytest.mark.parametrize(
    ("model", "samples", "forced", "off"),
    [
        ("claude-3-5-haiku-20241022", True, True, {}),
        ("claude-sonnet-4-20250514", True, True, {}),
        ("us.anthropic.claude-opus-4-5-20251101-v1:0", True, True, {}),
        ("claude-opus-4-7", False, True, {}),
        ("claude-opus-5", False, True, {"type": "disabled"}),
        ("claude-opus-5-5", False, False, None),
        ("claude-sonnet-5-5[1m]", False, False, {"type": "between_tools"}),
        ("claude-haiku-5-5", False, False, {"type": "disabled"}),
        ("claude-fable-5", False, False, None),
        ("claude-sonnet-6", False, False, None),
        ("somebody-elses", False, False, None),
    ],
)
def test_what_a_model_takes_is_known_by_its_name(
    model: str, samples: bool, forced: bool, off: dict[str, str] | None
) -> None:
    takes = Takes.of(model)
    assert (takes.samples, takes.forced, takes.off) == (samples, forced, off)


def test_thinking_wins_over_sampling() -> None:
    assert rules(SONNET_4, temperature=0.5) == ({}, ["temperature"])
    assert rules(SONNET_4, temperature=0.5, thinking=False) == ({"temperature": 0.5}, [])
    assert rules("claude-opus-4-7", temperature=0.5, thinking=False) == ({}, ["temperature"])
    assert rules(SONNET_4, temperature=1.0, top_p=1.0) == ({}, [])  # what happens anyway
    assert rules(SONNET_4, temperature=2.0, thinking=False) == ({"temperature": 1.0}, [])
    assert rules(SONNET_4, top_p=0.5, thinking=False) == ({}, ["top_p"])
    assert rules("claude-sonnet-4", top_p=0.5, thinking=False) == ({"top_p": 0.5}, [])


def test_a_forced_choice_turns_thinking_off_or_is_not_sent() -> None:
    forced = ToolChoice("required")
    assert rules(SONNET_4, choice=forced) == ({"tool_choice": {"type": "any"}}, [])
    assert rules(SONNET_4, choice=forced, thinking=True) == ({"tool_choice": {"type": "any"}}, ["thinking"])
    assert rules("claude-opus-5-5", choice=forced) == ({}, ["tool_choice"])
    off = {"thinking": {"type": "disabled"}}
    assert rules("claude-opus-5", choice=forced) == (off | {"tool_choice": {"type": "any"}}, [])
    assert rules("claude-opus-5", choice=forced, effort="max") == ({}, ["tool_choice"])
    low = {"output_config": {"effort": "low"}}  # the least that it thinks
    assert rules("claude-opus-5-5", thinking=False) == (low, ["thinking"])
    assert rules("claude-opus-5-5", thinking=False, effort="high") == ({}, ["thinking"])
    assert rules("somebody-elses", thinking=False) == ({}, ["thinking"])


def test_too_few_tokens_for_thinking_turn_it_off_unless_it_is_asked_for() -> None:
    small, asked, enough = (Parameters(max_tokens=1024), Parameters(max_tokens=1024, thinking=True), Parameters(1025))
    takes = Takes.of(SONNET_4)
    environments = [fields_of(TurnOptions(parameters=one), Offers(), takes)[0] for one in (small, asked, enough)]
    assert ["CLAUDE_CODE_DISABLE_THINKING" in one for one in environments] == [True, False, False]


def answered(turn: Turn) -> Any:
    [call] = [block for block in turn.output if block["type"] == "tool_use"]
    return Message("user", ({"type": "tool_result", "tool_use_id": call["id"], "content": "21"},))
