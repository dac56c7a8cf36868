"""docs/self-hosting.md, "Backup and restore": its very lines, on a proxy that runs and on a disk that was lost."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from turnfault.provider.upstream import Upstream

from ..conftest import ROOT, MakeSettings
from ..docs.test_snippets import blocks_of
from ..matrix import rest_in_full
from ..talking import ask, running, text


def commands() -> tuple[str, str]:
    """To back up, and to restore."""
    backup, restore = [
        block.code
        for block in blocks_of(ROOT / "docs" / "self-hosting.md")
        if block.language == "sh" and "chains.backup.sqlite3" in block.code
    ]
    return backup, restore


def do(code: str, folder: Path) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.defpath])
    env = {"PATH": path, "HOME": str(folder)}
    subprocess.run(["bash", "-eu", "-o", "pipefail"], input=code, text=True, cwd=folder, env=env, check=True)


async def test_what_was_backed_up_is_there_again_on_an_empty_disk(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream, tmp_path: Path
) -> None:
    settings = make_settings(claude_bin=claude_2)
    assert settings.claude_config_dir is not None
    backup, restore = commands()
    async with running(settings) as engine:
        await ask(engine, "remember a = 1")
        (settings.var / "sandbox" / "agents" / "a" / "note.txt").write_text("kept")
        await asyncio.to_thread(do, backup, tmp_path)
        await ask(engine, "remember b = 2")
    assert (tmp_path / "chains.backup.sqlite3").stat().st_mode & 0o077 == 0
    shutil.rmtree(settings.var)
    shutil.rmtree(settings.claude_config_dir)
    await asyncio.to_thread(do, restore, tmp_path)
    async with running(settings) as engine:
        turn = await ask(engine, "recall")
        assert (text(turn), turn.continuity) == ("I remember: a is 1.", "rebuilt")
    assert (settings.var / "sandbox" / "agents" / "a" / "note.txt").read_text() == "kept"


@pytest.mark.parametrize("left", rest_in_full("chains.sqlite3-wal", "chains.sqlite3-shm"))
async def test_a_restore_over_a_store_takes_nothing_of_that_ones_log(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream, tmp_path: Path, left: str
) -> None:
    settings = make_settings(claude_bin=claude_2)
    backup, restore = commands()
    async with running(settings) as engine:
        await ask(engine, "remember a = 1")
        await asyncio.to_thread(do, backup, tmp_path)
        await ask(engine, "remember b = 2")
        log = (settings.var / "chains.sqlite3-wal").read_bytes()
    (settings.var / left).write_bytes(log)  # as a killed proxy leaves them
    await asyncio.to_thread(do, restore, tmp_path)
    assert not (settings.var / left).exists()
    async with running(settings) as engine:
        # The transcript was not restored: what it has beyond the store is taken from there.
        assert text(await ask(engine, "recall")).startswith("I remember: a is 1")
