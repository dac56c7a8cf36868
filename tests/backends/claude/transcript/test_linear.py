"""An agent's shell may write anything into its transcript. What is written there is read in linear time and memory."""

from __future__ import annotations

import hashlib
import json
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cli_session_proxy.backends.claude import transcript
from cli_session_proxy.backends.claude.process.turn_reader import SYNTHETIC_MODEL
from cli_session_proxy.backends.claude.sessions import capture
from cli_session_proxy.backends.claude.transcript import Entry, Reader, at_once, check, mending
from cli_session_proxy.backends.claude.transcript import entries as entries_module
from cli_session_proxy.backends.claude.transcript.loading import as_loaded
from cli_session_proxy.domain.models import Record, Session
from cli_session_proxy.errors import SessionBusy

from ....until import POLL

SESSION = "5e551011-0000-4000-8000-000000000001"
MANY = 20_000
SECONDS = 10.0  # of the processor; what is quadratic takes minutes


def record(uuid: str, parent: str | None, kind: str = "user", **more: Any) -> dict[str, Any]:
    message = {"role": kind, "content": more.pop("content", "words"), **more.pop("message", {})}
    return {"type": kind, "uuid": uuid, "parentUuid": parent, "message": message, **more}


def entries(*lines: dict[str, Any]) -> list[Entry]:
    return [Entry(json.dumps(line), line) for line in lines]


def rewinds() -> object:
    notes = [{"type": "last-prompt", "rewound": True, "leafUuid": "nobody"}] * MANY
    lines = [*({"type": "note", "n": n} for n in range(MANY)), *notes]
    return transcript.parse("\n".join(map(json.dumps, lines)).encode())


def unknown_kinds() -> object:
    """One behind the other, and all that is known behind the last one."""
    odd = [record(f"o{n}", f"o{n - 1}" if n else None, "odd") for n in range(MANY)]
    return as_loaded(entries(*odd, *(record(f"u{n}", f"o{MANY - 1}") for n in range(MANY))))


def made_up_answers() -> object:
    """One behind the other, and prompts behind the last one."""
    model = {"model": SYNTHETIC_MODEL}
    made_up = [record(f"a{n}", f"a{n - 1}" if n else "frame", "assistant", message=model) for n in range(MANY)]
    prompts = (record(f"u{n}", f"a{MANY - 1}") for n in range(MANY))
    return capture.up_to_end_of_turn(entries(record("frame", None), *made_up, *prompts), "frame")


def copies() -> object:
    known = entries(*(record(f"u{n}", None, content=f"word {n}") for n in range(MANY)))
    other = entries(*(record(f"v{n}", None, content=f"thing {n}") for n in range(MANY)))
    asked = ({"type": "text", "text": f"thing {MANY - 1}"},)
    return capture.is_copied(known, other, wholly=False), capture.lacks_prompts(other, other, asked)


def marks() -> object:
    """Of a chain that was imported: no transcript can hold one."""
    told = [Record(json.dumps(record(f"u{n}", None)), f"u{n}") for n in range(MANY)]
    left_out = [mending.leave_out("thinking", f"u{MANY - 1}") for _ in range(MANY)]
    fitted = (mending.fitted({f"{n}": {"type": "text", "text": "x"}}) for n in range(MANY))
    return mending.shown([*told, *left_out, *fitted])


def left_out() -> object:
    """Thoughts that stand before those that they hang on, and words behind the last one."""
    thought = {"content": [{"type": "thinking", "thinking": "x", "signature": "y"}]}
    lines = [record(f"t{n}", f"t{n + 1}", "assistant", **thought) for n in range(MANY)]
    lines += (record(f"u{n}", "t0") for n in range(MANY))
    told = mending.shown([*(Record(json.dumps(line), line["uuid"]) for line in lines), mending.leave_out("thinking")])
    assert len(told) == MANY
    return told


WORK = (rewinds, unknown_kinds, made_up_answers, copies, marks, left_out)


@pytest.mark.parametrize("work", WORK, ids=lambda one: one.__name__)
@pytest.mark.sample(3)
def test_many_of_a_kind_are_read_in_linear_time(work: Callable[[], object]) -> None:
    began = time.process_time()
    work()
    assert time.process_time() - began < SECONDS


def test_what_others_said_behind_a_turn_is_told_from_it_in_linear_time(tmp_path: Path) -> None:
    path = tmp_path / f"{SESSION}.jsonl"
    own = [record("frame", None), *({"type": "note", "n": n} for n in range(MANY)), record("a", "frame", "assistant")]
    others = [record(f"u{n}", "a" if n == 0 else f"u{n - 1}", "assistant" if n % 2 else "user") for n in range(MANY)]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in (*own, *others)))
    ready = cast(Any, type("Ready", (), {})())
    ready.leaf, ready.results, ready.no_prompt, ready.prompt, ready.rewound = None, {}, False, (), frozenset()
    ready.session = Session(SESSION, 1, None, str(path), "", 1.0)
    ready.process = SimpleNamespace(launch=SimpleNamespace(confined=False))
    said = cast(Any, type("Said", (), {"frame_uuid": "frame", "calls": frozenset(), "as_cli_has_it": ()})())
    began = time.process_time()
    taken = capture.Captures(cast(Any, None))._from_appended(Reader(path), ready, said)
    assert time.process_time() - began < SECONDS
    assert taken is not None
    assert len(taken.records) == len(own)


def test_what_stands_beside_many_blocks_is_not_said_again_with_each(tmp_path: Path) -> None:
    """It was two gigabytes of a transcript of a megabyte."""
    path = tmp_path / f"{SESSION}.jsonl"
    blocks = [{"type": "text", "text": "x"}] * 2000
    line = record("u", None, content=blocks, toolUseResult="x" * 1_000_000)
    path.write_text(f"{json.dumps(line)}\n")
    verdict = check(path, None, [])
    assert verdict is not None
    assert verdict.found == "unreadable"
    assert "beside its blocks" in verdict.note


@pytest.mark.timeout(30)
def test_a_record_that_hangs_on_itself_and_is_left_out_ends_the_path() -> None:
    """It was looked for without end, by the next record that hangs on it."""
    thought = {"content": [{"type": "thinking", "thinking": "x", "signature": "y"}]}
    lines = [record("a", None), record("b", "b", "assistant", **thought), record("c", "b")]
    records = [Record(json.dumps(line), line["uuid"]) for line in lines]
    shown = mending.shown([*records, mending.leave_out("thinking")])
    assert [(one.uuid, json.loads(one.line)["parentUuid"]) for one in shown] == [("a", None), ("c", None)]


@pytest.mark.timeout(30)
def test_an_answer_of_the_clis_own_that_hangs_on_itself_holds_nobody_up() -> None:
    """Three lines of a shell's in its transcript: the event loop, which reads what is short, never came back."""
    made_up = record("a", "a", "assistant", message={"model": SYNTHETIC_MODEL})
    lines = entries(record("frame", None), made_up, record("u", "a"), record("b", "frame", "assistant"))
    assert [entry.uuid for entry in capture.up_to_end_of_turn(lines, "frame")] == ["frame", "b"]


def test_a_long_path_is_written_line_by_line(tmp_path: Path) -> None:
    """A path of 240 MB was joined and encoded at once, which blocked the interpreter for 2.5 s."""
    named = f'"sessionId":"{SESSION[::-1]}"'  # another session's, so each line is changed
    records = [Record(f'{{"uuid":"u{n}",{named},"text":"{"x" * 100_000}"}}', f"u{n}") for n in range(300)]
    path = tmp_path / f"{SESSION}.jsonl"
    tracemalloc.start()
    mark = transcript.write(path, records, SESSION)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 3_000_000
    assert (mark.size, mark.sha256) == (path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())


def test_transcripts_of_very_many_values_are_read_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes a gigabyte and more while it is read, and several agents can write one."""
    monkeypatch.setattr(entries_module, "MANY_VALUES", 100)
    monkeypatch.setattr(at_once, "PATIENCE", POLL)
    lines = [json.dumps(record(f"u{n}", f"u{n - 1}" if n else None)) for n in range(100)]
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(lines) + "\n")

    def found_by_another() -> str:
        with ThreadPoolExecutor(1) as other:
            verdict = other.submit(check, path, None, [Record(line) for line in lines]).result()
        assert verdict is not None
        return verdict.found

    assert found_by_another() == "equal"
    read = [transcript.parse(path.read_bytes()), transcript.parse(path.read_bytes())]  # nobody waits for himself
    with pytest.raises(SessionBusy, match="others like it are being read"):
        found_by_another()
    read.pop()
    with pytest.raises(SessionBusy, match="others like it are being read"):
        found_by_another()
    read.clear()
    assert found_by_another() == "equal"
    with pytest.raises(OSError, match="values in one line"):
        transcript.parse(b"[" + b"0," * 600_000 + b"0]\n")
    assert found_by_another() == "equal"


@pytest.mark.parametrize("hides_in", ["records that follow", "records instead", "a record of the chain"])
def test_a_verdict_keeps_few_values_that_the_chain_does_not_know(tmp_path: Path, hides_in: str) -> None:
    """It is used while files are written, when other agents' transcripts are read."""
    many = {"toolUseResult": [0] * 300_000}
    chain = [record(f"u{n}", f"u{n - 1}" if n else None) for n in range(3)]
    theirs = [
        line | many if hides_in == "a record of the chain" else record(f"{line['uuid']}x", f"u{n + 2}") | many
        for n, line in enumerate(chain)
    ]
    path = tmp_path / "t.jsonl"
    expected = [Record(json.dumps(line), line["uuid"]) for line in chain]
    read = {"records that follow": chain, "records instead": [], "a record of the chain": []}[hides_in]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in [*read, *theirs]))
    verdict = check(path, None, expected)
    assert verdict is not None
    assert (verdict.found, verdict.pairs, verdict.unknown) == ("unreadable", (), ())
    large = [Record(json.dumps(line), line["uuid"]) for line in (one | many for one in chain)]
    path.write_text("".join(f"{one.line}\n" for one in large))
    verdict = check(path, None, large)
    assert verdict is not None
    assert verdict.found == "equal"
    assert at_once.Place._count == 0
