"""The scripted upstream under the real CLIs: what they add is left out, and their own resume keeps the cache."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

from turnfault.provider.upstream import Upstream

from ..clis import old_cli_in_full


async def run(binary: Path, env: dict[str, str], prompt: str, *flags: str) -> dict[str, Any]:
    """One `claude -p` in the working directory of the test; its result."""
    command = [str(binary), "-p", "--output-format", "json", "--model", "sonnet", "--strict-mcp-config", *flags]
    process = await asyncio.create_subprocess_exec(
        *command, env=env, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(prompt.encode()), 60)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    result: dict[str, Any] = json.loads(output)
    return result


@old_cli_in_full
async def test_a_resumed_session_reaches_the_model_whole(
    claude: Path, upstream: Upstream, claude_env: dict[str, str], tmp_path: Path
) -> None:
    env = {
        **claude_env,
        "PATH": os.environ["PATH"],
        "CLAUDE_CONFIG_DIR": str(tmp_path / "cfg"),
        "TMPDIR": str(tmp_path),
    }
    first = await run(claude, env, "Remember: the colour is teal")
    second = await run(claude, env, "What is the colour?", f"--resume={first['session_id']}")
    assert second["result"] == "colour is teal."
    before, after = upstream.requests
    assert after.texts() == [
        ("user", "Remember: the colour is teal"),
        ("assistant", "Noted: colour is teal."),
        ("user", "What is the colour?"),
    ]
    assert after.prefix_kept(before) == 1.0
