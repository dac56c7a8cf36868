"""Ollama's chat and generate: read a body, write an answer. Pure, no I/O.

    POST /api/chat      ─ read_chat() ─────┐
    POST /api/generate  ─ read_generate() ─┴▶ OllamaCall ─▶ the engine ─▶ answer() or LineWriter

A chat's chain is found by its history, or by its agent's name. A generate has only a prompt: without an agent's name,
it continues the turn in its `context`, which it got with the answer. A context is a turn's id, and has no tokens.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from ... import redact
from ...domain.lineage import answer_text
from ...domain.models import JSON, Finished, Message, Turn, TurnEvent, TurnOptions
from ...domain.structured import checked_schema
from ...errors import InvalidRequest, ProxyError
from ..common import Naming, WireCall, calls_for_client, compact, refusal_message
from ..fields import NUMBER, Fields, Names, check_types, model_name, optional, read_parameters, stop_texts, wrong_type
from ..openai import OfferedTools, read_tools, refuse_logprobs
from ..streams import SentTexts
from . import messages as ollama_messages

WIRE = "ollama"

# The tag that Ollama appends to names without a tag.
TAG = ":latest"
# The CLI's efforts that `think` may name. With `true` the model decides.
EFFORTS = ("low", "medium", "high", "max")

# Accepted without effect, and listed in X-Ignored-Params: the CLI has no option for them.
_NUMBERS = (
    "num_keep", "min_p", "tfs_z", "typical_p", "repeat_last_n", "repeat_penalty", "presence_penalty",
    "frequency_penalty", "mirostat", "mirostat_tau", "mirostat_eta", "num_ctx", "num_batch", "num_gpu", "main_gpu",
    "num_thread",
)  # fmt: skip
PARAMETERS: Names = {
    "max_tokens": "options.num_predict", "temperature": "options.temperature", "top_p": "options.top_p",
    "top_k": "options.top_k", "thinking": "think", "seed": "options.seed",
}  # fmt: skip
_FLAGS = (
    "penalize_newline", "numa", "low_vram", "f16_kv", "logits_all", "vocab_only", "use_mmap", "use_mlock",
    "embedding_only",
)  # fmt: skip
IGNORED = ("keep_alive", "truncate", "shift", "template", "raw")

# The placeholder of a text, while the bytes around it are made.
_PLACEHOLDER = "here"
# Longer than any id of a turn.
_LONGEST_CONTEXT = 128
# Ollama has no reason for a refusal; its clients accept any.
_FINISH_REASONS = {"max_tokens": "length", "model_context_window_exceeded": "length", "refusal": "content_filter"}

Endpoint = Literal["chat", "generate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaCall(WireCall):
    """`model`: as the client wrote it. `endpoint`: the requested address. `thoughts`: whether to show the thinking."""

    endpoint: Endpoint
    model: str
    thoughts: bool


@dataclass(frozen=True, slots=True)
class Load:
    """A request without a prompt, which makes Ollama load or unload the model. Nothing is done here."""

    endpoint: Endpoint
    model: str
    done_reason: Literal["load", "unload"]


def read_chat(body: JSON, naming: Naming) -> OllamaCall | Load:
    """Read a body. Raises `InvalidRequest`, which names the field."""
    fields = Fields(body)
    given = fields.get("messages")
    system, messages = ollama_messages.read([] if given is None else given)
    return _read(fields, naming, "chat", system, messages)


def read_generate(body: JSON, naming: Naming) -> OllamaCall | Load:
    """Like `read_chat`, for a body with a `prompt`."""
    fields = Fields(body)
    if optional(fields, "suffix", str):
        raise InvalidRequest("suffix: the Claude CLI completes no text around a gap; leave it out", param="suffix")
    prompt = optional(fields, "prompt", str) or ""
    images = optional(fields, "images", list) or []
    system = optional(fields, "system", str)
    message = ollama_messages.user_message(prompt, images, "images")
    if prompt and message.content[-1]["type"] == "text" and not prompt.strip():
        raise InvalidRequest("prompt is empty: send a text or an image", param="prompt")
    messages = (message,) if message.content else ()
    return _read(fields, naming, "generate", system if system and system.strip() else None, messages)


def _read(
    fields: Fields, naming: Naming, endpoint: Endpoint, system: str | None, messages: tuple[Message, ...]
) -> OllamaCall | Load:
    model = optional(fields, "model", str)
    named = model_name(model.removesuffix(TAG) if model else None)
    stream = optional(fields, "stream", bool)
    refuse_logprobs(fields)
    keep_alive = fields.get("keep_alive")
    if keep_alive is not None and (isinstance(keep_alive, bool) or not isinstance(keep_alive, str | int | float)):
        raise wrong_type("keep_alive", "a number of seconds or a duration")
    if not messages:
        return Load(endpoint, model or named, "unload" if keep_alive in (0, "0", "0s") else "load")
    options = Fields(optional(fields, "options", dict) or {})
    check_types(options, {NUMBER: _NUMBERS, bool: _FLAGS}, "options")
    think = fields.get("think")
    if not (think is None or isinstance(think, bool) or (isinstance(think, str) and think in EFFORTS)):
        raise InvalidRequest(f"think must be true, false or one of {', '.join(EFFORTS)}", param="think")
    thinks = None if think is None else think is not False
    stop = options.get("stop")
    offered = read_tools(fields) if endpoint == "chat" else OfferedTools()
    request = naming.request(
        WIRE,
        fields,
        named,
        messages,
        address=f"/{endpoint}",
        system=system,
        effort="low" if think is False else think if isinstance(think, str) else None,
        options=TurnOptions(
            format=_format(fields.get("format")),
            tools=offered.tools,
            stop=() if stop is None else stop_texts([stop] if isinstance(stop, str) else stop, "options.stop"),
            parameters=read_parameters(options, PARAMETERS, thinking=thinks, get=_option),
        ),
        continues=_continued_turn_id(fields.get("context")) if endpoint == "generate" else None,
        call={"store": True} if endpoint == "generate" else None,  # its `context` is an id to continue it
    )
    return OllamaCall(
        request=request,
        parameters=PARAMETERS,
        endpoint=endpoint,
        model=model or named,
        stream=stream is not False,
        thoughts=think is not False,
        ignored=(
            *offered.hosted,
            *(f"options.{name}" for name in options.given((*_NUMBERS, *_FLAGS))),
            *fields.given(IGNORED),
            *options.unread("options"),
            *fields.unread(),
        ),
    )


def _option(options: Mapping[str, Any], name: str) -> Any:
    """The option; None for a negative `num_predict`, which means no bound."""
    value = options.get(name)
    unbound = name == "num_predict" and isinstance(value, int) and not isinstance(value, bool) and value < 0
    return None if unbound else value


def _format(wanted: object) -> JSON | None:
    if wanted is None or wanted == "":
        return None
    if wanted == "json":
        return {"schema": None}
    if not isinstance(wanted, dict):
        raise wrong_type("format", '"json" or a JSON Schema')
    return {"schema": checked_schema(wanted, "format")}


# --- the context of a generate ----------------------------------------------------------------------------


def _continued_turn_id(context: object) -> str | None:
    """The turn id in a context, which is a list of its bytes; None without a context.

    Raises `InvalidRequest` for a context that is not from this proxy.
    """
    if context is None or context == []:
        return None
    if isinstance(context, list) and len(context) <= _LONGEST_CONTEXT:
        numbers = [one for one in context if isinstance(one, int) and not isinstance(one, bool) and 0 < one < 128]
        turn_id = bytes(numbers).decode("ascii")
        if len(numbers) == len(context) and turn_id.startswith("turn_"):
            return turn_id
    raise InvalidRequest(
        "context must be one that an answer of this proxy gave; leave it out to begin", param="context"
    )


# --- answers ----------------------------------------------------------------------------------------------


def answer(turn: Turn, call: OllamaCall) -> JSON:
    """The whole answer of a committed turn."""
    thinking = answer_text(turn.output, "thinking") if call.thoughts else ""
    return _final(turn, call, answer_text(turn.output), thinking, _calls(turn))


def loaded(load: Load) -> JSON:
    """The answer to a request without a prompt."""
    return {
        **_head(load.model, time.time()),
        **_content(load.endpoint, ""),
        "done": True,
        "done_reason": load.done_reason,
    }


def _head(model: str, at: float) -> JSON:
    return {"model": model, "created_at": timestamp(at)}


def timestamp(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _content(endpoint: Endpoint, text: str, thinking: str = "", calls: list[JSON] | None = None) -> JSON:
    """Text, thinking and tool calls in the fields of this endpoint's answers."""
    thought = {"thinking": thinking} if thinking else {}
    if endpoint == "generate":
        return {"response": text, **thought}
    return {"message": {"role": "assistant", "content": text, **thought, **({"tool_calls": calls} if calls else {})}}


def _final(turn: Turn, call: OllamaCall, text: str, thinking: str, calls: list[JSON]) -> JSON:
    """The last object (`done`), with Ollama's counts, and durations in nanoseconds."""
    ended = turn.finished_at or time.time()
    total = max(0.0, ended - turn.created_at)
    session_ready, first_block = (float(turn.timings.get(step, 0)) / 1000 for step in ("session_ready", "first_block"))
    # A context is a list of numbers: the bytes of the turn's id.
    context = {"context": list(turn.id.encode())} if call.endpoint == "generate" else {}
    # The name as the client wrote it, unless another model has answered instead.
    model = turn.reported_model if turn.fallback is not None and turn.fallback.here else call.model
    return {
        **_head(model, ended),
        **_content(call.endpoint, text, thinking, calls),
        "done": True,
        "done_reason": _FINISH_REASONS.get(turn.stop_reason or "", "stop"),
        **({} if (words := refusal_message(turn)) is None else {"refusal": words}),
        **context,
        "total_duration": _nanoseconds(total),
        "load_duration": _nanoseconds(session_ready),
        "prompt_eval_count": turn.usage.prompt_tokens,
        "prompt_eval_duration": _nanoseconds(first_block - session_ready),
        "eval_count": turn.usage.output_tokens,
        "eval_duration": _nanoseconds(total - max(first_block, session_ready)),
    }


def _nanoseconds(seconds: float) -> int:
    return round(max(0.0, seconds) * 1e9)


def _calls(turn: Turn) -> list[JSON]:
    return [
        {"id": block["id"], "function": {"index": at, "name": block["name"], "arguments": block["input"]}}
        for at, block in enumerate(calls_for_client(turn))
    ]


class LineWriter:
    """Converts a turn's events to JSON objects, one per line. One for each stream.

    The bytes around a text are made once, so that a line costs one `json.dumps` of its text.
    """

    media_type = "application/x-ndjson"

    def __init__(self, call: OllamaCall) -> None:
        self._call = call
        self._frames: dict[str, tuple[bytes, bytes]] = {}
        for kind in ("text", "thinking"):
            content = _content(call.endpoint, *((_PLACEHOLDER, "") if kind == "text" else ("", _PLACEHOLDER)))
            line = _line({**_head(call.model, time.time()), **content, "done": False})
            # The last occurrence: before it is the model's name, as the client wrote it.
            before, _, after = line.rpartition(json.dumps(_PLACEHOLDER).encode())
            self._frames[kind] = before, after
        self._texts = SentTexts()

    def feed(self, event: TurnEvent) -> list[bytes]:
        """The bytes of this event; none for events without a form on this wire."""
        if isinstance(event, Finished):
            turn = event.turn
            kinds = ("thinking", "text")
            lines = [line for kind in kinds for line in self._text_line(kind, self._texts.rest(turn, kind))]
            if calls := _calls(turn):
                part = _content("chat", "", "", calls)
                lines.append(_line({**_head(self._call.model, time.time()), **part, "done": False}))
            return [*lines, _line(_final(turn, self._call, "", "", []))]
        return self._text_line(*self._texts.piece(event))

    def error(self, error: ProxyError) -> list[bytes]:
        """The end of a failed stream: Ollama's clients raise on it."""
        return [_line(error_body(error))]

    def keep_alive(self, words: str = "") -> bytes:  # noqa: ARG002 - there is no place for them
        """An object with an empty text, as Ollama also sends. Its clients would fail at an empty line."""
        before, after = self._frames["text"]
        return before + b'""' + after

    def _text_line(self, kind: str, text: str) -> list[bytes]:
        if not text or (kind == "thinking" and not self._call.thoughts):
            return []
        before, after = self._frames[kind]
        return [before + json.dumps(text).encode() + after]


def _line(data: JSON) -> bytes:
    """One line: ASCII JSON has no line breaks inside."""
    return compact(data) + b"\n"


def error_body(error: ProxyError) -> JSON:
    """An error: its text, our stable code, and the invalid field."""
    shown: JSON = {"error": redact.text(error.message), "code": error.code}
    return shown if error.param is None else {**shown, "param": error.param}
