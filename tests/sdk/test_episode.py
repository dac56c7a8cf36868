"""`ask`: one conversation from Python, by the engine of this process or by a running `serve`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import pytest

import cli_session_proxy
from cli_session_proxy import Episode, ask
from cli_session_proxy.errors import ClaudeUnavailable, InvalidRequest, NotFound, Unauthorized
from cli_session_proxy.sdk import runtime
from cli_session_proxy.settings import Settings
from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings
from ..talking import heard
from ..without_cli import engine_without_cli, proxied_without_cli


@pytest.fixture
def settings(make_settings: MakeSettings, upstream: Upstream) -> Iterator[Settings]:
    """The engine of this process runs with these, and without a CLI; it is stopped in the end."""
    made = make_settings(keys={"local": "the-local-secret-01"})
    runtime.configure(made, engine_factory=partial(engine_without_cli, upstream=upstream))
    yield made
    runtime.close()


async def test_an_episode_is_written_down_branched_and_gone_on_with_by_either_strategy(
    settings: Settings, upstream: Upstream
) -> None:
    episode, noted = await ask("remember a = 1", system="Be kind.", model="sonnet")
    assert noted == "Noted: a is 1."
    kept = Episode.from_json(json.loads(json.dumps(episode.to_json())))
    left, _ = await ask("remember side = left", episode=kept)
    right, _ = await ask("remember side = right", episode=kept)
    assert (await ask("recall", episode=left))[1] == "I remember: a is 1; side is left."
    assert heard(upstream) == ["remember a = 1", "remember side = left", "recall"]
    async with proxied_without_cli(settings, upstream) as (_, url):
        key = "the-local-secret-01"
        there, told = await ask("recall", episode=right, base_url=url, api_key=key)
        assert told == "I remember: a is 1; side is right."
        assert there.agent_id == episode.agent_id
        assert (await ask("list", episode=there, api_key=key))[1].splitlines()[-1] == "4. list"
        assert "Be kind." in json.dumps(upstream.requests[-1].body["system"])
        with pytest.raises(Unauthorized):
            await ask("x", episode=there)
        with pytest.raises(NotFound):
            await ask("x", episode=Episode("turn_unknown", "a", "sonnet", url), api_key=key)
        named, _ = await ask("remember b = 2", agent_id="a/ü", base_url=url, api_key=key)
        assert named.agent_id == "a/ü"
        assert (await ask("recall", agent_id="a/ü", base_url=url, api_key=key))[1] == "I remember: b is 2."


async def test_what_cannot_be_asked_says_so(settings: Settings) -> None:
    with pytest.raises(InvalidRequest):
        await ask("  ")
    with pytest.raises(InvalidRequest):
        Episode.from_json({"turn": 5})
    with pytest.raises(NotFound):
        await ask("x", episode=Episode("turn_unknown", "a", "sonnet"))
    with pytest.raises(ClaudeUnavailable, match="serve"):
        await ask("x", base_url="http://127.0.0.1:9")


def test_importing_the_package_is_cheap_and_it_exports_what_it_says() -> None:
    code = (
        "import sys, cli_session_proxy as c;"
        "assert not {'httpx', 'pydantic', 'sqlalchemy'} & set(sys.modules);"
        "assert all(getattr(c, name) for name in c.__all__);"
        "assert not {'litellm', 'openai', 'starlette', 'jsonschema_rs'} & set(sys.modules), sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    with pytest.raises(AttributeError):
        _ = cli_session_proxy.nothing
