"""What a turn used that is not kept is on the bill, and counts for the budgets of its key and agent."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cli_session_proxy.backends.base import Event, Refused, Used
from cli_session_proxy.domain.budgets import Spent
from cli_session_proxy.domain.models import Usage
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.errors import ProxyError, TurnCancelled
from cli_session_proxy.settings import BudgetSettings, Limits, Settings
from turnfault.provider.script import HeldReply
from turnfault.provider.upstream import Upstream

from ..clis import old_cli_in_full
from ..conftest import MakeSettings
from ..scripted import Scripted, delta
from ..talking import ask, request, running

BUDGETS = BudgetSettings(each_key=Limits(usd_per_month=100.0))
SCHEMA = {"schema": {"type": "object", "required": ["n"]}}


async def spent_by(tmp_path: Path, steps: Sequence[Event | None], *, cancels: bool = False, **more: Any) -> Spent:
    """What the key has spent when the turn is over."""
    settings = Settings(var=tmp_path / "var", claude_config_dir=tmp_path / "c", budgets=BUDGETS)
    backend = Scripted(steps)
    engine = Engine(settings, backend=backend)
    await engine.start()
    try:
        answer = await engine.submit(request("go", **more))
        if cancels:
            await backend.reached.acquire()
            await engine.cancel("local", "a", None)
        try:
            await answer.turn()
            answer.acknowledge()
        except ProxyError:
            answer.leave()
        (row,) = await engine.store.spent()
        return row
    finally:
        await engine.stop()


async def test_what_a_cancelled_turn_had_used_by_then(tmp_path: Path) -> None:
    steps: list[Event | None] = [Used(Usage(100, 1)), delta("a word"), Used(Usage(100, 30), 0.25), None]
    row = await spent_by(tmp_path, steps, cancels=True)
    assert (row.requests, row.tokens, row.usd, row.most_tokens) == (1, 130, 0.25, 130)


async def test_every_attempt_of_a_turn_that_fails(tmp_path: Path) -> None:
    row = await spent_by(tmp_path, [Used(Usage(50, 50)), delta("no JSON")], format=SCHEMA)
    assert (row.requests, row.tokens) == (1, 4)  # two attempts: the result's own word is the last


async def test_an_attempt_before_the_one_that_is_kept_counts_beside_it(tmp_path: Path) -> None:
    class Second(list[Any]):
        """The first attempt says no JSON."""

        runs = 0

        def __iter__(self) -> Any:
            self.runs += 1
            return iter([delta("no JSON" if self.runs == 1 else '{"n": 1}')])

    row = await spent_by(tmp_path, Second(), format=SCHEMA)
    assert (row.requests, row.tokens, row.most_tokens) == (1, 4, 2)


async def test_a_turn_that_is_kept_or_refused_counts_once(tmp_path: Path) -> None:
    row = await spent_by(tmp_path / "kept", [Used(Usage(9, 9)), delta("hello")])
    assert row.tokens == 2
    row = await spent_by(tmp_path / "refused", [Used(Usage(9, 9)), Refused(None, None, Usage(3, 4))])
    assert row.tokens == 7


@old_cli_in_full
async def test_the_prompt_of_a_turn_that_the_real_cli_left_half_way_counts(
    claude: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings(claude_bin=claude, budgets=BUDGETS)
    async with running(settings) as engine:
        await ask(engine, "hello")
        (before,) = await engine.store.spent()
        held = HeldReply(after=2)
        upstream.next(held)
        answer = await engine.submit(request("tell me more"))
        await held.reached.wait()
        async for event in answer.events():
            if type(event).__name__ == "BlockDelta":
                break
        await engine.cancel("local", "a", None)
        with pytest.raises(TurnCancelled):
            await answer.turn()
        answer.leave()
        (row,) = await engine.store.spent()
        assert row.requests == 2
        assert row.tokens > before.tokens
        await ask(engine, "and on")
        (after,) = await engine.store.spent()
        assert after.tokens > row.tokens
