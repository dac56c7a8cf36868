"""What happened to a turn beside its answer, as codes with data. `export.explain` puts it in words.

It is for people: no step of a turn decides by it. What decides is in `models`: `Placed` and `TurnOptions`.
Both forms are here, the fields and the JSON that the store and an export keep, in which what is not set is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from .approvals import Approval
from .forms import Recorded, Sparse
from .notes import Note, header
from .parameters import Name

# Why a session was written, or put back, before a turn:
# - `client_history`  a client brought a history that was new here
# - `left_path`       the path leaves the session's: it was written as a new one
# - `first_written`   its first turn ran in a process that serves strangers: it had none before
# - `open_calls`      no process waits for the results that came: written with them
# - `rewritten`       the session was not the path (`found`): written again, under its id or a new one
# - `moved`           its transcript lay elsewhere
# - `other_model`     another model answered since the session was last used: its turns were written into it
# - `window`          what is older than the turn's window was left out, or a wider one brought it back
# - `taken_back`      a running process that held more than the path was taken back to it, in its session
# - `left_out`        the provider would refuse some of the path: written without that (see `Evidence.notes`)
RepairCode = Literal[
    "client_history",
    "left_path",
    "taken_back",
    "first_written",
    "open_calls",
    "rewritten",
    "moved",
    "left_out",
    "other_model",
    "window",
]

# The code of an attempt whose structured output was not what was asked for.
OUTPUT_REFUSED = "output_refused"

# Where a turn's records came from:
# - `transcript`  read from the session's own file
# - `copy`        read from the copy that the CLI answered in
# - `replaced`    read from a file that was put in its place during the turn
# - `frames`      made from what was said, as the transcript is gone
# - `unlinked`    made from what was said, as the transcript does not go on from the path
# - `cut`         cut where the answer ends
# - `memory`      kept by a backend without transcripts
# - `model`       made for the CLI from the answer of another model
RecordsFrom = Literal["transcript", "copy", "replaced", "frames", "unlinked", "cut", "memory", "model"]


@dataclass(frozen=True, slots=True)
class Repair(Sparse):
    """How a session was made equal to the path, kept with the link and with the attempt that it was done for.

    `found` and `behind` are the backend's codes for what was wrong (see `transcript.comparing` and `tails` of the
    Claude backend), `note` its measurement in words, `records` how many lines were written, `kept` where what was
    there has been put, `also_at` where wrong copies lie, `turns` how many were taken back. Evidence that an older
    version left out is None.
    """

    code: RepairCode | None = None
    records: int | None = None
    from_turn: str | None = None
    found: str | None = None
    note: str | None = None
    behind: str | None = None
    also_at: tuple[str, ...] = ()
    kept: str | None = None
    looked_for: str | None = None
    found_at: str | None = None
    turns: int | None = None


@dataclass(frozen=True, slots=True)
class StreamCut(Recorded):
    """The provider's stream broke off: how many characters of unfinished blocks a client had been given."""

    text: int = 0
    thinking: int = 0


@dataclass(frozen=True, slots=True)
class Brought(Sparse):
    """The turn was not run here: it came in a client's history, or from a session that somebody else used."""

    by: Literal["client", "adoption"]
    session: str | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Refusal(Sparse):
    """The model refused to answer. `category` and `explanation` are the provider's, None where it gave none.

    `behind`: requests before this one, in a row, that were refused behind the same turn.
    """

    category: str | None = None
    explanation: str | None = None
    behind: int = 0

    @property
    def words(self) -> str:
        """What a client is told: what the provider said, and the way out where it is not the request alone."""
        why = f" ({self.category})" if self.category else ""
        said = f"The model refused to answer this{why}."
        if self.explanation:
            said += f" {self.explanation}"
        if self.behind:
            said += (
                f" {self.behind + 1} requests in a row were refused behind the same answer: something before them may "
                "be what is refused. `cli-session-proxy rewind AGENT --to -1` takes the last turn off the path, and so "
                "does POST /v1/chains/{agent_id}/rewind."
            )
        return said


@dataclass(frozen=True, slots=True)
class CacheMiss(Sparse):
    """Why the provider could not read all that was in its prompt cache. `reason` is its own code, such as
    `messages_changed`; `tokens` is about how many it would have read."""

    reason: str
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Recalled(Recorded):
    """Earlier attempts at a fix that the model was told at the head of the prompt: the commits they were read from,
    newest attempt first."""

    fix_id: str
    commits: tuple[str, ...]


class ToolCall(NamedTuple):
    """A call of one of the CLI's own tools. Seconds since 1970; `ended` None: it has no result."""

    id: str
    name: str
    began: float
    ended: float | None = None
    failed: bool = False


def tool_calls(entries: Iterable[Mapping[str, Any]]) -> list[ToolCall]:
    """The calls in a turn's `tools`, in the order of their beginning. One that was kept without a time is left out."""
    calls: dict[str, ToolCall] = {}
    for entry in entries:
        at, of = entry.get("at"), str(entry.get("id") or entry.get("tool_use_id"))
        if not isinstance(at, int | float):
            continue
        if str(entry.get("type")).endswith("tool_use"):
            calls[of] = ToolCall(of, str(entry.get("name")), at)
        elif of in calls:
            calls[of] = calls[of]._replace(ended=at, failed=bool(entry.get("is_error")))
    return list(calls.values())


@dataclass(frozen=True, slots=True)
class Evidence(Sparse):
    """What a turn has to show beside its links and attempts.

    - `left_off`        a turn whose answer never reached its client: this one continues what is before it
    - `sandbox`         the agent's directory was gone, and made again here
    - `files_at`        the host that has what the agent's tools made, which could not be reached: this one has not
    - `verified`        how the session was found to be the path
    - `written`         a session was written for this turn
    - `repaired`        its session was made equal to the path again
    - `waited`          its process waited for the results that the turn brought
    - `shared`          it ran in a process that serves strangers' questions one after the other
    - `exit_code`       the process that was kept for the session had ended with this
    - `reloaded`        how the transcript was changed while a process loaded it, each time
    - `output_refused`  what was wrong with the structured output of the attempt before
    - `retries`, `cuts` the provider failed, or its stream broke off
    - `compacted`       the CLI put a summary in the place of what is before
    - `window_summary`  what the model was shown in the place of the turns outside its window
    - `recalled`        earlier attempts at the same fix that the model was told, from a git repository
    - `refusal`         why there is no more of an answer: the model refused
    - `settled`         the answer was found in the transcript after the proxy had died
    - `notes`           what the model was not shown as it was said
    - `other`           what a newer or an older version noted, kept as it is
    - `unmet`           parameters of the request that the turn ran without
    - `cache_miss`      why the provider did not read all of its prompt cache, where it says so
    - `approvals`       tools of the CLI's that waited for a person's word, of every attempt
    """

    brought: Brought | None = None
    left_off: str | None = None
    sandbox: str | None = None
    verified: str | None = None
    written: Repair | None = None
    repaired: Repair | None = None
    waited: bool = False
    exit_code: int | None = None
    reloaded: tuple[str, ...] = ()
    output_refused: str | None = None
    retries: tuple[dict[str, Any], ...] = ()
    cuts: tuple[StreamCut, ...] = ()
    compacted: dict[str, Any] | None = None
    settled: bool = False
    records: RecordsFrom | None = None
    other: Mapping[str, Any] = field(default_factory=dict)
    unmet: tuple[Name, ...] = ()
    notes: tuple[Note, ...] = ()
    refusal: Refusal | None = None
    recalled: Recalled | None = None
    window_summary: str | None = None
    files_at: str | None = None
    cache_miss: CacheMiss | None = None
    shared: bool = False
    approvals: tuple[Approval, ...] = ()

    @property
    def told(self) -> tuple[Note, ...]:
        """The notes that answers are headed with."""
        return self.notes if self.files_at is None else (*self.notes, Note("files_elsewhere"))

    @property
    def note(self) -> str:
        """The value of `X-Continuity-Note`: the notes, and what else the CLI did; "" where that is nothing."""
        asked_again = len(self.retries) + len(self.cuts)
        told = self.told
        said = [header(told)] if told else []
        said += [] if self.compacted is None else ["cli_compacted=1"]
        said += [f"cli_asked_again={asked_again}"] if asked_again else []
        return ", ".join(said)

    def plus(self, other: Evidence) -> Evidence:
        """With what the other one has to show, where both do, the other's."""
        values = _VALUES(other)
        if values == _NO_VALUES:
            return self
        if _VALUES(self) == _NO_VALUES:
            return other
        shown = zip(_NONE.items(), values, strict=True)
        return replace(self, **{name: value for (name, nothing), value in shown if value != nothing})


NOTHING = Evidence.from_json({})
_NONE: dict[str, Any] = {name: getattr(NOTHING, name) for name in Evidence.__slots__}
_VALUES = attrgetter(*_NONE)
_NO_VALUES = _VALUES(NOTHING)
