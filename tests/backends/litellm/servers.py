"""Scripted providers of two more wires on loopback, OpenAI's chat and Gemini's generateContent, as strict as the real.

They judge what they are sent before they answer: roles, ids, the pairing of calls and results, images, no thinking of
others. What they would not take is a 400, and kept in `refused`.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from cli_session_proxy.http.listening import Listening
from cli_session_proxy.settings import NEUTRAL_SYSTEM_PROMPT

JSON = dict[str, Any]

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
CALL_ID = re.compile(r"[a-zA-Z0-9_-]{1,40}")
OPENAI_FIELDS = {
    "model", "messages", "stream", "stream_options", "tools", "tool_choice", "parallel_tool_calls", "temperature",
    "top_p", "max_tokens", "max_completion_tokens", "seed", "stop", "reasoning_effort",
}  # fmt: skip


class Refused(Exception):
    """What the provider would answer with a 400."""


@dataclass
class Reply:
    """One answer. `calls` are (id, name, arguments); `hold`: the rest waits for it after the first word. `cut`: the
    connection ends in the middle."""

    text: str = ""
    calls: list[tuple[str | None, str, JSON | str]] = field(default_factory=list)
    thinking: str = ""
    finish: str = "stop"
    hold: asyncio.Event | None = None
    cut: bool = False
    usage: tuple[int, int, int] = (100, 10, 0)  # of the prompt, of the answer, of the prompt from the cache
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    error: str = "scripted failure"


class Provider:
    """Both wires at one port. `openai` and `gemini` are what reached either, in order."""

    def __init__(self) -> None:
        self.openai: list[JSON] = []
        self.gemini: list[JSON] = []
        self.keys: list[str | None] = []
        self.refused: list[str] = []
        self.queue: deque[Reply] = deque()
        self.left = asyncio.Event()  # a client went away in the middle
        self.reached = asyncio.Event()
        self.port = 0

    @property
    def openai_base(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def gemini_base(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1beta"

    def next(self, *replies: Reply) -> None:
        self.queue.extend(replies)

    async def __aenter__(self) -> Self:
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        app = Starlette(
            routes=[
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1beta/models/{model}:{verb}", self._generate, methods=["POST"]),
            ]
        )
        config = uvicorn.Config(
            app, lifespan="off", ws="none", log_config=None, access_log=False, timeout_graceful_shutdown=1
        )
        self._server = Listening(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))
        await self._server.ready.wait()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.should_exit = True
        await self._task

    async def _answer(
        self,
        request: Request,
        seen: list[JSON],
        judge: Callable[[JSON], None],
        write: Callable[[Reply], Iterator[JSON]],
        key: str | None,
    ) -> Response:
        body = json.loads(await request.body())
        seen.append(body)
        self.keys.append(key)
        self.reached.set()
        try:
            judge(body)
        except Refused as exc:
            self.refused.append(str(exc))
            return JSONResponse({"error": {"message": str(exc), "code": 400, "status": "INVALID_ARGUMENT"}}, 400)
        reply = self.queue.popleft() if self.queue else Reply(f"answer {len(seen)}")
        if reply.status != 200:
            error = {"message": reply.error, "type": "scripted", "code": reply.status, "status": "UNAVAILABLE"}
            return JSONResponse({"error": error}, reply.status, reply.headers)
        return StreamingResponse(self._stream(reply, write(reply)), media_type="text/event-stream")

    async def _stream(self, reply: Reply, chunks: Iterator[JSON]) -> AsyncIterator[bytes]:
        try:
            for number, chunk in enumerate(chunks):
                yield b"data: " + json.dumps(chunk).encode() + b"\n\n"
                if number == 1 and reply.hold is not None:
                    await reply.hold.wait()
                if number == 1 and reply.cut:
                    raise ConnectionError("scripted cut")
        except asyncio.CancelledError:
            self.left.set()
            raise

    # --- OpenAI's chat

    async def _chat(self, request: Request) -> Response:
        key = request.headers.get("authorization", "").removeprefix("Bearer ") or None
        return await self._answer(request, self.openai, judged_chat, chat_chunks, key)

    # --- Gemini's generateContent

    async def _generate(self, request: Request) -> Response:
        assert request.path_params["verb"] == "streamGenerateContent"
        key = request.headers.get("x-goog-api-key") or request.query_params.get("key")
        return await self._answer(request, self.gemini, judged_generate, gemini_chunks, key)


# --- OpenAI -----------------------------------------------------------------------------------------------


def chat_chunks(reply: Reply) -> Iterator[JSON]:
    base = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "gpt-scripted-1"}

    def chunk(delta: JSON, finish: str | None = None) -> JSON:
        return {**base, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}

    yield chunk({"role": "assistant", "content": ""})
    if reply.thinking:
        yield chunk({"reasoning_content": reply.thinking})
    for word in re.findall(r"\S+\s*", reply.text):
        yield chunk({"content": word})
    for index, (call, name, arguments) in enumerate(reply.calls):
        said = arguments if isinstance(arguments, str) else json.dumps(arguments)
        head = {"name": name, "arguments": ""}
        yield chunk({"tool_calls": [{"index": index, "id": call, "type": "function", "function": head}]})
        for part in (said[: len(said) // 2], said[len(said) // 2 :]):
            yield chunk({"tool_calls": [{"index": index, "function": {"arguments": part}}]})
    yield chunk({}, "tool_calls" if reply.calls and reply.finish == "stop" else reply.finish)
    prompt, said_tokens, cached = reply.usage
    usage = {
        "prompt_tokens": prompt, "completion_tokens": said_tokens, "total_tokens": prompt + said_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }  # fmt: skip
    yield {**base, "choices": [], "usage": usage}


def judged_chat(body: JSON) -> None:
    """Raises `Refused`."""
    if unknown := body.keys() - OPENAI_FIELDS:
        raise Refused(f"Unrecognized request arguments: {sorted(unknown)}")
    no_thinking(body)
    for tool in body.get("tools", ()):
        if not NAME.fullmatch(tool["function"]["name"]) or tool["function"]["parameters"].get("type") != "object":
            raise Refused(f"Invalid tool: {tool}")
    messages = body["messages"]
    used: set[str] = set()
    waiting: list[str] = []
    before = None
    for at, message in enumerate(messages):
        role = message["role"]
        if role == "tool":
            if message["tool_call_id"] not in waiting:
                raise Refused(f"messages[{at}]: a tool message must follow the call {message['tool_call_id']}")
            waiting.remove(message["tool_call_id"])
            if not isinstance(message["content"], str) or not message["content"]:
                raise Refused(f"messages[{at}].content: a tool's content is text")
            before = role
            continue
        if waiting:
            raise Refused(f"messages[{at}]: tool_call_ids did not have response messages: {waiting}")
        if role == "system":
            if at:
                raise Refused(f"messages[{at}]: a system message stands first")
        elif role == "user":
            judged_parts(message["content"], at)
        elif role == "assistant":
            if before in (None, "system", "assistant"):
                raise Refused(f"messages[{at}]: an answer to nothing")
            waiting = judged_calls(message, used, at)
        else:
            raise Refused(f"messages[{at}].role: {role}")
        before = role
    if waiting or before not in ("user", "tool"):
        raise Refused("the last message must be the user's or a tool's")


def judged_parts(content: Any, at: int) -> None:
    parts: list[JSON] = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not parts:
        raise Refused(f"messages[{at}].content is empty")
    for part in parts:
        if part["type"] == "text" and part["text"]:
            continue
        if part["type"] == "image_url" and set(part) == {"type", "image_url"}:
            judged_data(part["image_url"]["url"].partition(";base64,")[2])
        elif part["type"] == "file" and part["file"]["file_data"].startswith("data:application/pdf;base64,"):
            judged_data(part["file"]["file_data"].partition(";base64,")[2])
        else:
            raise Refused(f"messages[{at}].content: {part}")


def judged_calls(message: JSON, used: set[str], at: int) -> list[str]:
    calls = message.get("tool_calls") or []
    if not calls and not (isinstance(message["content"], str) and message["content"]):
        raise Refused(f"messages[{at}]: an answer without content")
    for call in calls:
        if not CALL_ID.fullmatch(call["id"]) or call["id"] in used:
            raise Refused(f"messages[{at}].tool_calls: the id {call['id']!r} is not valid, or used twice")
        used.add(call["id"])
        if not NAME.fullmatch(call["function"]["name"]):
            raise Refused(f"messages[{at}].tool_calls: the name {call['function']['name']!r}")
        if not isinstance(json.loads(call["function"]["arguments"]), dict):
            raise Refused(f"messages[{at}].tool_calls: arguments are an object")
    return [call["id"] for call in calls]


# --- Gemini -----------------------------------------------------------------------------------------------


def gemini_chunks(reply: Reply) -> Iterator[JSON]:
    def chunk(parts: list[JSON], finish: str | None = None) -> JSON:
        end = {"finishReason": finish} if finish else {}
        return {
            "candidates": [{"content": {"role": "model", "parts": parts}, "index": 0, **end}],
            "modelVersion": "gemini-s",
        }

    if reply.thinking:
        yield chunk([{"text": reply.thinking, "thought": True}])
    for word in re.findall(r"\S+\s*", reply.text):
        yield chunk([{"text": word}])
    for _, name, arguments in reply.calls:
        yield chunk([{"functionCall": {"name": name, "args": arguments}}])
    prompt, said, cached = reply.usage
    finish = {"stop": "STOP", "length": "MAX_TOKENS"}[reply.finish]
    usage = {
        "promptTokenCount": prompt, "candidatesTokenCount": said, "totalTokenCount": prompt + said,
        "cachedContentTokenCount": cached,
    }  # fmt: skip
    yield {**chunk([{"text": ""}], finish), "usageMetadata": usage}


def judged_generate(body: JSON) -> None:
    """Raises `Refused`."""
    no_thinking(body.get("contents"))
    before: str | None = None
    open_calls: list[str] = []
    answered = False  # nothing but results: what the user says may follow by itself
    for at, content in enumerate(body["contents"]):
        role, parts = content["role"], content["parts"]
        twice = role == before and not (role == "user" and answered)
        if role not in ("user", "model") or twice or (before is None and role != "user") or not parts:
            raise Refused(f"contents[{at}]: roles must alternate between user and model, from the user on: {role}")
        results = [part for part in parts if "function_response" in part or "functionResponse" in part]
        answered = len(results) == len(parts)
        told = [(part.get("function_response") or part.get("functionResponse"))["name"] for part in results]
        if sorted(told) != sorted(open_calls):
            raise Refused(
                f"contents[{at}]: the number of function response parts must equal the function call parts of the turn "
                f"before: {told} for {open_calls}"
            )
        calls = [part.get("function_call") or part.get("functionCall") for part in parts]
        open_calls = [call["name"] for call in calls if call]
        if open_calls and role != "model":
            raise Refused(f"contents[{at}]: a function call of the user's")
        for part in parts:
            data = part.get("inline_data") or part.get("inlineData")
            if data:
                judged_data(data["data"])
            if "text" in part and not part["text"]:
                raise Refused(f"contents[{at}]: a part without text")
        before = role
    if open_calls or before != "user":
        raise Refused("the last content must be the user's")


def judged_data(data: str) -> None:
    try:
        if not base64.b64decode(data, validate=True):
            raise Refused("an empty image")
    except ValueError as exc:
        raise Refused("an image that is none") from exc


def no_thinking(value: Any) -> None:
    """No field of anybody's thinking, wherever it stands."""
    if isinstance(value, dict):
        if bad := value.keys() & {"thinking", "signature", "reasoning_content", "thinking_blocks", "thought"}:
            raise Refused(f"thinking of another provider: {sorted(bad)}")
        for one in value.values():
            no_thinking(one)
    elif isinstance(value, list):
        for one in value:
            no_thinking(one)


# --- what tests read --------------------------------------------------------------------------------------


def texts(body: JSON) -> list[tuple[str, str]]:
    """(role, text) of a request of either wire, in order; calls and results by their names and words."""
    out: list[tuple[str, str]] = []
    for message in body.get("messages") or ():
        content = message.get("content") or ""
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        for part in parts:
            said = part.get("text") if part["type"] == "text" else f"<{part['type']}>"
            out += [(message["role"], said)] if said else []
        for call in message.get("tool_calls") or ():
            out.append(("call", f"{call['function']['name']} {call['function']['arguments']}"))
    for content in body.get("contents") or ():
        for part in content["parts"]:
            if part.get("text") == NEUTRAL_SYSTEM_PROMPT:  # to a model that it does not know LiteLLM says it as a user
                continue
            call = part.get("function_call") or part.get("functionCall")
            result = part.get("function_response") or part.get("functionResponse")
            if call:
                out.append(("call", f"{call['name']} {json.dumps(call['args'])}"))
            elif result:
                out.append(("tool", json.dumps(result["response"])))
            else:
                role = "assistant" if content["role"] == "model" else "user"
                out.append((role, part.get("text") or "<image_url>"))
    return out
