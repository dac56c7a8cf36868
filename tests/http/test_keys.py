"""Keys: who asks, what each may see, and that no secret ever shows."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.errors import ConfigError, Unauthorized
from cli_session_proxy.http.binding import bind
from cli_session_proxy.http.keys import Keys
from cli_session_proxy.settings import Settings, load
from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings
from ..fakes import FakeEngine
from ..files import holding
from ..serving import serving
from ..wires.responses.conftest import client_of
from ..without_cli import running_without_cli

ALICE, BOB = "alices-secret-0123456789", "bobs-secret-0123456789"
BOTH = {"alice": ALICE, "bob": BOB}


def keys(**options: Any) -> Keys:
    return Keys(Settings(**options))


@pytest.mark.parametrize(
    ("headers", "query"),
    [
        ({"authorization": f"Bearer {BOB}"}, ""),
        ({"authorization": f"bearer  {BOB}"}, ""),
        ({"x-api-key": BOB}, ""),
        ({"x-goog-api-key": BOB}, ""),
        ({}, f"alt=sse&key={BOB}"),
        ({"authorization": "Bearer of-something-else", "x-api-key": BOB}, ""),
    ],
)
def test_a_key_names_its_owner_wherever_it_stands(headers: dict[str, str], query: str) -> None:
    assert keys(keys=BOTH).owner_of(headers, query) == "bob"


@pytest.mark.parametrize("headers", [{}, {"authorization": "Basic abc"}, {"x-api-key": "wrong"}, {"x-api-key": ""}])
def test_without_a_known_key_nobody_is_let_in(headers: dict[str, str]) -> None:
    with pytest.raises(Unauthorized, match="x-goog-api-key"):
        keys(keys=BOTH).owner_of(headers, "")


def test_an_address_of_very_many_parameters_is_not_taken_apart() -> None:
    """7,500 keys in one took 25 ms of each request without a known one."""
    with pytest.raises(Unauthorized, match="parameters"):
        keys(keys=BOTH).owner_of({}, "key=x&" * 7500 + f"key={BOB}")


def test_without_keys_everybody_is_local_and_what_they_present_is_ignored() -> None:
    assert keys().owner_of({"authorization": "Bearer anything"}, "key=x") == "local"


def test_keys_come_from_the_settings_file_the_environment_and_a_keys_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("cli_session_proxy.toml").write_text(f'keys_file = "more.toml"\n[keys]\nalice = "{ALICE}"\n')
    Path("more.toml").write_text('carol = "carols-secret-0123456789"\n')
    Path("more.toml").chmod(0o600)
    monkeypatch.setenv("CLI_SESSION_PROXY_KEYS__BOB", BOB)
    found = Keys(load(config=Path("cli_session_proxy.toml")))
    for secret, owner in ((ALICE, "alice"), (BOB, "bob"), ("carols-secret-0123456789", "carol")):
        assert found.owner_of({"x-api-key": secret}, "") == owner


@pytest.mark.parametrize(
    "given",
    [
        {"keys": {"a": "short"}},
        {"keys": {"a": ALICE, "b": ALICE}},
        {"keys": {"../x": ALICE}},
        {"keys": {"a": "with a space 0123456789"}},
        {"keys": {"a": ALICE}, "operators": ("b",)},
        {"keys_file": "missing.toml"},
        {"keys_file": "broken.toml"},
        {"keys_file": "empty.toml"},
    ],
)
def test_keys_that_cannot_be_used_are_a_config_error_without_the_secret(given: dict[str, Any]) -> None:
    Path("broken.toml").write_text(f"{ALICE}\n")
    Path("broken.toml").chmod(0o600)
    Path("empty.toml").touch(0o600)
    with pytest.raises(ConfigError) as raised:
        keys(**given)
    assert ALICE not in raised.value.message


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o620, 0o602, 0o604, 0o666])
def test_a_file_of_secrets_that_others_can_read_or_write_is_refused(mode: int, tmp_path: Path) -> None:
    file = tmp_path / "secrets.toml"
    file.write_text(f'alice = "{ALICE}"\n')
    for given, ask in (("keys_file", Keys), ("cluster_key_file", Settings.cluster_secret)):
        file.chmod(mode)
        with pytest.raises(ConfigError, match=f"{given} .* can be read or written by others: .* chmod 600"):
            ask(Settings(**{given: file}))  # type: ignore[arg-type]
    file.chmod(0o600)
    assert Keys(Settings(keys_file=file)).owners == {"alice"}
    link = tmp_path / "link"
    link.symlink_to(file)
    assert Keys(Settings(keys_file=link)).owners == {"alice"}
    with pytest.raises(ConfigError, match="can be read or written by others"):
        Keys(Settings(keys_file=Path(os.devnull)))


def test_settings_never_show_a_secret() -> None:
    settings = Settings(keys=BOTH)  # type: ignore[arg-type]  # pydantic makes them SecretStr
    for shown in (repr(settings), str(settings), settings.model_dump_json(), repr(Keys(settings))):
        assert ALICE not in shown


def test_another_host_needs_keys() -> None:
    with pytest.raises(ConfigError, match="keys"):
        bind(Settings(host="0.0.0.0", port=0))
    bind(Settings(host="0.0.0.0", port=0, keys=BOTH)).close()  # type: ignore[arg-type]  # as above


def test_serve_on_another_host_without_a_key_exits_with_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cli_session_proxy", "serve", "--host", "0.0.0.0", "--port", "0", "--var", "v"],
        check=False, cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert "[keys]" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@asynccontextmanager
async def locked(engine: Any, settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        serving(engine, settings) as url,
        httpx.AsyncClient(base_url=url.removesuffix("/v1"), trust_env=False, timeout=30) as http,
    ):
        yield http


async def test_a_missing_key_is_a_401_in_each_wires_shape_but_health_is_open(tmp_path: Path) -> None:
    settings = Settings(var=tmp_path / "var", port=0, keys=BOTH)  # type: ignore[arg-type]  # as above
    async with locked(FakeEngine().as_engine(), settings) as http:
        answer = await http.get("/v1/models")
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "unauthorized"
        named = await http.get("/v1/models", headers={"anthropic-version": "2023-06-01"})
        assert (named.status_code, named.json()["type"]) == (401, "error")
        for path in ("/v1/chains", "/agents/ada/v1/models", "/v1/conversations/conv_1", "/nowhere"):
            assert (await http.get(path)).status_code == 401
        assert (await http.get("/healthz")).status_code == 200
        assert (await http.get("/v1/models", headers={"x-api-key": ALICE})).status_code == 200
        assert (await http.get(f"/v1/models?key={ALICE}")).status_code == 200


async def test_on_every_address_any_name_of_the_machine_is_served_but_no_foreign_page(tmp_path: Path) -> None:
    settings = Settings(var=tmp_path / "var", host="0.0.0.0", port=0, keys=BOTH)  # type: ignore[arg-type]  # as above
    async with locked(FakeEngine().as_engine(), settings) as http:
        key = {"x-api-key": ALICE, "Host": "my-machine.lan:8787"}
        assert (await http.get("/v1/models", headers=key)).status_code == 200


async def test_each_key_sees_only_its_own(
    make_settings: MakeSettings, upstream: Upstream, caplog: pytest.LogCaptureFixture
) -> None:
    settings = make_settings(keys=BOTH)
    async with running_without_cli(settings, upstream) as engine, serving(engine, settings) as url:
        alice, bob = client_of(url, ALICE), client_of(url, BOB)
        async with alice, bob:
            await _only_its_own(alice, bob, engine)
    assert not holding(ALICE, settings.var)
    assert ALICE not in caplog.text


async def _only_its_own(alice: openai.AsyncOpenAI, bob: openai.AsyncOpenAI, engine: Engine) -> None:
    made = await alice.conversations.create()
    first = await alice.responses.create(model="sonnet", input="remember a = 1", conversation=made.id)
    for call in (bob.responses.retrieve, bob.responses.delete, bob.responses.cancel, bob.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            await call(first.id)
    with pytest.raises(openai.BadRequestError) as raised:
        await bob.responses.create(model="sonnet", input="x", previous_response_id=first.id)
    assert raised.value.code == "previous_response_not_found"
    with pytest.raises(openai.NotFoundError):
        await bob.responses.create(model="sonnet", input="x", conversation=made.id)
    with pytest.raises(openai.NotFoundError):
        await bob.conversations.delete(made.id)
    # the same name is another agent, and a repeated history finds nothing of somebody else
    one: Any = {"model": "sonnet", "messages": [{"role": "user", "content": "remember b = 2"}]}
    named = {"X-Agent-Id": "ada"}
    await alice.chat.completions.create(**one, extra_headers=named)
    told = await bob.chat.completions.create(
        model="sonnet", messages=[{"role": "user", "content": "recall"}], extra_headers=named
    )
    assert told.choices[0].message.content == "I remember nothing."
    listed = await bob.get("/chains", cast_to=object)
    assert [row["agent_id"] for row in listed["data"]] == ["ada"]  # type: ignore[index]
    agent = await engine.store.agent("alice", "ada")
    assert agent is not None
