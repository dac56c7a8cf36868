"""LiteLLM in front of the proxy: in this process, as a LiteLLM proxy of the shipped config, and over `serve`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from cli_session_proxy.settings import Settings
from turnfault.ports import free_port
from turnfault.provider.upstream import Upstream

from ..litellm_offline import exceptions, litellm, offline_environment, provider
from ..without_cli import engine_without_cli, proxied_without_cli

CONFIG = Path(__file__).parents[2] / "docs" / "litellm" / "config.yaml"
MASTER_KEY = "sk-only-for-this-test-0123456789"
# LiteLLM starts in about 5 s on a quiet machine; this is for a busy one (s).
START_TIMEOUT = 200.0
STOP_TIMEOUT = 60.0
# uvicorn raises the SIGTERM again, so the LiteLLM proxy runs no exit hook: its CLIs end at the end of their input (s)
CHILD_TIMEOUT = 60.0
# the settings that a LiteLLM proxy gets by environment
BY_ENVIRONMENT = ("var", "claude_bin", "claude_config_dir", "turn_timeout", "idle_timeout", "drain_timeout", "spares")
# A model beside those of the shipped config, as its `api_base` line has it: a running `serve` answers it.
REMOTE = """
  - model_name: remote
    litellm_params:
      <<: *agent
      model: claude-cli/sonnet
      api_base: {url}
"""


@dataclass
class Proxy:
    """A running LiteLLM proxy. `log` is the end of what it printed."""

    client: openai.AsyncOpenAI
    process: asyncio.subprocess.Process
    log: deque[str]


@asynccontextmanager
async def litellm_proxy(config: Path, env: dict[str, str], cwd: Path) -> AsyncIterator[Proxy]:
    """The real `litellm --config`, started from an own directory, ended by SIGTERM."""
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        str(Path(sys.executable).parent / "litellm"),
        "--config", str(config), "--host", "127.0.0.1", "--port", str(port),
        env=offline_environment(LITELLM_MASTER_KEY=MASTER_KEY, **env), cwd=cwd,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        limit=1024 * 1024,
    )  # fmt: skip
    log: deque[str] = deque(maxlen=300)
    listening = asyncio.Event()
    reading = asyncio.create_task(_read(process, log, listening))
    client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=MASTER_KEY, max_retries=0)
    try:
        async with asyncio.timeout(START_TIMEOUT):
            await listening.wait()
        assert process.returncode is None, "".join(log)
        yield Proxy(client, process, log)
    finally:
        await client.close()
        await _end(process)
        await reading


async def _read(process: asyncio.subprocess.Process, log: deque[str], listening: asyncio.Event) -> None:
    assert process.stdout is not None
    async for line in process.stdout:
        log.append(line.decode(errors="replace"))
        if "Uvicorn running on" in log[-1]:
            listening.set()
    listening.set()  # it ended: whoever waits sees that


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
        try:
            async with asyncio.timeout(STOP_TIMEOUT):
                await process.wait()
        except TimeoutError:
            process.kill()
    await process.wait()


def environment(settings: Settings) -> dict[str, str]:
    values = {f"CLI_SESSION_PROXY_{name.upper()}": str(getattr(settings, name)) for name in BY_ENVIRONMENT}
    values["CLI_SESSION_PROXY_CLAUDE_ENV"] = json.dumps(settings.claude_env)
    return {**values, "HOME": settings.claude_env["HOME"]}


@pytest.fixture
async def here(make_settings: Callable[..., Settings], claude_2: Path) -> AsyncIterator[Settings]:
    """The engine of this process, over the real CLI."""
    settings = make_settings(claude_bin=claude_2)
    provider.register()
    await asyncio.to_thread(provider.configure, settings)
    yield settings
    await asyncio.to_thread(provider.close)


def said(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


async def whole(stream: Any) -> str:
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])


def assert_remembered(upstream: Upstream, texts: list[str]) -> None:
    """The last request showed the model every turn once, in order, and kept the one before it."""
    assert upstream.requests[-1].user_texts() == texts
    assert upstream.requests[-1].prefix_kept(upstream.requests[-2]) == 1.0


async def test_ten_turns_in_this_process_streamed_and_not(here: Settings, upstream: Upstream) -> None:
    texts = [f"Remember: number {n} is {n * 7}" for n in range(10)]
    for turn, text in enumerate(texts):
        call: dict[str, Any] = {"model": "claude-cli/sonnet", "messages": said(text), "agent_id": "ada"}
        if turn % 2:
            answer = await whole(await litellm.acompletion(**call, stream=True))
        else:
            completion: Any = await litellm.acompletion(**call)
            answer = completion.choices[0].message.content
            assert completion.choices[0].message.provider_specific_fields["continuity"] == (
                "warm" if turn else "started"
            )
        assert answer == f"Noted: number {turn} is {turn * 7}."
    assert_remembered(upstream, texts)


async def test_turns_by_the_sync_calls(make_settings: Callable[..., Settings], upstream: Upstream) -> None:
    provider.register()
    await asyncio.to_thread(
        provider.configure, make_settings(), engine_factory=lambda settings: engine_without_cli(settings, upstream)
    )
    texts = ["Remember: the colour is teal", "Remember: the town is Ulm", "recall"]

    def work() -> str:
        call: dict[str, Any] = {"model": "claude-cli/sonnet", "agent_id": "ada"}
        litellm.completion(**call, messages=said(texts[0]))
        for _ in litellm.completion(**call, messages=said(texts[1]), stream=True):
            pass
        last: Any = litellm.completion(**call, messages=said(texts[2]))
        return str(last.choices[0].message.content)

    try:
        assert await asyncio.to_thread(work) == "I remember: colour is teal; town is Ulm."
    finally:
        await asyncio.to_thread(provider.close)
    assert_remembered(upstream, texts)


@pytest.mark.timeout(600)
async def test_every_door_of_a_litellm_proxy_of_the_shipped_config_keeps_its_chain(
    make_settings: Callable[..., Settings], claude_2: Path, upstream: Upstream, tmp_path: Path
) -> None:
    """LiteLLM takes six seconds of a processor to start: one serves for its own engine, on the real CLI, and for a
    model that a `serve` answers, which needs none."""
    settings = make_settings(claude_bin=claude_2)
    config = tmp_path / "config.yaml"
    shipped, models, rest = CONFIG.read_text().partition("\nlitellm_settings:\n")
    async with proxied_without_cli(make_settings(var=tmp_path / "served"), upstream) as (_, root):
        config.write_text(f"{shipped}{REMOTE.format(url=f'{root}/v1')}{models}{rest}")
        async with litellm_proxy(config, environment(settings), tmp_path) as proxy:
            await all_doors_continue_one_chain(proxy, f"{root}/v1", upstream)
            await every_door_keeps_its_chain(proxy, upstream)
            children = await asyncio.to_thread(_children_of, proxy.process.pid)
            assert len(children) > 1, "its guardian, and the CLIs, which stay warm between turns"
    for child in children:
        assert await asyncio.to_thread(_ends, child), "a CLI outlives the LiteLLM proxy"


async def every_door_keeps_its_chain(proxy: Proxy, upstream: Upstream) -> None:
    texts = [f"Remember: number {n} is {n * 7}" for n in range(10)]
    chat = proxy.client.chat.completions
    # The effort is the same in all turns: with another one the CLI would be started anew each time.
    for turn, text in enumerate(texts):
        if turn % 2:
            stream = await chat.create(
                model="sonnet", messages=said(text), stream=True, reasoning_effort="low",
                extra_body={"agent_id": "ada"},
            )  # fmt: skip
            answer = await whole(stream)
        else:
            raw = await chat.with_raw_response.create(
                model="sonnet", messages=said(text), extra_headers={"X-Agent-Id": "ada"}, reasoning_effort="low"
            )
            assert raw.headers["llm_provider-x-agent-id"] == "ada"
            completion: Any = raw.parse()
            answer = completion.choices[0].message.content
            assert completion.usage.prompt_tokens > 0
        assert answer == f"Noted: number {turn} is {turn * 7}."
    with pytest.raises(openai.BadRequestError, match="n must be 1"):
        await chat.create(model="sonnet", messages=said("x"), n=2)
    assert_remembered(upstream, texts)

    create = proxy.client.responses.create
    first = await create(model="sonnet", input="Remember: colour is teal")
    second: Any = None
    async for event in await create(
        model="sonnet", input="Remember: town is Ulm", previous_response_id=first.id, stream=True
    ):
        second = getattr(event, "response", second)
    third = await create(model="sonnet", input="recall", previous_response_id=second.id)
    assert third.output_text == "I remember: colour is teal; town is Ulm."
    branch = await create(model="sonnet", input="recall", previous_response_id=first.id)
    assert branch.output_text == "I remember: colour is teal."
    base = str(proxy.client.base_url).removesuffix("/v1/")
    async with anthropic.AsyncAnthropic(base_url=base, api_key=proxy.client.api_key) as client:
        named = {"X-Agent-Id": "by-messages"}
        for text in ("Remember: colour is teal", "recall"):
            message = await client.messages.create(
                model="sonnet", max_tokens=100, messages=[{"role": "user", "content": text}], extra_headers=named
            )
    assert message.content[0].text == "I remember: colour is teal."  # type: ignore[union-attr]


def _children_of(pid: int) -> list[int]:
    """Handles of a process's children. Linux only, as CI is."""
    found: list[int] = []
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread or child that ended meanwhile
            found += [os.pidfd_open(int(child)) for child in listing.read_text().split()]
    return found


def _ends(handle: int) -> bool:
    """Whether the process is gone within `CHILD_TIMEOUT`."""
    try:
        ready, _, _ = select.select([handle], [], [], CHILD_TIMEOUT)
        return bool(ready)
    finally:
        os.close(handle)


async def all_doors_continue_one_chain(proxy: Proxy, url: str, upstream: Upstream) -> None:
    """The `serve` at this address is talked to directly, by the LiteLLM proxy, and by litellm in this process."""
    texts = ["Remember: the colour is teal", "Remember: the town is Ulm", "Remember: the pet is a cat", "recall"]
    named: dict[str, Any] = {"extra_body": {"agent_id": "ada"}}
    provider.register()
    through = proxy.client.chat.completions
    try:
        async with openai.AsyncOpenAI(base_url=url, api_key="none") as direct:
            await direct.chat.completions.create(model="sonnet", messages=said(texts[0]), **named)
        await through.create(model="remote", messages=said(texts[1]), **named)
        await litellm.acompletion(model="claude-cli/sonnet", messages=said(texts[2]), api_base=url, agent_id="ada")
        last = await whole(await through.create(model="remote", messages=said(texts[3]), stream=True, **named))
    finally:
        await asyncio.to_thread(provider.close)
    assert last == "I remember: colour is teal; town is Ulm; pet is a cat."
    assert_remembered(upstream, texts)


async def test_a_cli_that_is_not_there_says_what_to_do(make_settings: Callable[..., Settings], tmp_path: Path) -> None:
    provider.register()
    await asyncio.to_thread(provider.configure, make_settings(claude_bin=tmp_path / "none"))
    try:
        with pytest.raises(exceptions.ServiceUnavailableError, match="claude_unavailable"):
            await litellm.acompletion(model="claude-cli/sonnet", messages=said("hello"), agent_id="ada")
    finally:
        await asyncio.to_thread(provider.close)
