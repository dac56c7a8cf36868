"""The routes of a running turn: what it says to who watches, and its end by hand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

from cli_session_proxy.backends.base import Retried
from cli_session_proxy.domain.models import JSON

from ..scripted import RETRY, delta
from ..talking import request
from .test_approvals import ALICE, BOB, served

STEPS = (delta("The colour "), None, Retried(RETRY), None, delta("is teal."), None)


async def progress(lines: AsyncIterator[str]) -> list[JSON]:
    """The next `progress` event."""
    async for line in lines:
        if line == "event: progress":
            told: list[JSON] = json.loads((await anext(lines)).removeprefix("data: "))["turns"]
            return told
    raise AssertionError("the stream ended")


async def test_the_stream_tells_the_text_and_what_is_waited_for_to_the_owner_alone(tmp_path: Path) -> None:
    async with served(tmp_path, STEPS) as (engine, backend, http):
        answer = await engine.submit(request("hello", owner="alice"))
        await backend.reached.acquire()
        assert (await http.get("/chains/a/events?live=1", headers=BOB)).status_code == 404
        async with asyncio.timeout(60), http.stream("GET", "/chains/a/events?live=1", headers=ALICE) as stream:
            lines = stream.aiter_lines()
            (told,) = await progress(lines)
            assert (told["turn_id"], told["says"], told["text"]) == (answer.turn_id, "answers", "The colour ")
            backend.go.release()
            (told,) = await progress(lines)
            assert told["says"] == "the provider asks to wait 30 s, retry 2 of 3 (429 rate_limit_error)"
            backend.go.release()
            (told,) = await progress(lines)
            assert told["text"] == "The colour is teal."
            backend.go.release()
            while last := await progress(lines):  # it may be seen at its commit
                assert last[0]["doing"] == "storing"
        answer.leave()


async def test_a_turn_is_cancelled_by_its_owner_and_by_no_other_page(tmp_path: Path) -> None:
    async with served(tmp_path, STEPS) as (engine, backend, http):
        answer = await engine.submit(request("hello", owner="alice"))
        await backend.reached.acquire()
        body = {"turn": answer.turn_id}
        assert (await http.post("/chains/a/cancel", json=body)).status_code == 401
        assert (await http.post("/chains/a/cancel", json=body, headers=BOB)).status_code == 404
        elsewhere = {**ALICE, "Origin": "https://example.com"}
        assert (await http.post("/chains/a/cancel", json=body, headers=elsewhere)).status_code == 400
        form = {**ALICE, "Sec-Fetch-Site": "same-origin", "Content-Type": "text/plain"}
        assert (await http.post("/chains/a/cancel", content="{}", headers=form)).status_code == 400
        wrong = await http.post("/chains/a/cancel", json={"turn": 1}, headers=ALICE)
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "turn")
        done = (await http.post("/chains/a/cancel", json=body, headers=ALICE)).json()
        assert done == {"object": "chain.cancelled", "agent_id": "a", "cancelled": [answer.turn_id]}
        assert (await http.post("/chains/a/cancel", json={}, headers=ALICE)).status_code == 404
        turn = await engine.store.turn(answer.turn_id)
        assert turn is not None
        assert turn.status == "cancelled"
        answer.leave()
