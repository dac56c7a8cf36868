"""Events of a running CLI: `turn_reader` makes them from frames, `process` yields them. Events that the core gets
unchanged are in `base`.

Every turn of a process yields any number of events and ends with exactly one `Result`, or with `Called` if the process
waits for the client's results, or raises `ProcessDied`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ....domain.evidence import CacheMiss
from ....domain.models import JSON, Block, BlockDelta, BlockStart, BlockStop, Usage
from ...base import Abandoned, Activity, Called, Compacted, PermissionWithdrawn, PlanTold, Retried, ToolActivity


@dataclass(frozen=True, slots=True)
class SessionFrame:
    """A frame carried this session id. `cause` is `init`, `conversation_reset` or `result`."""

    session_id: str
    cause: str


@dataclass(frozen=True, slots=True)
class AssistantMessage:
    """One complete assistant frame of the turn (the main thread, not a sub-agent's).

    The CLI sends one frame per block (2.1.x) or per message. `blocks` are the model's; `uuid` is that of the record in
    the transcript.
    """

    uuid: str | None
    model: str | None
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Truncated:
    """The answer reached its token limit. The CLI would ask the model to go on, up to four times: that is not part of
    the answer."""

    usage: Usage  # of the turn so far


@dataclass(frozen=True, slots=True)
class CallRefused:
    """A call of a client's tool that the client does not get; the model gets `why` as its result."""

    call: str
    why: str


@dataclass(frozen=True, slots=True)
class PermissionRequest:
    """The CLI wants to run a tool and waits for `ClaudeProcess.permit`."""

    request_id: str  # of the control request
    tool: str
    input: JSON
    call: str | None  # the id of the model's tool call
    agent: str | None  # the sub-agent that calls, if any


@dataclass(frozen=True, slots=True)
class Declined:
    """The provider stopped the answer with `stop_reason: refusal`. Nothing after it is read in this turn: CLI 2.1 would
    ask again with a note to the model, and then report an API error; 1.0 reports the error at once."""

    category: str | None
    explanation: str | None
    usage: Usage  # of the turn


@dataclass(frozen=True, slots=True)
class Result:
    """The end of a turn, as the CLI reports it."""

    session_id: str
    is_error: bool
    subtype: str
    text: str  # an error message, or the answer if no earlier frame had it
    stop_reason: str | None
    terminal_reason: str | None
    api_error_status: int | None
    usage: Usage  # of this turn (2.1.329)
    cost_total_usd: float | None  # of the session, turns before a resume included
    detail: JSON = field(default_factory=dict)
    stop_sequence: str | None = None  # at which the provider stopped
    cache_miss: CacheMiss | None = None
    empty: bool = False  # it reports success, but there was no answer
    names_prompt: bool = False  # a frame of the turn named the prompt that it answers


CliEvent = (
    SessionFrame
    | AssistantMessage
    | Abandoned
    | ToolActivity
    | Called
    | Truncated
    | CallRefused
    | PermissionRequest
    | PermissionWithdrawn
    | Declined
    | Retried
    | Compacted
    | PlanTold
    | Activity
    | BlockStart
    | BlockDelta
    | BlockStop
    | Result
)


class ProcessDied(Exception):
    """The process ended, or its output could not be read, before the turn's result.

    - `stderr`: its last KB; `notices`: the last lines of stdout that were no frames; `cli`: version and binary.
    - `no_conversation`: the CLI printed "No conversation found" (a new session id that it offers must not be used).
    - `used`: usage of the turn so far.
    - `retry`: another process may succeed; False after a timeout.
    """

    def __init__(
        self,
        why: str,
        *,
        returncode: int | None = None,
        stderr: str = "",
        notices: str = "",
        cli: str = "the Claude CLI",
        no_conversation: bool = False,
        used: Usage | None = None,
        retry: bool = True,
    ) -> None:
        super().__init__(why)
        self.why = why
        self.returncode = returncode
        self.stderr = stderr
        self.notices = notices
        self.cli = cli
        self.no_conversation = no_conversation
        self.used = used
        self.retry = retry


class WrongTranscript(ProcessDied):
    """It has loaded, or may have loaded, another transcript than the verified one. Its output must be dropped.

    `how`: one of `transcript.entries.How`, or `conversation`: its records continue another conversation.
    """

    def __init__(self, how: str) -> None:
        super().__init__(f"it loaded a changed transcript ({how})")
        self.how = how
