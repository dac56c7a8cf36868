"""Recovers the answer of a turn that was running when its proxy ended, if the transcript has the whole exchange."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ....domain.limits import is_model, is_version
from ....domain.models import JSON, Agent, Link, LinkReason, Session, Turn
from ....stores.base import KeptTurn, Store
from ....tasks import in_thread_at
from .. import transcript
from ..transcript import Parsed, files
from ..transcript.entries import parse_file
from . import paths
from .capture import is_damaged, up_to_end_of_turn
from .exchanges import TranscriptExchange, has_invented_result

# The most unknown sessions that are read for one turn: a shell may create any number, and the proxy's start waits until
# they are read.
MOST_COPIES = 16


async def recover_turn(
    store: Store, transcript_of: Callable[[Agent, str], Path], agent: Agent, turn: Turn
) -> tuple[Turn, KeptTurn] | None:
    """The turn with its answer, and what to store of it; None if no transcript has the whole exchange, or it is not
    certain that the exchange is this turn's. Changes nothing.

    Not for a confined agent: its programs can write to its transcript.
    """
    if turn.session_id is None or turn.frame_uuid is None:  # it had not begun in a session of the CLI
        return None
    known = await paths.parsed(await paths.shown(store, turn.parent_id))
    path = transcript_of(agent, turn.session_id)
    exchange = await in_thread_at(path.parent, _read, path, turn, known)
    if exchange is None:
        unknown: list[Path] = []  # CLI 1.x: a copy under a new id
        for other in await in_thread_at(path.parent, _written_since, turn.started_at or 0.0, path.parent):
            if other != path and await store.session(other.stem) is None:
                unknown.append(other)
                if len(unknown) > MOST_COPIES:  # without reading all it is not certain that one copy is the only one
                    return None
        copies = [(other, await in_thread_at(path.parent, _read, other, turn, known)) for other in unknown]
        complete = [(other, copy) for other, copy in copies if copy is not None]
        if len(complete) != 1:  # none, or it is not certain which one answered this turn
            return None
        [(path, exchange)] = complete
    parent_session = await store.session_at(agent.key, turn.parent_id) if turn.parent_id else None
    now, session_id = time.time(), path.stem
    if _has_invented_result(turn, exchange.tools):
        return None
    last_answer = [entry for entry in exchange.path if entry.kind == "assistant"][-1].data
    version = last_answer.get("version")
    # Without a mark: the records before this turn were not compared; the next turn does that.
    session = Session(session_id, agent.key, turn.id, str(path), version if is_version(version) else "", now)
    answered = replace(
        turn,
        output=exchange.output,
        stop_reason=last_answer["message"].get("stop_reason"),
        usage=exchange.usage,
        tools=exchange.tools,
        answered_by=exchange.model if is_model(exchange.model) else None,
    )
    records = tuple(entry.record() for entry in exchange.entries)
    return answered, KeptTurn(records, session, _links(turn, parent_session, session_id, now))


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
            if path.lstat().st_mtime >= start:
                found.append(path)
    return sorted(found)


def _read(path: Path, turn: Turn, known: Parsed) -> TranscriptExchange | None:
    """The turn's exchange in this transcript, if it is complete and follows these records (`known`: the path to its
    parent)."""
    try:
        parsed = parse_file(path, sum(len(entry.line) for entry in known.entries))
    except OSError:
        return None
    is_copy = path.stem != turn.session_id
    if parsed.broken:  # a damaged line may have been a part of the exchange
        return None
    if is_copy and transcript.end_of_copy(known.path, parsed.path) is None:  # of another conversation
        return None
    entries, leaf = list(parsed.entries), known.leaf
    if leaf is not None:
        leaf_index = next((index for index, entry in enumerate(entries) if entry.uuid == leaf), None)
        if leaf_index is None:  # the file does not have the end of the path
            return None
        entries = entries[leaf_index + 1 :]
    entries = list(up_to_end_of_turn(entries, turn.frame_uuid or ""))
    conversation = transcript.conversation_of(entries)
    if not transcript.is_complete(conversation) or not transcript.unbroken(conversation, leaf):
        return None
    sent = [block for message in turn.input for block in message.content]
    users = [entry for entry in conversation if entry.kind == "user"]
    if has_invented_result(conversation, sent):  # the CLI outlived the proxy: the answer is to a result that it made up
        return None
    if is_damaged(users, sent) or not transcript.has_ended(conversation):
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


def _links(turn: Turn, parent_session: Session | None, session_id: str, now: float) -> tuple[Link, ...]:
    """The links to this session, by what the turn recorded when it began."""
    detail: JSON = {"settled": True}
    repair = turn.evidence.repaired or turn.evidence.written
    evidence = {} if repair is None else repair.as_json()
    if parent_session is None and turn.continuity == "started":
        return (Link(None, session_id, turn.id, "started", detail, now),)
    resumed = turn.session_id or session_id
    links: list[Link] = []
    if turn.continuity in ("rebuilt", "branched"):
        reason: LinkReason = "branched" if turn.continuity == "branched" else "rebuilt"
        source = parent_session.id if parent_session else None
        links.append(Link(source, resumed, turn.id, reason, {**evidence, **detail}, now))
    if resumed != session_id:  # CLI 1.x answered in a copy
        links.append(Link(resumed, session_id, turn.id, "forked_by_cli", detail, now))
    return tuple(links)
