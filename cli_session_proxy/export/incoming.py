"""Imports an exported chain (see `portable`): the whole file is checked first, then read piece by piece.

The file is not trusted: its checksum only shows that it is complete. Every line is validated (`shapes`).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import IO, Any, Literal, Protocol

from ..domain import legacy
from ..domain.client_tools import checked
from ..domain.forms import restore
from ..domain.limits import CLI_DEPTH, LINE_VALUES, STRICT, TURN_VALUES, conversation_id, is_deeper, is_dense
from ..domain.models import JSON, Conversation, Item, Link, Record, Session, Turn
from ..errors import InvalidRequest, NotFound
from ..sandbox import directory_name
from ..stores.base import ChainPart, NewChain, Store, WholeTurn
from .portable import LEGACY, MAX_LINE, READ, SCHEMA, MovedChain, Progress, as_text
from .shapes import check_header, check_line, of_turn

# Characters of one turn's records, with their images. A path with more cannot be loaded.
MOST_OF_A_TURN = 512 * 1024 * 1024
# Levels of JSON in a line: a record of the CLI, within a turn.
DEEPEST = CLI_DEPTH + 8
# `resp_…`, `msg_…` and the like: the hexadecimal digits are those of a turn or an item.
_WIRE_ID = re.compile(r"([a-z]+)_([0-9a-f]{32})((?:_.*)?)")
_PREVIOUS = ("previous_response_id", "previous_interaction_id")


class Source(Protocol):
    """A file that can be read as often as it is opened: a `Path`, or one without a name. `str` names it."""

    def open(self, mode: Literal["rb"], /) -> IO[bytes]: ...


class RecordChecks(Protocol):
    """What the backend knows about records and sessions' files. Called on a thread."""

    def has_session(self, session_id: str) -> bool:
        """Whether a session of this id exists on this machine, whoever owns it."""

    def is_sound(self, record: Record) -> bool:
        """Whether the backend could have written this record itself."""

    def records_to_keep(self, turn_id: str, parent_id: str | None, records: Sequence[Record]) -> tuple[Record, ...]:
        """The records of a turn in the backend's stored form. Called for a parent before its children."""


async def import_file(
    store: Store, backend: RecordChecks, owner: str, path: Source, agent_id: str | None, progress: Progress
) -> MovedChain:
    """Import an exported chain, whole or not at all. Raises `InvalidRequest`, `NotFound`."""

    def check_file() -> Checked:
        try:
            with path.open("rb") as file:
                return check(path, file)
        except FileNotFoundError:
            raise NotFound(f"there is no file {path}: give the path of an export") from None
        except OSError as exc:
            raise InvalidRequest(f"{path} cannot be read ({exc.strerror}): give this user the right to") from exc

    checked = await asyncio.to_thread(check_file)
    check_header(f"{path} line 1", checked.head)
    exported_agent = checked.head["agent"]
    named = bool(exported_agent["named"]) or agent_id is not None
    agent_id = agent_id or str(exported_agent["agent_id"])
    renamed = await _exists_here(store, backend, checked)
    conversation = (conversation_id(str(exported_agent["agent_id"])), conversation_id(agent_id))
    reading = _Reading(checked, backend, str(uuid.uuid4()) if renamed else None, conversation, progress)
    directory = directory_name(owner, agent_id)
    created, now = float(exported_agent["created_at"]), time.time()
    head = reading.turn_id(checked.head["head"])
    new = NewChain(owner, agent_id, directory, named, created, now, lambda: head)
    with _follows_schema(path):
        await store.import_chain(new, reading.parts())
    return MovedChain(agent_id, Path(str(path)), checked.end["turns"], checked.end["records"], renamed)


def rehearse(checked: Checked, backend: RecordChecks) -> None:
    """Read the whole file as an import does, but store nothing. Blocks. Raises `InvalidRequest` if an import would."""
    with _follows_schema(checked.path):
        check_header(f"{checked.path} line 1", checked.head)
        for _ in _Reading(checked, backend, None, ("", ""), lambda _done, _total: None).parts():
            pass


@contextmanager
def _follows_schema(path: Source) -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as exc:
        raise InvalidRequest(f"{path} does not follow {SCHEMA} ({type(exc).__name__}: {exc}): export it again") from exc


@dataclass(frozen=True, slots=True)
class Checked:
    """A file with a correct checksum. `end`: its last line. `images`: the offset of each image's line."""

    path: Source
    size: int
    head: JSON
    end: JSON
    first_turn: str | None
    sessions: tuple[str, ...]
    images: Mapping[str, int] = field(repr=False)

    @property
    def legacy(self) -> bool:
        """Written by 0.1, which has one `reason` per turn."""
        return self.head["schema"] in LEGACY


def check(path: Source, file: IO[bytes]) -> Checked:
    """Read the whole file once: is it an export, complete and unchanged? Raises `InvalidRequest`."""
    raw = file.readline(MAX_LINE)
    try:
        head = _parsed(path, 1, raw)
        schema = str(head["schema"])
    except (InvalidRequest, KeyError):
        raise InvalidRequest(f"{path} is not an export of cli-session-proxy: its first line is no header") from None
    if schema not in READ:
        raise InvalidRequest(f"{path} is a {schema}, this program reads {SCHEMA}: upgrade cli-session-proxy")
    digest = hashlib.sha256()
    at = lines = turns = records = 0
    first: str | None = None
    sessions: list[str] = []
    images: dict[str, int] = {}
    predecessors: dict[str, Sequence[str]] = {}  # by turn id
    while raw:
        if raw.startswith(b'{"end":') and raw.endswith(b"\n"):
            counted: JSON = {"lines": lines, "turns": turns, "records": records, "sha256": digest.hexdigest()}
            if _parsed(path, lines + 1, raw)["end"] != counted or file.read(1):
                raise InvalidRequest(f"{path} was changed since its export: its checksum differs; copy it again")
            try:
                TopologicalSorter(predecessors).prepare()
            except CycleError as exc:
                raise InvalidRequest(
                    f"{path}: turn {exc.args[1][0]} continues itself: it was not made by this program, or changed"
                ) from exc
            return Checked(path, at, head, counted, first, tuple(sessions), images)
        digest.update(raw)
        lines += 1
        if raw.startswith((b'{"image":', b'{"session":', b'{"turn":')):
            line = _parsed(path, lines, raw)
            kind = check_line(f"{path} line {lines}", line, legacy=head["schema"] in LEGACY)
            if kind == "image":
                images[line["image"]] = at
            elif kind == "session":
                sessions.append(line["session"]["id"])
            else:
                turns += 1
                first = first or line["turn"]["id"]
                own_id = line["turn"]["id"]
                predecessors[own_id] = [turn_id for turn_id in _predecessors(line["turn"]) if turn_id is not None]
        records += raw.startswith(b'{"record":')
        at += len(raw)
        raw = file.readline(MAX_LINE)
    raise InvalidRequest(f"{path} is cut: its last line is missing; copy it again, or export it again")


def _predecessors(turn: JSON) -> tuple[str | None, str | None]:
    """The ids of the turns that a path goes on with before this one: its parent, and `Turn.end_without_it` if that
    differs."""
    return turn["parent_id"], (turn.get("call") or {}).get("behind")


def _parsed(path: Source, number: int, raw: bytes) -> JSON:
    """One line. Raises `InvalidRequest`."""
    most = TURN_VALUES if raw.startswith(b'{"turn":') else LINE_VALUES
    if is_dense(raw, most):
        raise InvalidRequest(f"{path} line {number} has more than {most:,} JSON values")
    try:
        line = _loads(raw)
    except RecursionError:
        raise InvalidRequest(f"{path} line {number} is nested too deep: it was not made by this program") from None
    except ValueError as exc:
        raise InvalidRequest(f"{path} line {number} is no JSON: it was not made by this program") from exc
    kind = next(iter(line), "") if isinstance(line, dict) else ""
    # `check` tells the kind of a line by its first bytes, so these must name the same kind as the parsed line.
    if not raw.startswith(f'{{"{kind}":'.encode("utf-8", "surrogatepass")):
        raise InvalidRequest(f"{path} line {number} is no line of an export: it was not made by this program")
    return dict(line)


def _loads(text: bytes | str) -> Any:
    """Parses strict JSON. Raises `ValueError` for NaN or too large a number, `RecursionError` for too many levels."""
    value = json.loads(text, **STRICT)
    if is_deeper(value, DEEPEST):
        raise RecursionError
    return value


async def _exists_here(store: Store, backend: RecordChecks, checked: Checked) -> bool:
    """Whether turns or sessions of this chain exist here already: then all of them get new ids."""
    # A chain is imported whole or not at all, and deleted with its agent: one turn stands for all.
    if checked.first_turn is not None and await store.turn(checked.first_turn) is not None:
        return True
    for session_id in checked.sessions:
        if await store.session(session_id) is not None:
            return True
        if await asyncio.to_thread(backend.has_session, session_id):
            return True
    return False


@dataclass(slots=True)
class _Reading:
    """Reads a checked file while the store imports it. Runs on a thread.

    `salt`: new ids are derived from it and the old ones; None if the ids stay. `conversation`: the conversation's id
    in the file, and here.
    """

    checked: Checked
    backend: RecordChecks
    salt: str | None
    conversation: tuple[str, str]
    progress: Progress

    def turn_id(self, old_id: str | None) -> str | None:
        """The turn's id here: the same for each mention of the turn."""
        return old_id if old_id is None or self.salt is None else f"turn_{self._fresh(old_id).hex}"

    def session_id(self, old_id: str | None) -> str | None:
        return old_id if old_id is None or self.salt is None else str(self._fresh(old_id))

    def wire_id(self, old_id: str | None) -> str | None:
        """The id here of what clients name by `resp_…`, `msg_…` and the like: a turn, a part of one, or an item. Any
        other id stays."""
        matched = _WIRE_ID.fullmatch(old_id) if old_id is not None and self.salt is not None else None
        if matched is None:
            return old_id
        return f"{matched[1]}_{self._fresh(f'turn_{matched[2]}').hex}{matched[3]}"

    def _fresh(self, old_id: str) -> uuid.UUID:
        assert self.salt is not None
        return uuid.uuid5(uuid.UUID(self.salt), old_id)

    def parts(self) -> Iterator[ChainPart]:
        turn: Turn | None = None
        records: list[Record] = []
        with self.checked.path.open("rb") as file, self.checked.path.open("rb") as image_file:
            number = size = 0
            while file.tell() < self.checked.size:
                number += 1
                where = f"{self.checked.path} line {number}"
                line = _parsed(self.checked.path, number, file.readline(MAX_LINE))
                if number == 1:
                    continue
                kind = check_line(where, line, legacy=self.checked.legacy)
                if kind == "record":
                    text = self._restored(where, line, line["record"], image_file)
                    record = Record(text, line["uuid"], line["synthetic"])
                    if "\n" in record.line or "\r" in record.line:
                        raise InvalidRequest(f"{where}: record: it is more than one line")
                    size += len(text)
                    if size > MOST_OF_A_TURN:
                        raise InvalidRequest(f"{where}: record: more than {MOST_OF_A_TURN:,} characters of one turn")
                    if not self.backend.is_sound(record):
                        raise InvalidRequest(
                            f"{where}: record: no line of a transcript, nor a file or a mark of this program"
                        )
                    records.append(record)
                    continue
                if turn is not None and kind != "image":
                    yield WholeTurn(turn, self.backend.records_to_keep(turn.id, turn.parent_id, records))
                    turn, records, size = None, [], 0
                    self.progress(file.tell(), self.checked.size)
                match kind:
                    case "turn":
                        turn = self._turn(where, line, image_file)
                    case "session":
                        row = line["session"]
                        row |= {"id": self.session_id(row["id"]), "tip_turn_id": self.turn_id(row["tip_turn_id"])}
                        row |= {"agent_key": 0, "transcript": "", "mark": None}
                        yield Session.from_json(row)
                    case "link":
                        row = line["link"]
                        row |= {name: self.session_id(row[name]) for name in ("from_session", "to_session")}
                        if self.checked.legacy:
                            row["detail"] = legacy.link_detail(row["reason"], row["detail"])
                        yield Link.from_json(row | {"turn_id": self.turn_id(row["turn_id"])})
                    case "conversation":
                        row = line["conversation"]
                        removed = tuple(str(self.wire_id(item_id)) for item_id in row["removed"])
                        yield Conversation(row["metadata"], removed)
                    case "item":
                        row = line["item"]
                        item_id = str(self.wire_id(row["id"]))
                        yield Item(item_id, row["data"] | {"id": item_id}, self.turn_id(row["turn_id"]))
        if turn is not None:
            yield WholeTurn(turn, self.backend.records_to_keep(turn.id, turn.parent_id, records))
        self.progress(self.checked.size, self.checked.size)

    def _restored(self, where: str, line: JSON, text: str, image_file: IO[bytes]) -> str:
        """The text with its images put back: together they are no larger than a line may be."""
        places = line.get("images") or ()
        images: dict[str, str] = {}  # base64 texts by hash
        size = previous_offset = 0
        for offset, sha256 in places:
            if sha256 not in images:
                image_file.seek(self.checked.images[sha256])
                images[sha256] = json.loads(image_file.readline(MAX_LINE))["data"]
            size += len(images[sha256])
            if size > MAX_LINE or offset < previous_offset:
                raise InvalidRequest(f"{where}: images: they are too large, or out of order")
            previous_offset = offset
        return restore(text, places, images)

    def _turn(self, where: str, line: JSON, image_file: IO[bytes]) -> Turn:
        fields = line["turn"]
        if line.get("images"):  # restored, then checked again: an image may stand at any place of a turn
            fields = _loads(self._restored(where, line, as_text(fields), image_file))
            check_line(where, {"turn": fields}, legacy=self.checked.legacy)
            if (fields["id"], _predecessors(fields)) != (line["turn"]["id"], _predecessors(line["turn"])):
                raise InvalidRequest(f"{where}: images: one stands in an id")
        data = of_turn(fields, legacy=self.checked.legacy)
        data |= {
            "seq": 0,
            "agent_key": 0,
            # Fingerprints and instances are only valid in the store that they come from.
            "fingerprint": "",
            "instance": None,
            "id": self.turn_id(data["id"]),
            "parent_id": self.turn_id(data["parent_id"]),
            "session_id": self.session_id(data["session_id"]),
            "call": self._call(data.get("call")),
        }
        if self.checked.legacy:
            reason = legacy.split_reason(data.pop("reason"))
            data |= {"placed": reason.placed.as_json(), "options": reason.options.as_json()}
            data |= {"evidence": reason.evidence.as_json(), "stop_sequence": reason.stop_sequence}
            data["attempts"] = [legacy.attempt(one, reason.evidence.output_refused) for one in data["attempts"]]
        turn = Turn.from_json(data)
        checked(turn.options.tools)  # used again if the client sends results next
        return turn

    def _call(self, call: JSON | None) -> JSON | None:
        """`Turn.call`, the data of a stateful wire, with the ids in it replaced: of responses, of items and, in
        `behind`, of a turn (see `Turn.end_without_it`). An absent field stays absent."""
        if call is None:
            return None
        changed: JSON = {name: self.wire_id(call[name]) for name in _PREVIOUS if name in call}
        for name in ("shown", "beside", "system_ids"):
            if name in call:
                changed[name] = [self.wire_id(item_id) for item_id in call[name]]
        if "items" in call:
            changed["items"] = {part: [self.wire_id(item) for item in ids] for part, ids in call["items"].items()}
        if "behind" in call:
            changed["behind"] = self.turn_id(call["behind"])
        if call.get("conversation") == self.conversation[0]:
            changed["conversation"] = self.conversation[1]
        return call | changed
