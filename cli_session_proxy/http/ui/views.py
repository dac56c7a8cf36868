"""A chain as the page shows it: a short row per turn, and a turn's records beside its transcript. Pure."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ... import redact
from ...backends.base import ComparedRecord, Comparison, RequestSeen
from ...domain.evidence import tool_calls
from ...domain.limits import size_of
from ...domain.models import JSON, ON_PATH, Agent, Block, Link, Turn, Usage
from ...export import explain, shown, words
from ...export.shown import TurnDump
from ...export.words import shallow
from ...stores.base import TurnPage
from ..large_turns import LARGE, TOO_LARGE

# Characters: two lines of a row. The opened turn shows the whole text.
PREVIEW = 240
# The steps of a turn, by the names of `LiveTurn.at`.
STEPS = ("queued", "session_ready", "first_block", "result", "committed")
# The newest blocks of a request that are shown; the page shows the older ones as turns of the chain.
NEWEST_SENT = 200
# The most characters that are shown of a record and of its names; whole records are compared. Then the most records,
# and their characters in all: an agent's shell may have written any number of records.
SHOWN, _NAME = 2000, 64
MOST_RECORDS, MOST_OF_RECORDS = 1000, 2_000_000


def page(agent: Agent, stored: TurnPage, title: str = "", budgets: Sequence[JSON] = ()) -> JSON:
    """`next`: the value of `?before=` for older turns; None if there are none."""
    links: dict[str | None, list[Link]] = defaultdict(list)
    for link in stored.links:
        links[link.turn_id].append(link)
    rows = [row(turn, stored.newest - at, links[turn.id]) for at, turn in enumerate(stored.turns)]
    return {
        "object": "list",
        "agent_id": agent.agent_id,
        "title": title,
        "head": agent.head,
        "created_at": agent.created_at,
        "total": stored.total,
        "cost_usd": stored.cost_usd,
        "budgets": budgets,
        "link_counts": stored.link_counts,
        "data": rows,
        "next": stored.turns[-1].seq if stored.turns and stored.newest > len(stored.turns) else None,
    }


def row(turn: Turn, number: int, links: Sequence[Link]) -> JSON:
    return {
        "id": turn.id,
        "seq": turn.seq,
        "number": number,
        "parent_id": turn.parent_id,
        "status": turn.status,
        "continuity": turn.continuity,
        "session_id": turn.session_id,
        "model": turn.answered_by or turn.model,
        "origin": turn.origin,
        "side": turn.placed.side,
        "delivery": turn.delivery,
        "created_at": turn.created_at,
        "finished_at": turn.finished_at,
        "cost_usd": turn.cost_usd,
        "error": turn.error.get("code") if turn.error else None,
        "why": why(turn),
        "asked": preview(block for message in turn.input for block in message.content),
        "answered": preview(turn.output, is_markdown=True),
        "tools": list(dict.fromkeys(str(tool.get("name")) for tool in turn.tools if "name" in tool)),
        "links": [shown.link(link) for link in links],
        "says": shown.says(turn, links),
        "told": [one._asdict() for one in words.in_brief(turn, links)],
    }


def newest(agent: Agent, turn: Turn, title: str) -> JSON:
    """The newest turn of an agent, for its row in the list."""
    return {
        "agent_id": agent.agent_id,
        "title": title,
        "turn_id": turn.id,
        "asked": preview(block for message in turn.input for block in message.content),
        "answered": preview(turn.output, is_markdown=True) or why(turn) or "",
    }


def why(turn: Turn) -> str | None:
    """The first words of the turn's error; None without an error."""
    if turn.error is None:
        return None
    return preview([{"type": "text", "text": explain.why(turn.error)}])


def waterfall(turn: Turn, dump: TurnDump) -> list[JSON]:
    """The events of a turn: its steps, attempts, calls of the CLI's tools, and retried requests to the provider.
    `from` and `to` are milliseconds since the acceptance; `to` None: an instant.

    Events that an older version stored without a time are left out.
    """
    began = turn.created_at

    def millis(at: float) -> float:
        return round(max(0.0, at - began) * 1000, 1)

    events: list[JSON] = []
    previous_end = 0.0
    for step in STEPS:
        at = turn.timings.get(step)
        if isinstance(at, int | float):
            events.append({"kind": "step", "name": step, "from": min(previous_end, at), "to": at, "failed": False})
            previous_end = at
    attempts = [one for one in dump["attempts"] if isinstance(one.get("started_at"), int | float)]
    for one in attempts if len(attempts) > 1 else ():  # a single attempt is no more than the turn's steps
        ended = one.get("ended_at")
        events.append(
            {
                "kind": "attempt", "name": str(one.get("n")), "from": millis(one["started_at"]),
                "to": millis(ended) if isinstance(ended, int | float) else None,
                "failed": one.get("status") not in ON_PATH, "why": str(one.get("why") or one.get("code") or ""),
            }
        )  # fmt: skip
    for call in tool_calls(dump["tools"]):
        ends = None if call.ended is None else millis(call.ended)
        events.append(
            {"kind": "tool", "name": call.name, "from": millis(call.began), "to": ends, "failed": call.failed}
        )
    for retry in dump["reason"].get("retries") or ():
        at, delay = retry.get("at"), retry.get("retry_delay_ms")
        if isinstance(at, int | float):
            ends = millis(at) + delay if isinstance(delay, int | float) else None
            label = explain.doing("retry", retry)
            events.append({"kind": "retry", "name": label, "from": millis(at), "to": ends, "failed": True})
    return events


def image(turn: Turn, sha256: str) -> tuple[str, bytes] | None:
    """The media type and bytes of the turn's image with this hash, at any depth; None if there is none."""
    left: list[Any] = [*turn.output, *(block for message in turn.input for block in message.content), *turn.tools]
    while left:
        block = left.pop()
        if isinstance(block, list | tuple):
            left += block
        elif isinstance(block, dict):
            source = block.get("source")
            if block.get("type") == "image" and isinstance(source, dict) and isinstance(source.get("data"), str):
                try:
                    raw = base64.b64decode(source["data"])
                except ValueError:
                    continue  # not an image: a file may hold anything
                if hashlib.sha256(raw).hexdigest() == sha256:
                    return str(source.get("media_type")), raw
            else:
                left += block.values()
    return None


# Markdown's marks around words. No pattern spans lines, so that no text makes them slow.
_MARKS = (
    (re.compile(r"^ {0,3}(?:#{1,6} |>+ ?|(?:```|~~~)[^\n]*$|[-*+] |[-|: ]+$)", re.MULTILINE), ""),
    (re.compile(r"^\||\|$|(?<=\S) \| (?=\S)", re.MULTILINE), " "),
    (re.compile(r"\[([^\]\n]{1,300})\]\(https?://[^\s()]{1,1000}\)"), r"\1"),
    (re.compile(r"(\*\*|\*|`)(?=\S)([^*`\n]{1,500})(?<=\S)\1"), r"\2"),
)


def preview(blocks: Iterable[Block], *, is_markdown: bool = False) -> str:
    """The first words, without secrets and the marks of Markdown, on one line."""
    words: list[str] = []
    size = 0
    for text in _texts(blocks):
        # Cut far beyond the limit first: a secret that is cut would not be recognised and hidden.
        part = text[: 8 * PREVIEW]
        for mark, replacement in _MARKS if is_markdown else ():
            part = mark.sub(replacement, part)
        words.append(" ".join(part.split()))
        size += len(words[-1])
        if size > PREVIEW:
            break
    return redact.text(" ".join(words))[:PREVIEW]


def _texts(blocks: Iterable[Block]) -> Iterator[str]:
    for block in blocks:
        kind = block.get("type")
        if kind == "text":
            yield str(block.get("text", ""))
        elif kind == "tool_use":
            yield f"[calls {block.get('name')}]"
        elif kind == "tool_result":
            yield "[result of a tool]"
        elif kind in ("image", "document"):
            yield f"[{kind}]"


class _ContentLimit:
    """Limits the shown contents of records: a note replaces contents beyond the limit."""

    def __init__(self) -> None:
        self._left = MOST_OF_RECORDS

    def of(self, blocks: Sequence[Any] | None) -> Sequence[Any] | None:
        size = size_of(blocks or (), self._left)
        self._left -= size or 0
        return blocks if size is not None else ({"type": "text", "text": TOO_LARGE},)

    @property
    def is_large(self) -> bool:
        return MOST_OF_RECORDS - self._left > LARGE


def compared(whole: Comparison) -> tuple[Comparison, bool]:
    """(the records to show, differing ones first if there are too many; whether they are large)."""
    records: Sequence[ComparedRecord] = whole.records
    if len(records) > MOST_RECORDS:
        records = sorted(records, key=lambda one: one.state == "equal")[:MOST_RECORDS]
    limit = _ContentLimit()
    chosen = tuple(
        ComparedRecord((one.uuid or "")[:_NAME], one.kind[:_NAME], one.state, limit.of(one.chain), limit.of(one.file))
        for one in records
    )
    return replace(whole, records=chosen), limit.is_large


def comparison(part: Comparison, total: int) -> JSON:
    """`differences` and `records` of a turn's session, redacted. `part`: from `compared`, of `total` records."""
    answer: JSON = {
        "found": part.found,
        "differences": [redact.data({"kind": kind, "text": text}) for kind, text in part.differences],
        "records": [
            {
                "uuid": one.uuid, "kind": one.kind, "state": one.state,
                "chain": _record_text(one.chain), "file": _record_text(one.file),
            }
            for one in part.records
        ],
        "total": total,
    }  # fmt: skip
    if part.session_id is None:
        return answer
    return answer | {
        "session_id": part.session_id, "transcript": part.transcript, "tip_turn_id": part.tip_turn_id,
        "by_hand": part.by_hand,
    }  # fmt: skip


def newest_sent(request: RequestSeen) -> tuple[RequestSeen, bool]:
    """The request with only its newest messages; and whether these are large."""
    limit = _ContentLimit()
    newest = tuple((role, *(limit.of([block]) or ())) for role, block in request.messages[-NEWEST_SENT:])
    return replace(request, messages=newest), limit.is_large


def seen(usage: Usage, request: RequestSeen, total: int) -> JSON:
    """The verdict, and the messages, without secrets. `request` is from `newest_sent`, of `total` messages."""
    missing, summarised = len(request.missing), request.summarised
    return {
        "verdict": explain.context(request.turns, missing, summarised, usage, extends=request.extends),
        "forgotten": bool(missing),
        "missing": list(request.missing),
        "total": total,
        "messages": [{"role": role, "text": _record_text([block])} for role, block in request.messages],
    }


def _record_text(blocks: Sequence[Any] | None) -> str | None:
    if blocks is None:
        return None
    texts = [
        str(block["text"])
        if isinstance(block, dict) and block.get("type") == "text"
        else json.dumps(redact.data(shallow(block)), ensure_ascii=False)
        for block in blocks
    ]
    return redact.text("\n".join(texts))[:SHOWN]
