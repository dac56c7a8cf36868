"""Turns and links in the form of a dump: redacted, images by their hash. Pure.

The shape comes first: `schema: "cli-session-proxy/chain/1"`. Programs rely on it; fields are only ever added.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar, cast

from typing_extensions import TypedDict  # pydantic, which checks dumps in the tests, needs this one before Python 3.12

from .. import redact
from ..domain.evidence import DONE, NOTHING, RECORDS, WHY, Evidence
from ..domain.models import (
    JSON,
    PLAIN,
    Block,
    Continuity,
    Delivery,
    Link,
    LinkReason,
    Message,
    Role,
    Session,
    Status,
    Turn,
)
from . import explain
from .words import Brief, shallow

SCHEMA = "cli-session-proxy/chain/1"
# Characters of base64 that are decoded at once, in a few milliseconds.
PIECE = 1024 * 1024


class MessageDump(TypedDict):
    role: Role
    content: list[Block]


class UsageDump(TypedDict):
    input_tokens: int
    output_tokens: int
    cache_read_tokens: int
    cache_write_tokens: int
    cache_share: float | None  # the cached share of the prompt
    thinking_tokens: int


class ContentDump(TypedDict):
    """The messages of `TurnDump`."""

    input: list[MessageDump]
    output: list[Block]
    error: JSON | None
    tools: list[JSON]
    says: list[str]


class MeasuredDump(ContentDump):
    """With tokens, cost, times and reason."""

    usage: UsageDump
    cost_usd: float | None
    timings: JSON
    reason: JSON


class TurnDump(MeasuredDump):
    """Times are UTC seconds since the epoch, timings milliseconds since acceptance, costs US dollars.

    An image is its hash, type and size. `says`: what happened to the turn, without its links, in sentences; empty for
    an ordinary turn.
    """

    id: str
    parent_id: str | None
    status: Status
    model: str
    session_id: str | None
    continuity: Continuity | None
    created_at: float
    started_at: float | None
    finished_at: float | None
    attempts: list[JSON]
    # added after the contract's first fields
    system: str | None
    effort: str | None
    profile: str | None
    stop_reason: str | None
    # why it continues its parent: the rule, messages sent, matched and imported, where the path was left
    continuity_reason: JSON
    delivery: Delivery
    origin: str
    # the backend and model that answered; for a fallback {asked, model, why, until, here}
    backend: str | None
    answered_by: str | None
    fallback: JSON | None
    # the client's metadata
    metadata: JSON


class NumberedDump(TurnDump):
    number: int  # in the order of acceptance, from 1: as on the page, in `show` and in every other format


class SessionDump(TypedDict):
    id: str
    tip_turn_id: str | None
    transcript: str
    cli_version: str
    created_at: float


class LinkDump(TypedDict):
    from_session: str | None
    to_session: str
    turn_id: str | None
    reason: LinkReason
    detail: JSON
    at: float
    # what broke and how it was repaired, in a sentence
    says: str


class ChainDump(TypedDict):
    schema: str
    agent_id: str
    sandbox: str
    head: str | None
    created_at: float
    turns: list[NumberedDump]
    sessions: list[SessionDump]
    links: list[LinkDump]


# --- from a row to its shape

T = TypeVar("T")
D_co = TypeVar("D_co", covariant=True)

# Fields of a turn's reason that `continuity` decided (docs/continuity-rules.md); the others are about its session.
_CONTINUITY = ("rule", "messages", "matched", "imported", "diverged_at", "left_off", "why")

# Fields of the evidence that a dump shows as they are stored.
_UNCHANGED = (
    "left_off", "cache_miss", "sandbox", "files_at", "verified", "reloaded", "output_refused", "retries", "cuts",
    "compacted", "unmet", "notes", "refusal", "recalled", "approvals",
)  # fmt: skip


def turn(row: Turn, links: Sequence[Link] = (), *, verbatim: bool = False) -> TurnDump:
    """`verbatim`: system, input, output and tools are not redacted; everything else is.

    `links`: those made at this turn; links of other turns are ignored.
    """
    parts = measured(row, links, verbatim=verbatim)
    reason = parts["reason"]
    shown: TurnDump = {
        "id": row.id,
        "parent_id": row.parent_id,
        "status": row.status,
        "model": row.model,
        "session_id": row.session_id,
        "continuity": row.continuity,
        "input": parts["input"],
        "output": parts["output"],
        "usage": parts["usage"],
        "cost_usd": row.cost_usd,
        "error": parts["error"],
        "created_at": row.created_at,
        "started_at": row.started_at,
        "finished_at": row.finished_at,
        "attempts": [
            {**one, "repaired": _detail(one["repaired"])} if isinstance(one.get("repaired"), dict) else one
            for one in _redacted(row.attempts)
        ],
        "system": row.system if verbatim else _redacted(row.system),
        "effort": row.effort,
        "profile": row.profile,
        "stop_reason": row.stop_reason,
        "continuity_reason": {name: reason[name] for name in _CONTINUITY if name in reason},
        "reason": reason,
        "timings": parts["timings"],
        "tools": parts["tools"],
        "delivery": row.delivery,
        "origin": row.origin,
        "backend": row.backend,
        "answered_by": row.answered_by,
        "fallback": None if row.fallback is None else row.fallback.as_json(),
        "metadata": _redacted(row.options.metadata),
        "says": parts["says"],
    }
    return shown


def measured(row: Turn, links: Sequence[Link] = (), *, verbatim: bool = False) -> MeasuredDump:
    """The part of `turn` with messages, tokens, cost, times and reason."""
    return {
        **contents(row, links, verbatim=verbatim),
        "usage": cast(UsageDump, {**row.usage.as_json(), "cache_share": row.usage.cache_share}),
        "cost_usd": row.cost_usd,
        "timings": _redacted(row.timings),
        "reason": _redacted(reason_of(row)),
    }


def contents(row: Turn, links: Sequence[Link] = (), *, verbatim: bool = False) -> ContentDump:
    """The part of `turn` with the messages, in half the time."""
    return {
        "input": [message(item, verbatim=verbatim) for item in row.input],
        "output": blocks(row.output, verbatim=verbatim),
        "error": _redacted(row.error),
        "tools": blocks(row.tools, verbatim=verbatim),
        "says": says(row, links),
    }


class Show(Protocol[D_co]):
    """The function `turn`, `measured` or `contents`."""

    def __call__(self, row: Turn, links: Sequence[Link] = (), *, verbatim: bool = False) -> D_co: ...


class Renderer(Protocol):
    """Calls a `Show`, in this process or in a helper process: redacting megabytes takes seconds."""

    async def __call__(self, show: Show[T], row: Turn, links: Sequence[Link] = (), *, verbatim: bool = False) -> T: ...


async def render_in_process(show: Show[T], row: Turn, links: Sequence[Link] = (), *, verbatim: bool = False) -> T:
    """Calls it in this process: for programs that serve no other request meanwhile."""
    return show(row, links, verbatim=verbatim)


def reason_of(turn: Turn) -> JSON:
    """`TurnDump.reason`: the turn's `placed`, options and evidence in one object."""
    placed, evidence = turn.placed, turn.evidence
    out = placed.as_json()
    if placed.messages is not None:
        out["delta"] = placed.delta
    if evidence is NOTHING and turn.options is PLAIN and turn.stop_sequence is None:  # nearly all turns of a long chain
        return out
    out = dict(evidence.other) | out
    wants = turn.options.as_json()
    wants.pop("metadata", None)  # shown separately
    if "format" in wants:
        out["format"] = wants.pop("format")
    if wants:
        out["wants"] = wants
    if turn.stop_sequence is not None:
        out["stop_sequence"] = turn.stop_sequence
    stored = evidence.as_json()
    out |= {name: stored[name] for name in _UNCHANGED if name in stored}
    if evidence.repaired is not None:
        out["repaired"] = _detail(evidence.repaired.as_json())
    if evidence.written is not None:
        out["session"] = _detail(evidence.written.as_json())
    elif evidence.waited:
        out["session"] = "waited for these results"
    elif evidence.shared:
        out["session"] = "ran in a process that is shared"
    if evidence.exit_code is not None:
        out["process"] = f"had ended with exit code {evidence.exit_code}"
    if evidence.settled:
        out["settled"] = "the proxy died after the CLI had finished this turn: read from the transcript"
    if evidence.records is not None:
        out["records"] = RECORDS.get(evidence.records, evidence.records)
    if evidence.brought is not None:
        by_client = evidence.brought.by == "client"
        out["why"] = "sent by the client as history" if by_client else evidence.brought.note
        if evidence.brought.session is not None:
            out["session"] = evidence.brought.session
    return out


def _detail(stored: JSON) -> JSON:
    """`LinkDump.detail`."""
    out = {name: value for name, value in stored.items() if name not in ("code", "note", "settled")}
    code: Any = stored.get("code")
    why = WHY.get(code) or stored.get("note")
    if why is not None:
        out["why"] = why
    if code in DONE:
        out["done"] = DONE[code]
    if "settled" in stored:
        out["settled"] = "after a crash"
    return out


def says(row: Turn, links: Sequence[Link] = ()) -> list[str]:
    """What happened to a turn, in sentences (`TurnDump.says`)."""
    return [one.says for one in briefs(row, links)]


def briefs(row: Turn, links: Sequence[Link] = ()) -> list[Brief]:
    """The sentences of `says`, each with its kind."""
    if row.evidence is NOTHING and row.fallback is None and len(row.attempts) < 2:  # nearly all turns of a long chain
        return []
    own = [link for link in links if link.turn_id == row.id]
    evidence = Evidence.from_json(_redacted(row.evidence.as_json()))
    return [*explain.beside(row.evidence, row.fallback), *explain.turn(evidence, _redacted(row.attempts), own)]


def line(content: Sequence[Block], most: int) -> str:
    """The texts among the blocks on one line, cut to so many characters."""
    return " ".join(" ".join(str(block.get("text", "")) for block in content).split())[:most]


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
    redacted = _redacted(row.detail)
    return {
        "from_session": row.from_session,
        "to_session": row.to_session,
        "turn_id": row.turn_id,
        "reason": row.reason,
        "detail": _detail(redacted),
        "at": row.at,
        "says": explain.link(row.reason, redacted, row.from_session, row.to_session),
    }


def without_files(row: Turn) -> Turn:
    """The same to every `Show`, without the data of images and documents."""
    asked = tuple(replace(message, content=tuple(map(_bare, message.content))) for message in row.input)
    return replace(row, input=asked, output=tuple(map(_bare, row.output)), tools=tuple(map(_bare, row.tools)))


def blocks(rows: tuple[Block, ...], *, verbatim: bool = False) -> list[Block]:
    return [_block(row, verbatim=verbatim) for row in rows]


def _block(row: Block, *, verbatim: bool) -> Block:
    text = row.get("text")
    if len(row) == 2 and isinstance(text, str) and row.get("type") == "text":  # nearly all of a long chain
        return row if verbatim or (redacted := redact.text(text)) is text else {**row, "text": redacted}
    plain = _bare(row)
    return plain if verbatim else cast(Block, redact.data(plain))


def _bare(row: Block) -> Block:
    return cast(Block, _without_images(shallow(row)))


def _redacted(value: Any) -> Any:
    return redact.data(shallow(value)) if value else value  # nearly always there is nothing


def _hash_of(data: str) -> tuple[str, int]:
    """The hash and the size of an image in base64. It is decoded in pieces: no other thread runs during such a call,
    which takes 0.6 s for 128 MiB."""
    digest, size = hashlib.sha256(), 0
    try:
        for at in range(0, len(data), PIECE):
            decoded = base64.b64decode(data[at : at + PIECE], validate=True)
            if at + PIECE < len(data) and len(decoded) != PIECE // 4 * 3:
                raise ValueError("padding in the middle")
            digest.update(decoded)
            size += len(decoded)
    except ValueError:  # not plain
        try:
            raw = base64.b64decode(data)
        except ValueError:  # not a valid image: hash its text
            raw = data.encode("utf-8", "surrogatepass")
        digest, size = hashlib.sha256(raw), len(raw)
    return digest.hexdigest(), size


def _without_images(value: Any) -> Any:
    """The value with the hash, type and size of each image and document in place of its data."""
    if isinstance(value, list | tuple):
        return [_without_images(item) for item in value]
    if not isinstance(value, dict):
        return value
    source = value.get("source")
    if isinstance(source, dict) and isinstance(source.get("data"), str):
        kind = value.get("type")
        if kind == "image" or (kind == "document" and source.get("type") == "base64"):
            digest, size = _hash_of(source["data"])
            return {"type": str(kind), "sha256": digest, "media_type": source.get("media_type"), "bytes": size}
    return {name: _without_images(item) for name, item in value.items()}
