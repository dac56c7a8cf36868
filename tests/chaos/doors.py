"""The wires as a client writes and reads them: a conversation as a body, and an answer as it comes back. Pure.

A wire whose bodies hold the conversation gets it as exchanges, the newest without an answer. One that keeps it itself
(Responses, Interactions) gets only the newest, and the id of the answer that it continues.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from cli_session_proxy.domain.lineage import TEXT_JOIN

from . import pictures
from .journal import JSON, Answer, Asking
from .model import TOOL
from .reading import TOKEN, arguments, token

# `socket` is Responses over a WebSocket; the last three are applications that ask in a process of their own: by `ask`,
# by LiteLLM, and by the Claude Agent SDK, whose sessions are kept in the chain.
Wire = Literal[
    "chat", "responses", "messages", "generate", "interactions", "ollama", "socket", "engine", "litellm", "sdk"
]
APPLICATIONS: tuple[Wire, ...] = ("engine", "litellm", "sdk")
WIRES: tuple[Wire, ...] = ("chat", "responses", "messages", "generate", "interactions", "ollama")
# Those whose bodies can hold a whole conversation, and those whose requests name the answer that they continue.
WITH_HISTORY: tuple[Wire, ...] = ("chat", "messages", "generate", "ollama")
WITH_IDS: tuple[Wire, ...] = ("responses", "interactions")

MODEL = "sonnet"
SCHEMA = {"type": "object", "properties": {TOKEN: {"type": "string"}}, "required": [TOKEN]}
DESCRIPTION = "Looks something up."
# The code of an answer that the model refused to give: for its client the turn is none.
REFUSED = "refused"
# Behind the code of an error that does not tell whether the turn was kept: the store was lost as it was written, or the
# load balancer, or a proxy that passed it on, lost the host that had been given the request.
IN_DOUBT = ", in doubt"
HOST_LOST = "host_lost"


@dataclass(frozen=True, slots=True)
class Call:
    id: str
    token: str


@dataclass(frozen=True, slots=True)
class Got:
    """What a client read to its end. `id` names the answer, where its wire has such a name."""

    answer: Answer
    calls: tuple[Call, ...] = ()
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Exchanged:
    """One exchange of a conversation. `calls` are those that its results answer; `got` is None for the newest."""

    asked: Asking
    calls: tuple[Call, ...] = ()
    got: Got | None = None

    def results(self) -> list[tuple[str, str]]:
        """(the call's id, what it gave) of each result."""
        ids = {call.token: call.id for call in self.calls}
        return [] if isinstance(self.asked, str) else [(ids[result.call], result.text) for result in self.asked]


class Reader(Protocol):
    """Reads one wire's answer, whole or in pieces. `got` is there at its end, `error` at an event that is one."""

    got: Got | None = None
    error: str | None = None

    def feed(self, data: JSON) -> None: ...


# --- writing ------------------------------------------------------------------------------------------------


def written(
    wire: Wire, said: Sequence[Exchanged], *, stream: bool, tools: bool, previous: str | None = None
) -> tuple[str, JSON]:
    """(route, body) of a request whose newest exchange is the last of `said`."""
    return _WRITERS[wire](said, stream, tools, previous)


def _chat(said: Sequence[Exchanged], stream: bool, tools: bool, previous: str | None) -> tuple[str, JSON]:
    messages: list[JSON] = []
    for one in said:
        if isinstance(one.asked, str):
            image, words = pictures.split(one.asked)
            content: str | list[JSON] = words
            if image is not None:
                url = f"data:image/png;base64,{_base64(image)}"
                content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": words}]
            messages.append({"role": "user", "content": content})
        messages += [{"role": "tool", "tool_call_id": call, "content": text} for call, text in one.results()]
        if one.got is not None:
            message: JSON = {"role": "assistant", "content": one.got.answer.text}
            if one.got.calls:
                message["tool_calls"] = [
                    {
                        "id": call.id,
                        "type": "function",
                        "function": {"name": TOOL, "arguments": json.dumps(arguments(call.token))},
                    }
                    for call in one.got.calls
                ]
            messages.append(message)
    body: JSON = {"model": MODEL, "messages": messages, **_streamed(stream)}
    if tools:
        function = {"name": TOOL, "description": DESCRIPTION, "parameters": SCHEMA}
        body["tools"] = [{"type": "function", "function": function}]
    return "/v1/chat/completions", body


def _messages(said: Sequence[Exchanged], stream: bool, tools: bool, previous: str | None) -> tuple[str, JSON]:
    messages: list[JSON] = []
    for one in said:
        content: list[JSON] = [
            {"type": "tool_result", "tool_use_id": call, "content": text} for call, text in one.results()
        ]
        if isinstance(one.asked, str):
            image, words = pictures.split(one.asked)
            if image is not None:
                source = {"type": "base64", "media_type": "image/png", "data": _base64(image)}
                content.append({"type": "image", "source": source})
            content.append({"type": "text", "text": words})
        messages.append({"role": "user", "content": content})
        if one.got is not None:
            text = one.got.answer.text
            answer: list[JSON] = [{"type": "text", "text": text}] if text else []
            answer += [
                {"type": "tool_use", "id": call.id, "name": TOOL, "input": arguments(call.token)}
                for call in one.got.calls
            ]
            messages.append({"role": "assistant", "content": answer})
    body: JSON = {"model": MODEL, "max_tokens": 4096, "messages": messages, **_streamed(stream)}
    if tools:
        body["tools"] = [{"name": TOOL, "description": DESCRIPTION, "input_schema": SCHEMA}]
    return "/v1/messages", body


def _generate(said: Sequence[Exchanged], stream: bool, tools: bool, previous: str | None) -> tuple[str, JSON]:
    contents: list[JSON] = []
    for one in said:
        parts: list[JSON] = [
            {"functionResponse": {"id": call, "name": TOOL, "response": {"result": text}}}
            for call, text in one.results()
        ]
        if isinstance(one.asked, str):
            image, words = pictures.split(one.asked)
            if image is not None:
                parts.append({"inlineData": {"mimeType": "image/png", "data": _base64(image)}})
            parts.append({"text": words})
        contents.append({"role": "user", "parts": parts})
        if one.got is not None:
            text = one.got.answer.text
            answer: list[JSON] = [{"text": text}] if text else []
            answer += [
                {"functionCall": {"id": call.id, "name": TOOL, "args": arguments(call.token)}} for call in one.got.calls
            ]
            contents.append({"role": "model", "parts": answer})
    body: JSON = {"contents": contents}
    if tools:
        declared = {"name": TOOL, "description": DESCRIPTION, "parametersJsonSchema": SCHEMA}
        body["tools"] = [{"functionDeclarations": [declared]}]
    route = f"/v1beta/models/{MODEL}:"
    return route + ("streamGenerateContent?alt=sse" if stream else "generateContent"), body


def _ollama(said: Sequence[Exchanged], stream: bool, tools: bool, previous: str | None) -> tuple[str, JSON]:
    messages: list[JSON] = []
    for one in said:
        if isinstance(one.asked, str):
            image, words = pictures.split(one.asked)
            shown = {} if image is None else {"images": [_base64(image)]}
            messages.append({"role": "user", "content": words, **shown})
        messages += [{"role": "tool", "tool_call_id": call, "content": text} for call, text in one.results()]
        if one.got is not None:
            message: JSON = {"role": "assistant", "content": one.got.answer.text}
            if one.got.calls:
                message["tool_calls"] = [
                    {"id": call.id, "function": {"name": TOOL, "arguments": arguments(call.token)}}
                    for call in one.got.calls
                ]
            messages.append(message)
    body: JSON = {"model": MODEL, "messages": messages, "stream": stream}
    if tools:
        function = {"name": TOOL, "description": DESCRIPTION, "parameters": SCHEMA}
        body["tools"] = [{"type": "function", "function": function}]
    return "/api/chat", body


def _responses(said: Sequence[Exchanged], stream: bool, tools: bool, previous: str | None) -> tuple[str, JSON]:
    one = said[-1]
    if isinstance(one.asked, str):
        image, words = pictures.split(one.asked)
        content: list[JSON] = [{"type": "input_text", "text": words}]
        if image is not None:
            shown = {"type": "input_image", "image_url": f"data:image/png;base64,{_base64(image)}", "detail": "auto"}
            content.insert(0, shown)
        items: str | list[JSON] = words if image is None else [{"role": "user", "content": content}]
    else:
        items = [{"type": "function_call_output", "call_id": call, "output": text} for call, text in one.results()]
    body: JSON = {"model": MODEL, "input": items, **_streamed(stream)}
    if previous is not None:
        body["previous_response_id"] = previous
    if tools:
        tool = {"type": "function", "name": TOOL, "description": DESCRIPTION, "parameters": SCHEMA}
        body["tools"] = [{**tool, "strict": False}]
    return "/v1/responses", body


def _interactions(said: Sequence[Exchanged], stream: bool, tools: bool, previous: str | None) -> tuple[str, JSON]:
    one = said[-1]
    given: list[JSON]
    if isinstance(one.asked, str):
        image, words = pictures.split(one.asked)
        given = [{"type": "text", "text": words}]
        if image is not None:
            given.insert(0, {"type": "image", "mime_type": "image/png", "data": _base64(image)})
    else:
        given = [{"type": "function_result", "call_id": call, "result": text} for call, text in one.results()]
    body: JSON = {"model": MODEL, "input": given, **_streamed(stream)}
    if previous is not None:
        body["previous_interaction_id"] = previous
    if tools:
        tool = {"type": "function", "name": TOOL, "description": DESCRIPTION, "parameters": SCHEMA}
        body["tools"] = [tool]
    return "/v1beta/interactions", body


def _socket(said: Sequence[Exchanged], stream: bool, tools: bool, previous: str | None) -> tuple[str, JSON]:
    route, body = _responses(said, False, tools, previous)
    return route, {"type": "response.create", **body}


def _engine(said: Sequence[Exchanged], stream: bool, tools: bool, previous: str | None) -> tuple[str, JSON]:
    asked = said[-1].asked
    assert isinstance(asked, str)
    return "", {"prompt": asked, "model": MODEL}


_WRITERS: dict[Wire, Callable[[Sequence[Exchanged], bool, bool, str | None], tuple[str, JSON]]] = {
    "chat": _chat, "messages": _messages, "generate": _generate, "ollama": _ollama, "responses": _responses,
    "interactions": _interactions, "socket": _socket, "engine": _engine, "litellm": _engine, "sdk": _engine,
}  # fmt: skip


def _streamed(stream: bool) -> JSON:
    return {"stream": True} if stream else {}


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


# --- reading ------------------------------------------------------------------------------------------------


def reader(wire: Wire) -> Reader:
    return _READERS[wire]()


def code(data: JSON) -> str:
    """The contract's code in a wire's error."""
    error = data.get("error") or {}
    if not isinstance(error, dict):
        told = str(data.get("code") or error)
        said = str(error)
    else:
        details = error.get("details") or {}
        details = details[0] if isinstance(details, list) and details else details
        named = details.get("error_code") or details.get("reason") if isinstance(details, dict) else None
        told = str(named or error.get("code") or error.get("type") or error)
        said = str(error.get("message"))
    nobody_knows = told == HOST_LOST or any(
        words in said for words in ("may be there or not", "that was accepted there")
    )
    return told + IN_DOUBT * nobody_knows


def _got(text: str, calls: Sequence[Call], answer_id: str | None = None) -> Got:
    # As the model is shown them: texts are stripped one by one (a cut one may end in a blank).
    text = TEXT_JOIN.join(part.strip() for part in text.split(TEXT_JOIN)).strip()
    return Got(Answer(text, tuple(call.token for call in calls)), tuple(calls), answer_id)


class _ChatReader(Reader):
    def __init__(self) -> None:
        self._text = ""
        self._calls: dict[int, list[str]] = {}

    def feed(self, data: JSON) -> None:
        if "error" in data:
            self.error = code(data)
            return
        for choice in data.get("choices", ()):
            delta = choice["delta"] if "delta" in choice else choice["message"]
            self._text += delta.get("content") or ""
            for at, call in enumerate(delta.get("tool_calls") or ()):
                known = self._calls.setdefault(call.get("index", at), ["", ""])
                known[0] = call.get("id") or known[0]
                known[1] += call["function"].get("arguments") or ""
            if choice.get("finish_reason") == "content_filter":
                self.error = REFUSED
            elif choice.get("finish_reason"):
                self.got = _got(self._text, [Call(one, token(json.loads(said))) for one, said in self._calls.values()])


class _ResponsesReader(Reader):
    def __init__(self) -> None:
        self._texts: dict[str, str] = {}  # of each item

    def feed(self, data: JSON) -> None:
        kind = data.get("type")
        if kind == "response.output_text.delta":
            self._texts[data["item_id"]] = self._texts.get(data["item_id"], "") + data["delta"]
        elif kind == "response.completed":
            got = self._whole(data["response"])
            # What was streamed is what the client has shown.
            self.got = _got(TEXT_JOIN.join(self._texts.values()), got.calls, got.id)
        elif kind in ("response.failed", "error"):
            self.error = code(data.get("response", data))
        elif data.get("response", data).get("incomplete_details"):
            self.error = REFUSED
        elif "output" in data:
            self.got = self._whole(data)

    def _whole(self, response: JSON) -> Got:
        said = [part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"]]
        calls = [
            Call(item["call_id"], token(json.loads(item["arguments"])))
            for item in response["output"]
            if item["type"] == "function_call"
        ]
        return _got(TEXT_JOIN.join(said), calls, response["id"])


class _MessagesReader(Reader):
    def __init__(self) -> None:
        self._blocks: dict[int, JSON] = {}
        self._stop_reason = ""

    def feed(self, data: JSON) -> None:
        kind = data.get("type")
        if kind == "error":
            self.error = code(data)
        elif kind == "message":
            self._blocks = dict(enumerate(data["content"]))
            self._finish(data["stop_reason"])
        elif kind == "message_delta":
            self._stop_reason = data["delta"]["stop_reason"]
        elif kind == "content_block_start":
            self._blocks[data["index"]] = {**data["content_block"], "json": ""}
        elif kind == "content_block_delta":
            block, delta = self._blocks[data["index"]], data["delta"]
            if delta["type"] == "text_delta":
                block["text"] += delta["text"]
            elif delta["type"] == "input_json_delta":
                block["json"] += delta["partial_json"]
        elif kind == "message_stop":
            self._finish(self._stop_reason)

    def _finish(self, stop_reason: str) -> None:
        if stop_reason == "refusal":
            self.error = REFUSED
            return
        blocks = self._blocks.values()
        calls = [
            Call(block["id"], token(json.loads(block["json"]) if block.get("json") else block["input"]))
            for block in blocks
            if block["type"] == "tool_use"
        ]
        self.got = _got(TEXT_JOIN.join(block["text"] for block in blocks if block["type"] == "text"), calls)


class _GenerateReader(Reader):
    def __init__(self) -> None:
        self._text = ""
        self._calls: list[Call] = []

    def feed(self, data: JSON) -> None:
        if "error" in data:
            self.error = code(data)
            return
        for candidate in data.get("candidates", ()):
            for part in candidate["content"]["parts"]:
                self._text += part.get("text") or ""
                if (call := part.get("functionCall")) is not None:
                    self._calls.append(Call(call["id"], token(call["args"])))
            if candidate.get("finishReason") == "SAFETY":
                self.error = REFUSED
            elif candidate.get("finishReason"):
                self.got = _got(self._text, self._calls)


class _OllamaReader(Reader):
    def __init__(self) -> None:
        self._text = ""
        self._calls: list[Call] = []

    def feed(self, data: JSON) -> None:
        if "error" in data:
            self.error = code(data)
            return
        message = data["message"]
        self._text += message.get("content") or ""
        for call in message.get("tool_calls") or ():
            self._calls.append(Call(call["id"], token(call["function"]["arguments"])))
        if data.get("done_reason") == "content_filter":
            self.error = REFUSED
        elif data.get("done"):
            self.got = _got(self._text, self._calls)


class _InteractionsReader(Reader):
    def __init__(self) -> None:
        self._texts: dict[int, str] = {}  # of each step

    def feed(self, data: JSON) -> None:
        kind = data.get("event_type")
        if kind == "step.delta" and data["delta"]["type"] == "text":
            self._texts[data["index"]] = self._texts.get(data["index"], "") + data["delta"]["text"]
        elif kind == "error" or (kind is None and "error" in data):
            self.error = code(data)
        elif kind == "interaction.completed":
            self._whole(data["interaction"], streamed=True)
        elif kind is None:
            self._whole(data, streamed=False)

    def _whole(self, interaction: JSON, *, streamed: bool) -> None:
        if interaction["status"] == "incomplete":
            self.error = REFUSED
            return
        if interaction["status"] == "failed":
            self.error = str(interaction["errors"][0]["code"])
            return
        steps = interaction["steps"]
        said = [part["text"] for step in steps if step["type"] == "model_output" for part in step["content"]]
        calls = [Call(step["id"], token(step["arguments"])) for step in steps if step["type"] == "function_call"]
        self.got = _got(TEXT_JOIN.join(self._texts.values() if streamed else said), calls, interaction["id"])


class _EngineReader(Reader):
    """Of what `asking.main` prints."""

    def feed(self, data: JSON) -> None:
        if "error" in data:
            self.error = code(data)
        else:
            self.got = _got(data["text"], [])


_READERS: dict[Wire, type[Reader]] = {
    "chat": _ChatReader, "responses": _ResponsesReader, "messages": _MessagesReader, "generate": _GenerateReader,
    "ollama": _OllamaReader, "interactions": _InteractionsReader, "socket": _ResponsesReader, "engine": _EngineReader,
    "litellm": _EngineReader, "sdk": _EngineReader,
}  # fmt: skip
