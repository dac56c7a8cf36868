"""The scripted upstream of the measurements: answers at once, and costs little even under a long conversation.

    python -m bench.upstream            prints its address

`turnfault.provider.upstream` reads every message of every request, which at 5,000 turns takes longer than
what is measured. This one looks at the newest user message only: `deltas=N` in it asks for N deltas.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import sys
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

LIMIT = 1024 * 1024  # of a line of a request's head
_DELTAS = re.compile(rb"deltas=(\d+)")
_NEWEST = b'"role":"user"'
_FAILS = b"fails=400"
_PIECE = "word "
_numbers = itertools.count(1)


def _event(name: str, **data: object) -> bytes:
    return f"event: {name}\ndata: {json.dumps({'type': name, **data})}\n\n".encode()


def _message(content: list[dict[str, str]], stop: str | None, tokens: int) -> dict[str, object]:
    cache = {"cache_read_input_tokens": 0, "cache_creation_input_tokens": 0}
    usage = {"input_tokens": 10, "output_tokens": tokens, **cache}
    return {
        "id": f"msg_{next(_numbers):024d}", "type": "message", "role": "assistant", "model": "scripted",
        "content": content, "stop_reason": stop, "stop_sequence": None, "usage": usage,
    }  # fmt: skip


def _streamed(deltas: int) -> list[bytes]:
    """The events of an answer, a piece for each write."""
    start = _event("message_start", message=_message([], None, 1))
    start += _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
    delta = _event("content_block_delta", index=0, delta={"type": "text_delta", "text": _PIECE})
    end = _event("content_block_stop", index=0)
    stop = {"stop_reason": "end_turn", "stop_sequence": None}
    end += _event("message_delta", delta=stop, usage={"output_tokens": deltas}) + _event("message_stop")
    return [start + delta, *([delta] * (deltas - 1)), end]


class _Server:
    def __init__(self) -> None:
        self._open: dict[asyncio.Task[None] | None, StreamWriter] = {}

    async def connected(self, reader: StreamReader, writer: StreamWriter) -> None:
        task = asyncio.current_task()
        self._open[task] = writer
        try:
            while (head := await reader.readline()).strip():
                await _answer(head, await _body(reader), writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            return  # the CLI has ended
        finally:
            del self._open[task]
            writer.close()

    async def close(self) -> None:
        tasks = [task for task in self._open if task is not None]
        for writer in self._open.values():
            writer.close()
        await asyncio.gather(*tasks)


async def _body(reader: StreamReader) -> bytes:
    length = 0
    while (line := await reader.readline()).strip():
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            length = int(value)
    return await reader.readexactly(length)


async def _answer(head: bytes, body: bytes, writer: StreamWriter) -> None:
    if not head.startswith((b"POST /v1/messages ", b"POST /v1/messages?")):
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\n{}")
        return
    if _FAILS in body[max(0, body.rfind(_NEWEST)) :]:
        said = b'{"type":"error","error":{"type":"invalid_request_error","message":"scripted failure"}}'
        fields = f"Content-Type: application/json\r\nContent-Length: {len(said)}"
        writer.write(f"HTTP/1.1 400 Bad Request\r\n{fields}\r\n\r\n".encode() + said)
        return
    asked = _DELTAS.search(body, max(0, body.rfind(_NEWEST)))
    deltas = int(asked[1]) if asked else 1
    if b'"stream":true' not in body:
        whole = json.dumps(_message([{"type": "text", "text": _PIECE * deltas}], "end_turn", deltas)).encode()
        fields = f"Content-Type: application/json\r\nContent-Length: {len(whole)}"
        writer.write(f"HTTP/1.1 200 OK\r\n{fields}\r\n\r\n".encode() + whole)
        return
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
    for piece in _streamed(deltas):
        writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
        await writer.drain()
        await asyncio.sleep(0)
    writer.write(b"0\r\n\r\n")


@asynccontextmanager
async def upstream_process() -> AsyncIterator[str]:
    """The upstream in a process of its own, so that its work is not the load generator's. Its address."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.upstream", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield (await process.stdout.readline()).decode().strip()
    finally:
        process.stdin.close()  # its end, also when we are killed
        await process.wait()


async def main() -> None:
    ours = _Server()
    server = await asyncio.start_server(ours.connected, "127.0.0.1", 0, limit=LIMIT)
    async with server:
        print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
        closing = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(closing), sys.stdin)
        await closing.read()
        await ours.close()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())
