"""Decides whether another proxy should run a request: the one that has the agent warm, or the host with its files.

Decided once the agent is known and before anything is stored. The result is raised as `Elsewhere` to the HTTP layer,
which has the original request and forwards it (see `http.relay`). If the other proxy cannot be reached, the request
comes once more and runs here. This is only routing: the lease decides who writes.
"""

from __future__ import annotations

import socket
import uuid
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Literal

from .. import redact
from ..domain.models import Agent, Turn
from ..errors import SessionBusy
from ..settings import Settings
from ..stores.base import Home, Lease, Store
from ..stores.registry import Registry
from .ownership import Ownership

# How a request came. `from_client`: it may be forwarded. `forwarded`: another proxy forwarded it, so it runs here.
# `websocket`: a message over a WebSocket cannot be forwarded: it runs here, or is refused if its agent's files are
# elsewhere. `local_only`: it has no HTTP request, or the other proxy was not reached.
Origin = Literal["from_client", "forwarded", "websocket", "local_only"]
ORIGIN: ContextVar[Origin] = ContextVar("origin", default="local_only")
# The instance of the proxy that forwarded a request here, "" if it does not say; None: no proxy did.
VIA: ContextVar[str | None] = ContextVar("via", default=None)
# Whether that proxy still waits for the answer. It is asked if it has not said so for a second (see `http.relay`).
AWAITED: ContextVar[Callable[[], Awaitable[bool]] | None] = ContextVar("awaited", default=None)


class Elsewhere(Exception):
    """The proxy at this address should run the request. `home`: it has the agent's files, so wait for it.
    `fingerprint`: of a request for a turn; the engine sets it.

    Nothing of the request was stored here.
    """

    def __init__(self, address: str, agent_key: int, *, home: bool = False) -> None:
        super().__init__(address)
        self.address = address
        self.agent_key = agent_key
        self.home = home
        self.fingerprint: str | None = None


class Passing:
    """One per engine. `home`: this host, if other proxies can reach it; see `enter`."""

    def __init__(self, settings: Settings, secret: str, store: Store, registry: Registry, ownership: Ownership) -> None:
        redact.know([secret])
        self._settings = settings
        self._store = store
        self._registry = registry
        self._ownership = ownership
        self._here = ownership.proxy
        # Asks the proxy at an address to store which clients have left this turn, and to ask others (see
        # `Engine.settled`); False without an answer. The server sets it.
        self.settle: Callable[[str, str, bool], Awaitable[bool]] | None = None
        self.home: Home | None = None

    def enter(self) -> None:
        """Set `home`. Called when `var` exists. Raises OSError."""
        if self._here.address is not None:
            # Files stay in their `var`, and two hosts may have equal names and paths. The address also counts: a
            # container's name changes.
            name = f"{socket.gethostname()}:{self._settings.var}:{_id_of(self._settings.var)}"
            self.home = Home(name, self._here.address)

    async def to_agent(self, agent: Agent, profile: str | None) -> None:
        """Raises `Elsewhere` if another proxy should run a turn of this agent; also `SessionBusy` and
        `StoreUnavailable`."""
        origin = ORIGIN.get()
        if origin in ("forwarded", "local_only"):
            return
        needs_files = self.keeps_files(profile)
        # Without files only a warm process matters: there is none elsewhere if the lease is here, and a WebSocket
        # cannot be forwarded.
        if not needs_files and (self._ownership.has(agent.key) or origin == "websocket"):
            return
        place = await (self._store.whereabouts(agent.key) if needs_files else self._registry.find(agent))
        if needs_files and place.home is not None:
            if self.is_here(place.home):
                return
            if origin == "websocket":
                raise SessionBusy(
                    "this agent's files are on another host, and a WebSocket is not passed on: send the same as a "
                    "POST, which is answered there",
                    retry=False,
                )
            raise Elsewhere(place.home.address, agent.key, home=True)
        if origin != "from_client" or place.holder == self._here.id:
            return
        if place.address not in (None, self._here.address):  # None: no proxy has the agent, or it cannot be reached
            raise Elsewhere(place.address, agent.key)

    async def to_turn(self, turn: Turn) -> None:
        """Raises `Elsewhere` if another proxy runs this unfinished turn and can be reached; also `StoreUnavailable`."""
        if ORIGIN.get() == "from_client" and (address := await self.address_of(turn)) is not None:
            raise Elsewhere(address, turn.agent_key)

    async def to_files(self, agent: Agent) -> None:
        """Raises `Elsewhere` if the files of this agent, which is to be deleted, are on another host: an agent of the
        same name would find them there. Also `StoreUnavailable`."""
        if ORIGIN.get() == "from_client" and (home := await self.other_home(agent)) is not None:
            raise Elsewhere(home.address, agent.key, home=True)

    async def address_of(self, turn: Turn) -> str | None:
        """The address of the proxy that runs an unfinished turn; None if it is this one, or unknown."""
        if turn.instance in (None, self._here.id):
            return None
        proxy = await self._store.proxy(turn.instance or "")
        return None if proxy is None or proxy.address == self._here.address else proxy.address

    def keeps_files(self, profile: str | None) -> bool:
        """Whether the profile has tools of the CLI whose files are kept on one host only."""
        return self._settings.sandboxes == "own" and bool(self._settings.profile_for(profile).tools)

    def is_here(self, home: Home) -> bool:
        """Whether the files are on this host."""
        return self.home is not None and (home.host == self.home.host or home.address == self.home.address)

    async def other_home(self, agent: Agent) -> Home | None:
        """The other host that has the agent's files; None if they are here or there are none."""
        home = (await self._store.whereabouts(agent.key)).home
        return None if home is None or self.is_here(home) else home

    async def register_use(self, agent: Agent, session_id: str | None, lease: Lease) -> None:
        """Tell the registry that this proxy used the agent just now, if other proxies can reach it."""
        if self._here.address is not None:
            await self._registry.note(agent, self._here, session_id, lease.epoch)


def _id_of(var: Path) -> str:
    """The id of this directory, from a file in it. The first proxy that uses the directory writes that file."""
    path = var / "id"
    if not path.exists():
        new = var / f".{uuid.uuid4().hex}.id"
        new.write_text(uuid.uuid4().hex)
        try:
            path.hardlink_to(new)
        except FileExistsError:
            pass  # another proxy has just written it
        except OSError:  # not every file system has hard links
            new.rename(path)
        new.unlink(missing_ok=True)
    return path.read_text()
