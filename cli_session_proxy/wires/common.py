"""Shared by all wires: the names and options of a request outside its body, calls, and the words of answers. Pure."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar
from urllib.parse import quote, unquote_to_bytes

from .. import redact
from ..domain.forms import replace
from ..domain.models import JSON, PLAIN, Block, Message, Status, Turn, TurnOptions, TurnRequest
from ..domain.options import ParameterName, Window
from ..errors import InvalidRequest, ProxyError
from ..sandbox import AGENT_ID_LIMIT, LOCAL_OWNER
from .fields import Names, parse_body

T = TypeVar("T")

# The longest idempotency key: Stripe's documented limit.
MAX_IDEMPOTENCY_KEY = 255
# Limits for stored `metadata`: OpenAI takes 16 pairs of 64 and 512 characters; LiteLLM adds its own.
MAX_METADATA = 32
METADATA_NAME = 64
METADATA_TEXT = 512
# Made once: `json.dumps` with options makes an encoder at each call.
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
_COMPACT = json.JSONEncoder(separators=(",", ":"))

# Reasons for an incomplete answer.
INCOMPLETE = ("max_tokens", "model_context_window_exceeded", "refusal")


# --- who asks


# Characters by which two programs are told apart.
MAX_CLIENT = 200


@dataclass(frozen=True, slots=True)
class Naming:
    """The names and options of a request outside its body: from path, headers and key."""

    agent: str | None = None  # in the path, else in a header
    fresh: bool = False
    keep: bool = True  # False for `X-Chain: none`: delete everything after the delivery
    idempotency_key: str | None = None
    is_retry: bool = False
    request_id: str | None = None
    owner: str = LOCAL_OWNER
    window: Window | None = None
    client: str = ""  # the client program's User-Agent

    def agent_id(self, body: Mapping[str, Any]) -> str | None:
        """The agent's name from the first place that has one; None: to be found by the history."""
        metadata = body.get("metadata")
        inner: Mapping[str, Any] = metadata if isinstance(metadata, dict) else {}
        for place, value in (
            ("agent_id", self.agent),
            ("agent_id", body.get("agent_id")),
            ("metadata.agent_id", inner.get("agent_id")),
            ("litellm_session_id", body.get("litellm_session_id")),
            ("metadata.litellm_session_id", inner.get("litellm_session_id")),
        ):
            if value is not None:
                return checked_agent_id(value, place)
        return None

    def request(
        self,
        wire: str,
        body: Mapping[str, Any],
        model: str,
        messages: tuple[Message, ...],
        *,
        address: str = "",
        system: str | None = None,
        keep_system: bool = True,
        effort: str | None = None,
        continues: str | None = None,
        options: TurnOptions = PLAIN,
        call: JSON | None = None,
    ) -> TurnRequest:
        """The turn request of a body, with the names and options outside of it. `address`: distinguishes requests with
        equal bodies at different routes."""
        agent_id = self.agent_id(body)
        return TurnRequest(
            model=model,
            messages=messages,
            fingerprint=fingerprint(self.owner, agent_id, wire + address, body, fresh=self.fresh),
            owner=self.owner,
            agent_id=agent_id,
            system=system,
            keep_system=keep_system,
            effort=effort,
            fresh=self.fresh,
            continues=continues,
            idempotency_key=self.idempotency_key,
            is_retry=self.is_retry,
            wire=wire,
            request_id=self.request_id,
            options=replace(options, window=self.window, metadata=stored_metadata(body)),
            # A deleted answer cannot be asked for later.
            call=call if call is None or self.keep else {**call, "store": False},
            kept=self.keep,
        )


def checked_agent_id(value: object, param: str = "agent_id") -> str:
    if not isinstance(value, str) or not value or len(value) > AGENT_ID_LIMIT:
        raise InvalidRequest(f"{param} must be a text of 1 to {AGENT_ID_LIMIT} characters", param="agent_id")
    return value


def naming(
    headers: Mapping[str, str], *, path_agent: str | None, request_id: str | None, owner: str = LOCAL_OWNER
) -> Naming:
    """Naming from headers (lower-case names, latin-1 values as ASGI gives them) and the path's decoded agent."""
    agent, fresh = headers.get("x-agent-id"), headers.get("x-chain")
    header_agent = None if agent is None else decoded_agent_id(agent.encode("latin-1"))
    chain = None if fresh is None else fresh.strip().lower()
    if chain not in (None, "new", "none"):
        raise InvalidRequest(
            "X-Chain is new (it starts the named agent afresh) or none (nothing is kept once the answer was delivered)",
            param="X-Chain",
        )
    idempotency_key = headers.get("idempotency-key")
    if idempotency_key is not None and not 0 < len(idempotency_key) <= MAX_IDEMPOTENCY_KEY:
        raise InvalidRequest(
            f"Idempotency-Key must have 1 to {MAX_IDEMPOTENCY_KEY} characters", param="Idempotency-Key"
        )
    try:
        window = Window.parse(headers["x-window"]) if "x-window" in headers else None
    except ValueError as exc:
        raise InvalidRequest(f"X-Window: {exc}", param="X-Window") from exc
    # The openai and anthropic clients count their retries here (openai 3.52, anthropic 2.11).
    retries = headers.get("x-stainless-retry-count", "")
    return Naming(
        agent=header_agent if path_agent is None else path_agent,
        fresh=chain is not None,
        keep=chain != "none",
        idempotency_key=idempotency_key,
        is_retry=retries.isascii() and retries.isdigit() and int(retries[:9]) > 0,
        request_id=request_id,
        owner=owner,
        window=window,
        client=headers.get("user-agent", "")[:MAX_CLIENT],
    )


def decoded_agent_id(raw: bytes) -> str:
    """Percent-encoded UTF-8, as agents are named in headers and paths."""
    try:
        return checked_agent_id(unquote_to_bytes(raw).decode("utf-8"))
    except UnicodeDecodeError as exc:
        raise InvalidRequest("agent_id must be percent-encoded UTF-8 in a header or path", param="agent_id") from exc


def encoded_agent_id(agent_id: str) -> str:
    named = quote(agent_id, safe="")
    return named if named.strip(".") else named.replace(".", "%2E")  # clients drop segments of dots


# --- calls


@dataclass(frozen=True, slots=True, kw_only=True)
class WireCall:
    """A request for the engine, and the form of its answer. Wires add fields of their own.

    `ignored`: names of accepted fields without effect. `parameters`: the wire's names of parameters that a turn may run
    without.
    """

    request: TurnRequest
    stream: bool
    ignored: tuple[str, ...] = ()
    parameters: Names = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptCall(WireCall):
    """A call of a stateful wire. `previous`: the wire's id of the turn to continue."""

    previous: str | None


# --- the body and its fields


def read_bytes(raw: bytes, naming: Naming, read: Callable[[JSON, Naming], T]) -> T:
    """Parse a body with a wire's `read`. Raises `InvalidRequest`."""
    return read(parse_body(raw), naming)


def stored_metadata(body: Mapping[str, Any]) -> JSON:
    """The client's `metadata`: short values by short names, stored with the turn for people.

    It has no effect, except for `agent_id` and `litellm_session_id` (see `Naming`).
    """
    given = body.get("metadata")
    pairs = islice(given.items(), MAX_METADATA) if isinstance(given, dict) else ()
    return {
        name: value
        for name, value in pairs
        if len(name) <= METADATA_NAME
        and (isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) <= METADATA_TEXT))
    }


def fingerprint(owner: str, agent_id: str | None, wire: str, body: Mapping[str, Any], *, fresh: bool = False) -> str:
    """Equal for equal requests: sha256 over owner, agent, wire, and the body in canonical JSON."""
    return hashlib.sha256(canonical([owner, agent_id, wire, fresh, body])).hexdigest()


def canonical(value: Any) -> bytes:
    """Canonical JSON: equal for equal values. Raises `InvalidRequest` for values that Python reads but JSON cannot
    have."""
    try:
        return _CANONICAL.encode(value).encode("utf-8")
    except UnicodeEncodeError as exc:
        raise InvalidRequest("the body holds half a surrogate pair, which is no text: send whole characters") from exc
    except ValueError as exc:  # 1e999 is read as infinity
        raise InvalidRequest("the body holds a number that JSON cannot carry") from exc


# --- answers


def own_names(names: Names, unmet: Iterable[ParameterName]) -> list[str]:
    """The wire's names of these parameters."""
    return [names[name] for name in unmet if name in names]


def turn_id_in(name: str, prefix: str) -> str | None:
    """The turn id in a wire's own id; None if it is not one of ours."""
    key = name.removeprefix(prefix)
    return f"turn_{key}" if key != name and key else None


def status_of(turn: Turn, names: Mapping[Status, str]) -> str:
    """A turn's status in the words of a wire that has incomplete answers.

    A turn that was cancelled by anybody but its client, e.g. by a stopping proxy, has failed.
    """
    if turn.status == "cancelled" and ((turn.error or {}).get("detail") or {}).get("by") != "client":
        return "failed"
    if turn.status in ("completed", "refused") and turn.stop_reason in INCOMPLETE:
        return "incomplete"
    return names[turn.status]


def failure(turn: Turn) -> JSON:
    """The code and the message of a turn that failed."""
    error = turn.error or {}
    message = redact.text(str(error.get("message", "the turn failed")))
    return {"code": error.get("code", "upstream_error"), "message": message}


def calls_for_client(turn: Turn) -> list[Block]:
    """The calls whose results the client owes. In a turn with any other status the CLI itself has run its calls."""
    output = turn.output if turn.status == "requires_action" else ()
    return [block for block in output if block.get("type") == "tool_use"]


def refusal_message(turn: Turn) -> str | None:
    """The message for the client of a refused turn; None for other turns."""
    return turn.evidence.refusal.words if turn.status == "refused" and turn.evidence.refusal is not None else None


def retry_headers(error: ProxyError) -> dict[str, str]:
    """Retry-After in whole seconds, rounded up so that no client retries too early; and a header that tells the SDKs of
    OpenAI and Anthropic not to retry if that cannot help."""
    after = {} if error.retry_after is None else {"Retry-After": str(max(1, math.ceil(error.retry_after)))}
    return after if error.retry else {**after, "x-should-retry": "false"}


def compact(data: Any) -> bytes:
    """Compact ASCII JSON."""
    return _COMPACT.encode(data).encode()
