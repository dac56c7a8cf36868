"""Rows of the store as a dump shows them: without secrets, images by their hash. Pure."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from typing import Any, Protocol, cast

from .. import redact
from ..domain.evidence import Evidence
from ..domain.models import JSON, Block, Link, Message, Session, Turn
from . import explain
from .schema import LinkDump, MessageDump, SessionDump, TurnDump, UsageDump
from .words import shallow

# Of a turn's reason: what `continuity` decided (docs/continuity-rules.md); the rest is how its session came to be.
_CONTINUITY = ("rule", "messages", "matched", "imported", "diverged_at", "left_off", "why")


def turn(row: Turn, links: Sequence[Link] = (), *, verbatim: bool = False) -> TurnDump:
    """`verbatim` shows what was said (system, input, output, tools) as it is; all else is redacted even then.

    `links` are those made at this turn; one of another turn tells nothing of it.
    """
    reason, attempts = _redacted(explain.reason(row)), _redacted(row.attempts)
    shown: TurnDump = {
        "id": row.id,
        "parent_id": row.parent_id,
        "status": row.status,
        "model": row.model,
        "session_id": row.session_id,
        "continuity": row.continuity,
        "input": [message(item, verbatim=verbatim) for item in row.input],
        "output": blocks(row.output, verbatim=verbatim),
        "usage": cast(UsageDump, row.usage.as_json()),
        "cost_usd": row.cost_usd,
        "error": _redacted(row.error),
        "created_at": row.created_at,
        "started_at": row.started_at,
        "finished_at": row.finished_at,
        "attempts": list(map(explain.attempt, attempts)),
        "system": row.system if verbatim else _redacted(row.system),
        "effort": row.effort,
        "profile": row.profile,
        "stop_reason": row.stop_reason,
        "continuity_reason": {name: reason[name] for name in _CONTINUITY if name in reason},
        "reason": reason,
        "timings": _redacted(row.timings),
        "tools": blocks(row.tools, verbatim=verbatim),
        "delivery": row.delivery,
        "origin": row.origin,
        "says": says(row, links, attempts),
    }
    return shown


class Tell(Protocol):
    """`turn`, here or elsewhere: secrets in megabytes of text, and images, take seconds to be found."""

    async def __call__(self, row: Turn, links: Sequence[Link] = (), *, verbatim: bool = False) -> TurnDump: ...


async def here(row: Turn, links: Sequence[Link] = (), *, verbatim: bool = False) -> TurnDump:
    """For a program that does nothing else."""
    return turn(row, links, verbatim=verbatim)


def says(row: Turn, links: Sequence[Link] = (), attempts: Sequence[JSON] | None = None) -> list[str]:
    """What happened to a turn beside its links, in sentences (`TurnDump.says`). `attempts`: without secrets."""
    own = [link for link in links if link.turn_id == row.id]
    evidence = row.evidence.as_json()
    told = Evidence.from_json(_redacted(evidence)) if evidence else row.evidence
    return explain.turn(told, _redacted(row.attempts) if attempts is None else attempts, own)


def message(row: Message, *, verbatim: bool = False) -> MessageDump:
    return {"role": row.role, "content": blocks(row.content, verbatim=verbatim)}


def session(row: Session) -> SessionDump:
    return {
        "id": row.id,
        "tip_turn_id": row.tip_turn_id,
        "transcript": row.transcript,
        "cli_version": row.cli_version,
        "created_at": row.created_at,
    }


def link(row: Link) -> LinkDump:
    kept = _redacted(row.detail)
    return {
        "from_session": row.from_session,
        "to_session": row.to_session,
        "turn_id": row.turn_id,
        "reason": row.reason,
        "detail": explain.detail(kept),
        "at": row.at,
        "says": explain.link(row.reason, kept, row.from_session, row.to_session),
    }


def blocks(rows: tuple[Block, ...], *, verbatim: bool = False) -> list[Block]:
    return [_block(row, verbatim=verbatim) for row in rows]


def _block(row: Block, *, verbatim: bool) -> Block:
    text = row.get("text")
    if len(row) == 2 and isinstance(text, str) and row.get("type") == "text":  # nearly all of a long chain
        return row if verbatim else {**row, "text": redact.text(text)}
    plain: Block = _without_images(shallow(row))
    return plain if verbatim else cast(Block, redact.data(plain))


def _redacted(value: Any) -> Any:
    return redact.data(shallow(value) if value else value)  # nearly always there is nothing


def _without_images(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_without_images(item) for item in value]
    if not isinstance(value, dict):
        return value
    source = value.get("source")
    if value.get("type") == "image" and isinstance(source, dict) and isinstance(source.get("data"), str):
        return _image(source)
    return {name: _without_images(item) for name, item in value.items()}


def _image(source: dict[str, Any]) -> Block:
    try:
        raw = base64.b64decode(source["data"])
    except ValueError:  # a model's or a file's image that is none: hashed as it stands
        raw = source["data"].encode("utf-8", "surrogatepass")
    digest = hashlib.sha256(raw).hexdigest()
    return {"type": "image", "sha256": digest, "media_type": source.get("media_type"), "bytes": len(raw)}
