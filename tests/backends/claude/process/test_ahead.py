"""Spares on the real CLI: the first turn of a new agent in a process that was started before anybody asked."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from itertools import pairwise
from pathlib import Path

from cli_session_proxy.backends.claude.transcript import project_dir
from cli_session_proxy.commands import verifying
from cli_session_proxy.domain.models import Tool, Turn
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.engine.ownership import Instances
from cli_session_proxy.sandbox import directory_name
from turnfault.provider.script import ToolUse
from turnfault.provider.upstream import Upstream

from ....conftest import MakeSettings
from ....recovery.others import other_proxy
from ....talking import ask, claude, heard, running, text
from ....until import until
from .helpers import is_gone


async def ready(engine: Engine) -> int:
    """The pid of the spare, when it has started."""
    await until(lambda: engine.backend.counts().spare == 1)
    table = claude(engine).pool.table
    (spare,) = table.spares
    assert await asyncio.shield(table.spares[spare])
    return spare.pid


def plain_file_in(folder: Path, file: str) -> bool:
    linked = any(path.is_symlink() for path in (folder, Path(file)))
    return Path(file).parent == folder and Path(file).is_file() and not linked


def pid(engine: Engine, turn: Turn) -> int | None:
    process = claude(engine).pool.peek(turn.session_id or "")
    return process.pid if process else None


async def test_an_agent_whose_directory_no_spare_may_take_over_leaves_the_spare_to_the_next_one(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings(claude_bin=claude_2, spares=1)
    async with running(settings) as engine:
        digit = next(name for n in range(1000) if re.search(r"~\d", directory_name("local", name := f"Agent {n}")))
        await ask(engine, "hello", agent="first")
        spare = await ready(engine)
        await ask(engine, "hello", agent=digit)
        assert await ready(engine) == spare
        taken = await ask(engine, "hello", agent="second")
        assert pid(engine, taken) == spare


async def test_a_new_agent_speaks_to_a_process_that_was_there_before_and_keeps_all_it_said(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream, tmp_path: Path
) -> None:
    settings = make_settings(claude_bin=claude_2, spares=1)
    async with running(settings) as engine:
        await ask(engine, "hello", agent="first")
        spare = await ready(engine)
        first = await ask(engine, "remember fact = 1", agent="second", system="Be terse.")
        assert (first.continuity, pid(engine, first)) == ("started", spare)
        cwd = settings.var / "sandbox" / "agents" / "second"
        agent = await engine.store.agent("local", "second")
        assert agent is not None
        session = await engine.store.session_at(agent.key, first.id)
        assert session is not None
        assert plain_file_in(project_dir(tmp_path / "claude-config", cwd), session.transcript)

        second = await ask(engine, "and now?", agent="second", system="Be terse.")
        assert (second.continuity, pid(engine, second)) == ("warm", spare)
        await claude(engine).pool.discard(session.id)
        third = await ask(engine, "what is fact?", agent="second", system="Be terse.")
        assert (third.continuity, text(third)) == ("resumed", "fact is 1.")
        assert heard(upstream) == ["remember fact = 1", "and now?", "what is fact?"]
        seen = upstream.requests[-3:]
        assert [now.prefix_kept(before) for before, now in pairwise(seen)] == [1.0, 1.0]
        chain = await engine.store.chain(agent.key)
        assert chain is not None
        assert [link.reason for link in chain.links] == ["started"]
        assert [session.id for session in chain.sessions] == [session.id]


async def test_what_reaches_the_model_is_what_a_plain_start_sends(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    async with running(make_settings(claude_bin=claude_2, spares=1)) as engine:
        plain = await ask(engine, "hello", agent="agent-1", effort="low")
        spare = await ready(engine)
        claimed = await ask(engine, "hello", agent="agent-2", effort="low")
        assert pid(engine, claimed) == spare
    one, two = upstream.requests[-2:]
    assert b"ahead" not in two.raw
    assert b"agent-2" in two.raw  # its directory, as the model is told
    assert plain.continuity == claimed.continuity == "started"
    assert [line.replace(b"agent-1", b"agent-2") for line in one.lines()] == two.lines()
    beside = [{key: seen.body[key] for key in seen.body.keys() - {"messages", "metadata"}} for seen in (one, two)]
    assert beside[0] == beside[1]


async def test_two_new_agents_at_once_are_both_served_by_one_spare(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    async with running(make_settings(claude_bin=claude_2, spares=1)) as engine:
        await ask(engine, "hello", agent="first")
        spare = await ready(engine)
        turns = await asyncio.gather(*(ask(engine, f"I am {name}", agent=name) for name in ("b", "c")))
        pids = {pid(engine, turn) for turn in turns}
        assert spare in pids
        assert len(pids) == 2
        assert [text(turn) for turn in turns] == ["You said: I am b (1)", "You said: I am c (1)"]


async def test_a_spare_that_died_costs_nothing_but_its_time(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    async with running(make_settings(claude_bin=claude_2, spares=1)) as engine:
        await ask(engine, "hello", agent="first")
        spare = await ready(engine)
        os.kill(spare, signal.SIGKILL)
        turn = await ask(engine, "hello", agent="second")
        assert pid(engine, turn) != spare
        assert len(turn.attempts) == 1
        assert len(upstream.requests) == 2


async def test_the_clients_tools_work_from_the_first_turn_on(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    upstream.when("weather", ToolUse([("mcp__client__weather", {"city": "Rome"})]))
    tools = (Tool("weather"),)
    async with running(make_settings(claude_bin=claude_2, spares=1)) as engine:
        await ask(engine, "hello", agent="first")
        spare = await ready(engine)
        turn = await ask(engine, "weather?", agent="second", tools=tools)
        assert (turn.status, pid(engine, turn)) == ("requires_action", spare)


async def test_verify_finds_nothing_and_a_second_proxy_resumes_it(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    settings = make_settings(claude_bin=claude_2, spares=1)
    async with running(settings) as engine:
        await ask(engine, "hello", agent="first")
        await ready(engine)
        await ask(engine, "hello", agent="second")
    (verified,) = await verifying.verify(settings, None, "second")
    assert verified.differences == ()
    async with running(settings) as engine:
        turn = await ask(engine, "again", agent="second")
        assert turn.continuity == "resumed"
        assert turn.evidence.verified
    assert heard(upstream) == ["hello", "again"]


async def test_a_spare_of_a_killed_proxy_does_not_live_on(claude_2: Path, make_settings: MakeSettings) -> None:
    settings = make_settings(claude_bin=claude_2, spares=1)
    noted: list[int] = []

    async def both_noted() -> bool:
        instances = Instances(settings.var)
        noted[:] = [pid for one in instances.others() for pid, _ in instances.children(one)]
        return len(noted) == 2

    async with other_proxy(settings) as other:
        assert await other.ask("one") is not None
        await until(both_noted)
        await other.end(signal.SIGKILL)
    async with running(settings) as engine:
        await until(lambda: all(is_gone(pid) for pid in noted))
        assert (await ask(engine, "two")).continuity == "resumed"
