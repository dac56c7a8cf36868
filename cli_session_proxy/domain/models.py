"""The words of the design as data: what a request, a turn, a session and a link are.

Content is kept in the blocks of Anthropic's Messages API (`text`, `image`, `thinking`, `tool_use`,
`tool_result`), because that is what the CLI takes and gives; every wire is translated at its own border.
Times are UTC seconds since the epoch (float). Ids of turns are `turn_…`, ids of sessions the CLI's UUIDs.
"""

from __future__ import annotations

import operator
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from .evidence import NOTHING, Evidence
from .forms import Recorded, Sparse
from .notes import Note
from .parameters import Name, Parameters
from .windows import Window

Block = dict[str, Any]
JSON = dict[str, Any]

Role = Literal["user", "assistant"]
Status = Literal["queued", "running", "completed", "requires_action", "refused", "failed", "cancelled"]
Continuity = Literal["started", "warm", "resumed", "rebuilt", "branched"]
LinkReason = Literal["started", "forked_by_cli", "rebuilt", "branched", "moved", "adopted"]
# Links that stand for a repair: the session had to be made equal to the path again.
REPAIR_REASONS: frozenset[LinkReason] = frozenset({"rebuilt", "moved"})
# Who ended a turn from outside: its client; somebody who watched it (`operator`); that every client has `left`; the
# deletion of its agent; the proxy that was `stopping`; or another proxy, which was granted the agent.
CancelledBy = Literal["client", "operator", "left", "deletion", "stopping", "takeover"]
# By which rule of `lineage` a turn continues what it continues; `adopted`: somebody else said it in the session.
Rule = Literal["id", "fresh", "head", "new", "history", "unknown", "adopted"]
# Did the answer reach its client? `pending` until the acknowledgement; `uncertain` after a crash in between.
Delivery = Literal["pending", "delivered", "undelivered", "uncertain"]

# Blocks of thinking: signed by the provider for one conversation, and never matched in a history.
THINKING = frozenset({"thinking", "redacted_thinking"})

# What the name of an unnamed agent begins with that is deleted once its answer was delivered (`X-Chain: none`).
ONCE = "once"
ON_PATH: frozenset[Status] = frozenset({"completed", "requires_action"})
# With an answer for the client. A refused turn has one too, but no turn continues it: its children are its parent's.
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
    """A tool of the client's. `schema` is the JSON Schema of its arguments, an object.

    `strict`: only calls whose arguments validate come out.
    """

    name: str
    description: str = ""
    schema: JSON = field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolChoice(Recorded):
    """Which of its tools the client lets the model call: none, as it likes, or at least one.

    `allowed` are the only ones that may be called, None for all; `parallel` allows several in one message.
    """

    mode: Literal["auto", "none", "required"] = "auto"
    allowed: tuple[str, ...] | None = None
    parallel: bool = True


@dataclass(frozen=True, slots=True)
class TurnOptions(Sparse):
    """What a request asks of its turn beside its words: known whenever the turn is run, again too.

    `format`: {"schema": JSON Schema, or None for any object}, see `structured`. `tools`: the client's own, checked by
    `client_tools.checked`; they hold for the results to their calls as well, where those bring none. `stop`: the answer
    ends before the first of these texts. `metadata`: what the client noted of its request, for people. `window`: how
    much of the path the model is shown.
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
    """A model could not answer, and another one does until then.

    It is kept with each turn from the one that met the limit on, so the path alone tells every proxy, and every start,
    who is asked next. `asked` is the model that could not, `why` its error's code, `until` (UTC) when it is asked
    again. `model` is who answers instead; `here`: it answered this turn. A turn that another model was asked for by
    name only passes the rest on.
    """

    asked: str
    model: str
    why: str
    until: float
    here: bool = True


@dataclass(frozen=True, slots=True)
class LimitWait(Recorded):
    """A turn is sent when a limit of the provider's is over. It is `queued` until then, whatever happens to its proxy
    and its clients; the turns behind it in its lane wait as well.

    `since` and `until` are UTC seconds, `why` the provider's words, `asked` how often it has refused by now.
    """

    until: float
    since: float
    why: str
    asked: int = 1


@dataclass(frozen=True, slots=True)
class Placed(Sparse):
    """Where a turn belongs, decided once from its request.

    Of the `messages` that were sent, `matched` are on the path already and `imported` were new before the turn's own.
    `diverged_at`: the conversation left the agent's path behind this many messages. `delta`: only what is new was
    sent, so that the system prompt and the tools of the turn that it continues hold on. `side`: it is suspected to be a
    side call (`side_calls`). All but the rule are None for a turn that no request placed.
    """

    rule: Rule | None = None
    messages: int | None = None
    matched: int | None = None
    imported: int | None = None
    diverged_at: int | None = None
    delta: bool = False
    side: bool = False

    @property
    def at_head(self) -> bool:
        """It continues the agent's head as it is when it runs."""
        return self.rule == "head"

    def parts(self, messages: tuple[Message, ...]) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
        """Of these, the exchanges that the chain did not know, to be stored as turns before this one, and its own."""
        start = self.matched or 0
        at = start + (self.imported or 0)
        return messages[start:at], messages[at:]


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """One request, whatever wire it came by.

    `messages` is all the client sent, history included, without system messages; which part of it is new is
    decided by `continuity`. `fingerprint` is equal for equal requests (same owner, agent, wire and body): it
    recognises a retry. `continues` names a turn (an id of a stateful wire), and wins over history.
    """

    model: str
    messages: tuple[Message, ...]
    fingerprint: str
    owner: str = "local"
    agent_id: str | None = None
    system: str | None = None
    effort: str | None = None
    profile: str | None = None
    fresh: bool = False
    continues: str | None = None
    idempotency_key: str | None = None
    is_retry: bool = False
    wire: str = "chat"
    request_id: str | None = None
    timeout: float | None = None
    options: TurnOptions = PLAIN
    keep_system: bool = True  # a delta without a system prompt keeps the one of the turn that it continues
    call: JSON | None = None  # what a stateful wire keeps with the turn, to answer for it later
    compose: Compose | None = None  # decides what the turn says when it runs
    composed: TurnRequest | None = None  # what it said at acceptance, where that was whole
    # Of a composed one: which item of its conversation each message is (None: it has no id of its own); and the
    # hand-written items, of the messages and of `system`.
    items: tuple[str | None, ...] = ()
    takes: tuple[str, ...] = ()
    kept: bool = True  # False: its chain is deleted once the answer was delivered
    client: str | None = None  # of an unnamed request that stores nothing: kept only where this one may go on from it

    @property
    def goes_on(self) -> bool:
        """It names or contains what it continues."""
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
        """Of the prompt, what was read from the cache; None without a prompt."""
        return round(self.cache_read_tokens / self.prompt_tokens, 4) if self.prompt_tokens else None

    def plus(self, other: Usage) -> Usage:
        return Usage(*map(operator.add, _COUNTS(self), _COUNTS(other)))

    def minus(self, other: Usage) -> Usage:
        """Each count is 0 at least."""
        return Usage(*(max(0, mine - theirs) for mine, theirs in zip(_COUNTS(self), _COUNTS(other), strict=True)))


_COUNTS = operator.attrgetter(*Usage.__slots__)


@dataclass(frozen=True, slots=True)
class Agent:
    """The owner of a conversation. `key` is the store's own id; (`owner`, `agent_id`) is unique.

    `named` is False where the history named it: only such agents are found by history from outside.
    `dir` is the name of its directory under the sandbox prefix.
    """

    key: int
    owner: str
    agent_id: str
    dir: str
    named: bool
    head: str | None
    created_at: float

    def moves_head_to(self, turn: Turn) -> bool:
        """Whether the turn becomes the head once it is answered. A side call does not in an unnamed agent, whose
        clients send the history that they continue."""
        return not turn.placed.side or self.named or self.head is None


@dataclass(frozen=True, slots=True)
class Turn(Recorded):
    """One request and its answer. `seq` is the order of acceptance in the whole store.

    `model` is what was asked for; `backend` and `answered_by` are who answered, the model as the backend names it.
    `stop_sequence`: the text that the answer was cut at.
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
    usage: Usage = field(default_factory=Usage)
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
    def behind(self) -> str | None:
        """The turn that the path ends with where this one is left off it: its parent, unless it told what the path held
        anew (`Compose`)."""
        return (self.call or {}).get("behind", self.parent_id)

    @property
    def told_model(self) -> str:
        """What an answer calls its model: the one that was asked for, or who answered in its place."""
        return self.fallback.model if self.fallback is not None and self.fallback.here else self.model


# Decides, when a turn runs, what it says and which turn it continues (None: it is a new root). Exchanges among the
# messages become turns in between. Asked under the agent's lease, with the turn whose answer the next one would
# continue.
Compose = Callable[[Turn | None], Awaitable[TurnRequest]]


@dataclass(frozen=True, slots=True)
class FileMark(Recorded):
    """What a transcript file looked like when it was last known to equal the path up to the tip.

    `size` in bytes; `sha256` of exactly those bytes, as we know them, whatever the file holds since; `leaf` is the
    uuid of the last record on the path. `ctime_ns` is 0 in marks of 0.1: nothing is taken as unchanged by those.
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
    """One line of a transcript, verbatim (no newline). Lines without a uuid are the CLI's own notes.

    `synthetic` is set where the line was made from frames or from a client's history, not by the CLI.
    """

    line: str
    uuid: str | None = None
    synthetic: bool = False


@dataclass(frozen=True, slots=True)
class Conversation(Recorded):
    """What OpenAI's Conversations keep beside the chain: the client's notes, and the ids of items it took out."""

    metadata: JSON
    removed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Item(Recorded):
    """An item that a client wrote into a conversation by hand. `turn_id` is the latest turn that began with it."""

    id: str
    data: JSON
    turn_id: str | None = None


@dataclass(frozen=True, slots=True)
class Chain:
    """An agent with everything it owns but its turns, which are streamed apart."""

    agent: Agent
    sessions: tuple[Session, ...]
    links: tuple[Link, ...]


@dataclass(frozen=True, slots=True)
class ChainSummary:
    """One row of `chains`. `bytes` is the size of what the store keeps for it. `side`: there is nothing in it but what
    is suspected to be side calls. `state`: of the newest turn, or `running` while one before it runs. `failures`: turns
    that failed or were refused, whatever came after them. `host`: the name of the one whose proxy holds the agent now,
    `address` where other proxies reach that one."""

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


# --- what a running turn tells its client ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Started:
    """The session is ready and the frame is sent: everything for the answer's headers is known.

    `unmet` are parameters of the request that the turn runs without. `backend` and `model`: who answers; None in the
    replay of a turn of which nobody knows it.
    """

    agent_id: str
    turn_id: str
    session_id: str
    continuity: Continuity
    unmet: tuple[Name, ...] = ()
    notes: tuple[Note, ...] = ()
    backend: str | None = None
    model: str | None = None


@dataclass(frozen=True, slots=True)
class Waits:
    """The turn waits for a limit of the provider's to be over. It may have gone on by now (`Answer.wait`)."""

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
