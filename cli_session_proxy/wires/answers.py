"""Delivers an answer to its client, and finds out whether it arrived.

`acknowledge` is called when the last byte was handed to the connection, `leave` in every other case. A disconnect is
noticed at any time by `http.disconnect`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .. import logs
from ..domain import times
from ..domain.evidence import notes_header
from ..domain.models import JSON, Finished, Started, Turn, Waits
from ..engine.engine import Answer, Engine
from ..engine.live import PATIENCE
from ..errors import ProxyError
from ..settings import Settings
from .asgi import as_proxy_error, encoded, has_left, read_call, send_error
from .base import Writer
from .common import Naming, WireCall, compact, encoded_agent_id, own_names

log = logs.get(__name__)

C = TypeVar("C", bound=WireCall)

# A header for token counts before a turn: they are estimates, because only the provider can count.
ESTIMATED = {"X-Estimated": "true"}


# OpenAI's and Anthropic's clients follow it: a retry would end in the same way.
NO_RETRY = {"x-should-retry": "false"}


class ClientGoneError(Exception):
    """The client disconnected before it had the whole answer."""


class Client:
    """The client of a request: sends in order, and knows whether it is still connected."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, on_leave: Callable[[], None]) -> None:
        """`on_leave` is called as soon as the client has left, before anything else: its next request may already be
        here."""
        self._scope = scope
        self._receive = receive
        self._send = send
        self._on_leave = on_leave
        self._one_at_a_time = asyncio.Lock()
        self._gone = False
        self._has_cancelled_work = False  # the watcher did, when the client left
        self.finished = False
        self.started = False
        self.last_sent = asyncio.get_running_loop().time()

    async def while_there(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` for as long as the client stays. Raises `ClientGoneError` when it leaves first."""
        task = asyncio.current_task()
        assert task is not None
        earlier_cancellations = task.cancelling()

        async def watch() -> None:
            while (await self._receive())["type"] != "http.disconnect":
                pass
            if not self.finished:  # the server also sends "disconnect" after a complete answer
                self._gone = self._has_cancelled_work = True
                self._on_leave()
                task.cancel()

        watching = asyncio.create_task(watch())
        try:
            await work
        except asyncio.CancelledError:
            if self._has_cancelled_work and task.uncancel() <= earlier_cancellations:  # cancelled only by the watcher
                raise ClientGoneError from None
            raise
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def write(self, data: bytes, headers: dict[str, str], *, last: bool = False, is_error: bool = False) -> None:
        """Send a piece of the body, and the head before the first one. Ignored after the last one. `is_error`: the
        answer ends with an error; a proxy that has forwarded the request is told so (see `http.relay`).

        Raises `ClientGoneError`.
        """
        async with self._one_at_a_time:
            if self.finished:
                return
            # uvicorn silently drops data after a disconnect, and may know of it before the watcher has run: do not
            # count a dropped last piece as delivered.
            if self._gone or (last and has_left(self._scope, self._receive)):
                self._gone = True
                self._on_leave()
                raise ClientGoneError
            if is_error:
                self._scope["state"]["failed"] = True
            if not self.started:
                # Head and body in one loop iteration, so that they are sent together.
                self.started = True
                await self._send({"type": "http.response.start", "status": 200, "headers": encoded(headers)})
            try:
                await self._send({"type": "http.response.body", "body": data, "more_body": not last})
            except OSError as exc:  # a disconnect, with ASGI servers other than uvicorn (spec 2.4)
                self._on_leave()
                raise ClientGoneError from exc
            if self._gone:
                raise ClientGoneError
            self.finished = last
            self.last_sent = asyncio.get_running_loop().time()

    async def fail(self, scope: Scope, error: ProxyError, headers: dict[str, str]) -> None:
        """Send an error as the whole answer; only before the first `write`."""
        async with self._one_at_a_time:
            self.started = self.finished = True
            await send_error(self._send, scope, error, headers)


def identity_headers(answer: Answer) -> dict[str, str]:
    return {"X-Agent-Id": encoded_agent_id(answer.agent_id), "X-Turn-Id": answer.turn_id}


class TurnResponse(Response):
    """An ASGI response that delivers a turn, then acknowledges it. `_deliver` is the wire's part.

    `call` is None if an earlier request began the turn.
    """

    def __init__(self, answer: Answer, call: WireCall | None) -> None:
        super().__init__()
        self._answer = answer
        self._call = call
        # Headers that are known before the turn runs; its session and ignored parameters are added later.
        self._head_fields = identity_headers(answer)
        if call is not None and call.ignored:
            self._head_fields |= ignored_header(call.ignored)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = Client(scope, receive, send, self._answer.leave)
        try:
            await client.while_there(self._deliver(client))
        except ClientGoneError:
            log.info("client left before the whole answer", turn_id=self._answer.turn_id)
        except Exception as exc:
            if client.started:
                raise
            await client.fail(scope, as_proxy_error(exc), self._head_fields)
        finally:
            self._answer.leave()

    async def _deliver(self, client: Client) -> None:
        raise NotImplementedError

    def _in_session(self, at: Started | Turn) -> None:
        """Add the headers of a turn that has its session or has ended."""
        if isinstance(at, Started):
            unmet, note, model = at.unmet, notes_header(at.notes), at.model
        else:
            unmet, note, model = at.evidence.unmet, at.evidence.note, at.reported_model
        fields = self._head_fields
        if (call := self._call) is not None and unmet:
            fields |= ignored_header([*call.ignored, *own_names(call.parameters, unmet)])
        if at.session_id is not None:
            fields["X-Session-Id"] = at.session_id
        if at.continuity is not None:
            fields["X-Continuity"] = at.continuity
        if note:
            fields["X-Continuity-Note"] = note
        if at.backend is not None and model is not None:
            fields |= {"X-Backend": at.backend, "X-Model": model}
        if isinstance(at, Turn) and at.status == "refused":  # of a stream without earlier text
            fields |= NO_RETRY


class JsonAnswer(TurnResponse):
    """The whole answer as one JSON object, which `render` makes of the committed turn; of a background turn, as it is
    now."""

    def __init__(self, answer: Answer, call: WireCall, render: Callable[[Turn], JSON]) -> None:
        super().__init__(answer, call)
        self._render = render

    async def _deliver(self, client: Client) -> None:
        turn = self._answer.accepted
        if not turn.in_background:
            turn = await self._answer.turn(patience=PATIENCE)
            self._in_session(turn)
        body = compact(self._render(turn))
        kind = {"Content-Type": "application/json", "Content-Length": str(len(body))}
        await client.write(body, {**kind, **self._head_fields}, last=True)
        self._answer.acknowledge()


# Seconds after which the head of a stream is sent at the latest. A later error becomes an event.
FIRST_SIGN = 5.0


class StreamAnswer(TurnResponse):
    """Server-sent events as they come.

    The head waits for the wire's first bytes, so that an earlier error has its real status, but at most `FIRST_SIGN`
    seconds; after that, a comment is sent after every `keepalive` seconds of silence.
    """

    def __init__(self, answer: Answer, call: WireCall | None, writer: Writer, keepalive: float) -> None:
        super().__init__(answer, call)
        self._writer = writer
        self._keepalive = keepalive

    async def _deliver(self, client: Client) -> None:
        async with self._kept_alive(client):
            try:
                await self._pass_on(client)
            except ClientGoneError:
                raise
            except Exception as exc:
                if not client.started:
                    raise
                error = b"".join(self._writer.error(as_proxy_error(exc)))
                await client.write(error, self._head(), last=True, is_error=True)

    async def _pass_on(self, client: Client) -> None:
        batches = self._answer.batches()
        try:
            async for events in batches:
                if any(isinstance(event, Waits) for event in events):
                    await self._announce_wait(client)
                pieces: list[bytes] = []
                for event in events:
                    if isinstance(event, Waits):
                        continue
                    if isinstance(event, Started | Finished):
                        self._in_session(event.turn if isinstance(event, Finished) else event)
                    pieces += self._writer.feed(event)
                data = b"".join(pieces)
                # The finish event and the end of the body are sent together: a client that closes after the event
                # has the whole answer.
                last = isinstance(events[-1], Finished)
                if data or last:
                    await client.write(data, {} if client.started else self._head(), last=last)
                if last:
                    self._answer.acknowledge()
        finally:
            if isinstance(batches, AsyncGenerator):
                await batches.aclose()
        if not client.finished:
            raise RuntimeError("a turn's events ended without Finished")

    async def _announce_wait(self, client: Client) -> None:
        """Tell the client at once until when the turn waits for a limit."""
        wait = self._answer.limit_wait
        if wait is None:  # it no longer waits
            return
        self._head_fields["Retry-After"] = str(max(1, math.ceil(wait.until - time.time())))
        words = self._writer.keep_alive(f"waits for the provider's limit to be over at {times.utc(wait.until)}")
        await client.write(words, {} if client.started else self._head())
        del self._head_fields["Retry-After"]

    def _head(self) -> dict[str, str]:
        return {
            "Content-Type": self._writer.media_type,
            "Cache-Control": "no-cache, no-store",
            **self._head_fields,
        }

    @asynccontextmanager
    async def _kept_alive(self, client: Client) -> AsyncIterator[None]:
        tasks: list[asyncio.Task[None]] = []
        # Most answers begin before that, and need no task.
        first = min(self._keepalive, FIRST_SIGN)
        timer = asyncio.get_running_loop().call_later(
            first, lambda: tasks.append(asyncio.create_task(self._keep_alive(client)))
        )
        try:
            yield
        finally:
            timer.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep_alive(self, client: Client) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            silence = clock() - client.last_sent
            patience = self._keepalive if client.started else min(self._keepalive, FIRST_SIGN)
            if silence < patience:
                await asyncio.sleep(patience - silence)
            else:
                await client.write(self._writer.keep_alive(), self._head())


def answered(
    engine: Engine,
    settings: Settings,
    read: Callable[[JSON, Naming], C],
    render: Callable[[Turn], JSON],
    writer: Callable[[C, str], Writer],
) -> Callable[[Request], Awaitable[Response]]:
    """A handler for a route whose requests are turns: reads the body, runs the turn, and answers, whole or streamed.

    `writer` takes the call and the turn's id.
    """

    async def handle(request: Request) -> Response:
        call = await read_call(request, settings.max_body, read)
        answer = await engine.submit(call.request, partial(has_left, request.scope, request.receive))
        return reply(answer, call, settings.keepalive, render, partial(writer, call, answer.turn_id))

    return handle


def reply(
    answer: Answer, call: WireCall, keepalive: float, render: Callable[[Turn], JSON], writer: Callable[[], Writer]
) -> Response:
    """The answer as requested: whole, by `render`, or streamed, by a `writer`."""
    if not call.stream:
        return JsonAnswer(answer, call, render)
    return StreamAnswer(answer, call, writer(), keepalive)


def ignored_header(names: Iterable[str]) -> dict[str, str]:
    """The header with names of fields that had no effect."""
    listed = ", ".join(names)
    return {"X-Ignored-Params": listed} if listed else {}
