"""In a terminal of 80 columns no command breaks a word; in a pipe a line stays a line."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from cli_session_proxy.domain.models import Message
from cli_session_proxy.settings import Settings
from cli_session_proxy.stores.auto import store_for
from cli_session_proxy.stores.base import NewChain, WholeTurn

from ..fakes import turn

WORDS = " ".join(f"word{n}ends" for n in range(60))


def kept(var: Path) -> None:
    """An agent that nobody named; its first turn failed, for a long reason, and its second did not."""

    async def run() -> None:
        store = store_for(Settings(var=var))
        await store.open()
        error = {"code": "upstream_error", "message": WORDS}
        asked = (Message.user(WORDS),)
        rows = [
            turn(1, status="failed", input=asked, output=(), error=error, created_at=time.time()),
            turn(2, input=asked, output=({"type": "text", "text": WORDS},), created_at=time.time()),
        ]
        new = NewChain("local", "auto_0123456789abcdef", "auto", False, 1.0, time.time(), lambda: "turn_2")
        await store.import_chain(new, [WholeTurn(row, ()) for row in rows])
        await store.close()

    var.mkdir()
    asyncio.run(run())


def in_terminal(*words: str) -> list[str]:
    """What a terminal of 80 columns is shown, by line, without its colours."""
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (40, 80))
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    with subprocess.Popen(
        [sys.executable, "-m", "cli_session_proxy", *words], stdin=slave, stdout=slave, stderr=slave,
        env={**env, "TERM": "xterm"},
    ):  # fmt: skip
        os.close(slave)
        said = b""
        try:
            while piece := os.read(master, 65536):
                said += piece
        except OSError:  # the program has ended
            pass
    os.close(master)
    return [line.rstrip() for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said.decode()).splitlines()]


@pytest.mark.parametrize(
    "command", ["show auto_0123", "find word7ends", "find --status failed", "status", "chains", "verify"]
)
@pytest.mark.sample(3)
def test_no_word_is_broken_at_80_columns(command: str, tmp_path: Path) -> None:
    var = tmp_path / "v"
    kept(var)
    lines = in_terminal(*command.split(), "--var", str(var))
    assert lines
    for line in lines:
        words = line.split()
        assert len(line) <= 80 or len(words) == 1 or words[:2] == ["by", "hand"], line
        assert all(re.fullmatch(r"word\d+ends…?|word\d*\w*…", word) for word in words if word.startswith("word")), line


def test_an_agent_without_a_name_is_listed_by_its_first_question(tmp_path: Path) -> None:
    kept(tmp_path / "v")
    row = in_terminal("chains", "--var", str(tmp_path / "v"))[1]
    assert row.startswith("auto_0123 word0ends")
    assert "completed" not in row
    assert re.search(r" 2 {5,}\$", row), "no repairs: blank"
