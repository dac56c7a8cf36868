"""A person continues a session by hand: the chain knows it before anybody asks."""

from __future__ import annotations

import asyncio
from pathlib import Path

from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings
from ..talking import ask, by_hand, heard, running


async def test_what_a_person_adds_is_adopted_without_a_request(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings(claude_bin=claude_2)
    async with running(settings) as engine:
        first = await ask(engine, "one")
        assert first.session_id is not None
        await by_hand(settings, first.session_id, "by hand")
        async with asyncio.timeout(60):
            while True:
                agent = await engine.store.agent("local", "a")
                assert agent is not None
                if agent.head != first.id:
                    break
                await asyncio.sleep(0.05)
        chain = await engine.store.chain(agent.key)
        assert chain is not None
        assert [link.reason for link in chain.links][-1] == "adopted"
        await ask(engine, "two")
        assert [turn.origin async for turn in engine.store.turns(agent.key)] == ["chat", "adopted", "chat"]
    assert heard(upstream) == ["one", "by hand", "two"]


async def test_a_watcher_that_cannot_watch_leaves_the_turns_alone(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings(claude_bin=claude_2)
    assert settings.claude_config_dir is not None
    async with running(settings) as engine:
        await ask(engine, "one")
        # Somebody takes the whole folder away under it.
        (settings.claude_config_dir / "projects").rename(settings.claude_config_dir / "gone")
        await ask(engine, "two")
        await ask(engine, "three")
    assert heard(upstream) == ["one", "two", "three"]
