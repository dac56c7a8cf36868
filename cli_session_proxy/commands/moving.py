"""Chains come in and go out: `adopt`, `export`, `import`, `archive`. `migrate` moves the whole store.

Each acts as another proxy of the store, beside running servers or without one.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

from pydantic import SecretStr

from .. import logs
from ..archive.archiving import Archiver, Outcome, idle_agents
from ..archive.places import place_at
from ..archive.sealed import ArchiveKey, fetched
from ..aside.media import Media
from ..aside.pool import Aside
from ..backends.claude.process import environment
from ..backends.claude.sessions.adoption import Adopted, ImportFitting, Replacement, adopt_session
from ..backends.claude.transcript import mending
from ..domain.evidence import NoteCode
from ..domain.models import Block, Record
from ..engine.forgetting import ANY_AGE
from ..engine.ownership import HEARTBEAT, Instances, PauseWatch
from ..errors import ConfigError, NotFound, StoreUnavailable, printable
from ..export import incoming, portable
from ..export.portable import MovedChain
from ..export.words import count
from ..http.audit import archives, audit_of
from ..sandbox import LOCAL_OWNER, Sandboxes, make_private
from ..settings import Settings
from ..stores.auto import is_new, move_of, place_of
from ..stores.base import Granted, LeaseHeld, Proxy, Store
from ..stores.sql.moving import Move, MovedRows, NotHeld
from ..stores.sqlite.store import FILE
from .listing import moment_of
from .stored import agent_in, engine_in, opened, opened_or_new
from .terminal import progress_bar


async def adopt(settings: Settings, owner: str, session: str, agent_id: str | None) -> Adopted:
    """Adopt a session of the CLI, given by its id or file. Raises `NotFound`, `InvalidRequest`."""
    async with _writable(settings) as store, _media_checks() as look:
        with progress_bar("adopting") as move_bar:
            return await adopt_session(settings, store, owner, agent_id, session, look, move_bar)


def print_adopted(done: Adopted) -> Iterator[str]:
    beside = f"{count(done.records, 'record')}, {count(done.files, 'file')}"
    yield f"adopted {count(done.turns, 'turn')} ({beside}) from {done.source}"
    yield from (f"note: {note}" for note in done.notes)
    yield f"agent {printable(done.agent_id)} continues session {done.session_id}; the original does not change"


async def export(settings: Settings, owner: str, agent_id: str, path: Path | None) -> MovedChain:
    """Write an agent's chain into one file. Raises `NotFound`, `InvalidRequest`."""
    async with opened(settings) as existing:
        store, agent = await agent_in(settings, existing, owner, agent_id)
        # The row may name any path. `path` refuses what is no agent's folder.
        target = path or Path(f"{Sandboxes(settings).path(agent.dir).name}.export.jsonl")
        with progress_bar("exporting", "turns") as moved:
            return await portable.export(settings, store, agent, target, lambda done, _: moved(done, None))


class _ClaudeRecordChecks:
    """Implements `incoming.RecordChecks`: sessions of any working directory, and files beside a transcript."""

    def __init__(self, settings: Settings, look: Replacement) -> None:
        self._projects = environment.config_dir(settings) / "projects"
        self._fitting = ImportFitting(look)

    def has_session(self, session_id: str) -> bool:
        return any(self._projects.glob(f"*/{session_id}.jsonl"))

    def is_sound(self, record: Record) -> bool:
        return mending.is_sound(record)

    def records_to_keep(self, turn_id: str, parent_id: str | None, records: Sequence[Record]) -> tuple[Record, ...]:
        return self._fitting.records(turn_id, parent_id, records)


async def import_(settings: Settings, owner: str, source: Path | str, agent_id: str | None) -> MovedChain:
    """Import a file of `export` or of an archive. Raises `NotFound`, `InvalidRequest`, `StoreUnavailable`."""
    async with _writable(settings) as store, _media_checks() as look:
        with ExitStack() as stack:
            file = await asyncio.to_thread(stack.enter_context, fetched(settings, str(source)))
            move_bar = stack.enter_context(progress_bar("importing"))
            return await incoming.import_file(
                store, _ClaudeRecordChecks(settings, look), owner, file, agent_id, move_bar
            )


async def archive(
    settings: Settings, owner: str | None, names: Sequence[str], older_than: str | None, *, dry_run: bool
) -> AsyncIterator[Outcome]:
    """Archive agents one by one; yields each outcome. Raises `ConfigError`, `NotFound`, `StoreUnavailable`."""
    if not names and older_than is None:
        raise ConfigError("say which agents: by their names, or --older-than 30d")
    if settings.archive_to is None:
        raise ConfigError("say where to: --to DIRECTORY, --to s3://bucket/prefix, or archive_to")
    before = ANY_AGE if older_than is None else moment_of("--older-than", older_than)
    place, key = place_at(settings.archive_to), ArchiveKey.of(settings)
    async with opened(settings) as existing:
        if existing is None:
            raise NotFound(f"there is no store in {place_of(settings)}: nothing to archive")
        if names:
            agents = [(await agent_in(settings, existing, owner or LOCAL_OWNER, name))[1] for name in names]
        else:
            agents = [agent for agent in await idle_agents(existing, before) if owner in (None, agent.owner)]
    if dry_run:
        for agent in agents:
            yield Outcome(agent.agent_id, agent.owner, None)
        return
    audit = audit_of(settings)
    async with engine_in(settings) as engine:
        archiver = Archiver(engine, place, key, None if audit is None else partial(archives, audit, "command"))
        for agent in agents:
            yield await archiver.archive(agent, before)


def line_of(done: Outcome, place: str, *, dry_run: bool) -> str:
    """For a person."""
    name = printable(done.agent_id)
    if dry_run:
        return f"{name}: would be archived"
    if done.stays is not None:
        beside = f" (in {place}: {done.name}, which is not needed)" if done.name is not None else ""
        return f"{name}: stays, {done.stays}{beside}"
    return f"{name}: {count(done.turns, 'turn')} ({count(done.records, 'record')}) in {place}: {done.name}"


@asynccontextmanager
async def _writable(settings: Settings) -> AsyncIterator[Store]:
    """The store, for writing; its directory is created."""
    await asyncio.to_thread(make_private, settings.var)
    async with opened_or_new(settings) as store:
        yield store


@asynccontextmanager
async def _media_checks() -> AsyncIterator[Replacement]:
    """Inspects images and documents in a helper process. Call it on another thread."""
    aside, loop = Aside(), asyncio.get_running_loop()
    media = Media(aside)

    def look(block: Block) -> tuple[NoteCode, Block] | None:
        found = asyncio.run_coroutine_threadsafe(media.replacement(block), loop).result()
        return None if found is None else (found.code, found.block)

    try:
        yield look
    finally:
        await aside.close()


# --- the whole store, into another database

log = logs.get(__name__)

# Seconds between requests for a lease that another proxy holds.
ASK_INTERVAL = 0.05
# How many leases are requested concurrently.
AT_ONCE = 16
# How many times the last changes are copied, if agents were created meanwhile whose leases are missing.
ROUNDS = 100


def target_of(settings: Settings, to: str) -> Settings:
    """The same settings with the other store. Raises `ConfigError`."""
    if to.startswith(("postgresql://", "postgres://")):
        return settings.model_copy(update={"store": SecretStr(to)})
    if "://" in to:  # not repeated: there may be a password in it
        raise ConfigError("--to takes postgresql://user@host:5432/database, or a --var without a store")
    path = Path(to).expanduser().absolute()
    var = path.parent if path.name == FILE else path
    if not var.is_dir() and (var.suffix or var.exists()):
        raise ConfigError(
            f"--to {to}: a store in SQLite is <var>/{FILE}: name that file, or the folder that --var names"
        )
    return settings.model_copy(update={"store": None, "var": var})


async def migrate(settings: Settings, to: str) -> MovedRows:
    """Move the store of these settings. Raises `ConfigError`, `InvalidRequest`, `StoreUnavailable`."""
    target = target_of(settings, to)
    if is_new(settings):
        raise NotFound(f"there is no store in {place_of(settings)}: nothing to move")
    if target.store is None:
        await asyncio.to_thread(make_private, target.var)
    with progress_bar("moving") as move_bar:
        stopped = threading.Event()

        def step(done: int, total: int) -> None:
            if stopped.is_set():
                raise StoreUnavailable("the move was stopped: run it again to continue")
            move_bar(done, total)

        move = move_of(settings, target, step)
        try:
            if await asyncio.to_thread(move.was_marked):  # an earlier move copied all, and was stopped after that
                return await asyncio.to_thread(move.open_target)
            async with opened_or_new(settings) as store:
                for part in (move.begin, move.copy, move.verify, move.catch_up):
                    await asyncio.to_thread(part)
                return await _finish(settings, store, move)
        finally:
            stopped.set()


async def give_up(settings: Settings, to: str) -> None:
    """Abandon a move that was begun. The store is unchanged."""
    async with opened_or_new(settings):
        await asyncio.to_thread(move_of(settings, target_of(settings, to)).give_up)


async def _finish(settings: Settings, store: Store, move: Move) -> MovedRows:
    """Copy the last changes and mark the store as moved, while this program holds the lease of every agent, as a proxy
    of the store."""
    instances = Instances(settings.var, store if store.spans_hosts else None)
    proxy = Proxy(instances.id, socket.gethostname(), settings.lease)
    if not store.spans_hosts:
        instances.enter()
    try:
        async with _heartbeats(store, proxy):
            agent_keys: Sequence[int] = ()  # of the agents whose leases are missing
            for _ in range(ROUNDS):
                await _acquire(store, instances, proxy, agent_keys)
                await asyncio.to_thread(move.catch_up)
                try:
                    return await asyncio.to_thread(move.finish, proxy.id)
                except NotHeld as exc:
                    agent_keys = exc.agent_keys
        raise StoreUnavailable("new agents kept arriving, so the store was not moved: try again at a quieter time")
    finally:
        instances.leave(settled=True)


@asynccontextmanager
async def _heartbeats(store: Store, proxy: Proxy) -> AsyncIterator[None]:
    """Heartbeats of this proxy, so that nobody takes its leases."""

    async def beat() -> None:
        while True:
            await asyncio.sleep(HEARTBEAT * proxy.lease)
            try:
                await store.renew(proxy)
            except StoreUnavailable as exc:  # the next one may be in time; else the leases are acquired again
                log.warning("lease_not_renewed", error=exc.message)

    await store.renew(proxy)
    beating = asyncio.create_task(beat())
    try:
        yield
    except BaseException:
        try:
            await store.resign(proxy.id)  # frees the leases, so that the store serves again at once
        except StoreUnavailable as exc:
            log.warning("leases_not_released", error=exc.message)  # others take them when they have expired
        raise
    finally:
        beating.cancel()
        await asyncio.wait([beating])


async def _acquire(store: Store, instances: Instances, proxy: Proxy, agent_keys: Sequence[int]) -> None:
    """Acquire the leases of these agents, after their running turns have ended. What dead proxies left is not settled
    here: the proxy that takes the agent over in the new store does it."""
    requests = asyncio.Semaphore(AT_ONCE)
    pauses = PauseWatch(proxy.lease)

    async def take(agent_key: int) -> None:
        while True:
            async with requests:
                pauses.was_awake()
                answer = await store.acquire(agent_key, proxy, awake=pauses.was_awake)
                if isinstance(answer, LeaseHeld) and instances.has_ended(answer.holder):
                    answer = await store.acquire(agent_key, proxy, dead=(answer.holder,), awake=pauses.was_awake)
            if isinstance(answer, Granted):
                return
            await asyncio.sleep(ASK_INTERVAL)

    try:
        async with asyncio.TaskGroup() as group:
            for agent_key in agent_keys:
                group.create_task(take(agent_key))
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
