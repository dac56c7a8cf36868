"""The routes: read a request, hand it to the engine, answer in the wire's words."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from .answers import JsonAnswer, StreamAnswer
from .dumps import FORMATS
from .dumps.summaries import summary_json
from .errors import InvalidRequest, NotFound, RequestTooLarge
from .gate import headers_of, raw_path
from .models import JSON, Agent
from .protocols import chat
from .protocols.common import decoded_agent_id, model_name, naming, openai_error, parse_body
from .sandbox import LOCAL_OWNER, Sandboxes
from .settings import Settings
from .turns import Engine

MODELS = ("sonnet", "opus", "haiku", "default")
CHAINS = b"/v1/chains/"
# A body is sent by a program on this machine: whoever takes longer is stuck. Seconds for the whole of it.
BODY_TIMEOUT = 300.0
# Above this size a body is parsed beside the event loop: 1 MB of JSON takes about 10 ms.
PARSE_ASIDE = 1024 * 1024


class Routes:
    """The handlers of one app. `add_to` is the table of all that the proxy answers."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings
        self._sandboxes = Sandboxes(settings)
        self._since = int(time.time())

    def add_to(self, app: FastAPI) -> None:
        for method, path, handler in (
            ("POST", "/v1/chat/completions", self.chat_completions),
            ("GET", "/v1/models", self.models),
            ("GET", "/v1/models/{model:path}", self.model),
            ("GET", "/v1/chains", self.chains),
            ("GET", "/v1/chains/{agent_id:path}", self.dump),
            ("DELETE", "/v1/chains/{agent_id:path}", self.delete),
            ("GET", "/healthz", self.healthz),
            ("GET", "/readyz", self.readyz),
        ):
            app.add_api_route(path, handler, methods=[method], response_model=None)
        app.add_exception_handler(HTTPException, no_such_route)

    async def chat_completions(self, request: Request) -> Response:
        call = await self._read(request)
        answer = await self._engine.submit(call.request)
        headers = {"X-Ignored-Params": ", ".join(call.ignored)} if call.ignored else {}
        if not call.stream:
            return JsonAnswer(answer, headers, chat.completion)
        writer = chat.ChunkWriter(answer.turn_id, call.request.model, include_usage=call.include_usage)
        return StreamAnswer(answer, headers, writer, self._settings.keepalive)

    async def _read(self, request: Request) -> chat.ChatCall:
        state = request.scope["state"]
        about = naming(headers_of(request.scope), path_agent=state["agent_id"], request_id=state["request_id"])
        raw = await read_body(request, self._settings.max_body)
        if len(raw) < PARSE_ASIDE:
            return chat.read(parse_body(raw), about)
        return await asyncio.to_thread(lambda: chat.read(parse_body(raw), about))

    # what can be asked for

    async def models(self) -> JSON:
        return {"object": "list", "data": [self._model(name) for name in MODELS]}

    async def model(self, model: str) -> JSON:
        return self._model(model_name(model))

    def _model(self, name: str) -> JSON:
        return {"id": name, "object": "model", "created": self._since, "owned_by": "anthropic"}

    # administration

    async def healthz(self) -> JSON:
        return {"status": "ok"}

    async def readyz(self) -> Response:
        ready = self._engine.ready
        return JSONResponse({"status": "ready" if ready else "draining"}, 200 if ready else 503)

    async def chains(self) -> JSON:
        data = [summary_json(row) async for row in self._engine.store.summaries(LOCAL_OWNER)]
        return {"object": "list", "data": data}

    async def dump(self, request: Request) -> Response:
        name = request.query_params.get("format", "json")
        if name not in FORMATS:
            raise InvalidRequest(f"format must be one of {', '.join(FORMATS)}", param="format")
        agent = await self._agent(request)
        written = FORMATS[name]
        text = written.write(self._engine.store, agent, sandbox=str(self._sandboxes.path(agent.dir)))
        return StreamingResponse(_utf8(text), media_type=written.media_type)

    async def delete(self, request: Request) -> JSON:
        agent_id = _agent_in_path(request)
        if not await self._engine.delete(LOCAL_OWNER, agent_id):
            raise _unknown(agent_id)
        return {"object": "chain.deleted", "agent_id": agent_id, "deleted": True}

    async def _agent(self, request: Request) -> Agent:
        agent_id = _agent_in_path(request)
        agent = await self._engine.store.agent(LOCAL_OWNER, agent_id)
        if agent is None:
            raise _unknown(agent_id)
        return agent


def _agent_in_path(request: Request) -> str:
    return decoded_agent_id(raw_path(request.scope).removeprefix(CHAINS))


def _unknown(agent_id: str) -> NotFound:
    return NotFound(f"there is no agent {agent_id!r}: GET /v1/chains lists those there are", param="agent_id")


async def _utf8(texts: AsyncIterator[str]) -> AsyncIterator[bytes]:
    async for text in texts:
        # A model's half surrogate cannot be sent as UTF-8: it is shown as "?", the store keeps it.
        yield text.encode("utf-8", "replace")


async def read_body(request: Request, limit: int) -> bytes:
    """The body, at most `limit` bytes. Raises `RequestTooLarge`, before reading where the length is declared."""
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:18]) > limit:
        raise _too_large(limit)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    raise _too_large(limit)
    except TimeoutError as exc:
        raise InvalidRequest(f"the body did not arrive within {BODY_TIMEOUT:.0f} s: send it again") from exc
    except ClientDisconnect as exc:
        raise InvalidRequest("the client left before its body had arrived") from exc
    return bytes(body)


def _too_large(limit: int) -> RequestTooLarge:
    return RequestTooLarge(f"the body is over {limit} bytes: send less, or raise max_body in the settings")


async def no_such_route(request: Request, exc: Exception) -> Response:
    """404 and 405 in the error shape of the rest."""
    status = exc.status_code if isinstance(exc, HTTPException) else 404
    headers = exc.headers if isinstance(exc, HTTPException) else None
    path, method = request.url.path, request.method
    if status == 405:
        allowed = dict(headers or {}).get("Allow", "")
        message, code = f"{path} does not take {method}: use {allowed or 'another method'}", "method_not_allowed"
    elif status == 404:
        message, code = f"{method} {path} does not exist: try POST /v1/chat/completions or GET /v1/models", "not_found"
    else:
        message, code = "the request cannot be served", "invalid_request"
    return JSONResponse(openai_error(status, code, message), status, headers=headers)
