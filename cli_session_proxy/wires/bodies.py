"""From the bytes of a request to the call they mean, whatever the wire.

How a body is read goes by its size: a small one on the event loop, a middling one in a thread, a large one in a process
of its own (see `aside`). Each step of the first two takes less than 50 ms at the worst body of that size.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from starlette.requests import ClientDisconnect, HTTPConnection, Request

from ..aside.pool import Aside, OutOfBoundsError
from ..domain.models import JSON
from ..errors import InvalidRequest, RequestTooLarge
from .common import Naming, naming, read_bytes
from .sending import headers_of

T = TypeVar("T")

# A body is sent by a program on this machine: whoever takes longer is stuck. Seconds for the whole of it.
BODY_TIMEOUT = 300.0
# Bytes that are read on the event loop: under 1 ms of text, 10 ms of the worst JSON (2,000 messages of one letter).
SMALL = 64 * 1024
# Bytes that are read in a thread: the longest call into C, which holds the event loop too, takes 20 ms of the worst
# JSON. Most agent programs send between these two.
MIDDLING = 512 * 1024


async def read_call(request: Request, limit: int, read: Callable[[JSON, Naming], T]) -> T:
    """What the wire's `read` makes of the body, at most `limit` bytes of it. Raises `InvalidRequest`."""
    return await read_aside(request.app.state.aside, await read_body(request, limit), named(request), read)


async def read_aside(aside: Aside, raw: bytes, about: Naming, read: Callable[[JSON, Naming], T]) -> T:
    """The same of a body that is there: beside the event loop, where it is large."""
    if len(raw) <= SMALL:
        return read_bytes(raw, about, read)
    if len(raw) <= MIDDLING:
        return await aside.thread(read_bytes, raw, about, read)
    try:
        return await aside.reading.call(read_bytes, raw, about, read)
    except OutOfBoundsError as exc:
        raise InvalidRequest(f"the body cannot be read: {exc}; send less, or simpler JSON") from exc


def named(request: HTTPConnection) -> Naming:
    """What the request says about itself outside its body."""
    state = request.scope["state"]
    headers = headers_of(request.scope)
    return naming(headers, path_agent=state["agent_id"], request_id=state["request_id"], owner=state["owner"])


def owner_of(request: HTTPConnection) -> str:
    """The name of the key that the request came with."""
    owner: str = request.scope["state"]["owner"]
    return owner


async def read_body(request: Request, limit: int) -> bytes:
    """The body, at most `limit` bytes. Raises `RequestTooLarge`, before reading where the length is declared.

    Raises `QueueFull` where the bodies of this owner's requests are too much together.
    """
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:18]) > limit:
        raise _too_large(limit)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT):
            async for chunk in request.stream():
                request.scope["state"]["held"].body(len(chunk))
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


def is_on(request: Request, name: str, *, default: bool) -> bool:
    """A switch of the address: 1 or 0. Raises `InvalidRequest`."""
    given = request.query_params.get(name)
    if given not in (None, "0", "1"):
        raise InvalidRequest(f"{name} must be 1 or 0", param=name)
    return default if given is None else given == "1"


def whole_number(request: Request, name: str, default: int | None) -> int | None:
    """A parameter of the address, 1 or more. Raises `InvalidRequest`."""
    given = request.query_params.get(name)
    if given is None:
        return default
    # SQLite's whole numbers have 64 bits.
    if not given.isascii() or not given.isdigit() or len(given) > 18 or int(given) == 0:
        raise InvalidRequest(f"{name} must be a whole number from 1", param=name)
    return int(given)
