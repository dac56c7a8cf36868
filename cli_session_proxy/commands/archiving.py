"""`archive`. It acts as another proxy of the store, beside running ones or without them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from functools import partial

from ..archive.archiving import Archiver, Outcome, idle_agents
from ..archive.places import place_at
from ..archive.sealed import ArchiveKey
from ..engine.engine import Engine
from ..engine.forgetting import ANY_AGE
from ..errors import ConfigError, NotFound, printable
from ..export.words import count
from ..http.audit import archives, audit_of
from ..sandbox import LOCAL_OWNER
from ..settings import Settings
from ..stores.auto import place_of
from .listing import moment_of
from .stored import agent_in, opened


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
            wanted = [(await agent_in(settings, existing, owner or LOCAL_OWNER, name))[1] for name in names]
        else:
            wanted = [agent for agent in await idle_agents(existing, before) if owner in (None, agent.owner)]
    if dry_run:
        for agent in wanted:
            yield Outcome(agent.agent_id, agent.owner, None)
        return
    engine, audit = Engine(settings), audit_of(settings)
    try:
        await engine.start()
        archiver = Archiver(engine, place, key, None if audit is None else partial(archives, audit, "command"))
        for agent in wanted:
            yield await archiver.archive(agent, before)
    finally:
        await engine.stop()


def line_of(done: Outcome, place: str, *, dry_run: bool) -> str:
    """For a person."""
    name = printable(done.agent_id)
    if dry_run:
        return f"{name}: would be archived"
    if done.stays is not None:
        beside = f" (in {place}: {done.name}, which is not needed)" if done.name is not None else ""
        return f"{name}: stays, {done.stays}{beside}"
    return f"{name}: {count(done.turns, 'turn')} ({count(done.records, 'record')}) in {place}: {done.name}"
