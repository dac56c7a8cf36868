"""Clients over the wires' own HTTP, as programs that can be told to leave, to read slowly and to come again.

They are not the vendors' SDKs, because those hide where an answer was cut; the bodies and the finish events are theirs.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import quote

import httpx
from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

from . import doors
from .checker import NOT_JSON
from .doors import Exchanged, Got, Reader, Wire
from .journal import JSON, Asking, Entry, Heard, Result, Said, Sent

# How a client says whose conversation it is: the agent's name in a header and only what is new, its whole history
# without a name, both, or the id of the answer that it continues.
Naming = Literal["name", "history", "both", "ids"]
# How the same request comes again: under its key, with the SDKs' retry count, or as it is.
Again = Literal["key", "count", "plain"]
# What a client that brings its history does to it: it leaves out an exchange, or the first ones, changes the order of
# two, or tells one twice.
Edit = Literal["drop", "front", "swap", "twice"]

# Asks in a process of its own; what it printed. Raises `NoAnswer`.
Ask = Callable[[JSON], Awaitable[JSON]]

# A slow reader's buffer, so that it is the proxy that waits and not the kernel.
SMALL_BUFFER = 16 * 1024
# Characters of an answer that is a slow reader's.
LONG = 100_000
# The media types of a stream: events, or (Ollama) a JSON object a line.
SERVER_SENT, LINES = "text/event-stream", "application/x-ndjson"
# How much of its answer a slow reader reads before it stops.
FIRST_BYTES = 64 * 1024


class NoAnswer(Exception):
    """A process ended without one."""


@dataclass(frozen=True, slots=True)
class Speaker:
    """An agent as its client speaks of it. `front`: through the load balancer, wherever that sends it."""

    name: str
    naming: Naming
    wire: Wire
    stream: bool
    tools: bool = False
    front: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """A turn's request as it is sent, and sent again. `before` are the turns that it continues, the newest last."""

    turn: int
    asked: Asking
    wire: Wire
    route: str
    body: JSON
    headers: Mapping[str, str]
    path: tuple[Said, ...] | None
    before: tuple[int, ...]

    @property
    def parent(self) -> int | None:
        return self.before[-1] if self.before else None


@dataclass(slots=True)
class Known:
    """A turn that was acknowledged."""

    request: Request
    got: Got


class Client:
    """One agent's client: what it has read so far, and the next request made of that."""

    def __init__(self, speaker: Speaker) -> None:
        self.speaker = speaker
        self.known: dict[int, Known] = {}
        self.requests: dict[int, Request] = {}
        self.tip: int | None = None
        self.gave_up: set[int] = set()  # turns whose calls the proxy says are not open any more

    def next(
        self, turn: int, *, text: str, keyed: bool, back: int = 0, wire: Wire | None = None, edit: Edit | None = None
    ) -> Request:
        """The request for a new turn: the results of the calls that wait, or a prompt.

        `back`: so many turns earlier than the last one that is known. `wire`: by this one, where the client names no
        answer of another. `edit` changes the history of a client that brings one, where it is long enough.
        """
        speaker = self.speaker
        wire = speaker.wire if wire is None or speaker.naming == "ids" else wire
        before = self._above(self.tip)
        before = before[: max(1, len(before) - back)] if back else before
        parent = before[-1] if before else None
        calls = self.known[parent].got.calls if parent is not None and parent not in self.gave_up else ()
        asked: Asking = text
        if calls:
            asked = tuple(Result(call.token, f"result of {call.token}: {text}") for call in calls)
            wire = speaker.wire if wire in doors.APPLICATIONS else wire  # they offer no tools
        brings = speaker.naming in ("history", "both")
        # What is new to the chain is weighed by its length: the CLI would compact a conversation with a slow reader's.
        long = any(len(self.known[number].got.answer.text) > LONG for number in before)
        if edit is not None and brings and not calls and not long:
            before = self._edited(before, edit)
        path = tuple(Said(number, self.known[number].got.answer) for number in before)
        headers = {"X-Agent-Id": quote(speaker.name)} if speaker.naming in ("name", "both") else {}
        if keyed:
            headers["Idempotency-Key"] = f"key-{turn}"
        previous = self.known[parent].got.id if speaker.naming == "ids" and parent is not None else None
        said = self._exchanges(before) if brings else []
        said.append(Exchanged(asked, calls))
        route, body = doors.written(wire, said, stream=speaker.stream, tools=speaker.tools, previous=previous)
        path_or_head = path if speaker.naming != "name" else None
        request = Request(turn, asked, wire, route, body, headers, path_or_head, before)
        self.requests[turn] = request
        return request

    def acknowledged(self, turn: int, got: Got) -> None:
        """Its answer is known; the conversation goes on from it, unless an older one came late."""
        if turn not in self.known:
            self.known[turn] = Known(self.requests[turn], got)
            self.tip = max(turn, self.tip or turn)

    def _above(self, turn: int | None) -> tuple[int, ...]:
        return () if turn is None else (*self.known[turn].request.before, turn)

    def _exchanges(self, before: Sequence[int]) -> list[Exchanged]:
        said: list[Exchanged] = []
        for number in before:
            known = self.known[number]
            calls = said[-1].got.calls if said and said[-1].got is not None else ()
            said.append(Exchanged(known.request.asked, calls, known.got))
        return said

    def _edited(self, before: tuple[int, ...], edit: Edit) -> tuple[int, ...]:
        """A conversation is edited by whole exchanges: a prompt with its calls, their results and the answer."""
        units: list[tuple[int, ...]] = []
        for number in before:
            if isinstance(self.known[number].request.asked, str) or not units:
                units.append((number,))
            else:
                units[-1] = (*units[-1], number)
        if len(units) > 2:
            match edit:
                case "drop":
                    del units[1]
                case "front":
                    del units[0]
                case "swap":
                    units[-2], units[-3] = units[-3], units[-2]
                case "twice":
                    units.append(units[-2])
        return tuple(number for unit in units for number in unit)


# --- an attempt ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Attempt:
    """One request under way: `task` ends when it is over; `leave` is the client's going."""

    number: int
    request: Request
    proxy: int
    begun: float
    task: asyncio.Task[Heard]
    headers: dict[str, str] = field(default_factory=dict)
    reading_on: asyncio.Event = field(default_factory=asyncio.Event)
    read: asyncio.Event = field(default_factory=asyncio.Event)  # a slow reader has stopped, or all is over
    got: Got | None = None

    def leave(self) -> None:
        self.task.cancel()


class Caller:
    """Sends attempts, each with these `headers`, and notes what their clients know."""

    def __init__(self, note: Callable[[Entry], None], headers: Mapping[str, str], ask: Ask | None = None) -> None:
        self._note = note
        self._headers = headers
        self._ask = ask
        self._count = 0
        limits = httpx.Limits(max_keepalive_connections=0)
        self._http = httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(verify=False, limits=limits), timeout=None)
        small = [(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)]
        slow = httpx.AsyncHTTPTransport(verify=False, limits=limits, socket_options=small)
        self._slow = httpx.AsyncClient(transport=slow, timeout=None)

    async def close(self) -> None:
        await self._http.aclose()
        await self._slow.aclose()

    def send(
        self, client: Client, request: Request, url: str, proxy: int, *, again: Again | None = None, slow: bool = False,
        anew: bool = False,
    ) -> Attempt:  # fmt: skip
        self._count += 1
        headers = {**self._headers, **request.headers}
        if again == "count":
            headers["x-stainless-retry-count"] = "1"
        now = time.monotonic()
        self._note(Sent(now, self._count, request.turn, client.speaker.name, request.asked, request.path, anew))
        attempt = Attempt(self._count, request, proxy, now, None)  # type: ignore[arg-type]
        attempt.task = asyncio.create_task(self._run(attempt, client, url + request.route, headers, slow))
        return attempt

    async def _run(self, attempt: Attempt, client: Client, url: str, headers: dict[str, str], slow: bool) -> Heard:
        reader = doors.reader(attempt.request.wire)
        if not slow:
            attempt.reading_on.set()
        try:
            match attempt.request.wire:
                case "socket":
                    await self._by_socket(attempt, reader, url, headers)
                case "engine" | "litellm" | "sdk" as by:
                    assert self._ask is not None
                    reader.feed(await self._ask({"by": by, "agent": client.speaker.name, **attempt.request.body}))
                case _:
                    await self._exchange(attempt, reader, url, headers, self._slow if slow else self._http)
        except asyncio.CancelledError:
            pass  # the client left: what it had read by then counts
        except httpx.ConnectError as exc:
            reader.error = reader.error or f"refused: {exc}"
        except (httpx.HTTPError, WebSocketException, OSError, NoAnswer):
            pass
        finally:
            attempt.read.set()
        now = time.monotonic()
        if reader.got is not None:
            attempt.got = reader.got
            heard = Heard(now, attempt.number, "acknowledged", reader.got.answer)
            client.acknowledged(attempt.request.turn, reader.got)
        elif reader.error is not None and not reader.error.endswith(doors.IN_DOUBT):
            heard = Heard(now, attempt.number, "failed", code=reader.error)
        else:
            heard = Heard(now, attempt.number, "unknown", code=reader.error or "")
        self._note(heard)
        return heard

    async def _by_socket(self, attempt: Attempt, reader: Reader, url: str, headers: dict[str, str]) -> None:
        address = "ws" + url.removeprefix("http")
        async with connect(address, additional_headers=headers, max_size=None, proxy=None) as socket:
            if socket.response is not None:
                attempt.headers = {name.lower(): value for name, value in socket.response.headers.raw_items()}
            await socket.send(json.dumps(attempt.request.body))
            async for message in socket:
                reader.feed(json.loads(message))
                if reader.got is not None or reader.error is not None:
                    return

    async def _exchange(
        self, attempt: Attempt, reader: Reader, url: str, headers: dict[str, str], http: httpx.AsyncClient
    ) -> None:
        async with http.stream("POST", url, json=attempt.request.body, headers=headers) as response:
            attempt.headers = dict(response.headers)
            kind = response.headers["content-type"].partition(";")[0]
            if kind not in (SERVER_SENT, LINES):
                content = await response.aread()
                try:
                    body = json.loads(content)
                except ValueError:
                    reader.error = f"{response.status_code} {NOT_JSON}: {content[:100]!r}"
                    return
                if response.status_code >= 400:
                    reader.error = f"{response.status_code} {doors.code(body)}"
                else:
                    reader.feed(body)
                return
            size = 0
            async for line in response.aiter_lines():
                size += len(line)
                if size > FIRST_BYTES and not attempt.reading_on.is_set():
                    attempt.read.set()
                    await attempt.reading_on.wait()
                if kind == LINES and line:
                    reader.feed(json.loads(line))
                elif line.startswith("data: ") and line != "data: [DONE]":
                    reader.feed(json.loads(line.removeprefix("data: ")))
                if reader.got is not None or reader.error is not None:
                    return
