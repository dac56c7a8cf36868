"""What is printed or streamed while a chain goes on, and which chains are listed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cli_session_proxy import cli
from cli_session_proxy.commands import following, listing
from cli_session_proxy.commands.dumping import Shown
from cli_session_proxy.commands.listing import ChainFilter
from cli_session_proxy.domain.models import Message
from cli_session_proxy.errors import ConfigError
from cli_session_proxy.settings import Settings
from cli_session_proxy.stores.base import Store
from cli_session_proxy_store_conformance.samples import a_turn, accepted
from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings
from ..forked import forked
from ..serving import serving
from ..talking import ask, running
from .test_portable import fill, store_of, turn

SOON = 60


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(var=tmp_path / "var", claude_config_dir=tmp_path / "config")


async def queued(store: Store, number: int, words: str = "hello") -> None:
    agent = await store.agent("local", "a")
    assert agent is not None
    asked = (Message.user(words),)
    await accepted(store, a_turn(agent, f"turn_q{number}", agent.head, at=time.time(), input=asked))


async def test_only_what_happens_from_now_on_is_printed_until_the_agent_is_gone(settings: Settings) -> None:
    await fill(settings, turn(1))
    out: asyncio.Queue[str] = asyncio.Queue()
    task = asyncio.create_task(following.follow(settings, "local", "a", Shown("json"), out.put_nowait))
    async with store_of(settings) as store, asyncio.timeout(SOON):
        await asyncio.sleep(0)
        while out.empty():  # it may not have looked for the first time yet
            await queued(store, time.monotonic_ns())
            await asyncio.sleep(0.6)
        first = json.loads(await out.get())
        assert first["turn"]["status"] == "queued"
        await store.fail(first["turn"]["id"], "failed", {"code": "x", "message": "y"}, [], {}, time.time())
        while (second := json.loads(await out.get()))["turn"]["status"] != "failed":
            pass
        assert second["turn"]["id"] == first["turn"]["id"]
        agent = await store.agent("local", "a")
        assert agent is not None
        await store.delete_agent(agent.key)
        await task
    assert "turn_1" not in {json.loads(line)["turn"]["id"] for line in iter_queue(out)}


def iter_queue(queue: asyncio.Queue[str]) -> list[str]:
    return [queue.get_nowait() for _ in range(queue.qsize())]


async def test_a_page_or_a_graph_cannot_be_followed(settings: Settings) -> None:
    for name in ("html", "mermaid", "pdf"):
        with pytest.raises(ConfigError, match="--follow"):
            await following.follow(settings, "local", "a", Shown(name), print)
    with pytest.raises(ConfigError, match="no store at"):
        await following.follow(settings, "local", "nobody", Shown("json"), print)


async def test_a_person_sees_a_repair_as_it_happens(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings(claude_bin=claude_2)
    assert settings.claude_config_dir is not None
    async with running(settings) as engine:
        await ask(engine, "one")
        args = ["dump", "a", "--follow", "--format", "markdown", "--var", str(settings.var)]
        process = await forked(cli.main, *args, env=os.environ, cwd=Path.cwd())
        repair = asyncio.create_task(line_that_starts(process.stdout, b"    repaired (rebuilt): "))
        try:
            async with asyncio.timeout(SOON):
                while not repair.done():  # the follower may not have begun to look yet
                    for path in settings.claude_config_dir.glob("projects/*/*.jsonl"):
                        path.unlink()
                    await ask(engine, "again")
                seen = await repair
        finally:
            repair.cancel()
            process.send_signal(signal.SIGTERM)
            await process.wait()
            process.close()
    assert b"The session's transcript was gone (no transcript at" in seen
    assert b"it was written again from the chain" in seen


async def line_that_starts(stream: asyncio.StreamReader, start: bytes) -> bytes:
    """The first line that starts so."""
    while line := await stream.readline():
        if line.startswith(start):
            return line
    raise AssertionError("the output ended")


async def test_events_are_streamed_and_go_on_where_a_reader_left_off(settings: Settings) -> None:
    await fill(settings, turn(1), turn(2))
    settings = settings.model_copy(update={"port": 0})
    async with (
        running(settings) as engine,
        serving(engine, settings) as url,
        httpx.AsyncClient(base_url=url, trust_env=False) as http,
        asyncio.timeout(SOON),
    ):
        assert (await http.get("/chains/nobody/events")).status_code == 404
        async with http.stream("GET", "/chains/a/events", headers={"Last-Event-ID": "1"}) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = answer.aiter_lines()
            event = await next_event(lines)
            assert (event["turn"]["id"], event["seq"]) == ("turn_2", 2)
            await queued(engine.store, 3)
            assert (await next_event(lines))["turn"]["id"] == "turn_q3"


async def next_event(lines: AsyncIterator[str]) -> Any:
    async for line in lines:
        if line.startswith("data: "):
            return json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream ended")


# --- chains


async def listed(settings: Settings, *options: str | None) -> list[str]:
    return [row["agent_id"] for row in (await listing.chains(settings, ChainFilter.parse(*options))).rows]


async def test_chains_are_filtered_by_name_time_and_status(settings: Settings) -> None:
    await fill(settings, turn(1), name="Alpha One")
    async with store_of(settings) as store:
        agent = await store.ensure_agent("local", "beta", "beta", named=True, now=time.time() - 7200)
        await accepted(store, a_turn(agent, "turn_b", at=time.time() - 7200))
        await store.fail("turn_b", "failed", {}, [], {}, time.time() - 7200)
    assert sorted(await listed(settings, None, None, None)) == ["Alpha One", "beta"]
    assert await listed(settings, "ALPHA", None, None) == ["Alpha One"]
    assert await listed(settings, None, "3h", "failed") == ["beta"]
    assert await listed(settings, None, "1h", "failed") == []
    assert await listed(settings, None, "2000-01-01", "completed") == ["Alpha One"]


@pytest.mark.parametrize("option", [["--since", "soon"], ["--since", "12"], ["--status", "lost"]])
def test_a_wrong_filter_is_one_line(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["chains", *option])
    assert caught.value.code == 2
    assert option[0] in capsys.readouterr().err


async def test_redaction_can_be_turned_off_for_what_was_said(
    settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = "sk-ant-api03-abcdef123456"
    await fill(settings, turn(1, input=(Message.user(secret),)))
    args = ["dump", "a", "--var", str(settings.var)]

    def printed(*more: str) -> str:
        with pytest.raises(SystemExit) as ended:
            cli.main([*args, *more])
        assert not ended.value.code
        return capsys.readouterr().out

    assert secret not in await asyncio.to_thread(printed)
    assert secret in await asyncio.to_thread(printed, "--no-redact")
