"""What hostile or broken clients, models and files did to freeze the service: each attack once, for tests and bench.

An attack is `strike(target)`: it says what it has to say and waits until it is answered, however that ends. `prepare`
comes before it. The model is the scripted upstream, told what to answer.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gzip
import io
import json
import os
import struct
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnfault.provider.script import Big, Reply, ToolUse
from turnfault.provider.upstream import Upstream

from .client import Connections, RefusedError

JSON = dict[str, Any]

CHAT = "/agents/{agent}/v1/chat/completions"
# Nearly matched by the pattern below: a backtracking engine tries 2^40 ways.
NEARLY = "a" * 40 + "!"
PATTERN = "^(a+)+$"
SLOW = {"type": "string", "pattern": PATTERN}
# Words of what the proxy asks of the model, by which the scripted one knows what to answer.
BOMB, OBJECT = "#/$defs/a1", "one JSON object"
# Agents whose files are replaced all at once: more than the threads that a Python program has by default.
WITH_FILES = tuple(f"file-{n}" for n in range(min(32, (os.cpu_count() or 1) + 4) + 1))
SILENT_CONNECTIONS = 20


@dataclass(frozen=True)
class Target:
    """A running `serve`: its port, the CLI's own directory, the model behind it."""

    port: int
    config: Path
    upstream: Upstream

    async def ask(self, agent: str, text: str, **more: Any) -> int:
        """The status of one chat turn; 0 where the connection was cut."""
        return await self.send(agent, {"model": "sonnet", "messages": [{"role": "user", "content": text}], **more})

    async def send(self, agent: str, body: JSON) -> int:
        return await self.post(agent, json.dumps(body).encode())

    async def post(self, agent: str, body: bytes) -> int:
        connections = Connections(self.port)
        try:
            return (await connections.request(agent, "POST", CHAT.format(agent=agent), body)).status
        except RefusedError as refused:
            return refused.status
        except (OSError, EOFError, IndexError):  # an empty status line: the server has closed
            return 0
        finally:
            connections.close()

    def transcripts(self, agent: str) -> list[Path]:
        return sorted(self.config.glob(f"projects/*-{agent}/*.jsonl"))


@dataclass(frozen=True)
class Attack:
    """`expected`: the statuses that its own requests may end with. `past`: agents that were talked to before it."""

    name: str
    strike: Callable[[Target], Awaitable[list[int]]]
    expected: frozenset[int]
    past: tuple[str, ...] = ()

    async def prepare(self, target: Target) -> None:
        await asyncio.gather(*(target.ask(agent, "hello") for agent in self.past))


def wants(schema: object) -> JSON:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def tool(schema: object, *, strict: bool = False) -> JSON:
    return {"type": "function", "function": {"name": "f", "strict": strict, "parameters": schema}}


def reference_bomb(levels: int) -> JSON:
    """Each definition asks for the next one twice: 2^levels steps over one number."""
    twice = {f"a{n}": {"allOf": [{"$ref": f"#/$defs/a{n + 1}"}] * 2} for n in range(levels)}
    return {"$defs": {**twice, f"a{levels}": {"type": "integer"}}, "$ref": "#/$defs/a0"}


def nested(depth: int) -> JSON:
    value: JSON = {}
    for _ in range(depth):
        value = {"a": value}
    return value


# --- schemas, and what the model answers to them --------------------------------------------------------------


async def slow_pattern(target: Target) -> list[int]:
    target.upstream.when(PATTERN, Reply(json.dumps(NEARLY)), times=None)
    return [await target.ask("pattern", "slow pattern", **wants(SLOW))]


async def eight_bombs(target: Target) -> list[int]:
    target.upstream.when(PATTERN, Reply(json.dumps(NEARLY)), times=None)
    target.upstream.when(BOMB, Reply("1"), times=None)
    bombs = [target.ask(f"pattern-{n}", "slow pattern", **wants(SLOW)) for n in range(4)]
    bombs += [target.ask(f"bomb-{n}", "bomb", **wants(reference_bomb(40))) for n in range(4)]
    return list(await asyncio.gather(*bombs))


async def slow_pattern_of_a_tool(target: Target) -> list[int]:
    target.upstream.when("strict tool", ToolUse([("mcp__client__f", {"x": NEARLY})]), times=None)
    schema = {"type": "object", "properties": {"x": SLOW}}
    return [await target.ask("strict", "strict tool", tools=[tool(schema, strict=True)])]


async def references(target: Target) -> list[int]:
    target.upstream.when(BOMB, Reply("1"), times=None)
    return [await target.ask("bomb", "bomb", **wants(reference_bomb(40)))]


async def fence(target: Target) -> list[int]:
    target.upstream.when(OBJECT, Reply("```" + "\n" * 3000 + "x"), times=None)
    return [await target.ask("fence", "fence", response_format={"type": "json_object"})]


async def many_properties(target: Target) -> list[int]:
    properties = {f"p{n}": {"type": "string", "description": "a value"} for n in range(20_000)}
    return [await target.ask("wide", "hello", tools=[tool({"type": "object", "properties": properties})])]


async def deep_arguments(target: Target) -> list[int]:
    """Then the dump, which has to show what happened."""
    target.upstream.when("deep tool", ToolUse([("mcp__client__f", nested(600))]), times=None)
    status = await target.ask("deep", "deep tool", tools=[tool({"type": "object"})])
    connections = Connections(target.port)
    try:
        return [status, (await connections.get("dump", "/v1/chains/deep")).status]
    except RefusedError as refused:
        return [status, refused.status]
    except (EOFError, ValueError):  # cut in the middle
        return [status, 0]
    finally:
        connections.close()


# --- large requests -------------------------------------------------------------------------------------------


async def many_stops(target: Target) -> list[int]:
    target.upstream.when("stop", Big(60_000), times=None)
    return [await target.ask("stops", "stop", stop=[f"{n:040d}" for n in range(20_000)])]


def _spoken(count: int, roles: tuple[str, ...]) -> list[JSON]:
    said = [{"role": roles[n % len(roles)], "content": "a"} for n in range(count)]
    return [*said, {"role": "user", "content": "and now?"}]


async def many_messages(target: Target) -> list[int]:
    bodies = [_spoken(100_000, ("user", "assistant")), _spoken(100_000, ("user",))]
    sent = [target.send(f"long-{n}", {"model": "sonnet", "messages": body}) for n, body in enumerate(bodies)]
    return list(await asyncio.gather(*sent))


async def a_megabyte_of_messages(target: Target) -> list[int]:
    body = {"model": "sonnet", "messages": _spoken(19_000, ("user", "assistant"))}
    return [await target.send("megabyte", body)]


async def worst_json(target: Target) -> list[int]:
    """As much work for a reader of JSON as its bytes can hold: a megabyte of it, and as much as a body may have."""
    sizes = (1024**2, 63 * 1024**2)
    bodies = [b'{"messages":[{"role":"user","content":"x"}],"x":[' + b"[]," * (size // 3) + b"[]]}" for size in sizes]
    return [await target.post("json", body) for body in bodies]


async def blanks(target: Target) -> list[int]:
    """Each pattern that begins with a repeat is tried at each of them."""
    system = {"role": "system", "content": "a" + "\n" * 1024**2 + "b"}
    return [await target.send("blanks", {"model": "sonnet", "messages": [system, *_spoken(0, ("user",))]})]


def _png(width: int, height: int, *more: tuple[bytes, bytes]) -> bytes:
    """All of one colour, which takes a byte for a thousand of its own."""
    rows = zlib.compressobj(9)
    packed = b"".join(rows.compress(bytes(1 + width)) for _ in range(height)) + rows.flush()
    parts = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)), *more, (b"IDAT", packed), (b"IEND", b"")]
    sums = (
        (struct.pack(">I", len(data)), kind + data, struct.pack(">I", zlib.crc32(kind + data))) for kind, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(map(b"".join, sums))


def _scans(count: int) -> bytes:
    """A JPEG of 4 million pixels, each of which is drawn so many times."""
    from PIL import Image  # noqa: PLC0415 - of the tests

    out = io.BytesIO()
    Image.new("RGB", (1990, 1990)).save(out, "JPEG", progressive=True)
    plain = out.getvalue()
    last = plain.rindex(b"\xff\xda")
    return plain[:last] + plain[last:-2] * count + plain[-2:]


def _pdf(*objects: bytes) -> bytes:
    """The first object is the catalogue."""
    out, places = b"%PDF-1.5\n", []
    for number, told in enumerate(objects, 1):
        places.append(len(out))
        out += b"%d 0 obj\n%b\nendobj\n" % (number, told)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    end = b"trailer\n<</Root 1 0 R/Size %d>>\nstartxref\n%d\n%%%%EOF" % (len(places) + 1, len(out))
    return out + b"xref\n0 %d\n0000000000 65535 f \n%b%b" % (len(places) + 1, table, end)


def _pages(levels: int) -> bytes:
    """Each folder of pages has the next one twice: 2^levels pages in a few KB."""
    kids = (b"<</Type/Pages/Count 4/Kids[%d 0 R %d 0 R]>>" % (n, n) for n in range(3, levels + 3))
    return _pdf(b"<</Type/Catalog/Pages 2 0 R>>", *kids, b"<</Type/Page/Parent 2 0 R>>")


def _streams(size: int) -> bytes:
    """Its objects are in a stream that is a thousand times as long as it was sent."""
    packed = zlib.compress(bytes(size), 9)
    xref = b"<</Type/XRef/W[1 2 1]/Size 100000/Root 1 0 R/Filter/FlateDecode/Length %d>>stream\n%b\nendstream"
    return b"%%PDF-1.5\n1 0 obj\n%b\nendobj\nstartxref\n9\n%%%%EOF" % (xref % (len(packed), packed))


def _bombs() -> tuple[list[bytes], list[bytes]]:
    """Images and documents of some KB that are gigabytes, or years, to who reads them."""
    long = b"a\0\0" + zlib.compress(bytes(64 * 1024**2), 9)
    vast = (b"IHDR", struct.pack(">IIBBBBB", 60_000, 60_000, 8, 0, 0, 0, 0))
    images = [_png(9_900, 10_000), _png(4, 4, vast), _png(4, 4, (b"zTXt", long), (b"iCCP", long)), _scans(400)]
    return images, [_pages(40), _streams(256 * 1024**2)]


async def media(target: Target) -> list[int]:
    """The images are of the past: those of the newest message are the provider's to refuse."""
    images, documents = await asyncio.to_thread(_bombs)  # the scripted model is in this process
    urls = [f"data:image/png;base64,{base64.b64encode(one).decode()}" for one in images]
    seen = [({"type": "image_url", "image_url": {"url": url}}, *_spoken(2, ("assistant", "user"))) for url in urls]
    urls = [f"data:application/pdf;base64,{base64.b64encode(one).decode()}" for one in documents]
    seen += [({"type": "file", "file": {"filename": "a.pdf", "file_data": url}},) for url in urls]
    said = [[{"role": "user", "content": [part]}, *more] for part, *more in seen]
    bodies = [{"model": "sonnet", "messages": messages} for messages in said]
    return list(await asyncio.gather(*(target.send(f"media-{n}", body) for n, body in enumerate(bodies))))


async def packed(target: Target) -> list[int]:
    """A body of 128 MB in 128 KB. The proxy unpacks none."""
    data = await asyncio.to_thread(gzip.compress, bytes(128 * 1024**2))
    path = CHAT.format(agent="packed")
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Encoding: gzip\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
    try:
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        return [int((await reader.readuntil(b"\r\n")).split()[1])]
    finally:
        writer.close()


# --- files in a transcript's place ----------------------------------------------------------------------------


async def pipes_and_endless_files(target: Target) -> list[int]:
    for n, agent in enumerate(WITH_FILES):
        for path in target.transcripts(agent):
            path.unlink()
            if n % 2:
                os.mkfifo(path)
            else:
                path.symlink_to("/dev/zero")
    return list(await asyncio.gather(*(target.ask(agent, "again") for agent in WITH_FILES)))


async def deep_line(target: Target) -> list[int]:
    for path in target.transcripts("nested"):
        with path.open("a") as file:
            file.write('{"a":' * 1100 + "1" + "}" * 1100 + "\n")
    return [await target.ask("nested", "again")]


# --- connections ----------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _unread(port: int, request: bytes, count: int) -> AsyncIterator[None]:
    """Requests in a row whose answers nobody reads."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
    reader._transport.pause_reading()  # type: ignore[attr-defined]  # a client that does not read
    for _ in range(count):
        writer.write(request * 64)

    async def push() -> None:
        with contextlib.suppress(OSError):
            await writer.drain()

    pushing = asyncio.create_task(push())
    try:
        yield
    finally:
        pushing.cancel()
        await asyncio.gather(pushing, return_exceptions=True)
        writer.transport.abort()


async def unread_answers(target: Target) -> list[int]:
    """Many requests in a row on each connection; the answers are never read. Held until it is cancelled."""
    request = f"GET /openapi.json HTTP/1.1\r\nHost: 127.0.0.1:{target.port}\r\n\r\n".encode()
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(SILENT_CONNECTIONS):
            await stack.enter_async_context(_unread(target.port, request, 400))
        await asyncio.sleep(5.0)  # what an attacker holds on to
    return []


async def followers(target: Target) -> list[int]:
    """More than are taken; none reads what the agent says."""
    request = f"GET /v1/chains/followed/events?live=1 HTTP/1.1\r\nHost: 127.0.0.1:{target.port}\r\n\r\n".encode()
    target.upstream.when("at length", Reply("word " * 20_000), times=None)
    statuses: list[int] = []
    writers: list[asyncio.StreamWriter] = []
    try:
        for _ in range(100):
            reader, writer = await asyncio.open_connection("127.0.0.1", target.port, limit=1024)
            writers.append(writer)
            writer.write(request)
            statuses.append(int((await reader.readuntil(b"\r\n")).split()[1]))
            if statuses[-1] == 200:
                reader._transport.pause_reading()  # type: ignore[attr-defined]
        return statuses + [await target.ask("followed", "at length") for _ in range(5)]
    finally:
        for writer in writers:
            writer.transport.abort()


SURVIVED = frozenset({200, 400, 502})
ATTACKS = (
    Attack("a slow pattern in a schema", slow_pattern, frozenset({502})),
    Attack("a slow pattern in a strict tool", slow_pattern_of_a_tool, SURVIVED),
    Attack("a bomb of references", references, frozenset({400})),
    Attack("eight bombs at once", eight_bombs, frozenset({400, 502})),
    Attack("a fence of 3,000 lines", fence, frozenset({502})),
    Attack("a schema of 20,000 properties", many_properties, frozenset({400})),
    Attack("arguments nested 600 deep", deep_arguments, frozenset({200, 502})),
    Attack("20,000 stop texts", many_stops, frozenset({400})),
    Attack("100,000 messages", many_messages, frozenset({400})),
    Attack("19,000 messages", a_megabyte_of_messages, frozenset({200})),
    Attack("the worst JSON", worst_json, frozenset({400})),
    Attack("a megabyte of empty lines", blanks, frozenset({200})),
    Attack("bombs in images and PDFs", media, frozenset({200, 400})),
    Attack("a packed bomb", packed, frozenset({400})),
    Attack("pipes and /dev/zero as transcripts", pipes_and_endless_files, SURVIVED, WITH_FILES),
    Attack("a line nested 1,100 deep", deep_line, SURVIVED, ("nested",)),
    Attack("answers that nobody reads", unread_answers, frozenset()),
    Attack("followers that read nothing", followers, frozenset({200, 429}), ("followed",)),
)
