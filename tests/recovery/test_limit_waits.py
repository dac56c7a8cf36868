"""A proxy that is killed while a turn waits for a limit, with the real CLI: it goes out once, at the next one."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from cli_session_proxy.engine.ownership import Instances
from turnfault.provider.script import Fail, Reply, windows
from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings
from ..talking import ask, heard, request, running, text
from ..until import until
from .others import other_proxy
from .test_kill import turns_of


def limited(seconds: float) -> Fail:
    at = str(int(time.time() + seconds))
    return Fail(429, {"retry-after": "1"}, message=f"Claude AI usage limit reached|{at}")


async def test_kill_9_while_it_waits_and_the_next_proxy_sends_it_once(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make_settings(claude_bin=claude_2, on_limit="wait", cli_retries=0)
    async with other_proxy(settings, die_at="waits for a limit") as other:
        assert await other.ask("one") is not None
        upstream.next(limited(3600))
        assert await other.ask("two", die=True) is None
        assert await other.died() == -signal.SIGKILL
    ahead, real = [0.0], Instances.now
    monkeypatch.setattr(Instances, "now", lambda self: real(self) + ahead[0])
    monkeypatch.setattr("cli_session_proxy.engine.engine.LONGEST_NAP", 0.01)
    async with running(settings) as engine:
        again = await engine.submit(request("two"))
        await until(lambda: again.limit_wait is not None)
        assert len([seen for seen in upstream.requests if seen.prompt == "two"]) == 1
        ahead[0] = 4000.0
        assert text(await again.turn()) == "You said: two (2)"
        again.acknowledge()
        await ask(engine, "three")
        turns = await turns_of(engine)
    assert heard(upstream) == ["one", "two", "three"]
    assert [seen.prompt for seen in upstream.requests] == ["one", "two", "two", "three"]
    assert [turn.status for turn in turns] == ["completed"] * 3
    kept = [now.prefix_kept(before) for before, now in zip(upstream.requests, upstream.requests[1:], strict=False)]
    assert kept[-1] == 1.0


async def test_a_subscription_tells_its_windows_and_its_limit_is_waited_for(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make_settings(claude_bin=claude_2, on_limit="wait", cli_retries=0)
    env = {name: value for name, value in settings.claude_env.items() if name != "ANTHROPIC_API_KEY"}
    settings = settings.model_copy(update={"claude_env": env | {"CLAUDE_CODE_OAUTH_TOKEN": "sk-ant-oat01-fake"}})
    resets = time.time() + 3600, time.time() + 86400
    ahead, real = [0.0], Instances.now
    monkeypatch.setattr(Instances, "now", lambda self: real(self) + ahead[0])
    monkeypatch.setattr("cli_session_proxy.engine.engine.LONGEST_NAP", 0.01)
    told = windows("allowed", "five_hour", five_hour=(0.42, resets[0]), seven_day=(0.3, resets[1]))
    async with running(settings) as engine:
        upstream.next(Reply(headers=told))
        await ask(engine, "one")
        plan = engine.plan.now()
        assert plan is not None
        assert plan.status == "allowed"
        seen = {one.name: (one.used, one.resets_at) for one in plan.windows}
        assert seen == {"five_hour": (0.42, int(resets[0])), "seven_day": (0.3, int(resets[1]))}

        spent = windows("rejected", "five_hour", five_hour=(1.0, resets[0]), seven_day=(0.35, resets[1]))
        upstream.next(*[Fail(429, {"retry-after": "3600", **spent}, message="limit")] * 3)
        answer = await engine.submit(request("two"))
        await until(lambda: answer.limit_wait is not None)
        assert answer.limit_wait is not None
        assert abs(answer.limit_wait.until - resets[0]) < 30
        limits = engine.plan.now()
        assert limits is not None
        assert (limits.status, limits.limits) == ("rejected", "five_hour")
        upstream.heal()
        ahead[0] = 3700.0
        assert text(await answer.turn()) == "You said: two (2)"
        answer.acknowledge()
    async with running(settings) as engine:  # kept
        assert engine.plan.now() is not None
