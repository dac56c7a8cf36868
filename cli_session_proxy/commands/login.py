"""What `serve` says of the CLI at its start: which one it is, and what is missing for it to be logged in.

No credential is read here: the environment is asked for names, the CLI itself for its login.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from ..backends.claude import environment
from ..backends.claude.process import capability
from ..errors import ClaudeUnavailable
from ..settings import Settings

# Any of these logs the CLI in by itself (its documentation, "Authentication").
LOGIN_VARIABLES = ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "CLAUDE_CODE_OAUTH_TOKEN")
LOGIN_PREFIX = "CLAUDE_CODE_USE_"  # Bedrock, Vertex, Foundry: their own credentials
# `auth status` answers in 0.3 s (2.1.329); a machine under load gets more.
STATUS_TIMEOUT = 20.0
STATUS_OUTPUT = 64 * 1024

MISSING = (
    "no Claude login: run `{claude} auth login`, or set ANTHROPIC_API_KEY or CLAUDE_CODE_OAUTH_TOKEN and start again; "
    "until then turns fail with 401 claude_not_logged_in"
)
UNKNOWN = (
    "this CLI cannot tell whether it is logged in: if turns fail with 401, run `{claude}` and /login, "
    "or set ANTHROPIC_API_KEY"
)


async def report(settings: Settings) -> AsyncIterator[str]:
    """Lines for the person who started `serve`. A CLI that is missing is one of them, not an error."""
    with tempfile.TemporaryDirectory(prefix="cli-session-proxy-") as tmpdir:
        config_dir = environment.config_dir(settings)
        env = environment.build(settings, tmpdir=Path(tmpdir), config_dir=config_dir)
        try:
            claude = await capability.probe(capability.find(settings), env)
        except ClaudeUnavailable as exc:
            yield f"claude: {exc.message}"
            return
        yield f"claude {claude.version} at {claude.path}"
        advice = await missing_login(claude.path, env)
        if advice is not None:
            yield advice


async def missing_login(claude: Path, env: Mapping[str, str]) -> str | None:
    """What to do about the login; None where there is one."""
    if any(env.get(name) for name in LOGIN_VARIABLES) or any(name.startswith(LOGIN_PREFIX) for name in env):
        return None
    # Asked for its help first: a CLI without this command would take the words for a prompt.
    if "claude auth" not in await _ask(claude, env, "auth", "--help"):
        return UNKNOWN.format(claude=claude)
    try:
        status = json.loads(await _ask(claude, env, "auth", "status"))
    except ValueError:
        return UNKNOWN.format(claude=claude)
    logged_in = isinstance(status, dict) and status.get("loggedIn") is True
    return None if logged_in else MISSING.format(claude=claude)


async def _ask(claude: Path, env: Mapping[str, str], *arguments: str) -> str:
    """stdout, whatever the exit code (not logged in is 1); empty when it cannot be had in time."""
    try:
        process = await asyncio.create_subprocess_exec(
            claude, *arguments, env=dict(env), cwd="/", start_new_session=True,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
    except OSError:
        return ""
    assert process.stdout is not None
    output = b""
    try:
        async with asyncio.timeout(STATUS_TIMEOUT):
            while chunk := await process.stdout.read(4096):
                output = (output + chunk)[:STATUS_OUTPUT]
            await process.wait()
    except TimeoutError:
        return ""
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it ended in between
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    return output.decode(errors="replace")
