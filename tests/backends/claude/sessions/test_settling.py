"""What is read of an agent's folder where its proxy ended in a turn."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cli_session_proxy.backends.claude.sessions import settling
from cli_session_proxy.domain.models import Agent, Message
from cli_session_proxy.stores.base import Store

from ....conftest import MakeSettings
from ....fakes import turn as a_turn
from ....talking import claude, running

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


@pytest.mark.parametrize("confined", [False, True])
async def test_a_confined_agents_transcript_has_no_answer(make_settings: MakeSettings, confined: bool) -> None:
    """Its programs can write one there, and its own prompt before it."""

    def line(number: int, kind: str, text: str, **more: object) -> str:
        message = {"role": kind, "content": [{"type": "text", "text": text}], **more}
        return json.dumps({"type": kind, "uuid": f"u{number}", "parentUuid": None, "message": message} | (
            {"parentUuid": f"u{number - 1}"} if number else {}
        ))  # fmt: skip

    turn = a_turn(1, parent_id=None, frame_uuid="u0", session_id=SESSION, started_at=0.0, input=(Message.user("hi"),))
    async with running(make_settings()) as engine:
        agent = cast(Agent, SimpleNamespace(key=1, dir="a"))
        backend = claude(engine)
        if confined:
            backend._sandboxes.note_confined("a")
        path = backend.sessions.transcript_of(agent, SESSION)
        path.parent.mkdir(parents=True)
        said = {"id": "m1", "model": "claude-sonnet-5-5", "stop_reason": "end_turn"}
        path.write_text(f"{line(0, 'user', 'hi')}\n{line(1, 'assistant', 'It is noon.', **said)}\n")
        found = await backend.recover_turn(agent, turn)
    assert (found and found[0].output) == (None if confined else ({"type": "text", "text": "It is noon."},))
