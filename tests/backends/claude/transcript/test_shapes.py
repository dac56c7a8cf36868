"""What others may write into a transcript: a line is a record of a sound shape, or it is broken."""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli_session_proxy.backends.claude import transcript
from cli_session_proxy.backends.claude.sessions import (
    adoption,
    capture,
    composing,
    decisions,
    exchanges,
    seeing,
    settling,
    summaries,
)
from cli_session_proxy.backends.claude.sessions.adoption import ForeignTranscript
from cli_session_proxy.backends.claude.transcript import Scribe, mending
from cli_session_proxy.domain.models import Message, Record
from cli_session_proxy.errors import InvalidRequest

from ....fakes import turn as a_turn

SESSION = "11111111-1111-4111-8111-111111111111"
TEXT = {"type": "text", "text": "words"}


def record(**more: Any) -> dict[str, Any]:
    return {"type": "assistant", "uuid": "u", "parentUuid": None, "message": {"content": [TEXT]}, **more}


def saying(*blocks: Any, **more: Any) -> dict[str, Any]:
    return record(message={"content": list(blocks), **more})


def broken(*lines: Any) -> int:
    return transcript.parse("\n".join(map(json.dumps, lines)).encode()).broken


@pytest.mark.parametrize(
    "line",
    [
        record(uuid=1), record(uuid="\ud83d"), record(uuid=""), record(parentUuid=[]), record(parentUuid=1),
        record(logicalParentUuid={}), record(sourceToolAssistantUUID=[]), record(timestamp=1), record(message=None),
        record(message="words"), record(message={}), record(message={"content": None}), saying("words"), saying(1),
        saying(TEXT, id=[]), saying(TEXT, stop_reason=[]), saying(TEXT, usage=[1]), saying({"type": []}),
        saying({"type": "text"}), saying({"type": "text", "text": 1}), saying({"type": "thinking", "thinking": None}),
        saying({"type": "tool_use", "name": "x"}), saying({"type": "tool_use", "name": "x", "id": []}),
        saying({"type": "tool_result"}), saying({"type": "tool_result", "tool_use_id": {}}),
        saying({"type": "tool_result", "tool_use_id": "t", "content": ["x"]}),
        saying({"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image", "source": "x"}]}),
        saying({"type": "image"}), saying({"type": "document", "source": []}), saying({"type": "new", "id": []}),
        {"type": "system", "uuid": "u", "parentUuid": None, "message": "words"},
        {"type": "system", "uuid": "u", "parentUuid": None, "compactMetadata": "words"},
        {"type": "cli-session-proxy/mark", "mark": "head"}, {"type": "cli-session-proxy/file"}, [], "words", 1, None,
    ],
)  # fmt: skip
def test_a_line_of_another_shape_is_broken(line: Any) -> None:
    parsed = transcript.parse(json.dumps(line, separators=(",", ":")).encode())
    assert (parsed.broken, parsed.entries) == (1, ())


@pytest.mark.parametrize(
    "line",
    [
        record(), record(message={"content": "words"}), saying(), saying(TEXT, id=None, stop_reason=None, usage=None),
        saying({"type": "text", "text": "half: \ud83d"}), saying({"type": "redacted_thinking", "data": "x"}),
        saying({"type": "tool_result", "tool_use_id": "t"}), saying({"type": "tool_use", "id": "t", "name": "Read"}),
        saying({"type": "image", "source": {"type": "url", "url": "https://x"}}),
        saying({"type": "web_search_tool_result", "tool_use_id": "t", "content": {"type": "error"}}),
        saying({"type": "search_result", "source": "https://x", "content": [TEXT]}),
        saying({"type": "of a newer model", "what": ["ever"]}),
        {"type": "system", "uuid": "u", "parentUuid": "v", "subtype": "compact_boundary", "compactMetadata": {}},
        {"type": "attachment", "uuid": "u", "parentUuid": None, "attachment": {"type": "new"}},
        {"type": "summary", "leafUuid": 1, "message": []}, {},
    ],
)  # fmt: skip
def test_a_line_of_a_sound_shape_is_not_broken(line: Any) -> None:
    assert broken(line) == 0


# --- nothing that reads them fails

WORDS = st.sampled_from(
    ["", "t", "end_turn", "2026-01-01T00:00:00.000Z", "0001-01-01T00:00:00", "9999-12-31T23:59:59Z"]
)
ODD = st.none() | st.booleans() | st.integers() | st.floats() | WORDS | st.text(max_size=3) | st.just("\ud83d")
VALUE = st.recursive(ODD, lambda one: st.lists(one, max_size=2) | st.dictionaries(WORDS, one, max_size=2), max_leaves=4)
ID = st.sampled_from(["u0", "u1", "u2", "t"])
KINDS = ["text", "thinking", "tool_use", "tool_result", "image", "document", "new"]


def mostly(sound: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(sound, sound, sound, sound, VALUE)


SOURCE = st.fixed_dictionaries({"type": st.just("base64"), "data": mostly(st.just("eA=="))})
BLOCK = st.fixed_dictionaries(
    {"type": mostly(st.sampled_from(KINDS))},
    optional={
        "id": mostly(ID), "tool_use_id": mostly(ID), "text": mostly(WORDS), "thinking": mostly(WORDS),
        "name": mostly(st.just("mcp__client__x")), "input": VALUE, "source": mostly(SOURCE),
        "content": mostly(st.just("words")) | st.lists(st.just(TEXT) | VALUE, max_size=1),
    },
)  # fmt: skip
MESSAGE = st.fixed_dictionaries(
    {"content": mostly(st.just("words")) | st.lists(mostly(BLOCK), max_size=2)},
    optional={
        "id": mostly(ID), "usage": mostly(st.just({"input_tokens": 1})), "stop_reason": mostly(WORDS),
        "model": mostly(st.just("sonnet")), "role": st.sampled_from(["user", "assistant"]),
    },
)  # fmt: skip
LINE = st.fixed_dictionaries(
    {
        "type": mostly(st.sampled_from(["user", "user", "assistant", "assistant", "system", "attachment"])),
        "parentUuid": mostly(st.none() | ID),
        "message": mostly(MESSAGE),
    },
    optional={
        "uuid": mostly(ID), "timestamp": mostly(WORDS), "isSidechain": st.booleans(), "isMeta": VALUE,
        "subtype": st.just("compact_boundary") | VALUE, "logicalParentUuid": mostly(ID),
        "sourceToolAssistantUUID": mostly(ID), "attachment": VALUE, "isApiErrorMessage": VALUE, "version": VALUE,
        "compactMetadata": mostly(st.just({"preservedSegment": {"headUuid": "u1"}})), "sessionId": VALUE,
        "promptSource": VALUE, "toolDenialKind": VALUE, "isCompactSummary": VALUE,
    },
)  # fmt: skip


@given(st.lists(mostly(LINE), max_size=5))
def test_whatever_the_lines_are_nothing_that_reads_them_fails(lines: list[Any]) -> None:
    data = "\n".join(json.dumps(line) for line in lines).encode()
    parsed = transcript.parse(data)
    entries, path = parsed.entries, parsed.path
    records = [entry.record() for entry in entries]
    asked = a_turn(1, frame_uuid="u0", session_id=SESSION)
    # transcript
    transcript.is_complete(entries), transcript.has_ended(entries), transcript.unbroken(path, None)
    transcript.end_of_copy(path, path[1:])
    assert transcript.parse_records(records).path == path
    shown = mending.shown([*records, mending.leave_out("thinking"), mending.fitted({})])
    mending.shown([*records, mending.summary("words", "u1", "sonnet", "2026-01-01T00:00:00Z")])
    mending.count(shown, "images"), list(mending.media_of(records)), mending.mended_at_import(records)
    transcript.in_strict_order([one.line for one in records])
    # sessions
    found = list(exchanges.exchanges(entries))
    adopter = adoption.Adopter(1, SESSION, "")
    for one in found:
        adopter.adopt(one)
        adoption._has_results_behind_calls(one.path)
        assert isinstance(one.complete, bool)
    exchanges.has_invented_result(entries), [exchanges.time_of(entry) for entry in entries]
    capture.continues(path[:1], path, "u1"), capture.is_copied(path[:1], path, wholly=True)
    capture.records_after(entries, "u0", ["t"]), capture.records_after_copy(path[:1], parsed, "u0")
    (
        capture.is_damaged(path, [TEXT]),
        summaries._read(records, open_calls=True),
        seeing._seen([asked], records, records[:1]),
    )
    decisions.own_repairs(records, [{"type": "image", "source": {"data": "x"}}])
    decisions.of_other_models(records[:1], records[1:]), composing.without_invalid_thinking(records)
    scribe = Scribe(SESSION, Path("/somewhere"), "", 1_700_000_000.0)
    composing.with_partial_texts(records, [(0, TEXT)], frozenset({"t"}), scribe, "sonnet")
    composing.cut_answer(entries, [TEXT], scribe, "sonnet", unseen=True)
    composing.result_records(records, asked, {}, scribe, closed=True, uuid=None)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{SESSION}.jsonl"
        file.write_bytes(data)
        settling._read(file, asked, transcript.Parsed((), []))
        verdict = transcript.check(file, None, _known())
        assert verdict is not None
        transcript.total_cost(file)
        transcript.write(file, records, SESSION, form=transcript.Loading(whole_records=False))
        with contextlib.suppress(InvalidRequest):  # no transcript with a message in it
            list(ForeignTranscript(file).entries(lambda done, size: None))


@given(st.lists(mostly(LINE), max_size=5), st.lists(st.none() | ID, min_size=5, max_size=5))
def test_whatever_an_earlier_import_took_for_records_nothing_that_reads_them_fails(
    lines: list[Any], uuids: list[str | None]
) -> None:
    """An import once took any object as a record of the path, under any uuid beside it."""
    objects = [line for line in lines if isinstance(line, dict)]
    records = [Record(json.dumps(line), uuid) for line, uuid in zip(objects, uuids, strict=False)]
    asked = a_turn(1, frame_uuid="u0", session_id=SESSION)
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "eA=="}}
    marks = [
        mending.leave_out("thinking"), mending.leave_out("images", "u1"), mending.fitted({}), mending.window("u1"),
        mending.leave_out("calls"),
        mending.summary("words", "u1", "sonnet", "2026-01-01T00:00:00Z"),
    ]  # fmt: skip
    for decisions_taken in ([], *([mark] for mark in marks), marks):
        shown = mending.shown([*records, *decisions_taken])
        transcript.parse_records(shown)
        transcript.in_strict_order([one.line for one in shown])
        for kind in get_args(mending.LeftOut):
            mending.count(shown, kind), mending.since_first(shown, [kind]), mending.weight(shown, kind)
    list(mending.media_of(records)), mending.mended_at_import(records), mending.head_of(records)
    mending.was_refused(records, "images"), mending.window_of(records)
    summaries._read(records, open_calls=True), seeing._seen([asked], records, records[:1])
    decisions.own_repairs(records, [image]), decisions.of_other_models(records[:1], records[1:])
    composing.without_invalid_thinking(records), composing.open_calls(transcript.parse_records(records).path)
    scribe = Scribe(SESSION, Path("/somewhere"), "", 1_700_000_000.0)
    composing.with_partial_texts(records, [(0, TEXT)], frozenset({"t"}), scribe, "sonnet")
    composing.result_records(records, asked, {}, scribe, closed=True, uuid=None)
    fitting = adoption.ImportFitting(lambda _: ("images_made_smaller", {**image}))
    fitting.records("t2", None, records), fitting.records("t3", "t2", records)
    for one in records:
        transcript.with_session_id(one.line, SESSION), transcript.files.is_file(one), transcript.files.is_sound(one)


def _known() -> list[Record]:
    scribe = Scribe(SESSION, Path("/somewhere"), "", 1_700_000_000.0)
    return [scribe.record(Message.user("words"), "sonnet", record_uuid="u0")]
