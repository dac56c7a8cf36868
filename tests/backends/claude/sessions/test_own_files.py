"""A CLI that prefers a file of its own to the one that was verified: what it had loaded is known before it is kept."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from cli_session_proxy.domain.models import BlockDelta
from cli_session_proxy.testing.upstream import Upstream

from ....conftest import MakeSettings
from ....talking import ask, heard, request, running, text
from .test_loading import transcript_of

SAID = ["one", "two", "three", "four", "five"]

_PROGRAM = """#!{python} -IS
import os, pathlib, sys

argv = [{binary!r}, *sys.argv[1:]]
for at, option in enumerate(argv):
    own = pathlib.Path({own!r}.replace("ID", option[9:]))
    if option.startswith("--resume=") and own.exists():
        if own.parent.name == "own":
            os.environ["CLAUDE_CODE_PROJECT_DIR_NAME"] = "own"
        else:
            argv[at] = "--resume=" + str(own)
os.execv(argv[0], argv)
"""


def preferring(folder: Path, binary: Path, own: Path) -> Path:
    """A CLI that loads this file, where it is there, instead of that of session `ID`."""
    folder.mkdir()
    program = folder / "claude"
    program.write_text(_PROGRAM.format(python=sys.executable, binary=str(binary), own=str(own)))
    program.chmod(0o755)
    return program


@pytest.mark.parametrize("where", ["another folder", "another name"])
async def test_an_answer_from_a_file_of_the_clis_own_is_not_kept_and_the_turn_runs_on_the_whole_path(
    where: str, claude_2: Path, make_settings: MakeSettings, upstream: Upstream, tmp_path: Path
) -> None:
    projects = tmp_path / "claude-config" / "projects"
    async with running(make_settings(claude_bin=claude_2)) as engine:
        first = await ask(engine, SAID[0])
        mine = transcript_of(engine.settings, first)
        own = projects / "own" / "ID.jsonl" if where == "another folder" else mine.with_name("ID-own.jsonl")
        place = own.with_name(own.name.replace("ID", mine.stem))
        place.parent.mkdir(exist_ok=True)
        shutil.copy(mine, place)
        for said in SAID[1:]:
            await ask(engine, said)
    os.utime(place)
    settings = make_settings(claude_bin=preferring(tmp_path / "cli", claude_2, own))
    async with running(settings) as engine:
        answer = await engine.submit(request("six"))
        words = [str(one.delta["text"]) async for one in answer.events() if isinstance(one, BlockDelta)]
        turn = await answer.turn()
        answer.acknowledge()
        assert "".join(words) == text(turn) == "You said: six (6)"
        assert [attempt["status"] for attempt in turn.attempts] == ["failed", "completed"]
        assert (turn.continuity, turn.session_id != mine.stem) == ("rebuilt", True)
        assert heard(upstream) == [*SAID, "six"]
        await ask(engine, "seven")
    async with running(settings) as engine:
        last = await ask(engine, "eight")
    assert heard(upstream) == [*SAID, "six", "seven", "eight"]
    assert last.continuity == "resumed"
