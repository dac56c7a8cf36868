"""One answer of the scripted upstream on its way out: JSON or server-sent events, and where it misbehaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any, Self

from .script import Answering, Behaviour, Block, Cut, ErrorEvent, HeldReply, Reply, Slow, Stall
from .seen import Outcome

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

PIECES = 32  # about so many deltas a block, so that a big answer is not a million events
SMALLEST_PIECE = 8  # characters


class GoneError(Exception):
    """The client left, or the upstream stops: nothing more is sent."""


class ScriptedRequest:
    """One request being answered: sends, and waits that end when the client leaves or the upstream stops."""

    def __init__(self, receive: Receive, send: Send, closing: asyncio.Event) -> None:
        self._receive = receive
        self._send = send
        self._closing = closing
        self._started = False
        self._watch: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Self:
        async def left() -> None:
            while (await self._receive())["type"] != "http.disconnect":
                pass

        self._watch = {asyncio.create_task(left()), asyncio.create_task(self._closing.wait())}
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._watch:
            task.cancel()
        await asyncio.gather(*self._watch, return_exceptions=True)

    async def wait(self, awaitable: Awaitable[object]) -> None:
        """Wait for it; `GoneError` when the client leaves or the upstream stops first."""
        waiter = asyncio.ensure_future(awaitable)
        try:
            await asyncio.wait({waiter, *self._watch}, return_when=asyncio.FIRST_COMPLETED)
            if not waiter.done():
                raise GoneError
        finally:
            waiter.cancel()
            await asyncio.gather(waiter, return_exceptions=True)

    async def start(self, status: int, content_type: str, headers: dict[str, str] | None = None) -> None:
        fields = {"content-type": content_type, "request-id": "req_scripted", **(headers or {})}
        pairs = [(name.lower().encode(), value.encode()) for name, value in fields.items()]
        self._started = True
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})

    async def drop(self) -> None:
        """Let the connection break: uvicorn closes it when a started response is left without its end, but answers
        500 where none was started."""
        if not self._started:
            await self.start(200, "application/json", {"content-length": "1"})

    async def write(self, data: bytes, *, more: bool = True) -> None:
        if any(task.done() for task in self._watch):
            raise GoneError
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def json(self, status: int, data: Block, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(data, ensure_ascii=False).encode("utf-8", "replace")
        await self.start(status, "application/json", {"content-length": str(len(body)), **(headers or {})})
        await self.write(body, more=False)


async def before(behaviour: Behaviour, exchange: ScriptedRequest, *, streamed: bool) -> None:
    """What happens before the status line. An answer in one piece is held there, wherever it was to be."""
    whole = isinstance(behaviour, HeldReply) and not streamed
    if isinstance(behaviour, HeldReply | Stall) and (behaviour.after == 0 or whole):
        await _hold(behaviour, exchange)
    elif isinstance(behaviour, Slow):
        await exchange.wait(asyncio.sleep(behaviour.delay))


async def _hold(behaviour: HeldReply | Stall, exchange: ScriptedRequest) -> None:
    behaviour.reached.set()
    if isinstance(behaviour, HeldReply):
        await exchange.wait(behaviour.event.wait())
    elif behaviour.seconds is None:
        await exchange.wait(asyncio.Event().wait())
    else:
        await exchange.wait(asyncio.sleep(behaviour.seconds))


async def stream(message: Block, behaviour: Answering, exchange: ScriptedRequest) -> Outcome:
    """Send the message as events, misbehaving where it is asked to; the outcome."""
    reply = behaviour if isinstance(behaviour, Reply) else behaviour.reply
    await exchange.start(200, "text/event-stream; charset=utf-8", dict(reply.headers))
    deltas = 0
    for event in _events(message):
        if event["type"] in ("content_block_delta", "message_delta"):
            if isinstance(behaviour, Cut | ErrorEvent) and deltas == behaviour.after:
                if isinstance(behaviour, Cut):
                    if behaviour.held:
                        behaviour.reached.set()
                        await exchange.wait(behaviour.event.wait())
                    await exchange.wait(asyncio.sleep(behaviour.pause))
                    return "cut"
                await exchange.write(_sse(behaviour.error), more=False)
                return "failed"
            if isinstance(behaviour, HeldReply | Stall) and deltas == behaviour.after > 0:
                await _hold(behaviour, exchange)
            if isinstance(behaviour, Slow) and deltas:
                await exchange.wait(asyncio.sleep(behaviour.delay))
            deltas += 1
        await exchange.write(_sse(event))
    await exchange.write(b"", more=False)
    return "answered"


def _events(message: Block) -> Iterator[Block]:
    """The events of a streamed message in the API's order."""
    usage = message["usage"]
    opening = {
        **message,
        "content": [],
        "stop_reason": None,
        "stop_details": None,
        "usage": {**usage, "output_tokens": 1},
    }
    yield {"type": "message_start", "message": opening}
    yield {"type": "ping"}
    for index, block in enumerate(message["content"]):
        empty, deltas = _block_deltas(block)
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        for delta in deltas:
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    at_the_end = ("stop_reason", "stop_sequence", "stop_details", "diagnostics")
    ending = {name: message[name] for name in at_the_end if name in message}
    yield {"type": "message_delta", "delta": ending, "usage": usage}
    yield {"type": "message_stop"}


def deltas(blocks: Iterable[Block]) -> int:
    """After so many deltas a stream has said all of these blocks, and only its end is missing."""
    return sum(len(_block_deltas(block)[1]) for block in blocks)


def _block_deltas(block: Block) -> tuple[Block, list[Block]]:
    """The empty block a stream starts with, and the deltas that fill it."""
    kind = block["type"]
    if kind == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": piece} for piece in _pieces(block["text"])]
    if kind == "thinking":
        thoughts = [{"type": "thinking_delta", "thinking": piece} for piece in _pieces(block["thinking"])]
        signature = {"type": "signature_delta", "signature": block["signature"]}
        return {**block, "thinking": "", "signature": ""}, [*thoughts, signature]
    if kind == "tool_use":
        written = json.dumps(block["input"], ensure_ascii=False)
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": p} for p in _pieces(written)]
    return block, []


def _pieces(text: str) -> Iterator[str]:
    size = max(SMALLEST_PIECE, len(text) // PIECES)
    return (text[start : start + size] for start in range(0, len(text), size))


def _sse(event: Block) -> bytes:
    data = json.dumps(event, ensure_ascii=False)
    return f"event: {event['type']}\ndata: {data}\n\n".encode("utf-8", "replace")
