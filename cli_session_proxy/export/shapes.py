"""Validates the lines of an export, which is not trusted.

Ids must have our format, statuses and reasons must be known, numbers must fit into the store, and the evidence of a
repair must have the types that `explain` reads. Messages are not checked: they are only shown as text. The schemas are
made from the domain's records; only stricter rules are written here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from types import UnionType
from typing import Annotated, Any, Literal, Optional, Union, get_args, get_origin, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    create_model,
)

from ..domain import blocks
from ..domain.approvals import Approval
from ..domain.evidence import CacheMiss, Evidence, Note, Repair, StreamCut
from ..domain.forms import Recorded
from ..domain.limits import MODEL, TURN_ID, UUID, VERSION
from ..domain.models import (
    JSON,
    Conversation,
    Fallback,
    Item,
    Link,
    Message,
    Placed,
    Session,
    ToolChoice,
    Turn,
    TurnOptions,
)
from ..domain.options import Parameters, Window
from ..domain.times import LAST_TIME
from ..errors import InvalidRequest
from ..sandbox import AGENT_ID_LIMIT

# Integers of SQLite and PostgreSQL have 64 bits.
MOST = 2**63 - 1
# The longest path. The column has 32 bits in PostgreSQL, and the path must be able to grow.
MOST_DEPTH = 2**30

SessionId = Annotated[str, StringConstraints(pattern=f"^{UUID}$")]
TurnId = Annotated[str, StringConstraints(pattern=f"^{TURN_ID}$")]
Model = Annotated[str, StringConstraints(pattern=rf"^{MODEL}$")]
Version = Annotated[str, StringConstraints(pattern=f"^{VERSION}$")]
# Words of our own: efforts, wires, stop reasons.
Word = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
ItemId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Time = Annotated[float, Field(ge=0, lt=LAST_TIME, allow_inf_nan=False)]
Cost = Annotated[float, Field(ge=-1e9, le=1e9, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=MOST)]


class _Shape(BaseModel):
    """Unknown fields are allowed, and ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")


Block = Annotated[JSON, AfterValidator(blocks.check)]


class RepairShape(_Shape):
    """The detail of a link, or of a repair in a turn's evidence; `why` and `done` were written by 0.1."""

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


class AttemptShape(_Shape):
    n: Count | None = None
    why: str | None = None
    code: str | None = None
    status: str | None = None
    repaired: RepairShape | None = None


class StoredErrorShape(_Shape):
    code: str | None = None
    message: str | None = None
    param: str | None = None
    retry_after: Cost | None = None
    detail: JSON | None = None


class CallShape(_Shape):
    """What readers use of `Turn.call`."""

    store: bool | None = None
    background: bool | None = None
    deleted: bool | None = None
    summaries: bool | None = None
    conversation: str | None = None
    system_sent: list[str] = []
    system_items: list[str] = []
    custom: list[str] = []
    tools: list[JSON] = []
    brought: Count = 0
    shapes: dict[str, Annotated[list[str], Field(min_length=3, max_length=3)]] = {}
    echo: JSON = {}
    format: JSON = {}
    shown: list[str] | None = None
    behind: TurnId | None = None
    beside: list[str] = []
    system_ids: list[str | None] = []
    items: dict[str, list[str | None]] = {}
    previous_response_id: str | None = None
    previous_interaction_id: str | None = None


# Stricter types for fields of records that other records contain.
_SHAPE_OF: dict[Any, Any] = {
    Window: Annotated[str, AfterValidator(lambda text: str(Window.parse(text)))],
    Repair: RepairShape,
    int: Count,
    float: Time,
}


def _shape(kind: Any, *, without: Collection[str] = (), whole: bool = False, **narrowed: Any) -> type[BaseModel]:
    """The schema of a record's JSON. Fields have the record's types, or stricter ones from `narrowed`. `whole`: fields
    with a default are required, too, except `call` and `fallback`, which newer versions added."""
    types = get_type_hints(kind)
    made: dict[str, Any] = {}
    for one in dataclasses.fields(kind):
        if one.name in without:
            continue
        type_ = narrowed.get(one.name) or _in_json(types[one.name])
        no_default = one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
        required = no_default or (whole and one.name not in ("call", "fallback"))
        # Renamed, because pydantic's models have attributes such as `schema`.
        made[f"{one.name}_"] = (Annotated[type_, Field(alias=one.name)], ... if required else None)
    _SHAPE_OF[kind] = create_model(f"{kind.__name__}Shape", __base__=_Shape, **made)
    shape: type[BaseModel] = _SHAPE_OF[kind]
    return shape


def _in_json(type_: Any) -> Any:
    of = get_args(type_)
    if get_origin(type_) in (Union, UnionType):
        return Optional[_in_json(of[0])]  # noqa: UP045 - of a type that is made here
    if get_origin(type_) is tuple:
        return list[_in_json(of[0])]  # type: ignore[misc] # as above
    if isinstance(type_, type) and issubclass(type_, Recorded) and type_ not in _SHAPE_OF:
        return _shape(type_)
    return _SHAPE_OF.get(type_, type_)


_shape(Message, content=list[Block])
_shape(Placed, rule=str | None)
_shape(Note, code=Word)
_shape(CacheMiss, reason=Word)
_shape(Approval, outcome=Word | None)
_shape(Fallback, asked=Model, model=Model, why=Word)
_shape(Parameters, seed=int | None)
_OPTIONS: Any = _shape(TurnOptions, metadata=dict[str, str | int | float | bool], tool_choice=_shape(ToolChoice) | None)
_shape(Evidence, exit_code=int | None, records=str | None, unmet=list[Word], other=JSON)


class ReasonShape(_Shape):
    """The `reason` of a turn that 0.1 wrote (`domain.legacy`)."""

    rule: str | None = None
    messages: Count | None = None
    matched: Count | None = None
    imported: Count | None = None
    diverged_at: Count | None = None
    delta: bool = False
    format: JSON | None = None
    wants: _OPTIONS = None
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
    cuts: list[_SHAPE_OF[StreamCut]] = []  # type: ignore[valid-type] # it is made above
    compacted: JSON | None = None


# Not exported: a turn's `seq`, what recognises a client's retry, and fields of unfinished turns.
_LOCAL = {"seq", "agent_key", "fingerprint", "instance", "limit_wait"}
_TURN: dict[str, Any] = {
    "id": TurnId, "parent_id": TurnId | None, "model": Model, "effort": Word | None, "origin": Word,
    "status": Literal["completed", "requires_action", "refused", "failed", "cancelled"],
    "profile": Annotated[str, Field(max_length=256)] | None, "output": list[Block], "stop_reason": Word | None,
    "session_id": SessionId | None, "cost_usd": Cost | None, "error": StoredErrorShape | None,
    "attempts": list[AttemptShape], "timings": dict[str, float | None], "backend": Word | None,
    "frame_uuid": Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9-]{1,64}$")] | None,
    "path_hash": Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9]{1,128}$")] | None,
    "answered_by": Model | None, "call": CallShape | None, "depth": Annotated[int, Field(ge=0, le=MOST_DEPTH)],
}  # fmt: skip
# Fields that a turn of 0.1 does not have: they were part of its `reason`, or did not exist.
_LATER = {"placed", "options", "evidence", "stop_sequence", "backend", "answered_by", "fallback"}

SHAPES = {
    "turn": _shape(Turn, without=_LOCAL, whole=True, **_TURN),
    "session": _shape(
        Session, without={"agent_key", "transcript", "mark"}, id=SessionId, tip_turn_id=TurnId | None,
        cli_version=Version,
    ),
    "link": _shape(
        Link, from_session=SessionId | None, to_session=SessionId, turn_id=TurnId | None, detail=RepairShape
    ),
    "conversation": _shape(Conversation, removed=list[ItemId]),
    "item": _shape(Item, id=ItemId, turn_id=TurnId | None),
}  # fmt: skip
_LEGACY_TURN = create_model(
    "LegacyTurnShape", __base__=_shape(Turn, without=_LOCAL | _LATER, whole=True, **_TURN), reason=(ReasonShape, ...)
)


def of_turn(fields: JSON, *, legacy: bool) -> JSON:
    """The validated fields of a turn. Others, of a later version, are dropped."""
    checked = _LEGACY_TURN if legacy else SHAPES["turn"]
    names = (field.alias or name for name, field in checked.model_fields.items())
    return {name: fields[name] for name in names if name in fields}


class AgentShape(_Shape):
    agent_id: Annotated[str, Field(min_length=1, max_length=AGENT_ID_LIMIT)]
    named: bool
    created_at: Time


class Header(_Shape):
    agent: AgentShape
    head: TurnId | None


class _RecordLine(_Shape):
    record: str
    uuid: Annotated[str, Field(max_length=1024)] | None
    synthetic: bool


class _ImageLine(_Shape):
    image: Sha256
    data: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9+/]+={0,2}$")]


def check_header(where: str, head: JSON) -> None:
    """Raises `InvalidRequest`, like all functions here. `where`: the place in the file, for the message."""
    _check(Header, head, where)


def check_line(where: str, line: JSON, *, legacy: bool) -> str:
    """Check a line after the header; `legacy`: written by 0.1. Returns its first field, which names its kind. Its
    images are not put back yet."""
    kind = str(next(iter(line), "nothing"))
    if kind == "record":
        _check(_RecordLine, line, where, kind)
    elif kind == "image":
        _check(_ImageLine, line, where)
    elif kind in SHAPES:
        _check(_LEGACY_TURN if legacy and kind == "turn" else SHAPES[kind], line[kind], where, kind)
    else:
        raise InvalidRequest(
            f"{where}: {kind[:40]} is no part of an export; upgrade cli-session-proxy, or export it again"
        )
    return kind


def _check(shape: type[BaseModel], value: Any, where: str, *below: str) -> None:
    try:
        shape.model_validate(value)
    except ValidationError as exc:
        first = exc.errors(include_input=False, include_url=False)[0]  # the value may be part of a conversation
        place = ".".join([*below, *(str(part) for part in first["loc"])][:6])
        raise InvalidRequest(f"{where}: {place}: {first['msg']}; it was not made by this program, or changed") from exc
