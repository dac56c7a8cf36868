"""A relay between a program and the proxy on loopback: one address for as long as the program lives, and a record of
what the program sent and how it was answered."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import httptools

JSON = dict[str, Any]


@dataclass(slots=True)
class Exchange:
    """One request. `status` is None until it is answered."""

    method: str
    path: str
    headers: dict[str, str]
    raw: bytes = b""
    status: int | None = None
    answer: bytes = b""

    @property
    def body(self) -> JSON:
        """The body as an object; {} where it is none."""
        raw = gzip.decompress(self.raw) if self.headers.get("content-encoding") == "gzip" else self.raw
        try:
            read = json.loads(raw)
        except ValueError:
            return {}
        return read if isinstance(read, dict) else {}

    def lines(self) -> list[bytes]:
        """What the program wants the model to see, in the order of the prompt cache, a line a piece."""
        body = self.body
        heads = [body.get(name) for name in ("tools", "system", "systemInstruction", "instructions")]
        history: Any = next((body[name] for name in ("messages", "input", "contents") if name in body), [])
        told = [history] if isinstance(history, str) else history
        return [json.dumps(_unmarked(piece), sort_keys=True).encode() for piece in (*heads, *told)]


def _unmarked(data: Any) -> Any:
    if isinstance(data, dict):
        return {name: _unmarked(value) for name, value in data.items() if name != "cache_control"}
    return [_unmarked(item) for item in data] if isinstance(data, list) else data


class _Requests:
    """httptools calls it for what the program sends on one connection."""

    def __init__(self, began: Callable[[Exchange], None]) -> None:
        self._began = began
        self._exchange = Exchange("", "", {})
        self.parser = httptools.HttpRequestParser(self)

    def on_message_begin(self) -> None:
        self._exchange = Exchange("", "", {})

    def on_url(self, url: bytes) -> None:
        self._exchange.path += url.decode()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._exchange.headers[name.decode().lower()] = value.decode()

    def on_headers_complete(self) -> None:
        self._exchange.method = self.parser.get_method().decode()
        self._began(self._exchange)

    def on_body(self, body: bytes) -> None:
        self._exchange.raw += body


@dataclass(slots=True)
class _Answers:
    """httptools calls it for what the proxy answers on one connection."""

    waiting: list[Exchange] = field(default_factory=list)
    parser: httptools.HttpResponseParser = field(init=False)

    def __post_init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)

    def on_headers_complete(self) -> None:
        if self.waiting:
            self.waiting[0].status = self.parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self.waiting[0].answer += body

    def on_message_complete(self) -> None:
        if self.waiting and self.parser.get_status_code() >= 200:
            self.waiting.pop(0)


class Relay:
    """`relay.url` leads to `relay.target`, which may change. A WebSocket is passed on and not read."""

    def __init__(self) -> None:
        self.target = ("127.0.0.1", 0)
        self.exchanges: list[Exchange] = []
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def refused(self) -> list[tuple[str, int | None, bytes]]:
        """What was answered with an error."""
        return [
            (f"{seen.method} {seen.path}", seen.status, seen.answer[:500])
            for seen in self.exchanges
            if seen.status is not None and seen.status >= 400
        ]

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._open:
            writer.close()
        await self._server.wait_closed()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            there, on = await asyncio.open_connection(*self.target)
        except OSError:  # the proxy is down: so is its address
            writer.close()
            self._open.discard(writer)
            return
        self._open.add(on)
        answers = _Answers()

        def began(exchange: Exchange) -> None:
            self.exchanges.append(exchange)
            answers.waiting.append(exchange)

        requests = _Requests(began)
        ways = [
            asyncio.create_task(_pass(reader, on, requests.parser.feed_data)),
            asyncio.create_task(_pass(there, writer, answers.parser.feed_data)),
        ]
        try:
            await asyncio.wait(ways)
        finally:
            for way in ways:
                way.cancel()
            for side in (writer, on):
                side.close()
                self._open.discard(side)


async def _pass(source: asyncio.StreamReader, sink: asyncio.StreamWriter, read: Callable[[bytes], object]) -> None:
    """Bytes from one side to the other until either ends; read on the way, until something else than HTTP comes."""
    reading = True
    with contextlib.suppress(ConnectionError):
        while data := await source.read(65536):
            if reading:
                try:
                    read(data)
                except httptools.HttpParserUpgrade:
                    reading = False
            sink.write(data)
            await sink.drain()
    with contextlib.suppress(ConnectionError, OSError):
        sink.write_eof()


def share_kept(before: Exchange, after: Exchange) -> float:
    """The share of the first request that the second one begins with."""
    first, second = (b"".join(exchange.lines()) for exchange in (before, after))
    unlike = (at for at, (one, other) in enumerate(zip(first, second, strict=False)) if one != other)
    return next(unlike, min(len(first), len(second))) / len(first)
