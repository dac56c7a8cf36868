"""What waits for a person, over the API: as a list, as events, and answered by whom it belongs to alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from pydantic import SecretStr

from cli_session_proxy.backends.base import Event
from cli_session_proxy.domain.models import JSON
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.errors import NotFound
from cli_session_proxy.settings import Profile, Settings

from ..scripted import Asker, Scripted, delta
from ..serving import serving
from ..talking import request
from ..until import until
from .cluster import cluster
from .test_passing_on import passed_on

KEYS = {"alice": "alices-secret-0123456789", "bob": "bobs-secret-0123456789"}
ALICE, BOB = ({"X-Api-Key": key} for key in KEYS.values())
PROFILES = {"coder": Profile(tools=("Bash",), approve=("Bash",))}


@asynccontextmanager
async def served(
    tmp_path: Path, steps: Sequence[Event | None], **more: Any
) -> AsyncIterator[tuple[Engine, Scripted, httpx.AsyncClient]]:
    keys = {name: SecretStr(key) for name, key in KEYS.items()}
    settings = Settings(var=tmp_path / "var", port=0, keys=keys, disconnect_grace=60.0, **more)
    backend = Scripted(steps)
    engine = Engine(settings, backend=backend)
    await engine.start()
    try:
        async with serving(engine, settings) as url, httpx.AsyncClient(base_url=url, trust_env=False) as http:
            yield engine, backend, http
    finally:
        for _ in steps:
            backend.go.release()
        await engine.stop()


async def waiting(http: httpx.AsyncClient, headers: dict[str, str] = ALICE, count: int = 1) -> list[JSON]:
    async def there() -> list[JSON]:
        told: list[JSON] = (await http.get("/approvals", headers=headers)).json()["data"]
        return told if len(told) == count else []

    return await until(there)


async def event_of(lines: AsyncIterator[str], name: str) -> JSON:
    """The data of the next event of this name."""
    async for line in lines:
        if line == f"event: {name}":
            told: JSON = json.loads((await anext(lines)).removeprefix("data: "))
            return told
    raise AssertionError("the stream ended")


async def test_a_bot_hears_what_waits_and_answers_it(tmp_path: Path) -> None:
    asker = Asker()
    command = {"command": "curl x", "description": "key sk-ant-api03-" + "a" * 40}
    steps = [asker.asks("r1", **command), None, delta("done")]
    async with served(tmp_path, steps, profiles=PROFILES) as (engine, backend, http):
        async with asyncio.timeout(60), http.stream("GET", "/approvals/events", headers=ALICE) as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            lines = stream.aiter_lines()
            assert await event_of(lines, "approvals") == {"data": []}
            answer = await engine.submit(request("go", owner="alice"))
            (one,) = (await event_of(lines, "approvals"))["data"]
            assert (one["agent_id"], one["turn_id"], one["tool"]) == ("a", answer.turn_id, "Bash")
            assert (one["kind"], one["asked"], one["left_out"], one["before"]) == ("command", "curl x", 0, None)
            assert one["text"] == 'curl x\n\n{"description": "key [redacted]"}'
            assert one["until"] - one["at"] == pytest.approx(600.0)
            body = {"approval": one["id"], "decision": "deny", "word": "not there"}
            told = await http.post("/chains/a/approve", json=body, headers=ALICE)
            assert told.json() == {
                "object": "chain.approval", "agent_id": "a", "approval": one["id"], "tool": "Bash", "outcome": "denied",
            }  # fmt: skip
            assert await event_of(lines, "approvals") == {"data": []}
        ((_, verdict),) = asker.told
        assert (verdict.by, verdict.word) == ("alice", "not there")
        again = await http.post("/chains/a/approve", json={**body, "decision": "allow", "word": None}, headers=ALICE)
        assert (again.status_code, again.json()["error"]["code"]) == (409, "approval_answered")
        assert again.headers["x-should-retry"] == "false"
        audit = [json.loads(line) for line in (tmp_path / "var" / "audit.jsonl").read_text().splitlines()]
        noted = [(line["owner"], line["what"], line["status"]) for line in audit if line["type"] == "approve"]
        assert noted == [("alice", "POST /v1/chains/a/approve", status) for status in (None, 200, None, 409)]
        said = [line["detail"] for line in audit if line["status"] == 200 and line["type"] == "approve"]
        assert said == [{"approval": one["id"], "tool": "Bash", "outcome": "denied"}]
        backend.go.release()
        await answer.turn()
        answer.acknowledge()
        dump = (await http.get("/chains/a", headers=ALICE)).json()
        (kept,) = dump["turns"][0]["reason"]["approvals"]
        assert (kept["outcome"], kept["by"], kept["word"]) == ("denied", "alice", "not there")
        assert "waited for approval: it was refused by alice, who said: not there" in str(dump["turns"][0]["says"])


async def test_the_agents_own_events_hold_what_waits(tmp_path: Path) -> None:
    asker = Asker()
    edit = {"file_path": "/f", "old_string": "one\ntwo", "new_string": "one\n2"}
    async with served(tmp_path, [delta("I edit."), asker.asks("r1", "Edit", **edit), None]) as (engine, _, http):
        answer = await engine.submit(request("go", owner="alice"))
        await waiting(http)
        async with asyncio.timeout(60), http.stream("GET", "/chains/a/events?live=1", headers=ALICE) as stream:
            (turn,) = (await event_of(stream.aiter_lines(), "progress"))["turns"]
        (one,) = turn["approvals"]
        assert (turn["doing"], turn["says"]) == ("approval", "waits for a person's approval: may Edit run?")
        assert (one["kind"], one["text"]) == ("diff", "in /f\n one\n-two\n+2")
        (shown,) = (await http.get("/overview", headers=ALICE)).json()["running"]
        assert shown["says"] == turn["says"]
        answer.cancel()
        answer.leave()


async def test_who_has_another_key_sees_nothing_of_it_and_may_not_answer(tmp_path: Path) -> None:
    asker = Asker()
    async with served(tmp_path, [asker.asks("r1"), None]) as (engine, _, http):
        answer = await engine.submit(request("go", owner="alice"))
        (one,) = await waiting(http)
        assert (await http.get("/approvals", headers=BOB)).json()["data"] == []
        assert (await http.get("/approvals")).status_code == 401
        body = {"approval": one["id"], "decision": "allow"}
        assert (await http.post("/chains/a/approve", json=body, headers=BOB)).status_code == 404
        assert (await http.post("/chains/a/approve", json=body)).status_code == 401
        # a page of somebody else, and a form of any page
        for strange in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
            told = await http.post("/chains/a/approve", json=body, headers=ALICE | strange)
            assert told.status_code == 400
        form = {"Content-Type": "text/plain", "Sec-Fetch-Site": "same-origin"}
        told = await http.post("/chains/a/approve", content=json.dumps(body), headers=ALICE | form)
        assert told.status_code == 400
        assert asker.told == []
        answer.cancel()
        answer.leave()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"decision": "allow"}, "approval"),
        ({"approval": "appr_0", "decision": "yes"}, "decision"),
        ({"approval": "appr_0"}, "decision"),
        ({"approval": "appr_0", "decision": "deny", "word": 1}, "word"),
        ({"approval": "appr_0", "decision": "deny", "word": "x" * 2001}, "word"),
        ({"approval": "appr_0", "decision": "allow", "word": "why"}, "word"),
    ],
)
async def test_a_wrong_answer_is_named(body: JSON, param: str, tmp_path: Path) -> None:
    async with served(tmp_path, [None]) as (engine, _, http):
        answer = await engine.submit(request("go", owner="alice"))
        told = await http.post("/chains/a/approve", json=body, headers=ALICE)
        assert (told.status_code, told.json()["error"]["param"]) == (400, param)
        nothing = {"approval": "appr_0", "decision": "allow"}
        assert (await http.post("/chains/a/approve", json=nothing, headers=ALICE)).status_code == 404
        assert (await http.post("/chains/nobody/approve", json=nothing, headers=ALICE)).status_code == 404
        answer.cancel()
        answer.leave()


async def test_a_long_text_is_whole_in_the_list_and_cut_in_the_events(tmp_path: Path) -> None:
    asker = Asker()
    async with served(tmp_path, [asker.asks("r1", command="x" * 25_000), None]) as (engine, _, http):
        answer = await engine.submit(request("go", owner="alice"))
        (one,) = await waiting(http)
        assert (len(one["text"]), one["left_out"]) == (25_000, 0)
        async with asyncio.timeout(60), http.stream("GET", "/chains/a/events?live=1", headers=ALICE) as stream:
            (turn,) = (await event_of(stream.aiter_lines(), "progress"))["turns"]
        assert (len(turn["approvals"][0]["text"]), turn["approvals"][0]["left_out"]) == (20_000, 5_000)
        answer.cancel()
        answer.leave()


async def test_whether_anything_can_wait_is_told(tmp_path: Path) -> None:
    async with served(tmp_path, []) as (_, _, http):
        told = (await http.get("/approvals", headers=ALICE)).json()
        assert told == {"object": "list", "enabled": False, "data": []}
    async with served(tmp_path, [], profiles=PROFILES) as (_, _, http):
        assert (await http.get("/approvals", headers=ALICE)).json()["enabled"] is True


async def test_a_damaged_agent_hides_nothing_that_waits_for_others(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [Asker().asks("r1"), None, delta("done")]
    monkeypatch.setattr("tests.http.cluster.MemoryBackend", lambda _model: Scripted(steps))
    async with cluster(postgres_url, tmp_path) as (one, two):
        for agent in ("damaged", "sound"):
            await one.engine.submit(request("go", agent=agent))
        await until(lambda: len(one.engine.asked("local")) == 2)
        with psycopg.connect(postgres_url) as conn:
            conn.execute("UPDATE agents SET created_at = 1e300 WHERE agent_id = 'damaged'")
        (told,) = (await two.http.get("/v1/approvals")).json()["data"]
        assert told["agent_id"] == "sound"
        backend: Any = one.backend
        backend.go.release()
        backend.go.release()


async def test_what_waits_at_another_host_is_shown_and_answered_at_any(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asker = Asker()
    steps = [asker.asks("r1", command="ls -l"), None, delta("done")]
    monkeypatch.setattr("tests.http.cluster.MemoryBackend", lambda _model: Scripted(steps))
    async with cluster(postgres_url, tmp_path) as (one, two):
        answer = await one.engine.submit(request("go"))
        await until(lambda: bool(one.engine.asked("local")))
        (told,) = (await two.http.get("/v1/approvals")).json()["data"]
        assert (told["agent_id"], told["turn_id"], told["asked"]) == ("a", answer.turn_id, "ls -l")
        async with asyncio.timeout(60), two.http.stream("GET", "/v1/chains/a/events?live=1") as stream:
            lines = stream.aiter_lines()
            while not (turns := (await event_of(lines, "progress"))["turns"]):
                pass
            assert turns[0]["approvals"][0]["text"] == "ls -l"
        body = {"approval": told["id"], "decision": "allow"}
        # Who leaves while it answers is not the turn's own client.
        reached, goes_on = asyncio.Event(), asyncio.Event()

        async def held_up(*_: Any) -> None:
            reached.set()
            await goes_on.wait()
            raise NotFound("it has left")

        with monkeypatch.context() as patch:
            patch.setattr(one.engine, "approve", held_up)
            leaving = asyncio.create_task(two.http.post("/v1/chains/a/approve", json=body))
            await reached.wait()
            leaving.cancel()
            await until(lambda: passed_on(two))
            goes_on.set()
        await until(lambda: not two.engine._deliveries._writes)
        turn = await one.store.turn(answer.turn_id)
        assert turn is not None
        assert turn.delivery == "pending"
        said = await two.http.post("/v1/chains/a/approve", json=body)
        assert (said.status_code, said.json()["outcome"]) == (200, "allowed")
        assert asker.outcomes == [("r1", "allowed")]
        late = await two.http.post("/v1/chains/a/approve", json=body)
        assert late.status_code == 409
        assert (await two.http.get("/v1/approvals")).json()["data"] == []
        backend: Any = one.backend
        backend.go.release()
        await answer.turn()
        answer.acknowledge()
