"""The difference between chain and transcript at one turn, for the page. Reads, never mends."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from ... import redact
from ...backends.claude import transcript
from ...backends.claude.sessions.verifying import Verifier
from ...backends.claude.transcript import Entry
from ...domain.models import JSON, Agent, Record, Turn
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
    busy, differences = await verifier.session(agent, session)
    above = len(await store.records(turn.parent_id)) if turn.parent_id else 0
    own = (await store.records(turn.id))[above:]
    path = Path(differences[0].transcript if differences else session.transcript)
    return {
        "found": "different" if differences else "busy" if busy else "equal",
        "differences": [redact.data({"kind": one.kind, "text": one.text}) for one in differences],
        "session_id": session.id,
        "transcript": str(path),
        "tip_turn_id": session.tip_turn_id,
        "records": await asyncio.to_thread(_side_by_side, own, path, is_tip=session.tip_turn_id == turn.id),
    }


def _side_by_side(own: list[Record], path: Path, *, is_tip: bool) -> list[JSON]:
    try:
        entries = transcript.parse(path.read_bytes()).entries
    except OSError:  # the differences say what is wrong with the file
        entries = ()
    in_file = {entry.uuid: entry for entry in entries if entry.uuid}
    mine = [entry for entry in transcript.parse_records(own).entries if entry.uuid]
    rows = [_row(entry, in_file.get(entry.uuid or "")) for entry in mine]
    if is_tip and mine:
        # What stands behind the last record of the path.
        last = next((at for at, entry in enumerate(entries) if entry.uuid == mine[-1].uuid), len(entries))
        rows += [_row(None, entry) for entry in entries[last + 1 :] if entry.on_path]
    return rows


def _row(chain: Entry | None, file: Entry | None) -> JSON:
    either = chain or file
    assert either is not None
    if chain is None:
        state = "only in the transcript"
    elif file is None:
        state = "only in the chain"
    else:
        state = "equal" if chain.says() == file.says() else "changed"
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
    return json.dumps(redact.data(value), ensure_ascii=False)
