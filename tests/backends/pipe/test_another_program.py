"""A backend is one folder and one line: another program, with files of its own, behind the whole proxy.

Nothing of the proxy names it. What it is asked is what reaches the model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from cli_session_proxy.backends.auto import GROUP
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.errors import ConfigError, ProxyError
from cli_session_proxy.settings import Settings
from turnfault.provider.script import Fail, HeldReply
from turnfault.provider.upstream import Upstream

from ...conftest import MakeSettings
from ...serving import serve
from ...talking import ask, heard, running, text
from ...until import until
from .backend import NAME, PipeBackend


@pytest.fixture
def settings(make_settings: MakeSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """With the backend chosen, as a package of its own has registered it: by this one line."""
    package = tmp_path / "site" / "pipe-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: pipe\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(f"[{GROUP}]\n{NAME} = {PipeBackend.__module__}:PipeBackend\n")
    monkeypatch.syspath_prepend(str(package.parent))
    return make_settings(backend=NAME, claude_bin=tmp_path / "none")


def pipe(engine: Engine) -> PipeBackend:
    assert isinstance(engine.backend, PipeBackend)
    return engine.backend


async def test_a_conversation_is_remembered_in_one_process_and_by_the_next_proxy(
    settings: Settings, upstream: Upstream
) -> None:
    async with running(settings) as engine:
        turns = [await ask(engine, said) for said in ("one", "two", "three")]
        assert [turn.continuity for turn in turns] == ["started", "warm", "warm"]
        assert {turn.session_id for turn in turns} == {turns[0].session_id}
        await ask(engine, "mine", agent="b")
        assert heard(upstream) == ["mine"]
    async with running(settings) as engine:
        assert (await ask(engine, "four")).continuity == "resumed"
        assert heard(upstream) == ["one", "two", "three", "four"]


@pytest.mark.parametrize(
    "breaks",
    [
        pytest.param(Path.unlink, id="deleted"),
        pytest.param(lambda file: file.write_text(file.read_text()[:-20]), id="cut"),
        pytest.param(lambda file: file.write_text(file.read_text() * 2), id="doubled"),
    ],
)
async def test_what_the_program_lost_is_written_again_from_the_chain(
    breaks: Callable[[Path], object], settings: Settings, upstream: Upstream
) -> None:
    async with running(settings) as engine:
        for said in ("one", "two"):
            before = await ask(engine, said)
        breaks(pipe(engine).file(before.session_id or ""))
        turn = await ask(engine, "three")
        assert heard(upstream) == ["one", "two", "three"]
        chain = await engine.store.chain(turn.agent_key)
        assert chain is not None
        assert [(link.from_session, link.reason) for link in chain.links[-1:]] == [(before.session_id, "rebuilt")]


async def test_a_history_that_was_edited_is_a_branch(settings: Settings, upstream: Upstream) -> None:
    async with running(settings) as engine:
        one = await ask(engine, "one")
        await ask(engine, "one", text(one), "two")
        edited = await ask(engine, "one", text(one), "another two")
        assert heard(upstream) == ["one", "another two"]
        assert (edited.parent_id, edited.continuity) == (one.id, "branched")


async def test_a_history_of_elsewhere_is_brought_along(settings: Settings, upstream: Upstream) -> None:
    async with running(settings) as engine:
        await ask(engine, "said before", "answered before", "and now?")
        assert heard(upstream) == ["said before", "and now?"]


async def test_a_program_that_dies_in_a_turn_is_asked_once_more(settings: Settings, upstream: Upstream) -> None:
    async with running(settings) as engine:
        await ask(engine, "one")
        gate = HeldReply()
        upstream.when("two", gate, times=1)
        asked = asyncio.create_task(ask(engine, "two"))
        await gate.reached.wait()
        pipe(engine).kill()
        await asked
        assert heard(upstream) == ["one", "two"]
        await ask(engine, "three")
        assert heard(upstream) == ["one", "two", "three"]


async def test_a_turn_that_failed_is_not_part_of_the_conversation(settings: Settings, upstream: Upstream) -> None:
    async with running(settings) as engine:
        await ask(engine, "one")
        upstream.when("bad", Fail(400), times=None)
        with pytest.raises(ProxyError):
            await ask(engine, "bad")
        await ask(engine, "two")
        assert heard(upstream) == ["one", "two"]


async def test_serve_runs_it_and_an_answer_that_a_kill_left_in_its_file_is_the_turns(
    settings: Settings, upstream: Upstream, tmp_path: Path
) -> None:
    gate = HeldReply()
    upstream.when("three", gate, times=None)

    async def told(client: httpx.AsyncClient, said: str) -> httpx.Response:
        body = {"model": "sonnet", "messages": [{"role": "user", "content": said}]}
        return await client.post("/chat/completions", json=body, headers={"X-Agent-Id": "a"})

    async with (
        serve(settings, tmp_path) as (base, process),
        httpx.AsyncClient(base_url=f"{base}/v1", trust_env=False, timeout=30) as client,
    ):
        answers = [await told(client, said) for said in ("one", "two")]
        assert [answer.headers["x-continuity"] for answer in answers] == ["started", "warm"]
        third = asyncio.create_task(told(client, "three"))
        await gate.reached.wait()
        process.kill()
        with pytest.raises(httpx.TransportError):
            await third
    gate.open()
    (file,) = (settings.var / NAME).iterdir()
    await until(lambda: len(file.read_text().splitlines()) == 6)
    async with running(settings) as engine:
        await ask(engine, "four")
        assert heard(upstream) == ["one", "two", "three", "four"]
    assert [seen.prompt for seen in upstream.requests] == ["one", "two", "three", "four"]


def test_a_backend_that_nobody_installed_is_named_with_those_that_are(settings: Settings) -> None:
    with pytest.raises(ConfigError, match="'pip': no installed package has it; there is claude, pipe"):
        Engine(settings.model_copy(update={"backend": "pip"}))
