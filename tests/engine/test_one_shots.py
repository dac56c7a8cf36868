"""Requests without a name that nobody comes back to: they are told in one number, and forgotten in time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from cli_session_proxy.backends.base import Completed
from cli_session_proxy.commands import finding, listing
from cli_session_proxy.domain.searching import Search
from cli_session_proxy.engine import forgetting
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.export import lists
from cli_session_proxy.http import routes
from cli_session_proxy.settings import Settings, load
from cli_session_proxy.stores.base import Expiry
from turnfault.provider.upstream import Upstream

from .. import without_cli
from ..conftest import MakeSettings
from ..every_wire import chains, proxied
from ..files import files
from ..matrix import half
from ..until import until
from ..without_cli import proxied_without_cli

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


@dataclass
class Proxy:
    engine: Engine
    http: httpx.AsyncClient
    settings: Settings

    async def ask(self, path: str = "/v1/chat/completions", **body: Any) -> Any:
        answer = await self.http.post(path, json={"model": "sonnet", **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def agents(self) -> int:
        return len(await chains(self.engine))


@pytest.fixture(params=["sqlite", "postgresql"])
async def proxy(
    make_settings: MakeSettings, upstream: Upstream, request: pytest.FixtureRequest
) -> AsyncIterator[Proxy]:
    there = {} if request.param == "sqlite" else {"store": request.getfixturevalue("postgres_url")}
    settings = make_settings(**there)
    async with (
        proxied_without_cli(settings, upstream) as (engine, root),
        httpx.AsyncClient(base_url=root, trust_env=False, timeout=60) as http,
    ):
        yield Proxy(engine, http, settings)


async def forget(proxy: Proxy) -> None:
    """As if `forget_unnamed` had passed."""
    await proxy.engine.forgetting.idle(None, -1.0)


@pytest.mark.sample(1)
async def test_one_shots_are_forgotten_with_their_files_and_nothing_else_is(proxy: Proxy) -> None:
    await proxy.ask(messages=HELLO)
    await proxy.ask("/v1/messages", messages=HELLO, max_tokens=9)
    await proxy.ask("/v1/models/sonnet:generateContent", contents=[{"parts": [{"text": "hello"}]}])
    await proxy.ask("/api/chat", messages=HELLO, stream=False)
    await proxy.ask("/v1/responses", input="hello", store=False)
    assert await proxy.agents() == 5
    kept = await proxy.ask("/v1/responses", input="stored")
    interaction = await proxy.ask("/v1/interactions", input="stored")
    context = (await proxy.ask("/api/generate", prompt="hello", stream=False))["context"]
    conversation = (await proxy.http.post("/v1/conversations", json={})).json()
    await proxy.ask("/v1/responses", input="talk", conversation=conversation["id"], store=False)
    await proxy.ask(messages=HELLO, agent_id="ada")
    talk = [{"role": "user", "content": "one"}]
    said = (await proxy.ask(messages=talk))["choices"][0]["message"]
    talk += [said, {"role": "user", "content": "two"}]
    await proxy.ask(messages=talk)
    assert await proxy.agents() == 11
    await forget(proxy)
    assert await proxy.agents() == 6
    assert (await proxy.http.get(f"/v1/responses/{kept['id']}")).status_code == 200
    assert (await proxy.http.get(f"/v1beta/interactions/{interaction['id']}")).status_code == 200
    await proxy.ask("/api/generate", prompt="again", context=context, stream=False)
    await proxy.ask("/v1/responses", input="more", conversation=conversation["id"])


async def test_who_goes_on_while_it_is_being_forgotten_keeps_the_chain(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = list(HELLO)
    said = (await proxy.ask(messages=talk))["choices"][0]["message"]
    talk += [said, {"role": "user", "content": "two"}]
    going_on: list[asyncio.Task[Any]] = []
    remove = proxy.engine.store.delete_agent

    async def accepted() -> bool:
        return [row.turns for row in await chains(proxy.engine)] == [2]

    async def late(key: int, expiry: Expiry | None = None) -> bool:
        going_on.append(asyncio.create_task(proxy.ask(messages=talk)))
        await until(accepted)
        return await remove(key, expiry)

    monkeypatch.setattr(proxy.engine.store, "delete_agent", late)
    await forget(proxy)
    assert (await going_on[0])["choices"][0]["message"]["content"]
    assert await accepted()


async def test_who_goes_on_from_what_was_forgotten_a_moment_ago_brings_it_along(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch, upstream: Upstream
) -> None:
    talk = list(HELLO)
    talk += [(await proxy.ask(messages=talk))["choices"][0]["message"], {"role": "user", "content": "two"}]
    accept = proxy.engine.store.accept

    async def late(*new: Any, **beside: Any) -> Any:
        monkeypatch.setattr(proxy.engine.store, "accept", accept)
        await forget(proxy)
        return await accept(*new, **beside)

    monkeypatch.setattr(proxy.engine.store, "accept", late)
    await proxy.ask(messages=talk)
    assert len(upstream.requests[-1].messages) == 3
    (row,) = await chains(proxy.engine)
    assert row.turns == 2


EVERY_WIRE: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": HELLO}),
    ("/v1/messages", {"messages": HELLO, "max_tokens": 9}),
    ("/v1/responses", {"input": "hello"}),
    ("/v1/interactions", {"input": "hello"}),
    ("/api/chat", {"messages": HELLO}),
]
NONE = {"X-Chain": "none"}


@pytest.mark.parametrize(
    ("proxy", "wire", "stream"), half(["sqlite", "postgresql"], EVERY_WIRE, [False, True]), indirect=["proxy"]
)
@pytest.mark.sample(4)
async def test_of_a_request_that_keeps_nothing_nothing_is_left_once_it_was_answered(
    proxy: Proxy, wire: tuple[str, dict[str, Any]], stream: bool
) -> None:
    path, body = wire
    answer = await proxy.http.post(path, json={"model": "sonnet", "stream": stream, **body}, headers=NONE)
    assert answer.status_code == 200, answer.text
    assert "hello" in answer.text

    async def gone() -> bool:
        return not await chains(proxy.engine)

    await until(gone)


async def test_it_goes_on_from_nothing_that_is_kept_and_cannot_be_gone_on_from(proxy: Proxy) -> None:
    talk = list(HELLO)
    talk += [(await proxy.ask(messages=talk))["choices"][0]["message"], {"role": "user", "content": "two"}]
    response = await proxy.ask("/v1/responses", input="stored")
    assert await proxy.agents() == 2
    whole = await proxy.http.post("/v1/chat/completions", json={"model": "sonnet", "messages": talk}, headers=NONE)
    assert "two" in whole.text

    async def as_before() -> bool:
        return [row.turns for row in await chains(proxy.engine)] == [1, 1]

    await until(as_before)
    for path, body in (
        ("/v1/chat/completions", {"messages": HELLO, "agent_id": "ada"}),
        ("/v1/responses", {"input": "more", "previous_response_id": response["id"]}),
        ("/v1/responses", {"input": "more", "background": True}),
    ):
        refused = await proxy.http.post(path, json={"model": "sonnet", **body}, headers=NONE)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "X-Chain"), refused.text
    await until(as_before)


async def test_nobody_goes_on_from_what_is_about_to_be_deleted(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy.engine.forgetting, "_forget", nothing)  # it has not come to that yet
    once = await proxy.http.post("/v1/chat/completions", json={"model": "sonnet", "messages": HELLO}, headers=NONE)
    said = once.json()["choices"][0]["message"]
    await proxy.ask(messages=[*HELLO, said, {"role": "user", "content": "two"}])
    assert sorted(row.turns for row in await chains(proxy.engine)) == [1, 2]


async def nothing(*_: object) -> None: ...


RESPONSES = "/v1/responses"


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.sample(2)
async def test_of_a_client_that_stores_nothing_and_never_goes_on_only_cost_and_count_are_left(
    proxy: Proxy, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_of = without_cli.end_of
    monkeypatch.setattr(without_cli, "end_of", lambda *said: replace(cast(Completed, end_of(*said)), cost_usd=0.25))
    asked = [proxy.ask(RESPONSES, input=f"question {number}", store=False) for number in range(5)]
    if at_once:
        await asyncio.gather(*asked)
    else:
        for one in asked:
            await one

    async def gone() -> bool:
        return not await chains(proxy.engine)

    await until(gone)
    now = time.time()
    left = await proxy.engine.store.forgotten("local", now - 3600)  # a sum for each hour
    assert {row.model for row in left} == {"sonnet"}
    assert (sum(row.turns for row in left), sum(row.cost_usd or 0 for row in left)) == (5, 1.25)
    assert await proxy.engine.store.one_shots("local", since=now - 3600, until=now) == (5, 1.25)
    assert (await proxy.http.get("/v1/chains")).json()["one_shots"]["count"] == 5
    overview = (await proxy.http.get("/v1/overview")).json()
    assert overview["days"][-1]["cost_usd"] == overview["status"]["cost_today"] == 1.25
    (day,) = [row for row in await listing.spent(proxy.settings, "day") if row["turns"]]
    assert (day["turns"], day["cost_usd"]) == (5, 1.25)


async def test_a_client_that_stores_nothing_and_goes_on_by_its_history_keeps_its_chains(proxy: Proxy) -> None:
    async def chat(word: str) -> None:
        talk: list[Any] = [{"role": "user", "content": word}]
        for more in ("two", "three"):
            answer = await proxy.ask(RESPONSES, input=talk, store=False)
            talk += [*answer["output"], {"role": "user", "content": more}]

    await chat("one")
    await chat("uno")
    await proxy.ask(RESPONSES, input="once", store=False)
    await proxy.ask(RESPONSES, input="once more", store=False)
    assert sorted(row.turns for row in await chains(proxy.engine)) == [1, 1, 2, 2]


async def test_what_else_the_client_may_come_back_for_is_kept(proxy: Proxy) -> None:
    await proxy.ask(RESPONSES, input="named", store=False, agent_id="ada")
    await proxy.ask(RESPONSES, input="stored")
    other = {"User-Agent": "another program"}
    for number in range(2):
        body = {"model": "sonnet", "input": f"question {number}", "store": False}
        await proxy.http.post(RESPONSES, json=body, headers=other if number else {})
    assert await proxy.agents() == 4


async def test_what_a_crash_left_of_it_is_deleted_later(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy.engine.forgetting, "_forget", nothing)  # as if it had died here
    await proxy.http.post("/v1/chat/completions", json={"model": "sonnet", "messages": HELLO}, headers=NONE)
    await proxy.ask(messages=HELLO)
    assert await proxy.agents() == 2
    monkeypatch.setattr(forgetting, "HOUR", -1.0)
    await proxy.engine.forgetting.idle(None)
    (row,) = await chains(proxy.engine)
    assert row.agent.agent_id.startswith("auto_")


async def test_its_files_go_too(make_settings: MakeSettings, upstream: Upstream, claude_2: Path) -> None:
    settings = make_settings(claude_bin=claude_2)
    async with (
        proxied(settings) as (running, root),
        httpx.AsyncClient(base_url=root, trust_env=False, timeout=60) as http,
    ):
        answer = await http.post("/v1/chat/completions", json={"model": "sonnet", "messages": HELLO}, headers=NONE)
        assert "hello" in answer.text

        async def gone() -> bool:
            return not await chains(running)

        await until(gone)
        assert not [one for one in settings.var.glob("sandbox/agents/*") if not one.name.startswith(".")]
        assert not [one for one in files(settings.claude_config_dir, "*.jsonl") if one.stat().st_size]
        (left,) = await running.store.forgotten(None, time.time() - 3600)
        assert left.cost_usd > 0


async def test_lists_tell_them_in_one_number(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(3):
        await proxy.ask(messages=HELLO)
    await proxy.ask(messages=HELLO, agent_id="ada")

    async def listed(query: str = "") -> Any:
        return (await proxy.http.get(f"/v1/chains{query}")).json()

    assert len((await listed())["data"]) == 4  # somebody may be about to go on from them
    for module in (routes, listing):
        monkeypatch.setattr(module, "ONE_SHOT_SHOWN", -1.0)
    told = await listed()
    assert [row["agent_id"] for row in told["data"]] == ["ada"]
    assert (told["has_more"], told["one_shots"]["count"]) == (False, 3)
    assert len((await listed("?one_shots=1"))["data"]) == 4
    assert (await proxy.http.get("/v1/search?q=hello")).json()["one_shots"] == 3
    wanted = Search("hello")
    found, _, told_of = await finding.find(proxy.settings, wanted)
    finding.print_found(wanted, found, told_of)
    assert "4 agents (4 turns, 3 one-shots among them)" in capsys.readouterr().out
    some = await listed("?one_shots=1&limit=2")
    assert (len(some["data"]), some["has_more"]) == (2, True)
    monkeypatch.setattr(routes, "LISTED", 1)
    assert len((await listed("?one_shots=1"))["data"]) == 1
    assert lists.LISTED == 1000
    listing.print_chains(await listing.chains(proxy.settings, listing.ChainFilter()))
    assert "3 one-shots today" in capsys.readouterr().out
    assert len((await listing.chains(proxy.settings, listing.ChainFilter(one_shots=True))).rows) == 4


def test_how_long_they_are_kept_is_said_in_hours_or_never(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load().forget_unnamed == 720
    assert load(forget_unnamed="12").forget_unnamed == 12
    assert load(forget_unnamed="never").forget_unnamed == "never"
