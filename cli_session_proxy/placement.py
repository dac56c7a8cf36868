"""Step 1 of a request: whose conversation is it, what does it continue, has it been here before?"""

from __future__ import annotations

import time
import uuid

from . import continuity, transcript
from .continuity import Decision, Ending
from .errors import InvalidRequest, NotFound
from .models import Agent, Message, Turn, TurnRequest
from .sandbox import directory_name
from .sessions import Sessions
from .stores.base import ImportedTurn, Store

# A delivered answer is given again to a client's own retry only this long (seconds): afterwards the same words
# are said anew. The SDKs back off for at most 8 s.
RETRY_WINDOW = 30.0

# How many hashes of a history are looked up at once, deepest first: nearly always the first chunk decides.
LOOKUP_CHUNK = 256


def new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


class Placement:
    """Finds or makes the agent, and decides which turn a request continues."""

    def __init__(self, store: Store, sessions: Sessions) -> None:
        self._store = store
        self._sessions = sessions

    async def place(self, request: TurnRequest) -> tuple[Agent, Decision]:
        if not request.messages or request.messages[-1].role != "user":
            raise InvalidRequest("the last message must be the user's (or a tool's result)", param="messages")
        agent: Agent | None = None
        if request.continues is not None:
            agent = await self._agent_of(request)
        elif request.agent_id is not None:
            agent = await self._ensure(request.owner, request.agent_id, named=True)
        match = None
        if request.continues is None and not request.fresh:
            match = await self._match(request, agent)
        decision = continuity.decide(
            request.messages,
            named=request.agent_id is not None,
            fresh=request.fresh,
            continues=request.continues,
            match=match,
        )
        if agent is None and match is not None:
            agent = await self._store.agent_by_key(match[0].agent_key)
        if agent is None:
            agent = await self._ensure(request.owner, new_id("auto"), named=False)
        return agent, decision

    async def _agent_of(self, request: TurnRequest) -> Agent:
        assert request.continues is not None
        turn = await self._store.turn(request.continues)
        agent = await self._store.agent_by_key(turn.agent_key) if turn else None
        if agent is None or agent.owner != request.owner:
            raise NotFound(f"no turn {request.continues!r}: send the whole conversation, or an id that you were given")
        return agent

    async def _ensure(self, owner: str, agent_id: str, *, named: bool) -> Agent:
        found = await self._store.agent(owner, agent_id)
        if found is not None:
            return found
        directory = directory_name(owner, agent_id)
        return await self._store.ensure_agent(owner, agent_id, directory, named=named, now=time.time())

    async def _match(self, request: TurnRequest, agent: Agent | None) -> tuple[Turn, Ending] | None:
        """The deepest turn whose path the history repeats; within the named agent, else among the unnamed."""
        known = continuity.endings(request.messages)
        scope = agent.key if agent else None
        while known:
            chunk, known = known[-LOOKUP_CHUNK:], known[:-LOOKUP_CHUNK]
            found = await self._store.turns_by_hash(request.owner, [ending.hash for ending in chunk], scope)
            if found:
                heads = frozenset(await self._heads(found))
                return continuity.deepest(found, chunk, heads)
        return None

    async def _heads(self, turns: list[Turn]) -> set[str]:
        agents = [await self._store.agent_by_key(key) for key in {turn.agent_key for turn in turns}]
        return {agent.head for agent in agents if agent and agent.head}

    async def bring_in(self, agent: Agent, decision: Decision, model: str) -> str | None:
        """Store the exchanges that the chain does not know; the turn that the new one continues, or None."""
        if not decision.imported:
            return decision.parent
        above = await self._store.turn(decision.parent) if decision.parent else None
        path_hash = above.path_hash if above else None
        depth = above.depth if above else 0
        known = await self._store.records(above.id) if above else []
        leaf = next((record.uuid for record in reversed(known) if record.uuid), None)
        imported: list[ImportedTurn] = []
        parent = decision.parent
        found = continuity.exchanges(decision.imported)
        # A millisecond a record, ending now: the times of the history stay before those of the turn to come.
        scribe = self._sessions.scribe(agent, time.time() - 0.002 * len(found), leaf)
        for exchange in found:
            path_hash = continuity.path_hash(path_hash, exchange.input, exchange.output)
            depth += 1
            asked = exchange.input or (Message.user(transcript.OPENED_BY_ASSISTANT),)
            records = [scribe.record(message, model) for message in asked]
            said = tuple(
                block for block in exchange.output if block.get("type") not in ("thinking", "redacted_thinking")
            )
            records.append(scribe.record(Message("assistant", said), model))
            turn = ImportedTurn(
                id=new_id("turn"),
                agent_key=agent.key,
                parent_id=parent,
                model=model,
                input=exchange.input,
                output=said,
                records=tuple(records),
                created_at=time.time(),
                path_hash=path_hash,
                depth=depth,
                reason={"rule": decision.rule, "why": "sent by the client as history"},
            )
            imported.append(turn)
            parent = turn.id
        await self._store.import_turns(imported)
        return parent

    async def earlier(self, request: TurnRequest, now: float) -> Turn | None:
        """The turn that this very request already is: by its key, as a client's own retry, or undelivered."""
        if request.idempotency_key is not None:
            turn = await self._store.turn_by_key(request.owner, request.idempotency_key, now)
            if turn is not None and turn.fingerprint != request.fingerprint:
                raise InvalidRequest(
                    "this Idempotency-Key belongs to another request: use a new key for a new body",
                    param="Idempotency-Key",
                )
            return turn
        turn = await self._store.turn_by_fingerprint(request.owner, request.fingerprint)
        if turn is None or turn.status == "requires_action":
            return None
        if turn.delivery in ("undelivered", "uncertain") and turn.status == "completed":
            return turn
        fresh = turn.finished_at is None or now - turn.finished_at < RETRY_WINDOW
        return turn if request.is_retry and fresh else None
