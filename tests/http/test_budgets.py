"""Budgets at the door: 429 in each wire's own shape with the time it ends, counted once, told where spend is told."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cli_session_proxy.commands import listing
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.errors import ConfigError
from cli_session_proxy.http.keys import Keys
from cli_session_proxy.settings import Settings, load
from turnfault.provider.script import Fail, HeldReply
from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings
from ..without_cli import proxied_without_cli

ALICE, BOB = "alices-secret-0123456789", "bobs-secret-0123456789"
KEYS = {"alice": ALICE, "bob": BOB}
# Of the month: nothing here depends on the minute in which it runs.
ONE = {"each_key": {"requests_per_month": 1}}
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture(params=["sqlite", "postgresql"])
def where(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {} if request.param == "sqlite" else {"store": request.getfixturevalue("postgres_url")}


@asynccontextmanager
async def served(settings: Settings, upstream: Upstream) -> AsyncIterator[tuple[Engine, httpx.AsyncClient]]:
    async with (
        proxied_without_cli(settings, upstream) as (engine, root),
        httpx.AsyncClient(base_url=root, trust_env=False, timeout=60) as http,
    ):
        yield engine, http


async def say(http: httpx.AsyncClient, words: str = "hello", agent: str = "ada", **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    body = {"model": "sonnet", "messages": [{"role": "user", "content": words}]}
    return await http.post("/v1/chat/completions", json=body, headers={"X-Agent-Id": agent, **named})


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("/v1/chat/completions", {"messages": HELLO}, ("error", "code")),
        ("/v1/responses", {"input": "hello"}, ("error", "code")),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 9}, ("error", "type")),
        ("/v1/models/sonnet:generateContent", {"contents": [{"parts": [{"text": "hello"}]}]}, ("error", "status")),
        ("/v1/interactions", {"input": "hello"}, None),
        ("/api/chat", {"messages": HELLO, "stream": False}, None),
    ],
)
async def test_over_its_budget_a_key_gets_429_in_the_wires_own_shape(
    path: str, body: dict[str, Any], code: tuple[str, str] | None, make_settings: MakeSettings, upstream: Upstream
) -> None:
    async with served(make_settings(budgets=ONE), upstream) as (engine, http):
        assert (await say(http)).status_code == 200
        refused = await http.post(path, json={"model": "sonnet", **body})
        assert refused.status_code == 429
        assert int(refused.headers["Retry-After"]) > 0
        assert "the budget of key 'local', 1 requests a month, is used up" in refused.text
        if code is not None:
            known = {"budget_exceeded", "rate_limit_error", "RESOURCE_EXHAUSTED"}
            assert refused.json()[code[0]][code[1]] in known
        assert len(upstream.requests) == 1
        again = await http.post(path, json={"model": "sonnet", **body})
        assert again.status_code == 429
        # nothing is kept of what is known to be refused: no agent is made for it
        assert len([row async for row in engine.store.summaries()]) <= 2


@pytest.mark.sample(1)
async def test_each_key_and_each_agent_has_its_own(
    make_settings: MakeSettings, upstream: Upstream, where: dict[str, Any]
) -> None:
    budgets = {**ONE, "keys": {"bob": {"requests_per_month": 5}}, "agents": {"eve": {"requests_per_month": 2}}}
    async with served(make_settings(keys=KEYS, budgets=budgets, **where), upstream) as (_, http):
        as_alice, as_bob = {"x_api_key": ALICE}, {"x_api_key": BOB}
        assert (await say(http, **as_alice)).status_code == 200
        assert (await say(http, "more", **as_alice)).status_code == 429
        told = [(await say(http, str(n), "eve", **as_bob)).status_code for n in range(3)]
        assert told == [200, 200, 429]
        assert [(await say(http, str(n), **as_bob)).status_code for n in range(4)] == [200, 200, 200, 429]


async def test_the_same_request_again_counts_once(
    make_settings: MakeSettings, upstream: Upstream, where: dict[str, Any]
) -> None:
    async with served(make_settings(budgets=ONE, **where), upstream) as (_, http):
        upstream.next(Fail(400))
        keyed = {"Idempotency_Key": "k"}
        assert (await say(http, **keyed)).status_code == 400  # counted, and failed
        assert (await say(http, **keyed)).status_code == 200  # a new attempt
        assert (await say(http, **keyed)).status_code == 200  # its answer once more
        assert (await say(http, "other")).status_code == 429


async def test_a_new_attempt_needs_a_budget_of_tokens(make_settings: MakeSettings, upstream: Upstream) -> None:
    async with served(make_settings(budgets={"each_key": {"tokens_per_month": 1}}), upstream) as (_, http):
        upstream.next(Fail(400))
        assert (await say(http, Idempotency_Key="k")).status_code == 400
        assert (await say(http, "another")).status_code == 200
        assert (await say(http, Idempotency_Key="k")).status_code == 429


@pytest.mark.sample(1)
async def test_two_proxies_on_one_store_share_a_budget(
    make_settings: MakeSettings, upstream: Upstream, where: dict[str, Any]
) -> None:
    settings = make_settings(budgets={"each_key": {"requests_per_month": 4}}, **where)
    async with served(settings, upstream) as (_, one), served(settings, upstream) as (_, two):
        told = await asyncio.gather(*(say(http, f"{n}", f"a{n}") for n, http in enumerate((one, two) * 5)))
        assert sorted(answer.status_code for answer in told) == [200] * 4 + [429] * 6


async def test_turns_beside_each_other_go_no_further_than_one_beyond_the_limit(
    make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings(budgets={"each_key": {"tokens_per_month": 100}})
    async with served(settings, upstream) as (engine, http):
        assert (await say(http, "first")).status_code == 200
        (row,) = await engine.store.spent()
        most = -(-100 // row.tokens)  # turns of this kind that fit, the one that goes over with them
        gate = HeldReply()
        upstream.when("wait", gate, times=None)
        asked = [asyncio.create_task(say(http, f"wait {n}", f"a{n}")) for n in range(most + 10)]
        refused = 0
        for done in asyncio.as_completed(asked):
            refused += (await done).status_code == 429
            if refused == 11:
                gate.open()
        assert refused == 11
        (row,) = await engine.store.spent()
        assert 100 <= row.tokens < 100 + row.most_tokens


async def test_what_deleted_agents_spent_counts(make_settings: MakeSettings, upstream: Upstream) -> None:
    settings = make_settings(budgets={"each_key": {"tokens_per_month": 1}})
    async with served(settings, upstream) as (_, http):
        kept = await http.post("/v1/chat/completions", json={"model": "sonnet", "messages": HELLO, "agent_id": "ada"})
        assert kept.status_code == 200
        assert (await http.delete("/v1/chains/ada")).status_code == 200
        assert (await say(http)).status_code == 429


async def test_without_a_budget_nothing_is_counted(make_settings: MakeSettings, upstream: Upstream) -> None:
    async with served(make_settings(), upstream) as (engine, http):
        assert (await say(http)).status_code == 200
        assert await engine.store.spent() == []
        assert (await http.get("/v1/overview")).json()["budgets"] == []
        assert "budget_used{" not in (await http.get("/metrics")).text


async def test_it_is_told_where_spend_is_told_and_to_whom_it_concerns(
    make_settings: MakeSettings, upstream: Upstream, capsys: pytest.CaptureFixture[str]
) -> None:
    budgets = {"each_key": {"requests_per_month": 2}, "agents": {"ada": {"usd_per_day": 3.0}}}
    settings = make_settings(keys=KEYS, operators=("alice",), budgets=budgets)
    async with served(settings, upstream) as (_, http):
        alice, bob = {"x-api-key": ALICE}, {"x-api-key": BOB}
        for _ in range(3):
            await say(http, x_api_key=BOB)
        await say(http, x_api_key=ALICE)
        all_of_them = (await http.get("/v1/overview", headers=alice)).json()["budgets"]
        assert [(one["name"], one["used"], one["limit"]) for one in all_of_them] == [("alice", 1, 2), ("bob", 2, 2)]
        own = (await http.get("/v1/overview", headers=bob)).json()["budgets"]
        assert own == all_of_them[1:]
        (of_agent,) = (await http.get("/v1/chains/ada/turns", headers=bob)).json()["budgets"]
        assert (of_agent["scope"], of_agent["name"], of_agent["unit"], of_agent["limit"]) == (
            "agent",
            "ada",
            "usd",
            3.0,
        )
        told = await numbers(http, alice)
        assert told["budget_used", "alice"] == 1
        assert told["budget_used", "bob"] == told["budget_limit", "bob"] == 2
        assert told["budget_refusals_total", None] == 1
        assert ("budget_used", "alice") not in await numbers(http, bob)
        listed = {row["key"]: row["budgets"] for row in await listing.spent(settings, "key")}
        assert listed == {"alice": all_of_them[:1], "bob": all_of_them[1:]}
        listing.print_spent(await listing.spent(settings, "key"), "key")
        assert re.search(r"^bob .* 2 requests of 2 requests a month", capsys.readouterr().out, re.MULTILINE)


async def numbers(http: httpx.AsyncClient, headers: dict[str, str]) -> dict[tuple[str, str | None], float]:
    families = text_string_to_metric_families((await http.get("/metrics", headers=headers)).text)
    samples = [sample for family in families for sample in family.samples if "_budget_" in sample.name]
    return {(re.sub("^cli_session_proxy_", "", one.name), one.labels.get("key")): one.value for one in samples}


def test_budgets_are_read_from_file_and_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    file = tmp_path / "a.toml"
    file.write_text('[budgets.each_key]\nusd_per_day = 5\n[budgets.agents."a b"]\ntokens_per_minute = 7\n')
    monkeypatch.setenv("CLI_SESSION_PROXY_BUDGETS__EACH_AGENT__REQUESTS_PER_MINUTE", "60")
    found = load(config=str(file)).budgets
    assert (found.each_key.usd_per_day, found.each_agent.requests_per_minute) == (5.0, 60)
    assert found.agents["a b"].tokens_per_minute == 7


@pytest.mark.parametrize("line", ["usd_per_week = 1", "usd_per_day = 0", "usd_per_day = inf", "requests_per_day = 1.5"])
def test_a_limit_that_there_is_not_is_refused(line: str, tmp_path: Any) -> None:
    file = tmp_path / "a.toml"
    file.write_text(f"[budgets.each_key]\n{line}\n")
    with pytest.raises(ConfigError, match=r"budgets\.each_key"):
        load(config=str(file))


def test_a_budget_of_a_key_that_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"budgets\.keys: there is no key .alise.: did you mean `alice`"):
        Keys(Settings(keys=KEYS, budgets={"keys": {"alise": {"usd_per_day": 1}}}))  # type: ignore[arg-type]
