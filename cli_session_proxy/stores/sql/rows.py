"""Rows to models and back: JSON as compact text, images cut out and put back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any

from sqlalchemy import Connection, Row

from ...domain.evidence import Evidence
from ...domain.models import (
    JSON,
    PLAIN,
    Agent,
    Fallback,
    FileMark,
    Link,
    Message,
    Placed,
    Record,
    Session,
    Turn,
    TurnOptions,
    Usage,
)
from ..base import TurnOutline
from . import images
from .images import Cutter, Place
from .tables import turns

Values = dict[str, Any]

_PLAIN = (
    "seq", "id", "agent_key", "parent_id", "status", "model", "created_at", "effort", "profile", "stop_reason",
    "session_id", "continuity", "cost_usd", "delivery", "origin", "fingerprint", "frame_uuid", "path_hash", "depth",
    "instance", "started_at", "finished_at", "backend", "answered_by",
)  # fmt: skip

# Where turns were placed, and the evidence of those that went as turns should, are the same few texts again and again:
# how many of them are remembered, and up to which length (characters).
COMMON = 256
SHORT = 256

# Made once: `json.dumps` makes an encoder at each call for what is not its default.
_encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_decoder = json.JSONDecoder()


def dumps(value: Any) -> str:
    """Compact JSON as UTF-8 can carry it: only a text with half a surrogate pair is escaped."""
    text = _encoder.encode(value)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":"))
    return text


def _optional(value: Any) -> str | None:
    return None if value is None else dumps(value)


def loads(text: str) -> Any:
    """What `dumps` wrote: nothing stands around it, so that what `json.loads` does to skip blanks is left out."""
    return _decoder.raw_decode(text)[0]


def _loaded(text: str | None) -> Any:
    return None if text is None else loads(text)


def size(*values: str | bytes | None) -> int:
    """Bytes that these texts take in the file."""
    total = 0
    for value in values:
        if value:
            total += len(value) if isinstance(value, bytes) else len(value.encode("utf-8"))
    return total


def content(cutter: Cutter, **parts: Any) -> tuple[Values, dict[str, list[Place]]]:
    """The content columns of a turn without their images, and the places of those."""
    values: Values = {}
    places: dict[str, list[Place]] = {}
    for name, value in parts.items():
        values[name], found = cutter.cut(dumps(value))
        if found:
            places[name] = found
    return values, places


def messages(input: Iterable[Message]) -> list[JSON]:
    return [message.as_json() for message in input]


def turn_values(cutter: Cutter, turn: Turn) -> Values:
    """All columns of a turn but `seq`, which the database gives."""
    values: Values = {name: getattr(turn, name) for name in _PLAIN if name != "seq"}
    texts, places = content(cutter, input=messages(turn.input), output=turn.output, tools=turn.tools)
    texts |= {
        "system": _optional(turn.system),
        "stop_sequence": _optional(turn.stop_sequence),
        "fallback": _optional(turn.fallback and turn.fallback.as_json()),
        "placed": dumps(turn.placed.as_json()),
        "options": dumps(turn.options.as_json()),
        "evidence": dumps(turn.evidence.as_json()),
        "usage": dumps(turn.usage.as_json()),
        "timings": dumps(turn.timings),
        "attempts": dumps(turn.attempts),
        "error": _optional(turn.error),
        "call": _optional(turn.call),
        "images": dumps(places) if places else None,
    }
    return values | texts | {"bytes": size(*texts.values())}


def answer_values(cutter: Cutter, turn: Turn, stored: Row[Any]) -> Values:
    """The columns that the end of a turn changes; what was asked (input, system) is left as it is stored."""
    texts, places = content(cutter, output=turn.output, tools=turn.tools)
    places = {**(_loaded(stored.images) or {}), **places}
    texts |= {
        "stop_sequence": _optional(turn.stop_sequence),
        "fallback": _optional(turn.fallback and turn.fallback.as_json()),
        "evidence": dumps(turn.evidence.as_json()),
        "usage": dumps(turn.usage.as_json()),
        "timings": dumps(turn.timings),
        "attempts": dumps(turn.attempts),
        "images": dumps(places) if places else None,
    }
    names = (
        "status", "stop_reason", "cost_usd", "session_id", "path_hash", "depth", "delivery", "finished_at",
        "backend", "answered_by",
    )  # fmt: skip
    values = {name: getattr(turn, name) for name in names}
    return values | texts | {"bytes": size(stored.system, stored.input, stored.placed, stored.options, *texts.values())}


def loaded_turn(conn: Connection, row: Row[Any]) -> Turn:
    (turn,) = loaded_turns(conn, [row])
    return turn


def loaded_turns(conn: Connection, rows: Sequence[Row[Any]]) -> list[Turn]:
    """Turns from rows of all columns of `turns`, with their images."""
    places = [_loaded(row.images) or {} for row in rows]
    known = images.load(conn, (sha for by_name in places for part in by_name.values() for _, sha in part))
    found: list[Turn] = []
    for row, by_name in zip(rows, places, strict=True):
        values = list(_in_order(row))
        for name, cut in by_name.items():
            values[_AT[name]] = images.restore(values[_AT[name]], cut, known)
        for at in _JSON:
            if values[at] is not None:
                values[at] = loads(values[at])
        for at in _TUPLES:
            values[at] = tuple(values[at])
        options = values[_OPTIONS]
        values[_INPUT] = _messages(values[_INPUT])
        values[_PLACED] = _placed(values[_PLACED])
        values[_OPTIONS] = PLAIN if options == "{}" else TurnOptions.from_json(loads(options))
        values[_EVIDENCE] = _evidence(values[_EVIDENCE])
        values[_USAGE] = Usage(**values[_USAGE])
        if values[_FALLBACK] is not None:
            values[_FALLBACK] = Fallback.from_json(values[_FALLBACK])
        found.append(Turn(*values))
    return found


def _messages(text: str) -> tuple[Message, ...]:
    return tuple([Message.from_json(message) for message in loads(text)])


@lru_cache(COMMON)
def _placed(text: str) -> Placed:
    return Placed(**loads(text))


def _evidence(text: str) -> Evidence:
    return _common_evidence(text) if len(text) < SHORT else Evidence.from_json(loads(text))


@lru_cache(COMMON)
def _common_evidence(text: str) -> Evidence:
    return Evidence.from_json(loads(text))


def turn_outline(row: Row[Any]) -> TurnOutline:
    """From a row of the columns of `OUTLINE`."""
    turn_id, seq, parent_id, status, session_id, asked, evidence, attempts = tuple(row)
    known = _messages(asked), _evidence(evidence), tuple(loads(attempts))
    return TurnOutline(turn_id, seq, parent_id, status, session_id, *known)


def agent(row: Row[Any]) -> Agent:
    return Agent(row.key, row.owner, row.agent_id, row.dir, bool(row.named), row.head, row.created_at)


def session_values(session: Session) -> Values:
    return {
        "id": session.id,
        "agent_key": session.agent_key,
        "tip_turn_id": session.tip_turn_id,
        "transcript": session.transcript,
        "cli_version": session.cli_version,
        "created_at": session.created_at,
        "mark": None if session.mark is None else dumps(session.mark.as_json()),
    }


def session(row: Row[Any]) -> Session:
    mark = None if row.mark is None else FileMark.from_json(loads(row.mark))
    return Session(
        row.id, row.agent_key, row.tip_turn_id, row.transcript, row.cli_version, row.created_at, mark
    )  # fmt: skip


def link_values(agent_key: int, link: Link) -> Values:
    return {
        "agent_key": agent_key,
        "from_session": link.from_session,
        "to_session": link.to_session,
        "turn_id": link.turn_id,
        "reason": link.reason,
        "detail": dumps(link.detail),
        "at": link.at,
    }


def link(row: Row[Any]) -> Link:
    return Link(row.from_session, row.to_session, row.turn_id, row.reason, loads(row.detail), row.at)


def record_values(cutter: Cutter, turn_id: str, n: int, record: Record) -> Values:
    """A line as bytes: a line of a file may hold what UTF-8 cannot, and must come back all the same."""
    line, places = cutter.cut(record.line)
    return {
        "turn_id": turn_id,
        "n": n,
        "uuid": record.uuid,
        "synthetic": record.synthetic,
        "images": dumps(places) if places else None,
        "line": line.encode("utf-8", "surrogatepass"),
    }


def loaded_records(conn: Connection, rows: Sequence[Row[Any]]) -> list[Record]:
    places = [_loaded(row.images) or () for row in rows]
    known = images.load(conn, (sha for part in places for _, sha in part))
    return [
        Record(images.restore(row.line.decode("utf-8", "surrogatepass"), part, known), row.uuid, bool(row.synthetic))
        for row, part in zip(rows, places, strict=True)
    ]


TURN = tuple(turns.c)
# The columns in the order of a turn's fields: to make one by position takes less time than by name.
_AT = {name: at for at, name in enumerate(Turn.__slots__)}
_in_order = itemgetter(*(TURN.index(turns.c[name]) for name in _AT))
_INPUT, _PLACED, _OPTIONS, _EVIDENCE, _USAGE = itemgetter("input", "placed", "options", "evidence", "usage")(_AT)
_FALLBACK = _AT["fallback"]
_TUPLES = itemgetter("output", "tools", "attempts")(_AT)
_JSON = (_USAGE, *_TUPLES, *itemgetter("timings", "system", "stop_sequence", "error", "call", "fallback")(_AT))

OUTLINE = tuple(turns.c[name] for name in TurnOutline.__slots__)
