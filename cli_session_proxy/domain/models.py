"""The terms of the glossary as data: requests, turns, sessions, links.

Content is kept in the blocks of Anthropic's Messages API (`text`, `image`, `thinking`, `tool_use`,
`tool_result`), because the CLI uses them; each wire translates its own format.
Times are UTC seconds since the epoch (float). Ids of turns are `turn_…`, ids of sessions the CLI's UUIDs.
"""

from __future__ import annotations

import operator
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from .evidence import NOTHING, Evidence, Note
from .forms import Recorded, Sparse, replace
from .options import ParameterName, Parameters, Window

Block = dict[str, Any]
JSON = dict[str, Any]

Role = Literal["user", "assistant"]
Status = Literal["queued", "running", "completed", "requires_action", "refused", "failed", "cancelled"]
Continuity = Literal["started", "warm", "resumed", "rebuilt", "branched"]
LinkReason = Literal["started", "forked_by_cli", "rebuilt", "branched", "moved", "adopted"]
# Reasons of links that are repairs: the session had to be made equal to the path again.
REPAIR_REASONS: frozenset[LinkReason] = frozenset({"rebuilt", "moved"})
# Reasons that lists and dumps of a chain mark: repairs and adopted turns.
MARKED_REASONS: frozenset[LinkReason] = REPAIR_REASONS | {"adopted"}
# What cancelled a turn: its client; a person who watched it (`operator`); all its clients had `left`; its agent's
# deletion; its proxy was `stopping`; another proxy got the agent's lease (`takeover`).
CancelledBy = Literal["client", "operator", "left", "deletion", "stopping", "takeover"]
# The rule of `lineage` that chose the turn's parent; `adopted`: a person added the turn to the session.
Rule = Literal["id", "fresh", "head", "new", "history", "unknown", "adopted"]
# Whether the answer reached its client: `pending` until it is acknowledged; `uncertain` after a crash before that.
Delivery = Literal["pending", "delivered", "undelivered", "uncertain"]

# Blocks of thinking: signed by the provider for one conversation, and never matched in a history.
THINKING = frozenset({"thinking", "redacted_thinking"})

# Prefix of the names of unnamed agents that are deleted once their answer was delivered (`X-Chain: none`).
ONCE = "once"
ON_PATH: frozenset[Status] = frozenset({"completed", "requires_action"})
# With an answer for the client. No turn continues a refused one: the next turn continues its parent.
ANSWERED: frozenset[Status] = ON_PATH | {"refused"}
FINISHED: frozenset[Status] = ANSWERED | {"failed", "cancelled"}


@dataclass(frozen=True, slots=True)
class Message(Recorded):
    """One message of a conversation, in the Messages API's roles and blocks."""

    role: Role
    content: tuple[Block, ...]

    @staticmethod
    def user(text: str) -> Message:
        return Message("user", ({"type": "text", "text": text},))

    @staticmethod
    def assistant(text: str) -> Message:
        return Message("assistant", ({"type": "text", "text": text},))


@dataclass(frozen=True, slots=True)
class Tool(Recorded):
    """A client's tool. `schema`: the JSON Schema of its arguments, an object.

    `strict`: only calls with valid arguments reach the client.
    """

    name: str
    description: str = ""
    schema: JSON = field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolChoice(Recorded):
    """Whether the model may call the client's tools (`auto`), may not (`none`) or must (`required`).

    `allowed`: the tools that may be called; None: all. `parallel`: one message may have several calls.
    """

    mode: Literal["auto", "none", "required"] = "auto"
    allowed: tuple[str, ...] | None = None
    parallel: bool = True


@dataclass(frozen=True, slots=True)
class TurnOptions(Sparse):
    """A request's options. They are stored with the turn, for all its attempts.

    `format`: {"schema": JSON Schema, or None for any object}, see `structured`. `tools`: the client's own, checked by
    `client_tools.checked`. A request that brings results of calls but no tools has the tools of the turn that made the
    calls. `stop`: the answer ends before the first of these texts. `metadata`: the client's notes, for people.
    `window`: how much of the path the model is shown.
    """

    format: JSON | None = None
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    stop: tuple[str, ...] = ()
    parameters: Parameters = field(default_factory=Parameters)
    metadata: JSON = field(default_factory=dict)
    window: Window | None = None


PLAIN = TurnOptions.from_json({})


@dataclass(frozen=True, slots=True)
class Fallback(Recorded):
    """A model could not answer, and until a given time another one answers.

    It is stored with each turn from the failed one on, so any proxy, even a restarted one, knows which model is next.
    `asked`: the model that failed. `why`: the code of its error. `until` (UTC): when that model is tried
    again. `model`: the model that answers instead. `here`: whether `model` answered this very turn. False: its request
    named yet another model, and the fallback is only kept for the turns after it.
    """

    asked: str
    model: str
    why: str
    until: float
    here: bool = True


@dataclass(frozen=True, slots=True)
class LimitWait(Recorded):
    """A turn waits until a limit of the provider is over. It is `queued` until then, even if its proxy ends or its
    clients leave; later turns of its lane wait, too.

    `since`, `until`: UTC seconds. `why`: the provider's message. `asked`: how often the provider has refused so far.
    """

    until: float
    since: float
    why: str
    asked: int = 1


@dataclass(frozen=True, slots=True)
class Placed(Sparse):
    """Where a turn belongs in the chain, decided once from its request. Without a request, only the rule is set."""

    rule: Rule | None = None
    messages: int | None = None  # how many the client sent
    matched: int | None = None  # how many of these are on the path already
    imported: int | None = None  # the next ones: exchanges that the chain does not have, before the turn's own messages
    diverged_at: int | None = None  # after this many messages the history differs from the agent's path
    delta: bool = False  # only new messages were sent: the continued turn's system prompt and tools still apply
    side: bool = False  # suspected to be a side call (see `lineage`)

    @property
    def at_head(self) -> bool:
        """Whether the turn continues the agent's head, whichever turn that is when this one runs."""
        return self.rule == "head"

    def parts(self, messages: tuple[Message, ...]) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
        """The imported exchanges, to be stored as turns before this one, and the turn's own messages."""
        start = self.matched or 0
        at = start + (self.imported or 0)
        return messages[start:at], messages[at:]


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """One request, of any wire.

    `messages` has no system messages, but the history that the client sent: `lineage` finds out which are new.
    """

    model: str
    messages: tuple[Message, ...]
    fingerprint: str  # equal for requests with the same owner, agent, wire and body: by it a retry is recognised
    owner: str = "local"
    agent_id: str | None = None
    system: str | None = None
    effort: str | None = None
    profile: str | None = None
    fresh: bool = False
    continues: str | None = None  # the id of the turn to continue, on wires with ids: the history is not compared
    idempotency_key: str | None = None
    is_retry: bool = False
    wire: str = "chat"
    request_id: str | None = None
    timeout: float | None = None
    options: TurnOptions = PLAIN
    keep_system: bool = True  # a delta without a system prompt keeps the one of the turn that it continues
    call: JSON | None = None  # a stateful wire's data of the turn, to show it later
    compose: Compose | None = None  # composes the prompt when the turn runs
    composed: TurnRequest | None = None  # the prompt at acceptance, if it was complete then
    items: tuple[str | None, ...] = ()  # if composed: for each message the id of its item, if it has one
    own_items: tuple[str, ...] = ()  # if composed: ids of the items in it that the client wrote by hand
    kept: bool = True  # False: its chain is deleted once the answer was delivered
    client: str | None = None  # who sent an unnamed one-shot: it is deleted if this client turns out to continue none

    @property
    def goes_on(self) -> bool:
        """Whether the request continues something: it names the turn that it continues, or contains a history."""
        return self.continues is not None or any(message.role == "assistant" for message in self.messages)


@dataclass(frozen=True, slots=True)
class Usage(Recorded):
    """Tokens of one turn. `input_tokens` excludes what was read from or written to the cache."""

    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0
    thinking_tokens: int = 0

    @property
    def prompt_tokens(self) -> int:
        """Everything the model read: new, cache read and cache write."""
        return self.input_tokens + self.cache_read_tokens + self.cache_write_tokens

    @property
    def cache_share(self) -> float | None:
        """The share of the prompt that was read from the cache; None without a prompt."""
        return round(self.cache_read_tokens / self.prompt_tokens, 4) if self.prompt_tokens else None

    def plus(self, other: Usage) -> Usage:
        return other if self is NO_USAGE else Usage(*map(operator.add, _COUNTS(self), _COUNTS(other)))

    def minus(self, other: Usage) -> Usage:
        """Each count is at least 0."""
        return (
            self
            if other is NO_USAGE
            else Usage(*(max(0, mine - theirs) for mine, theirs in zip(_COUNTS(self), _COUNTS(other), strict=True)))
        )


NO_USAGE = Usage()
_COUNTS = operator.attrgetter(*Usage.__slots__)


@dataclass(frozen=True, slots=True)
class Agent:
    """The identity that a conversation belongs to. `key` is the store's own id; (`owner`, `agent_id`) is unique.

    `named` is False if its name was derived from a history: only such agents are found by a request's history.
    `dir` is the name of its directory under the sandbox prefix. `head`: the id of the turn that the next one continues;
    None: the next one is a new root. `created_at`: UTC seconds.
    """

    key: int
    owner: str
    agent_id: str
    dir: str
    named: bool
    head: str | None
    created_at: float

    @property
    def named_in_logs(self) -> dict[str, str]:
        """The fields that name it in a line of the log. Without the owner, the deletion of another's agent of the same
        name would remove the line."""
        return {"owner": self.owner, "agent": self.agent_id}

    def moves_head_to(self, turn: Turn) -> bool:
        """Whether the turn becomes the head once it is answered. A side call to an unnamed agent does not: the agent's
        clients send the history that they continue, so they do not need the head. Its first turn always does."""
        return not turn.placed.side or self.named or self.head is None


@dataclass(frozen=True, slots=True)
class Turn(Recorded):
    """One request and its answer. `seq` is the order of acceptance in the whole store.

    `model` is the requested one; `answered_by` is the one that answered, as `backend` names it.
    `stop_sequence`: the text at which the answer was cut. `origin`: the wire that its request came by, "imported"
    or "adopted". `instance`: the id of the proxy that runs it, or delivers its answer. `call`: what its wire keeps of
    the request. `path_hash`: see `lineage`.
    """

    id: str
    seq: int
    agent_key: int
    parent_id: str | None
    status: Status
    model: str
    input: tuple[Message, ...]
    created_at: float
    system: str | None = None
    effort: str | None = None
    profile: str | None = None
    output: tuple[Block, ...] = ()
    stop_reason: str | None = None
    stop_sequence: str | None = None
    session_id: str | None = None
    continuity: Continuity | None = None
    placed: Placed = field(default_factory=Placed)
    options: TurnOptions = PLAIN
    evidence: Evidence = NOTHING
    usage: Usage = NO_USAGE
    cost_usd: float | None = None
    error: JSON | None = None
    attempts: tuple[JSON, ...] = ()
    timings: JSON = field(default_factory=dict)
    tools: tuple[JSON, ...] = ()
    delivery: Delivery = "pending"
    origin: str = "chat"
    fingerprint: str = ""
    frame_uuid: str | None = None
    path_hash: str | None = None
    depth: int = 0
    instance: str | None = None
    started_at: float | None = None
    finished_at: float | None = None
    call: JSON | None = None
    backend: str | None = None
    answered_by: str | None = None
    fallback: Fallback | None = None
    limit_wait: LimitWait | None = None

    @property
    def shown_input(self) -> tuple[Message, ...]:
        """The input as the model is shown it: with earlier attempts (git memory) in front of the client's own text."""
        recalled = self.evidence.recalled
        if recalled is None or not recalled.text:
            return self.input
        attempts, messages = recalled.block, list(self.input)
        for index, message in enumerate(messages):
            # The API wants results of calls before anything else, so the attempts follow them.
            results = sum(block.get("type") == "tool_result" for block in message.content)
            if results < len(message.content):  # the first message with more than results
                content = (*message.content[:results], attempts, *message.content[results:])
                messages[index] = replace(message, content=content)
                break
        return tuple(messages)

    @property
    def in_background(self) -> bool:
        """Whether it runs to its end without a client. The client asks for its answer by its id."""
        return bool((self.call or {}).get("background"))

    @property
    def end_without_it(self) -> str | None:
        """The id of the turn at which the path ends if this turn is left off. That is its parent, unless the turn was
        composed (`Compose`) for another parent than the path's end: then it is that end."""
        return (self.call or {}).get("behind", self.parent_id)

    @property
    def reported_model(self) -> str:
        """The model's name in answers: the requested one, or the one that answered in its place."""
        return self.fallback.model if self.fallback is not None and self.fallback.here else self.model


# Composes a turn's prompt when it runs, and decides which turn it continues (None: it is a new root). Exchanges among
# the messages become turns in between. Called under the agent's lease, with the turn that would be continued.
Compose = Callable[[Turn | None], Awaitable[TurnRequest]]


@dataclass(frozen=True, slots=True)
class FileMark(Recorded):
    """The state of a transcript file when it was last known to equal the path to its session's tip.

    `size`: in bytes. `sha256`: of exactly those bytes as we know them, even if the file changed since. `leaf`: the uuid
    of the last record on the path. `ctime_ns`: 0 in marks of 0.1, which therefore never show that a file is unchanged.
    """

    device: int
    inode: int
    size: int
    mtime_ns: int
    sha256: str
    leaf: str | None
    ctime_ns: int = 0


@dataclass(frozen=True, slots=True)
class Session(Recorded):
    """One id that the CLI handed out: a cache of the path that ends at `tip_turn_id`.

    `transcript` is "" until there is a file: an adopted or imported session gets its own at the next turn.
    `mark` is None when the transcript is not known to equal the path (`dirty`): it is verified before use.
    """

    id: str
    agent_key: int
    tip_turn_id: str | None
    transcript: str
    cli_version: str
    created_at: float
    mark: FileMark | None = None


@dataclass(frozen=True, slots=True)
class Link(Recorded):
    """Why `to_session` follows `from_session` (None for the first one), at which turn, with the evidence."""

    from_session: str | None
    to_session: str
    turn_id: str | None
    reason: LinkReason
    detail: JSON
    at: float


@dataclass(frozen=True, slots=True)
class Record:
    """One line of a transcript, verbatim (no newline). Lines without a uuid are internal to the CLI.

    `synthetic`: the line was made from frames or from a client's history, not by the CLI.
    """

    line: str
    uuid: str | None = None
    synthetic: bool = False


@dataclass(frozen=True, slots=True)
class Conversation(Recorded):
    """Data of OpenAI's Conversations that the chain lacks: the client's metadata, and the ids of removed items."""

    metadata: JSON
    removed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Item(Recorded):
    """An item that a client added to a conversation itself. `turn_id`: the latest turn whose prompt began with it."""

    id: str
    data: JSON
    turn_id: str | None = None


@dataclass(frozen=True, slots=True)
class Chain:
    """An agent with its sessions and links. Its turns are streamed separately."""

    agent: Agent
    sessions: tuple[Session, ...]
    links: tuple[Link, ...]


@dataclass(frozen=True, slots=True)
class ChainSummary:
    """One row of `chains`. `bytes`: its size in the store. `side`: all its turns are suspected side calls. `state`: the
    newest turn's, or `running` while an earlier one runs. `failures`: turns that failed or were refused, whatever came
    after them. `host`: the name of the host whose proxy holds the agent now; `address`: where other proxies reach it.
    """

    agent: Agent
    turns: int
    sessions: int
    repairs: int
    state: Status | None
    cost_usd: float
    bytes: int
    last_at: float
    side: bool = False
    failures: int = 0
    host: str | None = None
    address: str | None = None


# --- events of a running turn, for its clients ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Started:
    """The session is ready and the frame is sent: everything for the answer's headers is known.

    `unmet`: parameters of the request that have no effect. `backend` and `model`: those that answer; None in the replay
    of a turn without this information.
    """

    agent_id: str
    turn_id: str
    session_id: str
    continuity: Continuity
    unmet: tuple[ParameterName, ...] = ()
    notes: tuple[Note, ...] = ()
    backend: str | None = None
    model: str | None = None


@dataclass(frozen=True, slots=True)
class Waits:
    """The turn waits until a limit of the provider is over. The wait may have ended since (`Answer.wait`)."""

    wait: LimitWait


@dataclass(frozen=True, slots=True)
class BlockStart:
    """A block of the answer begins. `index` counts the blocks of the whole turn."""

    index: int
    block: Block


@dataclass(frozen=True, slots=True)
class BlockDelta:
    """A piece of a block: `text_delta`, `thinking_delta`, `signature_delta` or `input_json_delta`."""

    index: int
    delta: Block


@dataclass(frozen=True, slots=True)
class BlockStop:
    index: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The turn is committed. Sent once, last: it is the acknowledgement."""

    turn: Turn


TurnEvent = Started | Waits | BlockStart | BlockDelta | BlockStop | Finished
