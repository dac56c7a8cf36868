"""Rows to models and back: JSON as compact text, images cut out and put back."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from operator import attrgetter, itemgetter
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Connection, FromClause, Row, and_, bindparam, literal_column, select

from ...domain import blocks
from ...domain.evidence import NOTHING, Evidence
from ...domain.forms import ImageCutter, ImagePlace, Recorded, restore
from ...domain.limits import INPUT_BYTES, INPUT_VALUES, is_dense
from ...domain.models import (
    FINISHED,
    PLAIN,
    Agent,
    Fallback,
    FileMark,
    LimitWait,
    Link,
    Message,
    Placed,
    Record,
    Session,
    Status,
    Turn,
    TurnOptions,
    Usage,
)
from ...errors import DamagedRow, InvalidRequest
from ..base import TurnFacts, TurnOutline
from .damaged import reads
from .database import InsertNew, Prepared
from .tables import agents, image_refs, images, links, records, sessions, turns

Values = dict[str, Any]
R = TypeVar("R", bound=Recorded)

UNFINISHED: frozenset[Status] = frozenset({"queued", "running"})
_STATUSES = UNFINISHED | FINISHED

# Columns whose values are a turn's fields unchanged (without the generated `seq`).
_COPIED = (
    "id", "agent_key", "parent_id", "status", "model", "created_at", "effort", "profile", "stop_reason",
    "session_id", "continuity", "cost_usd", "delivery", "origin", "fingerprint", "frame_uuid", "path_hash", "depth",
    "instance", "started_at", "finished_at", "backend", "answered_by",
)  # fmt: skip
_copied_of = attrgetter(*_COPIED)
# Those of them that the end of a turn changes.
_ENDED = (
    "status", "stop_reason", "cost_usd", "session_id", "path_hash", "depth", "delivery", "finished_at", "backend",
    "answered_by",
)  # fmt: skip
_end_of = attrgetter(*_ENDED)

AGENT = tuple(agents.c[name] for name in Agent.__slots__)
SESSION = tuple(sessions.c[name] for name in Session.__slots__)
# Columns of an agent that are totals of its turns.
TOTALS = ("turns", "side", "failures", "cost_usd", "bytes", "sessions", "repairs")
# The index of each field of `Turn`, and so of its column in `TURN`, where two more columns follow.
_INDEX_OF = {name: at for at, name in enumerate(Turn.__slots__)}
_WITH_IMAGES = len(_INDEX_OF) + 1
TURN = (*(turns.c[name] for name in _INDEX_OF), turns.c.images, turns.c.bytes)
_INPUT, _OUTPUT, _PLACED, _OPTIONS, _EVIDENCE, _USAGE = itemgetter(
    "input", "output", "placed", "options", "evidence", "usage"
)(_INDEX_OF)
_FALLBACK, _LIMIT_WAIT = _INDEX_OF["fallback"], _INDEX_OF["limit_wait"]
_LISTS = itemgetter("output", "tools", "attempts")(_INDEX_OF)
_OBJECTS = itemgetter("timings", "error", "call")(_INDEX_OF)
_TEXTS = itemgetter("system", "stop_sequence")(_INDEX_OF)
_STATUS, *_WORDS = itemgetter("status", "session_id", "continuity", "backend")(_INDEX_OF)  # headers have these words

OUTLINE = tuple(turns.c[name] for name in TurnOutline.__slots__)
SUMMED = (
    turns.c.id, turns.c.seq, turns.c.agent_key, agents.c.owner, turns.c.status, turns.c.model, turns.c.answered_by,
    turns.c.created_at, turns.c.finished_at, turns.c.cost_usd, turns.c.usage, turns.c.error,
)  # fmt: skip
LINK = tuple(links.c)
RECORD = tuple(records.c)

# `placed` and the `evidence` of ordinary turns are the same few texts again and again. So their parsed form is cached:
# how many, and up to which length (characters).
COMMON = 256
SHORT = 256

# Made once: `json.dumps` with other than default options makes an encoder at each call.
_encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_decoder = json.JSONDecoder()
_HASH = re.compile('"([0-9a-f]{64})"')


# Most JSON columns of a turn are empty.
_EMPTY: dict[type, str] = {tuple: "[]", list: "[]", dict: "{}"}


def dumps(value: Any) -> str:
    """Compact JSON, valid as UTF-8: only a text with half a surrogate pair is escaped."""
    if not value and (text := _EMPTY.get(type(value))) is not None:
        return text
    text = _encoder.encode(value)
    if text.isascii():
        return text
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":"))
    return text


def _optional(value: Any) -> str | None:
    return None if value is None else dumps(value)


def limit_wait(wait: LimitWait | None) -> str | None:
    return None if wait is None else dumps(wait.as_json())


def loads(text: str) -> Any:
    """The inverse of `dumps`. Faster than `json.loads`, which skips blanks."""
    return _decoder.raw_decode(text)[0]


def size(*values: str | None) -> int:
    """Bytes that these texts take in the file."""
    return len("".join(filter(None, values)).encode("utf-8"))


def content(cutter: ImageCutter, **parts: Any) -> tuple[Values, dict[str, list[ImagePlace]]]:
    """The content columns of a turn without their images, and the places of those."""
    values: Values = {}
    places: dict[str, list[ImagePlace]] = {}
    for name, value in parts.items():
        values[name], cut_out = cutter.cut(dumps(value))
        if cut_out:
            places[name] = cut_out
    return values, places


@lru_cache(COMMON)
def _common_text(record: Placed | Usage) -> str:
    return dumps(record.as_json())


def turn_values(cutter: ImageCutter, turn: Turn) -> Values:
    """All columns of a turn except the generated `seq`. Raises `InvalidRequest` for an input that is larger than one
    that can be exported and imported."""
    values: Values = dict(zip(_COPIED, _copied_of(turn), strict=True))
    texts, places = content(cutter, input=list(map(Message.as_json, turn.input)), output=turn.output, tools=turn.tools)
    if turn.status in UNFINISHED and len(texts["input"]) > INPUT_VALUES:
        written = texts["input"].encode()
        if len(written) > INPUT_BYTES or is_dense(written, INPUT_VALUES):
            raise InvalidRequest(
                f"the messages of this turn have more than {INPUT_VALUES:,} JSON values, or {INPUT_BYTES:,} bytes "
                "without images and documents: send less, or remove items from the conversation"
            )
    texts |= {
        "system": _optional(turn.system),
        "stop_sequence": _optional(turn.stop_sequence),
        "fallback": _optional(turn.fallback and turn.fallback.as_json()),
        "limit_wait": limit_wait(turn.limit_wait),
        "placed": _common_text(turn.placed),
        "options": "{}" if turn.options == PLAIN else dumps(turn.options.as_json()),
        "evidence": dumps(turn.evidence.as_json()),
        "usage": _common_text(turn.usage),
        "timings": dumps(turn.timings),
        "attempts": dumps(turn.attempts),
        "error": _optional(turn.error),
        "call": _optional(turn.call),
        "images": dumps(places) if places else None,
    }
    return values | texts | {"bytes": size(*texts.values())}


def answer_values(cutter: ImageCutter, turn: Turn, stored: Row[Any]) -> Values:
    """The columns that the end of a turn changes; not its input and system prompt."""
    texts, places = content(cutter, output=turn.output, tools=turn.tools)
    if stored.images is not None:
        places = {**loads(stored.images), **places}
    texts |= {
        "stop_sequence": _optional(turn.stop_sequence),
        "fallback": _optional(turn.fallback and turn.fallback.as_json()),
        "evidence": dumps(turn.evidence.as_json()),
        "usage": _common_text(turn.usage),
        "timings": dumps(turn.timings),
        "attempts": dumps(turn.attempts),
        "images": dumps(places) if places else None,
    }
    values = dict(zip(_ENDED, _end_of(turn), strict=True))
    return values | texts | {"bytes": size(stored.system, stored.input, stored.placed, stored.options, *texts.values())}


def loaded_turns(conn: Connection, of_turns: Iterable[Row[Any]], **changed: Any) -> list[Turn]:
    """Turns with their images, from rows with all columns of `turns`. `changed`: fields that replace the stored
    ones."""
    return [turn(row, conn, **changed) for row in of_turns]


@reads(*TURN)
def turn(row: Row[Any], /, conn: Connection, *, images: bool = True, **changed: Any) -> Turn:
    """`images`: whether they are put back. Without them their `data` is empty."""
    *values, cut_out = row[:_WITH_IMAGES]
    if images and cut_out is not None:
        places = loads(cut_out)
        known = load_images(conn, (sha for part in places.values() for _, sha in part))
        for name, cut in places.items():
            values[_INDEX_OF[name]] = restore(values[_INDEX_OF[name]], cut, known)
    for at in _LISTS:
        values[at] = tuple(map(dict, loads(values[at])))
    values[_OUTPUT] = blocks.all_sound(values[_OUTPUT])
    for at in _OBJECTS:
        if values[at] is not None:
            values[at] = dict(loads(values[at]))
    for at in _TEXTS:
        if values[at] is not None:
            values[at] = "" + loads(values[at])  # raises for what is no text
    if values[_STATUS] not in _STATUSES or not all(f"{values[at]}".isprintable() for at in _WORDS):
        raise ValueError
    options = values[_OPTIONS]
    values[_INPUT] = _messages(values[_INPUT])
    values[_PLACED] = _common(Placed, values[_PLACED])
    values[_OPTIONS] = PLAIN if options == "{}" else TurnOptions.from_json(loads(options))
    values[_EVIDENCE] = _evidence(values[_EVIDENCE])
    values[_USAGE] = _common(Usage, values[_USAGE])
    if values[_FALLBACK] is not None:
        values[_FALLBACK] = Fallback.from_json(loads(values[_FALLBACK]))
    if values[_LIMIT_WAIT] is not None:
        values[_LIMIT_WAIT] = LimitWait.from_json(loads(values[_LIMIT_WAIT]))
    for name, value in changed.items():
        values[_INDEX_OF[name]] = value
    return Turn(*values)


def _messages(text: str) -> tuple[Message, ...]:
    read = map(Message.from_json, loads(text))
    return tuple(Message(message.role, blocks.all_sound(message.content)) for message in read)


def damaged_turn(row: Row[Any], damage: DamagedRow) -> Turn:
    """Stands for a turn that cannot be read, where people look at a chain: one that failed, and says what is wrong."""
    return Turn(str(row.id), row.seq, row.agent_key, None, "failed", "", (), 0.0, error=damage.as_dict())


def damaged_outline(row: Row[Any], _: DamagedRow) -> TurnOutline:
    return TurnOutline(str(row.id), row.seq, None, "failed", None, (), NOTHING, ())


def are_large(*of_turns: Row[Any], limit: int) -> bool:
    """Whether these rows of turns are more than the event loop should be kept for (bytes), or do not tell."""
    sizes = (row.bytes if isinstance(row.bytes, int) else limit + 1 for row in of_turns)
    return sum(sizes) > limit or any(row.images is not None for row in of_turns)


def _evidence(text: str) -> Evidence:
    return _common(Evidence, text) if len(text) < SHORT else Evidence.from_json(loads(text))


@lru_cache(COMMON)
def _common(kind: type[R], text: str) -> R:
    return kind.from_json(loads(text))


@reads(*OUTLINE)
def turn_outline(row: Row[Any]) -> TurnOutline:
    """From a row of the columns of `OUTLINE`."""
    turn_id, seq, parent_id, status, session_id, asked, evidence, attempts = tuple(row)
    known = _messages(asked), _evidence(evidence), tuple(loads(attempts))
    return TurnOutline(turn_id, seq, parent_id, status, session_id, *known)


@reads(*SUMMED)
def facts(row: Any, repairs: Mapping[str, int]) -> TurnFacts:
    code = None if row.error is None else str(loads(row.error).get("code"))
    usage, model = Usage.from_json(loads(row.usage)), row.answered_by or row.model
    known = row.created_at, row.finished_at, row.cost_usd, usage, code, repairs.get(row.id, 0)
    return TurnFacts(row.id, row.seq, row.agent_key, row.owner, row.status, model, *known)


@reads(*AGENT)
def agent(columns: Sequence[Any]) -> Agent:
    """From a row that begins with the columns of `AGENT`."""
    key, owner, agent_id, folder, named, head, created_at = columns[: len(AGENT)]
    return Agent(key, owner, agent_id, folder, bool(named), head, created_at)


def session_values(session: Session) -> Values:
    """The columns of a session that may change."""
    return {
        "tip_turn_id": session.tip_turn_id,
        "transcript": session.transcript,
        "cli_version": session.cli_version,
        "created_at": session.created_at,
        "mark": None if session.mark is None else dumps(session.mark.as_json()),
    }


@reads(*SESSION)
def session(columns: Sequence[Any]) -> Session:
    """From a row that begins with the columns of `SESSION`."""
    session_id, agent_key, tip, transcript, cli_version, created_at, text = columns[: len(SESSION)]
    mark = None if text is None else FileMark.from_json(loads(text))
    return Session(session_id, agent_key, tip, transcript, cli_version, created_at, mark)


@reads(*LINK)
def link(row: Row[Any]) -> Link:
    return Link(row.from_session, row.to_session, row.turn_id, row.reason, dict(loads(row.detail)), row.at)


def record_values(cutter: ImageCutter, turn_id: str, n: int, record: Record) -> Values:
    """A record's columns. The line is stored as bytes: it may not be valid UTF-8, and must come back unchanged."""
    line, places = cutter.cut(record.line)
    return {
        "turn_id": turn_id,
        "n": n,
        "uuid": record.uuid,
        "synthetic": record.synthetic,
        "images": dumps(places) if places else None,
        "line": line.encode("utf-8", "surrogatepass"),
    }


def loaded_records(conn: Connection, found: Sequence[Row[Any]]) -> list[Record]:
    known = load_images(
        conn, (sha for row in found if isinstance(row.images, str) for sha in _HASH.findall(row.images))
    )
    return [record(row, known) for row in found]


@reads(*RECORD)
def record(row: Row[Any], known: Mapping[str, str]) -> Record:
    line = row.line.decode("utf-8", "surrogatepass")
    return Record(
        line if row.images is None else restore(line, loads(row.images), known), row.uuid, bool(row.synthetic)
    )


def with_images(conn: Connection, sized: Iterable[tuple[Any, Any]]) -> list[int]:
    """How large each row is with its images. `sized`: of each row its size without them, and its column `images`, which
    has their hashes. A damaged value counts as nothing: an error follows when the row is read."""
    sizes, shas = [], []
    for size, hashes in sized:
        sizes.append(size if isinstance(size, int) else 0)
        shas.append(_HASH.findall(hashes) if isinstance(hashes, str) else ())
    known: dict[str, int] = {}
    for part in chunks(sorted({sha for each in shas for sha in each})):
        query = select(images.c.sha256, images.c.size).where(images.c.sha256.in_(part))
        known |= {sha: size for sha, size in conn.execute(query) if isinstance(size, int)}
    return [size + sum(known.get(sha, 0) for sha in each) for size, each in zip(sizes, shas, strict=True)]


# SQLite takes at least 999 variables in a statement, PostgreSQL 32,767.
CHUNK = 500

_INSERT_IMAGE = Prepared(InsertNew(images))
_INSERT_REF = Prepared(InsertNew(image_refs))
_LOCK_IMAGE = Prepared(
    select(images.c.sha256).where(images.c.sha256 == bindparam("of_sha")).with_for_update(read=True, key_share=True)
)


def save_images(conn: Connection, agent_key: int, new: Mapping[str, str]) -> int:
    """Store each image once, with a reference from the agent. Returns the size of the images new to this agent."""
    added = 0
    for sha, data in sorted(new.items()):  # in one order, so that no two transactions wait for each other
        # Locked, because the deletion of another agent with this image could remove it at this moment.
        while _LOCK_IMAGE.one(conn, {"of_sha": sha}) is None:
            _INSERT_IMAGE.run(conn, {"sha256": sha, "size": len(data), "data": data})
        added += _INSERT_REF.run(conn, {"agent_key": agent_key, "sha256": sha}).rowcount * len(data)
    return added


def load_images(conn: Connection, shas: Iterable[str]) -> dict[str, str]:
    known: dict[str, str] = {}
    distinct = sorted(set(shas))
    for part in chunks(distinct) if distinct else ():
        for sha256, data in conn.execute(select(images.c.sha256, images.c.data).where(images.c.sha256.in_(part))):
            known[sha256] = data
    return known


def chunks(values: list[str]) -> Iterable[list[str]]:
    return (values[at : at + CHUNK] for at in range(0, len(values), CHUNK))


def unfinished(of: FromClause, agent_key: ColumnElement[int]) -> ColumnElement[bool]:
    """Selects the unfinished turns of an agent. All agents together have few, while one agent may have very many turns:
    so the query must use the index of statuses, not that of agents, and names the statuses literally, because with
    parameters the planner would not know that they are rare."""
    rare: list[ColumnElement[str]] = [literal_column(f"'{status}'") for status in sorted(UNFINISHED)]
    return and_(of.c.status.in_(rare), of.c.agent_key + literal_column("0") == agent_key)
