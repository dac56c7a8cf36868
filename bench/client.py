"""A small HTTP client that costs next to nothing itself and tells when the first piece of an answer came."""

from __future__ import annotations

import asyncio
import json
import re
import time
from asyncio import StreamReader, StreamWriter
from dataclasses import dataclass
from typing import Any

LIMIT = 64 * 1024 * 1024
# The first piece of an answer's text; an opening chunk carries the role and an empty content.
_TEXT = re.compile(rb'"content": ?"[^"]')


@dataclass(frozen=True)
class Timing:
    """Seconds to the first piece of the answer and to its end."""

    first: float
    whole: float


@dataclass(frozen=True)
class Answer:
    """`body` is empty where it was not to be kept."""

    status: int
    headers: dict[str, str]
    body: bytes
    timing: Timing


class RefusedError(Exception):
    """Not answered with 200. `retry_after` in seconds where the server names it."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(f"{answer.status}: {answer.body[:500]!r}")
        self.status = answer.status
        self.retry_after = float(answer.headers.get("retry-after", 0))


class Connections:
    """One kept-alive connection for each name."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._open: dict[str, tuple[StreamReader, StreamWriter]] = {}

    async def post(self, name: str, path: str, body: dict[str, Any]) -> Answer:
        return await self.request(name, "POST", path, json.dumps(body).encode())

    async def get(self, name: str, path: str, *, keep: bool = True) -> Answer:
        return await self.request(name, "GET", path, b"", keep=keep)

    async def request(self, name: str, method: str, path: str, data: bytes, *, keep: bool = True) -> Answer:
        """Raises `RefusedError` where the status is not 200."""
        began = time.perf_counter()
        reader, writer = await self._connection(name)
        head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        await writer.drain()
        answer = await _read(reader, began, keep=keep)
        if answer.status != 200:
            raise RefusedError(answer)
        return answer

    async def _connection(self, name: str) -> tuple[StreamReader, StreamWriter]:
        known = self._open.get(name)
        if known is not None and not known[0].at_eof():
            return known
        if known is not None:  # idle for too long for the server
            known[1].close()
        self._open[name] = await asyncio.open_connection("127.0.0.1", self.port, limit=LIMIT)
        return self._open[name]

    def close(self) -> None:
        for _, writer in self._open.values():
            writer.close()
        self._open.clear()


async def _read(reader: StreamReader, began: float, *, keep: bool) -> Answer:
    status = int((await reader.readline()).split()[1])
    headers: dict[str, str] = {}
    while (line := await reader.readline()).strip():
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    if "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
        now = time.perf_counter() - began
        return Answer(status, headers, body, Timing(now, now))
    pieces: list[bytes] = []
    first = 0.0
    stream = "event-stream" in headers.get("content-type", "")
    while length := int(await reader.readline(), 16):
        piece = await reader.readexactly(length + 2)
        if keep:
            pieces.append(piece[:-2])
        if not first and (not stream or _TEXT.search(piece)):
            first = time.perf_counter() - began
    await reader.readline()
    now = time.perf_counter() - began
    return Answer(status, headers, b"".join(pieces), Timing(first or now, now))
