"""Adoption: makes turns of exchanges that a person had in a session outside the proxy.

    adopt           the tail that a person added to a session of ours (`claude --resume` in the sandbox)
    adopt_session   a session that the proxy has never seen, with its whole history, into a new agent's chain

Records are stored unchanged, with marks for images that the model would refuse. The source file is only read.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ....domain import lineage
from ....domain.evidence import Brought, Evidence
from ....domain.limits import is_model, is_session_id
from ....domain.models import JSON, Agent, Link, Placed, Record, Session, Turn
from ....errors import InvalidRequest, NotFound
from ....sandbox import Sandboxes, directory_name
from ....settings import Settings
from ....stores.base import ChainPart, NewChain, Store, WholeTurn
from ...base import Adoptable
from .. import transcript
from ..process import environment
from . import paths
from .exchanges import TranscriptExchange, exchanges
from .fitting import ImportFitting, Look
from .foreign import ForeignFile, Progress, survey
from .manager import Foreign


@dataclass(slots=True)
class Adopter:
    """Makes turns of exchanges, each the child of the last one; the first is a child of `parent`."""

    agent_key: int
    session_id: str
    note: str
    parent: Turn | None = None
    model: str = "default"

    def turn(self, exchange: TranscriptExchange) -> WholeTurn:
        before = self.parent
        self.model = exchange.model if is_model(exchange.model) else self.model
        at = exchange.at or time.time()
        self.parent = Turn(
            id=f"turn_{uuid.uuid4().hex}",
            seq=0,
            agent_key=self.agent_key,
            parent_id=before.id if before else None,
            status="completed",
            model=self.model,
            input=exchange.input,
            output=exchange.output,
            created_at=at,
            finished_at=at,
            delivery="delivered",
            path_hash=lineage.path_hash(before.path_hash if before else None, exchange.input, exchange.output),
            depth=(before.depth if before else 0) + 1,
            origin="adopted",
            placed=Placed("adopted"),
            evidence=Evidence(Brought("adoption", self.session_id, self.note), compacted=exchange.compacted),
            session_id=self.session_id,
            usage=exchange.usage,
            tools=exchange.tools,
        )
        return WholeTurn(self.parent, tuple(entry.record() for entry in exchange.entries))


def adoptable(agent: Agent, parent: Turn, foreign: Foreign) -> Adoptable:
    """Exchanges that a person had in the session, as turns after `parent`."""
    adopter = Adopter(agent.key, foreign.session.id, foreign.note, parent, parent.model)
    turns = tuple(adopter.turn(exchange) for exchange in exchanges(foreign.entries))
    session = replace(foreign.session, tip_turn_id=turns[-1].turn.id, mark=None)
    return Adoptable(turns, session, {"note": foreign.note}, transcript.has_ended(foreign.entries))


# --- a session that an application runs with the Claude Agent SDK

BY_SDK = "said with the Claude Agent SDK"


async def lines_of(store: Store, session: Session) -> list[str]:
    """The transcript of the path to the session's tip, under the session's id."""
    shown = await paths.shown(store, session.tip_turn_id)
    lines = (record.line for record in shown if not transcript.is_file(record))
    return await asyncio.to_thread(lambda: [transcript.with_session_id(line, session.id) for line in lines])


def turns_from_sdk(
    agent: Agent, parent: Turn | None, known: Sequence[Record], session: Session, lines: Sequence[Record]
) -> Adoptable | None:
    """The complete exchanges of these lines, as turns that follow `parent`. `known`: the last records before them.

    If the chain has grown meanwhile, the chain's new leaf becomes the parent of the first of these records.
    """
    entries = transcript.parse_records(lines).entries
    found = list(exchanges(entries))
    while found and not (found[-1].complete and transcript.has_ended(found[-1].entries)):
        found.pop()
    if not found:
        return None
    leaf = transcript.parse_records(known).leaf
    first = next(entry for exchange in found for entry in exchange.path)
    if not transcript.unbroken([first], leaf):
        hung = first.hung_on(leaf)
        found = [
            TranscriptExchange(tuple(hung if entry is first else entry for entry in exchange.entries))
            for exchange in found
        ]
    adopter = Adopter(agent.key, session.id, BY_SDK, parent, parent.model if parent else "default")
    turns = tuple(adopter.turn(exchange) for exchange in found)
    session = replace(session, tip_turn_id=turns[-1].turn.id, mark=None)
    return Adoptable(turns, session, {"note": BY_SDK}, True)


# --- a whole session ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Adopted:
    """The result. `session_id`: the new session, whose file the next turn writes; `notes`: for a person."""

    agent_id: str
    source: Path
    from_session: str
    session_id: str
    turns: int
    records: int
    files: int
    notes: tuple[str, ...]


async def adopt_session(
    settings: Settings,
    store: Store,
    owner: str,
    agent_id: str | None,
    wanted: str,
    look: Look,
    progress: Progress,
) -> Adopted:
    """Adopt a session as a new agent (named after the session if `agent_id` is None).

    `wanted`: a session id in the CLI's own directory, or the path of a transcript. Raises `NotFound` (with the places
    that were searched) and `InvalidRequest` (no transcript, a known session, an existing agent).
    """
    sandboxes = Sandboxes(settings)
    projects = transcript.Projects(settings, sandboxes, environment.config_dir(settings))
    source = await asyncio.to_thread(find_source, projects.root, wanted)
    history = await asyncio.to_thread(survey, source)
    agent_id = agent_id or history.session_id
    await _refuse_known(store, owner, agent_id, history)
    directory = directory_name(owner, agent_id)
    session_id = str(uuid.uuid4())
    place = projects.path(sandboxes.path(directory), session_id)
    files = await asyncio.to_thread(transcript.copy_beside, source, place)
    bringing = _Bringing(history, session_id, files, ImportFitting(look), progress)
    created = history.started or time.time()
    new = NewChain(owner, agent_id, directory, True, created, time.time(), lambda: bringing.head)
    try:
        await store.import_chain(new, bringing.parts())
    except BaseException:
        await asyncio.to_thread(transcript.remove, place)
        raise
    return bringing.adopted(agent_id)


def find_source(projects: Path, wanted: str) -> Path:
    """The transcript that a person means: a path, or the session id of a file in the CLI's directory."""
    if wanted.endswith(".jsonl") or os.sep in wanted:
        path = Path(wanted)
        with suppress(OSError, RuntimeError):  # a too long name, an unknown home
            path = path.expanduser()
            if path.is_file():
                return path.resolve()
        raise NotFound(f"there is no file {path}: give a session id or the path of its .jsonl file")
    found = sorted(projects.glob(f"*/{wanted}.jsonl")) if is_session_id(wanted) else []
    if len(found) > 1:
        listed = ", ".join(map(str, found))
        raise InvalidRequest(f"session {wanted} has several files: name the one to adopt ({listed})")
    if not found:
        raise NotFound(
            f"no session {wanted!r}: looked for {projects}/*/<session id>.jsonl; name the file itself, or another "
            "directory of the CLI with --claude-config-dir"
        )
    return found[0].resolve()


async def _refuse_known(store: Store, owner: str, agent_id: str, history: ForeignFile) -> None:
    """An early check, before the long work; the store checks the agent again."""
    known = await store.session(history.session_id)
    theirs = await store.agent_by_key(known.agent_key) if known else None
    if theirs is not None:
        raise InvalidRequest(
            f"session {history.session_id} is agent {theirs.agent_id!r}'s already: use that agent, or copy it with "
            "export and import"
        )
    agent = await store.agent(owner, agent_id)
    if agent is None:
        return
    async for _ in store.turns(agent.key):
        raise InvalidRequest(
            f"agent {agent_id!r} has turns already: choose another --agent-id, or `delete` it first", param="agent_id"
        )


@dataclass(slots=True)
class _Bringing:
    """Reads the file while the store imports it. Runs on the store's thread."""

    history: ForeignFile
    session_id: str
    files: int
    fitting: ImportFitting
    progress: Progress
    head: str | None = None
    turns: int = 0
    records: int = 0
    compactions: int = 0
    cut: int = 0

    def parts(self) -> Iterator[ChainPart]:
        adopter = Adopter(0, self.history.session_id, f"adopted from {self.history.path}")
        for exchange, last in _with_last(exchanges(self.history.entries(self.progress))):
            if last and not exchange.complete:
                self.cut = len(exchange.entries)
                continue
            whole = adopter.turn(exchange)
            self.head = whole.turn.id
            self.turns += 1
            self.records += len(whole.records)
            self.compactions += exchange.compacted is not None
            yield replace(whole, records=self.fitting.records(whole.turn.id, whole.turn.parent_id, whole.records))
        if self.head is None:
            raise InvalidRequest(f"{self.history.path} holds no finished exchange: there is nothing to adopt yet")
        now = time.time()
        yield Session(self.session_id, 0, self.head, "", self.history.version, now)
        detail: JSON = {"source": str(self.history.path), "turns": self.turns, "records": self.records}
        detail |= {"files": self.files, "notes": list(self.notes())}
        yield Link(self.history.session_id, self.session_id, self.head, "adopted", detail, now)

    def notes(self) -> Iterator[str]:
        if self.cut:
            yield f"the last exchange was still open: its {self.cut} records were left out"
        if self.compactions:
            yield f"compacted by the CLI {self.compactions} times: the model knows what is before only by the summary"
        yield from self.history.notes()

    def adopted(self, agent_id: str) -> Adopted:
        return Adopted(
            agent_id, self.history.path, self.history.session_id, self.session_id, self.turns, self.records, self.files,
            tuple(self.notes()),
        )  # fmt: skip


def _with_last(found: Iterator[TranscriptExchange]) -> Iterator[tuple[TranscriptExchange, bool]]:
    held: TranscriptExchange | None = None
    for exchange in found:
        if held is not None:
            yield held, False
        held = exchange
    if held is not None:
        yield held, True
