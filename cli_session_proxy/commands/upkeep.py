"""`adopt`, `export`, `import`, `archive`: each acts as another proxy of the store, beside a running server or without
one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

from ..archive.archiving import Archiver, Outcome, idle_agents
from ..archive.places import place_at
from ..archive.sealed import ArchiveKey, fetched
from ..aside.media import Media
from ..aside.pool import Aside
from ..backends.claude.process import environment
from ..backends.claude.sessions.adoption import Adopted, ImportFitting, Replacement, adopt_session
from ..backends.claude.transcript import files, mending
from ..domain import limits
from ..domain.evidence import NoteCode
from ..domain.models import Block, Record
from ..engine.forgetting import ANY_AGE
from ..errors import ConfigError, NotFound, printable
from ..export import incoming, portable
from ..export.portable import MovedChain
from ..export.words import count
from ..http.audit import archives, audit_of
from ..sandbox import LOCAL_OWNER, make_private
from ..settings import Settings
from ..stores.auto import place_of
from ..stores.base import Store
from .listing import moment_of
from .stored import agent_in, engine_in, made, opened
from .terminal import progress_bar


async def adopt(settings: Settings, owner: str, session: str, agent_id: str | None) -> Adopted:
    """Adopt a session of the CLI, given by its id or file. Raises `NotFound`, `InvalidRequest`."""
    async with _ready(settings) as store, _looking() as look:
        with progress_bar("adopting") as move_bar:
            return await adopt_session(settings, store, owner, agent_id, session, look, move_bar)


def print_adopted(done: Adopted) -> Iterator[str]:
    beside = f"{count(done.records, 'record')}, {count(done.files, 'file')}"
    yield f"adopted {count(done.turns, 'turn')} ({beside}) from {done.source}"
    yield from (f"note: {note}" for note in done.notes)
    yield f"agent {printable(done.agent_id)} continues session {done.session_id}; the original does not change"


async def export(settings: Settings, owner: str, agent_id: str, path: Path | None) -> MovedChain:
    """Write an agent's chain into one file. Raises `NotFound`, `InvalidRequest`."""
    async with opened(settings) as store:
        agent = None if store is None else await store.agent(owner, agent_id)
        if store is None or agent is None:
            raise NotFound(f"there is no agent {agent_id!r} of {owner!r} in {place_of(settings)}: see `chains`")
        target = path or Path(f"{agent.dir}.export.jsonl")
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
        if limits.is_dense(record.line.encode("utf-8", "surrogatepass")):
            return False
        try:
            if not isinstance(limits.loads(record.line, limits.CLI_DEPTH), dict):
                return False
        except ValueError:
            return False
        if mending.is_mark(record):
            return mending.is_sound_mark(record)
        return not files.is_file(record) or files.is_sound(record)

    def records_to_keep(self, turn_id: str, parent_id: str | None, records: Sequence[Record]) -> tuple[Record, ...]:
        return self._fitting.records(turn_id, parent_id, records)


async def import_(settings: Settings, owner: str, source: Path | str, agent_id: str | None) -> MovedChain:
    """Import a file of `export` or of an archive. Raises `NotFound`, `InvalidRequest`, `StoreUnavailable`."""
    async with _ready(settings) as store, _looking() as look:
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
async def _ready(settings: Settings) -> AsyncIterator[Store]:
    """The store, for writing; its directory is created."""
    await asyncio.to_thread(make_private, settings.var)
    async with made(settings) as store:
        yield store


@asynccontextmanager
async def _looking() -> AsyncIterator[Replacement]:
    """Inspects images and documents in a helper process. Call it on another thread."""
    aside, loop = Aside(), asyncio.get_running_loop()
    media = Media(aside)

    def look(block: Block) -> tuple[NoteCode, Block] | None:
        found = asyncio.run_coroutine_threadsafe(media.changed(block), loop).result()
        return None if found is None else (found.code, found.block)

    try:
        yield look
    finally:
        await aside.close()
