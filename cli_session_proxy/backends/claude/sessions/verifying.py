"""Compares chains with transcripts, and reports every difference. Read only.

For each session with a turn at its tip, the path to that turn is compared record by record with the file that the CLI
would load. The head's session matters most; others are rewritten when they are continued.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ....domain.models import JSON, ON_PATH, Agent, Record, Session, Turn
from ....sandbox import Sandboxes
from ....settings import Settings
from ....stores.base import Store
from ....tasks import in_thread_at
from ...base import ComparedRecord, Comparison
from .. import transcript
from ..process import environment
from ..transcript import Entry, FileVerdict, Pair
from . import paths, tails

# Of many equal differences, only this many are listed one by one.
LISTED = 20
# Records after the path that are no difference: of a turn that was not stored, because its proxy or CLI was killed.
LEFTOVERS: Mapping[tails.Origin | None, str] = {
    "ours": "of a turn that was not kept",
    "made_up": "that a CLI made up when its proxy was gone",
}
# How often a session is read again if a turn ended meanwhile.
ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Difference:
    """`kind`: missing, elsewhere, unreadable, lost, changed, unknown, unloaded, order, cut, or chain (an error in the
    chain).

    `record`: its number on the chain's path, from 1. `tip`: the turn at which the session should end. Kinds leftover
    and host are notes, no differences: records after the path, which the next turn removes; another host has the
    transcripts.
    """

    session_id: str
    tip: str
    at_head: bool
    transcript: str
    kind: str
    text: str
    record: int | None = None


@dataclass(frozen=True, slots=True)
class Verified:
    """The result for one agent. `busy`: sessions that a turn is writing now; new records there are no differences.

    `unwritten`: not compared, as a file is written before a process loads it: adopted, imported, of confined agents.
    """

    agent_id: str
    owner: str
    sessions: int
    records: int
    busy: tuple[str, ...]
    unwritten: tuple[str, ...]
    differences: tuple[Difference, ...]
    notes: tuple[Difference, ...] = ()

    def as_json(self) -> JSON:
        return asdict(self) | {"equal": not self.differences}


@dataclass(frozen=True, slots=True)
class SessionResult:
    """The result for one session. `verdict`: the comparison; None if the file was not compared."""

    records: int = 0
    busy: bool = False
    unwritten: bool = False
    differences: tuple[Difference, ...] = ()
    notes: tuple[Difference, ...] = ()
    verdict: FileVerdict | None = None


class Verifier:
    """Compares agents' chains with their transcripts. Read only."""

    def __init__(self, settings: Settings, store: Store) -> None:
        self._settings = settings
        self._store = store
        self._sandboxes = Sandboxes(settings)
        self._projects = transcript.Projects(settings, self._sandboxes, environment.config_dir(settings))

    async def verify(
        self, agent: Agent, held_at: str | None = None, step: Callable[[], None] = lambda: None
    ) -> Verified:
        """`held_at`: the other host that has the agent and its transcripts; copies here are outdated.
        `step` is called after the path to the head was read, and after each session."""
        chain = await self._store.chain(agent.key)
        sessions = chain.sessions if chain else ()
        unwritten: list[str] = []
        busy: list[str] = []
        differences: list[Difference] = []
        notes: list[Difference] = []
        records = 0
        if agent.head is not None:
            at_head = next((session.id for session in sessions if session.tip_turn_id == agent.head), "")
            in_chain = partial(Difference, at_head, agent.head, True, "")
            # Errors in the chain itself: a missing head, or a path that cannot be written.
            head = await self._store.turn(agent.head)
            if head is None or head.status not in ON_PATH:
                differences.append(in_chain("chain", "the chain's head is not a finished turn of it"))
            elif not (await paths.parsed(await paths.shown(self._store, head.id))).path:
                differences.append(in_chain("chain", "the chain holds no records of the path to its head"))
            if held_at is not None:
                text = f"{held_at} has this agent: its transcripts are there, and `verify` compares them there"
                notes.append(in_chain("host", text))
        step()
        for session in sessions:
            if held_at is None and session.tip_turn_id:
                result = await self.session(agent, session)
                unwritten += [session.id] if result.unwritten else []
                records += result.records
                busy += [session.id] if result.busy else []
                differences += result.differences
                notes += result.notes
            step()
        number = sum(session.tip_turn_id is not None for session in sessions)
        return Verified(
            agent.agent_id, agent.owner, number, records,
            tuple(busy), tuple(unwritten), tuple(differences), tuple(notes),
        )  # fmt: skip

    def by_hand(self, agent: Agent, session_id: str) -> str | None:
        """The command with which a person can continue this session; the chain adopts it. None for a confined agent,
        whose files would then run outside the sandbox."""
        if self._sandboxes.was_confined(agent.dir):
            return None
        return environment.resume_command(self._settings, self._sandboxes.path(agent.dir), session_id)

    async def session(self, agent: Agent, session: Session) -> SessionResult:
        """One session, which has a turn at its tip."""
        for _ in range(ATTEMPTS):
            result = await self._compared(agent, session)
            if not result.differences:
                return result
            newest = await self._store.session(session.id)
            if newest is None or newest.tip_turn_id == session.tip_turn_id:
                break
            session = newest
        return result

    async def _compared(self, agent: Agent, session: Session) -> SessionResult:
        assert session.tip_turn_id is not None
        if self._sandboxes.was_confined(agent.dir):  # its programs can write to it: the next turn writes it anew
            return SessionResult(unwritten=True)
        path = self._projects.path(self._sandboxes.path(agent.dir), session.id)
        at_head = session.tip_turn_id == agent.head
        if not at_head and session.mark is not None:
            # For other sessions the hash is enough; reading the path for each of hundreds would be slow.
            verdict = await in_thread_at(path.parent, transcript.check, path, session.mark, None)
            if verdict is not None and verdict.found == "equal":
                return SessionResult(verdict=verdict)
        known = await paths.shown(self._store, session.tip_turn_id)
        verdict = await in_thread_at(path.parent, _compare, path, known)
        if verdict.found == "missing" and not session.transcript:
            return SessionResult(unwritten=True)
        tip = await self._store.turn(session.tip_turn_id)
        if tip is not None and await tails.lacks_other_models(self._store, agent, tip, session, verdict):
            return SessionResult(unwritten=True)
        difference = partial(Difference, session.id, session.tip_turn_id, at_head, str(path))
        found = [difference(*fields) for fields in _differences(verdict)]
        if verdict.found == "missing":
            for place in await in_thread_at(path.parent, self._projects.elsewhere, path):
                if (await in_thread_at(place.parent, _compare, place, known)).found == "equal":
                    text = f"it is at {place} instead of {path}; the next turn moves it back"
                    found = [difference("elsewhere", text)]
                    break
        unfinished = [turn async for turn in self._store.unfinished()] if found else []
        if any(turn.agent_key == agent.key and turn.session_id in (session.id, None) for turn in unfinished):
            found = [one for one in found if one.kind not in ("unknown", "cut")]
            return SessionResult(len(known), busy=True, differences=tuple(found), verdict=verdict)
        stops = transcript.stops_at_unknown(session.cli_version)
        if stops and verdict.unknown_types and verdict.found in ("equal", "tail"):
            text = (
                f"{_count(len(verdict.unknown_types), 'record')} of a type that Claude CLI {session.cli_version} does "
                f"not load ({_list(verdict.unknown_types)}): it would go on from what follows only; the next turn "
                "writes the transcript again without"
            )
            found.append(difference("unloaded", text))
        leftover = LEFTOVERS.get(await tails.origin(self._store, agent, verdict))
        if leftover is not None:
            text = f"{_count(len(verdict.tail), 'record')} {leftover} after the path: the next turn removes them"
            return SessionResult(len(known), notes=(difference("leftover", text),), verdict=verdict)
        return SessionResult(len(known), differences=tuple(found), verdict=verdict)


async def compare(verifier: Verifier, store: Store, agent: Agent, turn: Turn) -> Comparison:
    """One turn's session as `verify` compares it, and the turn's records side by side."""
    session = await store.session(turn.session_id) if turn.session_id else None
    if session is None or session.tip_turn_id is None:
        return Comparison("none")
    result = await verifier.session(agent, session)
    findings = (*result.differences, *result.notes)
    own = await store.own_records(turn.id)
    return Comparison(
        "different" if result.differences else "busy" if result.busy else "equal",
        tuple((one.kind, one.text) for one in findings),
        await asyncio.to_thread(_side_by_side, own, result.verdict, is_tip=session.tip_turn_id == turn.id),
        session.id,
        findings[0].transcript if findings else session.transcript,
        session.tip_turn_id,
        verifier.by_hand(agent, session.id),
    )


def _side_by_side(own: list[Record], verdict: FileVerdict | None, *, is_tip: bool) -> tuple[ComparedRecord, ...]:
    """The turn's compared records, and after the last turn those that the chain does not have."""

    def blocks(entry: Entry | None) -> Sequence[Any] | None:
        return None if entry is None else entry.content or (entry.data.get("attachment"),)

    def row(state: str, chain: Entry | None, file: Entry | None) -> ComparedRecord:
        either = chain or file
        assert either is not None
        return ComparedRecord(
            either.uuid, either.kind, state, blocks(chain), None if state == "equal" else blocks(file)
        )

    entries = transcript.parse_records(own).path
    if verdict is not None and verdict.found == "equal" and not verdict.pairs:  # compared by its hash only
        return tuple(row("equal", entry, None) for entry in entries)
    pairs = {pair.ours.uuid: pair for pair in verdict.pairs} if verdict is not None else {}
    rows = []
    for entry in entries:
        pair = pairs.get(entry.uuid)
        state = "only in the chain" if pair is None or pair.state == "lost" else pair.state
        rows.append(row(state, entry, pair.theirs if pair else None))
    if verdict is not None and is_tip:
        rows += [row("only in the transcript", None, entry) for entry in verdict.unknown]
    return tuple(rows)


def _compare(path: Path, known: Sequence[Record]) -> FileVerdict:
    verdict = transcript.check(path, None, known)
    assert verdict is not None
    return verdict


def _differences(verdict: FileVerdict) -> Iterator[tuple[str, str, int | None]]:
    """The differences in a verdict: kind, text, number of the chain's record."""
    if verdict.found == "missing":
        yield "missing", f"{verdict.note}; the next turn writes it again from the chain", None
    if verdict.found == "unreadable":
        advice = "give this user the right to read it, or leave it to the next turn, which writes it again"
        yield "unreadable", f"{verdict.note}; {advice}", None
    different = [pair for pair in verdict.pairs if pair.state != "equal"]
    for pair in different[:LISTED]:
        yield pair.state, _describe(pair, len(verdict.pairs)), pair.number
    if len(different) > LISTED:
        first = different[LISTED]
        yield first.state, f"and {len(different) - LISTED} more records of {len(verdict.pairs)}", first.number
    if verdict.unknown:
        records = _count(len(verdict.unknown), "record")
        yield "unknown", f"{records} that the chain does not know: {_list(verdict.unknown)}", None
    if verdict.found == "different" and not different and not verdict.unknown:
        yield "order", "the records are in another order, or some occur twice", None
    if verdict.broken:
        lines = _count(verdict.broken, "line")
        yield "cut", f"{lines} of it no JSON or no record of a CLI's (a cut last line is one)", None


def _describe(pair: Pair, of: int) -> str:
    record = f"record {pair.number} of {of} ({pair.ours.kind} {pair.ours.uuid})"
    if pair.theirs is None:
        return f"{record} is not in the transcript"
    names = ("uuid", "parentUuid", "type", "content")
    fields = zip(names, pair.ours.comparable(), pair.theirs.comparable(), strict=True)
    return f"{record} differs in its {', '.join(name for name, ours, theirs in fields if ours != theirs)}"


def _list(entries: Sequence[Entry]) -> str:
    """The first three records by type and uuid."""
    return ", ".join(f"{entry.kind} {entry.uuid}" for entry in entries[:3]) + (", …" if len(entries) > 3 else "")


def _count(number: int, one: str) -> str:
    return f"{number} {one}" if number == 1 else f"{number} {one}s"
