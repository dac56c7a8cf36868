"""The real CLIs against the scripted upstream: what the model is shown, which errors come out, what is left over."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cli_session_proxy.backends.claude.process.child import ALWAYS_OFF, Launch
from cli_session_proxy.backends.claude.process.events import ProcessDied
from cli_session_proxy.backends.claude.process.failures import error_for
from cli_session_proxy.backends.claude.process.frames import unsafe_prompt
from cli_session_proxy.backends.claude.process.pool import Pool
from cli_session_proxy.backends.claude.process.process import ClaudeProcess
from cli_session_proxy.domain.models import BlockStart, BlockStop
from cli_session_proxy.settings import Profile
from turnfault.provider.script import Cut, Fail, HeldReply, Reply, ToolUse
from turnfault.provider.upstream import Upstream

from ....clis import old_cli_in_full
from .conftest import MakeLaunch, MakeSettings, Start
from .helpers import ask, is_gone, result, said

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
IMAGE: dict[str, Any] = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
SECRET = "the-secret-of-this-machine"
PROMPTS = (
    "/clear", "/compact now", "  /clear", "/nosuch", "@secret.txt", "read @secret.txt please", '"@secret.txt"',
    'x @"secret.txt"', "!ls", "# remember", "--help", "a\0b", "  spaces \n", "<command-name>/clear</command-name>",
    "ultrathink", "a\r\n\u2028b", "foo /", "é" * 300,
)  # fmt: skip
# Those that the old CLI would run or read by itself, one of each kind: it needs a process for each.
INTERPRETED = ("  /clear", "read @secret.txt please", "!ls", "a\0b")


def shown(upstream: Upstream) -> str:
    """The newest user message, its text blocks joined: what the model reads."""
    last = next(message for message in reversed(upstream.requests[-1].messages) if message["role"] == "user")
    content = last["content"]
    parts = [content] if isinstance(content, str) else [block.get("text", "[image]") for block in content]
    return "".join(part for part in parts if not part.lstrip().startswith("<system-reminder>"))


@pytest.mark.parametrize(
    ("claude", "prompts"),
    [
        pytest.param("claude_2", PROMPTS, id="2.1"),
        pytest.param("claude_1", INTERPRETED, id="1.0"),
        pytest.param("claude_1", PROMPTS, id="1.0, all", marks=pytest.mark.full),
    ],
    indirect=["claude"],
)
async def test_prompts_reach_the_model_verbatim(
    claude: Path, prompts: Sequence[str], upstream: Upstream, real: MakeLaunch, start: Start
) -> None:
    process = None
    for prompt in prompts:
        if process is None or not process.usable:
            launch = await real(claude)
            (launch.cwd / "secret.txt").write_text(SECRET)
            process = await start(launch)
        assert unsafe_prompt(launch.capability, prompt) is None
        before = len(upstream.requests)
        await ask(process, prompt)
        assert len(upstream.requests) == before + 1, prompt
        assert shown(upstream) == prompt
        assert SECRET not in upstream.requests[-1].raw.decode()


@old_cli_in_full
async def test_images_and_2_mb_prompts_arrive_whole(
    claude: Path, upstream: Upstream, real: MakeLaunch, start: Start
) -> None:
    launch = await real(claude)
    await ask(await start(launch), [IMAGE, {"type": "text", "text": "look @x"}])
    assert PNG in upstream.requests[-1].raw.decode()
    # 2.1.329 adds a note of its own behind it: "[Image: source: <TMPDIR>/…/images/1.png]"
    assert shown(upstream).partition("[Image: source:")[0].rstrip("\n") == "[image]look @x"
    long = "0123456789abcdef" * 131072
    await ask(await start(await real(claude)), long)
    assert shown(upstream) == long


@pytest.mark.sample(1)
async def test_no_tool_is_offered_and_none_can_run(
    claude: Path, upstream: Upstream, real: MakeLaunch, start: Start
) -> None:
    launch = await real(claude)
    upstream.next(ToolUse([("Bash", {"command": f"touch {launch.cwd}/harm", "description": "x"})]))
    events = await ask(await start(launch), "hi")
    assert not upstream.requests[0].body.get("tools")
    assert not (launch.cwd / "harm").exists()
    assert said(events)


@old_cli_in_full
async def test_a_profile_offers_its_tools_only(
    claude: Path, upstream: Upstream, real: MakeLaunch, start: Start
) -> None:
    await ask(await start(await real(claude, profile=Profile(tools=("Read", "Glob")), system_prompt=None)), "hi")
    names = {tool["name"] for tool in upstream.requests[-1].body["tools"]}
    assert "Read" in names
    assert not names & {"Bash", "Write", "Edit", "WebFetch", "Task", "Agent"}


# What CLI 2.1.332 offers with `default`. Each was called (with TaskCreate, TaskGet, TaskList and TaskUpdate, which it
# adds for models before 5): no agent saw another's words, and no turn came that nobody had asked for.
HARMLESS = {
    "Agent", "Bash", "Edit", "EnterWorktree", "ExitWorktree", "NotebookEdit", "Read", "ReportFindings", "SendMessage",
    "Skill", "TaskStop", "WebFetch", "WebSearch", "Write",
}  # fmt: skip


@pytest.mark.parametrize("login", ["ANTHROPIC_API_KEY", "CLAUDE_CODE_OAUTH_TOKEN"])
async def test_a_cli_offers_no_tool_by_which_it_prompts_itself_or_speaks_to_other_clis(
    login: str, claude_2: Path, upstream: Upstream, real: MakeLaunch, start: Start
) -> None:
    """A request that came just when a CLI prompted itself got that answer (2.1.332)."""
    offered = await offered_by(await start(await with_every_tool(claude_2, real, login)), upstream)
    assert "Bash" in offered
    assert not offered & {*ALWAYS_OFF, "ListAgents"}


@pytest.mark.full  # a new version of the wheel may bring a tool: somebody has to look at it, and nobody's tests fail
@pytest.mark.parametrize("login", ["ANTHROPIC_API_KEY", "CLAUDE_CODE_OAUTH_TOKEN"])
async def test_a_cli_offers_no_tool_that_nobody_has_looked_at(
    login: str, claude_2: Path, upstream: Upstream, real: MakeLaunch, start: Start
) -> None:
    assert await offered_by(await start(await with_every_tool(claude_2, real, login)), upstream) <= HARMLESS


async def with_every_tool(claude: Path, real: MakeLaunch, login: str) -> Launch:
    env = {"ANTHROPIC_API_KEY": "", login: "sk-ant-oat01-fake"}
    return await real(claude, profile=Profile(tools=("default",)), system_prompt=None, extra_env=env)


async def offered_by(process: ClaudeProcess, upstream: Upstream) -> set[str]:
    await ask(process, "hi")
    return {tool["name"] for tool in upstream.requests[-1].body["tools"]}


@old_cli_in_full
async def test_a_long_system_prompt_arrives_and_leaves_no_file(
    claude: Path, upstream: Upstream, real: MakeLaunch, start: Start, tmp_path: Path
) -> None:
    prompt = "--be brief, " + "x" * 300_000
    process = await start(await real(claude, system_prompt=prompt))
    await ask(process)
    assert any(block["text"].strip() == prompt for block in upstream.requests[-1].body["system"])
    await process.close()
    assert not list((tmp_path / "t").glob("system-prompt-*"))


async def test_a_new_cli_keeps_its_session_warm_and_resumed(
    claude_2: Path, upstream: Upstream, real: MakeLaunch, start: Start
) -> None:
    launch = await real(claude_2)
    process = await start(launch)
    await ask(process, "remember: colour is teal")
    assert said(await ask(process, "what is the colour?")) == "colour is teal."
    assert process.usable
    assert process.session_id == launch.session_id
    await process.close()
    assert process.returncode == 0
    again = await start(await real(claude_2, session_id=launch.session_id, resume=True))
    assert said(await ask(again, "what is the colour?")) == "colour is teal."
    assert again.session_id == launch.session_id


async def test_an_old_cli_resumes_under_a_new_id(
    claude_1: Path, upstream: Upstream, real: MakeLaunch, start: Start
) -> None:
    launch = await real(claude_1)
    process = await start(launch)
    await ask(process, "remember: colour is teal")
    assert process.session_id == launch.session_id
    assert not process.usable
    await process.close()
    again = await start(await real(claude_1, session_id=launch.session_id, resume=True))
    assert said(await ask(again, "what is the colour?")) == "colour is teal."
    assert again.session_id != launch.session_id


@pytest.mark.sample(1)
async def test_an_unknown_session_is_a_death_that_says_so(claude: Path, real: MakeLaunch, start: Start) -> None:
    process = await start(await real(claude, session_id=str(uuid.uuid4()), resume=True))
    with pytest.raises(ProcessDied) as died:
        await ask(process)
    assert died.value.no_conversation


@old_cli_in_full
async def test_a_stream_that_is_cut_is_answered_whole(
    claude: Path, upstream: Upstream, real: MakeLaunch, start: Start
) -> None:
    upstream.next(Cut(after=1, reply=Reply("the first attempt, never finished")))
    upstream.next(Reply("the answer"))
    events = await ask(await start(await real(claude, extra_env={"CLAUDE_CODE_MAX_RETRIES": "2"})))
    assert said(events) == "the answer"
    starts = [event.index for event in events if isinstance(event, BlockStart)]
    stops = [event.index for event in events if isinstance(event, BlockStop)]
    assert starts == stops == list(range(len(starts)))


async def test_an_interrupt_ends_the_turn_and_says_so(
    claude_2: Path, upstream: Upstream, real: MakeLaunch, start: Start
) -> None:
    gate = HeldReply(after=1, reply=Reply("a long answer that is cut"))
    upstream.next(gate)
    process = await start(await real(claude_2))
    turn = asyncio.create_task(ask(process))
    await gate.reached.wait()
    await process.interrupt()
    async with asyncio.timeout(60):
        end = result(await turn)
    assert end.is_error
    assert error_for(end).code == "interrupted"


FAILURES = (
    (Fail(400, message="image is broken"), "invalid_request"),
    (Fail(400, message="prompt is too long: 210000 tokens > 200000 maximum"), "context_too_long"),
    (Fail(401, message="invalid x-api-key"), "claude_not_logged_in"),
    (Fail(403), "claude_not_logged_in"),
    (Fail(429, {"retry-after": "1"}), "rate_limited"),
    (Fail(500), "upstream_error"),
    (Fail(529), "overloaded"),
)


@old_cli_in_full
async def test_a_failing_provider_gets_its_code(
    claude: Path, upstream: Upstream, real: MakeLaunch, start: Start, subtests: pytest.Subtests
) -> None:
    process = None
    for fail, code in FAILURES:
        with subtests.test(fail=fail):
            if process is None or not process.usable:
                process = await start(await real(claude, extra_env={"CLAUDE_CODE_MAX_RETRIES": "0"}))
            upstream.heal()
            upstream.when("hi", fail, times=None)
            events = await ask(process)
            assert said(events) == ""
            end = result(events)
            assert end.is_error
            assert error_for(end).code == code


@old_cli_in_full
async def test_no_login_at_all_is_told_apart(claude: Path, real: MakeLaunch, start: Start) -> None:
    process = await start(await real(claude, extra_env={"ANTHROPIC_API_KEY": ""}))
    assert error_for(result(await ask(process))).code == "claude_not_logged_in"


async def test_a_pool_of_real_ones_reuses_and_ends_them(
    claude_2: Path, upstream: Upstream, real: MakeLaunch, make_settings: MakeSettings
) -> None:
    pool = Pool(make_settings(claude_bin=claude_2))
    launch = await real(claude_2)
    process, _ = await pool.checkout(launch)
    await ask(process, "one")
    await pool.checkin(process)
    again, warm = await pool.checkout(launch)
    assert (again, warm) == (process, True)
    await ask(again, "two")
    assert upstream.requests[-1].user_texts() == ["one", "two"]
    await pool.close()
    assert is_gone(process.pid)
