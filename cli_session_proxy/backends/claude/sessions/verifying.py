"""The chain against the transcripts: every difference named, nothing changed.

For each session with a turn at its tip, the path to that turn is compared, record by record, with the file where
the CLI will look for it. The head's session is the one that matters next; others are rebuilt when continued.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ....domain.models import JSON, ON_PATH, Agent, Record, Session
from ....sandbox import Sandboxes
from ....settings import Settings
from ....stores.base import Store
from .. import environment, transcript
from ..transcript import Entry

# Of many records that differ alike, this many are named one by one.
NAMED = 20
# How often a session is looked at again when a turn was finished while its file was read.
LOOKS = 3


@dataclass(frozen=True, slots=True)
class Difference:
    """`kind`: missing, elsewhere, unreadable, lost, changed, unknown, order, cut, or chain (the chain's own fault).

    `record` counts from 1 on the chain's path. `tip`: the turn up to which the session should be the path.
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
    """One agent. `busy` are sessions that a turn is just writing: what is new in them is no difference.

    `unwritten` were adopted or imported: their file is made at the next turn.
    """

    agent_id: str
    owner: str
    sessions: int
    records: int
    busy: tuple[str, ...]
    unwritten: tuple[str, ...]
    differences: tuple[Difference, ...]

    def as_json(self) -> JSON:
        return asdict(self) | {"equal": not self.differences}


class Verifier:
    """Compares agents' chains with their transcripts. Only reads."""

    def __init__(self, settings: Settings, store: Store) -> None:
        self._store = store
        self._sandboxes = Sandboxes(settings)
        self._config_dir = environment.config_dir(settings)

    async def verify(self, agent: Agent) -> Verified:
        chain = await self._store.chain(agent.key)
        sessions = [session for session in chain.sessions if session.tip_turn_id] if chain else []
        unwritten: list[str] = []
        busy: list[str] = []
        found: list[Difference] = []
        records = 0
        async for fault in self._faults(agent, sessions):
            found.append(fault)
        for session in sessions:
            looked = await self._session(agent, session)
            unwritten += [session.id] if looked.unwritten else []
            records += looked.records
            busy += [session.id] if looked.busy else []
            found += looked.differences
        every = (tuple(busy), tuple(unwritten), tuple(found))
        return Verified(agent.agent_id, agent.owner, len(sessions), records, *every)

    async def session(self, agent: Agent, session: Session) -> tuple[bool, tuple[Difference, ...]]:
        """One session: is a turn just writing it, and how does it differ."""
        looked = await self._session(agent, session)
        return looked.busy, looked.differences

    async def _faults(self, agent: Agent, sessions: Sequence[Session]) -> AsyncIterator[Difference]:
        """Is the head there, and on a path that can be written again?"""
        if agent.head is None:
            return
        tip = next((session.id for session in sessions if session.tip_turn_id == agent.head), "")
        head = await self._store.turn(agent.head)
        if head is None or head.status not in ON_PATH:
            yield Difference(tip, agent.head, True, "", "chain", "the chain's head is no finished turn of it")
            return
        known = await self._store.records(head.id)
        path = transcript.parse_records(known).path
        if not path:
            yield Difference(tip, head.id, True, "", "chain", "the chain holds no records of the path to its head")

    async def _session(self, agent: Agent, session: Session) -> _Looked:
        for _ in range(LOOKS):
            looked = await self._look(agent, session)
            if not looked.differences:
                return looked
            again = await self._store.session(session.id)
            if again is None or again.tip_turn_id == session.tip_turn_id:
                break
            session = again
        return looked

    async def _look(self, agent: Agent, session: Session) -> _Looked:
        assert session.tip_turn_id is not None
        path = transcript.path_of(self._config_dir, self._sandboxes.path(agent.dir), session.id)
        at_head = session.tip_turn_id == agent.head
        if not at_head and session.mark is not None:
            # A session that is not next: its hash says enough, and the path need not be read for each of hundreds.
            verdict = await asyncio.to_thread(transcript.check, path, session.mark, None)
            if verdict is not None and verdict.found == "equal":
                return _Looked()
        known = await self._store.records(session.tip_turn_id)
        faults = await asyncio.to_thread(_compare, path, known)
        if faults and faults[0][0] == "missing":
            if not session.transcript:
                return _Looked(unwritten=True)
            faults = await asyncio.to_thread(self._elsewhere, session.id, path, known, faults)
        busy = bool(faults) and await self._running(agent, session)
        if busy:
            faults = [fault for fault in faults if fault[0] not in ("unknown", "cut")]
        named = tuple(
            Difference(session.id, session.tip_turn_id, at_head, str(path), kind, text, record)
            for kind, text, record in faults
        )
        return _Looked(len(known), busy, False, named)

    def _elsewhere(self, session_id: str, path: Path, known: Sequence[Record], faults: list[_Fault]) -> list[_Fault]:
        for place in transcript.find_elsewhere(self._config_dir, session_id, path):
            if not _compare(place, known):
                text = f"it lies at {place} instead of {path}; the next turn moves it back"
                return [("elsewhere", text, None)]
            faults = [*faults, ("elsewhere", f"{place} has another path", None)]
        return faults

    async def _running(self, agent: Agent, session: Session) -> bool:
        async for turn in self._store.unfinished():
            if turn.agent_key == agent.key and turn.session_id in (session.id, None):
                return True
        return False


@dataclass(frozen=True, slots=True)
class _Looked:
    records: int = 0
    busy: bool = False
    unwritten: bool = False
    differences: tuple[Difference, ...] = ()


# kind, text, number of the chain's record
_Fault = tuple[str, str, int | None]


def _compare(path: Path, known: Sequence[Record]) -> list[_Fault]:
    try:
        parsed = transcript.parse(path.read_bytes())
    except FileNotFoundError:
        return [("missing", f"no transcript at {path}; the next turn writes it again from the chain", None)]
    except OSError as exc:
        return [("unreadable", f"{path}: {exc.strerror}; give this user the right to read it", None)]
    wanted = transcript.parse_records(known).path
    faults = [*_records(wanted, parsed.path)]
    if parsed.broken:
        faults.append(("cut", f"{parsed.broken} lines are not JSON (a cut last line is one)", None))
    return faults


def _records(wanted: Sequence[Entry], have: Sequence[Entry]) -> list[_Fault]:
    theirs = {entry.uuid: entry for entry in have}
    ours = {entry.uuid for entry in wanted}
    faults: list[_Fault] = []
    for number, entry in enumerate(wanted, 1):
        other = theirs.get(entry.uuid)
        what = f"record {number} of {len(wanted)} ({entry.kind} {entry.uuid})"
        if other is None:
            faults.append(("lost", f"{what} is not in the transcript", number))
        elif entry.says() != other.says():
            faults.append(("changed", f"{what} differs in its {_parts(entry, other)}", number))
    if len(faults) > NAMED:
        more = len(faults) - NAMED
        faults = [*faults[:NAMED], (faults[NAMED][0], f"and {more} more records of {len(wanted)}", faults[NAMED][2])]
    unknown = [entry for entry in have if entry.uuid not in ours]
    if unknown:
        kinds = ", ".join(f"{entry.kind} {entry.uuid}" for entry in unknown[:3])
        dots = ", …" if len(unknown) > 3 else ""
        faults.append(("unknown", f"{len(unknown)} records that the chain does not know: {kinds}{dots}", None))
    if not faults and [entry.uuid for entry in wanted] != [entry.uuid for entry in have]:
        faults.append(("order", "the records stand in another order, or some stand twice", None))
    return faults


def _parts(ours: Entry, theirs: Entry) -> str:
    names = ("uuid", "parentUuid", "type", "content")
    pairs = zip(names, ours.says(), theirs.says(), strict=True)
    return ", ".join(name for name, mine, other in pairs if mine != other)
