"""Clients over the wires' own HTTP, as programs that can be told to leave, to read slowly and to come again.

They are not the vendors' SDKs, because those hide where an answer was cut; the bodies and the finish events are theirs.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol
from urllib.parse import quote

import httpx

from cli_session_proxy.domain.lineage import TEXT_JOIN

from .checker import NOT_JSON
from .journal import JSON, Answer, Asking, Entry, Heard, Result, Said, Sent
from .model import TOOL
from .reading import TOKEN

Wire = Literal["chat", "responses", "messages"]
# How a client says whose conversation it is: the agent's name in a header and only what is new, its whole history
# without a name, both, or the id of the answer that it continues.
Naming = Literal["name", "history", "both", "ids"]
# How the same request comes again: under its key, with the SDKs' retry count, or as it is.
Again = Literal["key", "count", "plain"]

MODEL = "sonnet"
SCHEMA = {"type": "object", "properties": {TOKEN: {"type": "string"}}, "required": [TOKEN]}
DESCRIPTION = "Looks something up."
# Behind the code of an error that does not tell whether the turn was kept: the store was lost as it was written, or the
# load balancer, or a proxy that passed it on, lost the host that had been given the request.
IN_DOUBT = ", in doubt"
HOST_LOST = "host_lost"
# The code of an answer that the model refused to give: for its client the turn is none.
REFUSED = "refused"
# A slow reader's buffer, so that it is the proxy that waits and not the kernel.
SMALL_BUFFER = 16 * 1024
# How much of its answer a slow reader reads before it stops.
FIRST_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Speaker:
    """An agent as its client speaks of it. `front`: through the load balancer, wherever that sends it."""

    name: str
    naming: Naming
    wire: Wire
    stream: bool
    tools: bool = False
    front: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    id: str
    token: str


@dataclass(frozen=True, slots=True)
class Got:
    """What a client read to its end."""

    answer: Answer
    calls: tuple[Call, ...] = ()
    response_id: str | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """A turn's request as it is sent, and sent again."""

    turn: int
    asked: Asking
    route: str
    body: JSON
    headers: Mapping[str, str]
    path: tuple[Said, ...] | None
    parent: int | None


@dataclass(slots=True)
class Known:
    """A turn that was acknowledged."""

    request: Request
    got: Got


class Reader(Protocol):
    """Reads one wire's stream. `got` is there at the finish event, `error` at an event that is one."""

    got: Got | None
    error: str | None

    def feed(self, data: JSON) -> None: ...


class Client:
    """One agent's client: what it has read so far, and the next request made of that."""

    def __init__(self, speaker: Speaker) -> None:
        self.speaker = speaker
        self.known: dict[int, Known] = {}
        self.requests: dict[int, Request] = {}
        self.tip: int | None = None
        self.gave_up: set[int] = set()  # turns whose calls the proxy says are not open any more

    def next(self, turn: int, *, text: str, keyed: bool, back: int = 0) -> Request:
        """The request for a new turn: the results of the calls that wait, or a prompt. `back`: so many turns earlier
        than the last one that is known."""
        parent = self.tip
        for _ in range(back):
            if parent is not None and self.known[parent].request.parent is not None:
                parent = self.known[parent].request.parent
        calls = self.known[parent].got.calls if parent is not None and parent not in self.gave_up else ()
        asked: Asking = text
        if calls:
            asked = tuple(Result(call.token, f"result of {call.token}: {text}") for call in calls)
        named = self.speaker.naming in ("name", "both")
        explicit = self.speaker.naming != "name"
        path = tuple(Said(number, self.known[number].got.answer) for number in self._above(parent))
        headers = {"X-Agent-Id": quote(self.speaker.name)} if named else {}
        if keyed:
            headers["Idempotency-Key"] = f"key-{turn}"
        route, body = self._body(parent, asked, calls)
        request = Request(turn, asked, route, body, headers, path if explicit else None, parent)
        self.requests[turn] = request
        return request

    def acknowledged(self, turn: int, got: Got) -> None:
        """Its answer is known; the conversation goes on from it, unless an older one came late."""
        if turn not in self.known:
            self.known[turn] = Known(self.requests[turn], got)
            self.tip = max(turn, self.tip or turn)

    def _above(self, turn: int | None) -> list[int]:
        path: list[int] = []
        while turn is not None:
            path.insert(0, turn)
            turn = self.known[turn].request.parent
        return path

    def _body(self, parent: int | None, asked: Asking, calls: tuple[Call, ...]) -> tuple[str, JSON]:
        before = [] if self.speaker.naming in ("name", "ids") else self._above(parent)
        body: JSON = {"model": MODEL}
        if self.speaker.stream:
            body["stream"] = True
        if self.speaker.wire == "responses":
            body["input"] = _items(asked, calls)
            if self.speaker.naming == "ids" and parent is not None:
                body["previous_response_id"] = self.known[parent].got.response_id
            if self.speaker.tools:
                tool = {"type": "function", "name": TOOL, "description": DESCRIPTION, "parameters": SCHEMA}
                body["tools"] = [{**tool, "strict": False}]
            return "/v1/responses", body
        say = _chat if self.speaker.wire == "chat" else _messages
        answered = _chat_answer if self.speaker.wire == "chat" else _messages_answer
        messages: list[JSON] = []
        for number in before:
            known = self.known[number]
            above = known.request.parent
            messages += say(known.request.asked, self.known[above].got.calls if above is not None else ())
            messages.append(answered(known.got))
        body["messages"] = messages + say(asked, calls)
        if self.speaker.wire == "chat":
            if self.speaker.tools:
                function = {"name": TOOL, "description": DESCRIPTION, "parameters": SCHEMA}
                body["tools"] = [{"type": "function", "function": function}]
            return "/v1/chat/completions", body
        body["max_tokens"] = 4096
        if self.speaker.tools:
            body["tools"] = [{"name": TOOL, "description": DESCRIPTION, "input_schema": SCHEMA}]
        return "/v1/messages", body

    def reader(self) -> Reader:
        readers: dict[Wire, type[Reader]] = {
            "chat": _ChatReader,
            "responses": _ResponsesReader,
            "messages": _MessagesReader,
        }
        return readers[self.speaker.wire]()


# --- what the wires look like -------------------------------------------------------------------------------


def _chat(asked: Asking, calls: tuple[Call, ...]) -> list[JSON]:
    if isinstance(asked, str):
        return [{"role": "user", "content": asked}]
    ids = {call.token: call.id for call in calls}
    return [{"role": "tool", "tool_call_id": ids[result.call], "content": result.text} for result in asked]


def _chat_answer(got: Got) -> JSON:
    message: JSON = {"role": "assistant", "content": got.answer.text}
    if got.calls:
        functions = [{"name": TOOL, "arguments": json.dumps({TOKEN: call.token})} for call in got.calls]
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": function}
            for call, function in zip(got.calls, functions, strict=True)
        ]
    return message


def _messages(asked: Asking, calls: tuple[Call, ...]) -> list[JSON]:
    if isinstance(asked, str):
        return [{"role": "user", "content": asked}]
    ids = {call.token: call.id for call in calls}
    content = [{"type": "tool_result", "tool_use_id": ids[result.call], "content": result.text} for result in asked]
    return [{"role": "user", "content": content}]


def _messages_answer(got: Got) -> JSON:
    content: list[JSON] = [{"type": "text", "text": got.answer.text}] if got.answer.text else []
    content += [{"type": "tool_use", "id": one.id, "name": TOOL, "input": {TOKEN: one.token}} for one in got.calls]
    return {"role": "assistant", "content": content}


def _items(asked: Asking, calls: tuple[Call, ...]) -> str | list[JSON]:
    if isinstance(asked, str):
        return asked
    ids = {call.token: call.id for call in calls}
    return [{"type": "function_call_output", "call_id": ids[result.call], "output": result.text} for result in asked]


def _got(text: str, calls: list[Call], response_id: str | None = None) -> Got:
    # As the model is shown them: texts are stripped one by one (a cut one may end in a blank).
    text = TEXT_JOIN.join(part.strip() for part in text.split(TEXT_JOIN)).strip()
    return Got(Answer(text, tuple(call.token for call in calls)), tuple(calls), response_id)


def _token(arguments: str) -> str:
    return str(json.loads(arguments).get(TOKEN))


class _ChatReader:
    def __init__(self) -> None:
        self.got: Got | None = None
        self.error: str | None = None
        self._text = ""
        self._calls: dict[int, list[str]] = {}

    def feed(self, data: JSON) -> None:
        if "error" in data:
            self.error = _code(data)
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
                self.got = _got(self._text, [Call(one, _token(said)) for one, said in self._calls.values()])


class _ResponsesReader:
    def __init__(self) -> None:
        self.got: Got | None = None
        self.error: str | None = None
        self._texts: dict[str, str] = {}  # of each item

    def feed(self, data: JSON) -> None:
        kind = data.get("type")
        if kind == "response.output_text.delta":
            self._texts[data["item_id"]] = self._texts.get(data["item_id"], "") + data["delta"]
        elif kind == "response.completed":
            got = self._whole(data["response"])
            # What was streamed is what the client has shown.
            self.got = _got(TEXT_JOIN.join(self._texts.values()), list(got.calls), got.response_id)
        elif kind in ("response.failed", "error"):
            self.error = _code(data.get("response", data))
        elif data.get("response", data).get("incomplete_details"):
            self.error = REFUSED
        elif "output" in data:
            self.got = self._whole(data)

    def _whole(self, response: JSON) -> Got:
        said = [part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"]]
        calls = [
            Call(item["call_id"], _token(item["arguments"]))
            for item in response["output"]
            if item["type"] == "function_call"
        ]
        return _got(TEXT_JOIN.join(said), calls, response["id"])


class _MessagesReader:
    def __init__(self) -> None:
        self.got: Got | None = None
        self.error: str | None = None
        self._blocks: dict[int, JSON] = {}
        self._stop_reason = ""

    def feed(self, data: JSON) -> None:
        kind = data.get("type")
        if kind == "error":
            self.error = _code(data)
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
            Call(block["id"], _token(block["json"]) if block.get("json") else str(block["input"].get(TOKEN)))
            for block in blocks
            if block["type"] == "tool_use"
        ]
        self.got = _got(TEXT_JOIN.join(block["text"] for block in blocks if block["type"] == "text"), calls)


def _code(data: JSON) -> str:
    """The contract's code in a wire's error."""
    error = data.get("error") or {}
    if not isinstance(error, dict):
        return str(error)
    code = str((error.get("details") or {}).get("error_code") or error.get("code") or error.get("type") or error)
    said = str(error.get("message"))
    nobody_knows = code == HOST_LOST or any(words in said for words in ("may be there or not", "where it was accepted"))
    return code + IN_DOUBT * nobody_knows


# --- an attempt ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Attempt:
    """One request under way: `task` ends when it is over; `leave` is the client's going."""

    number: int
    request: Request
    proxy: int
    begun: float
    task: asyncio.Task[Heard]
    headers: dict[str, str] = field(default_factory=dict)
    reading_on: asyncio.Event = field(default_factory=asyncio.Event)
    read: asyncio.Event = field(default_factory=asyncio.Event)  # a slow reader has stopped, or all is over
    got: Got | None = None

    def leave(self) -> None:
        self.task.cancel()


class Caller:
    """Sends attempts, each with these `headers`, and notes what their clients know."""

    def __init__(self, note: Callable[[Entry], None], headers: Mapping[str, str]) -> None:
        self._note = note
        self._headers = headers
        self._count = 0
        limits = httpx.Limits(max_keepalive_connections=0)
        self._http = httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(verify=False, limits=limits), timeout=None)
        small = [(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)]
        slow = httpx.AsyncHTTPTransport(verify=False, limits=limits, socket_options=small)
        self._slow = httpx.AsyncClient(transport=slow, timeout=None)

    async def close(self) -> None:
        await self._http.aclose()
        await self._slow.aclose()

    def send(
        self, client: Client, request: Request, url: str, proxy: int, *, again: Again | None = None, slow: bool = False,
        anew: bool = False,
    ) -> Attempt:  # fmt: skip
        self._count += 1
        headers = {**self._headers, **request.headers}
        if again == "count":
            headers["x-stainless-retry-count"] = "1"
        now = time.monotonic()
        self._note(Sent(now, self._count, request.turn, client.speaker.name, request.asked, request.path, anew))
        attempt = Attempt(self._count, request, proxy, now, None)  # type: ignore[arg-type]
        attempt.task = asyncio.create_task(self._run(attempt, client, url + request.route, headers, slow))
        return attempt

    async def _run(self, attempt: Attempt, client: Client, url: str, headers: dict[str, str], slow: bool) -> Heard:
        reader = client.reader()
        if not slow:
            attempt.reading_on.set()
        try:
            await self._exchange(attempt, reader, url, headers, self._slow if slow else self._http)
        except asyncio.CancelledError:
            pass  # the client left: what it had read by then counts
        except httpx.ConnectError as exc:
            reader.error = reader.error or f"refused: {exc}"
        except httpx.HTTPError:
            pass
        finally:
            attempt.read.set()
        now = time.monotonic()
        if reader.got is not None:
            attempt.got = reader.got
            heard = Heard(now, attempt.number, "acknowledged", reader.got.answer)
            client.acknowledged(attempt.request.turn, reader.got)
        elif reader.error is not None and not reader.error.endswith(IN_DOUBT):
            heard = Heard(now, attempt.number, "failed", code=reader.error)
        else:
            heard = Heard(now, attempt.number, "unknown", code=reader.error or "")
        self._note(heard)
        return heard

    async def _exchange(
        self, attempt: Attempt, reader: Reader, url: str, headers: dict[str, str], http: httpx.AsyncClient
    ) -> None:
        async with http.stream("POST", url, json=attempt.request.body, headers=headers) as response:
            attempt.headers = dict(response.headers)
            if not response.headers["content-type"].startswith("text/event-stream"):
                content = await response.aread()
                try:
                    body = json.loads(content)
                except ValueError:
                    reader.error = f"{response.status_code} {NOT_JSON}: {content[:100]!r}"
                    return
                if response.status_code >= 400:
                    reader.error = f"{response.status_code} {_code(body)}"
                else:
                    reader.feed(body)
                return
            size = 0
            async for line in response.aiter_lines():
                size += len(line)
                if size > FIRST_BYTES and not attempt.reading_on.is_set():
                    attempt.read.set()
                    await attempt.reading_on.wait()
                if line.startswith("data: ") and line != "data: [DONE]":
                    reader.feed(json.loads(line.removeprefix("data: ")))
                if reader.got is not None or reader.error is not None:
                    return
