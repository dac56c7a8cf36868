"""Asks the CLI whether it is logged in. No credential is read: of the environment only names of variables are used."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ....errors import ClaudeUnavailable
from ....settings import Settings
from ...base import Login, LoginKind
from . import capability, environment

# The variables of `environment.LOGINS` that are billed by use, not by a subscription.
BY_USE = ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN")
# Values of `authMethod` in `auth status` (2.1.330).
_KINDS: Mapping[str, LoginKind] = {
    "claude.ai": "subscription", "oauth_token": "subscription", "api_key": "by use", "api_key_helper": "by use",
    "third_party": "by use", "none": "none",
}  # fmt: skip
# From this version on there is `auth status` (run on 2.1.71); an older one is probed.
WITH_AUTH = (2, 1, 71)
# Timeout in seconds: `auth status` takes 0.3 s (2.1.329), more under load.
STATUS_TIMEOUT = 20.0
STATUS_OUTPUT = 64 * 1024

MISSING = (
    "no Claude login: run `{command}`, or set ANTHROPIC_API_KEY or CLAUDE_CODE_OAUTH_TOKEN and start again; "
    "until then turns fail with 401 claude_not_logged_in"
)
# On macOS, if the CLI cannot read its login in the Keychain.
CLOSED = (
    "no Claude login: over SSH and under launchd the Keychain may be closed; run `claude setup-token` in a Terminal, "
    "set CLAUDE_CODE_OAUTH_TOKEN to what it says (or ANTHROPIC_API_KEY), and start again; until then turns fail with "
    "401 claude_not_logged_in"
)
UNKNOWN = (
    "this CLI cannot tell whether it is logged in: if turns fail with 401, run `{command}`, "
    "or set ANTHROPIC_API_KEY or CLAUDE_CODE_OAUTH_TOKEN and start again"
)


async def find_login(settings: Settings, claude: Path, env: Mapping[str, str]) -> Login:
    """The CLI's login, with advice if turns may fail without one. Starts the CLI only if the names in its environment
    do not tell."""
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
    """Whether the CLI's environment names an API key or a cloud. In print mode the CLI uses these, even if it is logged
    in with a subscription (2.1.330)."""
    clouds = [name for name in env if name.startswith(environment.CLOUDS)]
    return any(env.get(name) for name in (*BY_USE, *clouds))


async def login_kind(claude: Path, env: Mapping[str, str]) -> LoginKind:
    """The kind of login that the CLI uses: an API key or a cloud of its environment, else as the CLI reports it."""
    if billed_by_use(env):
        return "by use"
    status = await _status(claude, env) or {}
    reported = _KINDS.get(str(status.get("authMethod")))
    return reported or ("subscription" if env.get(environment.OAUTH_TOKEN) else "unknown")


async def _status(claude: Path, env: Mapping[str, str]) -> dict[str, Any] | None:
    """The output of `auth status`; None if the CLI has no such command, or its output is no JSON; {} if the JSON is no
    object."""
    if not await has_auth(claude, env):
        return None
    try:
        status = json.loads(await _ask(claude, env, "auth", "status"))
    except ValueError:
        return None
    return status if isinstance(status, dict) else {}


async def has_auth(claude: Path, env: Mapping[str, str]) -> bool:
    """Whether the CLI has the command `auth`: by its version, else by its help. A CLI without it would take the word
    for a prompt."""
    with contextlib.suppress(ClaudeUnavailable):  # raised if the version cannot be read: then its help decides
        known = await capability.version(claude, env)
        if known is not None and known[1] >= WITH_AUTH:
            return True
    return "claude auth" in await _ask(claude, env, "auth", "--help")


async def _ask(claude: Path, env: Mapping[str, str], *arguments: str) -> str:
    """stdout of this command, whatever its exit code (1 if not logged in). "" if it does not start, or at a timeout."""
    try:
        command = (str(claude), *arguments)
        return (await capability.run(command, env, Path("/"), seconds=STATUS_TIMEOUT, most=STATUS_OUTPUT))[1]
    except OSError:  # TimeoutError, too
        return ""
