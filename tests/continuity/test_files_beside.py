"""Large tool results and sub-agents' transcripts lie beside a session's file: kept with the records, put back."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cli_session_proxy.backends.claude.transcript.files import gather, is_file, put_back
from cli_session_proxy.domain.models import Record
from cli_session_proxy.errors import SandboxError
from cli_session_proxy.settings import Profile
from turnfault.provider.script import ToolUse
from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings
from ..fakes import SESSION
from .talk import EngineTalk, talking

TOOLS = Profile(tools=("Bash(seq *)", "Task(general-purpose)"))
LARGE = "seq 1 20000"
AGENT = {"description": "look", "prompt": "look around", "subagent_type": "general-purpose"}


def _beside(talk: EngineTalk) -> dict[str, bytes]:
    folder = talk.transcript.with_suffix("")
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


async def test_they_are_there_again_after_a_wipe(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings(claude_bin=claude_2, profiles={"coder": TOOLS}, profile="coder")
    async with talking(settings, upstream) as talk:
        for call in (("Bash", {"command": LARGE}), ("Task", AGENT)):
            fact = talk.new_fact()
            upstream.when(fact.key, ToolUse([call]))
            await talk.tell(fact)
        files = _beside(talk)
        assert {Path(name).parts[0] for name in files} == {"tool-results", "subagents"}
        before = upstream.requests[-1]
        await talk.down()
        shutil.rmtree(talk.projects)
        await talk.up()
        await talk.tell()
        assert talk.turn.continuity == "rebuilt"
        assert _beside(talk) == files
        assert upstream.requests[-1].prefix_kept(before) == 1.0
        assert "20000" in files[next(name for name in files if name.startswith("tool-results"))].decode()


async def test_a_moved_session_takes_them_along(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings(claude_bin=claude_2, profiles={"coder": TOOLS}, profile="coder")
    async with talking(settings, upstream) as talk:
        fact = talk.new_fact()
        upstream.when(fact.key, ToolUse([("Bash", {"command": LARGE})]))
        await talk.tell(fact)
        files = _beside(talk)
        await talk.down()
        moved = settings.var.with_name("moved")
        settings.var.rename(moved)
        await talk.up(var=moved)
        await talk.tell()
        assert "moved" in [link.reason for link in await talk.links()]
        assert files
        assert _beside(talk) == files


def test_only_what_is_newer_is_gathered_and_comes_back_as_it_was(tmp_path: Path) -> None:
    transcript = tmp_path / "project" / f"{SESSION}.jsonl"
    folder = transcript.with_suffix("") / "tool-results"
    folder.mkdir(parents=True)
    (folder / "old.txt").write_text("old")
    mark = (folder / "old.txt").stat().st_mtime_ns
    data = bytes(range(256)) * 10
    (folder / "new.bin").write_bytes(data)
    records = gather(transcript, mark - 1)
    assert [is_file(record) for record in records] == [True, True]
    elsewhere = tmp_path / "elsewhere"
    assert put_back(elsewhere, records) == 2
    assert (elsewhere / SESSION / "tool-results" / "new.bin").read_bytes() == data
    assert put_back(elsewhere, records) == 0
    assert gather(tmp_path / "project" / "none.jsonl", None) == []


@pytest.mark.parametrize("name", ["../outside/x", "/etc/x", f"{SESSION}/../../x", "top-level.jsonl"])
def test_a_name_never_leaves_the_folder_of_a_session(tmp_path: Path, name: str) -> None:
    record = Record(f'{{"type":"cli-session-proxy/file","name":"{name}","data":"eA=="}}')
    with pytest.raises(SandboxError, match="no file's place"):
        put_back(tmp_path / "project", [record])
    assert not (tmp_path / "project").exists()
    assert not list(tmp_path.rglob("x"))
