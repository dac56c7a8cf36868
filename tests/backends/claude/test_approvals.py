"""A person's word on the real CLI's tools: what the model is told of it, and what runs."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cli_session_proxy.backends.claude.process import capability
from cli_session_proxy.backends.claude.process.observed import Observation
from cli_session_proxy.backends.claude.process.permissions import REFUSED, SAID, STOP
from cli_session_proxy.domain.approvals import OUTCOMES as OUTCOME_OF
from cli_session_proxy.domain.approvals import Decision, Verdict
from cli_session_proxy.domain.models import Turn
from cli_session_proxy.domain.options import Parameters
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.engine.live import Answer
from cli_session_proxy.errors import ClaudeUnavailable, ProxyError
from cli_session_proxy.settings import Profile, SandboxSettings
from turnfault.provider.script import Reply, ToolUse
from turnfault.provider.upstream import Upstream

from ...clis import checked, seen_working
from ...conftest import MakeSettings
from ...talking import ask, request, running, text
from ...until import until

on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="bubblewrap is Linux's")

CODER = Profile(tools=("Bash", "Write", "Edit"), approve=("Bash", "Write"), permission_mode="acceptEdits")


@asynccontextmanager
async def engine_of(
    binary: Path, make_settings: MakeSettings, tmp_path: Path, profile: Profile = CODER, **more: Any
) -> AsyncIterator[Engine]:
    (tmp_path / "bin").mkdir()
    claude_bin = await seen_working(binary, tmp_path / "bin")
    settings = make_settings(claude_bin=claude_bin, profiles={"coder": profile}, profile="coder", **more)
    async with running(settings) as engine:
        yield engine


def sandbox(engine: Engine) -> Path:
    return engine.settings.var / "sandbox" / "agents" / "a"


async def decide(engine: Engine, decision: Decision, word: str | None = None) -> str:
    """The first that waits; what it was to do."""
    await until(lambda: bool(engine.asked("local")))
    approval = engine.asked("local")[0].waiting.approval
    await engine.approve("local", "a", approval.id, Verdict(OUTCOME_OF[decision], "local", word))
    return f"{approval.tool}: {approval.asked}"


async def ended(answer: Answer) -> Turn:
    turn = await answer.turn()
    answer.acknowledge()
    return turn


def results(upstream: Upstream) -> list[tuple[str, bool]]:
    """The results of tools in the last request: what the model was told, and whether it is an error."""
    told = [
        (block["content"], bool(block.get("is_error")))
        for message in upstream.requests[-1].messages
        for block in message["content"]
        if isinstance(block, dict) and block.get("type") == "tool_result"
    ]
    return [(text if isinstance(text, str) else "".join(part["text"] for part in text), bad) for text, bad in told]


async def test_a_refused_tool_does_not_run_and_the_model_is_told_in_the_clis_own_words(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream, tmp_path: Path
) -> None:
    upstream.when("touch it", ToolUse([("Bash", {"command": "touch made"})]))
    upstream.when("again", ToolUse([("Bash", {"command": "touch made"})]))
    async with engine_of(claude_2, make_settings, tmp_path) as engine:
        answer = await engine.submit(request("touch it"))
        assert await decide(engine, "deny", "use the other folder") == "Bash: touch made"
        turn = await ended(answer)
        assert results(upstream) == [(f"{REFUSED}{SAID}use the other folder", True)]
        assert turn.status == "completed"
        assert [(one.outcome, one.word) for one in turn.evidence.approvals] == [("denied", "use the other folder")]
        answer = await engine.submit(request("again"))
        await decide(engine, "deny")
        await ended(answer)
        assert results(upstream)[-1] == (REFUSED + STOP, True)
        assert not (sandbox(engine) / "made").exists()


async def test_an_allowed_tool_runs_once_and_as_it_was_asked_for(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream, tmp_path: Path
) -> None:
    upstream.when("count", ToolUse([("Bash", {"command": "echo ran >> log; echo teal", "description": "counts"})]))
    async with engine_of(claude_2, make_settings, tmp_path) as engine:
        answer = await engine.submit(request("count"))
        await until(lambda: bool(engine.asked("local")))
        assert not (sandbox(engine) / "log").exists()
        await decide(engine, "allow")
        turn = await ended(answer)
        assert (sandbox(engine) / "log").read_text() == "ran\n"
        assert results(upstream) == [("teal", False)]
        assert [one.outcome for one in turn.evidence.approvals] == ["allowed"]
        after = await ask(engine, "and now")
        assert (after.continuity, after.status) == ("warm", "completed")
        assert upstream.requests[-1].prefix_kept(upstream.requests[-2]) == 1.0


async def test_it_asks_for_what_only_reads_and_for_what_its_mode_allows_and_not_for_other_tools(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream, tmp_path: Path
) -> None:
    file = tmp_path / "var" / "sandbox" / "agents" / "a" / "f"
    upstream.when("read", ToolUse([("Bash", {"command": "ls"})]))
    upstream.when("write", ToolUse([("Write", {"file_path": str(file), "content": "one\n"})]))
    upstream.when("edit", ToolUse([("Edit", {"file_path": str(file), "old_string": "one", "new_string": "two"})]))
    async with engine_of(claude_2, make_settings, tmp_path) as engine:
        for said, asked in (("read", "Bash: ls"), ("write", f"Write: {file}")):
            # with a parameter of the turn, which is told to the running process by another control request
            answer = await engine.submit(request(said, parameters=Parameters(max_tokens=900)))
            assert await decide(engine, "allow") == asked
            await ended(answer)
        assert file.read_text() == "one\n"
        turn = await ask(engine, "edit")  # not in `approve`, and the mode allows it
        assert turn.evidence.approvals == ()
        assert file.read_text() == "two\n"


async def test_allowed_for_the_turn_holds_for_that_tool_in_that_turn(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream, tmp_path: Path
) -> None:
    twice = [("Bash", {"command": "echo 1 >> log"}), ("Bash", {"command": "echo 2 >> log"})]
    upstream.when("do both", ToolUse(twice))
    upstream.when("once more", ToolUse(twice[:1]))
    async with engine_of(claude_2, make_settings, tmp_path) as engine:
        answer = await engine.submit(request("do both"))
        await decide(engine, "allow_for_turn")
        turn = await ended(answer)
        assert (sandbox(engine) / "log").read_text() == "1\n2\n"
        assert [one.outcome for one in turn.evidence.approvals] == ["allowed_for_turn"] * 2
        answer = await engine.submit(request("once more"))
        await decide(engine, "deny")
        await ended(answer)
        assert (sandbox(engine) / "log").read_text() == "1\n2\n"


async def test_what_nobody_answers_does_not_run_and_the_model_knows_why(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream, tmp_path: Path
) -> None:
    upstream.when("touch it", ToolUse([("Bash", {"command": "touch made"})]))
    async with engine_of(claude_2, make_settings, tmp_path, approval_timeout=0.2) as engine:
        turn = await ask(engine, "touch it")
        assert [one.outcome for one in turn.evidence.approvals] == ["timed_out"]
        assert results(upstream) == [("Nobody answered within 0.2 s whether Bash may run: it was not run.", True)]
        assert not (sandbox(engine) / "made").exists()


async def test_a_turn_that_is_cancelled_while_it_waits_runs_nothing_and_the_next_one_goes_on(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream, tmp_path: Path
) -> None:
    upstream.when("touch it", ToolUse([("Bash", {"command": "touch made"})]))
    async with engine_of(claude_2, make_settings, tmp_path) as engine:
        await ask(engine, "hello")
        answer = await engine.submit(request("touch it"))
        await until(lambda: bool(engine.asked("local")))
        assert await engine.cancel("local", "a", None) == [answer.turn_id]
        answer.leave()
        await ask(engine, "and now")
        assert upstream.requests[-1].user_texts() == ["hello", "and now"]
        assert not (sandbox(engine) / "made").exists()


async def test_a_client_that_leaves_takes_what_waits_along(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream, tmp_path: Path
) -> None:
    upstream.when("touch it", ToolUse([("Bash", {"command": "touch made"})]))
    async with engine_of(claude_2, make_settings, tmp_path, disconnect_grace=0.05) as engine:
        answer = await engine.submit(request("touch it"))
        await until(lambda: bool(engine.asked("local")))
        answer.leave()
        await until(lambda: not engine.asked("local"))
        await engine.ended(answer.turn_id)
        turn = await engine.store.turn(answer.turn_id)
        assert turn is not None
        assert turn.status == "cancelled"
        assert not (sandbox(engine) / "made").exists()


# --- a CLI that cannot be trusted to ask


async def test_a_cli_that_was_not_seen_asking_runs_no_turn_that_wants_it(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream, tmp_path: Path
) -> None:
    link = tmp_path / "claude-unchecked"
    link.symlink_to(claude_2)
    profiles = {"coder": CODER, "free": Profile()}
    async with running(make_settings(claude_bin=link, profiles=profiles, profile="coder")) as engine:
        with pytest.raises(ClaudeUnavailable, match=r"it was not checked yet whether .* asks before"):
            await ask(engine, "touch it")
        assert upstream.requests == []
        await ask(engine, "hello", agent="b", profile="free")  # who has no `approve` does not meet it
        await checked(link, tmp_path)
        await ask(engine, "hello", agent="c")
        cli = await capability.probe(link, {})
        capability.failed(cli, "can_use_tool", "it wrote a file without asking")
        with pytest.raises(ClaudeUnavailable, match=r"`can_use_tool` .it wrote a file without"):
            await ask(engine, "hello", agent="d")


@pytest.mark.parametrize("confined", [False, pytest.param(True, marks=[on_linux])])
@pytest.mark.sample(1)
async def test_a_cli_that_runs_a_tool_without_asking_fails_the_turn_and_gets_no_other(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream, tmp_path: Path, confined: bool
) -> None:
    """A confined agent's shell could say so in its CLI's place: that decides nothing for others."""
    wrapper = tmp_path / "claude-that-does-not-ask"
    wrapper.write_text(
        '#!/bin/bash\nargs=()\nfor one in "$@"; do\n'
        '  case "$one" in --settings=*|--permission-prompt-tool=*) ;; *) args+=("$one") ;; esac\ndone\n'
        f'exec {claude_2} "${{args[@]}}"\n'
    )
    wrapper.chmod(0o755)
    file = tmp_path / "var" / "sandbox" / "agents" / "a" / "f"
    upstream.when("write", ToolUse([("Write", {"file_path": str(file), "content": "x"})]))
    upstream.when("hello", Reply("hi"))
    profile = CODER.model_copy(update={"confined": confined})
    links = SandboxSettings(links={"real": Path(os.path.realpath(claude_2))})  # noqa: ASYNC240 - a test
    async with engine_of(wrapper, make_settings, tmp_path, profile, sandbox=links) as engine:
        with pytest.raises(ProxyError, match="ran a tool without asking, which `approve` forbids"):
            await ask(engine, "write")
        if confined:
            assert text(await ask(engine, "hello", agent="b")) == "hi"
            with pytest.raises(ClaudeUnavailable, match="a tool of this agent ran without asking"):
                await ask(engine, "hello")
            return
        with pytest.raises(ClaudeUnavailable, match="its check failed at `can_use_tool`"):
            await ask(engine, "hello")


async def test_an_old_cli_cannot_be_asked_for_it(claude_1: Path, make_settings: MakeSettings, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    settings = make_settings(claude_bin=claude_1, profiles={"coder": CODER}, profile="coder")
    cli = await capability.probe(claude_1, {"PATH": "/usr/bin:/bin"})
    failed = Observation.of("can_use_tool", "failed", "it did not start")
    capability.observe(capability.identity_of(claude_1), cli.version, {"can_use_tool": failed})
    async with running(settings) as engine:
        with pytest.raises(ClaudeUnavailable, match=r"version 2\.1\.71 and newer can"):
            await ask(engine, "hello")
