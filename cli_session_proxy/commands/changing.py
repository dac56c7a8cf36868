"""`delete` and `rewind`, through the server that runs on this `var`, else by an engine of this process.

Also `commit`, which writes an agent's attempt into a git repository, and `memory`: what the next attempt is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..domain.models import JSON
from ..engine.committing import CommitOrder
from ..errors import ConfigError, InvalidRequest, NotFound
from ..export.words import count, visible
from ..git_memory.attempts import earlier, text_of
from ..http.keys import Keys
from ..http.served import Served, served_at
from ..sandbox import LOCAL_OWNER
from ..settings import GitMemory, Settings, fix_id_of
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


# --- git memory

# Most attempts that are counted without a fix id.
MOST_COUNTED = 10_000


async def commit(
    settings: Settings,
    owner: str,
    agent_id: str,
    given: Mapping[str, Any],
    repo: Path | None,
    options: tuple[str, ...],
) -> JSON:
    """See `Engine.commit`. It runs here, also beside a running server: the repository is the caller's."""
    if options and given["note"] is not None:
        raise ConfigError("--note takes no options of git commit: leave out what follows --")
    try:
        order = CommitOrder.read({name: value for name, value in given.items() if value is not None})
    except InvalidRequest as exc:
        raise ConfigError(exc.message) from exc
    order = replace(order, repo=repo, options=options)
    async with opened(settings) as store:
        await agent_in(settings, store, owner, agent_id)
    async with engine_in(settings, log_to_file=True) as engine:
        return (await engine.commit(owner, agent_id, order)).as_json()


async def memory(settings: Settings, repo: Path | None, fix_id: str | None) -> JSON:
    """{repo, fix_id, text, attempts, fixes}: `text` is what the model would be told (None: nothing). Without a
    `fix_id`, `fixes` counts the attempts at each fix. Raises `ConfigError`."""
    configured = settings.profile_for(None).git_memory or GitMemory(repo=Path())
    place = configured.repo if repo is None else repo
    fix_id = fix_id or configured.fix_id
    if fix_id is None:
        known = await earlier(place, None, MOST_COUNTED, settings.written_inside())
        fixes: dict[str, int] = {}
        for attempt in known.attempts:
            fixes[attempt.fix_id] = fixes.get(attempt.fix_id, 0) + 1
        return {"repo": str(place), "fix_id": None, "text": None, "attempts": [], "fixes": fixes}
    try:
        fix_id_of(fix_id)
    except ValueError as exc:
        raise ConfigError(str(exc)) from exc
    known = await earlier(place, fix_id, configured.attempts, settings.written_inside())
    attempts = [{**one.trailers, "commit": one.commit, "at": one.at} for one in known.attempts]
    return {"repo": str(place), "fix_id": fix_id, "text": text_of(fix_id, known), "attempts": attempts, "fixes": {}}


def print_memory(found: JSON) -> str:
    if found["text"] is not None:
        return visible(found["text"])
    if found["fix_id"] is not None:
        return visible(f"nothing: {found['repo']} has no commit or note with Fix-Id: {found['fix_id']}")
    if not found["fixes"]:
        return visible(f"nothing: {found['repo']} has no commit or note with a Fix-Id")
    lines = [f"{name}: {count(number, 'attempt')}" for name, number in found["fixes"].items()]
    return visible("\n".join([*lines, "Say --fix-id to see what an agent would be told."]))
