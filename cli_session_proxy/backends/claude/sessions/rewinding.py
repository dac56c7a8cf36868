"""A running process that holds more than the path is taken back to it, where another one would have to be started.

An edited or regenerated message, a turn left off the path, one that failed: the process forgets the turns behind the
one that is continued, in milliseconds, and its next request has the messages before that point and the new prompt,
nothing else. Its transcript is a tree then: the CLI notes where it went back, and `transcript.parse` reads the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

from ....domain.models import FileMark, Turn
from ....settings import Profile
from ....stores.base import Store
from .. import transcript
from ..process.capability import Capability
from . import paths
from .exchanges import is_compaction, is_prompt

# Turns that are taken back at most; more of them may be a conversation that goes on beside this one.
MOST = 64


@dataclass(frozen=True, slots=True)
class Held:
    """What a warm process's memory is: the path to this turn; None: nothing. `mark` is of its transcript when that was
    last read, and names the record that the path ends with.

    `total` is what it says that all its turns cost, in USD. `taken_back` are prompts that it was taken back behind: its
    transcript may not say so yet.
    """

    turn_id: str | None
    mark: FileMark
    total: float = 0.0
    taken_back: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class RewindPoint:
    """Before the prompt `to`. `newest` is the last prompt that the process was given; the next one hangs on `leaf`.
    `turns` are behind it."""

    to: str
    newest: str
    leaf: str | None
    turns: int


@dataclass(frozen=True, slots=True)
class FailedTurn:
    """A turn that is not kept. `frame` is its prompt, `answered` the session that the CLI answered in, `cost_total` its
    running total (USD) after it. `sound`: nothing of what happened speaks against the process."""

    frame: str
    answered: str | None
    cost_total: float | None
    sound: bool


def can_rewind(capability: Capability, profile: Profile) -> bool:
    """The self-check saw this CLI do it, and none of its own tools ran: it knows which files it has read beside its
    conversation, and would take what it read in a turn that was taken back for known."""
    own = profile.tools or profile.mcp_config or profile.setting_sources
    return capability.was_seen("rewind_conversation") and not own


async def point(store: Store, held: str, parent: Turn | None) -> RewindPoint | None:
    """Where a process that holds the path to the turn `held` goes back to, so that it holds the path to `parent`.

    None where `parent` is not on that path, or where what the process sends is not the path's records: after a
    compaction, after something was left out. A first turn is only taken back alone.
    """
    wanted = None if parent is None else parent.id
    most = MOST if parent is not None else 1
    newest: str | None = None
    opening: transcript.Entry | None = None
    turn = await store.turn(held)
    turns = 0
    while turn is not None and turn.id != wanted:
        if turns == most or turn.backend != paths.NAME or turn.evidence.compacted is not None:
            return None
        if any(note.code.startswith("cli_left_out") for note in turn.evidence.notes):
            return None
        records = await store.own_records(turn.id)
        if any(map(transcript.is_mark, records)):
            return None
        path = (await paths.parsed(records)).path
        if not path or any(map(is_compaction, path)):
            return None
        prompts = [entry.uuid for entry in path if is_prompt(entry)]
        newest = newest or (prompts[-1] if prompts else None)
        opening = path[0]
        turns += 1
        turn = None if turn.parent_id is None else await store.turn(turn.parent_id)
    if (None if turn is None else turn.id) != wanted or opening is None:
        return None
    if newest is None or opening.uuid is None or not is_prompt(opening):
        return None
    return RewindPoint(opening.uuid, newest, opening.parent, turns)
