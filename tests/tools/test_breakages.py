"""What breaks while calls wait, or after their results: the model sees every call and result once, in their order."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cli_session_proxy.backends.claude.process.guardian import start_time
from cli_session_proxy.backends.claude.process.process import ClaudeProcess
from cli_session_proxy.backends.claude.sessions import capture, summaries
from cli_session_proxy.domain.models import Turn
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.errors import ContextTooLong
from turnfault.provider.script import Reply, ToolUse
from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings
from ..continuity.talk import ASKS_FOR_SUMMARY
from ..matrix import rest_in_full
from ..recovery.others import other_proxy
from ..talking import ask, claude, heard, running, text
from .test_loops import TOOLS, both, called, calls, result, results, tool_blocks


class Talk:
    """One agent, spoken to with the same tools in every turn."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.turn: Turn

    async def say(self, *said: Any) -> Turn:
        self.turn = await ask(self.engine, *said, tools=TOOLS)
        return self.turn

    @property
    def transcript(self) -> Path:
        assert self.engine.settings.claude_config_dir is not None
        (found,) = self.engine.settings.claude_config_dir.glob(f"projects/*/{self.turn.session_id}.jsonl")
        return found

    @property
    def process(self) -> ClaudeProcess:
        process = claude(self.engine).pool.peek(str(self.turn.session_id))
        assert process is not None
        return process

    async def restart(self) -> None:
        await self.engine.stop()
        self.engine = Engine(self.engine.settings)
        await self.engine.start()


async def kill(talk: Talk) -> None:
    process = talk.process
    os.killpg(process.pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        await process._child.process.wait()


async def delete(talk: Talk) -> None:
    talk.transcript.unlink()


async def remove_a_call(talk: Talk) -> None:
    lines = talk.transcript.read_text(encoding="utf-8").splitlines(keepends=True)
    at = next(number for number, line in enumerate(lines) if '"type":"tool_use"' in line)
    talk.transcript.write_text("".join([*lines[:at], *lines[at + 1 :]]), encoding="utf-8")


async def restart(talk: Talk) -> None:
    await talk.restart()


async def restart_and_delete(talk: Talk) -> None:
    await talk.restart()
    talk.transcript.unlink()


async def in_order_and_once(talk: Talk, upstream: Upstream, made: list[dict[str, Any]]) -> None:
    """What the next turn's request carries: it is the one before and more, to the byte."""
    await talk.say("list")
    ids = [call["id"] for call in made]
    pair, last = ids[:2], ids[2:]
    assert tool_blocks(upstream) == [
        (kind, one) for some in (pair, last) for kind in ("call", "result") for one in some
    ]
    said = ["tool_result: sunny", "tool_result: noon"]
    assert heard(upstream) == ["hello", "where", *said, "once more", "tool_result: rainy", "list"]
    assert [after.prefix_kept(before) for before, after in pairwise(upstream.requests)] == [1.0] * 5


@pytest.mark.parametrize(
    ("breaks", "when"),
    [
        *rest_in_full(
            *((breaks, "while it waits") for breaks in (kill, remove_a_call, restart_and_delete, delete, restart)),
            quick=2,
        ),
        # What is broken once the results are there is one path like any other: a row of the matrix breaks it.
        *rest_in_full(
            *((breaks, "afterwards") for breaks in (remove_a_call, restart_and_delete, kill, delete, restart))
        ),
    ],
)
@pytest.mark.sample(2)
async def test_a_chain_with_calls_survives(
    breaks: Callable[[Talk], Awaitable[None]],
    when: str,
    claude_2: Path,
    make_settings: MakeSettings,
    upstream: Upstream,
) -> None:
    upstream.when("once more", ToolUse([called("get_weather", "Oslo")]))
    talk = Talk(Engine(make_settings(claude_bin=claude_2)))
    await talk.engine.start()
    try:
        await talk.say("hello")
        talk.turn = await both(talk.engine, upstream)
        weather, noon = calls(talk.turn)
        await talk.say(results(result(noon, "noon"), result(weather, "sunny")))
        (oslo,) = calls(await talk.say("once more"))
        if when == "while it waits":
            await breaks(talk)
        answered = await talk.say(results(result(oslo, "rainy")))
        assert text(answered) == "The tool said: rainy"
        if when == "afterwards":
            await breaks(talk)
        await in_order_and_once(talk, upstream, [weather, noon, oslo])
    finally:
        await talk.engine.stop()


async def test_parallel_results_are_kept_where_the_transcript_is_deleted_before_they_are_written(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    """The CLI makes a new file, in which each result hangs on its own call: only the last call is the path's end."""
    async with running(make_settings(claude_bin=claude_2)) as engine:
        talk = Talk(engine)
        talk.turn = await both(engine, upstream)
        weather, noon = calls(talk.turn)
        talk.transcript.unlink()
        await talk.say(results(result(noon, "noon"), result(weather, "sunny")))
        await talk.say("list")
    ids = [weather["id"], noon["id"]]
    assert tool_blocks(upstream) == [(kind, one) for kind in ("call", "result") for one in ids]
    assert heard(upstream) == ["where", "tool_result: sunny", "tool_result: noon", "list"]


async def test_a_proxy_killed_while_calls_wait_gives_each_result_once(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings(claude_bin=claude_2)
    upstream.when("where", ToolUse([called("get_weather"), called("get_time")]))
    async with other_proxy(settings) as other:
        offered = [tool.as_json() for tool in TOOLS]
        waits = await other.ask("where", tools=offered)
        assert waits is not None
        weather, noon = waits["output"]
        [note] = (settings.var / "run").glob("*/[0-9]*")
        await other.end(signal.SIGKILL)
    async with running(settings) as engine:
        assert start_time(int(note.name)) is None
        assert not note.exists()
        answered = await ask(engine, results(result(noon, "noon"), result(weather, "sunny")), tools=TOOLS)
        assert (answered.status, answered.parent_id) == ("completed", waits["turn"])
        assert text(answered) == "The tool said: noon"
        await ask(engine, "list", tools=TOOLS)
    ids = [weather["id"], noon["id"]]
    assert tool_blocks(upstream) == [(kind, one) for kind in ("call", "result") for one in ids]
    assert heard(upstream) == ["where", "tool_result: sunny", "tool_result: noon", "list"]
    # The orphan, until it was ended, may have told the model in vain that its calls failed: no part of the chain.
    first, *_, answer, last = upstream.requests
    assert (answer.prefix_kept(first), last.prefix_kept(answer)) == (1.0, 1.0)


@pytest.mark.parametrize(("minutes", "continuity"), [(10, "warm"), (120, "rebuilt")])
async def test_a_call_is_answered_after_a_long_time(
    minutes: int,
    continuity: str,
    claude_2: Path,
    make_settings: MakeSettings,
    upstream: Upstream,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(capture, "FLUSH_WAIT", 60.0)  # a CLI on a busy machine may write its transcript late
    async with running(make_settings(claude_bin=claude_2)) as engine:
        turn = await both(engine, upstream)
        weather, noon = calls(turn)
        process = claude(engine).pool.peek(str(turn.session_id))
        assert process is not None
        # The proxy's clocks, the event loop's included: every timer of those minutes is due now.
        for name, clock in (("time", time.time), ("monotonic", time.monotonic)):
            monkeypatch.setattr(time, name, lambda clock=clock: clock() + 60 * minutes)
        if continuity == "rebuilt":
            async with asyncio.timeout(60):
                await process._child.process.wait()
        answered = await ask(engine, results(result(weather, "sunny"), result(noon, "noon")), tools=TOOLS)
        assert answered.continuity == continuity
        assert text(answered) == "The tool said: noon"
        await ask(engine, "list", tools=TOOLS)
    ids = [weather["id"], noon["id"]]
    assert tool_blocks(upstream) == [(kind, one) for kind in ("call", "result") for one in ids]
    assert [after.prefix_kept(before) for before, after in pairwise(upstream.requests)] == [1.0] * 2


@pytest.mark.parametrize("before", rest_in_full("other calls of it", "nothing", "another exchange", quick=2))
@pytest.mark.sample(1)
async def test_a_new_process_that_takes_results_does_not_compact_them_away(
    before: str, claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    """A CLI that compacts there asks the model with a summary and words of ours, as if they were to be continued."""
    upstream.when(ASKS_FOR_SUMMARY, Reply("<summary>by the CLI</summary>"), times=None)
    upstream.when(summaries.ASK, Reply("by the proxy"), times=None)
    full = replace(ToolUse([called("get_weather", "Oslo")]), usage={"input_tokens": 990_000})
    upstream.when("once more", full)
    async with running(make_settings(claude_bin=claude_2)) as engine:
        talk = Talk(engine)
        if before == "another exchange":
            await talk.say("hello")
        if before == "other calls of it":
            talk.turn = await both(engine, upstream)
            weather, noon = calls(talk.turn)
            said = [result(weather, "once more"), result(noon, "once more")]
            (oslo,) = calls(await talk.say(results(*said)))
        else:
            (oslo,) = calls(await talk.say("once more"))
        await kill(talk)
        if before == "nothing":
            with pytest.raises(ContextTooLong):
                await talk.say(results(result(oslo, "rainy")))
            await talk.say("never mind")
            assert heard(upstream)[-1] == "never mind"
            return
        answered = await talk.say(results(result(oslo, "rainy")))
        assert [note.code for note in answered.evidence.notes] == ["summarised"]
        assert tool_blocks(upstream) == [("call", oslo["id"]), ("result", oslo["id"])]
        first, *_, last = upstream.requests[-1].user_texts()
        assert first.strip().endswith("by the proxy")
        assert last == "tool_result: rainy"
        spoken = [message["role"] for message in upstream.requests[-1].messages if message["role"] != "system"]
        assert spoken == ["user", "assistant", "user"]
        await talk.say("list")
    assert heard(upstream)[-2:] == ["tool_result: rainy", "list"]
    assert upstream.requests[-1].prefix_kept(upstream.requests[-2]) == 1.0
