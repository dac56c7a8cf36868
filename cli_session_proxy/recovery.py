"""What others left: turns of a dead proxy are settled, turns that somebody else made are adopted."""

from __future__ import annotations

import time
import uuid
from dataclasses import replace

from . import continuity, transcript
from .models import Agent, Link, Turn
from .sessions import Foreign
from .stores.base import ImportedTurn, Store


async def settle(store: Store) -> None:
    """At start: what was queued or running is cancelled with its reason; what was not acknowledged is uncertain."""
    now = time.time()
    async for turn in store.unfinished():
        error = {
            "status": 503,
            "code": "interrupted",
            "message": "the proxy stopped before this turn was finished; send it again",
        }
        attempts = [*turn.attempts, {"ended_at": now, "status": "cancelled", "code": "interrupted"}]
        await store.fail(turn.id, "cancelled", error, attempts, {}, now)
    for turn in await store.pending_deliveries():
        await store.set_delivery(turn.id, "uncertain")


async def adopt(store: Store, agent: Agent, parent: Turn, foreign: Foreign) -> Turn:
    """Take exchanges that someone else had in the session into the chain, and move the head to the last one."""
    turns: list[ImportedTurn] = []
    above, path_hash, depth = parent.id, parent.path_hash, parent.depth
    for entries in _by_prompt(foreign.entries):
        said = transcript.messages_of(entries)
        asked = tuple(message for message in said if message.role == "user")
        output = tuple(block for message in said if message.role == "assistant" for block in message.content)
        path_hash = continuity.path_hash(path_hash, asked, output)
        depth += 1
        turn = ImportedTurn(
            id=f"turn_{uuid.uuid4().hex}",
            agent_key=agent.key,
            parent_id=above,
            model=parent.model,
            input=asked,
            output=output,
            records=tuple(entry.record() for entry in entries),
            created_at=time.time(),
            path_hash=path_hash,
            depth=depth,
            origin="adopted",
            reason={"rule": "adopted", "why": foreign.note, "session": foreign.session.id},
        )
        turns.append(turn)
        above = turn.id
    await store.import_turns(turns, head=above)
    detail = {"why": foreign.note, "turns": [turn.id for turn in turns]}
    link = Link(foreign.session.id, foreign.session.id, above, "adopted", detail, time.time())
    await store.save_session(replace(foreign.session, tip_turn_id=above, mark=None), [link])
    adopted = await store.turn(above)
    assert adopted is not None
    return adopted


def _by_prompt(entries: tuple[transcript.Entry, ...]) -> list[list[transcript.Entry]]:
    """Cut the records at each prompt of a person: a user record that is not a tool's result."""
    groups: list[list[transcript.Entry]] = []
    for entry in entries:
        prompt = (
            entry.kind == "user"
            and not entry.data.get("isMeta")
            and any(block.get("type") != "tool_result" for block in entry.content)
        )
        if prompt and (not groups or any(one.kind == "assistant" for one in groups[-1])):
            groups.append([])
        if not groups:
            groups.append([])
        groups[-1].append(entry)
    return groups
