"""After a repair a request has the form of one by a CLI to which nothing happened: the same blocks and breakpoints.

The same conversation is had twice, with a picture, thoughts, and calls of tools with their results; something happens
in the middle of one of them. What is compared is the form of each later request, since ids and places differ.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from cli_session_proxy.domain.models import Message, Turn
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.errors import InvalidRequest
from cli_session_proxy.export.formats import FORMATS
from turnfault.provider.prompt_cache import share_read
from turnfault.provider.script import Fail, Reply
from turnfault.provider.seen import JSON
from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings
from ..media import image, picture
from ..talking import ask, claude, running
from ..tools.test_loops import TOOLS, both, calls, result, results
from ..until import until
from .report import Report

THOUGHT = [{"type": "thinking", "thinking": "Let me see."}, {"type": "text", "text": "I see."}]


class Conversation:
    """Of one agent, over an engine of its own."""

    def __init__(self, engine: Engine, upstream: Upstream) -> None:
        self.engine = engine
        self.upstream = upstream
        self.turn: Turn

    async def say(self, *said: str | Message, **more: Any) -> None:
        self.turn = await ask(self.engine, *said, tools=TOOLS, **more)

    async def begin(self) -> None:
        await self.say(Message("user", (image(picture(8, 8)), {"type": "text", "text": "look"})))
        called = calls(await both(self.engine, self.upstream))
        await self.say(results(*(result(call, "sunny") for call in called)))
        self.upstream.when("think", Reply(THOUGHT))
        await self.say("think")

    async def transcript(self) -> Path:
        session = await self.engine.store.session(self.turn.session_id or "")
        assert session is not None
        return Path(session.transcript)

    async def end_processes(self) -> None:
        table = claude(self.engine).pool.table
        for process in table.all():
            os.kill(process.pid, signal.SIGKILL)
        await until(lambda: not [process for process in table.all() if process.alive])


async def delete(talk: Conversation) -> None:
    (await talk.transcript()).unlink()


async def cut_a_line(talk: Conversation) -> None:
    await talk.end_processes()
    path = await talk.transcript()
    lines = path.read_text().splitlines(keepends=True)
    del lines[len(lines) // 2]
    path.write_text("".join(lines))


async def fail(talk: Conversation) -> None:
    talk.upstream.when("bad luck", Fail(400), times=None)
    with pytest.raises(InvalidRequest):
        await talk.say("bad luck")


async def branch(talk: Conversation) -> None:
    """Another turn, which the next one leaves off the path."""
    here = talk.turn.id
    await talk.say("aside")
    await talk.say("after", continues=here)


HAPPENS: dict[str, Callable[[Conversation], Awaitable[None]]] = {
    "a transcript was deleted": delete, "a line was cut out": cut_a_line,
    "the CLI was killed": Conversation.end_processes, "a turn failed": fail, "a branch": branch,
}  # fmt: skip
EACH_RUN = ("a transcript was deleted", "a turn failed")


async def forms(engine: Engine, upstream: Upstream, happens: str | None) -> list[list[JSON]]:
    """Of the requests that follow; each reads from the cache all that the one before it wrote."""
    talk = Conversation(engine, upstream)
    await talk.begin()
    before = upstream.requests[-1]
    if happens is not None:
        await HAPPENS[happens](talk)
    if happens != "a branch":
        await talk.say("after")
    first = upstream.requests[-1]
    await talk.say("and again")
    second = upstream.requests[-1]
    assert [share_read(first, before), share_read(second, first)] == [1.0, 1.0]
    return [first.form(), second.form()]


@pytest.mark.parametrize(
    "happens", [pytest.param(name, marks=() if name in EACH_RUN else pytest.mark.full) for name in HAPPENS]
)
@pytest.mark.sample(1)
async def test_a_request_after_a_repair_is_written_as_that_of_an_untouched_cli(
    happens: str, claude_2: Path, make_settings: MakeSettings, upstream: Upstream, tmp_path: Path, report: Report
) -> None:
    found: list[list[list[JSON]]] = []
    for name, what in (("untouched", None), ("repaired", happens)):
        settings = make_settings(claude_bin=claude_2, var=tmp_path / name)
        async with running(settings) as engine:
            found.append(await forms(engine, upstream, what))
    untouched, repaired = found
    assert repaired == untouched
    report.same_form(happens)


async def test_a_turn_says_what_the_provider_said_of_its_cache(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    missed = {"type": "messages_changed", "cache_missed_input_tokens": 1200}
    upstream.when("two", Reply(diagnostics={"cache_miss_reason": missed}))
    async with running(make_settings(claude_bin=claude_2)) as engine:
        for said in ("one", "two"):
            turn = await ask(engine, said)
        agent = await engine.store.agent("local", "a")
        assert agent is not None
        dump = "".join([piece async for piece in FORMATS["markdown"].write(engine.store, agent, sandbox="")])
        whole = json.loads("".join([piece async for piece in FORMATS["json"].write(engine.store, agent, sandbox="")]))
    first, second = whole["turns"]
    assert "cache_miss" not in first["reason"]
    assert second["reason"]["cache_miss"] == {"reason": "messages_changed", "tokens": 1200}
    assert second["says"] == ["The provider used only part of its prompt cache (messages changed, about 1200 tokens)."]
    read, written = turn.usage.cache_read_tokens, turn.usage.cache_write_tokens
    assert read > 0
    assert f"cache {read:,} read, {written:,} written ({int(100 * second['usage']['cache_share'])} % of" in dump
