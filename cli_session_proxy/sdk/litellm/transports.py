"""Answers a call with the engine in this process, or with a running `serve` (`api_base`), on the runtime's loop.

In this process the turn is acknowledged when the caller asks for an item after the last one, because then it has
received the last one. If the caller closes the generator earlier, the turn counts as left by its client. With a `serve`
that closes the connection, which is how `serve` knows.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httpx

from ...domain import limits
from ...domain.models import JSON, Started
from ...errors import (
    ClaudeUnavailable,
    InvalidRequest,
    ProxyError,
    RateLimited,
    RequestTooLarge,
    Unauthorized,
    UpstreamError,
    from_dict,
)
from ...wires import common
from ...wires.chat import body as chat
from ...wires.streams import SSE_DONE
from ..runtime import Runtime
from .call import ChatReply, Deadline, Identity, ProviderCall

if TYPE_CHECKING:
    from ...engine.engine import Answer


# Seconds. The engine ends a turn at its timeout and says why; this is for waits that it cannot end, as for the queue.
ENGINE_SLACK = 0.5


async def complete_here(runtime: Runtime, call: ProviderCall) -> AsyncGenerator[ChatReply, None]:
    """Yields one item, the completion. Raises `ProxyError`."""
    deadline = Deadline(call.timeout, slack=ENGINE_SLACK)
    _, answer = await _submit(runtime, call, deadline)
    try:
        turn = await deadline.wait(answer.turn())
        yield ChatReply(chat.completion(turn), Identity(answer.agent_id, turn.id, turn.session_id, turn.continuity))
        answer.acknowledge()
    finally:
        answer.leave()


async def stream_here(runtime: Runtime, call: ProviderCall) -> AsyncGenerator[ChatReply, None]:
    """Yields the chunks that our endpoint would stream. Raises `ProxyError`."""
    deadline = Deadline(call.timeout, slack=ENGINE_SLACK)
    chat_call, answer = await _submit(runtime, call, deadline)
    identity = Identity(answer.agent_id, answer.turn_id)
    writer = chat.writer(chat_call, answer.turn_id)
    events = aiter(answer.events())
    try:
        while (event := await deadline.wait(anext(events, None))) is not None:
            if isinstance(event, Started):
                identity = Identity(event.agent_id, event.turn_id, event.session_id, event.continuity)
            for data in writer.feed(event):
                if data != SSE_DONE:
                    yield ChatReply(json.loads(data.removeprefix(b"data: ")), identity)
        answer.acknowledge()
    finally:
        if isinstance(events, AsyncGenerator):
            await events.aclose()
        answer.leave()


def read_chat(call: ProviderCall, most: int) -> chat.ChatCall:
    """Read the call as the chat wire does. `most`: its most characters. Raises `InvalidRequest`, `RequestTooLarge`."""
    naming = common.naming(call.headers, path_agent=None, request_id=call.headers.get("x-request-id"))
    if limits.is_deeper(call.body):
        raise InvalidRequest(f"the request is nested deeper than {limits.DEPTH} levels: send it flatter")
    if limits.holds_more(call.body, limits.VALUES):
        raise InvalidRequest(f"the request has more than {limits.VALUES:,} values: send less")
    if limits.characters(call.body) > most:
        raise RequestTooLarge(f"the request is over {most} characters: send less, or raise max_body in the settings")
    chat_call = chat.read(call.body, naming)
    return replace(chat_call, request=replace(chat_call.request, timeout=call.timeout))


async def _submit(runtime: Runtime, call: ProviderCall, deadline: Deadline) -> tuple[chat.ChatCall, Answer]:
    engine = await deadline.wait(runtime.engine())
    read_call = await deadline.wait(asyncio.to_thread(read_chat, call, engine.settings.max_body))
    # If the caller leaves meanwhile, the engine handles the turn.
    return read_call, await deadline.wait(engine.submit(read_call.request))


# --- with a running `serve`

# For an answer without one of our codes: another server, or a proxy in between.
_BY_STATUS: dict[int, type[ProxyError]] = {400: InvalidRequest, 401: Unauthorized, 403: Unauthorized, 429: RateLimited}


async def complete_there(runtime: Runtime, call: ProviderCall) -> AsyncGenerator[ChatReply, None]:
    """One item: the completion. Raises `ProxyError`."""
    deadline = Deadline(call.timeout)
    async with _opened(runtime, call, deadline) as response:
        body = await _reached(call, deadline, response.aread())
        yield ChatReply(_object(body, call), Identity.from_headers(response.headers))


async def stream_there(runtime: Runtime, call: ProviderCall) -> AsyncGenerator[ChatReply, None]:
    """The chunks of the stream. Raises `ProxyError`, also for a stream that ends without `[DONE]`."""
    deadline = Deadline(call.timeout)
    async with _opened(runtime, call, deadline) as response:
        identity = Identity.from_headers(response.headers)
        lines = response.aiter_lines()
        while (line := await _reached(call, deadline, anext(lines, None))) is not None:
            data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
            if data == "[DONE]":
                return
            if not data:
                continue
            chunk = _object(data.encode(), call)
            if "error" in chunk:
                raise _error(500, chunk["error"], {})
            yield ChatReply(chunk, identity)
    raise UpstreamError(f"the stream of {call.api_base} was cut before its end: make the call again")


@asynccontextmanager
async def _opened(runtime: Runtime, call: ProviderCall, deadline: Deadline) -> AsyncIterator[httpx.Response]:
    headers = dict(call.headers)
    if call.api_key:
        headers["authorization"] = f"Bearer {call.api_key}"
    client = runtime.client()
    try:
        base = (call.api_base or "").rstrip("/").removesuffix("/chat/completions")
        url = f"{base}/chat/completions" if base.endswith("/v1") else f"{base}/v1/chat/completions"
        request = client.build_request("POST", url, json=call.body, headers=headers)
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as exc:
        raise InvalidRequest(f"api_base {call.api_base!r} is no URL: {exc}", param="api_base") from exc
    response = await _reached(call, deadline, client.send(request, stream=True))
    try:
        if response.is_error:
            body = await _reached(call, deadline, response.aread())
            try:
                data = json.loads(body)
            except ValueError:  # a page of some server in between; its status says enough
                data = None
            error = data.get("error") if isinstance(data, dict) else None
            raise _error(response.status_code, error, response.headers)
        yield response
    finally:
        await response.aclose()


async def _reached(call: ProviderCall, deadline: Deadline, work: Any) -> Any:
    """The result of `work` within the deadline. Raises `ProxyError`, also for errors of the connection."""
    try:
        return await deadline.wait(work)
    except httpx.ConnectError as exc:
        raise ClaudeUnavailable(
            f"nothing answers at {call.api_base}: start `serve` there, or correct api_base"
        ) from exc
    except httpx.UnsupportedProtocol as exc:
        raise InvalidRequest(f"api_base {call.api_base!r} is no http URL", param="api_base") from exc
    except httpx.HTTPError as exc:
        raise UpstreamError(f"the connection to {call.api_base} failed: {type(exc).__name__}") from exc


def _object(body: bytes, call: ProviderCall) -> JSON:
    try:
        data = json.loads(body)
    except ValueError as exc:
        raise UpstreamError(f"{call.api_base} answered something that is no JSON: is it a `serve`?") from exc
    if not isinstance(data, dict):
        raise UpstreamError(f"{call.api_base} answered JSON that is no chat object: is it a `serve`?")
    return data


def _error(status: int, error: Any, headers: httpx.Headers | dict[str, str]) -> ProxyError:
    """The error that `serve` raised, made again from its answer."""
    fields = error if isinstance(error, dict) else {}
    wait = headers.get("retry-after") or ""
    data = {
        "code": fields.get("code"),
        "message": fields.get("message") or f"HTTP status {status}",
        "param": fields.get("param"),
        "retry_after": float(wait) if wait.isascii() and wait.strip().isdigit() else None,
    }
    known = from_dict(data)
    if known.code == data["code"]:
        return known
    return _BY_STATUS.get(status, UpstreamError)(known.message, param=known.param, retry_after=known.retry_after)
