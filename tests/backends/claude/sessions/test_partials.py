"""Words of a cut stream in the records of their turn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cli_session_proxy.backends.claude.sessions import composing
from cli_session_proxy.backends.claude.transcript import Scribe, parse_records, unbroken
from cli_session_proxy.backends.claude.transcript.mending import shown
from cli_session_proxy.domain.models import Block, Message, Record

CUT = {"type": "text", "text": "The ans"}
MORE = {"type": "text", "text": "The answer is s"}
WHOLE = {"type": "text", "text": "The answer is seven."}
FIRST = {"type": "text", "text": "Let me see."}
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "sealed"}
CALL = {"type": "tool_use", "id": "t1", "name": "mcp__client__look", "input": {}}
OWN = {"type": "tool_use", "id": "t2", "name": "Read", "input": {}}
BLANK = {"type": "text", "text": "\n"}


def scribe() -> Scribe:
    return Scribe("s", Path("/sandbox"), "2.1.330", 1_790_000_000.0)


def written(*said: tuple[str, list[Block]]) -> list[Record]:
    writer = scribe()
    return [writer.record(Message(role, tuple(content)), "sonnet") for role, content in said]  # type: ignore[arg-type]


def placed(records: list[Record], output: list[Block], partial: set[int], calls: frozenset[str] = frozenset()) -> Any:
    """The content of the answer's records with the partial blocks of `output`."""
    missing = composing.partial_texts(output, frozenset(partial))
    out = composing.with_partial_texts(records, missing, calls, scribe(), "sonnet")
    entries = parse_records(out).entries
    assert unbroken(entries, None)
    return [entry.content for entry in entries if entry.kind == "assistant"]


ASKED: tuple[str, list[Block]] = ("user", [{"type": "text", "text": "hello"}])


def test_they_stand_before_the_text_that_followed_them() -> None:
    assert placed(written(ASKED, ("assistant", [WHOLE])), [CUT, WHOLE], {0}) == [[CUT, WHOLE]]
    asked_on = written(
        ASKED, ("assistant", [FIRST]), ("user", [{"type": "text", "text": "go on"}]), ("assistant", [WHOLE])
    )
    assert placed(asked_on, [FIRST, CUT, WHOLE], {1}) == [[FIRST], [CUT, WHOLE]]


def test_a_seal_is_not_broken_by_words_before_it() -> None:
    one = written(ASKED, ("assistant", [THOUGHT, WHOLE]))
    assert placed(one, [CUT, THOUGHT, WHOLE], {0}) == [[THOUGHT, CUT, WHOLE]]
    two = written(ASKED, ("assistant", [THOUGHT]), ("assistant", [WHOLE]))
    assert placed(two, [CUT, THOUGHT, WHOLE], {0}) == [[THOUGHT], [CUT, WHOLE]]


def test_thinking_that_was_cut_is_in_no_record() -> None:
    cut = {"type": "thinking", "thinking": "h", "signature": ""}
    assert placed(written(ASKED, ("assistant", [THOUGHT, WHOLE])), [cut, THOUGHT, WHOLE], {0}) == [[THOUGHT, WHOLE]]


def test_calls_of_the_client_come_after_them_and_tools_of_the_cli_before() -> None:
    assert placed(written(ASKED, ("assistant", [CALL])), [CUT, CALL], {0}, frozenset({"t1"})) == [[CUT, CALL]]
    result = {"type": "tool_result", "tool_use_id": "t2", "content": "x"}
    used = written(ASKED, ("assistant", [OWN]), ("user", [result]), ("assistant", [WHOLE]))
    assert placed(used, [CUT, WHOLE], {0}) == [[OWN], [CUT, WHOLE]]


def test_several_cuts_keep_their_order() -> None:
    assert placed(written(ASKED, ("assistant", [WHOLE])), [CUT, MORE, WHOLE], {0, 1}) == [[CUT, MORE, WHOLE]]


def test_without_a_text_behind_them_they_are_a_record_of_their_own() -> None:
    assert placed(written(ASKED, ("assistant", [THOUGHT])), [CUT, THOUGHT], {0}) == [[THOUGHT], [CUT]]


def test_blank_words_and_errors_of_the_cli_do_not_count() -> None:
    records = written(ASKED, ("assistant", [FIRST]), ("assistant", [WHOLE]))
    error = json.loads(records[1].line) | {"isApiErrorMessage": True}
    records[1] = Record(json.dumps(error), records[1].uuid)
    assert placed(records, [BLANK, CUT, BLANK, WHOLE], {0, 1}) == [[FIRST], [CUT, WHOLE]]


def _answered(message: str, *blocks: Block) -> Record:
    """As CLI 1.0.120 writes it: one record, with the id of the provider's message."""
    record = written(("assistant", list(blocks)))[0]
    data = json.loads(record.line)
    return Record(json.dumps({**data, "message": {**data["message"], "id": message}}), record.uuid)


def _shown(records: list[Record]) -> list[Any]:
    out, left_out = composing.without_invalid_thinking(records)
    return [left_out, *(entry.content for entry in parse_records(shown(out)).entries if entry.kind == "assistant")]


def test_a_thought_of_an_attempt_that_was_cut_is_not_shown_before_the_answers_own() -> None:
    records = [*written(ASKED), _answered("m1", THOUGHT), _answered("m2", THOUGHT, WHOLE)]
    assert _shown(records) == [1, [THOUGHT, WHOLE]]


def test_behind_a_text_of_an_attempt_that_was_cut_the_answers_thoughts_are_void() -> None:
    records = [*written(ASKED), _answered("m1", THOUGHT, FIRST), _answered("m2", THOUGHT), _answered("m2", WHOLE)]
    assert _shown(records) == [1, [THOUGHT, FIRST], [WHOLE]]


def test_thoughts_between_calls_and_in_records_of_one_message_are_not_void() -> None:
    result: Block = {"type": "tool_result", "tool_use_id": "t2", "content": "x"}
    used = [_answered("m1", THOUGHT, OWN), Record(written(("user", [result]))[0].line, "r"), _answered("m2", THOUGHT)]
    records = [*written(ASKED), *used, _answered("m2", WHOLE)]
    assert composing.without_invalid_thinking(records) == (records, 0)
