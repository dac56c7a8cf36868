"""Rewinds a running process whose memory has more than the path, instead of starting another one.

After an edited or regenerated message, a turn left off the path, or a failed one: the process drops the turns after the
continued one, in milliseconds. Its next request has the messages before that point and the new prompt, nothing else.
Its transcript is then a tree: the CLI notes the point, and `transcript.parse` skips the dropped records.
"""

from __future__ import annotations

from dataclasses import dataclass

from ....domain.models import FileMark, Turn
from ....settings import Profile
from ....stores.base import Store
from .. import transcript
from ..process.capability import Capability
from ..transcript import mending
from . import paths
from .exchanges import is_compaction, is_prompt

# The most turns that are rewound; more of them may be a conversation that continues beside this one.
MOST = 64


@dataclass(frozen=True, slots=True)
class WarmPath:
    """The path that a warm process has in its memory."""

    turn_id: str | None  # its last turn; None: an empty path
    mark: FileMark  # of the transcript when it was last read, with the path's last record
    total: float = 0.0  # the cost that the process reports for all its turns, in USD
    # The prompts (uuids) before which it was rewound. The transcript may not show all of this yet.
    rewound: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class RewindPoint:
    """A point to rewind to, before a prompt. Prompts and records are uuids."""

    to: str  # that prompt: it and all after it is dropped
    newest: str  # the process's last prompt
    leaf: str | None  # the record before `to`, which the next prompt follows
    turns: int  # how many are dropped


@dataclass(frozen=True, slots=True)
class FailedTurn:
    """A turn that is not stored."""

    frame: str  # the uuid of its prompt
    answered: str | None  # the session in which the CLI answered
    cost_total: float | None  # that session's total (USD) afterwards
    reusable: bool  # the process may be used again


def can_rewind(capability: Capability, profile: Profile) -> bool:
    """Whether this CLI passed the check for it and runs no tools of its own: it remembers which files it has read, and
    would still count those of dropped turns as read."""
    own = profile.tools or profile.mcp_config or profile.setting_sources
    return capability.was_seen("rewind_conversation") and not own


async def point(store: Store, turn_id: str, parent: Turn | None) -> RewindPoint | None:
    """The point to which a process with the path to the turn `turn_id` is rewound, so that it has the path to `parent`.

    None if `parent` is not on that path, or if the process's requests differ from the path's records: after a
    compaction, or if something was left out. A first turn can only be rewound alone.
    """
    wanted = None if parent is None else parent.id
    most = 1 if parent is None else MOST
    newest: str | None = None
    opening: transcript.Entry | None = None
    turn = await store.turn(turn_id)
    turns = 0
    while turn is not None and turn.id != wanted:
        if turns == most or turn.backend != paths.NAME or turn.evidence.compacted is not None:
            return None
        if any(note.code.startswith("cli_left_out") for note in turn.evidence.notes):
            return None
        records = await store.own_records(turn.id)
        if any(map(mending.is_mark, records)):
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
