"""Responses over a WebSocket: each message of the client is a request, and each event of its answer is a message.

    {"type": "response.create", …the body of POST /v1/responses} ─ read() ─▶ dialogues ─▶ the engine ─▶ ResponsesWriter

Requests of one connection are answered one after the other. A connection keeps two things: the ids of its responses
with `store: false`, which it may continue; and the body of a request with `generate: false`. That one is deferred: the
model is not asked until the next request continues it.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections import deque
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from ... import logs
from ...domain.models import JSON, Finished, Turn
from ...engine.engine import Engine
from ...errors import InvalidRequest, ProxyError, RequestTooLarge
from ..asgi import as_proxy_error, named, owner_of, read_aside
from ..common import Naming, compact, retry_headers
from ..fields import optional, required, wrong_type
from ..openai import openai_error
from . import body as responses
from .body import ResponsesCall, response_id
from .dialogues import Dialogues
from .stream import ResponsesWriter

log = logs.get(__name__)

CREATE = "response.create"
# The most queued messages, and responses of `store: false` that can be continued. Clients send one message at a time,
# and continue the last response.
MOST_QUEUED, CONTINUABLE = 16, 256
# Close codes of RFC 6455: too many messages; the service restarts.
POLICY_VIOLATION, RESTARTS = 1008, 1012


@dataclass(frozen=True, slots=True)
class SocketRequest:
    """A parsed message. `deferred`: its body as JSON, if only the next message asks the model (`generate: false`)."""

    call: ResponsesCall
    stream_id: str | None
    deferred: bytes | None


def read(body: JSON, naming: Naming, *, deferred_id: str | None = None) -> SocketRequest:
    """Parse a message. `deferred_id`: the response id of the deferred request, if there is one. Then `body` holds two
    bodies: the `deferred` one, and this `message`.

    Raises `InvalidRequest`, which names the field.
    """
    deferred: JSON = {}
    if deferred_id is not None:
        # The client's bytes were copied into this body: they may close `message` and add another `deferred`.
        deferred, body = required(body, "deferred", dict), required(body, "message", dict)
    if body.get("type") != CREATE:
        raise InvalidRequest(f"type must be {CREATE}: nothing else is understood here", param="type")
    stream_id = optional(body, "stream_id", str)
    generate = optional(body, "generate", bool)
    if body.get("background"):
        raise InvalidRequest("background is not possible over a WebSocket: send a POST", param="background")
    body = {name: value for name, value in body.items() if name not in ("type", "stream_id", "generate")}
    if deferred_id is not None and body.get("previous_response_id") == deferred_id:
        items = [*_items(deferred.get("input")), *_items(body.get("input"))]
        body = {**deferred, **body, "input": items, "previous_response_id": deferred.get("previous_response_id")}
    to_defer = json.dumps(body).encode() if generate is False else None
    return SocketRequest(responses.read(body, naming), stream_id, to_defer)


def _items(given: object) -> list[Any]:
    """The `input` as a list of items. Raises `InvalidRequest`."""
    if given is None or isinstance(given, str):
        return [{"role": "user", "content": given}] if given else []
    if not isinstance(given, list):
        raise wrong_type("input", "a string or a list of items")
    return given


def error_event(error: ProxyError) -> JSON:
    """An error before the first event of an answer, as OpenAI sends it, and with the fields of its SDK's type."""
    shown: JSON = openai_error(error)["error"]
    headers = {name.lower(): value for name, value in retry_headers(error).items()}
    fields = {name: shown[name] for name in ("code", "message", "param")}
    return {"type": "error", "status": error.status, "error": shown, "headers": headers, "sequence_number": 0, **fields}


class ResponsesSocket:
    """The WebSockets of one server."""

    def __init__(self, engine: Engine, dialogues: Dialogues) -> None:
        self._engine = engine
        self._dialogues = dialogues

    async def talk(self, socket: WebSocket) -> None:
        """One connection, from its handshake to its end. Raises `QueueFull` before it is accepted."""
        state = socket.scope["state"]
        state["held"].stream()  # it counts as an event stream of its owner
        if (server := state.get("socket")) is not None:  # only with our own server
            server.hold = state["held"]  # counts the bytes of unfinished messages
        try:
            await socket.accept()
            await _Connection(self._engine, self._dialogues, socket).run()
        finally:
            if server is not None:
                server.hold = None


class _Connection:
    def __init__(self, engine: Engine, dialogues: Dialogues, socket: WebSocket) -> None:
        self._aside, self._holds = engine.aside, engine.holds
        self._dialogues = dialogues
        self._socket = socket
        self._inbox: deque[tuple[bytes | ProxyError, ExitStack]] = deque()
        self._arrived = asyncio.Event()
        # From the handshake's headers, without those for a single request.
        self._naming = replace(named(socket), idempotency_key=None, is_retry=False)
        self._count = 0  # of messages
        self._unstored_ids: deque[str] = deque(maxlen=CONTINUABLE)
        self._deferred: tuple[str, bytes] | None = None  # the response id and the body of the deferred request
        self._deferred_bounds = ExitStack()  # what it takes of the owner's bounds
        self._bounds, self._owner = socket.scope["state"]["held"].bounds, owner_of(socket)
        self._most_bytes = engine.settings.max_body
        self._server = socket.scope["state"].get("socket")  # only with our own server

    async def run(self) -> None:
        server = self._server
        reading = asyncio.create_task(self._read())
        try:
            while await self._next(reading):
                message, held = self._inbox.popleft()
                if server is not None:
                    server.busy = True
                answering = asyncio.create_task(self._answer(message))
                try:
                    await asyncio.wait({answering, reading}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    if not answering.done():  # the client left, or the server stops
                        answering.cancel()
                    await asyncio.gather(answering, return_exceptions=True)
                    held.close()
                if reading.done():
                    reading.result()
                    return
                answering.result()
                if server is not None:
                    server.busy = False
                    if server.leaving:
                        await self._socket.close(RESTARTS)
                        return
        except WebSocketDisconnect:
            log.info("client left its socket")
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            for _, held in self._inbox:
                held.close()
            self._deferred_bounds.close()

    async def _next(self, reading: asyncio.Task[None]) -> bool:
        """Wait for a message; False at the end."""
        self._arrived.clear()
        if not self._inbox and not reading.done():
            came = asyncio.create_task(self._arrived.wait())
            await asyncio.wait({came, reading}, return_when=asyncio.FIRST_COMPLETED)
            came.cancel()
        if reading.done():
            reading.result()
        return bool(self._inbox) and not reading.done()

    async def _read(self) -> None:
        """Queue messages until the client leaves. So its leaving is noticed while an answer is sent, too."""
        while (event := await self._socket.receive())["type"] == "websocket.receive":
            given = event.get("text")
            raw: bytes = event.get("bytes") or b"" if given is None else given.encode()
            message: bytes | ProxyError = raw
            held = ExitStack()
            try:
                held.enter_context(self._bounds.request(self._owner)).body(len(raw))
            except ProxyError as full:
                held.close()
                message = full
            if len(self._inbox) >= MOST_QUEUED:
                held.close()
                too_many = f"more than {MOST_QUEUED} messages wait: take the answers first"
                await self._socket.close(POLICY_VIOLATION, too_many)
                return
            self._inbox.append((message, held))
            self._arrived.set()

    async def _answer(self, message: bytes | ProxyError) -> None:
        self._count += 1
        naming = replace(
            self._naming,
            fresh=self._naming.fresh and self._count == 1,  # only the first request starts a fresh conversation
            request_id=f"{self._naming.request_id}.{self._count}",
        )
        asked: SocketRequest | None = None
        writer: ResponsesWriter | None = None
        server = self._server
        try:
            if isinstance(message, ProxyError):
                raise message
            deferred_id = None
            if self._deferred is not None and self._deferred[0].encode() in message:
                deferred_id, deferred = self._deferred
                if len(deferred) + len(message) > self._most_bytes:
                    raise RequestTooLarge(
                        f"with what was sent ahead this is over {self._most_bytes} bytes: send less ahead"
                    )
                message = b'{"deferred":%b,"message":%b}' % (deferred, message)
            asked = await read_aside(self._aside, message, naming, partial(read, deferred_id=deferred_id))
            if asked.deferred is not None:
                await self._send_events(asked, self._defer(asked.call, asked.deferred))
                return
            with self._holds.hold(self._owner):  # of this message, not of the connection
                has_left = None if server is None else server.is_closed
                answer = await self._dialogues.submit(asked.call, unstored_ids=self._unstored_ids, has_left=has_left)
            try:
                writer = ResponsesWriter(answer.accepted, frame=compact, end=())
                async for events in answer.batches():
                    if isinstance(events[-1], Finished):
                        await asyncio.sleep(0)  # notice an earlier disconnect first
                        if server is not None and server.is_closed():
                            raise WebSocketDisconnect
                        if (asked.call.request.call or {})["store"] is False:
                            self._unstored_ids.append(response_id(answer.turn_id))
                    await self._send_events(asked, (piece for event in events for piece in writer.feed(event)))
                    if isinstance(events[-1], Finished):
                        if server is not None:
                            server.flush()  # later, it could come to a client that has left since
                        answer.acknowledge()
            finally:
                answer.leave()
        except WebSocketDisconnect:
            raise
        except Exception as exc:  # noqa: BLE001 - whatever it is, the client is told, and may ask again
            error = as_proxy_error(exc)
            await self._send_events(asked, [compact(error_event(error))] if writer is None else writer.error(error))

    def _defer(self, call: ResponsesCall, body: bytes) -> Iterable[bytes]:
        """Keep this request for the next one. Returns the events of an empty response. Raises `QueueFull`."""
        with ExitStack() as held:
            held.enter_context(self._bounds.request(self._owner)).body(len(body))
            self._deferred_bounds.close()
            self._deferred_bounds = held.pop_all()
        now, asked = time.time(), call.request
        turn = Turn(
            id=f"turn_{uuid.uuid4().hex}", seq=0, agent_key=0, parent_id=None, status="completed", model=asked.model,
            input=(), created_at=now, finished_at=now, call=asked.call,
        )  # fmt: skip
        self._deferred = response_id(turn.id), body
        return ResponsesWriter(turn, frame=compact, end=()).whole(turn)

    async def _send_events(self, asked: SocketRequest | None, pieces: Iterable[bytes]) -> None:
        for piece in pieces:
            text = piece.decode()
            if asked is not None and asked.stream_id is not None:
                text = f'{text[:-1]},"stream_id":{json.dumps(asked.stream_id)}}}'
            await self._socket.send_text(text)
