"""The self-check sees what a real CLI does, and which one thing a changed one does not do any more."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest

from cli_session_proxy.backends.claude.process import capability
from cli_session_proxy.backends.claude.process.observed import ESSENTIAL, EXPECTED, NAMES
from cli_session_proxy.selfcheck.running import Report, _run, check
from cli_session_proxy.selfcheck.scenes import SceneTalk, _no_inbox
from cli_session_proxy.selfcheck.stage import Differs, Stage, Unable
from cli_session_proxy.settings import Settings
from turnfault.provider.upstream import Upstream

from ..conftest import MakeSettings, processes
from ..until import until
from .tampered import tampered

# What is changed, and all that is seen to fail then.
CHANGES: dict[str, set[str]] = {
    "no option": {"start"},
    "other words": {"frames"},
    "no result": {"frames"},
    "no tag": {"tag"},
    "tools": {"tools_off"},
    "elsewhere": {"place"},
    "another folder": set(),
    "late": {"complete"},
    "broken parents": {"records", "round_trip"},
    "no image": {"round_trip", "initialize"},  # of the session that it resumes next, too
    "new id": {"same_id"},
    "as commands": {"words"},
    "refuses:initialize": {"initialize", "claim_session"},
    "refuses:set_model": {"set_model"},
    "lies:set_model": {"set_model"},
    "lies:apply_flag_settings": {"apply_flag_settings"},
    "silent:apply_flag_settings": {"apply_flag_settings"},
    "refuses:mcp_set_servers": {"mcp_set_servers"},
    "lies:mcp_set_servers": {"mcp_set_servers"},
    "silent:interrupt": {"interrupt"},
    "lies:rewind_conversation": {"rewind_conversation"},
    "silent:rewind_conversation": {"rewind_conversation"},
    "lies:claim_session": {"claim_session"},
    "unasked": {"can_use_tool"},
    "no prompt file": {"prompt_file"},
    "prompt file unread": {"prompt_file"},
    "one block": {"blocks"},
    "new names": {"whole_records"},
    "sums the prompt up": {"keeps_prompt"},
    "does not heal": {"heals_thinking"},
    "hears others": {"no_inbox"},
    "bare": {"login", "can_use_tool"},  # it has no tool Write
}
# Each costs five seconds of a processor: a start, and a transcript and a request in one CLI, are always looked at.
ALWAYS = ("no option",), ("broken parents", "lies:set_model", "hears others")


def failed(report: Report) -> set[str]:
    assert report.why is None, report
    return {str(one.name) for one in report.observed.values() if one.outcome == "failed"}


@pytest.mark.full
async def test_an_old_cli_does_what_is_expected_of_its_version(claude_1: Path, tmp_path: Path) -> None:
    report = await check(claude_1, Settings(var=tmp_path))
    assert report.version == "1.0.120"
    assert failed(report) == {name for name, since in EXPECTED.items() if since > (1, 0, 120)}
    assert report.passed
    assert report.surprises() == []


@pytest.mark.parametrize(
    "how",
    [*ALWAYS, *(pytest.param((one,), marks=pytest.mark.full) for one in CHANGES if (one,) not in ALWAYS)],
    ids=" and ".join,
)
@pytest.mark.sample(1)
async def test_each_change_is_seen_as_what_it_is(how: tuple[str, ...], claude_2: Path, tmp_path: Path) -> None:
    report = await _run(tampered(claude_2, tmp_path / "bin", *how), Settings(var=tmp_path))
    expected = set().union(*(CHANGES[one] for one in how))
    assert failed(report) == expected, report
    assert report.passed != bool(expected & set(ESSENTIAL))
    words = [one.detail for one in report.observed.values() if one.outcome == "failed"]
    assert all(words), report


async def test_a_cli_of_today_does_all_of_it_has_nothing_of_the_users_and_others_decide_nothing(
    claude_2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others that ask the check's provider: another user's programs, or a confined agent's shell. They reach every port
    of the machine."""
    asked = 0

    async def asks() -> None:
        nonlocal asked
        body = {"model": "sonnet", "messages": [{"role": "user", "content": "hello"}], "system": "other words"}
        async with httpx.AsyncClient(trust_env=False) as client:
            while True:
                for one in psutil.Process().children(recursive=True):
                    with contextlib.suppress(psutil.Error, httpx.HTTPError):
                        for at in [at.laddr.port for at in one.net_connections("tcp4") if at.status == "LISTEN"]:
                            told = await client.post(f"http://127.0.0.1:{at}/v1/messages", json=body)
                            asked += 1
                            assert told.status_code == 404
                await asyncio.sleep(0.02)

    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    for name in ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "CLAUDE_CODE_OAUTH_TOKEN", "AWS_PROFILE", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "the-users-own")
    claude = tampered(claude_2, tmp_path / "bin", "tells")
    settings = Settings(var=tmp_path, claude_env={"ANTHROPIC_AUTH_TOKEN": "the-users-own"})
    asking = asyncio.create_task(asks())
    report = await _run(claude, settings)
    assert not asking.done()
    asking.cancel()
    assert asked
    assert {one.outcome for one in report.observed.values()} == {"ok"}, report
    assert set(report.observed) == set(NAMES)
    assert report.version.startswith("2.1.")
    assert report.passed
    env = json.loads((tmp_path / "bin" / "environment").read_text())
    assert "the-users-own" not in env.values()
    assert env["HOME"] != os.environ["HOME"]
    assert env["ANTHROPIC_BASE_URL"].startswith("http://127.0.0.1:")
    own = ("HOME", "TMPDIR", "CLAUDE_CONFIG_DIR")
    assert [Path(env[name]).is_relative_to(folder) for name in own] == [True] * len(own)
    assert list(folder.iterdir()) == []


async def test_what_is_no_cli_decides_nothing(tmp_path: Path) -> None:
    report = await check(tmp_path / "none", Settings(var=tmp_path))
    assert not report.passed
    assert report.why is not None
    assert "no Claude CLI" in report.why


async def test_a_check_that_is_left_leaves_no_process_and_no_folder(
    claude_2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    claude = tampered(claude_2, tmp_path / "bin", "tells")
    running = asyncio.create_task(check(claude, Settings(var=tmp_path)))
    await until((tmp_path / "bin" / "environment").exists)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await until(lambda: not list(processes((), mark=os.fsencode(folder))))
    assert list(folder.iterdir()) == []


async def test_a_cli_to_which_others_can_speak_is_seen(
    make_settings: MakeSettings, claude_2: Path, upstream: Upstream, tmp_path: Path
) -> None:
    settings = make_settings(claude_bin=claude_2)
    cli = await capability.probe(claude_2, settings.claude_env, tmp_path)
    stage = Stage(cli, settings, upstream, tmp_path, math.inf)
    try:
        for without in ((), ("CLAUDE_CODE_HARBOR_KITE",)):
            launch = stage.launch(cli)
            env = tuple(pair for pair in launch.env if pair[0] not in without)
            async with stage.running(replace(launch, env=env)) as process:
                talk = SceneTalk(process.session_id)
                await talk.turn(stage, process, "hello")
                with pytest.raises(Differs, match=r"listens at .*sock") if without else contextlib.nullcontext():
                    await _no_inbox(stage, talk, process)
    finally:
        await stage.guardian.close()


@pytest.mark.parametrize(
    "fault", [psutil.AccessDenied(1), psutil.NoSuchProcess(1), RuntimeError("malformed line"), ValueError("x")]
)
async def test_a_cli_whose_sockets_cannot_be_seen_is_checked_for_the_rest(
    monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    """Any program of the machine may give a socket a name with lines, at which psutil fails."""

    def ended(_pid: int) -> None:
        raise fault

    monkeypatch.setattr(psutil, "Process", ended)
    here: Any = SimpleNamespace(pid=1)
    with pytest.raises(Unable, match="cannot be seen"):
        await _no_inbox(here, here, here)
