"""Whether the CLI is logged in, as it says itself. No credential is read: the environment is asked for names only."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ....errors import ClaudeUnavailable
from ....settings import Settings
from ...base import Login, LoginKind
from . import capability, environment

# Of `environment.LOGINS`, the ones that are billed by use, and are not a person's subscription.
BY_USE = ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN")
# The CLI's own words for its login (`authMethod` of `auth status`, 2.1.330).
_KINDS: Mapping[str, LoginKind] = {
    "claude.ai": "subscription", "oauth_token": "subscription", "api_key": "by use", "api_key_helper": "by use",
    "third_party": "by use", "none": "none",
}  # fmt: skip
# It has `auth status` (run on 2.1.71); an older one is asked.
WITH_AUTH = (2, 1, 71)
# `auth status` answers in 0.3 s (2.1.329); a machine under load gets more.
STATUS_TIMEOUT = 20.0
STATUS_OUTPUT = 64 * 1024

MISSING = (
    "no Claude login: run `{command}`, or set ANTHROPIC_API_KEY or CLAUDE_CODE_OAUTH_TOKEN and start again; "
    "until then turns fail with 401 claude_not_logged_in"
)
# On macOS, where the CLI cannot read its login in the Keychain, wherever that was made.
CLOSED = (
    "no Claude login: over SSH and under launchd the Keychain may be closed; run `claude setup-token` in a Terminal, "
    "set CLAUDE_CODE_OAUTH_TOKEN to what it says (or ANTHROPIC_API_KEY), and start again; until then turns fail with "
    "401 claude_not_logged_in"
)
UNKNOWN = (
    "this CLI cannot tell whether it is logged in: if turns fail with 401, run `{command}`, "
    "or set ANTHROPIC_API_KEY or CLAUDE_CODE_OAUTH_TOKEN and start again"
)


async def look(settings: Settings, claude: Path, env: Mapping[str, str]) -> Login:
    """The CLI is started only where the names in its environment do not tell."""
    if environment.has_login(env):
        return Login("by use" if billed_by_use(env) else "subscription", None)
    command = environment.login_command(settings)
    status = await _status(claude, env)
    if status is None:
        return Login("unknown", UNKNOWN.format(command=command))
    if status.get("loggedIn") is True:
        return Login(_KINDS.get(str(status.get("authMethod")), "unknown"), None)
    return Login("none", CLOSED if environment.keychain_may_be_closed() else MISSING.format(command=command))


def billed_by_use(env: Mapping[str, str]) -> bool:
    """As the names in the CLI's environment tell: in print mode it takes these before any login (2.1.330)."""
    return any(env.get(name) for name in BY_USE) or any(
        name.startswith(environment.CLOUDS) and env[name] for name in env
    )


async def kind(claude: Path, env: Mapping[str, str]) -> LoginKind:
    """As the CLI tells of its login, where no name in its environment does."""
    if billed_by_use(env):
        return "by use"
    told = await _status(claude, env) or {}
    said = _KINDS.get(str(told.get("authMethod")))
    return said or ("subscription" if env.get(environment.OAUTH_TOKEN) else "unknown")


async def _status(claude: Path, env: Mapping[str, str]) -> dict[str, Any] | None:
    """What `auth status` says; None from a CLI that has no such command, or in no words that we know."""
    if not await has_auth(claude, env):
        return None
    try:
        status = json.loads(await _ask(claude, env, "auth", "status"))
    except ValueError:
        return None
    return status if isinstance(status, dict) else {}


async def has_auth(claude: Path, env: Mapping[str, str]) -> bool:
    """By its version, else by its help: a CLI without `auth` would take the word for a prompt."""
    with contextlib.suppress(ClaudeUnavailable):
        known = await capability.version(claude, env)
        if known is not None and known[1] >= WITH_AUTH:
            return True
    return "claude auth" in await _ask(claude, env, "auth", "--help")


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
