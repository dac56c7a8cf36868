"""What of a path the model is shown, by the decisions that stand in it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cli_session_proxy.backends.claude import transcript
from cli_session_proxy.backends.claude.transcript import Scribe, mending
from cli_session_proxy.backends.claude.transcript.mending import Head
from cli_session_proxy.domain.evidence import Note
from cli_session_proxy.domain.models import Block, Message, Record

SESSION = "11111111-1111-4111-8111-111111111111"
IMAGE: Block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0"}}
THOUGHT: Block = {"type": "thinking", "thinking": "hm", "signature": "c2VhbGVk"}


def words(text: str) -> Block:
    return {"type": "text", "text": text}


def path(*contents: Sequence[Block], at: float = 1_700_000_000.0) -> list[Record]:
    """Records that hang on each other; a record that begins with a thought or an answer is the assistant's."""
    scribe = Scribe(SESSION, Path("/somewhere"), "2.1.330", at)
    out = []
    for blocks in contents:
        said = blocks[0] == THOUGHT or str(blocks[0].get("text", "")).startswith("answer")
        out.append(scribe.record(Message("assistant" if said else "user", tuple(blocks)), "sonnet"))
    return out


def told(records: Sequence[Record]) -> list[list[Any]]:
    """The contents, after a check that each record hangs on the one before it."""
    entries = transcript.parse_records(records).path
    assert transcript.unbroken(entries, None)
    return [[block.get("text", block["type"]) for block in entry.content] for entry in entries]


def test_without_a_decision_every_record_is_what_it_was() -> None:
    records = path([words("a"), IMAGE], [THOUGHT, words("answer")])
    assert mending.shown(records) == records


def test_thoughts_before_the_decision_are_left_out_and_those_behind_it_stay() -> None:
    records = path([words("a")], [THOUGHT], [words("answer 1")], [words("b")], [THOUGHT, words("answer 2")])
    decided = [*records[:3], mending.leave_out("thinking"), *records[3:]]
    assert told(mending.shown(decided)) == [["a"], ["answer 1"], ["b"], ["thinking", "answer 2"]]
    everything = [*records, mending.leave_out("thinking")]
    assert told(mending.shown(everything)) == [["a"], ["answer 1"], ["b"], ["answer 2"]]
    assert everything[:5] == records
    assert mending.count(mending.shown(everything), "thinking") == 0
    assert mending.count(records, "thinking") == 2


def test_thoughts_before_what_is_left_out_stay() -> None:
    records = path([words("a")], [THOUGHT, words("answer 1")], [IMAGE, words("b")], [THOUGHT, words("answer 2")])
    later = mending.since_first(records, ["images"])
    marks = [mending.leave_out("images"), mending.leave_out("thinking", later[0].uuid)]
    shown = told(mending.shown([*records, *marks]))
    assert shown[:2] == [["a"], ["thinking", "answer 1"]]
    assert "left out" in shown[2][0]
    assert shown[2][1:] == ["b"]
    assert shown[3] == ["answer 2"]


def test_an_image_in_the_result_of_a_tool_is_left_out_too_and_words_stand_in_its_place() -> None:
    result: Block = {"type": "tool_result", "tool_use_id": "c", "content": [words("seen"), IMAGE]}
    records = path([words("a")], [words("answer"), {"type": "tool_use", "id": "c", "name": "f", "input": {}}], [result])
    assert mending.count(records, "images") == 1
    shown = mending.shown([*records, mending.leave_out("images")])
    content = transcript.parse_records(shown).path[2].content[0]["content"]
    assert [block["type"] for block in content] == ["text", "text"]
    assert "left out" in content[1]["text"]


def test_calls_are_left_out_and_the_words_of_their_results_stay() -> None:
    call: Block = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    seen: Block = {"type": "tool_result", "tool_use_id": "c", "content": [words("seen"), {"type": "tool_reference"}]}
    plain: Block = {"type": "tool_result", "tool_use_id": "d", "content": "plain"}
    empty: Block = {"type": "tool_result", "tool_use_id": "e"}
    records = path([words("a")], [words("answer"), call, {"type": "server_tool_use"}], [seen, plain, empty], [THOUGHT])
    assert mending.count(records, "calls") == 6
    left_out = "[A tool was called here. It is left out: the request would have been refused with it.]"
    assert told(mending.shown([*records, mending.leave_out("calls")])) == [
        ["a"], ["answer", left_out, left_out],
        [mending.RESULT, "seen", left_out, mending.RESULT, "plain", mending.RESULT], ["thinking"],
    ]  # fmt: skip


def test_blocks_that_no_cli_writes_stop_no_decision() -> None:
    """A confined shell writes its transcript, and an imported one may be anybody's."""
    result: Block = {"type": "tool_result", "tool_use_id": "c", "content": ["seen", None, {"type": ["image"]}, IMAGE]}
    records = path([words("a"), {"type": {"image": 1}}], [result])
    assert mending.count(records, "images") == 1
    shown = mending.shown([*records, mending.leave_out("images")])
    assert mending.count(shown, "images") == 0


def test_a_smaller_image_stands_in_the_place_of_one_before_the_mark_and_of_no_other() -> None:
    smaller: Block = {"type": "image", "source": {"type": "base64", "media_type": "image/jpeg", "data": "c21hbGw="}}
    result: Block = {"type": "tool_result", "tool_use_id": "t", "content": [IMAGE]}
    records = path([words("a"), IMAGE], [words("answer")], [result])
    [(uuid, sha256, block), (_, again, _)] = mending.media_of(records)
    assert (uuid, block, again) == (records[0].uuid, IMAGE, sha256)
    mark = mending.fitted({sha256: smaller})
    shown = transcript.parse_records(mending.shown([*records, mark, *path([IMAGE])])).entries
    assert [entry.content for entry in shown] == [
        [words("a"), smaller], [words("answer")], [{**result, "content": [smaller]}], [IMAGE],
    ]  # fmt: skip
    assert list(mending.media_of([*records, mark])) == []


def test_the_same_decisions_come_to_the_same_bytes() -> None:
    records = path([words("a"), IMAGE], [THOUGHT], [words("answer 1")], [words("b")], [words("answer 2")])
    marks = [
        mending.leave_out("images"),
        mending.summary("so far", records[3].uuid, "sonnet", "2026-11-21T10:00Z"),
    ]
    assert mending.shown([*records, *marks]) == mending.shown([*records, *marks])


def test_a_summary_takes_the_place_of_what_is_before_the_records_that_are_kept() -> None:
    records = path([words("a")], [words("answer 1")], [words("b")], [words("answer 2")])
    mark = mending.summary("a was said", records[2].uuid, "sonnet", "2026-11-21T10:00:00.000Z")
    (first, *rest) = told(mending.shown([*records, mark, *path([words("c")])[:0]]))
    assert first[0].endswith("a was said")
    assert rest == [["b"], ["answer 2"]]


SHORTER = {"summary": mending.summary("so far", None, "sonnet", "t"), "images": mending.leave_out("images")}


@pytest.mark.parametrize("how", SHORTER)
def test_what_requests_took_before_they_were_made_shorter_is_not_what_the_cli_compacts_by(how: str) -> None:
    """It would compact once more what is short by now."""
    used = {"input_tokens": 990_000, "output_tokens": 7}
    records = []
    for record in path([words("a")], [words("answer 1")], [words("b")], [words("answer 2")]):
        data = json.loads(record.line)
        data["message"] |= {"usage": used} if data["type"] == "assistant" else {}
        records.append(Record(json.dumps(data), record.uuid))
    shown = mending.shown([*records[:2], SHORTER[how], *records[2:]])
    answers = [entry for entry in transcript.parse_records(shown).entries if entry.kind == "assistant"]
    assert [entry.data["message"]["usage"] for entry in answers] == [{"input_tokens": 0, "output_tokens": 0}, used]
    thoughts_alone = mending.shown([*records, mending.leave_out("thinking")])
    assert thoughts_alone == records


def test_a_summary_of_everything_ends_with_an_answer_and_what_follows_hangs_on_it() -> None:
    records = path([words("a")], [words("answer 1")])
    mark = mending.summary("a was said", None, "sonnet", "2026-11-21T10:00:00.000Z")
    shown = mending.shown([*records, mark])
    assert [entry.kind for entry in transcript.parse_records(shown).path] == ["user", "assistant"]
    leaf = transcript.parse_records(shown).leaf
    scribe = Scribe(SESSION, Path("/somewhere"), "2.1.330", 1_800_000_000.0, leaf)
    later = [scribe.record(Message.user("b"), "sonnet"), scribe.record(Message.assistant("answer 2"), "sonnet")]
    again = mending.shown([*records, mark, *later])
    assert again[:2] == shown
    assert told(again)[2:] == [["b"], ["answer 2"]]


def test_the_newest_head_on_the_path_is_the_one_that_holds() -> None:
    tools = ({"name": "f", "description": "", "schema": {}, "strict": False},)
    records = [*path([words("a")]), Head("A", "A").as_record(), Head("A", "A at 10:00", tools).as_record()]
    assert mending.head_of(records) == Head("A", "A at 10:00", tools)
    assert mending.head_of(path([words("a")])) is None
    assert told(mending.shown(records)) == [["a"]]


def test_what_was_mended_at_an_import_is_told_until_a_turn_of_ours_follows() -> None:
    note = Note("ids_rewritten", 2)
    imported = [*path([words("a")], [words("answer")]), mending.imported([note]), mending.imported([note])]
    assert mending.mended_at_import(imported) == [Note("ids_rewritten", 4)]
    (ours,) = path([words("b")])
    assert mending.mended_at_import([*imported, Record(ours.line, ours.uuid)]) == []


GOOD = [
    mending.fitted({"x": words("[An image was left out here.]"), "y": IMAGE}),
    mending.leave_out("thinking"),
    Head("A", None).as_record(),
    mending.summary("text", None, "sonnet", "2026-11-21T10:00:00.000Z"),
    mending.imported([Note("ids_rewritten")]),
]
BAD = [
    {"mark": "leave_out", "what": "everything", "since": None, "refused": False},
    {"mark": "leave_out", "what": [], "since": None, "refused": False},
    {"mark": "leave_out", "what": "images", "since": None},
    {"mark": "head", "system": 1, "tools": []},
    {"mark": "head", "system": "A", "tools": [{"nam": "f"}]},
    {"mark": "summary", "text": "t", "kept_from": None, "model": "m", "at": "t", "uuids": []},
    {"mark": "imported", "notes": [{"code": "x"}]},
    {"mark": "fitted", "instead": []},
    {"mark": "fitted", "instead": {"x": {"type": "image", "source": {}}}},
    {"mark": "other"},
    {},
]


@pytest.mark.parametrize("mark", GOOD)
def test_marks_of_ours_are_sound(mark: Record) -> None:
    assert mending.is_mark(mark)
    assert mending.is_sound(mark)


@pytest.mark.parametrize("fields", BAD)
def test_marks_that_we_do_not_make_are_not(fields: dict[str, Any]) -> None:
    mark = Record(json.dumps({"type": "cli-session-proxy/mark", **fields}, separators=(",", ":")))
    assert mending.is_mark(mark)
    assert not mending.is_sound(mark)


@pytest.mark.parametrize("line", ['{"a":NaN}', '{"a":-Infinity}', "[1]", "text"])
def test_what_no_cli_would_load_is_no_record(line: str) -> None:
    """It would leave out all that is before it, too."""
    assert not mending.is_sound(Record(line))
