"""Export and import: whole or not at all, byte for byte, and the conversation goes on elsewhere."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import stat
import time
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cli_session_proxy.commands import moving, verifying
from cli_session_proxy.commands.stored import opened
from cli_session_proxy.domain import limits
from cli_session_proxy.domain.models import Link, Message, Record, Session, Turn, Usage
from cli_session_proxy.errors import InvalidRequest, NotFound
from cli_session_proxy.export import portable
from cli_session_proxy.sandbox import directory_name, make_private
from cli_session_proxy.settings import Settings
from cli_session_proxy.stores.auto import store_for
from cli_session_proxy.stores.base import ChainPart, NewChain, Store, WholeTurn
from cli_session_proxy_store_conformance.samples import a_turn, accepted
from turnfault.provider.upstream import Upstream

from ..clis import old_cli_in_full
from ..conftest import MakeSettings
from ..fakes import SESSION
from ..talking import ask, heard, running

# A whole one: the CLI looks at its pixels. Longer than its own hash, so that it is kept apart.
PICTURE = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PICTURE}}
# Spacing, escapes, a lone half of a pair: a line must come back as it was.
LINES = (
    '{"uuid": "r1",  "parentUuid":null, "type":"user","text":"\\u00e9 é \\ud83d"}',
    '{"uuid":"r2","parentUuid":"r1","type":"assistant","source":{"data": "' + PICTURE + '"},"b":"' + PICTURE + '"}',
)


@asynccontextmanager
async def store_of(settings: Settings) -> AsyncIterator[Store]:
    await asyncio.to_thread(make_private, settings.var)
    store = store_for(settings)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


def asked(words: str) -> Message:
    return Message("user", ({"type": "text", "text": words}, IMAGE))


def turn(number: int, **more: Any) -> WholeTurn:
    made = Turn(
        id=f"turn_{number}", seq=0, agent_key=0, parent_id=f"turn_{number - 1}" if number > 1 else None,
        status="completed", model="sonnet", input=(asked(f"ask {number}"),),
        created_at=100.0 + number, output=({"type": "text", "text": "half \ud83d"},), session_id=SESSION,
        usage=Usage(1, 2, 3, 4, 5), cost_usd=0.1, timings={"result": 1.5}, tools=({"type": "tool_use", "id": "t"},),
        delivery="delivered", frame_uuid=f"f{number}", path_hash=f"h{number}", depth=number, finished_at=101.0 + number,
        fingerprint="same",
    )  # fmt: skip
    return WholeTurn(
        dataclasses.replace(made, **more), tuple(Record(line, f"r{n}", bool(n)) for n, line in enumerate(LINES))
    )


async def fill(settings: Settings, *turns: WholeTurn, name: str = "a") -> None:
    async with store_of(settings) as store:
        new = NewChain(
            "local", name, directory_name("local", name), True, 100.0, time.time(), lambda: turns[-1].turn.id
        )
        parts: list[ChainPart] = [*turns, Session(SESSION, 0, turns[-1].turn.id, "/x", "2.1.329", 100.0)]
        await store.import_chain(new, [*parts, Link(None, SESSION, turns[0].turn.id, "started", {"x": 1}, 100.0)])


async def whole(settings: Settings, name: str = "a") -> tuple[list[Turn], list[list[Record]], Any]:
    async with opened(settings) as store:
        assert store is not None
        agent = await store.agent("local", name)
        assert agent is not None
        turns = [row async for row in store.turns(agent.key)]
        return turns, [await store.own_records(row.id) for row in turns], await store.chain(agent.key)


@pytest.fixture
def here(tmp_path: Path) -> Settings:
    return Settings(var=tmp_path / "here", claude_config_dir=tmp_path / "config-here")


@pytest.fixture
def there(tmp_path: Path) -> Settings:
    return Settings(var=tmp_path / "there", claude_config_dir=tmp_path / "config-there")


async def moved(here: Settings, there: Settings, path: Path, name: str | None = None) -> None:
    await moving.export(here, "local", "a", path)
    await moving.import_(there, "local", path, name)


async def test_a_turn_of_very_many_values_that_was_acknowledged_comes_in(
    here: Settings, there: Settings, tmp_path: Path
) -> None:
    """It was exported, and then refused as too much for one line."""
    values = [0] * limits.INPUT_VALUES
    call = {"type": "tool_use", "id": "t", "name": "n", "input": {"a": values}}
    large = turn(1, output=(call,), tools=(call, call))
    await fill(here, large)
    await moved(here, there, tmp_path / "x.jsonl")
    ((read,), _, _) = await whole(there)
    assert (read.output, read.tools) == (large.turn.output, large.turn.tools)


async def test_what_goes_out_comes_in_byte_for_byte(here: Settings, there: Settings, tmp_path: Path) -> None:
    failed = turn(2, status="failed", output=(), error={"code": "x"}, session_id=None)
    await fill(here, turn(1), failed, turn(3, parent_id="turn_1"))
    await moved(here, there, tmp_path / "x.jsonl")
    before, records, chain = await whole(here)
    after, same, moved_chain = await whole(there)
    plain = [dataclasses.replace(row, seq=0, agent_key=0, fingerprint="") for row in before]
    assert [dataclasses.replace(row, seq=0, agent_key=0) for row in after] == plain
    assert same == records
    assert [record.line for record in same[0]] == list(LINES)
    assert moved_chain.links == chain.links
    assert moved_chain.agent.head == "turn_3"
    assert [session.id for session in moved_chain.sessions] == [SESSION]
    # once as an image, and where a record's line has it in another field
    assert (tmp_path / "x.jsonl").read_text().count(PICTURE) == 1 + 3


async def test_the_file_is_this_users_only_and_never_written_over(here: Settings, tmp_path: Path) -> None:
    await fill(here, turn(1))
    os.umask(0o022)
    path = tmp_path / "x.jsonl"
    await moving.export(here, "local", "a", path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    text = path.read_bytes()
    with pytest.raises(InvalidRequest, match="there already"):
        await moving.export(here, "local", "a", path)
    assert path.read_bytes() == text
    with pytest.raises(NotFound):
        await moving.export(here, "local", "nobody", tmp_path / "y.jsonl")
    assert not (tmp_path / "y.jsonl").exists()


async def test_the_file_reaches_the_drive_whole(
    here: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(here, turn(1))
    path, given = tmp_path / "x.jsonl", list[tuple[int, int]]()
    monkeypatch.setattr(portable, "to_drive", lambda fd: given.append((os.fstat(fd).st_ino, os.fstat(fd).st_size)))
    await moving.export(here, "local", "a", path)
    assert given == [(path.stat().st_ino, path.stat().st_size)]


async def test_a_cut_or_changed_file_is_refused_and_nothing_is_kept(
    here: Settings, there: Settings, tmp_path: Path
) -> None:
    await fill(here, *(turn(number) for number in range(1, 4)))
    path = tmp_path / "x.jsonl"
    await moving.export(here, "local", "a", path)
    good = path.read_bytes()
    lines = good.splitlines(keepends=True)
    broken = {
        "cut": [good[:-1], good[: len(good) // 2], b"".join(lines[:-1]), lines[0]],
        "sum": [good.replace(b"ask 2", b"ask 9"), b"".join(lines[:3] + lines[4:]), good + b"\n", good + lines[1]],
        "no header": [b"", b"hello\n", good[10:]],
        "upgrade": [good.replace(b"export/3", b"export/4")],
    }
    for why, texts in broken.items():
        for text in texts:
            path.write_bytes(text)
            with pytest.raises(InvalidRequest, match=why):
                await moving.import_(there, "local", path, None)
    with pytest.raises(NotFound):
        await moving.import_(there, "local", tmp_path / "none.jsonl", None)
    assert await verifying.verify(there, None, None) == []


async def test_a_part_that_does_not_fit_leaves_nothing_behind(there: Settings) -> None:
    async with store_of(there) as store:
        new = NewChain("local", "a", "a", True, 1.0, 2.0, lambda: "turn_1")
        unsound: list[list[ChainPart]] = [
            [turn(1), turn(2, parent_id="nobody")],
            [turn(1), turn(1)],
            [turn(1), turn(2, status="running")],
            [turn(1), Session("s", 0, "nobody", "", "", 1.0)],
        ]
        for parts in unsound:
            with pytest.raises(InvalidRequest, match="nothing was changed"):
                await store.import_chain(new, parts)
        assert await store.agent("local", "a") is None
        assert await store.turn("turn_1") is None


async def test_a_turn_may_come_before_its_parent(there: Settings) -> None:
    async with store_of(there) as store:
        new = NewChain("local", "a", "a", True, 1.0, 2.0, lambda: "turn_1")
        await store.import_chain(new, [turn(1, parent_id="turn_2"), turn(2, parent_id=None)])
        assert [row.id for row in await store.path("turn_1")] == ["turn_2", "turn_1"]


async def test_a_copy_beside_the_original_gets_ids_of_its_own(here: Settings, tmp_path: Path) -> None:
    await fill(here, turn(1), turn(2))
    await moving.export(here, "local", "a", tmp_path / "x.jsonl")
    with pytest.raises(InvalidRequest, match="turns already"):
        await moving.import_(here, "local", tmp_path / "x.jsonl", None)
    done = await moving.import_(here, "local", tmp_path / "x.jsonl", "b")
    assert done.renamed
    before, records, chain = await whole(here)
    after, same, copied = await whole(here, "b")
    assert {row.id for row in before}.isdisjoint(row.id for row in after)
    assert after[1].parent_id == after[0].id
    assert copied.agent.head == after[1].id
    assert [session.tip_turn_id for session in copied.sessions] == [after[1].id]
    assert {session.id for session in copied.sessions}.isdisjoint(session.id for session in chain.sessions)
    assert copied.links[0].to_session == copied.sessions[0].id
    assert same == records
    # a retry of the original's request must not find the copy's turn
    assert after[0].fingerprint == ""


async def test_what_is_queued_stays_behind(here: Settings, there: Settings, tmp_path: Path) -> None:
    await fill(here, turn(1))
    async with store_of(here) as store:
        agent = await store.agent("local", "a")
        assert agent is not None
        await accepted(store, a_turn(agent, "turn_q", "turn_1", at=300.0))
    await moved(here, there, tmp_path / "x.jsonl")
    assert [row.id for row in (await whole(there))[0]] == ["turn_1"]


def test_the_header_and_the_end_say_what_is_in_it(here: Settings, tmp_path: Path) -> None:
    asyncio.run(fill(here, turn(1)))
    asyncio.run(moving.export(here, "local", "a", tmp_path / "x.jsonl"))
    first, *_, last = map(json.loads, (tmp_path / "x.jsonl").read_text().splitlines())
    assert first["schema"] == "cli-session-proxy/export/3"
    assert first["agent"]["agent_id"] == "a"
    assert (last["end"]["turns"], last["end"]["records"]) == (1, 2)


@old_cli_in_full
async def test_the_conversation_goes_on_elsewhere_and_keeps_the_prompt_cache(
    claude: Path, make_settings: MakeSettings, upstream: Upstream, tmp_path: Path
) -> None:
    here = make_settings(claude_bin=claude)
    there = make_settings(claude_bin=claude, var=tmp_path / "elsewhere", claude_config_dir=tmp_path / "other-config")
    # CLI 1.0.120 splits a message of two blocks at each resume: nothing of its file can be compared then.
    keeps = "bundled" in str(claude)
    seen = asked("remember a = 1") if keeps else Message.user("remember a = 1")
    async with running(here) as engine:
        await ask(engine, seen)
        await ask(engine, "remember b = 2")
    before, heard_before = upstream.requests[-1], heard(upstream)
    await moved(here, there, tmp_path / "x.jsonl")
    async with running(there) as engine:
        turn = await ask(engine, "recall")
    assert turn.output[0]["text"] == "I remember: a is 1; b is 2."
    assert turn.continuity == "rebuilt"
    assert heard(upstream) == [*heard_before, "recall"]
    assert ("[image]" in heard_before) == keeps
    (state,) = await verifying.verify(there, None, "a")
    assert not state.differences
    if keeps:
        assert upstream.requests[-1].prefix_kept(before) == 1.0


@pytest.mark.full
async def test_a_long_chain_is_moved_with_bounded_memory(here: Settings, there: Settings, tmp_path: Path) -> None:
    big = Record('{"x":"' + "y" * 20_000 + '"}')
    turns = [WholeTurn(turn(number).turn, (big,) * 4) for number in range(1, 301)]  # 24 MB
    await fill(here, *turns)
    await moving.export(here, "local", "a", tmp_path / "warm-up.jsonl")
    tracemalloc.start()
    try:
        await moved(here, there, tmp_path / "x.jsonl")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (tmp_path / "x.jsonl").stat().st_size > 24_000_000
    assert peak < 12_000_000
