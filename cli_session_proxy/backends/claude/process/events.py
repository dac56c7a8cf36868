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
    the answer. `usage`: of the turn so far."""

    usage: Usage


@dataclass(frozen=True, slots=True)
class CallRefused:
    """A call of a client's tool that the client does not get; the model gets `why` as its result."""

    call: str
    why: str


@dataclass(frozen=True, slots=True)
class Asks:
    """The CLI wants to run a tool and waits for `ClaudeProcess.permit`. `request_id`: of the question; `call`: of the
    model; `agent`: the sub-agent, if any."""

    request_id: str
    tool: str
    input: JSON
    call: str | None
    agent: str | None


@dataclass(frozen=True, slots=True)
class Declined:
    """The provider stopped the answer with `stop_reason: refusal`. The last event that is read of the turn.

    CLI 2.1 would ask again with a note to the model, and then report an API error; 1.0 reports it at once. `usage`: of
    the turn.
    """

    category: str | None
    explanation: str | None
    usage: Usage


@dataclass(frozen=True, slots=True)
class Result:
    """The end of a turn, as the CLI reports it.

    `cost_total_usd` is the session's running total, restored at a resume; `usage` is this turn's (2.1.329).
    `text`: the CLI's result text: an error message, or the answer if no earlier frame had it. `stop_sequence`: where
    the provider stopped. `silent`: it reports success, but there was no answer. `tagged`: it names the frame that it
    answers.
    """

    session_id: str
    is_error: bool
    subtype: str
    text: str
    stop_reason: str | None
    terminal_reason: str | None
    api_error_status: int | None
    usage: Usage
    cost_total_usd: float | None
    num_turns: int
    detail: JSON = field(default_factory=dict)
    stop_sequence: str | None = None
    cache_miss: CacheMiss | None = None
    silent: bool = False
    tagged: bool = False


CliEvent = (
    SessionFrame
    | AssistantMessage
    | Abandoned
    | ToolActivity
    | Called
    | Truncated
    | CallRefused
    | Asks
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

    `no_conversation`: the CLI printed "No conversation found" (a new session id that it offers must not be used).
    `stderr`: its last KB; `notices`: the last lines of stdout that were no frames. `cli`: version and binary. `used`:
    usage of the turn so far. `retry`: another process may succeed; False after a timeout.
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
