"""A transcript in which the CLI took turns back, read as the CLI loads it."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cli_session_proxy.backends.claude.transcript import Reader, check, parse
from cli_session_proxy.backends.claude.transcript.entries import MAX_BYTES
from cli_session_proxy.domain.models import Record


@dataclass
class Session:
    """What a CLI would write, and the path that it holds."""

    lines: list[bytes] = field(default_factory=list)
    path: list[str] = field(default_factory=list)
    leaves: list[str | None] = field(default_factory=list)  # before each line

    def write(self, **data: Any) -> None:
        self.leaves.append(self.path[-1] if self.path else None)
        self.lines.append(json.dumps(data).encode() + b"\n")

    def say(self, kind: str, text: str) -> None:
        uuid, parent = f"u{len(self.lines)}", self.path[-1] if self.path else None
        message = {"role": kind, "content": [{"type": "text", "text": text}]}
        self.write(type=kind, uuid=uuid, parentUuid=parent, isSidechain=False, message=message)
        self.path.append(uuid)

    def turn(self, text: str) -> None:
        self.say("user", text)
        self.write(type="api-request", id=text)
        self.say("assistant", f"You said: {text}")

    def rewind(self, turns: int) -> None:
        del self.path[max(0, len(self.path) - 2 * turns) :]
        leaf = self.path[-1] if self.path else None
        self.write(type="last-prompt", lastPrompt="…", leafUuid=leaf, explicit=True, rewound=True, cutUuid="u")


STEPS = st.lists(st.one_of(st.just(0), st.integers(1, 4)), max_size=12)


def _session(steps: list[int]) -> Session:
    session = Session()
    for number, step in enumerate(steps):
        if step and session.path:
            session.rewind(step)
        else:
            session.turn(f"turn {number}")
    return session


@given(STEPS)
def test_what_was_taken_back_is_not_on_the_path(steps: list[int]) -> None:
    session = _session(steps)
    parsed = parse(b"".join(session.lines))
    assert [entry.uuid for entry in parsed.path] == session.path
    assert {entry.uuid for entry in parsed.entries if entry.uuid} == set(session.path)
    assert parsed.broken == 0


@given(STEPS, st.data())
def test_what_was_added_goes_on_from_the_leaf_or_says_where_it_went_back_to(
    steps: list[int], data: st.DataObject
) -> None:
    session = _session(steps)
    at = data.draw(st.integers(0, len(session.lines)))
    before = parse(b"".join(session.lines[:at]))
    added = parse(b"".join(session.lines[at:]))
    assert added.leaf_after(before.leaf) == (session.path[-1] if session.path else None)
    kept = [entry.uuid for entry in before.path]
    if added.cut is not None:
        kept = kept[: kept.index(added.cut.leaf) + 1] if added.cut.leaf is not None else []
    assert [*kept, *(entry.uuid for entry in added.path)] == session.path
    assert added.follows(before.leaf) == (kept == [entry.uuid for entry in before.path])


@given(STEPS, st.integers(1, 4))
def test_a_tree_is_equal_to_its_path_with_its_mark_and_without(steps: list[int], taken: int) -> None:
    session = _session([*steps, 0])
    known = [Record(line.decode().rstrip(), json.loads(line).get("uuid")) for line in session.lines]
    known = [record for record in known if record.uuid in session.path]
    with tempfile.TemporaryDirectory() as folder:
        _compare(session, known, taken, Path(folder) / "s.jsonl")


def _compare(session: Session, known: list[Record], taken: int, file: Path) -> None:
    def write() -> None:
        with file.open("ab") as appending:  # as a CLI does: the same file
            appending.write(b"".join(session.lines)[file.stat().st_size :])

    write()
    verdict = check(file, None, known)
    assert verdict is not None
    assert (verdict.found, verdict.leaf) == ("equal", session.path[-1])
    # A turn that fails, and is taken back: with the note of that, and while it is still to come.
    mark = verdict.mark
    assert mark is not None
    leaf, count = session.path[-1], len(session.lines)
    session.turn("failed")
    frame = f"u{count}"
    write()
    got = Reader.after(file, mark).appended(MAX_BYTES, {frame})
    assert got is not None
    assert (got[0].path, got[0].follows(leaf)) == ([], True)
    session.rewind(1)
    write()
    for after in (check(file, mark, None), check(file, None, known)):
        assert after is not None
        assert (after.found, after.leaf) == ("equal", leaf)
    # Taken back behind the mark's leaf, it is the path no more.
    session.rewind(taken)
    write()
    assert check(file, mark, None) is None
    other = check(file, mark, known)
    assert other is not None
    assert other.found == "different"


def test_a_compaction_is_not_taken_back() -> None:
    """A CLI that loads the file goes on from its summary, whatever its own note says."""
    session = Session()
    session.turn("one")
    before = list(session.path)
    session.say("user", "failed")
    session.write(
        type="system", subtype="compact_boundary", uuid="b", parentUuid=None, isSidechain=False, content="Compacted"
    )
    session.path = ["b"]
    session.turn("the summary")
    session.path = [*before, "unused", "unused"]
    session.rewind(1)
    parsed = parse(b"".join(session.lines))
    assert [entry.uuid for entry in parsed.path][: len(before)] == before
    assert "b" in {entry.uuid for entry in parsed.path}
