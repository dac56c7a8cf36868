"""A transcript as text: compared, followed, written again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli_session_proxy.backends.claude import transcript
from cli_session_proxy.backends.claude.transcript import Entry, Reader, Scribe
from cli_session_proxy.domain.models import Message, Record

SESSION = "11111111-1111-4111-8111-111111111111"
OTHER = "22222222-2222-4222-8222-222222222222"


def _exchanges(count: int) -> list[Record]:
    scribe = Scribe(SESSION, Path("/somewhere"), "2.1.329", 1_700_000_000.0)
    records = []
    for number in range(count):
        records.append(scribe.record(Message.user(f"question {number}"), "sonnet"))
        records.append(scribe.record(Message.assistant(f"answer {number}"), "sonnet"))
    return records


def _write(path: Path, records: list[Record]) -> None:
    path.write_text("".join(f"{record.line}\n" for record in records), encoding="utf-8")


def test_what_was_written_is_equal_and_not_read_again(tmp_path: Path) -> None:
    path = tmp_path / f"{SESSION}.jsonl"
    records = _exchanges(2)
    mark = transcript.write(path, records, SESSION, strict_order=False)
    quick = transcript.quick_check(path, mark)
    assert quick is not None
    assert (quick.found, quick.read, mark.leaf) == ("equal", 0, records[-1].uuid)
    path.write_bytes(path.read_bytes())  # touched, and the same
    assert transcript.quick_check(path, mark) is None
    verdict = transcript.check(path, mark, None)
    assert verdict is not None
    assert verdict.found == "equal"


def _without_third(lines: list[str]) -> str:
    return "".join(lines[:2] + lines[3:])


def _cut(lines: list[str]) -> str:
    return "".join(lines)[:-20]


def _other_words(lines: list[str]) -> str:
    return "".join(lines).replace("question 0", "question X")


def _another_parent(lines: list[str]) -> str:
    third = json.loads(lines[2])
    return "".join([*lines[:2], json.dumps(third | {"parentUuid": OTHER}) + "\n", *lines[3:]])


@pytest.mark.parametrize("harm", [_without_third, _cut, _other_words, _another_parent])
def test_a_harmed_one_is_different(tmp_path: Path, harm: object) -> None:
    path = tmp_path / f"{SESSION}.jsonl"
    records = _exchanges(2)
    mark = transcript.write(path, records, SESSION, strict_order=False)
    assert callable(harm)
    path.write_text(harm(path.read_text(encoding="utf-8").splitlines(keepends=True)), encoding="utf-8")
    assert transcript.check(path, mark, None) is None
    verdict = transcript.check(path, None, records)
    assert verdict is not None
    assert verdict.found == "different"


def test_notes_and_another_spelling_change_nothing(tmp_path: Path) -> None:
    path = tmp_path / f"{SESSION}.jsonl"
    records = _exchanges(2)
    spelled = [json.dumps(json.loads(record.line), indent=None, separators=(", ", ": ")) for record in records]
    path.write_text("\r\n".join(['{"type":"summary"}', *spelled, '{"type":"mode"}']), encoding="utf-8")
    verdict = transcript.check(path, None, records)
    assert verdict is not None
    assert verdict.found == "equal"


def test_what_follows_the_path_is_a_tail(tmp_path: Path) -> None:
    path = tmp_path / f"{SESSION}.jsonl"
    records = _exchanges(3)
    _write(path, records)
    verdict = transcript.check(path, None, records[:4])
    assert verdict is not None
    assert (verdict.found, [entry.uuid for entry in verdict.tail]) == ("tail", [one.uuid for one in records[4:]])
    assert transcript.is_complete(verdict.tail)


def test_a_reader_reads_only_what_was_added_and_marks_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / f"{SESSION}.jsonl"
    records = _exchanges(3)
    mark = transcript.write(path, records[:2], SESSION, strict_order=False)
    reader = Reader(path, None)
    reader.skip_to(mark)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(f"{record.line}\n" for record in records[2:])
    got = reader.appended()
    assert got is not None
    parsed, now = got
    assert [entry.uuid for entry in parsed.entries] == [record.uuid for record in records[2:]]
    whole = transcript.check(path, now, None)
    assert whole is not None
    assert whole.found == "equal"
    path.write_text("short", encoding="utf-8")
    assert reader.appended() is None


BLOCKS = st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=3)


def _said(blocks: list[list[str]]) -> list[Entry]:
    """Messages of these texts, in turn the user's and the assistant's."""
    scribe = Scribe(SESSION, Path("/somewhere"), "1.0.120", 1_700_000_000.0)
    records = []
    for at, texts in enumerate(blocks):
        content = tuple({"type": "text", "text": text} for text in texts)
        records.append(scribe.record(Message("assistant" if at % 2 else "user", content), "sonnet"))
    return transcript.parse_records(records).path


def _split(entries: list[Entry]) -> list[Entry]:
    """As CLI 1.0.120 copies them: a record a block."""
    scribe = Scribe(OTHER, Path("/somewhere"), "1.0.120", 1_700_000_000.0)
    messages = [
        Message("user" if role == "user" else "assistant", (block,)) for e in entries for role, block in e.spoken()
    ]
    return transcript.parse_records([scribe.record(message, "sonnet") for message in messages]).path


@given(st.lists(BLOCKS, min_size=1, max_size=6), st.integers(0, 6))
def test_a_copy_ends_where_its_words_do(blocks: list[list[str]], known: int) -> None:
    entries = _said(blocks)
    path = entries[:known]
    copy = [*_split(path), *entries[known:]]
    assert transcript.copied_up_to(path, copy) == len(_split(path))


@given(st.lists(BLOCKS, min_size=1, max_size=6), st.data())
def test_what_lacks_or_changes_a_word_is_no_copy(blocks: list[list[str]], data: st.DataObject) -> None:
    entries = _said(blocks)
    copy = _split(entries)
    at = data.draw(st.integers(0, len(copy) - 1))
    changed = Scribe(OTHER, Path("/"), "", 0.0).record(Message(copy[at].kind, ({"type": "text", "text": "d"},)), "m")  # type: ignore[arg-type]
    assert transcript.copied_up_to(entries, [*copy[:at], *transcript.parse_records([changed]).path]) is None
    assert transcript.copied_up_to(entries, copy[:-1]) is None


def test_times_become_distinct_and_increasing_for_the_old_cli() -> None:
    lines = [record.line for record in _exchanges(2)]
    same = [line.replace(json.loads(line)["timestamp"], "2026-01-01T00:00:00.000Z") for line in lines]
    times = [json.loads(line)["timestamp"] for line in transcript.in_strict_order(same)]
    assert times == sorted(set(times))
    assert transcript.in_strict_order(lines) == lines


def test_a_session_id_is_changed_in_the_record_and_never_in_the_words() -> None:
    [record, _] = _exchanges(1)
    assert json.loads(transcript.with_session_id(record.line, OTHER))["sessionId"] == OTHER
    quoting = json.loads(record.line)
    quoting["message"]["content"] = f'{{"sessionId":"{SESSION}"}}'
    line = transcript.with_session_id(json.dumps(quoting, separators=(",", ":")), OTHER)
    assert json.loads(line)["message"] == quoting["message"]


def test_the_total_cost_is_the_last_note_of_it(tmp_path: Path) -> None:
    path = tmp_path / "session.jsonl"
    assert transcript.total_cost(path) == 0.0
    path.write_bytes(b"")
    assert transcript.total_cost(path) == 0.0
    quoted = json.dumps({"type": "user", "text": '{"type":"cost-state","totalCostUSD":9}'})
    notes = [f'{{"type":"cost-state","sessionId":"x","totalCostUSD":{total}}}' for total in (0.5, 0.75)]
    path.write_text("\n".join([notes[0], notes[1], quoted]), encoding="utf-8")
    assert transcript.total_cost(path) == 0.75
