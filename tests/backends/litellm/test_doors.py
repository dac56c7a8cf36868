"""What the doors tell of configured models, windows and notes; and that nobody pays who has no models."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from claude_agent_sdk import project_key_for_directory

from cli_session_proxy import ask as asking
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.errors import ConfigError
from cli_session_proxy.sdk import ChainSessionStore, runtime
from cli_session_proxy.settings import CONFIG_FILE, ModelSettings, Settings, load
from turnfault.provider.upstream import Upstream

from ...conftest import ROOT
from ...litellm_offline import offline_environment
from ...outputs import output_of
from ...serving import serving
from ...talking import running
from .servers import Provider, Reply, texts


async def test_the_list_of_models_names_what_is_configured_in_each_wires_shape(
    with_models: Callable[..., Settings], provider: Provider
) -> None:
    settings = with_models()
    async with running(settings) as engine, serving(engine, settings) as base, httpx.AsyncClient() as client:
        root = base.removesuffix("/v1")
        chat = (await client.get(f"{base}/models")).json()["data"]
        owners = {one["id"]: one["owned_by"] for one in chat}
        assert (owners["sonnet"], owners["gpt"], owners["gemini"]) == ("anthropic", "openai", "gemini")
        assert {"claude-sonnet-latest", "claude-opus-latest", "claude-haiku-latest"} <= owners.keys()
        messages = (await client.get(f"{base}/models", headers={"anthropic-version": "2023-06-01"})).json()["data"]
        assert {"gpt", "claude-cli/gpt", "claude-sonnet-latest"} <= {one["id"] for one in messages}
        google = (await client.get(f"{root}/v1beta/models")).json()["models"]
        assert "models/gpt" in {one["name"] for one in google}
        ollama = (await client.get(f"{root}/api/tags")).json()["models"]
        assert "gpt:latest" in {one["name"] for one in ollama}
        assert (await client.get(f"{base}/models/gpt")).json()["owned_by"] == "openai"


def test_a_name_that_clients_look_for_is_the_model_that_it_names() -> None:
    settings = Settings()
    asked = [settings.model_for(name, settings.profile_for(None)) for name in ("claude-opus-latest", "gpt-4", "x")]
    assert asked == ["opus", "sonnet", "x"]


async def test_every_wire_is_answered_by_a_configured_model(
    with_models: Callable[..., Settings], provider: Provider
) -> None:
    settings = with_models()
    user = {"role": "user", "content": "hello"}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"model": "gpt", "messages": [user]},
        "/v1/messages": {"model": "claude-cli/gpt", "max_tokens": 50, "messages": [user]},
        "/v1/responses": {"model": "gpt", "input": "hello"},
        "/v1beta/models/gpt:generateContent": {"contents": [{"role": "user", "parts": [{"text": "hello"}]}]},
        "/v1beta/interactions": {"model": "gpt", "input": "hello"},
        "/api/chat": {"model": "gpt:latest", "stream": False, "messages": [user]},
    }
    async with running(settings) as engine, serving(engine, settings) as base, httpx.AsyncClient() as client:
        root = base.removesuffix("/v1")
        for number, (path, body) in enumerate(bodies.items(), 1):
            answer = await client.post(f"{root}{path}", json=body, timeout=60)
            assert (answer.status_code, answer.headers["x-backend"], answer.headers["x-model"]) == (
                200,
                "litellm",
                "gpt",
            )
            assert f"answer {number}" in answer.text
    assert provider.refused == []


async def test_metadata_is_kept_with_the_turn_and_names_nobody(
    with_models: Callable[..., Settings], provider: Provider
) -> None:
    settings = with_models()
    notes = {"conversation_id": "c-7", "user_id": "u-1", "n": 3, "deep": {"a": 1}, "long": "x" * 600, "y" * 65: "z"}
    async with running(settings) as engine, serving(engine, settings) as base, httpx.AsyncClient() as client:
        for path, body in (
            ("chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
            ("responses", {"input": "hello"}),
        ):
            told = notes if path != "responses" else {"conversation_id": "c-7", "user_id": "u-1"}
            sent = {"model": "gpt", "metadata": told, **body}
            answer = await client.post(f"{base}/{path}", json=sent, timeout=60)
            agent = answer.headers["x-agent-id"]
            assert agent.startswith("auto_")
            turn = (await client.get(f"{base}/chains/{agent}")).json()["turns"][0]
            for words in ("u-1", "conversation_id c-7"):
                (hit,) = [
                    hit
                    for hit in (await client.get(f"{base}/search", params={"q": words})).json()["data"]
                    if hit["turn_id"] == turn["id"]
                ]
                assert "".join(piece["text"] for piece in hit["snippet"]).startswith("conversation_id: c-7")
            kept = {"conversation_id": "c-7", "user_id": "u-1"} | ({"n": 3} if path != "responses" else {})
            assert turn["metadata"] == kept


async def test_a_window_comes_in_a_header_and_a_bad_one_is_refused(
    with_models: Callable[..., Settings], provider: Provider
) -> None:
    settings = with_models()
    async with running(settings) as engine, serving(engine, settings) as base, httpx.AsyncClient() as client:
        for number in range(8):
            body = {"model": "gpt", "messages": [{"role": "user", "content": f"q{number}"}]}
            headers = {"X-Agent-Id": "a", "X-Window": "4 turns"}
            answer = await client.post(f"{base}/chat/completions", json=body, headers=headers, timeout=60)
        assert answer.headers["x-continuity-note"].startswith("outside_window=")
        assert len([role for role, _ in texts(provider.openai[-1]) if role == "user"]) <= 4
        headers["X-Window"] = "everything"
        refused = await client.post(f"{base}/chat/completions", json=body, headers=headers)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "X-Window")


async def test_an_application_of_the_agent_sdk_resumes_what_another_model_said(
    with_models: Callable[..., Settings], provider: Provider, upstream: Upstream, claude_2: Path
) -> None:
    runtime.configure(with_models(claude_bin=claude_2))
    try:
        await asking("one", agent_id="a", model="sonnet")
        provider.next(Reply("by gpt"))
        await asking("two", agent_id="a", model="gpt")
        store = ChainSessionStore("a")
        project = project_key_for_directory(await store.directory())
        (found,) = await store.list_sessions(project)
        loaded: Any = await store.load({"project_key": project, "session_id": found["session_id"]})
    finally:
        await asyncio.to_thread(runtime.close)
    said = [one for one in loaded if one["type"] in ("user", "assistant") and not one.get("isMeta")]
    words = [one["message"]["content"] for one in said]
    texts_of = [text if isinstance(text, str) else text[-1]["text"] for text in words]
    assert (texts_of[0], texts_of[-2:]) == ("one", ["two", "by gpt"])
    assert said[-2]["parentUuid"] in {one["uuid"] for one in loaded if "uuid" in one}


# --- settings


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[models.sonnet]\nlitellm = "openai/x"', "models.sonnet: this name is the Claude CLI's"),
        ('[models."a b"]\nlitellm = "openai/x"', "models.a b: clients cannot ask for this name"),
        ('[models.gpt]\nlitellm = "claude-cli/sonnet"', "ask for sonnet instead"),
        ('[models.gpt]\nlitellm = "--x"', "models.gpt.litellm"),
        ('[models.gpt]\nlitellm = "openai/x"\napi_base = "http://127.0.0.1:8787/v1"', "is this proxy itself"),
        ('[models.gpt]\nlitellm = "openai/x"\napi_base = "http://localhost:8787"', "is this proxy itself"),
        ('[models.gpt]\nlitellm = "openai/x"\napi_base = "ftp://x"', "models.gpt.api_base"),
        ('[models.gpt]\nlitellm = "openai/x"\napi_key_env = "sk-123"', "not its value"),
        ('[models.gpt]\nlitellm = "openai/x"\nwindow = "40"', "models.gpt.window"),
        ('[models.gpt]\nlitellm = "openai/x"\nparams = { messages = [] }', "messages is set by the proxy itself"),
        ('[models.gpt]\nlitellm = "openai/x"\nfallbacks = ["gtp"]', "there is no model 'gtp'"),
        ('[models.gpt]\nlitellm = "openai/x"\nfallbacks = ["gpt"]', "cannot be its own fallback"),
        ('[models.gpt]\nlitelm = "openai/x"', "models.gpt"),
        ('fallbacks = ["gpt"]', "there is no model 'gpt'"),
        ('[profiles.a]\nwindow = "1 turn"', "profiles.a.window"),
    ],
)
def test_a_model_that_cannot_be_is_refused_at_start_in_words(text: str, says: str) -> None:
    Path("own.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(config=Path("own.toml"))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("variable", ["OPENAI_BASE_URL", "OPENAI_API_BASE"])
def test_a_model_that_the_environment_leads_back_here_is_refused_at_start(
    make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "http://localhost:8787/v1")
    settings = make_settings(port=8787, models={"gpt": ModelSettings(litellm="openai/gpt-4o")})
    with pytest.raises(ConfigError, match="this proxy itself"):
        Engine(settings)
    Engine(make_settings(port=8788, models=settings.models))
    monkeypatch.setenv(variable, "http://localhost:99999")
    with pytest.raises(ConfigError, match=f"{variable} is no address"):
        Engine(settings)


def test_a_file_of_anybodys_sends_no_conversation_anywhere() -> None:
    Path(CONFIG_FILE).write_text('[models.gpt]\nlitellm = "openai/x"\napi_base = "https://evil.example/v1"')
    with pytest.raises(ConfigError, match="where conversations and keys are sent"):
        load()


@pytest.mark.parametrize("models", ["", "; s.models['gpt'] = ModelSettings(litellm='openai/gpt-4o')"])
@pytest.mark.sample(1)
async def test_litellm_is_imported_only_where_a_model_is_configured(tmp_path: Path, models: str) -> None:
    program = (
        "import sys; from cli_session_proxy.settings import Settings, ModelSettings\n"
        f"s = Settings(var={str(tmp_path)!r}){models}\n"
        "from cli_session_proxy.http import server\nfrom cli_session_proxy.engine.engine import Engine\n"
        "Engine(s)\nprint([one for one in ('litellm', 'openai', 'aiohttp', 'claude_agent_sdk') if one in sys.modules])"
    )
    env = offline_environment(PYTHONPATH=str(ROOT), HOME=str(tmp_path))
    out = await output_of(sys.executable, "-c", program, cwd=tmp_path, env=env)
    assert out.strip() == str(["litellm", "openai", "aiohttp"] if models else [])
