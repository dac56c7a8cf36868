"""An engine over a real store that answers by itself: ids and chains are real, no CLI is started."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from cli_session_proxy.domain.models import Record, TurnRequest
from cli_session_proxy.engine.engine import Engine, HasLeft
from cli_session_proxy.engine.live import Answer, replay
from cli_session_proxy.sandbox import directory_name
from cli_session_proxy.settings import Settings
from cli_session_proxy_store_conformance.samples import a_finished_turn

from .serving import serving


class NoCli(Engine):
    """Each request is a turn after the head of its agent (`chat` where it names none), answered with `Hello.`"""

    async def submit(self, request: TurnRequest, has_left: HasLeft | None = None) -> Answer:
        name, now = request.agent_id or "chat", time.time()
        directory = directory_name(request.owner, name)
        agent = await self.store.ensure_agent(request.owner, name, directory, named=True, now=now)
        new = a_finished_turn(
            id=f"turn_{uuid.uuid4().hex}",
            agent_key=agent.key,
            parent_id=agent.head,
            model=request.model,
            input=request.messages,
            output=({"type": "text", "text": "Hello."},),
            records=(Record("{}"),),
            created_at=now,
            path_hash=None,
            depth=1,
            origin=request.wire,
        )
        await self.store.import_turns([new], head=new.turn.id)
        if request.call is not None:
            await self.store.add_to_call(new.turn.id, request.call)
        turn = await self.store.turn(new.turn.id)
        assert turn is not None
        live = self._deliveries.live(turn, agent)
        replay(live)
        return live.attach(replayed=True)


@asynccontextmanager
async def no_cli(tmp_path: Path, **options: Any) -> AsyncIterator[str]:
    """The root of a server's addresses, with such an engine behind it."""
    settings = Settings(var=tmp_path / "var", port=0, claude_config_dir=tmp_path / "claude-config", **options)
    engine = NoCli(settings)
    await engine.start()
    try:
        async with serving(engine, settings) as base:
            yield base.removesuffix("/v1")
    finally:
        await engine.stop()
