"""Where the CLI keeps an agent's sessions: by its rule, and by where a file was seen to appear."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import threading
import unicodedata
from pathlib import Path

import pytest

from cli_session_proxy.backends.claude.process import environment
from cli_session_proxy.backends.claude.transcript import Projects, projects
from cli_session_proxy.domain.models import Turn
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.sandbox import Sandboxes
from cli_session_proxy.settings import Settings
from turnfault.provider.upstream import Upstream

from ....conftest import MakeSettings
from ....matrix import rest_in_full
from ....talking import ask, by_hand, claude, heard, running
from ....until import until

SESSION = "5e551011-0000-4000-8000-000000000001"
PLACES = {
    "an emoji": "😀 smile",
    "umlauts": "Schlüssel",
    "decomposed umlauts": unicodedata.normalize("NFD", "Schlüssel"),
    "over 200 characters": "x" * 90 + "/" + "y" * 90 + "/😀ü",
    "a link": "link",
}


def folders_of(settings: Settings) -> Projects:
    return Projects(settings, Sandboxes(settings), environment.config_dir(settings))


async def transcript_of(engine: Engine, turn: Turn) -> Path:
    session = await engine.store.session(turn.session_id or "")
    assert session is not None
    assert session.mark is not None
    return Path(session.transcript)


async def told(engine: Engine, upstream: Upstream) -> None:
    """Warm turns, one after the process was ended, what was said by hand, and nothing is left behind a delete."""
    turns = [await ask(engine, f"remember {number}") for number in range(3)]
    await claude(engine).pool.discard(turns[-1].session_id or "")
    turns.append(await ask(engine, "remember 3"))
    assert [turn.continuity for turn in turns] == ["started", "warm", "warm", "resumed"]
    assert heard(upstream) == [f"remember {number}" for number in range(4)]


@pytest.mark.parametrize("place", rest_in_full(*PLACES))
async def test_on_the_real_cli_turns_are_warm_wherever_var_lies(
    place: str, claude_2: Path, make_settings: MakeSettings, upstream: Upstream, tmp_path: Path
) -> None:
    var = tmp_path / PLACES[place]
    if place == "a link":
        (tmp_path / "real").mkdir()
        var.symlink_to(tmp_path / "real")
    settings = make_settings(claude_bin=claude_2, var=var)
    async with running(settings) as engine:
        await told(engine, upstream)
        turn = await ask(engine, "remember 4")
        file = await transcript_of(engine, turn)
        assert file == folders_of(settings).path(var / "sandbox" / "agents" / "a", file.stem)
        assert not (settings.var / "projects").exists()  # the rule was right
        agent = await engine.store.agent("local", "a")
        assert agent is not None
        assert (await engine.backend.compare(agent, turn)).found == "equal"
        await by_hand(settings, file.stem, "by hand")

        async def adopted() -> bool:
            now = await engine.store.agent("local", "a")
            return now is not None and now.head != turn.id

        await until(adopted)  # the watcher has told it
        await engine.delete("local", "a")
    assert not file.exists()


@pytest.mark.parametrize("binary", rest_in_full("claude_2", "claude_1"))
async def test_where_the_rule_is_not_the_clis_the_folder_is_learned(
    binary: str,
    request: pytest.FixtureRequest,
    make_settings: MakeSettings,
    upstream: Upstream,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A CLI of another rule, for which the rule of this test is made wrong; 1.0.120 does not cut long names."""
    if binary == "claude_2":
        rule = projects.plain_name
        monkeypatch.setattr(projects, "plain_name", lambda cwd: f"otherwise{rule(cwd)}")
    var = tmp_path / ("v" * (200 - len(str(tmp_path))))
    settings = make_settings(claude_bin=request.getfixturevalue(binary), var=var)
    async with running(settings) as engine:
        first = await ask(engine, "remember 0")
        second = await ask(engine, "remember 1")
        warm = "warm" if binary == "claude_2" else "resumed"  # 1.0.120 starts a process for each turn
        assert (first.continuity, second.continuity) == ("started", warm)
        file = await transcript_of(engine, second)
        assert await asyncio.to_thread(file.is_file)
        assert file.parent != projects.project_dir(environment.config_dir(settings), var / "sandbox" / "agents" / "a")
    # known to the next proxy, to the watcher, and to what only looks
    async with running(settings) as engine:
        third = await ask(engine, "remember 2")
        assert third.continuity == "resumed"
        assert heard(upstream) == ["remember 0", "remember 1", "remember 2"]
        agent = await engine.store.agent("local", "a")
        assert agent is not None
        compared = await engine.backend.compare(agent, third)
        assert compared.found == "equal"
        assert folders_of(settings).is_of_agents(file.parent)
        # a repair writes where this CLI looks
        file = await transcript_of(engine, third)
        await claude(engine).pool.discard(third.session_id or "")
        await asyncio.to_thread(file.unlink)
        fourth = await ask(engine, "remember 3")
        assert fourth.continuity == "rebuilt"
        assert heard(upstream) == [f"remember {number}" for number in range(4)]
        await engine.delete("local", "a")
    assert not list(environment.config_dir(settings).glob("projects/*/*.jsonl"))
    assert not list((var / "projects").iterdir())


async def test_a_new_session_is_whole_while_other_clis_remove_empty_folders(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    """Each does so some seconds after its start (2.1.332): here all the time. Without a file of its own in the folder,
    two of three first turns lost records, and the next one's request began with another head."""
    settings = make_settings(claude_bin=claude_2)
    root, ended = folders_of(settings).root, threading.Event()

    def remove() -> None:
        while not ended.wait(0.0005):
            for folder in root.glob("*"):
                with contextlib.suppress(OSError):
                    folder.rmdir()

    cleaning = asyncio.create_task(asyncio.to_thread(remove))
    try:
        async with running(settings) as engine:
            turns = [await ask(engine, "hello", agent=agent) for agent in ("a", "b", "c")]
    finally:
        ended.set()
        await cleaning
    assert [turn.evidence.records for turn in turns] == ["transcript"] * 3


def test_what_was_noted_is_for_one_place_and_is_forgotten_where_it_does_not_hold(tmp_path: Path) -> None:
    settings = Settings(var=tmp_path / "var", claude_config_dir=tmp_path / "config")
    cwd = settings.var / "sandbox" / "agents" / "a"
    cwd.mkdir(parents=True)
    there = tmp_path / "config" / "projects" / "elsewhere" / f"{SESSION}.jsonl"
    there.parent.mkdir(parents=True)
    there.touch()
    seen = folders_of(settings)
    guess = seen.path(cwd, SESSION)
    assert seen.written(cwd, guess, since=os.stat(there).st_mtime + 60) == guess  # it lay there before
    assert seen.written(cwd, guess, since=os.stat(there).st_mtime) == there
    assert folders_of(settings).path(cwd, SESSION) == there
    assert seen.folders(cwd) == {guess.parent, there.parent}

    moved = Settings(var=tmp_path / "moved", claude_config_dir=tmp_path / "config")
    shutil.copytree(settings.var, moved.var, symlinks=True)
    own = folders_of(moved)
    at = moved.var / "sandbox" / "agents" / "a"
    assert own.folder(at) == projects.project_dir(tmp_path / "config", at)

    seen.forget(cwd)
    assert seen.path(cwd, SESSION) == guess
    seen.forget(cwd)


def test_two_files_of_one_session_are_a_guess(tmp_path: Path) -> None:
    settings = Settings(var=tmp_path / "var", claude_config_dir=tmp_path / "config")
    cwd = settings.var / "sandbox" / "agents" / "a"
    for name in ("one", "two"):
        folder = tmp_path / "config" / "projects" / name
        folder.mkdir(parents=True)
        (folder / f"{SESSION}.jsonl").touch()
    seen = folders_of(settings)
    assert seen.written(cwd, seen.path(cwd, SESSION), since=0) == seen.path(cwd, SESSION)


@pytest.mark.parametrize("others", ["a session", "a note", "nothing"])
async def test_the_delete_of_a_confined_agent_takes_nothing_from_a_folder_that_others_use(
    claude_2: Path, make_settings: MakeSettings, others: str
) -> None:
    """Before it was confined, its CLI wrote where all agents' sessions are. What a model noted there may be others'."""
    settings = make_settings(claude_bin=claude_2)
    async with running(settings) as engine:
        agent = await engine.store.ensure_agent("local", "a", "a", named=True, now=0.0)
        boxes, known = Sandboxes(settings), folders_of(settings)
        cwd = boxes.prepare(agent.dir)
        shared = known.root / "shared"
        (shared / "memory").mkdir(parents=True)
        (shared / f"{SESSION}.jsonl").write_text("{}\n")
        assert known.written(cwd, known.path(cwd, SESSION), 0.0).parent == shared
        if others == "a note":
            other = boxes.prepare("b")
            assert known.written(other, known.path(other, SESSION), 0.0).parent == shared
        if others != "a session":
            (shared / f"{SESSION}.jsonl").unlink()
        own = projects.project_dir(known.config_dir, cwd)
        (own / "left").mkdir(parents=True)
        boxes.note_confined(agent.dir)
        assert await engine.delete("local", "a")
    there = {path.name for path in known.root.glob("shared/*")}
    assert there == {"a session": {f"{SESSION}.jsonl", "memory"}, "a note": {"memory"}, "nothing": set()}[others]
    assert not own.exists()


def test_a_sessions_lists_go_unless_a_person_has_the_session_and_no_confined_agents_folder_is_looked_into(
    tmp_path: Path,
) -> None:
    """Such an agent's program could hold up the deletion of all others."""
    settings = Settings(var=tmp_path / "var", claude_config_dir=tmp_path / "config")
    seen, config = folders_of(settings), tmp_path / "config"
    agents = settings.var / "sandbox" / "agents"
    seen.sandboxes.note_confined("confined")
    for folder in (seen.folder(agents / "confined"), config / "tasks" / SESSION):
        folder.mkdir(parents=True)
        (folder / f"{SESSION}.jsonl").touch()
    (config / "todos").mkdir()
    (config / "uploads").touch()  # nothing of the CLI
    for name in (f"{SESSION}-agent-1.json", "another.json"):
        (config / "todos" / name).touch()
    seen.remove_lists(agents / "a", {SESSION})
    assert [*map(str, config.glob("t*/*"))] == [str(config / "todos" / "another.json")]
    person = config / "projects" / "person" / f"{SESSION}.jsonl"
    for file in (person, config / "todos" / f"{SESSION}-agent-1.json"):
        file.parent.mkdir(exist_ok=True)
        file.touch()
    seen.remove_lists(agents / "a", {SESSION})
    assert len([*config.glob("todos/*")]) == 2
