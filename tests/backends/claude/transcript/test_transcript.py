"""A transcript as text: compared, followed, written again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli_session_proxy.backends.claude import transcript
from cli_session_proxy.backends.claude.transcript import Entry, Reader, Scribe, comparing, entries
from cli_session_proxy.backends.claude.transcript.entries import TooMuchAppended
from cli_session_proxy.domain.limits import LINE_VALUES, VALUES, values_in
from cli_session_proxy.domain.models import Block, FileMark, Message, Record

SESSION = "11111111-1111-4111-8111-111111111111"
OTHER = "22222222-2222-4222-8222-222222222222"
MEGABYTE = 1024 * 1024


def _exchanges(count: int) -> list[Record]:
    scribe = Scribe(SESSION, Path("/somewhere"), "2.1.329", 1_700_000_000.0)
    records = []
    for number in range(count):
        records.append(scribe.record(Message.user(f"question {number}"), "sonnet"))
        records.append(scribe.record(Message.assistant(f"answer {number}"), "sonnet"))
    return records


def _write(path: Path, records: list[Record]) -> None:
    path.write_text("".join(f"{record.line}\n" for record in records), encoding="utf-8")


def test_what_was_written_is_equal_and_unchanged_until_somebody_touches_it(tmp_path: Path) -> None:
    path = tmp_path / f"{SESSION}.jsonl"
    records = _exchanges(2)
    mark = transcript.write(path, records, SESSION)
    assert transcript.is_unchanged(path, mark)
    assert mark.leaf == records[-1].uuid
    path.write_bytes(path.read_bytes())  # touched, and the same
    assert not transcript.is_unchanged(path, mark)
    verdict = transcript.check(path, mark, None)
    assert verdict is not None
    assert verdict.found == "equal"
    assert verdict.mark is not None
    assert transcript.is_unchanged(path, verdict.mark)


def test_a_file_with_its_old_times_is_not_unchanged(tmp_path: Path) -> None:
    path = tmp_path / f"{SESSION}.jsonl"
    mark = transcript.write(path, _exchanges(2), SESSION)
    data = path.read_bytes()
    with path.open("r+b") as file:
        file.write(data.replace(b"question 0", b"question X"))
    os.utime(path, ns=(mark.mtime_ns, mark.mtime_ns))
    assert path.stat().st_mtime_ns == mark.mtime_ns
    assert not transcript.is_unchanged(path, mark)


def test_a_mark_of_an_older_version_proves_nothing_by_its_times(tmp_path: Path) -> None:
    path = tmp_path / f"{SESSION}.jsonl"
    mark = transcript.write(path, _exchanges(2), SESSION)
    old = mark.as_json()
    del old["ctime_ns"]
    assert not transcript.is_unchanged(path, FileMark.from_json(old))
    verdict = transcript.check(path, FileMark.from_json(old), None)
    assert verdict is not None
    assert verdict.mark == mark


# --- loaded


def _append(path: Path, line: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(line)


def _overwrite(path: Path) -> None:
    data = path.read_bytes()
    with path.open("r+b") as file:
        file.write(data.replace(b"question 0", b"question X"))


def _append_of_a_sub_agent(path: Path) -> None:
    line = _exchanges(2)[-1].line
    assert '"isSidechain":false' in line
    _append(path, line.replace('"isSidechain":false', '"isSidechain":true') + "\n")


def _move_away_and_back(path: Path) -> None:
    os.rename(path, path.with_suffix(".away"))
    os.rename(path.with_suffix(".away"), path)


def _replace(path: Path) -> None:
    path.with_suffix(".new").write_bytes(path.read_bytes())
    os.replace(path.with_suffix(".new"), path)


def _write_again(path: Path) -> None:
    """At a time that is no whole millisecond."""
    path.write_bytes(path.read_bytes())
    now = time.time_ns() // 1_000_000 * 1_000_000 + 500_000
    os.utime(path, ns=(now, now))


CHANGES: dict[str, list[Callable[[Path], object]]] = {
    "gone": [lambda path: path.unlink()],
    "another_file": [_replace],
    "content": [_overwrite, lambda path: path.write_text("", encoding="utf-8")],
    "records": [
        lambda path: _append(path, _exchanges(1)[0].line + "\n"),
        lambda path: _append(path, '{"type":'),
        _append_of_a_sub_agent,
    ],
    "touched": [_move_away_and_back, _write_again],
}


@pytest.mark.parametrize(("how", "change"), [(how, change) for how, every in CHANGES.items() for change in every])
def test_what_changed_while_a_process_loaded_it_is_named(
    how: str, change: Callable[[Path], object], tmp_path: Path
) -> None:
    path = tmp_path / f"{SESSION}.jsonl"
    mark = transcript.write(path, _exchanges(2), SESSION)
    reader, same = transcript.reread(path, mark)
    assert same == mark
    assert reader.holds(mark)
    change(path)
    with pytest.raises(transcript.TranscriptChanged) as changed:
        transcript.reread(path, mark)
    assert changed.value.how == how
    if how == "touched":
        transcript.reread(path, mark, lenient=True)
    else:
        with pytest.raises(transcript.TranscriptChanged):
            transcript.reread(path, mark, lenient=True)


def test_times_that_the_cli_sets_when_it_resumes_are_allowed(tmp_path: Path) -> None:
    path = tmp_path / f"{SESSION}.jsonl"
    mark = transcript.write(path, _exchanges(2), SESSION)
    now = time.time_ns() // 1_000_000 * 1_000_000 + 1_000_000
    os.utime(path, ns=(now, now))
    _, touched = transcript.reread(path, mark)
    assert touched != mark
    assert transcript.is_unchanged(path, touched)
    os.utime(path, ns=(now + 500_000, now + 500_000))
    with pytest.raises(transcript.TranscriptChanged):
        transcript.reread(path, mark)


def test_notes_that_the_cli_adds_when_it_loads_are_allowed(tmp_path: Path) -> None:
    path = tmp_path / f"{SESSION}.jsonl"
    mark = transcript.write(path, _exchanges(2), SESSION)
    _append(path, '{"type":"mode","mode":"normal"}\n')
    reader, now = transcript.reread(path, mark)
    assert (now.size > mark.size, now.leaf) == (True, mark.leaf)
    assert reader.holds(now)
    assert transcript.is_unchanged(path, now)


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
    mark = transcript.write(path, records, SESSION)
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
    mark = transcript.write(path, records[:2], SESSION)
    reader = Reader.after(path, mark)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(f"{record.line}\n" for record in records[2:])
    got = reader.appended()
    assert got is not None
    parsed, now = got[0], got[1].mark
    assert [entry.uuid for entry in parsed.entries] == [record.uuid for record in records[2:]]
    whole = transcript.check(path, now, None)
    assert whole is not None
    assert whole.found == "equal"
    path.write_text("short", encoding="utf-8")
    assert got[1].appended() is None


def test_a_reader_reads_no_more_than_it_is_asked_to(tmp_path: Path) -> None:
    path = tmp_path / f"{SESSION}.jsonl"
    records = _exchanges(3)
    reader = Reader.after(path, transcript.write(path, records[:2], SESSION))
    more = "".join(f"{record.line}\n" for record in records[2:])
    _append(path, more)
    with pytest.raises(TooMuchAppended):
        reader.appended(len(more.encode()) - 1)
    assert reader.appended(len(more.encode())) == reader.appended()


def test_damage_to_what_was_read_is_no_part_of_a_readers_mark(tmp_path: Path) -> None:
    path = tmp_path / f"{SESSION}.jsonl"
    records = _exchanges(3)
    mark = transcript.write(path, records[:4], SESSION)
    reader = Reader.after(path, mark)
    _overwrite(path)
    _append(path, "".join(f"{record.line}\n" for record in records[4:]))
    got = reader.appended()
    assert got is not None
    assert (now := got[1].mark) is not None
    assert transcript.is_unchanged(path, now)
    assert transcript.check(path, now, None) is None  # the hash does not agree
    with pytest.raises(transcript.TranscriptChanged):
        Reader.after(path, mark)


# --- compared


def test_a_copy_under_new_uuids_is_equal_by_what_is_said(tmp_path: Path) -> None:
    """As CLI 1.0.120 copies a session with a prompt of two blocks; the last turn's records are its own."""
    path = tmp_path / f"{OTHER}.jsonl"
    entries = _said([["a", "b"], ["c"], ["a"], ["b"]])
    records = [entry.record() for entry in entries]
    copied = _split(entries[:2])
    own = [entries[2].with_parent(copied[-1].uuid), entries[3]]
    _write(path, [entry.record() for entry in (*copied, *own)])
    verdict = transcript.check(path, None, records)
    assert verdict is not None
    assert (verdict.found, [pair.state for pair in verdict.pairs]) == ("equal", ["equal"] * 5)  # one a block
    assert verdict.mark is not None
    assert verdict.mark.leaf == entries[3].uuid

    _write(path, [entry.record() for entry in (*copied[1:], *own)])
    lost = transcript.check(path, None, records)
    assert lost is not None
    assert lost.found == "different"
    _write(path, [entry.record() for entry in (*copied, entries[2], entries[3])])
    unhinged = transcript.check(path, None, records)
    assert unhinged is not None
    assert unhinged.found == "different"


def test_a_verdict_names_each_record_that_differs(tmp_path: Path) -> None:
    path = tmp_path / f"{SESSION}.jsonl"
    records = _exchanges(2)
    first, _, third, fourth = records
    other = Scribe(SESSION, Path("/somewhere"), "", 0.0).record(Message.user("else"), "sonnet")
    changed = Record(third.line.replace("question 1", "question X"), third.uuid)
    _write(path, [first, changed, fourth, other])
    verdict = transcript.check(path, None, records)
    assert verdict is not None
    assert [(pair.number, pair.state) for pair in verdict.pairs] == [
        (1, "equal"), (2, "lost"), (3, "changed"), (4, "equal"),
    ]  # fmt: skip
    assert [entry.uuid for entry in verdict.unknown] == [other.uuid]


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
        Message("user" if role == "user" else "assistant", (block,))
        for e in entries
        for role, block in e.message_blocks()
    ]
    return transcript.parse_records([scribe.record(message, "sonnet") for message in messages]).path


@given(st.lists(BLOCKS, min_size=1, max_size=6), st.integers(0, 6))
def test_a_copy_ends_where_its_words_do(blocks: list[list[str]], known: int) -> None:
    entries = _said(blocks)
    path = entries[:known]
    copy = [*_split(path), *entries[known:]]
    assert transcript.end_of_copy(path, copy) == len(_split(path))


@given(st.lists(BLOCKS, min_size=1, max_size=6), st.data())
def test_what_lacks_or_changes_a_word_is_no_copy(blocks: list[list[str]], data: st.DataObject) -> None:
    entries = _said(blocks)
    copy = _split(entries)
    at = data.draw(st.integers(0, len(copy) - 1))
    changed = Scribe(OTHER, Path("/"), "", 0.0).record(Message(copy[at].kind, ({"type": "text", "text": "d"},)), "m")  # type: ignore[arg-type]
    assert transcript.end_of_copy(entries, [*copy[:at], *transcript.parse_records([changed]).path]) is None
    assert transcript.end_of_copy(entries, copy[:-1]) is None


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


def test_the_total_cost_is_found_wherever_its_note_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "session.jsonl"
    note = b'{"type":"cost-state","totalCostUSD":0.5}\n'
    monkeypatch.setattr(entries, "CHUNK", len(note))
    for behind in range(3 * len(note)):
        path.write_bytes(note + b"x" * behind)
        assert transcript.total_cost(path) == 0.5
    path.write_bytes(b"x" * 100)
    assert transcript.total_cost(path) == 0.0


@pytest.mark.parametrize("total", ["1" + 400 * "0", "-1", "1e999", "NaN", '"1"', "[" * 5000])
def test_a_total_that_is_no_sum_is_none(total: str, tmp_path: Path) -> None:
    path = tmp_path / "session.jsonl"
    path.write_text(f'{{"type":"cost-state","totalCostUSD":{total}}}', encoding="utf-8")
    assert transcript.total_cost(path) == 0.0


# Cuts the file at the first, second, … call that is made while it is read, in a process that a fault may end.
_CUT = """
import os, sys
from pathlib import Path
from cli_session_proxy.backends.claude.transcript import total_cost

path = Path(sys.argv[1])
whole = path.read_bytes()
at, left = 0, 0
def cut(frame, event, argument):
    global left
    left -= 1
    if left == 0:
        os.truncate(path, 0)
while left <= 0:
    path.write_bytes(whole)
    at += 1
    left = at
    sys.setprofile(cut)
    total_cost(path)
    sys.setprofile(None)
print(at)
"""


def test_a_transcript_that_is_cut_while_its_cost_is_read_ends_no_process(tmp_path: Path) -> None:
    path = tmp_path / "session.jsonl"
    path.write_bytes(b'{"type":"note"}\n' * 10_000)
    done = subprocess.run([sys.executable, "-c", _CUT, str(path)], stdout=subprocess.PIPE, check=False, timeout=60)
    assert done.returncode == 0
    assert int(done.stdout) > 3


# --- more than is read


def _values(value: object) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(_values, inner))


SPELT = st.recursive(
    st.none() | st.integers() | st.text(alphabet='a,[{"\\', max_size=5),
    lambda one: st.lists(one) | st.dictionaries(st.text(alphabet=',"\\', max_size=2), one),
)


@given(SPELT, st.booleans())
def test_the_values_of_a_line_are_counted_without_reading_it(value: object, spaced: bool) -> None:
    text = json.dumps(value, separators=None if spaced else (",", ":"))
    assert _values(value) <= values_in(text.encode()) <= 2 * _values(value)


def _of(size: int, line: bytes) -> bytes:
    return line * (size // len(line))


TOO_MUCH = {
    "a line of very many values": b'{"a":[' + _of(3 * LINE_VALUES, b"[],") + b"[]]}\n",
    "a line of very many texts": b'{"a":[' + _of(12 * LINE_VALUES, b'"",') + b'""]}\n',
    "very many values in all": _of(12 * entries.MORE_VALUES, b'{"a":[' + _of(3000, b"[],") + b"[]]}\n"),
    "very many lines": _of(6 * entries.MORE_LINES, b"{}\n"),
    "very many empty lines": _of(6 * entries.MORE_LINES, b"\n"),
}


@pytest.mark.parametrize("more", TOO_MUCH.values(), ids=TOO_MUCH)
@pytest.mark.sample(3)
def test_a_file_of_more_than_can_be_read_beside_the_event_loop_is_unreadable(more: bytes, tmp_path: Path) -> None:
    path = tmp_path / f"{SESSION}.jsonl"
    records = _exchanges(2)
    mark = transcript.write(path, records, SESSION)
    reader = Reader.after(path, mark)
    with path.open("ab") as file:
        file.write(more)
    for by_mark, known in ((mark, None), (None, records)):
        verdict = transcript.check(path, by_mark, known)
        assert verdict is not None
        assert verdict.found == "unreadable"
        assert "it holds more" in verdict.note
    assert reader.appended() is None
    with pytest.raises(transcript.TranscriptChanged):
        transcript.reread(path, mark)


def test_more_bytes_than_can_be_read_are_unreadable_unless_the_chain_knows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"{SESSION}.jsonl"
    records = _exchanges(20)
    mark = transcript.write(path, records, SESSION)
    monkeypatch.setattr(entries, "MORE_BYTES", 100)
    for by_mark, known in ((mark, None), (None, records)):
        verdict = transcript.check(path, by_mark, known)
        assert verdict is not None
        assert verdict.found == "equal"
    _append(path, " " * 101)
    verdict = transcript.check(path, mark, None)
    assert verdict is not None
    assert verdict.found == "unreadable"
    assert Reader.after(path, mark).appended() is None


def test_more_bytes_than_can_be_read_are_refused_before_they_are(tmp_path: Path) -> None:
    """300 MB took 572 MB of memory, and their copy held every thread up."""
    path = tmp_path / f"{SESSION}.jsonl"
    records = _exchanges(20)
    mark = transcript.write(path, records, SESSION)
    os.truncate(path, 300 * 1024 * 1024)
    tracemalloc.start()
    try:
        for by_mark, known in ((mark, None), (None, None), (None, records), (mark, records)):
            verdict = transcript.check(path, by_mark, known)
            found = None if by_mark is None and known is None else "unreadable"
            assert (verdict and verdict.found) == found
        assert tracemalloc.get_traced_memory()[1] < 10 * 1024 * 1024
        with pytest.raises(OSError, match="larger"):
            entries.parse_file(path, sum(len(record.line) for record in records))
        assert tracemalloc.get_traced_memory()[1] < 10 * 1024 * 1024
    finally:
        tracemalloc.stop()


def test_more_records_than_are_looked_at_behind_the_path_are_unreadable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparing, "MOST_ADDED", 3)
    path = tmp_path / f"{SESSION}.jsonl"
    records = _exchanges(4)
    _write(path, records)
    found = [transcript.check(path, None, records[:known]) for known in (5, 4)]
    assert [verdict and verdict.found for verdict in found] == ["tail", "unreadable"]


@pytest.mark.parametrize(
    "prompt",
    [
        [{"type": "text", "text": "a,b[c{\"d\\" * (2 * MEGABYTE)}],
        [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A" * 60 * MEGABYTE}}],
        [{"type": "text", "text": ""}] * (VALUES // 3),
    ],
    ids=["text", "image", "blocks"],
)  # fmt: skip
@pytest.mark.sample(1)
def test_the_prompt_of_a_body_of_any_size_that_is_taken_can_be_read(prompt: list[Block]) -> None:
    scribe = Scribe(SESSION, Path("/somewhere"), "2.1.330", 1_700_000_000.0)
    [line] = [scribe.record(Message("user", tuple(prompt)), "sonnet").line]
    noted = json.dumps({"type": "queue-operation", "content": line})  # once more, as a text
    assert len(transcript.parse(f"{noted[: 64 * MEGABYTE]}\n{line}\n".encode()).path) == 1


def test_a_record_of_an_unknown_type_is_linked_over_for_every_cli(tmp_path: Path) -> None:
    """A CLI that goes over it does so only at times (2.1.330: not where turns were seconds apart)."""
    path = tmp_path / f"{SESSION}.jsonl"
    first, answer, *rest = _exchanges(2)
    link = Record(json.dumps({"type": "checkpoint", "uuid": "c", "parentUuid": answer.uuid}), "c")
    hung = [Record(rest[0].line.replace(str(answer.uuid), "c"), rest[0].uuid), rest[1]]
    transcript.write(path, [first, answer, link, *hung], SESSION)
    written = transcript.parse(path.read_bytes()).path
    assert [entry.uuid for entry in written] == [record.uuid for record in (first, answer, *rest)]
    assert written[2].parent == answer.uuid
