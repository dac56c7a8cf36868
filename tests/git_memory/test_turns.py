"""What a turn is told of earlier attempts, and how an attempt is committed: on the in-memory backend."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from cli_session_proxy import cli
from cli_session_proxy.backends.base import Adoptable, Execution, Job
from cli_session_proxy.domain.evidence import Evidence
from cli_session_proxy.domain.models import Block, Message
from cli_session_proxy.engine.committing import CommitOrder
from cli_session_proxy.errors import ConfigError, InvalidRequest, NotFound
from cli_session_proxy.export import shown
from cli_session_proxy.git_memory.records import CLOSE, LONGEST, OPEN, read
from cli_session_proxy.settings import Settings, load
from cli_session_proxy.stores import held
from cli_session_proxy.stores.sql import store

from ..engine.test_core import core, turns, words
from ..memory_backend import echo
from ..serving import serving
from ..talking import ask
from .repository import Repo, attempt

SUMMARY = {
    "headline": "waited for the lock", "root_cause": "two writers", "fix": "none that holds",
    "reasoning": "a lock was the least", "investigation": ["read db.py", "ran the test"], "confidence": "low",
    "why_it_failed": "a second race",
}  # fmt: skip


@pytest.fixture
def repo(tmp_path: Path) -> Repo:
    return Repo(tmp_path / "repo")


@pytest.fixture
def settings(tmp_path: Path, repo: Repo) -> Settings:
    profiles = {
        "fixer": {"git_memory": {"repo": str(repo.path), "fix_id": "login-500"}},
        "own": {"git_memory": {"repo": str(repo.path)}},
        "lost": {"git_memory": {"repo": str(tmp_path / "nowhere")}},
    }
    return Settings(var=tmp_path / "var", claude_config_dir=tmp_path / "config", profiles=profiles, profile="fixer")  # type: ignore[arg-type]


class Summarising:
    """Answers as `echo`, and with a summary where one is asked for."""

    def __init__(self, **changes: Any) -> None:
        self.summary = json.dumps({**SUMMARY, **changes})

    async def __call__(self, path: Sequence[Message]) -> Sequence[Block]:
        if "This conversation ends here" in str(path[-1].content):
            return ({"type": "text", "text": self.summary},)
        return await echo(path)


# --- told


async def test_the_first_turn_is_told_and_the_next_ones_extend_it(settings: Settings, repo: Repo) -> None:
    commit = repo.commit(attempt(1))
    async with core(settings) as (engine, backend):
        first = await ask(engine, "fix it")
        await ask(engine, "go on")
        one, two = (words(path) for path in backend.seen)
        dump = shown.turn(first, ())
    assert one[0].startswith(OPEN)
    assert one[0].endswith(CLOSE)
    assert "cause 1" in one[0]
    assert one[1:] == ["fix it"]
    assert two == [*one, "go on"]
    assert first.input == (Message.user("fix it"),)  # what the client said stays what it said
    assert Evidence.from_json(first.evidence.as_json()) == first.evidence
    assert dump["reason"]["recalled"] == {"fix_id": "login-500", "commits": [commit], "text": one[0]}
    assert dump["says"] == [f"The model was shown 1 earlier attempt at login-500, from commits {commit[:12]}."]


async def test_a_chain_that_begins_anew_is_told_again_what_is_new_by_then(settings: Settings, repo: Repo) -> None:
    repo.commit(attempt(1))
    async with core(settings) as (engine, backend):
        await ask(engine, "fix it")
        repo.commit(attempt(2))
        await ask(engine, "go on")
        await ask(engine, "try again", fresh=True)
        await ask(engine, "one", "two", "three", agent="b")  # a history that its client brings along
        await ask(engine, "one", "two", "three", "You said: three (3)", "four", agent="b")
        await ask(engine, "one", "two", "three, in other words", agent="b")
    told = [[text.count("> Attempt ") for text in words(path) if text.startswith(OPEN)] for path in backend.seen]
    assert told == [[1], [1], [2], [2], [2], [2]]


async def test_without_an_attempt_a_fix_or_words_nothing_is_told(settings: Settings, repo: Repo) -> None:
    repo.commit(attempt(1, fix="a"))
    async with core(settings) as (engine, backend):
        await ask(engine, "fix it")  # at login-500
        await ask(engine, "fix it", agent="a", profile="own", fresh=True)
        await ask(engine, "fix it", agent="b", profile="own")
        await ask(engine, "fix it", agent="a", profile="-", fresh=True)
        await ask(engine, "fix it", agent="a", profile="own", owner="eve")
        evidence = [turn.evidence.recalled for turn in await turns(engine)]
    assert [words(path)[0].startswith(OPEN) for path in backend.seen] == [False, True, False, False, False]
    assert [one is not None for one in evidence] == [False, True, False]


async def test_a_repository_that_is_not_there_fails_the_turn_in_words(settings: Settings) -> None:
    async with core(settings) as (engine, backend):
        with pytest.raises(ConfigError, match="no such directory"):
            await ask(engine, "fix it", profile="lost")
        assert backend.seen == []
        await ask(engine, "fix it")


async def test_a_secret_in_a_commit_does_not_reach_the_model(settings: Settings, repo: Repo) -> None:
    repo.commit(attempt(1, why="the key sk-ant-api03-abcdefghijkl was wrong"))
    async with core(settings) as (engine, backend):
        await ask(engine, "fix it")
    assert "sk-ant" not in words(backend.seen[0])[0]
    assert "[redacted]" in words(backend.seen[0])[0]


def test_settings_are_checked(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"

    def loaded(text: str) -> Settings:
        mine.write_text(f"[profiles.f.git_memory]\n{text}")
        return load(config=mine)

    memory = loaded("repo = '.'\nattempts = 3\nfix_id = 'a b'").profiles["f"].git_memory
    assert memory is not None
    assert (memory.repo, memory.attempts, memory.fix_id) == (tmp_path, 3, "a b")
    for wrong in (
        "",
        "repo = '.'\nattempts = 0",
        "repo = '.'\nfix_id = ' a'",
        "repo = '.'\nfix_id = \"a\\nb\"",
        "repo='.'\nx=1",
    ):
        with pytest.raises(ConfigError, match="git_memory"):
            loaded(wrong)
    (tmp_path / "cli_session_proxy.toml").write_text("[profiles.f.git_memory]\nrepo = '.'")
    with pytest.raises(ConfigError, match="found in the working directory cannot"):
        load()


# --- committed


async def test_a_long_conversation_is_counted_until_its_attempt_is_committed(
    settings: Settings, repo: Repo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the model was asked for a summary it was not: of a hundred commits each had its path in memory."""
    counted: list[int] = []

    class Counting(Summarising):
        async def __call__(self, path: Sequence[Message]) -> Sequence[Block]:
            counted.append(engine.holds.bytes.total())
            return await super().__call__(path)

    async with core(settings, Counting()) as (engine, backend):  # type: ignore[arg-type]
        turn, prepare = await ask(engine, "fix it"), backend.prepare

        async def prepared(job: Job) -> Execution | Adoptable:
            await engine.store.path(turn.id)  # a CLI's backend reads the path that it writes down
            return await prepare(job)

        monkeypatch.setattr(backend, "prepare", prepared)
        monkeypatch.setattr(store, "UNCOUNTED", 0)
        await engine.commit("local", "a", CommitOrder())
        assert counted[0] == 0 < counted[-1]
        assert not engine.holds.bytes
        # Another turn with this conversation does not fit beside it: it would wait for its own commit.
        monkeypatch.setattr(held, "MOST_OF_AN_OWNER", counted[-1] * 3 // 2)
        monkeypatch.setattr(held, "PATIENCE", 0.1)
        with pytest.raises(InvalidRequest, match="too long for a summary"):
            await engine.commit("local", "a", CommitOrder())
        assert await engine.commit("local", "a", CommitOrder(by_model=False))
        assert not engine.holds.bytes
    assert repo.message()


async def test_an_attempt_is_committed_with_what_the_agent_says_of_it(settings: Settings, repo: Repo) -> None:
    repo.commit(attempt(1, why="it only waited"))
    async with core(settings, Summarising()) as (engine, backend):  # type: ignore[arg-type]
        last = [await ask(engine, word) for word in ("fix it", "run the test")][-1]
        done = await engine.commit("local", "a", CommitOrder(outcome="failed"))
        kept = await turns(engine)
        agent = await engine.store.agent("local", "a")
        names = [row.agent.agent_id async for row in engine.store.summaries()]
        assert agent is not None
        assert (agent.head, len(kept), names) == (last.id, 2, ["a"])  # the side turn is in no chain
        asked = words(backend.seen[-1])
        await ask(engine, "go on")
    assert "This conversation ends here" in asked[-1] or "This conversation ends here" in asked[-2]
    assert "run the test" in asked
    assert (done.attempt, done.commit) == (2, repo("rev-parse", "HEAD"))
    (found,) = read(repo.message())
    assert found.headline == "Failed attempt 2: waited for the lock"
    assert found.trailers == {
        "Fix-Id": "login-500", "Attempt": "2", "Outcome": "failed", "Agent": "a", "Model": "sonnet", "Turns": "2",
        "Tokens": found.trailers["Tokens"], "Confidence": "low", "Why-It-Failed": "a second race",
    }  # fmt: skip
    assert found.sections == {
        "Task": "fix it", "Root cause": "two writers", "Fix": "none that holds", "Reasoning": "a lock was the least",
        "Investigation": "1. read db.py\n2. ran the test",
        "Previous attempts": "- attempt 1 (haiku, failed): it only waited",
    }  # fmt: skip


async def test_without_the_model_the_chain_alone_is_written(settings: Settings, repo: Repo) -> None:
    repo.commit("base")
    async with core(settings) as (engine, backend):
        for word in ("fix it", "run\nthe test"):
            await ask(engine, word)
        count = len(backend.seen)
        done = await engine.commit(
            "local", "a", CommitOrder(outcome="failed", why="still red", by_model=False, note="HEAD")
        )
        assert len(backend.seen) == count
    (found,) = read(done.message)
    assert found.sections["Investigation"].startswith("1. fix it → You said: fix it (1)\n2. run the test → You said")
    assert found.trailers["Why-It-Failed"] == "still red"
    assert (found.headline, done.note) == ("Failed attempt 1: fix it", True)


async def test_what_is_written_is_bounded_and_holds_no_secret(settings: Settings, repo: Repo) -> None:
    key = "sk-ant-api03-abcdefghijkl"
    model = Summarising(root_cause=f"{key} " + "x" * 70_000, headline=f"found {key}")
    async with core(settings, model) as (engine, _):  # type: ignore[arg-type]
        for number in range(5):
            await ask(engine, f"{number} {key} " + "y" * 30_000)
        for wanted in (CommitOrder(why=f"because {key}"), CommitOrder(why=key, by_model=False)):
            done = await engine.commit("local", "a", wanted)
            assert len(done.message) <= LONGEST
            assert "sk-ant" not in repo.message()
            assert len(read(done.message)) == 1


async def test_a_failed_side_turn_leaves_nothing_behind(settings: Settings, repo: Repo) -> None:
    class Broken(Summarising):
        async def __call__(self, path: Sequence[Message]) -> Sequence[Block]:
            if "This conversation ends here" in str(path[-1].content):
                raise NotFound("the model is gone")
            return await echo(path)

    async with core(settings, Broken()) as (engine, _):  # type: ignore[arg-type]
        await ask(engine, "fix it")
        with pytest.raises(NotFound, match="the model is gone"):
            await engine.commit("local", "a", CommitOrder())
        assert [row.agent.agent_id async for row in engine.store.summaries()] == ["a"]
        with pytest.raises(NotFound):
            await engine.commit("local", "nobody", CommitOrder())
        await ask(engine, "hello", agent="b", profile="-")
        with pytest.raises(InvalidRequest, match="names no repository"):
            await engine.commit("local", "b", CommitOrder())
        await engine.rewind("local", "a", "-1")
        with pytest.raises(InvalidRequest, match="no turn yet"):
            await engine.commit("local", "a", CommitOrder())
    assert repo("rev-list", "--all") == ""


async def test_the_route_takes_no_path_and_stands_behind_the_gate(
    settings: Settings, repo: Repo, tmp_path: Path
) -> None:
    other = Repo(tmp_path / "other")
    settings.port = 0
    async with core(settings, Summarising()) as (engine, _), serving(engine, settings) as url:  # type: ignore[arg-type]
        await ask(engine, "fix it", agent="a/b")
        async with httpx.AsyncClient(base_url=url, timeout=30) as http:
            for wrong in (
                {"repo": str(other.path)}, {"options": ["--all"]}, {"outcome": "maybe"}, {"why": 1}, {"fix_id": "a\nb"},
                {"note": "--all"}, {"note": ":/x"}, {"model": "no"}, {"outcome": "failed", "model": False},
                {"fixid": "x"},
            ):  # fmt: skip
                answer = await http.post("/chains/a%2Fb/commit", json=wrong)
                assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request"), wrong
            away = {"Origin": "http://evil.example"}
            assert (await http.post("/chains/a%2Fb/commit", json={}, headers=away)).status_code == 400
            assert (await http.post("/chains/nobody/commit", json={})).status_code == 404
            assert repo("rev-list", "--all") == ""
            answer = await http.post(
                "/chains/a%2Fb/commit", json={"outcome": "passed", "fix_id": "other", "why": "green"}
            )
    assert answer.status_code == 200
    assert answer.json()["commit"] == repo("rev-parse", "HEAD")
    assert other("rev-list", "--all") == ""
    (found,) = read(repo.message())
    assert (found.fix_id, found.failed, found.trailers["Outcome"]) == ("other", False, "passed")


# --- the commands


async def test_the_commands_write_and_print_it(
    settings: Settings, repo: Repo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with core(settings) as (engine, _):
        await ask(engine, "fix it")
    await asyncio.to_thread(_commands, repo, tmp_path, capsys)


def _commands(repo: Repo, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text(
        f"profile = 'f'\n[profiles.f.git_memory]\nrepo = '{repo.path}'\nfix_id = 'login-500'\n[profiles.fixer]\n"
    )

    def run(*words: str, code: int = 0) -> str:
        with pytest.raises(SystemExit) as ended:
            cli.main([words[0], *words[1:]])
        assert (ended.value.code or 0) == code
        out, error = capsys.readouterr()
        return out + error

    at = ("--config", str(mine))
    (repo.path / "a").write_text("1")
    repo("add", "a")
    words = ("commit", "a", *at, "--var", str(tmp_path / "var"), "--repo", str(repo.path), "--no-model")
    said = run(*words, "--fix-id", "login-500", "--outcome", "failed", "--why", "red", "--", "--author=Alan <a@b>")
    assert f"attempt 1 at login-500 committed as {repo('rev-parse', 'HEAD')}" in said
    assert repo("log", "-1", "--format=%an") == "Alan"
    assert repo("ls-tree", "--name-only", "HEAD") == "a"
    said = run(*words, "--fix-id", "login-500", "--note", "HEAD")
    assert "attempt 2 at login-500 noted on" in said
    assert "Why-It-Failed: red" in run("memory", *at)
    assert "Why-It-Failed: red" in run("memory", "--repo", str(repo.path), "--fix-id", "login-500")
    assert "login-500: 2 attempts" in run("memory", "--repo", str(repo.path))
    assert json.loads(run("memory", *at, "--json"))["attempts"][0]["Attempt"] == "2"
    assert "nothing:" in run("memory", *at, "--fix-id", "other")
    (tmp_path / "empty").mkdir()
    assert "git init" in run("memory", "--repo", str(tmp_path / "empty"), code=2)
    assert "why" in run(*words, "--outcome", "failed", code=2)
    assert "there is no agent" in run("commit", "nobody", *words[2:], code=1)
