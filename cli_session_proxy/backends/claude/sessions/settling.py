"""Recovers the answer of a turn that was running when its proxy ended, if the transcript has the whole exchange."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ....domain.limits import is_model, is_version
from ....domain.models import JSON, Agent, Link, LinkReason, Session, Turn
from ....stores.base import KeptTurn, Store
from .. import transcript
from ..transcript import Parsed, files
from ..transcript.entries import contents
from . import paths
from .capture import is_damaged, up_to_end_of_turn
from .exchanges import TranscriptExchange, has_invented_result

# The most unknown sessions that are read for one turn: a shell may create any number, and the proxy's start waits for
# it.
MOST_COPIES = 16


async def recover_turn(
    store: Store, transcript_of: Callable[[Agent, str], Path], agent: Agent, turn: Turn
) -> tuple[Turn, KeptTurn] | None:
    """None if the exchange is incomplete or not certainly this turn's. Read only."""
    if turn.session_id is None or turn.frame_uuid is None:
        return None
    known = await paths.parsed(await paths.shown(store, turn.parent_id))
    path = transcript_of(agent, turn.session_id)
    exchange = await asyncio.to_thread(_read, path, turn, known)
    if exchange is None:
        unknown: list[Path] = []  # CLI 1.x: a copy under a new id
        for other in await asyncio.to_thread(_written_since, turn.started_at or 0.0, path.parent):
            if other != path and await store.session(other.stem) is None:
                unknown.append(other)
                if len(unknown) > MOST_COPIES:
                    return None
        copies = [(other, await asyncio.to_thread(_read, other, turn, known)) for other in unknown]
        complete = [(other, copy) for other, copy in copies if copy is not None]
        if len(complete) != 1:  # not certain
            return None
        [(path, exchange)] = complete
    before = await store.session_at(agent.key, turn.parent_id) if turn.parent_id else None
    now, session_id = time.time(), path.stem
    if _has_invented_result(turn, exchange.tools):
        return None
    last = [entry for entry in exchange.path if entry.kind == "assistant"][-1].data
    version = last.get("version")
    # Without a mark: the records before this turn were not compared; the next turn does that.
    session = Session(session_id, agent.key, turn.id, str(path), version if is_version(version) else "", now)
    answered = replace(
        turn,
        output=exchange.output,
        stop_reason=last["message"].get("stop_reason"),
        usage=exchange.usage,
        tools=exchange.tools,
        answered_by=exchange.model if is_model(exchange.model) else None,
    )
    records = tuple(entry.record() for entry in exchange.entries)
    return answered, KeptTurn(records, session, _links(turn, before, session_id, now))


def _has_invented_result(turn: Turn, tools: Sequence[JSON]) -> bool:
    """Whether a tool was waiting for approval when the proxy died, or was allowed and had not run: the CLI then invents
    a result, and the model's answer to it does not count."""
    failed = {block.get("tool_use_id") for block in tools if block.get("is_error")}
    done = {block.get("tool_use_id") for block in tools} - failed
    newest = max((approval.attempt for approval in turn.evidence.approvals), default=0)
    approvals = [approval for approval in turn.evidence.approvals if approval.attempt == newest]
    allowed = {approval.call for approval in approvals if approval.outcome in ("allowed", "allowed_for_turn")}
    return not allowed <= done or any(approval.outcome is None for approval in approvals)


def _written_since(start: float, folder: Path) -> list[Path]:
    """The transcripts in this folder that were written since that time (seconds)."""
    found = []
    for path in files.sessions_in(folder):
        with suppress(OSError):
            if path.stat().st_mtime >= start:
                found.append(path)
    return sorted(found)


def _read(path: Path, turn: Turn, known: Parsed) -> TranscriptExchange | None:
    """The turn's exchange in this transcript, if it is complete and follows these records."""
    try:
        parsed = transcript.parse(contents(path), sum(len(entry.line) for entry in known.entries))
    except OSError:
        return None
    is_copy = path.stem != turn.session_id
    if parsed.broken or (is_copy and transcript.copied_up_to(known.path, parsed.path) is None):
        return None
    entries, leaf = list(parsed.entries), known.leaf
    at = next((n for n, entry in enumerate(entries) if entry.uuid == leaf), None)
    if leaf is not None:
        if at is None:
            return None
        entries = entries[at + 1 :]
    entries = list(up_to_end_of_turn(entries, turn.frame_uuid or ""))
    on_path = [entry for entry in entries if entry.on_path]
    if not transcript.is_complete(on_path) or not transcript.unbroken(on_path, leaf):
        return None
    sent = [block for message in turn.input for block in message.content]
    users = [entry for entry in on_path if entry.kind == "user"]
    if has_invented_result(on_path, sent) or is_damaged(users, sent) or not transcript.has_ended(on_path):
        return None
    # It is this turn by the frame's uuid (kept by CLI 2.1.x), else by the text of the only prompt.
    if not any(entry.uuid == turn.frame_uuid for entry in users):
        prompts = [entry for entry in users if any(block.get("type") != "tool_result" for block in entry.content)]
        if len(prompts) != 1 or any(entry.data.get("promptSource") for entry in users):
            return None
        texts = [block.get("text") for block in prompts[0].content]
        if texts[-len(sent) :] != [block.get("text") for block in sent]:  # a reminder with new values may come first
            return None
    return TranscriptExchange(tuple(entries))


def _links(turn: Turn, before: Session | None, session_id: str, now: float) -> tuple[Link, ...]:
    """The links to this session, by the journal."""
    detail: JSON = {"settled": True}
    done = turn.evidence.repaired or turn.evidence.written
    evidence = {} if done is None else done.as_json()
    if before is None and turn.continuity == "started":
        return (Link(None, session_id, turn.id, "started", detail, now),)
    resumed = turn.session_id or session_id
    links: list[Link] = []
    if turn.continuity in ("rebuilt", "branched"):
        reason: LinkReason = "branched" if turn.continuity == "branched" else "rebuilt"
        links.append(Link(before.id if before else None, resumed, turn.id, reason, {**evidence, **detail}, now))
    if resumed != session_id:
        links.append(Link(resumed, session_id, turn.id, "forked_by_cli", detail, now))
    return tuple(links)
