"""Live changes of a chain as text: lines for a terminal, JSON lines for programs, server-sent events for pages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from .. import redact
from ..domain import times
from ..domain.models import JSON
from ..engine.live import TAIL, Progress
from ..engine.subscription import Happened
from ..errors import printable
from . import explain, shown
from .approvals import request_json
from .schema import TurnDump
from .words import KINDS, mark_of

# Characters of a text that are shown on a line of a terminal.
WIDTH = 200


def data(happened: Happened, *, verbatim: bool = False) -> JSON:
    """`{"turn": …, "links": […]}` as in the JSON dump."""
    turn = shown.turn(happened.turn, happened.links, verbatim=verbatim)
    return {"seq": happened.turn.seq, "turn": turn, "links": [shown.link(link) for link in happened.links]}


def json_line(happened: Happened, *, verbatim: bool = False) -> str:
    return json.dumps(data(happened, verbatim=verbatim), separators=(",", ":")) + "\n"


def event(happened: Happened, dump: TurnDump) -> str:
    """One server-sent event with the turn's dump. A client resumes with its id as `Last-Event-ID`."""
    data = {"seq": happened.turn.seq, "turn": dump, "links": [shown.link(link) for link in happened.links]}
    return f"id: {happened.turn.seq}\nevent: turn\ndata: {json.dumps(data, separators=(',', ':'))}\n\n"


def progress(unfinished: Sequence[Progress]) -> list[JSON]:
    """Unfinished turns: what each is doing since when (UTC seconds), the end of its answer so far (redacted, after
    `skipped` characters), tokens used, and tools that wait for approval."""
    return [
        {
            "turn_id": one.turn.id,
            "doing": one.doing,
            "says": redact.text(explain.doing(one.doing, one.detail)),
            "at": one.turn.created_at,
            "since": one.since,
            "text": ending(redact.text(one.text), TAIL),
            "skipped": one.skipped,
            "tokens_read": one.used.prompt_tokens,
            "tokens_written": one.used.output_tokens,
            "approvals": [request_json(waiting) for waiting in one.asking],
        }
        for one in unfinished
    ]


def ending(text: str, most: int) -> str:
    """The last characters of a text, at most so many, from the beginning of a word."""
    return text if len(text) <= most else text[-most:].partition(" ")[2] or text[-most:]


def progress_event(going: Sequence[JSON]) -> str:
    """One server-sent event of `progress`. It has no id, because it is not repeated after a reconnect."""
    return f"event: progress\ndata: {json.dumps({'turns': going}, separators=(',', ':'))}\n\n"


def lines(happened: Happened, *, verbatim: bool = False) -> str:
    """For a person: question, answer, and every repair with its evidence."""
    dump = shown.turn(happened.turn, happened.links, verbatim=verbatim)
    turn = happened.turn
    out = [f"{times.written(turn.finished_at or turn.started_at or turn.created_at)}  {turn.status:10} {turn.id}"]
    for link in happened.links:
        mark = mark_of(link.reason)
        out.append(f"    {mark} ({link.reason}): {shown.link(link)['says']}")
    out += [f"    {KINDS[one.kind]}: {one.says}" for one in shown.briefs(turn, happened.links)]
    if turn.status in ("queued", "running"):
        out += [f"    user: {_words(message['content'])}" for message in dump["input"]]
    else:
        facts = [turn.continuity or "not run", f"session {(turn.session_id or 'none')[:8]}"]
        out.append(f"    {', '.join(facts)}: {_words(dump['output'])}")
    if dump["error"] is not None:
        out.append(f"    {dump['error'].get('code')}: {dump['error'].get('message')}")
    return "".join(f"{printable(line)}\n" for line in out)


def _words(content: list[dict[str, Any]]) -> str:
    parts = [str(block["text"]) if block.get("type") == "text" else f"[{block.get('type')}]" for block in content]
    text = " ".join(" ".join(parts).split())
    return text if len(text) <= WIDTH else f"{text[:WIDTH]}…"
