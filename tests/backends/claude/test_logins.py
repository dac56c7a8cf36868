"""A second login of the same person: a profile names it, and nothing else ever chooses it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli_session_proxy.backends.claude.process import environment
from cli_session_proxy.errors import ClaudeNotLoggedIn
from cli_session_proxy.settings import ModelSettings, Profile
from turnfault.provider.script import Fail
from turnfault.provider.upstream import Upstream

from ...conftest import FAKE_KEY, MakeSettings
from ...talking import ask, heard, running

TOKEN = "sk-ant-oat01-the-other-login-of-this-person"


async def test_a_profile_chooses_its_login_and_the_conversation_goes_on(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORK_LOGIN", TOKEN)
    settings = make_settings(claude_bin=claude_2, profiles={"work": Profile(login_env="WORK_LOGIN")}, cli_retries=0)
    async with running(settings) as engine:
        await ask(engine, "one")
        await ask(engine, "two", profile="work")
        await ask(engine, "three")
        upstream.next(Fail(429, {"retry-after": "60"}))
        with pytest.raises(Exception, match=r"429|limit"):
            await ask(engine, "four")  # at its limit nobody else's login is taken
    said = [(seen.headers.get("x-api-key"), seen.headers.get("authorization")) for seen in upstream.requests]
    own, work = (FAKE_KEY, None), (None, f"Bearer {TOKEN}")
    assert said == [own, work, own, own]
    assert heard(upstream) == ["one", "two", "three", "four"]


async def test_a_login_that_is_not_there_fails_the_turn_and_says_where_it_is_to_be(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings(claude_bin=claude_2, profiles={"work": Profile(login_env="NO_SUCH_LOGIN")})
    async with running(settings) as engine:
        with pytest.raises(ClaudeNotLoggedIn, match="NO_SUCH_LOGIN, which is not set"):
            await ask(engine, "one", profile="work")
        await ask(engine, "two")
    assert len(upstream.requests) == 1


def test_a_profile_with_a_login_has_no_key_of_another_one_and_no_other_profile_has_its(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A shell of its CLI could read them."""
    work, model = Profile(login_env="ANTHROPIC_WORK"), ModelSettings(litellm="x/y", api_key_env="ANTHROPIC_Y_KEY")
    settings = make_settings(profiles={"work": work}, models={"y": model})
    others = {
        "AWS_SECRET_ACCESS_KEY": "aws", "ANTHROPIC_FOUNDRY_API_KEY": "foundry", "ANTHROPIC_Y_KEY": "y",
        "CLAUDE_CODE_USE_BEDROCK": "1",
    }  # fmt: skip
    for name, value in {**others, "ANTHROPIC_WORK": TOKEN}.items():
        monkeypatch.setenv(name, value)
    own = environment.common(settings, tmp_path)
    assert "aws" in own.values()
    assert "y" not in own.values()
    assert TOKEN not in own.values()
    of_work = environment.of_profile(own, work)
    assert [name for name, value in of_work.items() if value == TOKEN] == [environment.OAUTH_TOKEN]
    assert not others.keys() & of_work.keys()
