"""Google's generateContent: read a body, write an answer. Pure, no I/O.

POST /{v1|v1beta}/models/{m}:generateContent, :streamGenerateContent  ─ read() ─▶ GenerateCall ─▶ answer() or Writer
POST /{v1|v1beta}/models/{m}:countTokens                              ─ count()
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ... import redact
from ...domain.lineage import answer_text
from ...domain.models import JSON, Finished, Started, Turn, TurnEvent, TurnOptions
from ...domain.structured import checked_schema
from ...errors import InvalidRequest, ProxyError
from ..base import ErrorShape
from ..blocks import effort_of_budget, estimated_tokens
from ..common import Naming, WireCall, calls_for_client, refusal_message
from ..fields import NUMBER, Fields, Names, read_parameters, stop_texts
from ..google import checked_model, either, json_schema, lowered
from ..schemas import TEXT, error_schema
from ..streams import EventStream, SentTexts, sse
from . import content as generate_content
from .tools import read_choice, read_tools

WIRE = "generate"

# google-genai 3.4, types.ThinkingLevel → the CLI's efforts.
EFFORTS = {"MINIMAL": "low", "LOW": "low", "MEDIUM": "medium", "HIGH": "high", "XHIGH": "xhigh"}

# Accepted without effect, and listed in X-Ignored-Params: the CLI has no option for them.
IGNORED = ("presencePenalty", "frequencyPenalty", "mediaResolution")
# The same outside of `generationConfig`.
IGNORED_OUTSIDE = ("safetySettings", "serviceTier")

# Ignored fields whose type is checked.
_NUMBERS = ("presencePenalty", "frequencyPenalty")
_CONFIG = "generationConfig"
# The MIME type of an answer that is one bare value of an enum.
ENUM = "text/x.enum"
PARAMETERS: Names = {
    "max_tokens": "generationConfig.maxOutputTokens", "temperature": "generationConfig.temperature",
    "top_p": "generationConfig.topP", "top_k": "generationConfig.topK",
    "thinking": "generationConfig.thinkingConfig", "tool_choice": "toolConfig.functionCallingConfig",
    "seed": "generationConfig.seed",
}  # fmt: skip
_FINISH_REASONS = {"max_tokens": "MAX_TOKENS", "model_context_window_exceeded": "MAX_TOKENS", "refusal": "SAFETY"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall(WireCall):
    """`thoughts`: the client wants to see the thinking."""

    thoughts: bool


def read(body: JSON, naming: Naming, model: str, *, stream: bool = False) -> GenerateCall:
    """Read a body. `model` and `stream` are from the path. Raises `InvalidRequest`, which names the field."""
    body = fields = Fields(body)
    config = Fields(either(body, _CONFIG, dict) or {})
    for name in _NUMBERS:
        either(config, name, NUMBER, _CONFIG)  # only its type is checked
    _refuse_unsupported(body, config)
    system, messages = generate_content.read(body)
    thinking = Fields(either(config, "thinkingConfig", dict, _CONFIG) or {})
    fields.get("model")  # some clients also send it here; the address decides
    # A budget of 0 turns thinking off; -1 lets the model decide.
    budget = either(thinking, "thinkingBudget", int, "thinkingConfig")
    thinks = None if budget is None or budget < 0 else budget > 0
    effort = effort_of_budget(budget) if budget is not None and budget > 0 else None
    if (level := either(thinking, "thinkingLevel", str, "thinkingConfig")) is not None:
        if level.upper() not in EFFORTS:
            raise InvalidRequest(
                f"thinkingConfig.thinkingLevel must be one of {', '.join(EFFORTS)}",
                param=f"{_CONFIG}.thinkingConfig.thinkingLevel",
            )
        thinks, effort = True, EFFORTS[level.upper()]
    tools, hosted = read_tools(body)
    request = naming.request(
        WIRE,
        body,
        checked_model(model),
        messages,
        address=f"/{model}",
        system=system,
        effort=effort,
        options=TurnOptions(
            format=_format(config),
            tools=tools,
            tool_choice=read_choice(body, tools),
            stop=stop_texts(either(config, "stopSequences") or [], f"{_CONFIG}.stopSequences"),
            parameters=read_parameters(config, PARAMETERS, thinking=thinks, get=either),
        ),
    )
    ignored = [*hosted, *(f"{_CONFIG}.{name}" for name in IGNORED if either(config, name) is not None)]
    if either(config, "responseMimeType") == ENUM:
        ignored.append(f"{_CONFIG}.responseMimeType")
    return GenerateCall(
        request=request,
        parameters=PARAMETERS,
        stream=stream,
        thoughts=bool(either(thinking, "includeThoughts", bool, "thinkingConfig")),
        ignored=(
            *ignored,
            *(name for name in IGNORED_OUTSIDE if either(body, name) is not None),
            *thinking.unread(f"{_CONFIG}.thinkingConfig"),
            *config.unread(_CONFIG),
            *fields.unread(),
        ),
    )


def count(body: JSON, naming: Naming) -> JSON:  # noqa: ARG001 - every `read` of a body takes both
    """The answer of countTokens: an estimate (`blocks.estimated_tokens`)."""
    inner = either(body, "generateContentRequest", dict) or body
    tools, _ = read_tools(inner)
    return {"totalTokens": estimated_tokens(*generate_content.read(inner, answered=False), tools)}


def _format(config: Mapping[str, Any]) -> JSON | None:
    mime = either(config, "responseMimeType", str, _CONFIG) or "text/plain"
    if mime == ENUM:  # the answer is one bare value of the schema, not JSON: it cannot be checked
        return None
    if mime not in ("text/plain", "application/json"):
        raise InvalidRequest(
            "responseMimeType must be text/plain or application/json", param=f"{_CONFIG}.responseMimeType"
        )
    if (schema := either(config, "responseJsonSchema")) is not None:
        schema = lowered(schema) if isinstance(schema, dict) else schema
        return {"schema": checked_schema(schema, f"{_CONFIG}.responseJsonSchema")}
    if (schema := either(config, "responseSchema", dict, _CONFIG)) is not None:
        return {"schema": checked_schema(json_schema(schema), f"{_CONFIG}.responseSchema")}
    return {"schema": None} if mime == "application/json" else None


def _refuse_unsupported(body: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    if either(body, "cachedContent") is not None:
        raise InvalidRequest("cachedContent: there is none here; send the contents themselves", param="cachedContent")
    candidates = either(config, "candidateCount", int, _CONFIG)
    if candidates not in (None, 1):
        raise InvalidRequest(
            "candidateCount must be 1: the Claude CLI gives one answer a turn", param=f"{_CONFIG}.candidateCount"
        )
    if either(config, "responseLogprobs", bool, _CONFIG):
        raise InvalidRequest("responseLogprobs: the Claude CLI gives none", param=f"{_CONFIG}.responseLogprobs")
    modalities = either(config, "responseModalities", list, _CONFIG)
    if modalities and [str(one).upper() for one in modalities] != ["TEXT"]:
        raise InvalidRequest('responseModalities: only ["TEXT"] is supported', param=f"{_CONFIG}.responseModalities")


# --- errors -----------------------------------------------------------------------------------------------

# google.rpc.Code by HTTP status, as its `code.proto` maps them.
_GOOGLE_STATUSES = {
    400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND", 405: "UNIMPLEMENTED",
    409: "ABORTED", 413: "INVALID_ARGUMENT", 429: "RESOURCE_EXHAUSTED", 499: "CANCELLED", 500: "INTERNAL",
    504: "DEADLINE_EXCEEDED",
}  # fmt: skip


def google_error(error: ProxyError, request_id: str) -> JSON:
    """`{"error": {code, message, status, details}}`."""
    status = _GOOGLE_STATUSES.get(error.status, "UNAVAILABLE" if error.status > 500 else "INVALID_ARGUMENT")
    metadata = {"request_id": request_id} | ({"field": error.param} if error.param is not None else {})
    info = {
        "@type": "type.googleapis.com/google.rpc.ErrorInfo",
        "reason": error.code,
        "domain": "cli-session-proxy",
        "metadata": metadata,
    }
    message = redact.text(error.message)
    return {"error": {"code": error.status, "message": message, "status": status, "details": [info]}}


GOOGLE = ErrorShape(
    "google",
    google_error,
    error_schema({"code": {"type": "integer"}, "message": TEXT, "status": TEXT, "details": {"type": "array"}}),
)


# --- answers ----------------------------------------------------------------------------------------------


def answer(turn: Turn, *, thoughts: bool) -> JSON:
    """The `GenerateContentResponse` of a committed turn."""
    parts: list[JSON] = []
    if thoughts and (thinking := answer_text(turn.output, "thinking")):
        parts.append({"text": thinking, "thought": True})
    # One part, because Google's clients join an answer's texts without line breaks, unlike the chain.
    if text := answer_text(turn.output):
        parts.append({"text": text})
    return _response(turn.id, turn.reported_model, [*parts, *_calls(turn)] or [{"text": ""}], turn)


def usage(turn: Turn) -> JSON:
    """Google's usage: the prompt counts all tokens that the model read; thinking is counted separately."""
    used = turn.usage
    answer_tokens = max(0, used.output_tokens - used.thinking_tokens)
    return {
        "promptTokenCount": used.prompt_tokens,
        "cachedContentTokenCount": used.cache_read_tokens,
        "candidatesTokenCount": answer_tokens,
        "promptTokensDetails": [{"modality": "TEXT", "tokenCount": used.prompt_tokens}],
        "candidatesTokensDetails": [{"modality": "TEXT", "tokenCount": answer_tokens}],
        "thoughtsTokenCount": used.thinking_tokens,
        "totalTokenCount": used.prompt_tokens + used.output_tokens,
    }


def model_info(name: str, since: int, by: str = "anthropic") -> JSON:  # noqa: ARG001 - every wire's entry takes all three
    """One entry of the models list."""
    name = name.removeprefix("models/")
    return {
        "name": f"models/{name}", "baseModelId": name, "version": name, "displayName": name.capitalize(),
        "description": "a model of the Claude CLI" if by == "anthropic" else f"a model of {by}", "thinking": True,
        "supportedGenerationMethods": ["generateContent", "streamGenerateContent", "countTokens"],
    }  # fmt: skip


def model_list(models: list[JSON]) -> JSON:
    return {"models": models}


def _calls(turn: Turn) -> list[JSON]:
    return [
        {"functionCall": {"id": block["id"], "name": block["name"], "args": block["input"]}}
        for block in calls_for_client(turn)
    ]


def _response(turn_id: str, model: str, parts: list[JSON], finished: Turn | None = None) -> JSON:
    candidate: JSON = {"content": {"role": "model", "parts": parts}, "index": 0}
    end: JSON = {}
    if finished is not None:
        candidate["finishReason"] = _FINISH_REASONS.get(finished.stop_reason or "", "STOP")
        if (words := refusal_message(finished)) is not None:
            candidate["finishMessage"] = words
        end = {"usageMetadata": usage(finished)}
    return {"candidates": [candidate], **end, "modelVersion": model, "responseId": turn_id}


_DATA = b"data: "


class GenerateWriter:
    """Converts a turn's events to server-sent `GenerateContentResponse`s, `data:` lines only. One for each stream.

    Google's clients accept no comments: those for Python (2.34, 3.4) parse them as JSON, the one for Go (1.69) fails on
    any event without `data:`, even on an empty line. All accept spaces before the JSON: so a keep-alive begins the
    next event.
    """

    media_type = EventStream.media_type

    def __init__(self, turn_id: str, model: str, request_id: str, *, thoughts: bool) -> None:
        self._turn_id = turn_id
        self._model = model
        self._request_id = request_id
        self._thoughts = thoughts
        self._texts = SentTexts()
        self._held = ""
        self._begun = False  # a keep-alive has sent the beginning of the next event

    def keep_alive(self, words: str = "") -> bytes:  # noqa: ARG002 - Google's clients fail at a comment
        begun, self._begun = self._begun, True
        return b" " if begun else _DATA

    def feed(self, event: TurnEvent) -> list[bytes]:
        """The bytes of this event; none for events without a form on this wire."""
        if isinstance(event, Started):
            self._model = event.model or self._model
        if isinstance(event, Finished):
            return self._end(event.turn)
        kind, text = self._texts.piece(event)
        if not text:
            return []
        if kind == "thinking":
            return [self._chunk([{"text": text, "thought": True}])] if self._thoughts else []
        # The last character is held for the end: Google's own streams have no empty part there.
        ready, self._held = self._held + text[:-1], text[-1]
        return [self._chunk([{"text": ready}])] if ready else []

    def error(self, error: ProxyError) -> list[bytes]:
        """The end of a failed stream: Google's client raises on a chunk that begins like this."""
        held = [self._chunk([{"text": self._held}])] if self._held else []
        return [*held, self._sse(google_error(error, self._request_id))]

    def _end(self, turn: Turn) -> list[bytes]:
        rest = self._held + self._texts.rest(turn)
        parts = [{"text": rest}] if rest else []
        # For chats of google-genai an answer without parts is invalid.
        return [
            self._sse(_response(self._turn_id, turn.reported_model, [*parts, *_calls(turn)] or [{"text": ""}], turn))
        ]

    def _chunk(self, parts: list[JSON]) -> bytes:
        return self._sse(_response(self._turn_id, self._model, parts))

    def _sse(self, data: JSON) -> bytes:
        begun, self._begun = self._begun, False
        return sse(data).removeprefix(_DATA if begun else b"")
