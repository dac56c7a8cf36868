"""The CLI's own register of who has which session open."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import psutil
import pytest

from cli_session_proxy.backends.claude.process import running
from cli_session_proxy.backends.claude.process.guardian import start_time
from cli_session_proxy.backends.claude.process.running import has_register, holder

SESSION = "11111111-1111-4111-8111-111111111111"


def _register(folder: Path, pid: int, started: str | None, session_id: str = SESSION) -> None:
    (folder / "sessions").mkdir(exist_ok=True)
    entry = {"pid": pid, "sessionId": session_id, "procStart": started, "status": "busy"}
    (folder / "sessions" / f"{pid}.json").write_text(json.dumps(entry))


async def test_a_living_process_holds_its_session(tmp_path: Path) -> None:
    assert not has_register(tmp_path)
    assert await holder(tmp_path, SESSION) is None
    _register(tmp_path, os.getpid(), start_time(os.getpid()))
    assert has_register(tmp_path)
    assert await holder(tmp_path, SESSION) == os.getpid()
    assert await holder(tmp_path, SESSION.replace("1", "2")) is None


async def test_a_dead_process_or_another_under_its_pid_holds_nothing(tmp_path: Path) -> None:
    _register(tmp_path, os.getpid(), "1")
    _register(tmp_path, 2**22 + 1, "1")
    assert await holder(tmp_path, SESSION) is None


async def test_where_the_register_tells_another_form_of_time_an_entry_is_of_the_process_that_was_there_before_it(
    tmp_path: Path,
) -> None:
    """As on macOS. Else whatever has a dead CLI's pid would keep its session busy for ever."""
    _register(tmp_path, os.getpid(), "Tue Nov 24 13:00:00 2026")
    assert await holder(tmp_path, SESSION) == os.getpid()
    before = psutil.Process().create_time() - 2 * running.CLOCK_TOLERANCE
    os.utime(tmp_path / "sessions" / f"{os.getpid()}.json", (before, before))
    assert await holder(tmp_path, SESSION) is None


async def test_an_entry_that_is_just_being_written_is_read_again(tmp_path: Path) -> None:
    started = start_time(os.getpid())
    _register(tmp_path, os.getpid(), started)
    file = tmp_path / "sessions" / f"{os.getpid()}.json"
    whole = file.read_text()
    file.write_text(whole[:20])
    looking = asyncio.create_task(holder(tmp_path, SESSION))
    await asyncio.sleep(0)  # it has read the half by now
    assert not looking.done()
    file.write_text(whole)
    assert await looking == os.getpid()


async def test_what_cannot_be_read_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "WRITE_WAIT", 0.0)
    (tmp_path / "sessions").mkdir()
    (tmp_path / "sessions" / "1.json").write_text("{")
    (tmp_path / "sessions" / "2.json").write_text("[]")
    (tmp_path / "sessions" / "3.json").mkdir()
    assert await holder(tmp_path, SESSION) is None
