"""When Claude cannot: the conversation goes on elsewhere with all of it, comes back, and never in silence."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from cli_session_proxy.backends.base import Event, Job
from cli_session_proxy.backends.litellm.backend import LiteLLMBackend, ModelExecution
from cli_session_proxy.domain.models import Fallback, Message
from cli_session_proxy.engine import fallbacks
from cli_session_proxy.errors import (
    ClaudeNotLoggedIn,
    ClaudeUnavailable,
    InvalidRequest,
    Overloaded,
    ProxyError,
    QueueFull,
    RateLimited,
    TurnTimeout,
    UpstreamError,
)
from cli_session_proxy.settings import Profile, Settings
from cli_session_proxy.stores import held
from cli_session_proxy.stores.sql import store
from turnfault.provider.script import Fail, ToolUse
from turnfault.provider.upstream import Upstream

from ...git_memory.repository import Repo, attempt
from ...serving import serving
from ...talking import ask, events, running, text
from .mixed import WEATHER, Talk, claude_told, picture
from .servers import Provider, Reply, texts


def limited(seconds: float) -> Fail:
    """Claude's usage limit, with the time of its reset. The CLI itself is told to come again in a second."""
    at = str(int(time.time() + seconds))
    return Fail(429, {"retry-after": "1"}, message=f"Claude AI usage limit reached|{at}")


class Clock:
    """The clock by which the executor knows whether a limit is over, which a test may put forward. The leases go on by
    the real one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead = 0.0
        monkeypatch.setattr("cli_session_proxy.engine.executor.time", self)

    def time(self) -> float:
        return time.time() + self.ahead


async def test_at_a_limit_the_fallback_answers_with_all_facts_and_claude_comes_back_after_the_reset(
    with_models: Callable[..., Settings], provider: Provider, upstream: Upstream, claude_2: Path,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    settings = with_models(claude_bin=claude_2, fallbacks=("gpt",), cli_retries=0)
    clock = Clock(monkeypatch)
    async with running(settings) as engine:
        talk = Talk(engine, upstream, provider)
        for _ in range(5):
            await talk.tell("sonnet")
        upstream.next(*[limited(300)] * 20)
        provider.next(Reply("noted by gpt"))
        sixth = await ask(engine, "fact 6", tools=(WEATHER,))
        asked = len(upstream.requests)
        talk.path += [("user", "fact 6")]
        assert talk.shown("gpt") == talk.told()
        assert (sixth.backend, sixth.reported_model, sixth.session_id) == ("litellm", "gpt", talk.turns[0].session_id)
        assert sixth.fallback is not None
        assert (sixth.fallback.asked, sixth.fallback.model, sixth.fallback.why) == ("sonnet", "gpt", "rate_limited")
        assert 0 < sixth.fallback.until - time.time() <= 301
        talk.path += [("assistant", "noted by gpt")]

        # Until the reset the agent stays there, and Claude is not asked.
        provider.next(Reply("noted by gpt too"))
        seventh = await ask(engine, "fact 7", tools=(WEATHER,))
        talk.path += [("user", "fact 7"), ("assistant", "noted by gpt too")]
        assert (seventh.backend, seventh.fallback, len(upstream.requests)) == ("litellm", sixth.fallback, asked)

        # After it, one turn asks Claude again, and finds all of it.
        clock.ahead = 400.0
        upstream.heal()
        eighth = await ask(engine, "fact 8", tools=(WEATHER,))
        talk.path += [("user", "fact 8")]
        assert claude_told(upstream.requests[-1].messages) == talk.told()
        assert (eighth.backend, eighth.fallback, eighth.reported_model) == ("claude", None, "sonnet")
    told = [one for one in events(caplog) if one["event"] == "asked_elsewhere"]
    assert [(one["asked"], one["model"], one["why"]) for one in told] == [("sonnet", "gpt", "rate_limited")]
    assert (provider.refused, [why for _, why in upstream.refused]) == ([], [])


async def test_the_answers_headers_its_model_the_dump_and_the_metrics_say_who_answered(
    with_models: Callable[..., Settings], provider: Provider, upstream: Upstream, claude_2: Path
) -> None:
    settings = with_models(claude_bin=claude_2, fallbacks=("gpt",), cli_retries=0)
    async with running(settings) as engine, serving(engine, settings) as base, httpx.AsyncClient() as client:
        body: dict[str, Any] = {"model": "sonnet", "messages": [{"role": "user", "content": "hello"}]}
        named = {"X-Agent-Id": "a"}
        upstream.next(*[limited(30)] * 20)
        answer = await client.post(f"{base}/chat/completions", json=body, headers=named, timeout=60)
        assert (answer.status_code, answer.json()["model"]) == (200, "gpt")
        assert (answer.headers["x-backend"], answer.headers["x-model"]) == ("litellm", "gpt")
        streamed = await client.post(
            f"{base}/chat/completions", json={**body, "stream": True, "messages": [{"role": "user", "content": "b"}]},
            headers=named, timeout=60,
        )  # fmt: skip
        assert (streamed.headers["x-backend"], streamed.headers["x-model"]) == ("litellm", "gpt")
        assert '"model":"gpt"' in streamed.text
        assert '"model":"sonnet"' not in streamed.text
        messages = await client.post(
            f"{base}/messages", json={**body, "max_tokens": 99, "stream": True}, headers=named, timeout=60
        )  # fmt: skip
        assert '"model":"gpt"' in messages.text
        dump = (await client.get(f"{base}/chains/a")).json()["turns"][0]
        assert (dump["backend"], dump["answered_by"], dump["fallback"]["asked"]) == (
            "litellm",
            "gpt-scripted",
            "sonnet",
        )
        assert dump["says"][0].startswith("sonnet could not answer (the provider's limit was reached): gpt did.")
        (row, *_) = reversed((await client.get(f"{base}/chains/a/turns")).json()["data"])  # what the page shows
        assert row["says"] == dump["says"]
        metrics = (await client.get(base.removesuffix("/v1") + "/metrics")).text
        assert 'cli_session_proxy_fallbacks_total{model="gpt",why="rate_limited"} 3.0' in metrics


async def test_without_fallbacks_a_limit_stays_an_error(
    with_models: Callable[..., Settings], provider: Provider, upstream: Upstream, claude_2: Path
) -> None:
    async with running(with_models(claude_bin=claude_2, cli_retries=0)) as engine:
        upstream.next(*[limited(30)] * 20)
        with pytest.raises(RateLimited):
            await ask(engine, "hello")
    assert provider.openai == []


async def test_a_turn_that_has_called_tools_is_not_repeated_elsewhere(
    with_models: Callable[..., Settings], provider: Provider, upstream: Upstream, claude_2: Path
) -> None:
    profile = Profile(tools=("Bash(echo *)",), fallbacks=("gpt",))
    settings = with_models(claude_bin=claude_2, profiles={"coder": profile}, profile="coder", cli_retries=0)
    async with running(settings) as engine:
        upstream.next(ToolUse([("Bash", {"command": "echo hello"})]), *[limited(30)] * 20)
        with pytest.raises(ProxyError):
            await ask(engine, "run it")
    assert provider.openai == []


async def test_a_cli_that_is_missing_is_one_that_cannot_answer(
    with_models: Callable[..., Settings], provider: Provider, tmp_path: Path
) -> None:
    settings = with_models(claude_bin=tmp_path / "no-such-claude", fallbacks=("gpt", "gemini"))
    async with running(settings) as engine:
        turn = await ask(engine, "hello")
    assert (turn.backend, turn.fallback and turn.fallback.why) == ("litellm", "claude_unavailable")


async def test_not_being_logged_in_is_one_too(
    with_models: Callable[..., Settings], provider: Provider, upstream: Upstream, claude_2: Path
) -> None:
    async with running(with_models(claude_bin=claude_2, fallbacks=("gpt",), cli_retries=0)) as engine:
        upstream.next(*[Fail(401)] * 20)
        turn = await ask(engine, "hello")
    assert (turn.backend, turn.fallback and turn.fallback.why) == ("litellm", "claude_not_logged_in")


async def test_the_first_fallback_that_can_take_it_answers(
    with_models: Callable[..., Settings], provider: Provider, upstream: Upstream, tmp_path: Path
) -> None:
    settings = with_models(
        of_models={"gpt": {"images": False}}, claude_bin=tmp_path / "none", fallbacks=("gpt", "gemini"), cli_retries=0
    )
    async with running(settings) as engine:
        shown = Message("user", ({"type": "text", "text": "look"}, picture(1)))
        assert (await ask(engine, shown)).reported_model == "gemini"
        assert (await ask(engine, "hello", agent="b")).reported_model == "gpt"
        provider.next(Reply(status=500), Reply("from gemini"))
        third = await ask(engine, "hello", agent="c")
        assert (third.reported_model, text(third)) == ("gemini", "from gemini")
        assert [one["status"] for one in third.attempts] == ["failed", "failed", "completed"]
        provider.next(Reply(status=429), Reply(status=400))
        with pytest.raises(ClaudeUnavailable):  # what the client asked for, and why that cannot answer
            await ask(engine, "hello", agent="d")


async def test_a_path_is_counted_as_long_as_the_library_has_it(
    with_models: Callable[..., Settings], provider: Provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was counted until the request was made: turns on long paths waited for their answers without a bound."""
    counted: list[int] = []
    say = ModelExecution.say

    async def watched(self: ModelExecution) -> AsyncGenerator[Event, None]:
        async for event in say(self):
            counted.append(engine.holds.bytes.total())
            yield event

    async with running(with_models(claude_bin=tmp_path / "none")) as engine:
        await ask(engine, "hello", agent="a", model="gpt")
        monkeypatch.setattr(store, "UNCOUNTED", 0)
        monkeypatch.setattr(ModelExecution, "say", watched)
        await ask(engine, "hello again", agent="a", model="gpt")
        assert counted
        assert 0 not in counted
        assert not engine.holds.bytes


@pytest.mark.parametrize("asked", ["can_take", "prepare"])
async def test_a_proxy_whose_memory_is_full_is_no_failure_of_a_model(
    with_models: Callable[..., Settings], provider: Provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    asked: str,
) -> None:  # fmt: skip
    """The next model was asked, and without one the client was told the first model's failure."""
    settings = with_models(claude_bin=tmp_path / "none", fallbacks=("gpt", "gemini"), cli_retries=0)
    original = getattr(LiteLLMBackend, asked)

    async def crowded(self: LiteLLMBackend, job: Job) -> Any:
        """All memory for long conversations is taken as it is read."""
        other = held.Hold(engine.holds, "another")
        other.count(held.MOST)
        try:
            return await original(self, job)
        finally:
            other.release()

    async with running(settings) as engine:
        await ask(engine, "hello", agent="a")
        monkeypatch.setattr(store, "UNCOUNTED", 0)
        monkeypatch.setattr(held, "PATIENCE", 0.0)
        monkeypatch.setattr(LiteLLMBackend, asked, crowded)
        before = len(provider.openai)
        with pytest.raises(QueueFull):
            await ask(engine, "hello again", agent="a", model="opus")
        assert len(provider.openai) == before
        assert not engine.holds.bytes


async def test_the_state_survives_a_restart_and_is_the_same_at_every_proxy(
    with_models: Callable[..., Settings], provider: Provider, upstream: Upstream, claude_2: Path
) -> None:
    settings = with_models(claude_bin=claude_2, fallbacks=("gpt",), cli_retries=0)
    async with running(settings) as engine:
        upstream.next(*[limited(300)] * 20)
        first = await ask(engine, "one")
    asked = len(upstream.requests)
    async with running(settings) as engine, running(settings) as other:
        second = await ask(engine, "two")
        third = await ask(other, "three")
        assert first.fallback == second.fallback == third.fallback
        named = await ask(engine, "four", model="gemini")  # somebody else, asked for by name: the rest is passed on
        assert (named.reported_model, named.fallback and named.fallback.here) == ("gemini", False)
        assert (await ask(engine, "five")).reported_model == "gpt"
    assert len(upstream.requests) == asked
    async with running(with_models(claude_bin=claude_2)) as engine:  # taken out of the settings
        upstream.heal()
        assert (await ask(engine, "six")).backend == "claude"


async def test_a_model_of_another_provider_has_fallbacks_of_its_own(
    with_models: Callable[..., Settings], provider: Provider
) -> None:
    async with running(with_models(of_models={"gpt": {"fallbacks": ("gemini",)}}, cli_retries=0)) as engine:
        provider.next(Reply(status=429, headers={"retry-after": "5"}), Reply("from gemini"))
        turn = await ask(engine, "hello", model="gpt")
    assert (turn.reported_model, turn.fallback and turn.fallback.why) == ("gemini", "rate_limited")
    assert texts(provider.gemini[-1])[-1] == ("user", "hello")


# --- the rules, pure

NOW = 1_000.0


@pytest.mark.parametrize(
    ("error", "helps"),
    [
        (RateLimited(""), True),
        (ClaudeNotLoggedIn(""), True),
        (ClaudeUnavailable(""), True),
        (Overloaded(""), True),
        (UpstreamError("", detail={"exit_code": 1}), True),
        (UpstreamError("", detail={"status": 500}), True),
        (UpstreamError("", detail={"status": 400}), False),
        (UpstreamError(""), False),
        (InvalidRequest(""), False),
        (TurnTimeout(""), False),
    ],
)
def test_another_model_is_asked_where_the_fault_is_the_models(error: ProxyError, helps: bool) -> None:
    assert fallbacks.may_help(error) is helps


def test_a_fallback_lasts_until_the_reset_and_within_bounds() -> None:
    assert fallbacks.new("sonnet", "gpt", RateLimited("", retry_after=30), NOW).until == NOW + 30
    assert fallbacks.new("sonnet", "gpt", Overloaded(""), NOW).until == NOW + fallbacks.PAUSE
    assert fallbacks.new("sonnet", "gpt", RateLimited("", retry_after=1e12), NOW).until == NOW + fallbacks.LONGEST


def test_what_a_fallback_means_for_the_next_turn() -> None:
    before = Fallback("sonnet", "gpt", "rate_limited", NOW + 10, here=False)
    assert fallbacks.inherited(before, "sonnet", ["gpt"], NOW) == Fallback("sonnet", "gpt", "rate_limited", NOW + 10)
    assert fallbacks.inherited(before, "opus", ["gpt"], NOW) == before
    assert fallbacks.inherited(before, "sonnet", ["gpt"], NOW + 10) is None
    assert fallbacks.inherited(before, "sonnet", [], NOW) is None


@pytest.mark.parametrize("begins_with", ["sonnet", "gpt"])
@pytest.mark.sample(1)
async def test_earlier_attempts_stay_in_front_of_the_first_prompt_whoever_answers(
    with_models: Callable[..., Settings], provider: Provider, upstream: Upstream, claude_2: Path, tmp_path: Path,
    begins_with: str,
) -> None:  # fmt: skip
    repo = Repo(tmp_path / "repo")
    repo.commit(attempt(1, why="the pool leaks"))
    profile: dict[str, Any] = {"git_memory": {"repo": str(repo.path), "fix_id": "login-500"}}
    settings = with_models(
        claude_bin=claude_2, fallbacks=("gpt",), cli_retries=0, profiles={"fixer": profile}, profile="fixer"
    )
    async with running(settings) as engine:
        await ask(engine, "fix it", model=begins_with)
        await ask(engine, "go on", model="gpt")
        await ask(engine, "and then", model="sonnet")
        told_by_claude = json.dumps(upstream.requests[-1].messages)
        upstream.next(*[limited(300)] * 20)
        last = await ask(engine, "what failed before?", model="sonnet")
    assert last.backend == "litellm"
    assert told_by_claude.count("the pool leaks") == 1
    # Each request to the other model begins with all of the one before it.
    users = [[one for one in body["messages"] if one["role"] == "user"] for body in provider.openai]
    assert len(users) == (2 if begins_with == "sonnet" else 3)
    assert all(json.dumps(shown).count("the pool leaks") == 1 for shown in users)
    assert all("the pool leaks" in json.dumps(shown[0]) for shown in users)
    assert all(longer[: len(shorter)] == shorter for shorter, longer in pairwise(users))
    assert provider.refused == []


async def test_a_failed_first_prompt_that_is_sent_again_behind_another_turn_has_no_attempts_any_more(
    with_models: Callable[..., Settings], provider: Provider, tmp_path: Path
) -> None:
    repo = Repo(tmp_path / "repo")
    repo.commit(attempt(1, why="the pool leaks"))
    profile: dict[str, Any] = {"git_memory": {"repo": str(repo.path), "fix_id": "login-500"}}
    settings = with_models(profiles={"fixer": profile}, profile="fixer")
    async with running(settings) as engine:
        provider.next(Reply(status=400))
        with pytest.raises(ProxyError):
            await ask(engine, "fix it", model="gpt", idempotency_key="once")
        await ask(engine, "look at it", model="gpt")
        again = await ask(engine, "fix it", model="gpt", idempotency_key="once")
    assert again.evidence.recalled is None
    shown = [one["content"] for one in provider.openai[-1]["messages"] if one["role"] == "user"]
    assert len(shown) == 2
    assert "the pool leaks" in json.dumps(shown[0])
    assert shown[1] == "fix it"
