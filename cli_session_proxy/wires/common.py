"""Shared by all wires: naming the agent, reading bodies and conversations, writing errors and events.

Pure, no I/O.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TypeVar
from urllib.parse import quote, unquote_to_bytes

from ..domain import limits
from ..domain.client_tools import UNPARSED
from ..domain.limits import is_model
from ..domain.models import JSON, PLAIN, Block, Message, Status, Turn, TurnOptions, TurnRequest
from ..domain.parameters import Name, Parameters
from ..domain.reminders import reminder
from ..domain.windows import Window
from ..errors import InvalidRequest, ProxyError
from ..sandbox import AGENT_ID_LIMIT, LOCAL_OWNER

T = TypeVar("T")

# A content part of the request, and a function that reads a part at its place in the body.
Part = Mapping[str, Any]
Reader = Callable[[Part, str], "Block | None"]

# A wire's own names of a turn's parameters (with their place in the body), for reading and for X-Ignored-Params.
Names = Mapping[Name, str]

# The longest idempotency key: Stripe's documented limit.
MAX_IDEMPOTENCY_KEY = 255
# Limits for stored `metadata`: OpenAI takes 16 pairs of 64 and 512 characters; LiteLLM adds its own.
MAX_NOTES = 32
NOTE_NAME = 64
NOTE_LENGTH = 512
# Prefixes of a model's name from LiteLLM's routing to an OpenAI-compatible endpoint or to us.
MODEL_PREFIXES = ("claude-cli/", "openai/")

# Vendors often add fields, so unknown ones are accepted, and reported as ignored: at most this many.
MAX_UNREAD = 16
# Names of fields that may be put into a header.
_FIELD = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")

# Each parameter's minimum and maximum (None: unbounded), and whether it is an integer. Temperature has OpenAI's and
# Google's scale (Anthropic's goes to 1); a seed is any 64-bit integer.
NUMBERS: Mapping[Name, tuple[float, float | None, bool]] = {
    "max_tokens": (1, None, True), "temperature": (0, 2.0, False), "top_p": (0, 1, False), "top_k": (0, None, True),
    "seed": (-(2**63), 2**63 - 1, True),
}  # fmt: skip

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
            options=replace(options, window=self.window, metadata=noted(body)),
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
    """A call of a stateful wire. `previous`: the wire's id of the turn to continue. `background`: the turn runs to its
    end without its client."""

    previous: str | None
    background: bool


# --- the body and its fields


def read_bytes(raw: bytes, about: Naming, read: Callable[[JSON, Naming], T]) -> T:
    """Parse a body with a wire's `read`. Raises `InvalidRequest`."""
    return read(parse_body(raw), about)


def noted(body: Mapping[str, Any]) -> JSON:
    """The client's `metadata`: short values by short names, stored with the turn for people.

    It has no effect, except for `agent_id` and `litellm_session_id` (see `Naming`).
    """
    given = body.get("metadata")
    notes = islice(given.items(), MAX_NOTES) if isinstance(given, dict) else ()
    return {
        name: value
        for name, value in notes
        if len(name) <= NOTE_NAME
        and (isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) <= NOTE_LENGTH))
    }


def parse_body(raw: bytes) -> JSON:
    """The request's JSON object. Raises `InvalidRequest` if it is invalid or exceeds the limits."""
    try:
        body = limits.loads(raw.decode("utf-8"), strict=True)
    except UnicodeDecodeError as exc:
        raise InvalidRequest("the body must be JSON in UTF-8, not compressed") from exc
    except limits.TooDeep as exc:
        raise InvalidRequest(f"the body's JSON cannot be used: {exc}; send it flatter") from exc
    except ValueError as exc:
        # A JSONDecodeError's message has a position, never the text.
        raise InvalidRequest(f"the body is not valid JSON: {exc}") from exc
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    # Each value takes at least two bytes, so a small body need not be counted.
    if len(raw) > 2 * limits.VALUES and limits.holds_more(body, limits.VALUES):
        raise InvalidRequest(f"the body has more than {limits.VALUES:,} JSON values: send less")
    return body


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


def model_name(value: object) -> str:
    """The CLI's name of the model, without a LiteLLM prefix; `default` without a model."""
    if value is None:
        return "default"
    if not isinstance(value, str):
        raise wrong_type("model", "a string")
    for prefix in MODEL_PREFIXES:
        value = value.removeprefix(prefix)
    if not is_model(value):
        raise InvalidRequest("model must be sonnet, opus, haiku, default or a name that the CLI takes", param="model")
    return value


class Fields(dict[str, Any]):
    """An object of a body that records which fields were read: the others have no effect."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        super().__init__(data)
        self._asked: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self._asked.add(name)
        return super().get(name, default)

    def given(self, names: Collection[str]) -> tuple[str, ...]:
        """Those of these fields that are present and not null, in this order. All of them count as read."""
        self._asked.update(names)
        if self.keys().isdisjoint(names):  # the usual case
            return ()
        return tuple(name for name in names if self.get(name) is not None)

    def unread(self, where: str = "") -> tuple[str, ...]:
        """Fields with a value that were not read, and so have no effect. Call it after reading everything."""
        if self.keys() <= self._asked:  # the usual case
            return ()
        unread = (
            name for name in self if name not in self._asked and self[name] is not None and _FIELD.fullmatch(name)
        )
        return tuple(f"{where}{name}" for name in islice(unread, MAX_UNREAD))


def wrong_type(param: str, expected: str) -> InvalidRequest:
    return InvalidRequest(f"{param} must be {expected}", param=param)


# JSON's numbers.
NUMBER: tuple[type[int], type[float]] = (int, float)
# The types of fields, as error messages name them.
TYPE_NAMES: Mapping[object, str] = {
    str: "a string", bool: "true or false", int: "a whole number", NUMBER: "a number", dict: "an object",
    list: "a list",
}  # fmt: skip


def optional(
    part: Part, name: str, kind: type[T] | tuple[type[T], ...], where: str = "", *, expected: str | None = None
) -> T | None:
    """The value of a field of the object at `where` in the body ("": the body itself); None if it is absent or null.

    Raises `InvalidRequest` for another type, which names the `expected` one. A boolean is no number, although it is an
    `int` in Python.
    """
    value = part.get(name)
    return None if value is None else checked_type(value, kind, where, name, expected)


def checked_type(
    value: Any, kind: type[T] | tuple[type[T], ...], where: str, name: str, expected: str | None = None
) -> T:
    """The value of the field `name`, which is not null. Raises `InvalidRequest` as `optional` does."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise wrong_type(f"{where}.{name}" if where else name, expected or TYPE_NAMES[kind])
    return value


def required(part: Part, name: str, kind: type[T], where: str = "", *, expected: str | None = None) -> T:
    """Like `optional`, but raises `InvalidRequest` if the field is absent or null."""
    value = optional(part, name, kind, where, expected=expected)
    if value is None:
        param = f"{where}.{name}" if where else name
        raise InvalidRequest(f"{param} is missing: it must be {expected or TYPE_NAMES[kind]}", param=param)
    return value


def check_types(part: Part, types: Mapping[Any, Iterable[str]], where: str = "") -> None:
    """Raise `InvalidRequest` if one of the fields listed for a type has another type."""
    for kind, names in types.items():
        for name in names:
            optional(part, name, kind, where)


def one_of(part: Part, name: str, allowed: Collection[str], where: str = "") -> str | None:
    """The text of a field with these possible values; None if it is absent or null. Raises `InvalidRequest`."""
    value = optional(part, name, str, where)
    if value is not None and value not in allowed:
        param = f"{where}.{name}" if where else name
        raise InvalidRequest(f"{param} must be one of {', '.join(allowed)}", param=param)
    return value


def refuse(part: Part, reasons: Mapping[str, str]) -> None:
    """Raise `InvalidRequest` with the reason for a field that is present and not null."""
    for name, reason in reasons.items():
        if part.get(name) is not None:
            raise InvalidRequest(f"{name}{reason}", param=name)


def objects(values: Iterable[object], where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place in the body, object) of each value of the list at `where`. Raises `InvalidRequest` for other values."""
    for index, value in enumerate(values):
        here = f"{where}[{index}]"
        if not isinstance(value, dict):
            raise wrong_type(here, "an object")
        yield here, value


def read_parameters(
    fields: Mapping[str, Any],
    names: Names,
    *,
    thinking: bool | None = None,
    get: Callable[[Mapping[str, Any], str], Any] | None = None,
) -> Parameters:
    """The parameters in these fields. `get`: reads a field that has several spellings. Raises `InvalidRequest`, which
    names the field."""
    given: dict[str, Any] = {}
    for name, (least, most, whole) in NUMBERS.items():
        if name not in names:
            continue
        where = names[name]
        field = where.rpartition(".")[2]
        value = fields.get(field) if get is None else get(fields, field)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong_type(where, "a number")
        if not least <= value or (most is not None and value > most):
            bounds = f"at least {least:g}" if most is None else f"from {least:g} to {most:g}"
            raise InvalidRequest(f"{where} must be {bounds}", param=where)
        if whole and isinstance(value, float):
            if not value.is_integer():
                raise wrong_type(where, "a whole number")
            value = int(value)
        given[name] = value
    return Parameters(thinking=thinking, **given)


# --- conversations, converted to blocks of the Messages API


def by_role(messages: Sequence[object]) -> Iterator[tuple[str, str, Part]]:
    """(place in the body, role, message) of each message. Raises `InvalidRequest`."""
    limits.at_most(messages, limits.MESSAGES, "messages")
    for where, message in objects(messages, "messages"):
        yield where, required(message, "role", str, where), message


def typed_blocks(parts: Iterable[object], where: str, kinds: Mapping[str, Reader]) -> list[Block]:
    """Read each part with the reader in `kinds` for its `type`; empty parts are left out. Raises `InvalidRequest`."""
    read: list[Block] = []
    for here, part in objects(parts, where):
        kind = required(part, "type", str, here)
        if kind not in kinds:
            raise InvalidRequest(f"{here}: {kind!r} is not supported here; send {' or '.join(kinds)}", param=here)
        if (block := kinds[kind](part, here)) is not None:
            read.append(block)
    return read


def read_content(
    message: Part, where: str, kinds: Mapping[str, Reader], *, name: str = "content", parts: str = "parts"
) -> tuple[Block, ...]:
    """The content of a message, in the field `name`: a text, or a list of `parts` (the wire's word for them). Raises
    `InvalidRequest`."""
    content = message.get(name)
    if isinstance(content, str):
        return ({"type": "text", "text": content},) if content else ()
    if not isinstance(content, list):
        raise wrong_type(f"{where}.{name}", f"a string or a list of {parts}")
    return tuple(typed_blocks(content, f"{where}.{name}", kinds))


def read_text(part: Part, where: str, name: str = "text") -> Block | None:
    """The text block of a part whose field `name` holds the text; None if it is empty."""
    text = required(part, name, str, where)
    return {"type": "text", "text": text} if text else None


def tool_result(call_id: str, content: str | list[Block], *, is_error: object = False) -> Block:
    result: Block = {"type": "tool_result", "tool_use_id": call_id, "content": content}
    return {**result, "is_error": True} if is_error else result


def without_blank_texts(blocks: tuple[Block, ...]) -> tuple[Block, ...]:
    """Without blank text blocks, which the Messages API refuses; unchanged if there are no other blocks."""
    return tuple(block for block in blocks if block["type"] != "text" or block["text"].strip()) or blocks


@dataclass(slots=True)
class Instructions:
    """The system and developer messages of a body: those before the conversation form its system prompt, later ones
    stay at their place as `reminders`."""

    system: list[str] = field(default_factory=list)

    def place(self, text: str, where: str, conversation: list[tuple[str, Message]]) -> None:
        if not text.strip():
            return
        if conversation:
            conversation.append((where, reminder(text)))
        else:
            self.system.append(text)

    def use_as_prompt(self, where: str, conversation: list[tuple[str, Message]]) -> None:
        """If the body has no other message, the last instruction becomes the prompt."""
        if self.system and not conversation:
            conversation.append((where, reminder(self.system.pop())))


def checked_conversation(conversation: Sequence[tuple[str, Message]]) -> tuple[Message, ...]:
    """The messages without their places in the body. Raises `InvalidRequest` if the last one is no prompt or result."""
    if not conversation:
        raise InvalidRequest("messages must hold a user message", param="messages")
    where, last = conversation[-1]
    if last.role != "user":
        raise InvalidRequest("the last message must be the user's or a tool's", param=f"{where}.role")
    if not any(block["type"] != "text" or block["text"].strip() for block in last.content):
        raise InvalidRequest(f"{where}.content is empty: send a text or an image", param=f"{where}.content")
    # A program that resumes may repeat the results of its last calls: equal ones count once.
    out: list[Message] = []
    results: dict[str, Block] = {}  # results since the model's last message
    for _, message in conversation:
        if message.role == "assistant":
            results = {}
        blocks_kept: list[Block] = []
        for block in message.content:
            if block["type"] == "tool_result":
                call = str(block["tool_use_id"])
                if results.get(call) == block:
                    continue
                results.setdefault(call, block)
            blocks_kept.append(block)
        if len(blocks_kept) == len(message.content):
            out.append(message)
        elif blocks_kept:
            out.append(Message(message.role, tuple(blocks_kept)))
    return tuple(out)


def stop_texts(given: object, where: str) -> tuple[str, ...]:
    """The stop sequences, without empty ones. Raises `InvalidRequest`."""
    if not isinstance(given, list) or not all(isinstance(stop, str) for stop in given):
        raise wrong_type(where, "a list of strings")
    limits.at_most(given, limits.STOPS, where)
    if any(len(stop) > limits.STOP_LENGTH for stop in given):
        raise InvalidRequest(f"{where}: a stop text has at most {limits.STOP_LENGTH} characters", param=where)
    return tuple(stop for stop in given if stop)


def arguments(text: str | None, where: str) -> JSON:
    """The arguments of a call in a client's history. If they are no JSON object (e.g. of a cut call), they are stored
    as text: refusing them would make every later request of that client fail. Raises `InvalidRequest`."""
    try:
        given = limits.loads(text or "{}")
    except limits.TooDeep as exc:
        raise InvalidRequest(f"{where} cannot be used: {exc}; send it flatter", param=where) from exc
    except ValueError:
        given = None
    return given if isinstance(given, dict) else {UNPARSED: text}


def checked_arguments(conversation: Iterable[Message], where: str) -> None:
    """Check arguments that came as text: valid JSON, and all together within a body's limits. Raises
    `InvalidRequest`."""
    arguments = [block["input"] for message in conversation for block in message.content if block["type"] == "tool_use"]
    if not arguments:
        return
    if limits.holds_more(arguments, limits.VALUES):
        raise InvalidRequest(
            f"{where}: the arguments of the calls have more than {limits.VALUES:,} JSON values: send less", param=where
        )
    try:  # the fingerprint only saw a text; half a surrogate pair is allowed: it may be a model's
        json.dumps(arguments, allow_nan=False)
    except ValueError as exc:
        raise InvalidRequest(f"{where}: the arguments of a call hold a number that is not JSON", param=where) from exc


# --- answers


def own_names(names: Names, unmet: Iterable[Name]) -> list[str]:
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


def refusal_words(turn: Turn) -> str | None:
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
