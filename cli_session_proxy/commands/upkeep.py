"""The commands around the chain: adopt, export, import, doctor; beside a running server or without one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import asdict
from pathlib import Path

from ..archive.fetching import fetched
from ..aside.media import Media
from ..aside.pool import Aside
from ..backends.claude import transcript
from ..backends.claude.process import environment
from ..backends.claude.sessions.adoption import Adopted, ImportFitting, Replacement, adopt_session
from ..domain.models import Block, Record
from ..domain.notes import Code
from ..errors import NotFound, printable
from ..export import incoming, portable
from ..export.portable import MovedChain
from ..export.words import count
from ..sandbox import make_private
from ..settings import Settings
from ..stores.auto import place_of
from ..stores.base import Store
from .bars import bar
from .doctor import Checkup, examine
from .fitting import fitted
from .stored import made, opened

Say = Callable[[str], None]


async def adopt(settings: Settings, owner: str, wanted: str, agent_id: str | None) -> Adopted:
    """Adopt a session of the CLI, from any directory. Raises `NotFound`, `InvalidRequest`."""
    async with _ready(settings) as store, _looking() as look:
        with bar("adopting") as move_bar:
            return await adopt_session(settings, store, owner, agent_id, wanted, look, move_bar)


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
        with bar("exporting", "turns") as moved:
            return await portable.export(settings, store, agent, target, lambda done, _: moved(done, None))


class _KeptByClaude:
    """Implements `incoming.KeptRecords`: sessions of any working directory, and files beside a transcript."""

    def __init__(self, settings: Settings, look: Replacement) -> None:
        self._projects = environment.config_dir(settings) / "projects"
        self._fitting = ImportFitting(look)

    def has_session(self, session_id: str) -> bool:
        return any(self._projects.glob(f"*/{session_id}.jsonl"))

    def is_sound(self, record: Record) -> bool:
        if transcript.is_mark(record):
            return transcript.is_sound_mark(record)
        return not transcript.is_file(record) or transcript.is_sound(record)

    def records_to_keep(self, turn_id: str, parent_id: str | None, records: Sequence[Record]) -> tuple[Record, ...]:
        return self._fitting.records(turn_id, parent_id, records)


async def import_(settings: Settings, owner: str, source: Path | str, agent_id: str | None) -> MovedChain:
    """Import a file of `export` or of an archive. Raises `NotFound`, `InvalidRequest`, `StoreUnavailable`."""
    async with _ready(settings) as store, _looking() as look:
        with ExitStack() as stack:
            file = await asyncio.to_thread(stack.enter_context, fetched(settings, str(source)))
            move_bar = stack.enter_context(bar("importing"))
            return await incoming.bring_in(store, _KeptByClaude(settings, look), owner, file, agent_id, move_bar)


async def doctor(settings: Settings, say: Say, *, check_cli: bool, as_json: bool) -> bool:
    """A line for each check as it is done. False when one is an error."""
    found: list[Checkup] = []
    async for one in examine(settings, check_cli=check_cli):
        found.append(one)
        if not as_json:
            say(fitted(f"{one.level:8}{one.check:20}{printable(one.says)}", 28))
            if one.mend:
                say(fitted(f"{'':28}fix: {printable(one.mend)}", 33))
    if as_json:
        say(json.dumps([asdict(one) for one in found], indent=1))
    return all(one.level != "error" for one in found)


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

    def look(block: Block) -> tuple[Code, Block] | None:
        found = asyncio.run_coroutine_threadsafe(media.changed(block), loop).result()
        return None if found is None else (found.code, found.block)

    try:
        yield look
    finally:
        await aside.close()
