"""Whether another proxy is to run a request: the one that has the agent warm, or the host that has its files.

It is asked once the agent is known, and before anything is kept of the request; nothing is sent from here. `Elsewhere`
goes up to the door, which has the request as it came (see `http.relay`): where the other proxy is not reached, the door
brings it once more, and it runs here. The lease decides who writes, whatever is decided here.
"""

from __future__ import annotations

import socket
from contextvars import ContextVar
from typing import Literal

from .. import logs, redact
from ..domain.models import Agent, Turn
from ..errors import SessionBusy
from ..settings import Settings
from ..stores.base import Home, Lease, Proxy, Store
from ..stores.registry import Registry

log = logs.get(__name__)

# How a request came. `from_client`: it may be passed on. `forwarded`: another proxy has passed it on, so it runs here.
# `websocket`: a message over a WebSocket, which is not passed on: it runs here, but never without its agent's files.
# `local_only`: nothing could pass it on, or the proxy that it would go to was not reached.
Origin = Literal["from_client", "forwarded", "websocket", "local_only"]
ORIGIN: ContextVar[Origin] = ContextVar("origin", default="local_only")


class Elsewhere(Exception):
    """The proxy at this address is to answer for the agent. `home`: it has the agent's files, so it is waited for.

    Nothing was kept of the request here.
    """

    def __init__(self, address: str, agent_key: int, *, home: bool = False) -> None:
        super().__init__(address)
        self.address = address
        self.agent_key = agent_key
        self.home = home


class Passing:
    """Of one engine. `here` is this proxy, with the address at which the others reach it."""

    def __init__(self, settings: Settings, secret: str, store: Store, registry: Registry, here: Proxy) -> None:
        redact.know([secret])
        self._settings = settings
        self._store = store
        self._registry = registry
        self._here = here
        # The files of a `var` stay where they are, whatever becomes of its proxies; a container's host name does not.
        self.home = None if here.address is None else Home(f"{socket.gethostname()}:{settings.var}", here.address)

    async def to_agent(self, agent: Agent, profile: str | None, *, held: bool) -> None:
        """`held`: this proxy has the agent's lease. Raises `Elsewhere`, `SessionBusy` and `StoreUnavailable`."""
        origin = ORIGIN.get()
        if origin in ("forwarded", "local_only"):
            return
        files = self.keeps_files(profile)
        if not files and (held or origin == "websocket"):
            return
        found = await (self._store.whereabouts(agent.key) if files else self._registry.find(agent))
        if files and found.home is not None:
            if self.is_here(found.home):
                return
            if origin == "websocket":
                raise SessionBusy(
                    "this agent's files are on another host, and a WebSocket is not passed on: send the same as a "
                    "POST, which is answered there",
                    retry=False,
                )
            raise Elsewhere(found.home.address, agent.key, home=True)
        if (
            origin == "from_client"
            and found.address not in (None, self._here.address)
            and found.holder != self._here.id
        ):
            raise Elsewhere(found.address, agent.key)

    async def to_turn(self, turn: Turn) -> None:
        """To the proxy at which it waits or runs. Raises `Elsewhere`, and `StoreUnavailable`."""
        if ORIGIN.get() == "from_client" and (address := await self.address_of(turn)) is not None:
            raise Elsewhere(address, turn.agent_key)

    async def address_of(self, turn: Turn) -> str | None:
        """Where the proxy of an unfinished turn is reached; None where it is this one, or nobody knows."""
        if turn.instance in (None, self._here.id):
            return None
        there = await self._store.proxy(turn.instance or "")
        return None if there is None or there.address == self._here.address else there.address

    def keeps_files(self, profile: str | None) -> bool:
        """Whether its tools leave files on this host, which other hosts do not see."""
        return self._settings.sandboxes == "own" and bool(self._settings.profile_for(profile).tools)

    def is_here(self, home: Home) -> bool:
        return self.home is not None and (home.host == self.home.host or home.address == self.home.address)

    async def missing(self, agent: Agent) -> Home | None:
        """The host that has the agent's files, where it is another one."""
        home = (await self._store.whereabouts(agent.key)).home
        return None if home is None or self.is_here(home) else home

    async def note(self, agent: Agent, session_id: str | None, lease: Lease) -> None:
        """Note that the agent was used here just now."""
        if self._here.address is not None:
            await self._registry.note(agent, self._here, session_id, lease.epoch)
