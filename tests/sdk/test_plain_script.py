"""README's Python lines as a plain script: the answers on stdout, nothing else, and an end right after them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE
from pathlib import Path

import pytest

from cli_session_proxy.commands.stored import opened
from cli_session_proxy.settings import Settings
from turnfault.provider.script import Stall
from turnfault.provider.upstream import Upstream

from ..clis import old_cli_in_full
from ..conftest import CLI_ENV, ROOT
from ..docs.test_snippets import blocks_of
from ..matrix import rest_in_full

# A script that cannot end is killed. It would wait for its engine's turns for longer than this (s).
PATIENCE = 90.0
DRAIN = 600


def readme_lines() -> str:
    (code,) = (block.code for block in blocks_of(ROOT / "README.md") if block.language == "python")
    return code


async def run(
    tmp_path: Path, claude: Path, upstream: Upstream, code: str, interrupted_at: str | None = None
) -> tuple[int | None, list[str], str]:
    """Exit code, lines of stdout, stderr of a script over the real CLI; Ctrl-C comes when the model hears a text."""
    home = tmp_path / "home"
    for_claude = CLI_ENV | {"ANTHROPIC_BASE_URL": upstream.url, "HOME": str(home), "CLAUDE_CODE_MAX_RETRIES": "0"}
    env = {
        "PATH": os.defpath, "HOME": str(home), "LANG": "C.UTF-8",
        "CLI_SESSION_PROXY_VAR": str(tmp_path / "var"),
        "CLI_SESSION_PROXY_CLAUDE_BIN": str(claude),
        "CLI_SESSION_PROXY_CLAUDE_CONFIG_DIR": str(tmp_path / "claude-config"),
        "CLI_SESSION_PROXY_CLAUDE_ENV": json.dumps(for_claude),
        "CLI_SESSION_PROXY_DRAIN_TIMEOUT": str(DRAIN),
    }  # fmt: skip
    script = tmp_path / "script.py"
    script.write_text(code)
    child = await asyncio.create_subprocess_exec(
        sys.executable, script, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, cwd=tmp_path, env=env
    )
    try:
        if interrupted_at is not None:
            await upstream.arrived(text=interrupted_at)
            child.send_signal(signal.SIGINT)
        said, complained = await asyncio.wait_for(child.communicate(), PATIENCE)
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    return child.returncode, said.decode().splitlines(), complained.decode()


@old_cli_in_full
async def test_readmes_lines_answer_and_end(tmp_path: Path, claude: Path, upstream: Upstream) -> None:
    ended, said, complained = await run(tmp_path, claude, upstream, readme_lines())
    assert (ended, said, complained) == (0, ["colour is teal."], "")


@pytest.mark.parametrize("end", rest_in_full("sys.exit(3)", "raise SystemExit(3)"))
@pytest.mark.full
async def test_a_script_that_exits_by_itself_is_not_held_up(
    tmp_path: Path, claude_2: Path, upstream: Upstream, end: str
) -> None:
    code = f"""
import asyncio, sys
from cli_session_proxy import ask

async def main():
    print((await ask("Remember: the colour is teal"))[1])
    {end}

asyncio.run(main())
"""
    ended, said, complained = await run(tmp_path, claude_2, upstream, code)
    assert (ended, said, complained) == (3, ["Noted: colour is teal."], "")


async def test_ctrl_c_cancels_the_turn_and_ends_the_script(tmp_path: Path, claude_2: Path, upstream: Upstream) -> None:
    code = """
import asyncio
from cli_session_proxy import ask

asyncio.run(ask("wait for me", agent_id="ada"))
"""
    upstream.when("wait", Stall(), times=None)
    ended, said, complained = await run(tmp_path, claude_2, upstream, code, interrupted_at="wait")
    assert (ended, said) == (-signal.SIGINT, [])
    assert "KeyboardInterrupt" in complained
    settings = Settings(var=tmp_path / "var")
    async with opened(settings) as store:
        assert store is not None
        agent = await store.agent("local", "ada")
        assert agent is not None
        (turn,) = [turn async for turn in store.turns(agent.key)]
    assert turn.status == "cancelled"
    assert turn.error is not None
    assert turn.error["detail"] == {"by": "client"}  # at once, not when the grace for a retry was over


async def test_what_goes_wrong_inside_is_a_line_without_local_variables(
    tmp_path: Path, claude_2: Path, upstream: Upstream
) -> None:
    """A fault in the engine's thread is told through `logging` on stderr; stdout is the script's own."""
    code = """
import asyncio
from cli_session_proxy import ask, tasks

async def broken():
    kept_secret = "sk-hidden-in-a-local"
    raise RuntimeError("the work failed")

async def main():
    work = tasks.Tasks()
    work.own(broken())
    await work.stop()
    print((await ask("Remember: the colour is teal"))[1])

asyncio.run(main())
"""
    ended, said, complained = await run(tmp_path, claude_2, upstream, code)
    assert (ended, said) == (0, ["Noted: colour is teal."])
    assert "RuntimeError: the work failed" in complained
    assert "task_failed" in complained
    assert "sk-hidden-in-a-local" not in complained
