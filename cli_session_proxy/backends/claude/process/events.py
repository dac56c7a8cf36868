"""What a running CLI tells us, as data: `turn_reader` makes it of frames, `process` yields it. What the core is told
as it is comes from `base`.

Every turn of a process yields any number of events and ends with exactly one `Result`, or with `Called` where the
process waits for the client, or raises `ProcessDied`.
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

    The CLI sends one frame a block (2.1.x) or a message; `blocks` are what the model said in it, `uuid` is
    the transcript record's.
    """

    uuid: str | None
    model: str | None
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Truncated:
    """The model has said as many tokens as it may. The CLI would ask it to go on, up to four times: its words for that
    and what follows are not the client's. `usage` is what the turn has used until now."""

    usage: Usage


@dataclass(frozen=True, slots=True)
class CallRefused:
    """A call of a client's tool that does not come out; `why` goes to the model as its result."""

    call: str
    why: str


@dataclass(frozen=True, slots=True)
class Asks:
    """The CLI wants to run a tool and waits for `ClaudeProcess.permit`. `request_id` names the question, `call` the
    model's call, `agent` the sub-agent that makes it."""

    request_id: str
    tool: str
    input: JSON
    call: str | None
    agent: str | None


@dataclass(frozen=True, slots=True)
class Declined:
    """The provider stopped the answer with `stop_reason: refusal`. The last event that is read of the turn.

    CLI 2.1 would ask once more by itself, with a note to the model, and then call it an API error; 1.0 does so at once.
    `usage` is what the turn used.
    """

    category: str | None
    explanation: str | None
    usage: Usage


@dataclass(frozen=True, slots=True)
class Result:
    """The end of a turn, as the CLI reports it.

    `cost_total_usd` is the session's running total, restored at a resume; `usage` is this turn's (2.1.329).
    `text` is the CLI's own result text: an error's message, or the answer where no frame before it held one.
    `stop_sequence` is the one that the provider stopped at. `silent`: it reports success, and neither it nor any frame
    before it held words of an answer. `tagged`: it names the frame that it answers.
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

    `no_conversation` is True when the CLI said "No conversation found" (the fresh id it may offer then must
    not be adopted). `stderr` is the last few KB of what it printed there, `notices` the last lines of its stdout that
    were no frames. `cli` names it: version and binary. `used`: what the turn has used until then.
    `retry`: another process may succeed. False where this one was waited for in vain.
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
    """It has loaded, or may have loaded, something else than the transcript that was verified for it.

    `how` is one of `transcript.entries.How`, or `conversation`: what it wrote belongs to another one. Nothing that
    it says may be kept.
    """

    def __init__(self, how: str) -> None:
        super().__init__(f"it loaded a changed transcript ({how})")
        self.how = how
