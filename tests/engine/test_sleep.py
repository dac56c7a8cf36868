"""A lid that is closed in the middle of a turn."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.settings import Settings

from ..scripted import Scripted, delta
from ..simulated import still
from ..talking import request, text


async def test_after_an_hour_of_sleep_a_turn_goes_on(
    tmp_path: Path, macos: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On macOS uvloop's clock runs on in sleep: at wake every timer is due at once."""
    loop, slept = asyncio.get_running_loop(), 0.0
    runs_on = loop.time
    monkeypatch.setattr(loop, "time", lambda: runs_on() + slept)
    backend = Scripted([delta("before "), None, delta("after")])
    settings = Settings(var=tmp_path / "var", port=0, idle_timeout=300, turn_timeout=1800)
    engine = Engine(settings, backend=backend)
    await engine.start()
    try:
        answer = await engine.submit(request("hello"))
        await backend.reached.acquire()
        slept = 3600.0
        await still()
        backend.go.release()
        turn = await answer.turn()
        answer.acknowledge()
        assert (turn.status, text(turn)) == ("completed", "before after")
    finally:
        backend.go.release()
        await engine.stop()
