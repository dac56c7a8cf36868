"""What a proxy that ended, or that was replaced, left of an agent: its CLIs are ended, its turns settled.

Whoever does it holds the agent's lease. A turn that was running is looked for in its transcript. Its whole exchange is
there: it is committed like any other, and whether the client has the answer is `uncertain`. Anything less: it is
cancelled as `interrupted`, and its session verified before use, so that the prompt does not reach the model again.
Queued turns were never sent: those of a proxy that ended are cancelled, those of a living one stay its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import structlog

from ..backends.claude import environment, transcript
from ..backends.claude.process.proc import start_time
from ..backends.claude.sessions.exchanges import Exchange, invented
from ..backends.claude.transcript import Entry, Parsed
from ..domain import lineage
from ..domain.models import FINISHED, Agent, Link, LinkReason, Session, Turn
from ..errors import ProxyError
from ..sandbox import Sandboxes
from ..settings import Settings
from ..stores.base import Commit, Lease, Store
from .executor import Observer
from .live import with_end
from .ownership import Instances

log = structlog.get_logger(__name__)

# Gives an agent's lease: waited for, or None where it is in use.
Hold = Callable[[Agent], AbstractAsyncContextManager[Lease]]
HoldIfFree = Callable[[Agent], AbstractAsyncContextManager[Lease | None]]

# How often it is looked whether a proxy beside this one has ended. Seconds.
NEIGHBOURS = 1.0
# How often an orphan is looked at: it is not our child, so nobody tells us when it ends. Seconds.
POLL = 0.02
# How often a turn that another proxy runs is looked at: the store is all that is shared. Seconds.
FOLLOW = 0.1
# How long the kernel gets to end a killed process. Seconds.
KILL_WAIT = 10.0


class Recovery:
    """Settles what other proxies left that have ended, or do not respond any more."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        instances: Instances,
        sandboxes: Sandboxes,
        observers: Sequence[Observer] = (),
    ) -> None:
        self._settings = settings
        self._observers = observers
        self._store = store
        self._instances = instances
        self._sandboxes = sandboxes
        self._config_dir = environment.config_dir(settings)

    async def settle(self, agent: Agent, lease: Lease) -> None:
        """End what other proxies left of this agent. Raises `StoreUnavailable`; what is not settled then is later."""
        cwd = self._sandboxes.path(agent.dir)
        # First of all: nobody may write a transcript while it is read.
        strays = [stray for other in self._instances.others() for stray in self._instances.children(other, cwd)]
        await asyncio.gather(*(self._end(pid, started) for pid, started in strays))
        for turn in await self._store.waiting(agent.key):
            if turn.instance == self._instances.id:
                continue
            if turn.status == "running" or not self._instances.alive(turn.instance):
                await self._settle(agent, lease, turn)
        await self._uncertain(agent.key)

    async def _uncertain(self, agent_key: int | None = None) -> None:
        """Nobody knows whether answers that an ended proxy was about to deliver have arrived."""
        for turn in await self._store.pending_deliveries():
            if agent_key in (None, turn.agent_key) and not self._instances.alive(turn.instance):
                await self._store.set_delivery(turn.id, "uncertain")

    async def watch(self, hold_if_free: HoldIfFree) -> None:
        """Recover what proxies beside this one leave when they end. Until it is cancelled."""
        while True:
            await asyncio.sleep(NEIGHBOURS)
            if any(not self._instances.alive(other) for other in self._instances.others()):
                try:
                    await self.recover(hold_if_free)
                except ProxyError as exc:
                    log.warning("not_recovered", error=exc.message)

    async def recover(self, hold_if_free: HoldIfFree) -> None:
        """Settle all that ended proxies left, of every agent, and forget them. Safe to run by several at once, and
        again. Raises `StoreUnavailable`."""
        dead = [other for other in self._instances.others() if not self._instances.alive(other)]
        strays = [stray for instance in dead for stray in self._instances.children(instance)]
        await asyncio.gather(*(self._end(pid, started) for pid, started in strays))
        open_turns = [turn async for turn in self._store.unfinished() if not self._instances.alive(turn.instance)]
        in_use = False
        for agent_key in dict.fromkeys(turn.agent_key for turn in open_turns):
            agent = await self._store.agent_by_key(agent_key)
            if agent is None:
                continue
            async with hold_if_free(agent) as lease:
                if lease is None:
                    in_use = True  # whoever holds it settles this agent; the dead are forgotten another time
                else:
                    await self.settle(agent, lease)
        await self._uncertain()
        for instance in () if in_use else dead:
            await self._store.resign(instance)
            self._instances.bury(instance)

    async def finished_elsewhere(self, turn_id: str, agent: Agent, hold: Hold) -> Turn | None:
        """Wait for the end of a turn that another proxy runs. Where that one has ended or does not respond: settle it.

        None without the turn: its agent was deleted. Unbounded: the caller has a limit.
        """
        while True:
            turn = await self._store.turn(turn_id)
            if turn is None or turn.status in FINISHED:
                return turn
            assert turn.instance is not None
            if self._instances.alive(turn.instance) and await self._store.responds(turn.instance):
                await asyncio.sleep(FOLLOW)
                continue
            async with hold(agent) as lease:
                await self.settle(agent, lease)
                turn = await self._store.turn(turn_id)
                if turn is not None and turn.status == "queued":
                    await self._interrupted(lease, turn)  # its proxy does not respond: somebody else waits for it here

    # --- processes

    async def _end(self, pid: int, started: str) -> None:
        """TERM, wait, KILL the group: only while the pid is still the process that was started then."""
        for number, patience in ((signal.SIGTERM, self._settings.stop_grace), (signal.SIGKILL, KILL_WAIT)):
            if await start_time(pid) != started:
                return
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, number)
            log.info("orphan_ended", pid=pid, signal=number.name)
            until = time.monotonic() + patience
            while await start_time(pid) == started and time.monotonic() < until:  # noqa: ASYNC110 - nobody signals it
                await asyncio.sleep(POLL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # what it had started, in its group

    # --- turns

    async def _settle(self, agent: Agent, lease: Lease, turn: Turn) -> None:
        lost = turn.status == "queued" or self._instances.has_failed(turn)
        found = None if lost else await self._finished(agent, turn)
        if found is None:
            await self._interrupted(lease, turn)
        else:
            await self._completed(agent, lease, turn, found)

    async def _interrupted(self, lease: Lease, turn: Turn) -> None:
        error = {
            "status": 503,
            "code": "interrupted",
            "message": "the proxy stopped before this turn was finished; send it again",
        }
        now = time.time()
        attempts = with_end(turn.attempts, {"ended_at": now, "status": "cancelled", "code": "interrupted"})
        await self._store.fail(turn.id, "cancelled", error, attempts, {}, now, lease=lease)
        log.info("interrupted", turn_id=turn.id, was=turn.status)

    async def _completed(self, agent: Agent, lease: Lease, turn: Turn, found: _Found) -> None:
        parent = await self._store.turn(turn.parent_id) if turn.parent_id else None
        before = await self._store.session_at(agent.key, parent.id) if parent else None
        exchange, now = found.exchange, time.time()
        session_id = found.path.stem
        cost = before.cost_total_usd if before else 0.0
        # Without a mark: nobody has compared what stands before this turn in the file, and the next turn does.
        session = Session(session_id, agent.key, turn.id, str(found.path), found.version, now, None, cost)
        commit = Commit(
            lease=lease,
            turn_id=turn.id,
            status="completed",
            output=exchange.output,
            stop_reason=found.stop_reason,
            usage=exchange.usage,
            cost_usd=None,
            tools=exchange.tools,
            timings={},
            attempts=tuple(with_end(turn.attempts, {"ended_at": now, "status": "completed", "settled": True})),
            records=tuple(entry.record() for entry in exchange.entries),
            session=session,
            links=_links(turn, before, session_id, now),
            path_hash=lineage.path_hash(parent.path_hash if parent else None, turn.input, exchange.output),
            depth=(parent.depth if parent else 0) + 1,
            delivery="uncertain",
            finished_at=now,
            reason={"settled": "the proxy died after the CLI had finished this turn: read from the transcript"},
        )
        settled = await self._store.commit(commit)
        for observer in self._observers:
            observer.turn_ended(settled, commit.links)
        log.info("settled", turn_id=turn.id, session_id=session_id)

    async def _finished(self, agent: Agent, turn: Turn) -> _Found | None:
        """The turn's whole exchange, where its transcript holds it and the chain has not gone on without it."""
        head = await self._store.turn(agent.head) if agent.head else None
        if head is not None and (head.finished_at or 0.0) > (turn.started_at or 0.0):
            return None
        if turn.session_id is None or turn.frame_uuid is None or turn.reason.get("format") is not None:
            return None  # a structured answer was never checked: its client must not get it
        known = transcript.parse_records(await self._store.records(turn.parent_id)) if turn.parent_id else Parsed(())
        cwd = self._sandboxes.path(agent.dir)
        asked = transcript.path_of(self._config_dir, cwd, turn.session_id)
        found = await asyncio.to_thread(_read, asked, turn, known)
        if found is not None:
            return found
        others: list[_Found] = []
        for path in await asyncio.to_thread(_since, asked.parent, turn.started_at or 0.0):
            if path != asked and await self._store.session(path.stem) is None:
                one = await asyncio.to_thread(_read, path, turn, known)
                others += [one] if one else []
        return others[0] if len(others) == 1 else None  # CLI 1.x: a copy under a new id; two would be a guess


class _Found:
    """A finished turn in a transcript."""

    def __init__(self, path: Path, entries: list[Entry]) -> None:
        self.path = path
        self.exchange = Exchange(tuple(entries))
        last = [entry for entry in self.exchange.path if entry.kind == "assistant"][-1]
        self.stop_reason = last.data["message"].get("stop_reason")
        self.version = str(last.data.get("version", ""))


def _read(path: Path, turn: Turn, known: Parsed) -> _Found | None:
    try:
        parsed = transcript.parse(path.read_bytes())
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
    said = [entry for entry in entries if entry.on_path]
    if not transcript.is_complete(said) or not transcript.unbroken(said, leaf):
        return None
    if invented(said, [block for message in turn.input for block in message.content]):
        return None
    return _Found(path, entries) if _is_turn(said, turn) and transcript.has_ended(said) else None


def _is_turn(said: list[Entry], turn: Turn) -> bool:
    """By the frame's uuid (CLI 2.1.x keeps it); else by what was asked, in the only prompt."""
    asked = [entry for entry in said if entry.kind == "user"]
    if any(entry.uuid == turn.frame_uuid for entry in asked):
        return True
    if any(entry.data.get("promptSource") for entry in asked):
        return False
    prompts = [entry for entry in asked if any(block.get("type") != "tool_result" for block in entry.content)]
    words = [block.get("text") for block in prompts[0].content] if len(prompts) == 1 else None
    return words == [block.get("text") for message in turn.input for block in message.content]


def _since(folder: Path, at: float) -> list[Path]:
    """Transcripts written to since then."""
    return sorted(path for path in folder.glob("*.jsonl") if path.stat().st_mtime >= at)


def _links(turn: Turn, before: Session | None, session_id: str, now: float) -> tuple[Link, ...]:
    """What led to this session, as far as the journal tells."""
    detail = {"settled": "after a crash"}
    evidence = turn.reason.get("repaired") or turn.reason.get("session")
    evidence = evidence if isinstance(evidence, dict) else {}
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
