"""The main job, from outside: the real `openai` client over HTTP, the real CLI underneath, the model's view checked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from cli_session_proxy.backends.claude.process import capability
from cli_session_proxy.settings import Profile, Settings
from turnfault.provider.script import Fail, HeldReply, ToolUse
from turnfault.provider.upstream import Upstream

from .clis import old_cli_in_full
from .conftest import MakeSettings
from .matrix import rest_in_full
from .selfcheck.tampered import tampered
from .serving import serving
from .talking import heard, running
from .until import until


@asynccontextmanager
async def door(settings: Settings) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        running(settings) as engine,
        serving(engine, settings) as base,
        openai.AsyncOpenAI(base_url=base, api_key="unused") as client,
    ):
        yield client


async def say(client: openai.AsyncOpenAI, text: str, agent: str = "a", *, stream: bool = False, **more: Any) -> str:
    messages: Any = [{"role": "user", "content": text}]
    headers = {"X-Agent-Id": agent, **more.pop("extra_headers", {})}
    if not stream:
        whole = await client.chat.completions.create(model="sonnet", messages=messages, extra_headers=headers, **more)
        return whole.choices[0].message.content or ""
    chunks = await client.chat.completions.create(
        model="sonnet", messages=messages, extra_headers=headers, stream=True, **more
    )
    return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks if chunk.choices])


async def dump(client: openai.AsyncOpenAI, agent: str = "a") -> dict[str, Any]:
    answer = await client._client.get(f"{client.base_url}chains/{agent}")
    answer.raise_for_status()
    body: dict[str, Any] = answer.json()
    return body


@old_cli_in_full
async def test_ten_turns_by_header_are_remembered_and_the_dump_shows_the_sessions(
    claude: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    said = [f"remember fact{n} = value{n}" for n in range(10)]
    async with door(make_settings(claude_bin=claude)) as client:
        for n, one in enumerate(said):
            await say(client, one, stream=n % 2 == 1)
        assert heard(upstream) == said
        shown = await dump(client)
        assert "value3" in await say(client, "what is fact3?")
    assert shown["schema"] == "cli-session-proxy/chain/1"
    assert [turn["status"] for turn in shown["turns"]] == ["completed"] * 10
    if "bundled" in str(claude):
        assert len(shown["sessions"]) == 1
    else:
        assert len(shown["sessions"]) == 10
        assert [link["reason"] for link in shown["links"]] == ["started", *["forked_by_cli"] * 9]


@pytest.mark.parametrize(("agents", "processes"), rest_in_full((5, 4), (20, 8)))
async def test_agents_at_once_hear_only_themselves_and_six_requests_at_once_stay_in_order(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream, agents: int, processes: int
) -> None:
    async with door(make_settings(claude_bin=claude_2, max_processes=processes)) as client:
        await asyncio.gather(
            *(say(client, f"agent-{who}- is here", f"agent/{who}".replace("/", "%2F")) for who in range(agents))
        )
        for seen in upstream.requests:
            assert len(seen.user_texts()) == 1
        upstream.clear()
        gate = HeldReply()
        upstream.when("first", gate)
        tasks = [asyncio.create_task(say(client, "first", "six"))]
        await gate.reached.wait()
        for n in range(5):
            tasks.append(asyncio.create_task(say(client, f"next {n}", "six")))
            await accepted(client, "six", n + 2)
        gate.open()
        await asyncio.gather(*tasks)
    assert heard(upstream) == ["first", *(f"next {n}" for n in range(5))]


async def accepted(client: openai.AsyncOpenAI, agent: str, turns: int) -> None:
    async def there() -> bool:
        return len((await dump(client, agent))["turns"]) >= turns

    await until(there)


async def test_the_answer_names_the_agent_the_turn_the_session_and_the_continuity(
    claude_2: Path, make_settings: MakeSettings
) -> None:
    async with door(make_settings(claude_bin=claude_2)) as client:
        for stream in (False, True):
            response = await client.chat.completions.with_raw_response.create(
                model="haiku",
                messages=[{"role": "user", "content": "hello"}],
                extra_headers={"X-Agent-Id": "b%C3%BCro%2F1", "X-Request-Id": "req-7"},
                temperature=0.5,
                seed=3,
                stream=stream,
            )
            headers = response.headers
            assert headers["x-agent-id"] == "b%C3%BCro%2F1"
            assert headers["x-continuity"] == ("warm" if stream else "started")
            assert headers["x-request-id"] == "req-7"
            assert set(headers["x-ignored-params"].split(", ")) == {"seed", "temperature"}
            shown = await dump(client, "b%C3%BCro%2F1")
            assert headers["x-turn-id"] in [turn["id"] for turn in shown["turns"]]
            assert headers["x-session-id"] == shown["sessions"][0]["id"]


async def test_a_client_that_leaves_and_asks_again_is_answered_once(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    gate = HeldReply()
    upstream.when("slow", gate)
    async with door(make_settings(claude_bin=claude_2, disconnect_grace=30.0)) as client:
        await say(client, "one")
        asked = asyncio.create_task(say(client, "slow"))
        await gate.reached.wait()
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        again = asyncio.create_task(say(client, "slow", extra_headers={"x-stainless-retry-count": "1"}))
        gate.open()
        assert "slow" in await again
        await say(client, "two")
        assert len((await dump(client))["turns"]) == 3
    assert heard(upstream) == ["one", "slow", "two"]


async def test_an_upstream_error_has_its_own_status_and_leaves_the_chain_as_it_was(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    async with door(make_settings(claude_bin=claude_2, cli_retries=0)) as client:
        await say(client, "one")
        upstream.when("limited", Fail(429), times=None)
        for stream in (False, True):
            with pytest.raises(openai.RateLimitError) as refused:
                await say(client.with_options(max_retries=0), "limited", stream=stream)
            assert refused.value.code == "rate_limited"
        await say(client, "two")
    assert heard(upstream) == ["one", "two"]


async def test_no_login_is_told_apart_and_says_what_to_do(claude_2: Path, make_settings: MakeSettings) -> None:
    settings = make_settings(claude_bin=claude_2)
    without = {name: value for name, value in settings.claude_env.items() if name != "ANTHROPIC_API_KEY"}
    async with door(settings.model_copy(update={"claude_env": without})) as client:
        with pytest.raises(openai.AuthenticationError) as refused:
            await say(client, "hello")
    assert refused.value.code == "claude_not_logged_in"
    assert "run `cli-session-proxy login`" in refused.value.message
    assert "/login" not in refused.value.message


async def test_a_cli_that_uses_no_login_is_named_and_nobody_is_told_to_log_in(
    claude_2: Path, make_settings: MakeSettings, tmp_path: Path
) -> None:
    claude = tampered(claude_2, tmp_path / "bin", "bare")
    settings = make_settings(claude_bin=claude)
    env = {name: value for name, value in settings.claude_env.items() if name != "ANTHROPIC_API_KEY"}
    cli = await capability.probe(claude, env)
    capability.failed(cli, "login", "Not logged in")
    settings = settings.model_copy(update={"claude_env": env | {"CLAUDE_CODE_OAUTH_TOKEN": "sk-ant-oat01-fake"}})
    async with door(settings) as client:
        with pytest.raises(openai.AuthenticationError) as refused:
            await say(client, "hello")
    assert refused.value.code == "claude_not_logged_in"
    assert f"{cli.name} cannot use a subscription's login: its check failed at `login`" in refused.value.message
    assert "run `cli-session-proxy login`" not in refused.value.message


async def test_a_model_that_nobody_knows_is_told_with_the_one_that_is_probably_meant(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    upstream.when("hello", Fail(404, message="model: sonet"), times=None)
    async with door(make_settings(claude_bin=claude_2)) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="sonet", messages=[{"role": "user", "content": "hello"}])
    assert refused.value.param == "model"
    assert "'sonet': did you mean `sonnet`?" in refused.value.message


async def test_a_missing_cli_is_503_and_the_chain_goes_on_when_it_is_back(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream, tmp_path: Path
) -> None:
    link = tmp_path / "claude"
    async with door(make_settings(claude_bin=link)) as client:
        with pytest.raises(openai.InternalServerError) as refused:
            await say(client.with_options(max_retries=0), "hello")
        assert (refused.value.status_code, refused.value.code) == (503, "claude_unavailable")
        assert "--claude-bin" in refused.value.message
        link.symlink_to(claude_2)
        await say(client, "hello again")
    assert heard(upstream) == ["hello again"]


async def test_a_profile_turns_the_clis_tools_on_and_the_dump_shows_what_they_did(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream, tmp_path: Path
) -> None:
    coder = Profile(tools=("Bash(echo *)", "Read"), permission_mode="default")
    settings = make_settings(claude_bin=claude_2, profiles={"coder": coder}, profile="coder")
    upstream.when("run it", ToolUse([("Bash", {"command": "echo from-the-shell"})], text="Let me look."))
    async with door(settings) as client:
        answer = await say(client, "run it")
        await say(client, "and then?")
        shown = await dump(client)
    assert "Let me look." in answer
    assert "from-the-shell" in json.dumps(shown["turns"][0]["tools"])
    assert "from-the-shell" in json.dumps(upstream.requests[-1].messages)
    assert upstream.requests[-1].prefix_kept(upstream.requests[-2]) == 1.0


async def test_delete_removes_the_chain(claude_2: Path, make_settings: MakeSettings, upstream: Upstream) -> None:
    async with door(make_settings(claude_bin=claude_2)) as client:
        await say(client, "secret")
        url = f"{client.base_url}chains/a"
        assert (await client._client.delete(url)).status_code == httpx.codes.OK
        assert (await client._client.get(url)).status_code == httpx.codes.NOT_FOUND
        await say(client, "hello")
    assert heard(upstream) == ["hello"]
