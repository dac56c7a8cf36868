"""Turns of stateful wires, found by their ids."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from cli_session_proxy.errors import NotFound
from cli_session_proxy.wires.kept import KeptTurns

from ..fakes import TURN


async def test_however_often_a_background_turn_is_asked_for_that_is_noted_by_one_task() -> None:
    """Each request left a task that tried until the store took writes again."""
    writable = asyncio.Event()
    notes: list[asyncio.Task[None]] = []
    turn = replace(TURN, call={"background": True})

    async def note_arrival(_turn_id: str, *, arrived: bool) -> None:
        assert arrived
        await writable.wait()

    def note(_key: str, noted: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
        notes.append(asyncio.create_task(noted()))
        return notes[-1]

    async def found(_wanted: object) -> Any:
        return turn

    async def agent(_key: int) -> Any:
        return SimpleNamespace(owner="local")

    engine: Any = SimpleNamespace(
        view=SimpleNamespace(turn=found), store=SimpleNamespace(agent_by_key=agent),
        note=note, note_arrival=note_arrival, settings=SimpleNamespace(lease=0.0),
    )  # fmt: skip
    kept = KeptTurns(engine, lambda given: given, NotFound)
    for _ in range(3):
        assert await kept.turn("local", "turn_1") is turn
    assert len(notes) == 1
    writable.set()
    await notes[0]
    turn = replace(turn, delivery="delivered")
    await kept.turn("local", "turn_1")
    assert len(notes) == 1
