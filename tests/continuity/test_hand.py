"""A person in the agent's session: waited for, adopted, or left behind with what they wrote kept aside."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import re
import struct
import termios
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cli_session_proxy.backends.claude.sessions import repair
from cli_session_proxy.backends.claude.transcript import at_once, entries
from cli_session_proxy.domain.evidence import Note
from cli_session_proxy.export import explain
from turnfault.provider.script import HeldReply
from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings
from ..until import POLL, until
from .score import Fact
from .talk import EngineTalk, by_hand, run_by_hand, talking

# What a terminal is told beside the words.
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|\x1b.")


@pytest.fixture
async def talk(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[EngineTalk]:
    """Three acknowledged turns, and little patience with people."""
    monkeypatch.setattr(repair, "BUSY_WAIT", 0.3)
    async with talking(make_settings(claude_bin=claude_2), upstream) as talk:
        for _ in range(3):
            await talk.tell()
        yield talk


def asked(talk: EngineTalk, fact: Fact) -> bool:
    """The prompt is on disk as a record; the CLI's queue notes its words before that."""
    lines = talk.transcript.read_bytes().splitlines(keepends=True)
    records = [json.loads(line) for line in lines if line.endswith(b"\n")]
    return any(record.get("type") == "user" and fact.key in str(record.get("message")) for record in records)


async def test_a_turn_that_somebody_else_does_not_finish_in_time_is_a_409_and_then_adopted(talk: EngineTalk) -> None:
    gate, fact = HeldReply(), talk.new_fact()
    talk.upstream.when(fact.key, gate)
    async with by_hand(talk) as hand:
        hand.type(fact.text)
        await gate.reached.wait()
        await until(lambda: asked(talk, fact))
        score = await talk.probe()
        assert score.refused == "session_busy"
        gate.open()
        result = await hand.result()
        talk.remember(fact, str(result["result"]))
    score = await talk.probe()
    assert score.whole, score
    assert "adopted" in [link.reason for link in await talk.links()]


@pytest.mark.full
async def test_a_long_transcript_that_cannot_be_read_yet_is_left_alone_and_later_adopted(
    talk: EngineTalk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others' are read. It is not unreadable: written again from the chain, it would lose what a person added."""
    fact = talk.new_fact()
    async with by_hand(talk) as hand:
        hand.type(fact.text)
        talk.remember(fact, str((await hand.result())["result"]))
    before = talk.transcript.read_bytes()
    monkeypatch.setattr(entries, "MANY_VALUES", 0)
    monkeypatch.setattr(at_once, "PATIENCE", POLL)
    place = at_once.Place()
    score = await talk.probe()
    assert score.refused == "session_busy"
    assert talk.transcript.read_bytes().startswith(before)  # the CLI that has ended may have written its last notes
    del place
    score = await talk.probe()
    assert score.whole, score
    assert "adopted" in [link.reason for link in await talk.links()]


@pytest.mark.full
async def test_a_turn_that_somebody_else_can_never_finish_is_kept_aside_and_blocks_nobody(talk: EngineTalk) -> None:
    gate, done, fact = HeldReply(), talk.new_fact(), talk.new_fact()
    talk.upstream.when(fact.key, gate)
    async with by_hand(talk) as hand:
        hand.type(done.text)
        talk.remember(done, str((await hand.result())["result"]))
        hand.type(fact.text)
        await gate.reached.wait()
        await until(lambda: asked(talk, fact))
    # killed here, in the middle of the second turn
    score = await talk.probe()
    assert score.whole, score
    assert {"adopted", "rebuilt"} <= {link.reason for link in await talk.links()}
    [kept] = (talk.settings.var / "salvage").iterdir()
    assert fact.key in kept.read_text(encoding="utf-8")


async def test_what_somebody_says_while_a_turn_runs_is_named_kept_aside_and_no_part_of_its_answer(
    talk: EngineTalk,
) -> None:
    """Their CLI puts "No response requested." behind our prompt, which must not pass for the turn's answer."""
    gate, fact = HeldReply(), talk.new_fact()
    talk.upstream.when(fact.key, gate)
    said = asyncio.ensure_future(talk.tell(fact))
    await gate.reached.wait()
    await run_by_hand(talk, "Remember: the moon is green", talk.session_id)
    gate.open()
    await said
    score = await talk.probe()
    assert score.whole, score
    assert not any("moon" in one for one in talk.upstream.requests[-1].user_texts())
    [agent] = [row.agent async for row in talk.engine.store.summaries("local")]
    turn = [one async for one in talk.engine.store.turns(agent.key)][3]
    assert turn.evidence.notes == (Note("said_beside", 1),)
    assert any("a person sent 1 prompt" in one.says for one in explain.turn(turn.evidence, []))
    [kept] = (talk.settings.var / "salvage").iterdir()
    assert "the moon is green" in kept.read_text(encoding="utf-8")
    # Their own CLI tells them when they open the session again; the model is not told, now and after a repair.
    assert NOT_HERE in await shown_at_resume(talk)
    assert not any(NOT_HERE in seen.raw.decode() for seen in talk.upstream.requests)
    before = talk.upstream.requests[-1]
    await talk.down()
    talk.transcript.unlink()
    await talk.up()
    await talk.tell()
    assert talk.turn.continuity == "rebuilt"
    assert talk.upstream.requests[-1].prefix_kept(before) == 1.0
    assert NOT_HERE not in talk.upstream.requests[-1].raw.decode()


NOT_HERE = "It is no part of"


async def shown_at_resume(talk: EngineTalk) -> str:
    """What a person's own CLI shows of the session, as far as our notice of it."""
    cwd, config = talk.cwd.resolve(), Path(talk.environment()["CLAUDE_CONFIG_DIR"])
    trusted = {"hasTrustDialogAccepted": True, "hasCompletedProjectOnboarding": True, "allowedTools": []}
    key = talk.environment()["ANTHROPIC_API_KEY"]
    known = {"hasCompletedOnboarding": True, "theme": "dark", "projects": {str(cwd): trusted}}
    known["customApiKeyResponses"] = {"approved": [key[-20:]], "rejected": []}
    (config / ".claude.json").write_text(json.dumps(known))
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 60, 300, 0, 0))
    child = await asyncio.create_subprocess_exec(
        str(talk.settings.claude_bin), "--resume", str(talk.session_id), "--model", "sonnet", cwd=cwd,
        env={**talk.environment(), "TERM": "xterm-256color"}, stdin=theirs, stdout=theirs, stderr=theirs,
        start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    shown = ""

    def read() -> None:
        nonlocal shown
        shown += ESCAPES.sub(" ", os.read(ours, 1 << 16).decode(errors="replace"))
        if NOT_HERE in shown:
            seen.set()

    seen = asyncio.Event()
    asyncio.get_running_loop().add_reader(ours, read)
    try:
        async with asyncio.timeout(60):
            await seen.wait()
    finally:
        asyncio.get_running_loop().remove_reader(ours)
        child.kill()
        await child.wait()
        os.close(ours)
    return shown
