"""What the lines of an export may hold, as far as a path, a page, a sum or a sentence is made of it.

A file may be anybody's. Ids have our forms, statuses and reasons are those that we know, numbers fit the store, and
the evidence of a repair has the types that `explain` reads. What was said stays as it is: it is only ever text.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, ValidationError

from ..domain.limits import MODEL, TURN_ID, UUID, VERSION
from ..domain.models import JSON, Continuity, Delivery, LinkReason
from ..domain.windows import Window
from ..errors import InvalidRequest
from ..sandbox import AGENT_ID_LIMIT

# SQLite's and PostgreSQL's whole numbers have 64 bits.
MOST = 2**63 - 1

SessionId = Annotated[str, StringConstraints(pattern=f"^{UUID}$")]
TurnId = Annotated[str, StringConstraints(pattern=f"^{TURN_ID}$")]
Model = Annotated[str, StringConstraints(pattern=rf"^{MODEL}$")]
Version = Annotated[str, StringConstraints(pattern=f"^{VERSION}$")]
# What we name ourselves: efforts, wires, reasons to stop.
Word = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
ItemId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Time = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
Cost = Annotated[float, Field(ge=-1e9, le=1e9, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=MOST)]


class _Shape(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class _Open(BaseModel):
    """Data with more fields than these, which are only shown as they are."""

    model_config = ConfigDict(strict=True, extra="allow")


def _block(value: Any) -> Any:
    if isinstance(value, dict) and value.get("type") == "text" and not isinstance(value.get("text"), str):
        raise ValueError("a text block holds no text")
    return value


Block = Annotated[JSON, BeforeValidator(_block)]


class MessageShape(_Shape):
    role: Literal["user", "assistant"]
    content: list[Block]


class UsageShape(_Shape):
    input_tokens: Count = 0
    output_tokens: Count = 0
    cache_read_tokens: Count = 0
    cache_write_tokens: Count = 0
    thinking_tokens: Count = 0


class RepairShape(_Open):
    """Of a link, or of a repair that a turn tells itself (`explain`); `why` and `done` in 0.1."""

    code: str | None = None
    note: str | None = None
    why: str | None = None
    done: str | None = None
    found: str | None = None
    behind: str | None = None
    kept: str | None = None
    also_at: list[str] | None = None
    from_turn: str | None = None
    found_at: str | None = None
    looked_for: str | None = None
    cli: str | None = None
    source: str | None = None
    records: Count | None = None
    files: Count | None = None
    notes: list[str] | None = None
    turns: Count | list[str] | None = None


class PlacedShape(_Shape):
    rule: str | None = None
    messages: Count | None = None
    matched: Count | None = None
    imported: Count | None = None
    diverged_at: Count | None = None
    delta: bool = False
    side: bool = False


class ToolShape(_Shape):
    name: str
    description: str = ""
    parameters: JSON = Field(alias="schema")
    strict: bool = False


class ToolChoiceShape(_Shape):
    mode: Literal["auto", "none", "required"] = "auto"
    allowed: list[str] | None = None
    parallel: bool = True


class WantsShape(_Shape):
    tools: list[ToolShape] = []
    tool_choice: ToolChoiceShape | None = None
    stop: list[str] = []


class OptionsShape(WantsShape):
    format: JSON | None = None
    metadata: dict[str, str | int | float | bool] = {}
    window: Annotated[str, AfterValidator(lambda text: str(Window.parse(text)))] | None = None


class FallbackShape(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    asked: Model
    model: Model
    why: Word
    until: Time
    here: bool


class CutShape(_Shape):
    text: Count
    thinking: Count


class BroughtShape(_Shape):
    by: Literal["client", "adoption"]
    session: str | None = None
    note: str | None = None


class RefusalShape(_Shape):
    category: str | None = None
    explanation: str | None = None
    behind: Count = 0


class RecalledShape(_Shape):
    fix_id: str
    commits: list[str]


class CacheMissShape(_Shape):
    reason: Word
    tokens: Count | None = None


class EvidenceShape(_Open):
    brought: BroughtShape | None = None
    left_off: str | None = None
    sandbox: str | None = None
    verified: str | None = None
    written: RepairShape | None = None
    repaired: RepairShape | None = None
    waited: bool = False
    shared: bool = False
    exit_code: int | None = None
    reloaded: list[str] = []
    output_refused: str | None = None
    retries: list[JSON] = []
    cuts: list[CutShape] = []
    compacted: JSON | None = None
    refusal: RefusalShape | None = None
    settled: bool = False
    recalled: RecalledShape | None = None
    records: str | None = None
    other: JSON = {}
    cache_miss: CacheMissShape | None = None


class ReasonShape(_Open):
    """What 0.1 noted of a turn (`domain.former`)."""

    rule: str | None = None
    messages: Count | None = None
    matched: Count | None = None
    imported: Count | None = None
    diverged_at: Count | None = None
    delta: bool = False
    format: JSON | None = None
    wants: WantsShape = WantsShape()
    stop_sequence: str | None = None
    left_off: str | None = None
    sandbox: str | None = None
    verified: str | None = None
    session: RepairShape | str | None = None
    process: str | None = None
    records: str | None = None
    output_refused: str | None = None
    reloaded: list[str] = []
    repaired: RepairShape | None = None
    retries: list[JSON] = []
    cuts: list[CutShape] = []
    compacted: JSON | None = None


class AttemptShape(_Open):
    n: Count | None = None
    why: str | None = None
    code: str | None = None
    status: str | None = None
    repaired: RepairShape | None = None


class StoredErrorShape(_Open):
    code: str | None = None
    message: str | None = None
    param: str | None = None
    retry_after: Cost | None = None
    detail: JSON | None = None


class CallShape(_Open):
    shown: list[str] | None = None
    behind: TurnId | None = None
    beside: list[str] = []
    system_ids: list[str | None] = []
    items: dict[str, list[str | None]] = {}
    previous_response_id: str | None = None
    previous_interaction_id: str | None = None


class _Turn(_Shape):
    id: TurnId
    parent_id: TurnId | None
    status: Literal["completed", "requires_action", "refused", "failed", "cancelled"]
    model: Model
    input: list[MessageShape]
    created_at: Time
    system: str | None
    effort: Word | None
    profile: Annotated[str, Field(max_length=256)] | None
    output: list[Block]
    stop_reason: Word | None
    session_id: SessionId | None
    continuity: Continuity | None
    usage: UsageShape
    cost_usd: Cost | None
    error: StoredErrorShape | None
    attempts: list[AttemptShape]
    timings: dict[str, float | None]
    tools: list[JSON]
    delivery: Delivery
    origin: Word
    frame_uuid: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9-]{1,64}$")] | None
    path_hash: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9]{1,128}$")] | None
    depth: Count
    started_at: Time | None
    finished_at: Time | None
    call: CallShape | None = None


class TurnShape(_Turn):
    placed: PlacedShape
    options: OptionsShape
    evidence: EvidenceShape
    stop_sequence: str | None
    backend: Word | None
    answered_by: Model | None
    fallback: FallbackShape | None = None


class FormerTurnShape(_Turn):
    reason: ReasonShape


class SessionShape(_Shape):
    id: SessionId
    tip_turn_id: TurnId | None
    cli_version: Version
    created_at: Time


class LinkShape(_Shape):
    from_session: SessionId | None
    to_session: SessionId
    turn_id: TurnId | None
    reason: LinkReason
    detail: RepairShape
    at: Time


class ConversationShape(_Shape):
    metadata: JSON
    removed: list[ItemId]


class ItemShape(_Shape):
    id: ItemId
    data: JSON
    turn_id: TurnId | None


class AgentShape(_Shape):
    agent_id: Annotated[str, Field(min_length=1, max_length=AGENT_ID_LIMIT)]
    named: bool
    created_at: Time


class Header(_Shape):
    agent: AgentShape
    head: TurnId | None


_SHAPES: dict[str, type[BaseModel]] = {
    "turn": TurnShape, "session": SessionShape, "link": LinkShape, "conversation": ConversationShape, "item": ItemShape,
}  # fmt: skip


class _RecordLine(_Shape):
    record: str
    uuid: Annotated[str, Field(max_length=1024)] | None
    synthetic: bool


class _ImageLine(_Shape):
    image: Sha256
    data: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9+/]+={0,2}$")]


def check_header(where: str, head: JSON) -> None:
    """Raises `InvalidRequest`, as all of these do; `where` is the place in the file that the message names."""
    _check(Header, head, where)


def check_line(where: str, line: JSON, *, former: bool) -> str:
    """One line after the first, whose first field says what it is. Its images are still aside.

    `former`: as 0.1 wrote it.
    """
    kind = str(next(iter(line), "nothing"))
    if kind == "record":
        _check(_RecordLine, line, where, kind)
    elif kind == "image":
        _check(_ImageLine, line, where)
    elif kind in _SHAPES:
        _check(FormerTurnShape if former and kind == "turn" else _SHAPES[kind], line[kind], where, kind)
    else:
        raise InvalidRequest(
            f"{where}: {kind[:40]} is no part of an export; upgrade cli-session-proxy, or export it again"
        )
    return kind


def _check(shape: type[BaseModel], value: Any, where: str, *below: str) -> None:
    try:
        shape.model_validate(value)
    except ValidationError as exc:
        first = exc.errors(include_input=False, include_url=False)[0]  # the value may be what somebody said
        place = ".".join([*below, *(str(part) for part in first["loc"])][:6])
        raise InvalidRequest(f"{where}: {place}: {first['msg']}; it was not made by this program, or changed") from exc
