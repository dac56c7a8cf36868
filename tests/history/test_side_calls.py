"""Side calls leave the conversation's process and the list of chains alone; one that is continued is ordinary."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import httpx
from typer.testing import CliRunner

from cli_session_proxy.cli import app as commands
from cli_session_proxy.domain.models import Tool, Turn
from cli_session_proxy.domain.options import Parameters
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.settings import Settings
from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings
from ..memory_backend import MemoryBackend
from ..serving import serving
from ..talking import ask, claude, running, text

CODER = "You are a coding agent. Use the tools that you have, and answer in few words. Never guess."
MAIN: dict[str, Any] = {"agent": None, "system": CODER, "tools": (Tool("read"), Tool("edit"))}
SIDE: dict[str, Any] = {"agent": None, "system": "You say what the user may want next. One line.", "tools": ()}
PING: dict[str, Any] = {"agent": None, "parameters": Parameters(max_tokens=1)}


async def said(engine: Engine, history: list[str], new: str, how: dict[str, Any]) -> Turn:
    turn = await ask(engine, *history, new, **how)
    history += [new, text(turn)]
    return turn


async def test_a_side_call_after_every_turn_costs_the_conversation_nothing(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    history: list[str] = []
    main, side, pids = [], [], set()
    async with running(make_settings(claude_bin=claude_2)) as engine:
        for number in range(3):
            main.append(await said(engine, history, f"Remember: fact{number} is {number}", MAIN))
            process = claude(engine).pool.peek(main[-1].session_id or "")
            assert process is not None
            pids.add(process.pid)
            side.append(await said(engine, list(history), f"What may come after fact{number}?", SIDE))
        recall = await said(engine, history, "recall", MAIN)
        [row] = [row async for row in engine.store.summaries()]
    assert [turn.continuity for turn in main] == ["started", "warm", "warm"]
    assert [turn.continuity for turn in side] == ["branched"] * 3
    assert recall.continuity == "warm"
    assert text(recall) == "I remember: fact0 is 0; fact1 is 1; fact2 is 2."
    assert len(pids) == 1
    assert len({turn.session_id for turn in (*main, recall)}) == 1
    assert len({turn.session_id for turn in side}) == 3
    assert [turn.placed.side for turn in (*main, *side)] == [False] * 3 + [True] * 3
    assert (row.agent.head, row.side) == (recall.id, False)
    own = [one for one in upstream.requests if "What may come" not in one.prompt]
    assert [now.prefix_kept(before) for before, now in itertools.pairwise(own)] == [1.0] * 3


async def test_a_hand_off_that_is_continued_is_an_ordinary_turn(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    history: list[str] = []
    async with running(make_settings(claude_bin=claude_2)) as engine:
        first = await said(engine, history, "Remember: the colour is teal", MAIN)
        handed = await said(engine, history, "Remember: the city is Oslo", SIDE)
        agent = await engine.store.agent_by_key(first.agent_key)
        assert agent is not None
        assert agent.head == first.id
        after = await said(engine, history, "recall", SIDE)
        agent = await engine.store.agent_by_key(first.agent_key)
        assert agent is not None
        assert agent.head == after.id
    assert (handed.placed.side, handed.continuity) == (True, "branched")
    assert (after.placed.side, after.continuity, after.session_id) == (False, "warm", handed.session_id)
    assert text(after) == "I remember: colour is teal; city is Oslo."
    assert upstream.requests[-1].prefix_kept(upstream.requests[-2]) == 1.0


async def test_the_head_of_a_named_agent_is_its_newest_turn(tmp_path: Path) -> None:
    """Whoever names an agent may send no more than what is new: nothing acknowledged is forgotten then."""
    backend = MemoryBackend()
    engine = Engine(Settings(var=tmp_path / "var"), backend=backend)
    await engine.start()
    try:
        history: list[str] = []
        await said(engine, history, "one", MAIN | {"agent": "ada"})
        handed = await said(engine, history, "two", SIDE | {"agent": "ada"})
        await ask(engine, "three", agent="ada")
    finally:
        await engine.stop()
    assert handed.placed.side
    shown = [block["text"] for message in backend.seen[-1] if message.role == "user" for block in message.content]
    assert shown == ["one", "two", "three"]


async def test_chains_of_side_calls_are_not_listed_until_they_are_continued(tmp_path: Path) -> None:
    settings = Settings(var=tmp_path / "var", port=0)
    engine = Engine(settings, backend=MemoryBackend())
    await engine.start()

    async def listed(http: httpx.AsyncClient, query: str = "") -> list[Any]:
        return [(row["turns"], row["side"]) for row in (await http.get(f"/v1/chains{query}")).json()["data"]]

    try:
        async with (
            serving(engine, settings) as url,
            httpx.AsyncClient(base_url=url.removesuffix("/v1"), trust_env=False) as http,
        ):
            await ask(engine, "hello", agent=None)
            ping = await ask(engine, "quota", **PING)
            assert await listed(http) == [(1, False)]
            assert await listed(http, "?side=1") == [(1, True), (1, False)]
            assert (await http.get("/v1/chains?side=2")).status_code == 400
            agent = await engine.store.agent_by_key(ping.agent_key)
            assert agent is not None
            assert agent.head == ping.id
            at_terminal = {"CLI_SESSION_PROXY_VAR": str(settings.var)}
            runner = CliRunner()
            for options, count in (([], 1), (["--side"], 2)):
                told = ["chains", "--json", *options]
                shown = await asyncio.to_thread(runner.invoke, commands, told, env=at_terminal)
                assert shown.output.count('"agent_id"') == count, shown.output
            await ask(engine, "quota", text(ping), "and now?", agent=None)
            assert await listed(http) == [(2, False), (1, False)]
    finally:
        await engine.stop()


async def test_the_process_of_a_side_call_gives_its_place_up_first(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream
) -> None:
    async with running(make_settings(claude_bin=claude_2, max_processes=2, max_turns=2)) as engine:
        first = await ask(engine, "one", agent="a")
        ping = await ask(engine, "quota", **PING)
        await ask(engine, "two", agent="b")  # there is room for two processes
        pool = claude(engine).pool
        assert pool.peek(first.session_id or "") is not None
        assert pool.peek(ping.session_id or "") is None
    assert [one.prompt for one in upstream.requests] == ["one", "quota", "two"]
