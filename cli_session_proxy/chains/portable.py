"""A chain as one file, to go to another machine: `cli-session-proxy/export/1`, JSON lines.

    {"schema": "cli-session-proxy/export/1", "program": …, "exported_at": …, "agent": {…}, "head": …, "sandbox": …}
    {"image": sha256, "data": base64}         each image once, before the first line that shows it
    {"turn": {…}}                             in the order of acceptance
    {"record": line, "uuid": …, "synthetic": …}   the records of the turn above, verbatim
    {"session": {…}} {"link": {…}}
    {"end": {"lines": n, "turns": n, "records": n, "sha256": …}}   of every byte before this line

A turn or record with images carries `"images": [[offset, sha256], …]`: where they were in its text. Everything is
streamed, so memory is bounded by one turn. What is queued or running, and what recognises a client's retry, stays
behind. A file without its end, or with another sum, is refused before anything is written.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

from ..claude import environment
from ..errors import InvalidRequest, NotFound
from ..models import FINISHED, JSON, Agent, Link, Message, Record, Session, Turn, Usage
from ..sandbox import Sandboxes, directory_name
from ..settings import Settings
from ..stores.base import ChainPart, NewChain, Store, WholeTurn
from ..stores.images import Cutter, restore

SCHEMA = "cli-session-proxy/export/1"

T = TypeVar("T")

# (bytes or turns done, in all)
Progress = Callable[[int, int], None]

# A line is one record or one image; the API takes requests of 32 MB, so that this is no line of ours.
MAX_LINE = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Moved:
    """What was written or read. `renamed`: its ids were taken here, so that turns and sessions got new ones."""

    agent_id: str
    path: Path
    turns: int
    records: int
    renamed: bool = False


# --- out --------------------------------------------------------------------------------------------------


async def export(settings: Settings, store: Store, agent: Agent, path: Path, progress: Progress) -> Moved:
    """Write the chain as it is now, for this user only (0600). Nothing stays when it fails. Raises `InvalidRequest`."""
    file = await asyncio.to_thread(_created, path)
    out = _Writer(file)
    try:
        async for line in _lines_of(settings, store, agent, out, progress):
            await asyncio.to_thread(out.line, line)
        await asyncio.to_thread(out.end)
    except BaseException as exc:
        await asyncio.to_thread(path.unlink, missing_ok=True)
        if isinstance(exc, OSError):
            raise InvalidRequest(f"{path} cannot be written ({exc.strerror}): free space, or choose -o") from exc
        raise
    finally:
        file.close()
    return Moved(agent.agent_id, path, out.turns, out.records)


def _created(path: Path) -> IO[bytes]:
    try:
        return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
    except FileExistsError:
        raise InvalidRequest(f"{path} is there already: move it away, or choose another file with -o") from None
    except OSError as exc:
        raise InvalidRequest(f"{path} cannot be written ({exc.strerror}): choose another file with -o") from exc


async def _lines_of(
    settings: Settings, store: Store, agent: Agent, out: _Writer, progress: Progress
) -> AsyncIterator[JSON]:
    chain = await store.chain(agent.key)
    if chain is None:
        raise NotFound(f"there is no agent {agent.agent_id!r}")
    # Links and head are read first: what is finished later is not part of this export.
    now = time.time()
    yield {
        "schema": SCHEMA,
        "exported_at": now,
        "agent": {"agent_id": chain.agent.agent_id, "named": chain.agent.named, "created_at": chain.agent.created_at},
        "head": chain.agent.head,
        "sandbox": str(Sandboxes(settings).path(chain.agent.dir)),
    }
    tips = {session.tip_turn_id for session in chain.sessions} | {chain.agent.head}
    async for turn in store.turns(agent.key):
        if turn.id not in tips and (turn.status not in FINISHED or (turn.finished_at or 0.0) > now):
            continue
        async for line in _turn_lines(store, turn, out):
            yield line
        progress(out.turns, out.turns)
    known = await _still_there(store, agent, out)
    for session in chain.sessions:
        yield {"session": _fields(session, "agent_key", "mark", "transcript")}
    for link in chain.links:
        named = link if link.turn_id in known or link.turn_id is None else dataclasses.replace(link, turn_id=None)
        yield {"link": _fields(named)}


async def _turn_lines(store: Store, turn: Turn, out: _Writer) -> AsyncIterator[JSON]:
    parent = turn.parent_id
    if parent is not None and parent not in out.ids:
        above = await store.turn(parent)
        if above is None or above.status not in FINISHED:  # asked to continue a turn that never ended
            turn = dataclasses.replace(turn, parent_id=None)
    cutter = Cutter()
    line = _with_images(cutter, "turn", _text(_fields(turn, "seq", "agent_key", "instance", "fingerprint")))
    lines = [_record_line(cutter, record) for record in await store.own_records(turn.id)]
    for sha256, data in cutter.images.items():
        if sha256 not in out.images:
            out.images.add(sha256)
            yield {"image": sha256, "data": data}
    out.ids.add(turn.id)
    yield line
    for line in lines:
        yield line


async def _still_there(store: Store, agent: Agent, out: _Writer) -> set[str]:
    if await store.agent_by_key(agent.key) is None:
        raise NotFound(f"agent {agent.agent_id!r} was deleted while it was exported")
    return out.ids


def _with_images(cutter: Cutter, name: str, text: str) -> JSON:
    shortened, places = cutter.cut(text)
    line: JSON = {name: json.loads(shortened)}
    return line | {"images": places} if places else line


def _record_line(cutter: Cutter, record: Record) -> JSON:
    shortened, places = cutter.cut(record.line)
    line: JSON = {"record": shortened, "uuid": record.uuid, "synthetic": record.synthetic}
    return line | {"images": places} if places else line


def _fields(row: Any, *without: str) -> JSON:
    named = {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}
    return {name: _plain(value) for name, value in named.items() if name not in without}


def _plain(value: Any) -> Any:
    if isinstance(value, Message | Usage):
        return value.as_json()
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _text(value: Any) -> str:
    # ASCII: half a surrogate pair in an answer survives, and the places of images are counted in this very text
    return json.dumps(value, separators=(",", ":"))


class _Writer:
    """Lines into a file, with the running sum."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self._lines = 0
        self.turns = 0
        self.records = 0
        self.ids: set[str] = set()
        self.images: set[str] = set()

    def line(self, value: JSON) -> None:
        data = _text(value).encode() + b"\n"
        self._hash.update(data)
        self._file.write(data)
        self._lines += 1
        self.turns += "turn" in value
        self.records += "record" in value

    def end(self) -> None:
        counts = {"lines": self._lines, "turns": self.turns, "records": self.records}
        self._file.write(_text({"end": counts | {"sha256": self._hash.hexdigest()}}).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


# --- in ---------------------------------------------------------------------------------------------------


async def bring_in(
    settings: Settings, store: Store, owner: str, path: Path, agent_id: str | None, progress: Progress
) -> Moved:
    """Take an exported chain in, whole or not at all. Raises `InvalidRequest`, `NotFound`."""
    checked = await asyncio.to_thread(_check, path)
    said = checked.head["agent"]
    named = bool(said["named"]) or agent_id is not None
    agent_id = agent_id or str(said["agent_id"])
    renamed = await _taken(settings, store, checked)
    reading = _Reading(checked, str(uuid.uuid4()) if renamed else None, progress)
    directory = directory_name(owner, agent_id)
    created, now = float(said["created_at"]), time.time()
    head = reading.turn_id(checked.head["head"])
    new = NewChain(owner, agent_id, directory, named, created, now, lambda: head)
    try:
        await store.import_chain(new, reading.parts())
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise InvalidRequest(f"{path} does not follow {SCHEMA} ({type(exc).__name__}: {exc}): export it again") from exc
    return Moved(agent_id, path, checked.turns, checked.records, renamed)


@dataclass(frozen=True, slots=True)
class _Checked:
    """A file whose sum is right. `images` says where in the file each image's line begins."""

    path: Path
    size: int
    head: JSON
    turns: int
    records: int
    first_turn: str | None
    sessions: tuple[str, ...]
    images: Mapping[str, int] = field(repr=False)


def _check(path: Path) -> _Checked:
    """Read the whole file once: is it ours, complete and unchanged?"""
    try:
        with path.open("rb") as file:
            return _checked(path, file)
    except FileNotFoundError:
        raise NotFound(f"there is no file {path}: give the path of an export") from None
    except OSError as exc:
        raise InvalidRequest(f"{path} cannot be read ({exc.strerror}): give this user the right to") from exc


def _checked(path: Path, file: IO[bytes]) -> _Checked:
    head = _header(path, file.readline(MAX_LINE))
    file.seek(0)
    digest = hashlib.sha256()
    at = lines = turns = records = 0
    first: str | None = None
    sessions: list[str] = []
    images: dict[str, int] = {}
    while raw := file.readline(MAX_LINE):
        if raw.startswith(b'{"end":') and raw.endswith(b"\n"):
            counted = {"lines": lines, "turns": turns, "records": records, "sha256": digest.hexdigest()}
            if json.loads(raw)["end"] != counted or file.read(1):
                raise InvalidRequest(f"{path} was changed since its export: its sum is another; copy it again")
            return _Checked(path, at, head, turns, records, first, tuple(sessions), images)
        digest.update(raw)
        if raw.startswith(b'{"image":'):
            images[str(json.loads(raw)["image"])] = at
        elif raw.startswith(b'{"session":'):
            sessions.append(str(json.loads(raw)["session"]["id"]))
        elif raw.startswith(b'{"turn":'):
            turns += 1
            first = first or str(json.loads(raw)["turn"]["id"])
        records += raw.startswith(b'{"record":')
        lines += 1
        at += len(raw)
    raise InvalidRequest(f"{path} is cut: its last line is missing; copy it again, or export it again")


def _header(path: Path, raw: bytes) -> JSON:
    try:
        head = dict(json.loads(raw))
        schema = head["schema"]
    except (ValueError, TypeError, KeyError):
        raise InvalidRequest(f"{path} is not an export of cli-session-proxy: its first line is no header") from None
    if schema != SCHEMA:
        raise InvalidRequest(f"{path} is a {schema}, this program reads {SCHEMA}: upgrade cli-session-proxy")
    return head


async def _taken(settings: Settings, store: Store, checked: _Checked) -> bool:
    """Do these turns or sessions live here already (a copy on the same machine)? Nobody's files may be touched."""
    if checked.first_turn is not None and await store.turn(checked.first_turn) is not None:
        return True
    projects = environment.config_dir(settings) / "projects"
    for session_id in checked.sessions:
        if await store.session(session_id) is not None:
            return True
        if await asyncio.to_thread(lambda name: any(projects.glob(f"*/{name}.jsonl")), session_id):
            return True
    return False


@dataclass(slots=True)
class _Reading:
    """The walk over a checked file while the store takes it in. Runs on the store's thread."""

    checked: _Checked
    salt: str | None
    progress: Progress

    def turn_id(self, old: str | None) -> str | None:
        """The same turn gets the same new id wherever it is named."""
        return old if old is None or self.salt is None else f"turn_{self._fresh(old).hex}"

    def session_id(self, old: str | None) -> str | None:
        return old if old is None or self.salt is None else str(self._fresh(old))

    def _fresh(self, old: str) -> uuid.UUID:
        assert self.salt is not None
        return uuid.uuid5(uuid.UUID(self.salt), old)

    def parts(self) -> Iterator[ChainPart]:
        turn: Turn | None = None
        records: list[Record] = []
        with self.checked.path.open("rb") as file, self.checked.path.open("rb") as aside:
            while file.tell() < self.checked.size:
                line = json.loads(file.readline(MAX_LINE))
                if "record" in line:
                    records.append(self._record(line, aside))
                    continue
                if turn is not None and "image" not in line:
                    yield WholeTurn(turn, tuple(records))
                    turn, records = None, []
                    self.progress(file.tell(), self.checked.size)
                if "turn" in line:
                    turn = self._turn(line, aside)
                elif "session" in line:
                    yield self._session(line["session"])
                elif "link" in line:
                    yield self._link(line["link"])
        if turn is not None:
            yield WholeTurn(turn, tuple(records))
        self.progress(self.checked.size, self.checked.size)

    def _restored(self, line: JSON, text: str, aside: IO[bytes]) -> str:
        places = line.get("images") or ()
        known: dict[str, str] = {}
        for _, sha256 in places:
            if sha256 not in known:
                aside.seek(self.checked.images[sha256])
                known[sha256] = json.loads(aside.readline(MAX_LINE))["data"]
        return restore(text, places, known)

    def _record(self, line: JSON, aside: IO[bytes]) -> Record:
        return Record(self._restored(line, line["record"], aside), line["uuid"], line["synthetic"])

    def _turn(self, line: JSON, aside: IO[bytes]) -> Turn:
        data = json.loads(self._restored(line, _text(line["turn"]), aside))
        data |= {
            "seq": 0,
            "agent_key": 0,
            "id": self.turn_id(data["id"]),
            "parent_id": self.turn_id(data["parent_id"]),
            "session_id": self.session_id(data["session_id"]),
            "input": [Message.from_json(message) for message in data["input"]],
            "usage": Usage.from_json(data["usage"]),
        }
        return _made(Turn, data)

    def _session(self, data: JSON) -> Session:
        own = {"id": self.session_id(data["id"]), "tip_turn_id": self.turn_id(data["tip_turn_id"])}
        return _made(Session, data | own | {"agent_key": 0, "transcript": ""})

    def _link(self, data: JSON) -> Link:
        own = {name: self.session_id(data[name]) for name in ("from_session", "to_session")}
        return _made(Link, data | own | {"turn_id": self.turn_id(data["turn_id"])})


def _made(kind: type[T], data: JSON) -> T:
    """The row, with lists as the tuples that it keeps. A field that this version does not know is left out."""
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]  # every kind here is one
    return kind(**{name: tuple(v) if isinstance(v, list) else v for name, v in data.items() if name in names})
