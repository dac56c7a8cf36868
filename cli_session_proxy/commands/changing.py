"""`delete` and `rewind`: through the server that runs on this `var`, else by an engine of this process."""

from __future__ import annotations

from ..domain.models import JSON
from ..errors import NotFound
from ..http.keys import Keys
from ..http.served import Served, served_at
from ..sandbox import LOCAL_OWNER
from ..settings import Settings
from ..stores.auto import place_of
from .asking import alive, ask_server, key_of
from .stored import agent_in, engine_in, opened


async def delete(settings: Settings, agent_id: str, owner: str = LOCAL_OWNER) -> None:
    """Remove the agent. Raises `NotFound`."""
    if (served := await _server(settings, owner)) is not None:
        await ask_server(served, "DELETE", agent_id, key_of(settings, owner))
        return
    async with opened(settings) as store:
        known = store is not None and await store.agent(owner, agent_id) is not None
    if known:
        async with engine_in(settings) as engine:
            known = await engine.delete(owner, agent_id)
    if not known:
        raise NotFound(f"there is no agent {agent_id!r} in {place_of(settings)}: see `chains`")


async def rewind(settings: Settings, owner: str, agent_id: str, to: str) -> JSON:
    """Move the head back to this turn, or by `-N` turns. Returns the body of the route's answer. Raises `NotFound`."""
    if (served := await _server(settings, owner)) is not None:
        return await ask_server(served, "POST", agent_id, key_of(settings, owner), after="/rewind", body={"to": to})
    async with opened(settings) as store:
        await agent_in(settings, store, owner, agent_id)
    async with engine_in(settings) as engine:
        return (await engine.rewind(owner, agent_id, to)).as_json()


async def _server(settings: Settings, owner: str) -> Served | None:
    """The server that runs on this `var`. None also if only its gateway may name owners: then this program has no key
    for it, and acts as another proxy of the store."""
    served = served_at(settings.var)
    if served is None or (settings.trusted_header is not None and Keys(settings).secret_of(owner) is None):
        return None
    return served if await alive(served) else None
