"""`verify` names every difference between chain and transcripts, and changes nothing."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from cli_session_proxy import cli
from cli_session_proxy.backends.claude.sessions.adoption import adopt_session
from cli_session_proxy.backends.claude.sessions.verifying import Difference, SessionResult, Verified, Verifier
from cli_session_proxy.backends.claude.transcript import write
from cli_session_proxy.commands import terminal, verifying
from cli_session_proxy.domain.models import Agent, FileMark, Session
from cli_session_proxy.errors import ConfigError, NotFound
from cli_session_proxy.settings import Settings
from cli_session_proxy.stores.base import Store
from cli_session_proxy_store_conformance.samples import a_turn, accepted
from turnfault.provider.script import HeldReply
from turnfault.provider.upstream import Upstream

from ..clis import old_cli_in_full
from ..conftest import MakeSettings
from ..recovery.others import other_proxy
from ..talking import ask, heard, running
from ..until import until
from .test_adopt import TALK, line, said
from .test_adopt import write as write_lines
from .test_portable import store_of


class Staged:
    """An agent `a` whose session `path` is equal to its chain of two turns, without a CLI."""

    def __init__(self, settings: Settings, store: Store, path: Path, mark: FileMark) -> None:
        self.settings = settings
        self.store = store
        self.path = path
        self.mark = mark

    @property
    def lines(self) -> list[str]:
        return self.path.read_text().splitlines(keepends=True)

    def put(self, *lines: str) -> None:
        self.path.write_text("".join(lines))

    async def verify(self) -> Verified:
        (one,) = await verifying.verify(self.settings, None, "a")
        return one

    async def kinds(self) -> list[str]:
        return [difference.kind for difference in (await self.verify()).differences]


async def stage(settings: Settings, store: Store, folder: Path) -> Staged:
    source = write_lines(folder / "s.jsonl", TALK)
    done = await adopt_session(settings, store, "local", "a", str(source), lambda _: None, lambda _done, _whole: None)
    agent = await store.agent("local", "a")
    assert agent is not None
    assert agent.head is not None
    assert settings.claude_config_dir is not None
    slug = "".join(char if char.isascii() and char.isalnum() else "-" for char in str(settings.var.resolve()))
    path = settings.claude_config_dir / "projects" / f"{slug}-sandbox-agents-a" / f"{done.session_id}.jsonl"
    mark = write(path, await store.records(agent.head), done.session_id)
    await store.save_session(Session(done.session_id, agent.key, agent.head, str(path), "2.1.329", 1.0, mark))
    return Staged(settings, store, path, mark)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(var=tmp_path / "var", claude_config_dir=tmp_path / "config")


async def test_an_equal_chain_has_no_difference(settings: Settings, tmp_path: Path) -> None:
    async with store_of(settings) as store:
        staged = await stage(settings, store, tmp_path)
        found = await staged.verify()
    assert (found.sessions, found.records, found.differences, found.busy) == (1, 4, (), ())


async def test_every_difference_is_named(settings: Settings, tmp_path: Path) -> None:
    async with store_of(settings) as store:
        staged = await stage(settings, store, tmp_path)
        first, second, third, fourth = good = staged.lines

        staged.put(first, third, fourth)
        (lost,) = (await staged.verify()).differences
        assert (lost.kind, lost.record, lost.at_head) == ("lost", 2, True)
        assert "record 2 of 4 (assistant a1)" in lost.text

        moved_up = third.replace('"parentUuid": "a1"', '"parentUuid": "u1"')
        staged.put(first, second.replace("first", "forged"), moved_up, fourth)
        changed = (await staged.verify()).differences
        assert [one.record for one in changed] == [2, 3]
        assert "differs in its content" in changed[0].text
        assert "differs in its parentUuid" in changed[1].text

        staged.put(*good, fourth.replace('"a2"', '"a3"').replace('"u2"', '"a2"'), '{"cut')
        assert await staged.kinds() == ["unknown", "cut"]
        staged.put(second, first, third, fourth)
        assert await staged.kinds() == ["order"]
        staged.put("")
        assert await staged.kinds() == ["lost"] * 4

        elsewhere = staged.path.parent.with_name("-moved") / staged.path.name
        elsewhere.parent.mkdir()
        staged.put(*good)
        os.replace(staged.path, elsewhere)
        (moved,) = (await staged.verify()).differences
        assert moved.kind == "elsewhere"
        assert str(elsewhere) in moved.text
        elsewhere.unlink()
        assert await staged.kinds() == ["missing"]
        staged.path.mkdir()
        assert await staged.kinds() == ["unreadable"]


async def test_many_differences_of_one_kind_are_counted(settings: Settings, tmp_path: Path) -> None:
    lines = [one for n in range(50) for one in (
        line(f"u{n}", f"a{n - 1}" if n else None, "user", f"ask {n}"), line(f"a{n}", f"u{n}", "assistant", said("x")),
    )]  # fmt: skip
    long = write_lines(tmp_path / "long.jsonl", lines)
    async with store_of(settings) as store:
        await adopt_session(settings, store, "local", "b", str(long), lambda _: None, lambda _done, _whole: None)
        staged = await stage(settings, store, tmp_path)
        agent = await store.agent("local", "b")
        assert agent is not None
        assert agent.head is not None
        chain = await store.chain(agent.key)
        assert chain is not None
        path = Path(str(staged.path).replace("agents-a", "agents-b")).with_name(f"{chain.sessions[0].id}.jsonl")
        path.parent.mkdir()
        path.write_text("")
        (found,) = await verifying.verify(settings, None, "b")
    assert len(found.differences) == 21
    assert "80 more records of 100" in found.differences[-1].text


async def test_what_a_running_turn_writes_is_no_difference(settings: Settings, tmp_path: Path) -> None:
    async with store_of(settings) as store:
        staged = await stage(settings, store, tmp_path)
        agent = await store.agent("local", "a")
        assert agent is not None
        good = staged.lines
        staged.put(*good, good[0].replace('"u1"', '"u3"'))
        assert await staged.kinds() == ["unknown"]
        await accepted(store, a_turn(agent, "turn_q", agent.head, at=300.0, input=()))
        found = await staged.verify()
        assert (found.busy, found.differences) == ((staged.path.stem,), ())
        staged.put(*good[1:])
        assert await staged.kinds() == ["lost"]


async def test_an_unknown_agent_and_an_empty_var(settings: Settings) -> None:
    with pytest.raises(ConfigError, match="no store at"):
        await verifying.verify(settings, None, None)
    assert not settings.var.exists()
    by_default = settings.model_copy()
    by_default.model_fields_set.discard("var")
    assert await verifying.verify(by_default, None, None) == []
    with pytest.raises(NotFound):
        await verifying.verify(by_default, None, "nobody")
    assert not settings.var.exists()


def test_the_command_exits_1_on_a_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--var", str(tmp_path / "var"), "--claude-config-dir", str(tmp_path / "config")]
    source = write_lines(tmp_path / "s.jsonl", TALK)
    for args, code in (
        (["adopt", str(source), "--agent-id", "a", *options], 0),
        (["verify", *options], 0),
        (["verify", "a", "--json", *options], 0),
        (["adopt", str(source), "--agent-id", "a", *options], 1),
    ):
        with pytest.raises(SystemExit) as caught:
            cli.main(args)
        assert caught.value.code == code
    out = capsys.readouterr()
    assert "adopted 2 turns" in out.out
    assert '"equal": true' in out.out
    assert "turns already" in out.err


@old_cli_in_full
async def test_on_the_real_cli_beside_a_running_engine(
    claude: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings(claude_bin=claude)
    async with running(settings) as engine:
        for n in range(3):
            turn = await ask(engine, f"turn {n}")
        (found,) = await verifying.verify(settings, None, None)
        assert found.differences == ()
        assert found.sessions == (1 if "bundled" in str(claude) else 3)
        assert settings.claude_config_dir is not None
        (path,) = settings.claude_config_dir.glob(f"projects/*/{turn.session_id}.jsonl")
        lines = path.read_text().splitlines(keepends=True)
        at = next(n for n, one in enumerate(lines) if '"turn 1"' in one and json.loads(one).get("type") == "user")
        path.write_text("".join(lines[:at] + lines[at + 1 :]))
        (broken,) = await verifying.verify(settings, None, None)
        assert [difference.kind for difference in broken.differences] == ["lost"]
        difference: Difference = broken.differences[0]
        assert (difference.session_id, difference.tip) == (turn.session_id, turn.id)
        await ask(engine, "turn 3")
        (mended,) = await verifying.verify(settings, None, None)
        assert all(not one.at_head for one in mended.differences)
    assert upstream.requests[-1].user_texts() == [f"turn {n}" for n in range(4)]


@pytest.mark.full
async def test_prompts_that_the_old_cli_cuts_and_renames_are_no_difference(
    claude_1: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    """Such a prompt goes to CLI 1.0.120 in two blocks, and each resume copies it as two records with new uuids."""
    settings = make_settings(claude_bin=claude_1)
    said = ["/two is a path", "three", "look at @four now"]
    async with running(settings) as engine:
        for one in said:
            turn = await ask(engine, one)
            [found] = await verifying.verify(settings, None, None)
            assert (found.differences, found.notes) == ((), ())
    assert settings.claude_config_dir is not None
    [path] = settings.claude_config_dir.glob(f"projects/*/{turn.session_id}.jsonl")
    good = path.read_text(encoding="utf-8")
    for old, new in (("/two is a pat", "/two is a hat"), ("You said: three", "You said: trees")):
        assert old in good
        path.write_text(good.replace(old, new), encoding="utf-8")
        [found] = await verifying.verify(settings, None, None)
        assert found.differences
    path.write_text(good, encoding="utf-8")
    async with running(settings) as engine:
        again = await ask(engine, "six")
    assert again.continuity == "resumed"
    [found] = await verifying.verify(settings, None, None)
    assert found.differences == ()


async def test_what_a_killed_proxy_left_of_a_turn_is_a_note_and_no_difference(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = make_settings(claude_bin=claude_2)
    gate = HeldReply(after=1)
    upstream.when("two", gate)
    async with other_proxy(settings) as other:
        answer = await other.ask("one")
        assert answer is not None
        await other.tell("two")
        async with asyncio.timeout(60):
            await gate.reached.wait()
        assert settings.claude_config_dir is not None
        [path] = settings.claude_config_dir.glob("projects/*/*.jsonl")

        async def on_disk() -> bool:
            return '"two"' in path.read_text(encoding="utf-8")

        await until(on_disk)
        for note in (settings.var / "run").glob("*/[0-9]*"):
            os.killpg(int(note.name), signal.SIGKILL)
        await other.end(signal.SIGKILL)
    async with running(settings) as engine:  # settles what the dead proxy left
        agent = await engine.store.agent("local", "a")
        assert agent is not None
        assert agent.head == answer["turn"]
    [found] = await verifying.verify(settings, None, None)
    assert (found.differences, [note.kind for note in found.notes]) == ((), ["leftover"])
    where = ["--var", str(settings.var), "--claude-config-dir", str(settings.claude_config_dir)]
    with pytest.raises(SystemExit) as caught:
        await asyncio.to_thread(cli.main, ["verify", *where])
    assert caught.value.code == 0
    assert "of a turn that was not kept after the path" in capsys.readouterr().out
    async with running(settings) as engine:
        await ask(engine, "three")
    assert heard(upstream) == ["one", "three"]
    [found] = await verifying.verify(settings, None, None)
    assert (found.differences, found.notes) == ((), ())


async def test_what_takes_long_shows_how_far_it_is_in_a_terminal_only(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session = Verifier.session

    async def slow(self: Verifier, agent: Agent, one: Session) -> SessionResult:
        # one agent: the path to its head was read, its session is to be compared
        await until(lambda: "50%" in (told := capsys.readouterr().err) and "verifying" in told)
        return await session(self, agent, one)

    async with store_of(settings) as store:
        staged = await stage(settings, store, tmp_path)
        monkeypatch.setattr(terminal, "SOON", 0.0)
        await staged.verify()
        assert "verifying" not in capsys.readouterr().err
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setattr(Verifier, "session", slow)
        assert await staged.kinds() == []
