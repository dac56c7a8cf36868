"""Agent programs from npm, in their default configuration, against the proxy over the real CLI.

Each gets an environment that is built up here: a HOME of its own, a key that is none, our address on loopback. What is
judged is what reached the model.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from cli_session_proxy.testing.upstream import Upstream

from ..conftest import ROOT, MakeSettings, required
from ..every_wire import proxied, the_one_chain

BIN = ROOT / ".tools" / "agents" / "node_modules" / ".bin"
# Seconds for one turn of a program that starts Node.js or a sandbox first.
TURN = 120.0
FACT = "Remember: the colour is teal"


async def run(name: str, cwd: Path, home: Path, *arguments: str, **env: str) -> str:
    """What the program printed."""
    program = required(BIN / name, "make tools", what=name)
    built = {"PATH": os.environ["PATH"], "HOME": str(home), "TERM": "dumb", "NO_COLOR": "1", **env}
    process = await asyncio.create_subprocess_exec(
        str(program), *arguments, cwd=cwd, env=built,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(TURN):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, f"{out.decode()}\n{err.decode()}"
    return out.decode()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The program's own."""
    made = tmp_path / "agent-home"
    made.mkdir()
    return made


@pytest.fixture
def work(tmp_path: Path) -> Path:
    made = tmp_path / "work"
    made.mkdir()
    return made


async def test_codex_goes_on_by_its_own_resume_with_every_transcript_deleted(
    claude_2: Path, make_settings: MakeSettings, upstream: Upstream, home: Path, work: Path
) -> None:
    settings = make_settings(claude_bin=claude_2)
    (home / "codex").mkdir()
    async with proxied(settings) as (engine, root):
        provider = {
            "model_provider": '"p"', "model_providers.p.name": '"p"', "model_providers.p.env_key": '"K"',
            "model_providers.p.base_url": f'"{root}/v1"', "model_providers.p.wire_api": '"responses"',
            "check_for_update_on_startup": "false",
        }  # fmt: skip
        told = [part for name, value in provider.items() for part in ("-c", f"{name}={value}")]
        options = ["--skip-git-repo-check", *told]
        env = {"K": "none", "CODEX_HOME": str(home / "codex")}
        assert "Noted: colour is teal." in await run("codex", work, home, "exec", *options, FACT, **env)
        await the_one_chain(engine, 1)
        assert settings.claude_config_dir is not None
        shutil.rmtree(settings.claude_config_dir / "projects")
        said = await run("codex", work, home, "exec", "resume", "--last", *options, "recall", **env)
        assert "I remember: colour is teal." in said
        await the_one_chain(engine, 2)
    shown = upstream.requests[-1].user_texts()
    assert [shown.count(words) for words in (FACT, "recall")] == [1, 1]
    assert upstream.requests[-1].prefix_kept(upstream.requests[-2]) >= 0.97
