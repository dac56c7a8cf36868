"""Adopting a session that the CLI made by itself: the next turn remembers it, and the original is not touched."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from cli_session_proxy.backends.claude.sessions import adoption
from cli_session_proxy.backends.claude.sessions.adoption import ForeignTranscript
from cli_session_proxy.backends.claude.sessions.exchanges import exchanges
from cli_session_proxy.backends.claude.transcript import Entry, files
from cli_session_proxy.commands import moving, verifying
from cli_session_proxy.commands.stored import opened_or_new
from cli_session_proxy.domain.models import Message
from cli_session_proxy.errors import InvalidRequest, NotFound
from cli_session_proxy.sandbox import make_private
from cli_session_proxy.settings import Settings
from turnfault.provider.script import Reply, ToolUse
from turnfault.provider.upstream import Upstream

from ..backends.claude.transcript.test_places import refusing
from ..clis import old_cli_in_full
from ..conftest import MakeSettings
from ..matrix import rest_in_full
from ..media import document, image, picture
from ..talking import ask, running

SESSION = "11111111-1111-4111-8111-111111111111"


def line(uuid: str, parent: str | None, kind: str, content: Any, **more: Any) -> dict[str, Any]:
    """A record as the CLI writes it, with what the chain reads."""
    message = {"role": kind, "content": content} | ({"id": f"msg_{uuid}", "model": "m"} if kind == "assistant" else {})
    at = {"timestamp": f"2026-11-20T10:00:{len(uuid):02}.000Z"}
    base = {"type": kind, "uuid": uuid, "parentUuid": parent, "sessionId": SESSION, "version": "2.1.329"}
    return base | at | {"message": message} | more


def note(kind: str) -> dict[str, Any]:
    return {"type": kind, "sessionId": SESSION}


def said(words: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": words}]


TALK = [
    line("u1", None, "user", "one"),
    line("a1", "u1", "assistant", said("first")),
    line("u2", "a1", "user", "two"),
    line("a2", "u2", "assistant", said("second")),
]


def write(path: Path, lines: list[dict[str, Any]], rest: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(one) + "\n" for one in lines) + rest)
    return path


def cut(path: Path) -> list[tuple[str, str, bool]]:
    found = ForeignTranscript(path)
    return [
        (one.input[0].content[0]["text"] if one.input else "", "".join(b["text"] for b in one.output), one.complete)
        for one in exchanges(found.entries(lambda _done, _whole: None))
    ]


async def adopted(settings: Settings, wanted: str | Path, agent: str | None = "a") -> adoption.Adopted:
    return await moving.adopt(settings, "local", str(wanted), agent)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(var=tmp_path / "var", claude_config_dir=tmp_path / "config")


# --- cutting


def test_records_are_cut_at_each_prompt_of_a_person(tmp_path: Path) -> None:
    lines = [
        note("queue-operation"), *TALK[:2], note("cost-state"), TALK[2],
        line("c2", "u2", "assistant", [{"type": "tool_use", "id": "t1", "name": "Read", "input": {}}]),
        line("r2", "c2", "user", [{"type": "tool_result", "tool_use_id": "t1", "content": "x"}]),
        line("n2", "r2", "user", "<task-notification>done</task-notification>", promptSource="system"),
        line("a2", "n2", "assistant", said("second")),
        line("m3", "a2", "user", "caveat", isMeta=True),
        line("u3", "m3", "user", "three"),
        line("a3", "u3", "assistant", said("third")),
        note("last-prompt"),
    ]  # fmt: skip
    path = write(tmp_path / "s.jsonl", lines)
    assert cut(path) == [("one", "first", True), ("two", "second", True), ("three", "third", True)]
    groups = list(exchanges(ForeignTranscript(path).entries(lambda _done, _whole: None)))
    assert [entry.data["type"] for group in groups for entry in group.entries] == [one["type"] for one in lines]
    assert [block["type"] for block in groups[1].tools] == ["tool_use", "tool_result"]


def test_a_slash_command_is_a_turn_only_where_the_model_answers_it(tmp_path: Path) -> None:
    command = "<command-name>/review</command-name>"
    asked = [*TALK[:2], line("k1", "a1", "user", command), line("a3", "k1", "assistant", said("reviewed"))]
    assert cut(write(tmp_path / "a.jsonl", asked)) == [("one", "first", True), (command, "reviewed", True)]
    local = [
        *TALK[:2], line("k1", "a1", "user", command), line("k2", "k1", "user", "<local-command-stdout>x"),
        line("u3", "k2", "user", "three"), line("a3", "u3", "assistant", said("third")),
    ]  # fmt: skip
    assert cut(write(tmp_path / "b.jsonl", local)) == [("one", "first", True), ("three", "third", True)]


def test_only_the_path_to_the_last_record_is_kept_with_its_parallel_tools(tmp_path: Path) -> None:
    """As CLI 2.1.329 writes two calls in one message: the second call and its result stand beside the path."""

    def call(uuid: str, parent: str, number: int) -> dict[str, Any]:
        one = line(uuid, parent, "assistant", [{"type": "tool_use", "id": f"t{number}", "name": "Read", "input": {}}])
        one["message"]["id"] = "msg_both"
        return one

    def result(uuid: str, parent: str, number: int) -> dict[str, Any]:
        return line(uuid, parent, "user", [{"type": "tool_result", "tool_use_id": f"t{number}", "content": "x"}])

    lines = [
        *TALK[:2],
        line("old", "a1", "user", "edited away"), line("olda", "old", "assistant", said("never mind")),
        line("u2", "a1", "user", "two"), call("c1", "u2", 1), call("c2", "c1", 2),
        result("r2", "c2", 2), result("r1", "c1", 1), line("a2", "r1", "assistant", said("second")),
    ]  # fmt: skip
    found = ForeignTranscript(write(tmp_path / "s.jsonl", lines))
    assert found.kept == {"u1", "a1", "u2", "c1", "c2", "r1", "r2", "a2"}
    assert found.dropped == 2
    assert cut(found.path) == [("one", "first", True), ("two", "second", True)]


def test_a_record_that_hangs_on_nothing_is_joined_and_a_broken_line_is_told(tmp_path: Path) -> None:
    lines = [*TALK[:2], line("u2", "gone", "user", "two"), TALK[3]]
    found = ForeignTranscript(write(tmp_path / "s.jsonl", lines, '{"cut'))
    entries: list[Entry] = list(found.entries(lambda _done, _whole: None))
    assert [entry.parent for entry in entries] == [None, "u1", "a1", "u2"]
    assert json.loads(entries[2].line)["parentUuid"] == "a1"
    assert len(list(found.notes())) == 2


def test_a_path_goes_on_before_a_compaction(tmp_path: Path) -> None:
    boundary = line(
        "b", None, "system", "", subtype="compact_boundary", logicalParentUuid="a2", compactMetadata={"n": 1}
    )
    summary = line("s", "b", "user", "summary", isCompactSummary=True)
    lines = [*TALK, boundary, summary, line("u3", "s", "user", "three"), line("a3", "u3", "assistant", said("third"))]
    path = write(tmp_path / "s.jsonl", lines)
    groups = list(exchanges(ForeignTranscript(path).entries(lambda _done, _whole: None)))
    assert [one[0] for one in cut(path)] == ["one", "two", "three"]
    assert [group.compacted for group in groups] == [None, None, {"n": 1}]


# --- refusals


async def test_an_unknown_session_says_where_it_was_looked_for(settings: Settings) -> None:
    with pytest.raises(NotFound, match=f"{settings.claude_config_dir}/projects"):
        await adopted(settings, SESSION)
    with pytest.raises(NotFound, match="no file"):
        await adopted(settings, "/no/such/file.jsonl")
    with pytest.raises(NotFound):
        await adopted(settings, "../../*")


@pytest.mark.parametrize("text", ["", "hello\n" * 500, '{"a": 1}\n', '{"type":"summary"}\n'])
async def test_another_kind_of_file_is_refused(settings: Settings, tmp_path: Path, text: str) -> None:
    (tmp_path / "x.jsonl").write_text(text)
    with pytest.raises(InvalidRequest, match="not a transcript"):
        await adopted(settings, tmp_path / "x.jsonl")


@pytest.mark.parametrize("kind", ["link", "pipe"])
async def test_a_link_or_a_pipe_of_a_sessions_name_is_not_its_transcript(
    settings: Settings, tmp_path: Path, kind: str
) -> None:
    """A confined agent writes into its own folder there. A link was followed to another agent's words."""
    projects = tmp_path / "config" / "projects"
    write(tmp_path / "others.jsonl", TALK)
    (projects / "its").mkdir(parents=True)
    planted = projects / "its" / f"{SESSION}.jsonl"
    if kind == "link":
        planted.symlink_to(tmp_path / "others.jsonl")
    else:
        os.mkfifo(planted)
    with pytest.raises(NotFound):
        await adopted(settings, SESSION)
    write(projects / "real" / f"{SESSION}.jsonl", TALK)
    assert (await adopted(settings, SESSION)).source.parent == projects / "real"


async def test_a_link_that_takes_the_place_of_the_file_that_was_found_is_not_followed(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a confined agent's program could put there at any moment."""
    write(tmp_path / "others.jsonl", TALK)
    file = write(tmp_path / "config" / "projects" / "its" / f"{SESSION}.jsonl", TALK)
    find = files.find_elsewhere

    def find_and_lose(config_dir: Path, session_id: str, but: Collection[Path]) -> list[Path]:
        found = find(config_dir, session_id, but)
        file.unlink()
        file.symlink_to(tmp_path / "others.jsonl")
        return found

    monkeypatch.setattr(files, "find_elsewhere", find_and_lose)
    with pytest.raises(InvalidRequest, match="a link"):
        await adopted(settings, SESSION)


async def test_two_files_of_one_session_must_be_named(settings: Settings, tmp_path: Path) -> None:
    for folder in ("one", "two"):
        write(tmp_path / "config" / "projects" / folder / f"{SESSION}.jsonl", TALK)
    with pytest.raises(InvalidRequest, match="several files"):
        await adopted(settings, SESSION)


async def test_an_agent_with_turns_is_not_written_over(settings: Settings, tmp_path: Path) -> None:
    path = write(tmp_path / "s.jsonl", TALK)
    await adopted(settings, path)
    with pytest.raises(InvalidRequest, match="turns already"):
        await adopted(settings, path)
    (state,) = await verifying.verify(settings, None, "a")
    assert len(state.unwritten) == 1
    assert not state.differences


async def test_an_open_exchange_is_cut_and_said_so(settings: Settings, tmp_path: Path) -> None:
    path = write(tmp_path / "s.jsonl", [*TALK, line("u3", "a2", "user", "three")])
    done = await adopted(settings, path)
    assert (done.turns, done.records) == (2, 4)
    assert "still open" in done.notes[0]
    with pytest.raises(InvalidRequest, match="no finished exchange"):
        await adopted(settings, write(tmp_path / "open.jsonl", TALK[:1]), "b")


async def test_a_refused_adoption_leaves_nothing(settings: Settings, tmp_path: Path) -> None:
    path = write(tmp_path / "open.jsonl", TALK[:1])
    (tmp_path / "open" / "tool-results").mkdir(parents=True)
    (tmp_path / "open" / "tool-results" / "x.txt").write_text("large")
    with pytest.raises(InvalidRequest):
        await adopted(settings, path)
    assert await verifying.verify(settings, None, None) == []
    assert not list((tmp_path / "config").rglob("x.txt"))


# --- on the real CLI


async def by_hand(claude: Path, env: dict[str, str], cwd: Path, config: Path, *prompts: str) -> Path:
    """What a person does in a directory of their own, turn by turn; the transcript of the last session."""
    os.mkdir(cwd)
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin", **env, "CLAUDE_CONFIG_DIR": str(config), "TMPDIR": str(cwd)}
    session = ""
    for prompt in prompts:
        args = ["-p", "--output-format=json", "--model=sonnet", "--allowedTools=Read"]
        process = await asyncio.create_subprocess_exec(
            claude, *args, *([f"--resume={session}"] if session else []), cwd=cwd, env=env,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        async with asyncio.timeout(60):
            output, _ = await process.communicate(prompt.encode())
        session = json.loads(output)["session_id"]
    return adoption.find_source(config / "projects", session)


@old_cli_in_full
async def test_the_next_turn_remembers_what_a_person_did_with_the_cli(
    claude: Path, make_settings: MakeSettings, upstream: Upstream, claude_env: dict[str, str], tmp_path: Path
) -> None:
    settings = make_settings(claude_bin=claude)
    assert settings.claude_config_dir is not None
    for name in ("x", "y"):
        (tmp_path / f"{name}.txt").write_text(f"content of {name}")
    reads = [("Read", {"file_path": str(tmp_path / f"{name}.txt")}) for name in ("x", "y")]
    upstream.when("read both", ToolUse(reads, text="reading"))
    source = await by_hand(
        claude, claude_env, tmp_path / "elsewhere", settings.claude_config_dir,
        "remember a = 1", "read both", "remember b = 2",
    )  # fmt: skip
    before = upstream.requests[-1]
    original = source.read_bytes()

    done = await adopted(settings, source.stem)
    assert done.turns == 3
    async with running(settings) as engine:
        turn = await ask(engine, "recall")
        told = upstream.requests[-1].texts()
        again = await ask(engine, "list")
        dump = await engine.store.agent("local", "a")
        assert dump is not None
        chain = await engine.store.chain(dump.key)
    assert [role for role, _ in told if role == "user"] == ["user"] * len(heard_before(before)) + ["user"]
    assert [text for role, text in told][: len(before.texts())] == [text for _, text in before.texts()]
    assert told[-1] == ("user", "recall")
    assert "content of x" in str(told)
    assert "content of y" in str(told)
    assert again.output[0]["text"].endswith("list")
    assert source.read_bytes() == original
    assert turn.session_id != source.stem
    assert chain is not None
    (link,) = [link for link in chain.links if link.reason == "adopted"]
    assert (link.from_session, link.to_session) == (source.stem, done.session_id)
    assert link.detail["turns"] == 3
    (state,) = await verifying.verify(settings, None, "a")
    assert not state.differences
    tasks = settings.claude_config_dir / "tasks" / source.stem / "1.json"  # the person's own list stays theirs
    tasks.parent.mkdir(parents=True)
    tasks.write_text("{}")
    async with running(settings) as engine:
        assert await engine.delete("local", "a")
    assert source.read_bytes() == original
    assert tasks.exists()


def heard_before(seen: Any) -> list[str]:
    return [text for role, text in seen.texts() if role == "user"]


@old_cli_in_full
@pytest.mark.parametrize("way", rest_in_full("adopted", "imported"))
async def test_what_is_too_large_is_shown_smaller_and_kept_as_it_came(
    way: str, claude: Path, make_settings: MakeSettings, upstream: Upstream, tmp_path: Path
) -> None:
    """The thought behind it is void then; the one before it stays."""
    large, broken = picture(4000, 1000), document(b"no PDF" * 20)
    seen = [{"type": "tool_result", "tool_use_id": "t1", "content": [image(large)]}]
    thought = {"type": "thinking", "thinking": "hm", "signature": "c2VhbGVk"}
    lines = [
        line("u1", None, "user", "one"),
        line("a1", "u1", "assistant", said("first")),
        line("u2", "a1", "user", [image(large), broken, *said("look")]),
        line("c2", "u2", "assistant", [{"type": "tool_use", "id": "t1", "name": "Read", "input": {}}]),
        line("r2", "c2", "user", seen),
        line("a2", "r2", "assistant", [thought, *said("second")]),
        line("u3", "a2", "user", "three"),
        line("a3", "u3", "assistant", [thought, *said("third")]),
    ]  # fmt: skip
    settings, source = make_settings(claude_bin=claude), write(tmp_path / "s.jsonl", lines)
    agent = "a"
    if way == "adopted":
        await adopted(settings, source)
    else:
        await asyncio.to_thread(make_private, settings.var)
        async with opened_or_new(settings) as store:  # as an older version would have taken it in
            await adoption.adopt_session(
                settings, store, "local", "a", str(source), lambda _: None, lambda _done, _whole: None
            )
        await moving.export(settings, "local", "a", tmp_path / "a.export")
        await moving.import_(settings, "local", tmp_path / "a.export", "b")
        agent = "b"
    async with running(settings) as engine:
        first = await ask(engine, "and now?", agent=agent)
        assert {note.code: note.count for note in first.evidence.notes} == {
            "images_made_smaller": 1, "unreadable_documents_left_out": 1, "thinking_left_out": 2,
        }  # fmt: skip
        sent = upstream.requests[-1].raw.decode()
        assert large not in sent
        assert sent.count('"image"') == 2
        assert "[A document was left out here: it is not a PDF.]" in sent
        second = await ask(engine, "and then?", agent=agent)
        assert (second.evidence.notes, second.continuity in ("warm", "resumed")) == ((), True)
        assert second.parent_id == first.id
        assert upstream.requests[-1].prefix_kept(upstream.requests[-2]) > 0.97
        assert not upstream.refused
        look = Message("user", (image(large), broken, {"type": "text", "text": "look"}))
        again = await ask(engine, "one", "first", look, "second", "three", "third", "and?", agent=agent)
        assert again.placed.imported == 0  # known by what it was
    found = await verifying.verify(settings, None, None)
    assert [one.differences for one in found] == [()] * len(found)


async def test_what_this_user_may_not_read_beside_a_session_is_named(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was left out in silence. A program of the session can choose the name: it is printed without control
    characters."""
    source = write(tmp_path / f"{SESSION}.jsonl", TALK)
    for name in ("closed\x1b[2J/x.txt", "open/y.txt"):
        place = source.with_suffix("") / name
        place.parent.mkdir(parents=True)
        place.write_text(name)
    monkeypatch.setattr(os, "open", refusing("closed\x1b[2J"))  # the test may be root's, to whom nothing is closed
    some = await adopted(settings, source)
    monkeypatch.setattr(os, "open", refusing(source.with_suffix("")))
    none = await adopted(settings, source, "b")
    assert (some.files, none.files) == (1, 0)
    for done, left_out in ((some, f"{SESSION}/closed\ufffd[2J"), (none, SESSION)):
        told = f"note: this user may not read {left_out} beside the transcript, or it is too much: left out"
        assert told in moving.print_adopted(done)


async def test_a_compacted_session_goes_on_from_its_summary_and_files_come_along(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream, claude_env: dict[str, str], tmp_path: Path
) -> None:
    settings = make_settings(claude_bin=claude_2)
    assert settings.claude_config_dir is not None
    upstream.when("CRITICAL", Reply("<summary>All about a.</summary>"), times=None)
    source = await by_hand(
        claude_2, claude_env, tmp_path / "elsewhere", settings.claude_config_dir,
        "remember a = 1", "/compact", "remember b = 2",
    )  # fmt: skip
    beside = source.with_suffix("") / "tool-results" / "x.txt"
    beside.parent.mkdir(parents=True)
    beside.write_text("large")
    done = await adopted(settings, source)
    assert done.files == 1
    assert any("compacted" in note for note in done.notes)
    async with running(settings) as engine:
        turn = await ask(engine, "recall")
        agent = await engine.store.agent("local", "a")
        assert agent is not None
        rows = [row async for row in engine.store.turns(agent.key)]
    assert turn.output[0]["text"] == "I remember: b is 2."
    assert "All about a." in str(upstream.requests[-1].body["messages"])
    assert [row.input[0].content[0]["text"] for row in rows] == ["remember a = 1", "remember b = 2", "recall"]
    assert rows[1].evidence.compacted is not None
    (copy,) = settings.claude_config_dir.glob(f"projects/*/{done.session_id}/tool-results/x.txt")
    assert copy.read_text() == "large"


@pytest.mark.full
async def test_a_long_session_is_adopted_in_one_go(settings: Settings, tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = []
    parent = None
    for n in range(2000):
        lines += [line(f"u{n}", parent, "user", f"ask {n}"), line(f"a{n}", f"u{n}", "assistant", said("x" * 1000))]
        parent = f"a{n}"
    done = await adopted(settings, write(tmp_path / "s.jsonl", lines))
    assert (done.turns, done.records) == (2000, 4000)
