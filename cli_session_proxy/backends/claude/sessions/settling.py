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
from ..transcript import Entry, Parsed
from ..transcript.entries import contents
from . import paths
from .capture import is_damaged, up_to_own
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
    asked = transcript_of(agent, turn.session_id)
    found = await asyncio.to_thread(_read, asked, turn, known)
    if found is None:
        unknown: list[Path] = []  # CLI 1.x: a copy under a new id
        for path in await asyncio.to_thread(_written_since, turn.started_at or 0.0, asked.parent):
            if path != asked and await store.session(path.stem) is None:
                unknown.append(path)
                if len(unknown) > MOST_COPIES:
                    return None
        others = [one for path in unknown if (one := await asyncio.to_thread(_read, path, turn, known)) is not None]
        if len(others) != 1:  # not certain
            return None
        (found,) = others
    before = await store.session_at(agent.key, turn.parent_id) if turn.parent_id else None
    exchange, now, session_id = found.exchange, time.time(), found.path.stem
    if _went_on_unasked(turn, exchange.tools):
        return None
    # Without a mark: the records before this turn were not compared; the next turn does that.
    session = Session(session_id, agent.key, turn.id, str(found.path), found.version, now)
    answered = replace(
        turn,
        output=exchange.output,
        stop_reason=found.stop_reason,
        usage=exchange.usage,
        tools=exchange.tools,
        answered_by=exchange.model if is_model(exchange.model) else None,
    )
    records = tuple(entry.record() for entry in exchange.entries)
    return answered, KeptTurn(records, session, _links(turn, before, session_id, now))


def _went_on_unasked(turn: Turn, tools: Sequence[JSON]) -> bool:
    """Whether a tool was waiting for approval when the proxy died, or was allowed and had not run: the CLI then invents
    a result, and the model's answer to it does not count."""
    failed = {entry.get("tool_use_id") for entry in tools if entry.get("is_error")}
    done = {entry.get("tool_use_id") for entry in tools} - failed
    newest = max((one.attempt for one in turn.evidence.approvals), default=0)
    asked = [one for one in turn.evidence.approvals if one.attempt == newest]
    allowed = {one.call for one in asked if one.outcome in ("allowed", "allowed_for_turn")}
    return not allowed <= done or any(one.outcome is None for one in asked)


def _written_since(began: float, folder: Path) -> list[Path]:
    """The transcripts in this folder that were written since then."""
    found = []
    for path in transcript.sessions_in(folder):
        with suppress(OSError):
            if path.stat().st_mtime >= began:
                found.append(path)
    return sorted(found)


class _Found:
    """The finished turn in a transcript."""

    def __init__(self, path: Path, entries: list[Entry]) -> None:
        self.path = path
        self.exchange = TranscriptExchange(tuple(entries))
        last = [entry for entry in self.exchange.path if entry.kind == "assistant"][-1]
        self.stop_reason = last.data["message"].get("stop_reason")
        version = last.data.get("version")
        self.version = version if is_version(version) else ""


def _read(path: Path, turn: Turn, known: Parsed) -> _Found | None:
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
    entries = list(up_to_own(entries, turn.frame_uuid or ""))
    said = [entry for entry in entries if entry.on_path]
    if not transcript.is_complete(said) or not transcript.unbroken(said, leaf):
        return None
    asked = [block for message in turn.input for block in message.content]
    if has_invented_result(said, asked) or is_damaged([entry for entry in said if entry.kind == "user"], asked):
        return None
    return _Found(path, entries) if _is_turn(said, turn) and transcript.has_ended(said) else None


def _is_turn(said: list[Entry], turn: Turn) -> bool:
    """Whether it is this turn, by the frame's uuid (kept by CLI 2.1.x); else by the text of the only prompt."""
    asked = [entry for entry in said if entry.kind == "user"]
    if any(entry.uuid == turn.frame_uuid for entry in asked):
        return True
    if any(entry.data.get("promptSource") for entry in asked):
        return False
    prompts = [entry for entry in asked if any(block.get("type") != "tool_result" for block in entry.content)]
    words = [block.get("text") for block in prompts[0].content] if len(prompts) == 1 else None
    asked_for = [block.get("text") for message in turn.input for block in message.content]
    return words is not None and words[-len(asked_for) :] == asked_for  # a reminder with new values may come first


def _links(turn: Turn, before: Session | None, session_id: str, now: float) -> tuple[Link, ...]:
    """The links to this session, by the journal."""
    detail: JSON = {"settled": True}
    done = turn.evidence.repaired or turn.evidence.written
    evidence = {} if done is None else done.as_json()
    if before is None and turn.continuity == "started":
        return (Link(None, session_id, turn.id, "started", detail, now),)
    asked = turn.session_id or session_id
    links: list[Link] = []
    if turn.continuity in ("rebuilt", "branched"):
        reason: LinkReason = "branched" if turn.continuity == "branched" else "rebuilt"
        links.append(Link(before.id if before else None, asked, turn.id, reason, {**evidence, **detail}, now))
    if asked != session_id:
        links.append(Link(asked, session_id, turn.id, "forked_by_cli", detail, now))
    return tuple(links)
