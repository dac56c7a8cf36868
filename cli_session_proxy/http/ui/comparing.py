"""The difference between chain and transcript at one turn, for the page. Reads, never mends, and compares nothing."""

from __future__ import annotations

import asyncio
import json

from ... import redact
from ...backends.claude import transcript
from ...backends.claude.sessions.verifying import Verifier
from ...backends.claude.transcript import Entry, Verdict
from ...domain.models import JSON, Agent, Record, Turn
from ...export.words import shallow
from ...stores.base import Store

# A record is compared whole and shown this far (characters).
SHOWN = 2000


async def compare(verifier: Verifier, store: Store, agent: Agent, turn: Turn) -> JSON:
    """How the session's file differs from the chain, as `verify` says it, and this turn's records side by side.

    `found`: `equal`, `busy` (a turn is just writing it), `different`, or `none` where no session holds this turn.
    Costs as much as the path is long.
    """
    session = await store.session(turn.session_id) if turn.session_id else None
    if session is None or session.tip_turn_id is None:
        return {"found": "none", "differences": [], "records": []}
    looked = await verifier.session(agent, session)
    told = (*looked.differences, *looked.notes)
    own = await store.own_records(turn.id)
    return {
        "found": "different" if looked.differences else "busy" if looked.busy else "equal",
        "differences": [redact.data({"kind": one.kind, "text": one.text}) for one in told],
        "session_id": session.id,
        "transcript": told[0].transcript if told else session.transcript,
        "tip_turn_id": session.tip_turn_id,
        "records": await asyncio.to_thread(_side_by_side, own, looked.verdict, is_tip=session.tip_turn_id == turn.id),
    }


def _side_by_side(own: list[Record], verdict: Verdict | None, *, is_tip: bool) -> list[JSON]:
    """The turn's records as the comparator found them, and behind the last turn's what the chain does not know."""
    mine = transcript.parse_records(own).path
    if verdict is not None and verdict.found == "equal" and not verdict.pairs:  # known by its hash
        return [_row("equal", entry, None) for entry in mine]
    found = {pair.ours.uuid: pair for pair in verdict.pairs} if verdict is not None else {}
    rows = []
    for entry in mine:
        pair = found.get(entry.uuid)
        state = "only in the chain" if pair is None or pair.state == "lost" else pair.state
        rows.append(_row(state, entry, pair.theirs if pair else None))
    if verdict is not None and is_tip:
        rows += [_row("only in the transcript", None, entry) for entry in verdict.unknown]
    return rows


def _row(state: str, chain: Entry | None, file: Entry | None) -> JSON:
    either = chain or file
    assert either is not None
    return {
        "uuid": either.uuid, "kind": either.kind, "state": state,
        "chain": _text(chain), "file": _text(file) if state != "equal" else None,
    }  # fmt: skip


def _text(entry: Entry | None) -> str | None:
    if entry is None:
        return None
    texts = [str(block["text"]) if block.get("type") == "text" else _compact(block) for block in entry.content]
    return redact.text("\n".join(texts) or _compact(entry.data.get("attachment")))[:SHOWN]


def _compact(value: object) -> str:
    return json.dumps(redact.data(shallow(value)), ensure_ascii=False)
