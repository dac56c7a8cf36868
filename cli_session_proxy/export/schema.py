"""The JSON dump's shape: `schema: "cli-session-proxy/chain/1"`. Programs rely on it; fields are only ever added."""

from __future__ import annotations

from typing_extensions import TypedDict  # pydantic, which checks dumps in the tests, needs this one before Python 3.12

from ..domain.models import JSON, Block, Continuity, Delivery, LinkReason, Role, Status

SCHEMA = "cli-session-proxy/chain/1"


class MessageDump(TypedDict):
    role: Role
    content: list[Block]


class UsageDump(TypedDict):
    input_tokens: int
    output_tokens: int
    cache_read_tokens: int
    cache_write_tokens: int
    cache_share: float | None  # the cached share of the prompt
    thinking_tokens: int


class ContentDump(TypedDict):
    """The messages of `TurnDump`."""

    input: list[MessageDump]
    output: list[Block]
    error: JSON | None
    tools: list[JSON]
    says: list[str]


class MeasuredDump(ContentDump):
    """With tokens, cost, times and reason."""

    usage: UsageDump
    cost_usd: float | None
    timings: JSON
    reason: JSON


class TurnDump(TypedDict):
    """Times are UTC seconds since the epoch, timings milliseconds since acceptance, costs US dollars.

    An image is its hash, type and size.
    """

    id: str
    parent_id: str | None
    status: Status
    model: str
    session_id: str | None
    continuity: Continuity | None
    input: list[MessageDump]
    output: list[Block]
    usage: UsageDump
    cost_usd: float | None
    error: JSON | None
    created_at: float
    started_at: float | None
    finished_at: float | None
    attempts: list[JSON]
    # added after the contract's first fields
    system: str | None
    effort: str | None
    profile: str | None
    stop_reason: str | None
    # why it continues its parent: the rule, messages sent, matched and imported, where the path was left
    continuity_reason: JSON
    reason: JSON
    timings: JSON
    tools: list[JSON]
    delivery: Delivery
    origin: str
    # the backend and model that answered; for a fallback {asked, model, why, until, here}
    backend: str | None
    answered_by: str | None
    fallback: JSON | None
    # the client's metadata
    metadata: JSON
    # what happened to it, without its links, in sentences; empty for an ordinary turn
    says: list[str]


class NumberedDump(TurnDump):
    number: int  # in the order of acceptance, from 1: as on the page, in `show` and in every other format


class SessionDump(TypedDict):
    id: str
    tip_turn_id: str | None
    transcript: str
    cli_version: str
    created_at: float


class LinkDump(TypedDict):
    from_session: str | None
    to_session: str
    turn_id: str | None
    reason: LinkReason
    detail: JSON
    at: float
    # what broke and how it was repaired, in a sentence
    says: str


class ChainDump(TypedDict):
    schema: str
    agent_id: str
    sandbox: str
    head: str | None
    created_at: float
    turns: list[NumberedDump]
    sessions: list[SessionDump]
    links: list[LinkDump]
