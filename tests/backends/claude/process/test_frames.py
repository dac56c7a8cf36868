"""Bytes to lines, prompts to frames, recorded frames to events."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli_session_proxy.backends.base import Abandoned, Activity, Called, Compacted, Retried, ToolActivity
from cli_session_proxy.backends.claude.process import permissions
from cli_session_proxy.backends.claude.process.capability import Capability
from cli_session_proxy.backends.claude.process.events import AssistantMessage, CliEvent, Declined, Result, SessionFrame
from cli_session_proxy.backends.claude.process.failures import error_for
from cli_session_proxy.backends.claude.process.frames import (
    FrameTooDeep,
    FrameTooDense,
    LineSplitter,
    LineTooLong,
    control_request,
    parse,
    unsafe_prompt,
    user_frame,
)
from cli_session_proxy.backends.claude.process.turn_reader import LONGEST_NAME, TurnReader, told_in
from cli_session_proxy.domain.client_tools import Offers, ToolPolicy
from cli_session_proxy.domain.models import BlockDelta, BlockStart, BlockStop, Tool, ToolChoice, Usage

from ....engine.test_live import Fate
from .helpers import recorded, result, unchecked

FRAME = "00000000-0000-4000-8000-00000000000a"  # the frame uuid of every recording
OLD = Capability(Path("claude"), "1.0.120", (1, 0, 120), frozenset(), frozenset())
NEW = Capability(Path("claude"), "2.1.329", (2, 1, 329), frozenset(), frozenset())


def read(name: str, uuid: str | None = FRAME) -> list[CliEvent]:
    reader = TurnReader(uuid)
    return [event for frame in recorded(name) for event in reader.feed(frame)]


def blocks(events: list[CliEvent]) -> list[CliEvent]:
    return [event for event in events if isinstance(event, BlockStart | BlockDelta | BlockStop)]


def delivered(capability: Capability, content: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks that this CLI is given."""
    return list(json.loads(user_frame(FRAME, content, capability))["message"]["content"])


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


# --- lines


@given(st.lists(st.binary(max_size=20).filter(lambda line: b"\n" not in line), max_size=8), st.data())
def test_lines_are_the_same_however_they_are_cut(lines: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(line + b"\n" for line in lines) + b"rest"
    splitter, found, at = LineSplitter(), [], 0
    while at < len(whole):
        size = data.draw(st.integers(1, 12))
        found += splitter.feed(whole[at : at + size])
        at += size
    assert found == lines
    assert splitter.feed(b"\n") == [b"rest"]


def test_a_line_over_the_cap_is_an_error_whether_it_ends_or_not() -> None:
    assert LineSplitter(cap=3).feed(b"123\n456\n") == [b"123", b"456"]
    for chunk in (b"1234", b"1234\n"):
        with pytest.raises(LineTooLong):
            LineSplitter(cap=3).feed(chunk)


@pytest.mark.parametrize(
    "line", [b"", b"warning", b"[1]", b"\xff\x00", b"[" * 100_000, b'{"cut": ', b'{"a":NaN}', b'{"a":1e999}']
)
def test_what_is_no_frame_is_none(line: bytes) -> None:
    assert parse(line) is None


@pytest.mark.parametrize("levels", [396, 1100, 100_000])
def test_a_frame_that_nests_too_deep_is_an_error_as_the_cli_may_wait_for_its_answer(levels: int) -> None:
    with pytest.raises(FrameTooDeep, match="deeper than 392 levels"):
        parse(b'{"a":' * levels + b"1" + b"}" * levels)


@pytest.mark.parametrize("unit", ["{}", "[0]", '"a"', '"{}, {}"'])
def test_a_frame_of_more_values_than_any_is_an_error(unit: str) -> None:
    """60 MB of them held up everybody for half a minute, and took 1.7 GB."""
    with pytest.raises(FrameTooDense):
        parse(f'{{"x": [{",".join([unit] * 600_000)}]}}'.encode())
    words = "{}, " * 600_000
    assert parse(json.dumps({"x": words}).encode()) == {"x": words}


# --- prompts


@given(st.text(alphabet=st.characters(codec=None), max_size=40))
def test_any_text_survives_as_one_line(value: str) -> None:
    line = user_frame(FRAME, [text(value)], NEW)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    frame = json.loads(line)
    # JSON itself joins two adjacent lone surrogates to the character they stand for
    assert frame["message"]["content"][0]["text"].encode("utf-16", "surrogatepass") == value.encode(
        "utf-16", "surrogatepass"
    )
    assert frame["client_composed"] is True
    assert frame["uuid"] == FRAME


def test_a_control_request_names_itself() -> None:
    assert json.loads(control_request("r1", "set_model", model="opus")) == {
        "type": "control_request",
        "request_id": "r1",
        "request": {"subtype": "set_model", "model": "opus"},
    }


@given(st.text(alphabet="/@ab \n!#é", max_size=12))
def test_what_an_old_cli_gets_is_the_same_words_and_nothing_to_interpret(value: str) -> None:
    made = delivered(OLD, [text(value)])
    assert "".join(block["text"] for block in made) == value
    if unsafe_prompt(OLD, value) is None:
        last = made[-1]["text"]
        assert not last.startswith("/")
        assert not any(word.startswith("@") and len(word) > 1 for word in last.split())
        assert all(block["text"] for block in made)
    assert delivered(NEW, [text(value)]) == [text(value)]


@pytest.mark.parametrize(
    ("prompt", "safe"),
    [("/clear", True), ("see @/etc/passwd", True), ("foo /", True), ("/", False), ("//@/", False), ("", False),
     (" ", False)],
)  # fmt: skip
def test_which_prompts_an_old_cli_cannot_take(prompt: str, safe: bool) -> None:
    assert (unsafe_prompt(OLD, prompt) is None) is safe


def test_a_new_cli_takes_anything_that_says_something() -> None:
    assert unsafe_prompt(NEW, "/") is None
    assert unsafe_prompt(NEW, "\t\n") is not None
    image = {"type": "image", "source": {}}
    assert unsafe_prompt(NEW, [image]) is None
    assert delivered(OLD, [text("/clear"), image]) == [text("/clear"), image]


def test_a_cli_that_takes_one_text_a_prompt_says_so() -> None:
    cli = Capability(Path("claude"), "1.0.60", (1, 0, 60), frozenset(), frozenset())
    picture: dict[str, Any] = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    assert unsafe_prompt(cli, [text("what is that?")]) is None
    for blocks in ([text("what is that?"), picture], [picture], [text("one"), text("two")]):
        refused = unsafe_prompt(cli, blocks)
        assert refused is not None
        assert "Claude CLI 1.0.60 at claude cannot take an image" in refused
        assert "1.0.63" in refused
    assert unsafe_prompt(cli, "read @/etc/passwd please") is not None


def test_a_frame_that_is_told_twice_counts_once() -> None:
    reader = TurnReader(FRAME)
    said = {"type": "assistant", "uuid": "a", "message": {"id": "m", "model": "x", "content": [text("once")]}}
    events = [*reader.feed(said), *reader.feed(said)]
    assert sum(isinstance(event, AssistantMessage) for event in events) == 1


def test_names_and_reasons_that_have_no_end_are_cut_or_dropped() -> None:
    """Everybody who looks what a turn does is shown them, without secrets: a name of 6 MB held everybody up for 5 s."""
    long = "https://a:b@" * 500_000
    reader = TurnReader(FRAME)
    call = {"type": "tool_use", "id": "t", "name": long, "input": {}}
    told = reader.feed({"type": "assistant", "message": {"id": "m", "model": "x", "content": [call]}})
    told += reader.feed({"type": "system", "subtype": "api_retry", "attempt": 1, "error": long, "more": {"x": long}})
    end = {"type": "result", "subtype": long, "is_error": True, "result": "x", "stop_reason": long}
    end |= {"terminal_reason": long, "api_error_type": long, "user_message_uuids": [FRAME]}
    told += reader.feed(end)
    assert not any(isinstance(event, ToolActivity) for event in told)
    [retried] = [event for event in told if isinstance(event, Retried)]
    assert retried.detail == {"attempt": 1, "error": long[:LONGEST_NAME]}
    [ended] = [event for event in told if isinstance(event, Result)]
    for said in (ended.subtype, ended.stop_reason, ended.terminal_reason, *error_for(ended).detail.values()):
        assert 0 < len(str(said)) <= LONGEST_NAME
    asks = {"request": {"subtype": "can_use_tool", "tool_name": long}, "request_id": "r"}
    assert len(permissions.read(asks).tool) <= LONGEST_NAME


@pytest.mark.parametrize(("told", "counted"), [(7, 7), (2**62, 0), (-7, 0), (True, 0), ("7", 0), (None, 0)])
def test_no_more_is_counted_than_a_store_can_add_up(told: Any, counted: int) -> None:
    """Two of 2**62 are more than an integer of SQLite's: no sum with them could be read."""
    said = {"type": "result", "subtype": "success", "result": "x", "user_message_uuids": [FRAME]}
    events = TurnReader(FRAME).feed(said | {"usage": {"input_tokens": told}})
    [end] = [event for event in events if isinstance(event, Result)]
    assert end.usage.input_tokens == counted


def test_a_stream_whose_pieces_are_not_known_is_told_by_its_assistant_frame() -> None:
    reader = TurnReader(FRAME)
    stream: list[Any] = [
        {"type": "message_start", "message": {"id": "m"}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "prose_delta", "prose": "words"}},
    ]
    for event in stream:
        reader.feed({"type": "stream_event", "event": event})
    events = reader.feed({"type": "assistant", "message": {"id": "m", "model": "x", "content": [text("words")]}})
    assert [event.delta["text"] for event in events if isinstance(event, BlockDelta)] == ["words"]


@pytest.mark.parametrize("kind", ["names of what was used", "ends of one message"])
def test_frames_of_a_shell_in_the_clis_place_are_read_in_linear_time(kind: str) -> None:
    """On the event loop: quadratic it took minutes."""
    many = 60_000
    if kind == "ends of one message":
        told = [{"type": "content_block_start", "index": n, "content_block": text("")} for n in range(many)]
        told += [{"type": "message_stop"}] * many
    else:
        told = [{"type": "message_delta", "usage": {f"n{n}": 1}} for n in range(2 * many)]
    reader = TurnReader(FRAME)
    began = time.process_time()
    for number, event in enumerate([{"type": "message_start", "message": {"id": "m"}}, *told]):
        void = {"from_block_index": many}
        reader.feed({"type": "stream_event", "uuid": number, "event": event, "abandoned_blocks": void})
    assert time.process_time() - began < 5


def test_a_call_that_no_frame_has_told_is_seen() -> None:
    reader = TurnReader(FRAME, ToolPolicy(Offers.of((Tool("weather"),)), ToolChoice(), unchecked))
    params = {"name": "weather", "arguments": {}, "_meta": {"claudecode/toolUseId": "toolu_1"}}
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    request = {"subtype": "mcp_message", "server_name": "client", "message": message}
    reader.feed({"type": "control_request", "request_id": "r", "request": request})
    assert reader.call_without_frame


# --- turns


def test_a_streamed_turn_of_2_1() -> None:
    events = read("think_2.1.329")
    assert [type(event).__name__ for event in blocks(events)] == [
        "BlockStart", "BlockDelta", "BlockDelta", "BlockStop", "BlockStart", "BlockDelta", "BlockDelta", "BlockStop",
    ]  # fmt: skip
    assert [event.blocks[0]["type"] for event in events if isinstance(event, AssistantMessage)] == ["thinking", "text"]
    end = result(events)
    assert end.usage == Usage(5, 3, 7, 2)
    assert (end.is_error, end.stop_reason, end.terminal_reason) == (False, "end_turn", "completed")
    assert end.cost_total_usd == pytest.approx(0.0000457)
    seen = {event.session_id for event in events if isinstance(event, SessionFrame)}
    assert seen == {end.session_id}


@pytest.mark.parametrize("name", ["tool_2.1.329", "tool_1.0.120"])
def test_the_clis_own_tools_are_activity_and_blocks_are_numbered_over_the_turn(name: str) -> None:
    events = read(name)
    starts = [event for event in events if isinstance(event, BlockStart)]
    assert [(start.index, start.block["type"]) for start in starts] == [(0, "text"), (1, "text")]
    assert [event.index for event in events if isinstance(event, BlockStop)] == [0, 1]
    entries = [event.entry for event in events if isinstance(event, ToolActivity)]
    assert [entry["type"] for entry in entries] == ["tool_use", "tool_result"]
    assert entries[0]["id"] == entries[1]["tool_use_id"]
    kept = [block["type"] for event in events if isinstance(event, AssistantMessage) for block in event.blocks]
    assert kept == ["text", "text"]


def test_block_events_are_made_where_nothing_is_streamed() -> None:
    events = blocks(read("whole_1.0.120"))
    assert [type(event).__name__ for event in events] == [
        "BlockStart", "BlockDelta", "BlockDelta", "BlockStop", "BlockStart", "BlockDelta", "BlockStop",
    ]  # fmt: skip
    deltas = [event.delta["type"] for event in events if isinstance(event, BlockDelta)]
    assert deltas == ["thinking_delta", "signature_delta", "text_delta"]
    assert events[0] == BlockStart(0, {"type": "thinking", "thinking": "", "signature": ""})


def test_an_api_error_is_no_answer() -> None:
    events = read("error_500_2.1.329")
    assert not [event for event in events if isinstance(event, AssistantMessage | BlockStart)]
    assert [event.detail["error_status"] for event in events if isinstance(event, Retried)] == [500]
    assert (result(events).is_error, result(events).api_error_status) == (True, 500)


def test_a_reset_told_by_a_rate_limit_event_is_in_the_result() -> None:
    assert result(read("limit_2.1.329")).detail["rate_limit"]["rateLimitType"] == "five_hour"


def test_a_refused_resume_keeps_its_reason() -> None:
    end = result(read("no_conversation_2.1.329"))
    assert (end.is_error, end.subtype) == (True, "error_during_execution")
    assert "No conversation found" in end.detail["errors"][0]


def test_only_the_result_of_our_frame_counts_where_the_cli_tags() -> None:
    end = recorded("think_2.1.329")[-1]
    assert isinstance(TurnReader(FRAME).feed(end)[-1], Result)
    assert TurnReader("another").feed(end) == [Activity("result_of_another_frame")]
    unnamed = {name: value for name, value in end.items() if name != "user_message_uuids"}
    assert isinstance(TurnReader(FRAME).feed(unnamed)[-1], Result)  # 1.x, or a refusal before any turn
    reader = TurnReader(FRAME)
    reader.feed({"type": "system", "subtype": "status", "user_message_uuids": [FRAME]})
    assert reader.feed(unnamed) == [Activity("result_of_another_frame")]


@pytest.mark.parametrize(
    ("before", "empty"),
    [
        ([], True),
        ([{"type": "message_start", "message": {"id": "m"}}, {"type": "message_stop"}], True),
        ([{"type": "message_delta", "delta": {"stop_reason": "stop_sequence", "stop_sequence": "END"}}], False),
        ([{"type": "message_delta", "delta": {"stop_reason": "max_tokens"}}], False),
    ],
)
def test_a_success_without_words_is_empty_unless_the_request_ended_it(before: list[Any], empty: bool) -> None:
    reader = TurnReader(FRAME)
    for event in before:
        reader.feed({"type": "stream_event", "event": event})
    *_, end = reader.feed({"type": "result", "subtype": "success", "user_message_uuids": [FRAME]})
    assert isinstance(end, Result)
    assert end.empty is empty


def test_what_the_cli_says_in_the_models_place_is_no_answer() -> None:
    reader = TurnReader(FRAME)
    own = {"id": "m", "model": "<synthetic>", "content": [text("No response requested.")]}
    reader.feed({"type": "assistant", "message": own})
    end = {"type": "result", "subtype": "success", "result": "No response requested.", "user_message_uuids": [FRAME]}
    events = reader.feed(end)
    assert not blocks(events)
    assert isinstance(events[-1], Result)
    assert events[-1].empty


def test_sub_agents_are_never_part_of_the_answer() -> None:
    reader = TurnReader(FRAME)
    call = {"type": "tool_use", "id": "t2", "name": "Bash", "input": {}}
    inner = {"type": "assistant", "parent_tool_use_id": "t1", "message": {"id": "m", "content": [text("inner"), call]}}
    assert reader.feed(inner) == [ToolActivity({**call, "parent_tool_use_id": "t1"})]
    inner["message"] = {"id": "m", "content": [text("inner")]}
    assert reader.feed(inner) == [Activity("sub_agent")]


def told(events: list[CliEvent]) -> list[tuple[Any, ...]]:
    """What concerns the answer, in order: texts by block, ends, what was given up and what was said for good."""
    out: list[tuple[Any, ...]] = []
    for event in events:
        match event:
            case BlockDelta():
                out.append(("says", event.index, event.delta["text"]))
            case BlockStop():
                out.append(("ends", event.index))
            case Abandoned():
                out.append(("abandons", *sorted(event.blocks)))
            case AssistantMessage():
                out.append(("said", *(block["text"] for block in event.blocks)))
    return out


def test_what_a_cut_left_unfinished_is_abandoned() -> None:
    assert told(read("cut_in_first_2.1.330")) == [
        ("says", 0, "words th"), ("says", 0, "at are n"), ("ends", 0), ("abandons", 0),
        ("says", 1, "the answ"), ("says", 1, "er"), ("said", "the answer"), ("ends", 1),
    ]  # fmt: skip


@pytest.mark.parametrize("version", ["2.1.330", "1.0.120"])
def test_what_was_finished_before_a_cut_stays(version: str) -> None:
    events = [event for event in told(read(f"cut_in_later_{version}")) if event[0] != "says"]
    assert [event for event in events if event[0] != "ends"] == [
        ("said", "First."), ("abandons", 1), ("said", "the answer"),
    ]  # fmt: skip
    assert events.index(("ends", 1)) < events.index(("abandons", 1))
    assert [event[1] for event in events if event[0] == "ends"] == [0, 1, 2]


def test_half_an_answer_is_a_failure_whatever_the_cli_calls_it() -> None:
    events = read("half_1.0.120")
    assert ("abandons", 1) in told(events)
    end = result(events)
    assert (end.is_error, end.subtype) == (True, "success")
    assert "stream was cut" in error_for(end).message


def test_a_stream_without_its_last_event_is_no_cut() -> None:
    reader = TurnReader(FRAME)
    frames = [frame for frame in recorded("think_2.1.329") if frame.get("event") != {"type": "message_stop"}]
    events = [event for frame in frames for event in reader.feed(frame)]
    assert not [event for event in events if isinstance(event, Abandoned)]
    assert not result(events).is_error


def test_a_block_without_its_end_ends_with_its_message() -> None:
    reader = TurnReader(FRAME)
    start = {"type": "stream_event", "event": {"type": "message_start", "message": {"id": "m1"}}}
    begin = {"type": "stream_event", "event": {"type": "content_block_start", "index": 0, "content_block": text("")}}
    for frame in (start, begin, {"type": "stream_event", "event": {"type": "message_stop"}}):
        reader.feed(frame)
    assert reader.feed(start) == [BlockStop(0)]


def test_a_message_that_begins_before_the_one_before_has_ended_was_cut() -> None:
    reader = TurnReader(FRAME)
    start = {"type": "stream_event", "event": {"type": "message_start", "message": {"id": "m1"}}}
    begin = {"type": "stream_event", "event": {"type": "content_block_start", "index": 0, "content_block": text("")}}
    reader.feed(start)
    assert reader.feed(begin) == [BlockStart(0, text(""))]
    assert reader.feed(start) == [BlockStop(0), Abandoned(frozenset({0}))]
    assert reader.feed(begin) == [BlockStart(1, text(""))]


CALL = {"type": "tool_use", "id": "t1", "name": "mcp__client__look", "input": {"at": 1}}


def test_a_call_comes_when_its_message_is_complete() -> None:
    reader = TurnReader(FRAME, ToolPolicy(Offers.of([Tool("look")]), ToolChoice(), unchecked))

    def stream(kind: str, **fields: Any) -> list[CliEvent]:
        return blocks(reader.feed({"type": "stream_event", "event": {"type": kind, **fields}}))

    stream("message_start", message={"id": "m1"})
    assert not stream("content_block_start", index=0, content_block={**CALL, "input": {}})
    assert not stream("content_block_delta", index=0, delta={"type": "input_json_delta", "partial_json": '{"at": 1}'})
    assert not blocks(reader.feed({"type": "assistant", "message": {"id": "m1", "content": [CALL]}}))
    assert not stream("content_block_stop", index=0)
    *made, end = reader.feed({"type": "stream_event", "event": {"type": "message_stop"}})
    call = {**CALL, "name": "look"}
    assert made == [
        BlockStart(0, {**call, "input": {}}),
        BlockDelta(0, {"type": "input_json_delta", "partial_json": '{"at": 1}'}),
        BlockStop(0),
    ]
    assert end == Called((call,), Usage())


def test_resets_compaction_and_garbage_are_told() -> None:
    reader = TurnReader(FRAME)
    old = "5e551011-0000-4000-8000-000000000001"
    assert reader.feed({"type": "conversation_reset", "session_id": old}) == [SessionFrame(old, "conversation_reset")]
    compacted = {"type": "system", "subtype": "compact_boundary", "compact_metadata": {"trigger": "auto"}}
    assert reader.feed(compacted) == [Compacted({"compact_metadata": {"trigger": "auto"}})]
    assert reader.feed(None) == [Activity("garbage")]
    assert reader.feed({"no": "type"}) == [Activity("None")]


@pytest.mark.parametrize("named", ["../../../x", "", None, 5, "s1", "5e551011-0000-4000-8000-000000000001/.."])
def test_what_is_no_session_id_is_not_taken_from_a_frame(named: object) -> None:
    """It would become a path: a CLI behind a wrapper may say anything."""
    reader = TurnReader(FRAME)
    init = reader.feed({"type": "system", "subtype": "init", "session_id": named})
    reset = reader.feed({"type": "conversation_reset", "session_id": named})
    *_, end = reader.feed({"type": "result", "user_message_uuids": [FRAME], "session_id": named})
    assert [init, reset] == [[Activity("init")], [Activity("conversation_reset")]]
    assert isinstance(end, Result)
    assert end.session_id == ""


@pytest.mark.parametrize("cost", [10**400, float("nan"), float("inf"), -1, "1", None])
def test_a_cost_that_is_no_sum_is_not_taken_from_a_frame(cost: object) -> None:
    *_, end = TurnReader(FRAME).feed({"type": "result", "user_message_uuids": [FRAME], "total_cost_usd": cost})
    assert isinstance(end, Result)
    assert end.cost_total_usd is None


def test_what_a_turn_is_shown_to_have_waited_for_has_a_bound() -> None:
    """An overview of all agents failed with a delay of 400 digits. A name of 10 MB was stored with each of 60 calls."""
    reader = TurnReader(FRAME)
    said = {"attempt": 1, "error": "x" * 10_000, "retry_delay_ms": 10**400, "y" * 100: 1, "error_status": [529]}
    (retried,) = reader.feed({"type": "system", "subtype": "api_retry", "uuid": "u", **said})
    assert retried == Retried({"attempt": 1, "error": "x" * LONGEST_NAME})
    metadata = {"trigger": "auto", "pre_tokens": float("inf"), "preserved": ["z" * 100_000]}
    compacted = {"type": "system", "subtype": "compact_boundary", "compact_metadata": metadata, "w": "w" * 100_000}
    assert reader.feed(compacted) == [Compacted({"compact_metadata": {"trigger": "auto"}})]
    called = {
        "parent_tool_use_id": "p" * 10_000,
        "message": {"content": [{"type": "tool_use", "id": "c", "name": "x"}]},
    }
    (activity,) = reader.feed({"type": "assistant", **called})
    assert isinstance(activity, ToolActivity)
    assert activity.entry["parent_tool_use_id"] == "p" * LONGEST_NAME
    why = {"stop_reason": "refusal", "stop_details": {"category": "c", "explanation": "e" * 10_000}}
    (declined,) = reader.feed({"type": "stream_event", "event": {"type": "message_delta", "delta": why}})
    assert declined == Declined("c", "e" * LONGEST_NAME, Usage())


def test_ids_of_a_question_that_are_longer_than_any_are_none() -> None:
    """They are stored with each of 500 questions of a turn, and all of these at each one."""
    request = {"subtype": "can_use_tool", "tool_name": "Bash", "tool_use_id": "c" * 10_000, "agent_id": "a"}
    asked = permissions.read({"type": "control_request", "request_id": "r", "request": request})
    assert (asked.call, asked.agent) == (None, "a")


KEYS = st.sampled_from(["type", "event", "message", "content", "subtype", "index", "usage", "session_id"])
ANYTHING = st.recursive(
    st.none() | st.integers() | st.text(max_size=5), lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner)
)


@given(ANYTHING)
def test_no_frame_makes_it_fall_over(value: Any) -> None:
    for kind in ("assistant", "user", "stream_event", "system", "result", "rate_limit_event"):
        frame = {**value, "type": kind} if isinstance(value, dict) else {"type": kind, "message": value, "event": value}
        TurnReader(FRAME).feed(frame)


@pytest.mark.parametrize("name", ["text", "type", "id", "tool_use_id", "name"])
@pytest.mark.parametrize("odd", [[], {}, 1, None, "left out"], ids=str)
async def test_what_a_shell_makes_up_in_a_clis_place_breaks_no_reader(name: str, odd: object) -> None:
    """What a running turn says is read for others, too: `progress` of one such turn broke the page for everybody."""
    live, reader = Fate().live(), TurnReader()

    def piece(**fields: object) -> dict[str, object]:
        rest = {key: value for key, value in fields.items() if key != name}
        return rest if odd == "left out" else {**rest, name: odd}

    def stream(kind: str, **fields: object) -> dict[str, object]:
        return {"type": "stream_event", "event": {"type": kind, "index": 0, **fields}}

    called = {"id": "m", "content": [piece(type="tool_use", id="c", name="Bash"), piece(type="text", text="x")]}
    for frame in (
        stream("message_start", message={"id": "m"}),
        stream("content_block_start", content_block=piece(type="text", text="")),
        stream("content_block_delta", delta=piece(type="text_delta", text="x")),
        stream("content_block_start", content_block={"type": "text", "text": ""}),
        stream("content_block_delta", delta=piece(type="text_delta", text="x")),
        {"type": "user", "message": {"content": [piece(type="tool_result", tool_use_id="c", content="x")]}},
        {"type": "assistant", "message": called},
        {**stream("message_stop"), "abandoned_blocks": {"from_block_index": 0}},
    ):
        for event in reader.feed(frame):
            if isinstance(event, BlockStart | BlockDelta | BlockStop):
                live.publish(event)
                assert live.progress().turn == live.turn
            if isinstance(event, Abandoned):
                live.withdraw(event.blocks)
            if isinstance(event, ToolActivity):
                assert all(isinstance(event.entry.get(one), str | None) for one in ("id", "tool_use_id", "name"))
    live.finish(live.turn)


MARKED = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}


@pytest.mark.parametrize(
    "block",
    [
        {"type": "text", "text": "x", "title": 5}, MARKED, {"type": "tool_use", "id": "t", "name": "n", "input": []},
        {"type": "tool_use", "id": "t", "name": "n"}, {"type": "tool_result", "tool_use_id": "t", "content": [MARKED]},
    ],
    ids=["a title", "a mark", "a list of arguments", "no arguments", "a mark in a result"],
)  # fmt: skip
def test_a_block_that_no_provider_or_no_import_takes_is_left_out(block: dict[str, Any]) -> None:
    """A program of a confined agent can print one: the provider refused all later turns."""
    frame = {"type": "assistant", "message": {"id": "m", "model": "x", "content": [block, text("said")]}}
    [said] = [event for event in TurnReader(FRAME).feed(frame) if isinstance(event, AssistantMessage)]
    assert said.blocks == (text("said"),)  # a tool's call is in no answer
    assert told_in(frame) == {"role": "assistant", "id": "m", "model": "x", "content": [text("said")]}


def test_a_code_that_no_import_takes_is_none() -> None:
    why = {"diagnostics": {"cache_miss_reason": {"type": "messages changed"}}, "stop_reason": None}
    reader = TurnReader(FRAME)
    reader.feed({"type": "stream_event", "event": {"type": "message_delta", "delta": why}})
    end = {"type": "result", "subtype": "success", "result": "x", "stop_reason": "end of turn"}
    [ended] = [event for event in reader.feed({**end, "user_message_uuids": [FRAME]}) if isinstance(event, Result)]
    assert (ended.stop_reason, ended.cache_miss) == (None, None)
