"""Turns of stateful wires by their ids: find, stream, cancel, and delete the id."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from starlette.responses import Response

from ..domain.models import FINISHED, Turn
from ..engine.engine import Engine
from ..errors import NotFound
from .answers import StreamAnswer
from .common import encoded_agent_id
from .streams import ReplayedStream


class KeptTurns:
    """For one engine and one wire: `turn_id_of` parses its ids, `unknown` is its error.

    Ids of other owners, deleted ones and those of calls with `store: false` count as unknown.
    """

    def __init__(
        self, engine: Engine, turn_id_of: Callable[[str], str | None], unknown: Callable[[str], NotFound]
    ) -> None:
        self._engine = engine
        self._turn_id_of = turn_id_of
        self._unknown = unknown
        self._noting: dict[str, asyncio.Task[None]] = {}  # by turn, that a client has asked for it by its id

    async def turn(self, owner: str, given: str, *, stored: bool = True) -> Turn:
        """The turn, which counts as delivered from now on if it runs in the background: this client has its id. Raises
        the wire's `NotFound`. `stored` False: also find calls with `store: false`."""
        turn_id = self._turn_id_of(given)
        turn = None if turn_id is None else await self._engine.view.turn(turn_id)
        agent = None if turn is None else await self._engine.store.agent_by_key(turn.agent_key)
        call = (turn.call if turn else None) or {}
        hidden = call.get("deleted") or (stored and call.get("store") is False)
        if turn is None or agent is None or agent.owner != owner or hidden:
            raise self._unknown(given)
        if turn.in_background and turn.delivery != "delivered":
            if (noting := self._noting.get(turn.id)) is None:
                noting = self._engine.note(turn.id, partial(self._engine.note_arrival, turn.id, arrived=True))
                self._noting[turn.id] = noting
                noting.add_done_callback(partial(self._noting.pop, turn.id))
            # Its client may say the same again at once, which is a new turn. With a store that is away it takes longer.
            await asyncio.wait([noting], timeout=self._engine.settings.lease)
        return turn

    async def headers_of(self, turn: Turn) -> dict[str, str]:
        """The headers for a turn that another request has run."""
        agent = await self._engine.store.agent_by_key(turn.agent_key)
        known = {
            "X-Agent-Id": encoded_agent_id(agent.agent_id) if agent else None, "X-Turn-Id": turn.id,
            "X-Session-Id": turn.session_id, "X-Continuity": turn.continuity,
            "X-Backend": turn.backend, "X-Model": turn.reported_model if turn.backend else None,
        }  # fmt: skip
        return {name: value for name, value in known.items() if value is not None}

    async def stream(
        self, owner: str, given: str, writer: Callable[[Turn], ReplayedStream], keepalive: float
    ) -> Response:
        """The events of a turn, while it runs (in any proxy) or later."""
        turn = await self.turn(owner, given)
        answer = None if turn.status in FINISHED else await self._engine.watch(turn)
        if answer is not None:
            return StreamAnswer(answer, None, writer(answer.accepted), keepalive)
        turn = await self.turn(owner, given)  # it may have just ended
        stream, headers = writer(turn), await self.headers_of(turn)
        return Response(b"".join(stream.whole(turn)), media_type=stream.media_type, headers=headers)

    async def cancel(self, owner: str, given: str) -> Turn:
        """Cancel the turn, and wait for its end. Raises `SessionBusy` if another proxy does not end it."""
        turn = await self.turn(owner, given)
        if turn.status not in FINISHED:
            await self._engine.end(turn, "client")
        return await self.turn(owner, given)

    async def delete(self, owner: str, given: str) -> None:
        """Delete the id. The messages stay in the chain, for clients that continue later turns."""
        turn = await self.cancel(owner, given)
        await self._engine.store.add_to_call(turn.id, {"deleted": True})
