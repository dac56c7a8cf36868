"""The chain of one agent as the session store of `claude-agent-sdk`.

    store = ChainSessionStore("ada")
    options = ClaudeAgentOptions(session_store=store, cwd=await store.directory(), continue_conversation=True)

A complete exchange of the application becomes part of the agent's chain. If the application resumes, it gets the whole
chain, with turns of all clients and models. The store runs on the engine of this process, as `ask` does; a `serve` may
use the same `var/` at the same time.

Nothing can be deleted through the store: the chain keeps all exchanges until its agent is deleted.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from claude_agent_sdk import SessionKey, SessionStore
from claude_agent_sdk.types import SessionListSubkeysKey, SessionStoreEntry, SessionStoreListEntry

from ..domain.limits import CLI_DEPTH, is_deeper
from ..domain.models import Record
from ..errors import InvalidRequest
from ..stores.base import MirrorKey
from ..wires.common import checked_agent_id
from .runtime import Runtime, current

if TYPE_CHECKING:
    from ..engine.engine import Engine

T = TypeVar("T")

# Characters of a key's part: the SDK's project keys have up to about 220; its subpaths are paths within one folder.
LONGEST = 1024


class ChainSessionStore(SessionStore):
    """See the module. `agent_id` as for `ask`. Raises `InvalidRequest` for invalid names, keys and entries."""

    # The SDK treats these as not implemented: it reads transcripts for summaries, and deletes nothing.
    list_session_summaries = SessionStore.list_session_summaries
    delete = SessionStore.delete

    def __init__(self, agent_id: str) -> None:
        self.agent_id = checked_agent_id(agent_id)

    async def directory(self) -> Path:
        """The agent's own directory. Sessions with this `cwd` are sessions of the chain."""
        return await _on_engine(lambda engine: engine.mirrors.directory(self.agent_id))

    async def append(self, key: SessionKey, entries: list[SessionStoreEntry]) -> None:
        def records() -> list[Record]:
            for entry in entries:
                if not isinstance(entry, dict) or is_deeper(entry, CLI_DEPTH):
                    raise InvalidRequest(f"an entry is an object of at most {CLI_DEPTH} levels", param="entries")
            named = [(entry, entry.get("uuid")) for entry in entries]
            return [
                Record(json.dumps(entry, separators=(",", ":")), uuid if isinstance(uuid, str) else None)
                for entry, uuid in named
            ]

        if entries:
            lines = await asyncio.to_thread(records)
            await _on_engine(lambda engine: engine.mirror(self.agent_id, _key(key), lines))

    async def load(self, key: SessionKey) -> list[SessionStoreEntry] | None:
        lines = await _on_engine(lambda engine: engine.mirrors.load(self.agent_id, _key(key)))
        return None if lines is None else await asyncio.to_thread(lambda: [json.loads(line) for line in lines])

    async def list_sessions(self, project_key: str) -> list[SessionStoreListEntry]:
        sessions = await _on_engine(lambda engine: engine.mirrors.sessions(self.agent_id, project_key))
        return [{"session_id": session_id, "mtime": int(at * 1000)} for session_id, at in sessions.items()]

    async def list_subkeys(self, key: SessionListSubkeysKey) -> list[str]:
        asked = key["project_key"], key["session_id"]
        return await _on_engine(lambda engine: engine.mirrors.subpaths(self.agent_id, *asked))


async def _on_engine(work: Callable[[Engine], Awaitable[T]]) -> T:
    """Run `work` on the loop of this process's engine, which is started at its first use."""

    async def source(here: Runtime) -> AsyncGenerator[T, None]:
        yield await work(await here.engine())

    async with aclosing(current().aitems(source)) as items:
        return await anext(items)


def _key(key: SessionKey) -> MirrorKey:
    made = MirrorKey(key["project_key"], key["session_id"], key.get("subpath", ""))
    for value in (made.project, made.session_id, made.subpath):
        if not isinstance(value, str) or len(value) > LONGEST or "\0" in value:
            raise InvalidRequest(f"a session's key is made of texts of up to {LONGEST} characters", param="key")
    return made
