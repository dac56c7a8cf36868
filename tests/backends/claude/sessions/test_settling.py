"""What is read of an agent's folder where its proxy ended in a turn."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cli_session_proxy.backends.claude.sessions import settling
from cli_session_proxy.domain.models import Agent
from cli_session_proxy.stores.base import Store

from ....fakes import turn as a_turn

SESSION = "11111111-1111-4111-8111-111111111111"


async def test_of_sessions_that_nobody_knows_only_a_few_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell may leave any number, each of half a gigabyte that takes no room on the disk, and then end the proxy: the
    next one was not up before it had read them all."""
    read: list[Path] = []

    async def none(*_given: object) -> Any:
        return None

    monkeypatch.setattr(settling, "_read", lambda path, *_given: read.append(path))
    store = cast(Store, SimpleNamespace(session=none, records=none))
    turn = a_turn(1, parent_id=None, frame_uuid="u0", session_id=SESSION, started_at=0.0)

    async def settled() -> object:
        read.clear()
        agent = cast(Agent, SimpleNamespace(key=1))
        return await settling.recover_turn(store, lambda _agent, session: tmp_path / f"{session}.jsonl", agent, turn)

    for number in range(settling.MOST_COPIES):
        (tmp_path / f"00000000-0000-4000-8000-{number:012}.jsonl").touch()
    assert await settled() is None
    assert len(read) == 1 + settling.MOST_COPIES
    (tmp_path / "22222222-2222-4222-8222-222222222222.jsonl").touch()
    assert await settled() is None
    assert [path.stem for path in read] == [SESSION]
