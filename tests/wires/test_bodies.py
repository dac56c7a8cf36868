"""Where a body is read: on the event loop, in a thread, or in a process that can be ended."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from cli_session_proxy.aside import pool
from cli_session_proxy.aside.pool import Aside
from cli_session_proxy.domain.models import JSON
from cli_session_proxy.errors import InvalidRequest, ProxyError
from cli_session_proxy.http.bounds import Bounds
from cli_session_proxy.wires.asgi import MIDDLING, SMALL, read_call
from cli_session_proxy.wires.common import Naming

MIB = 1024 * 1024
STATE: dict[str, Any] = {"agent_id": None, "request_id": "r", "owner": "local", "headers": {}}


def where(body: JSON, naming: Naming) -> tuple[int, int, int, str | None]:
    """Process and thread that read it, what was in it, and what the request said beside it."""
    if body.get("spin"):
        while True:
            pass
    if body.get("eat"):
        bytes(64 * 1024**3)
    if body.get("odd"):
        raise InvalidRequest("that is odd: send another", param="odd")
    return os.getpid(), threading.get_ident(), len(body["text"]), naming.request_id


@pytest.fixture
async def aside() -> AsyncIterator[Aside]:
    made = Aside()
    yield made
    await made.close()


@pytest.fixture
async def client(aside: Aside) -> AsyncIterator[httpx.AsyncClient]:
    bounds = Bounds(requests=1000, bodies=1 << 40)

    async def route(request: Request) -> JSONResponse:
        try:
            with bounds.request("local") as held:
                request.scope["state"] = {**STATE, "held": held}
                return JSONResponse(await read_call(request, 70 * MIB, where))
        except ProxyError as exc:
            return JSONResponse({"error": exc.message, "param": exc.param}, exc.status)

    app = Starlette(routes=[Route("/", route, methods=["POST"])])
    app.state.aside = aside
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost", timeout=60) as http:
        yield http


async def sent(client: httpx.AsyncClient, size: int, **more: Any) -> Any:
    text = "x" * (size - len(json.dumps({"text": "", **more})))
    answer = await client.post("/", content=json.dumps({"text": text, **more}))
    return answer.json() if answer.status_code == 200 else (answer.status_code, answer.json())


async def test_the_larger_a_body_the_farther_from_the_event_loop_it_is_read(
    client: httpx.AsyncClient, aside: Aside
) -> None:
    here, loop = os.getpid(), threading.get_ident()
    process, thread, size, about = await sent(client, SMALL)
    assert (process, thread, about) == (here, loop, "r")
    process, thread, _, about = await sent(client, MIDDLING)
    assert (process == here, thread == loop, about) == (True, False, "r")
    assert aside.reading.processes == 0
    process, _, size, about = await sent(client, MIDDLING + 1)
    assert (process == here, about) == (False, "r")
    assert size > MIDDLING - 100


async def test_the_largest_body_is_read(client: httpx.AsyncClient) -> None:
    process, _, size, _ = await sent(client, 64 * MIB)
    assert process != os.getpid()
    assert size > 63 * MIB


@pytest.mark.parametrize("size", [SMALL, MIDDLING, MIDDLING + 1])
async def test_a_body_is_refused_in_the_same_words_wherever_it_is_read(client: httpx.AsyncClient, size: int) -> None:
    assert await sent(client, size, odd=True) == (400, {"error": "that is odd: send another", "param": "odd"})


@pytest.mark.parametrize(("how", "why"), [("spin", "processor time"), ("eat", "memory")])
@pytest.mark.sample(1)
async def test_a_large_body_that_takes_too_much_is_refused_and_the_next_one_is_read(
    client: httpx.AsyncClient, aside: Aside, how: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "spin":  # only there: on a busy machine to eat the memory may take longer than that
        monkeypatch.setattr(aside.reading, "_seconds", 2.0)
    status, said = await sent(client, MIB, **{how: True})
    assert status == 400
    assert said["error"].startswith("the body cannot be read: it takes more than ")
    assert why in said["error"]
    assert (await sent(client, MIB))[3] == "r"


@pytest.mark.full  # through the whole door each time: freezing/test_attacks.py
async def test_the_worst_json_of_the_largest_body_is_refused(client: httpx.AsyncClient) -> None:
    """Twenty million lists would take more memory than the machine may have."""
    content = b'{"text":"","x":[' + b"[]," * (20 * MIB) + b"[]]}"
    answer = await client.post("/", content=content)
    assert answer.status_code == 400
    assert any(why in answer.json()["error"] for why in ("JSON values", "memory", "processor time"))


async def test_no_more_bodies_wait_than_may(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "THREADS", 0)
    monkeypatch.setattr(pool, "WAITING", 0)
    status, said = await sent(client, MIDDLING)
    assert (status, said["error"].endswith("send this one again later")) == (429, True)
