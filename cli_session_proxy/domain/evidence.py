"""What happened to a turn apart from its answer, as codes with data. `export.explain` makes sentences of it.

It is for people: no decision depends on it. Decisions depend on `Placed` and `TurnOptions` in `models`. The JSON in the
store and in exports leaves out fields with their default.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from .approvals import Approval
from .forms import Recorded, Sparse, replace
from .options import ParameterName

# A difference between the messages and what the model was shown.
NoteCode = Literal[
    "system_prompt_in_newest_turn",  # changes of it were sent with the prompt
    "system_prompt_replaced",
    "thinking_left_out",  # its signature was for another head of the request
    "cut_thinking_left_out",  # from an answer that the provider cut
    "images_left_out",
    "documents_left_out",
    "calls_left_out",  # the words of their results stay
    "summarised",  # the model was shown a summary of the oldest turns
    "model_takes_no_images",
    "model_takes_no_documents",
    "outside_window",  # turns older than the request's window
    "not_summarised",  # of these, turns that are in no summary
    "files_elsewhere",  # files of the agent's tools are on an unreachable host
    "said_beside",  # a person's prompts in the session during the turn, on no path
    "session_not_written",  # its CLI reported a failed write: the transcript was repaired
    # by the CLI itself
    "cli_left_out_thinking",
    "other_models_thinking",
    "cli_left_out_tool_results",
    "cli_left_out_images",
    "cli_left_out_documents",
    "cli_changed_images",
    # in a client's history
    "foreign_thinking_left_out",
    "ids_rewritten",
    "calls_without_result",
    "results_without_call",
    "empty_messages",
    "characters_replaced",
    "arguments_kept_as_text",
    "images_made_smaller",
    "unreadable_images_left_out",
    "unreadable_documents_left_out",
]


@dataclass(frozen=True, slots=True)
class Note(Recorded):
    """`count`: of the blocks or turns that the code is about; 1 if there can be only one."""

    code: NoteCode
    count: int = 1


def notes_header(notes: Iterable[Note]) -> str:
    """The value of `X-Continuity-Note`: `code=count` of each, in order."""
    return ", ".join(f"{note.code}={note.count}" for note in notes)


# Why a session was written or rewound before a turn:
# - `client_history`  a client sent a history that was new here
# - `left_path`       the path branches off the session: written as a new session
# - `first_written`   the first turn ran in a shared process, without a session of its own
# - `open_calls`      no process waits for the results in the request: written with them
# - `rewritten`       the session was not equal to the path (see `found`): written again, under its id or a new one
# - `moved`           its transcript was in another place
# - `other_model`     another model answered since the session's last use: its turns were written into it
# - `window`          turns older than the window were left out, or a wider window needed them again
# - `taken_back`      a running process that had more than the path was rewound, in its session
# - `left_out`        the provider would refuse a part of the path: written without it (see `Evidence.notes`)
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

# The code of an attempt whose structured output was invalid.
OUTPUT_REFUSED = "output_refused"

# Where a turn's records came from:
# - `transcript`  read from the session's own file
# - `copy`        read from another file, in which the CLI continued
# - `replaced`    read from a file that replaced it during the turn
# - `frames`      made from the CLI's frames, because the transcript is gone
# - `unlinked`    made from the CLI's frames, because the transcript does not continue the path
# - `reported`    made from the CLI's frames, because programs of a confined agent can write to its transcript
# - `cut`         shortened, because the answer was cut at a stop sequence or a token limit
# - `memory`      from a backend without transcripts
# - `model`       made for the CLI from the answer of another model
RecordsFrom = Literal["transcript", "copy", "replaced", "frames", "unlinked", "reported", "cut", "memory", "model"]

# These codes in the words of a dump. Programs have relied on them since 0.1, which stored the words (see `legacy`).
WHY: Mapping[RepairCode, str] = {
    "client_history": "the client's history was imported",
    "left_path": "the path leaves the session's",
    "taken_back": "the process was taken back to the path",
    "first_written": "the first turn ran in a process that is shared",
    "open_calls": "nobody waits for these results any more",
    "left_out": "the model's API would not take all of it",
    "other_model": "another model had answered since",
    "window": "the request shows a window of the conversation",
}
DONE: Mapping[RepairCode, str] = {
    "rewritten": "written again from the chain's records",
    "moved": "moved back",
}
RECORDS: Mapping[RecordsFrom, str] = {
    "transcript": "read from the transcript",
    "copy": "read from the CLI's copy of the session",
    "replaced": "the transcript was replaced during the turn",
    "frames": "the transcript is gone; records made from the frames",
    "unlinked": "the transcript does not continue the path",
    "reported": "made from what the CLI reported",
    "cut": "cut at a stop sequence",
    "memory": "kept in memory",
    "model": "made for the CLI from the answer of another model",
}


@dataclass(frozen=True, slots=True)
class Repair(Sparse):
    """How a session was made equal to the path. Stored with the link, and with the attempt that needed it."""

    code: RepairCode | None = None
    records: int | None = None  # how many lines were written
    from_turn: str | None = None
    found: str | None = None  # what was wrong: a code of the backend (see `transcript.comparing` of the Claude backend)
    note: str | None = None  # the same, measured, in words
    behind: str | None = None  # what was wrong behind the path: a code (see `tails` of the Claude backend)
    also_at: tuple[str, ...] = ()  # paths of wrong copies of the transcript
    kept: str | None = None  # the path of the copy of the damaged transcript
    looked_for: str | None = None
    found_at: str | None = None
    turns: int | None = None  # how many turns a process was rewound by


@dataclass(frozen=True, slots=True)
class StreamCut(Recorded):
    """The provider's stream broke off. How many characters of unfinished blocks a client had received."""

    text: int = 0
    thinking: int = 0


@dataclass(frozen=True, slots=True)
class ExternalOrigin(Sparse):
    """Where a turn that was not run here is from: a client's history, or a session that a person used."""

    by: Literal["client", "adoption"]
    session: str | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Refusal(Sparse):
    """The model refused to answer."""

    category: str | None = None  # by the provider
    explanation: str | None = None  # by the provider
    behind: int = 0  # how many requests in a row before this one were refused after the same turn

    @property
    def words(self) -> str:
        """The message for the client: the provider's words and, if the path itself may be the cause, what to do."""
        why = f" ({self.category})" if self.category else ""
        words = f"The model refused to answer this{why}."
        if self.explanation:
            words += f" {self.explanation}"
        if self.behind:
            words += (
                f" {self.behind + 1} requests in a row were refused behind the same answer: something before them may "
                "be what is refused. `cli-session-proxy rewind AGENT --to -1` takes the last turn off the path, and so "
                "does POST /v1/chains/{agent_id}/rewind."
            )
        return words


@dataclass(frozen=True, slots=True)
class CacheMiss(Sparse):
    """Why the provider did not use all of its prompt cache. `reason`: the provider's code, such as `messages_changed`.
    `tokens`: roughly how many tokens were not read from the cache."""

    reason: str
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Recalled(Recorded):
    """Earlier attempts at a fix that were put in front of the prompt. `commits`: where they are written, newest
    first. `text`: what the model was shown of them."""

    fix_id: str
    commits: tuple[str, ...]
    text: str = ""

    @property
    def block(self) -> dict[str, Any]:
        return {"type": "text", "text": self.text}


class ToolCall(NamedTuple):
    """A call of one of the CLI's own tools. Seconds since 1970; `ended` None: it has no result."""

    id: str
    name: str
    began: float
    ended: float | None = None
    failed: bool = False


def tool_calls(entries: Iterable[Mapping[str, Any]]) -> list[ToolCall]:
    """The calls in a turn's `tools`, in the order of their begin; without entries that have no time."""
    calls: dict[str, ToolCall] = {}
    for entry in entries:
        at, call_id = entry.get("at"), str(entry.get("id") or entry.get("tool_use_id"))
        if not isinstance(at, int | float):
            continue
        if str(entry.get("type")).endswith("tool_use"):
            calls[call_id] = ToolCall(call_id, str(entry.get("name")), at)
        elif call_id in calls:
            calls[call_id] = calls[call_id]._replace(ended=at, failed=bool(entry.get("is_error")))
    return list(calls.values())


@dataclass(frozen=True, slots=True)
class Evidence(Sparse):
    """What happened to a turn, apart from its links and attempts.

    - `brought`         the turn was not run here
    - `left_off`        the id of the earliest turn before it that was left off the path (undelivered)
    - `sandbox`         the agent's directory was missing, and created again
    - `files_at`        the host with the files of the agent's tools, which was not reached; this host has none
    - `verified`        how the session was found equal to the path
    - `written`         a session was written for this turn
    - `repaired`        its session was made equal to the path again
    - `waited`          its process had waited for the turn's tool results
    - `shared`          it ran in a shared process for one-shot questions
    - `exit_code`       of the session's process, which had ended before the turn
    - `reloaded`        how the transcript changed while a process loaded it, each time
    - `output_refused`  the error in the last attempt's structured output
    - `retries`, `cuts` the provider failed, or its stream broke off
    - `compacted`       the CLI replaced earlier turns by a summary
    - `window_summary`  the summary that the model was shown of turns outside its window
    - `recalled`        earlier attempts at the same fix that the model was shown, from a git repository
    - `refusal`         the model refused
    - `settled`         the answer was found in the transcript after the proxy had died
    - `notes`           differences between the messages and what the model was shown
    - `other`           evidence of a newer or older version, unchanged
    - `unmet`           parameters of the request that had no effect
    - `cache_miss`      why the provider did not use all of its prompt cache, if the provider reports it
    - `approvals`       approval requests for tools of the CLI, of every attempt
    """

    brought: ExternalOrigin | None = None
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
    unmet: tuple[ParameterName, ...] = ()
    notes: tuple[Note, ...] = ()
    refusal: Refusal | None = None
    recalled: Recalled | None = None
    window_summary: str | None = None
    files_at: str | None = None
    cache_miss: CacheMiss | None = None
    shared: bool = False
    approvals: tuple[Approval, ...] = ()

    @property
    def header_notes(self) -> tuple[Note, ...]:
        """The notes for an answer's headers."""
        return self.notes if self.files_at is None else (*self.notes, Note("files_elsewhere"))

    @property
    def note(self) -> str:
        """The value of `X-Continuity-Note`: the notes, compaction and retries; "" for none."""
        asked_again = len(self.retries) + len(self.cuts)
        notes = self.header_notes
        parts = [notes_header(notes)] if notes else []
        parts += [] if self.compacted is None else ["cli_compacted=1"]
        parts += [f"cli_asked_again={asked_again}"] if asked_again else []
        return ", ".join(parts)

    def plus(self, other: Evidence) -> Evidence:
        """Merged with the other one, whose fields win."""
        values = _VALUES(other)
        if values == _DEFAULT_VALUES:
            return self
        if _VALUES(self) == _DEFAULT_VALUES:
            return other
        pairs = zip(_DEFAULTS.items(), values, strict=True)
        return replace(self, **{name: value for (name, default), value in pairs if value != default})


NOTHING = Evidence.from_json({})
_DEFAULTS: dict[str, Any] = {name: getattr(NOTHING, name) for name in Evidence.__slots__}
_VALUES = attrgetter(*_DEFAULTS)
_DEFAULT_VALUES = _VALUES(NOTHING)
