"""Archives a chain: it is exported, encrypted, stored, read back, compared with the chain, and only then deleted here.

    version  ─▶ write ─▶ put ─▶ fetch ─▶ check ─▶ compare ─▶ rehearse ─▶ delete where the version is still the same

An object's name depends on the chain's version, so equal chains have the same object, from any proxy of a host and
after any interruption: an object that already has the chain is not stored again. If this is killed anywhere, the chain
is here, or in an object that was compared with it, or both.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

from .. import logs
from ..backends.base import Backend
from ..domain.models import JSON, Agent, Record
from ..engine.engine import Engine
from ..engine.forgetting import ANY_AGE, HOUR
from ..errors import InvalidRequest, NotFound, SessionBusy, StoreUnavailable
from ..export import incoming, portable
from ..sandbox import Sandboxes
from ..stores.base import Expiry, Store
from ..tasks import failures_logged
from .places import Place
from .sealed import ArchiveKey, UnnamedFile

log = logs.get(__name__)

# The same in all versions of this program that read each other's archives.
SUFFIX = ".jsonl.age"
VERSION_CHARACTERS = 24


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome for one agent. `stays`: why the agent is still in the store; None if it was archived.

    `name`: the name of its object, also if the agent stays because it was used meanwhile.
    """

    agent_id: str
    owner: str
    stays: str | None
    name: str | None = None
    turns: int = 0
    records: int = 0

    def as_json(self) -> JSON:
        return asdict(self)


# Called with each agent and the name of its object, before the agent is deleted here.
BeforeDelete = Callable[[Agent, str], None]


class Archiver:
    """Puts agents of a running engine into one place."""

    def __init__(
        self, engine: Engine, place: Place, key: ArchiveKey, before_delete: BeforeDelete | None = None
    ) -> None:
        self._engine = engine
        self._before_delete = before_delete
        self._store = engine.store
        self._settings = engine.settings
        self.place = place
        self._key = key

    async def archive(self, agent: Agent, before: float = ANY_AGE) -> Outcome:
        """Archive an agent, if it was last active before that time. Raises `StoreUnavailable` if the place fails."""
        try:
            return await self._archive(agent, before)
        except (NotFound, StoreUnavailable):
            if await self._store.agent_by_key(agent.key) is not None:
                raise
            return Outcome(
                agent.agent_id, agent.owner, "it no longer exists: it was archived by another proxy, or deleted"
            )

    async def _archive(self, agent: Agent, before: float) -> Outcome:
        stays = partial(Outcome, agent.agent_id, agent.owner)
        if not await self._store.expired_agents(Expiry(before), only=agent.key):
            return stays("it was active since then, or no longer exists")
        try:
            version = await self._engine.version_at_rest(agent)
            # An export also names the sandbox's folder, which differs between hosts.
            identity = "\0".join((version, self._key.recipient, str(Sandboxes(self._settings).path(agent.dir))))
            name = f"{agent.dir}.{hashlib.sha256(identity.encode()).hexdigest()[:VERSION_CHARACTERS]}{SUFFIX}"
            end = await self._end_if_equal(agent, name)
            if end is None:
                await self._put(agent, name)
                end = await self._end_if_equal(agent, name)
            if end is None:
                if await self._store.version(agent.key) != version:
                    return stays("it was continued meanwhile, or no longer exists", name)
                raise StoreUnavailable(
                    f"{self.place}: {name} was read back and differs from the chain, which is kept here"
                )
        except (InvalidRequest, SessionBusy) as exc:
            return stays(exc.message)
        if self._before_delete is not None:
            self._before_delete(agent, name)
        if not await self._engine.delete(agent.owner, agent.agent_id, Expiry(before, version=version)):
            return stays("it was continued meanwhile, or no longer exists", name)
        log.info("archived", place=str(self.place), object=name)
        return Outcome(agent.agent_id, agent.owner, None, name, end["turns"], end["records"])

    async def _put(self, agent: Agent, name: str) -> None:
        """Store an export of the chain now under this name."""
        with UnnamedFile(self._settings.var, name) as sealed:
            with self._key.sealing(sealed.file) as out:

                async def write(block: bytearray) -> None:
                    await asyncio.to_thread(out.write, block)

                await portable.write(self._settings, self._store, agent, write, _no_progress, whole_at=time.time())
            await asyncio.to_thread(self.place.put, name, sealed.file)

    async def _end_if_equal(self, agent: Agent, name: str) -> JSON | None:
        """The object's last line, if the object can be read back and equals an export of the chain now, byte by byte.
        Else None. Raises `InvalidRequest` if no import would take it."""
        source, var = f"{self.place}/{name}", self._settings.var
        with UnnamedFile(var, source) as sealed, UnnamedFile(var, source) as plain:
            if not await asyncio.to_thread(self.place.fetch, name, sealed.file):
                return None

            def checked() -> incoming.Checked:
                with sealed.open() as file, self._key.opened(file, source) as opened:
                    try:
                        shutil.copyfileobj(opened, plain.file)
                        plain.file.flush()
                    except OSError as exc:
                        raise StoreUnavailable(f"an archive cannot be read back into {var} ({exc.strerror})") from exc
                with plain.open() as file:
                    return incoming.check(plain, file)

            try:
                archived = await asyncio.to_thread(checked)
            except InvalidRequest as exc:
                log.warning("archive_unreadable", object=name, error=exc.message)
                return None
            at = float(archived.head["exported_at"])
            exported = await portable.write(self._settings, self._store, agent, None, _no_progress, whole_at=at)
            if exported != archived.end:
                return None
            try:
                await asyncio.to_thread(incoming.rehearse, archived, _RecordChecks(self._engine.backend))
            except InvalidRequest as exc:
                raise InvalidRequest(f"no import would take it again ({exc.message}): it is kept here") from exc
            return exported


class _RecordChecks:
    """Implements `incoming.RecordChecks` for a rehearsal, which keeps nothing."""

    def __init__(self, backend: Backend) -> None:
        self.is_sound = backend.is_sound

    def has_session(self, _session_id: str) -> bool:
        return False

    def records_to_keep(self, _turn_id: str, _parent_id: str | None, _records: Sequence[Record]) -> tuple[Record, ...]:
        return ()


async def idle_agents(store: Store, before: float) -> list[Agent]:
    """Agents that were last active before then. One-shots are left out: retention deletes those."""
    one_shots = {agent.key for agent in await store.expired_agents(Expiry(one_shots=before, once=before))}
    return [agent for agent in await store.expired_agents(Expiry(before)) if agent.key not in one_shots]


async def serve(
    engine: Engine, days: float, place: Place, key: ArchiveKey, before_delete: BeforeDelete | None = None
) -> None:
    """Once an hour, archive agents that were idle for so many days. One proxy of each host does it."""
    archiver = Archiver(engine, place, key, before_delete)
    while True:
        with failures_logged("not_archived"):
            if await engine.store.claim_finding("archive", socket.gethostname(), HOUR / 2):
                before = time.time() - days * 24 * HOUR
                for agent in await idle_agents(engine.store, before):
                    with failures_logged("not_archived", **agent.named_in_logs):
                        outcome = await archiver.archive(agent, before)
                        if outcome.stays is not None:
                            log.info("not_archived", **agent.named_in_logs, why=outcome.stays)
        await asyncio.sleep(HOUR)


def _no_progress(_done: int, _total: int) -> None:
    """Ignores the progress."""
