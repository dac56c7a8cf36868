"""Builds the environment of a CLI from an allow-list; the proxy's own is never passed on.

Besides `settings` this is the only place that reads the proxy's environment.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import shlex
import shutil
import sys
import unicodedata
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from .... import redact
from ....errors import ClaudeNotLoggedIn
from ....machine import absolute
from ....sandbox import Sandboxes
from ....settings import ENVIRONMENT_ALLOWED, ENVIRONMENT_OF_PROVIDERS, Profile, Settings

TMPDIR = "TMPDIR"
# Folders in which git looks for no repository. An agent's git must not take the one that `var` may lie in: CLIs show
# its newest commits and changed files to every model.
CEILINGS = "GIT_CEILING_DIRECTORIES"
CONFIG_DIR = "CLAUDE_CONFIG_DIR"
# Names the Keychain's entry on macOS instead of CLAUDE_CONFIG_DIR; elsewhere the folder of the login's file.
LOGIN_DIR = "CLAUDE_SECURESTORAGE_CONFIG_DIR"
DEFAULT_CONFIG_DIR = ".claude"
# The CLI needs these to find its login in the Keychain; launchd and cron may not set them.
USER_NAMES = ("USER", "LOGNAME")

# Defaults for MCP tools: the model is shown all tools and whole results (run on 2.1.329: else some tools are replaced
# by a placeholder, and a long result by a preview and a file).
TOOL_DEFAULTS = {
    "ENABLE_TOOL_SEARCH": "false",
    "MAX_MCP_OUTPUT_TOKENS": "100000000",
    "ENABLE_MCP_LARGE_OUTPUT_FILES": "false",
    "CLAUDE_CODE_MAX_TOOL_USE_CONCURRENCY": "128",
}


# The CLI reports a too long request at once, instead of shortening it.
NO_COMPACTION = {"DISABLE_AUTO_COMPACT": "1"}

# Values that the CLI reads as "off" (2.1.329).
_OFF = frozenset({"", "0", "false", "no", "off"})
# Variables whose values are redacted everywhere: stderr of a CLI may quote them.
_SECRET_NAME = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|CREDENTIALS)$")
# Variables that an interactive CLI also needs: for its terminal and to open a browser.
INTERACTIVE = (
    "TERM", "COLORTERM", "BROWSER", "DISPLAY", "WAYLAND_DISPLAY", "XAUTHORITY", "XDG_RUNTIME_DIR",
    "DBUS_SESSION_BUS_ADDRESS", "SSH_CONNECTION", "SSH_CLIENT", "SSH_TTY", "WSL_DISTRO_NAME", "WSL_INTEROP",
)  # fmt: skip

# Variables with a login (the CLI's documentation, "Authentication"), and switches to clouds with logins of their own.
OAUTH_TOKEN = "CLAUDE_CODE_OAUTH_TOKEN"  # noqa: S105 - a name
LOGINS = ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", OAUTH_TOKEN)
CLOUDS = "CLAUDE_CODE_USE_"

PROGRAM = "cli-session-proxy"


def inherited(settings: Settings) -> dict[str, str]:
    """The variables of the proxy's environment that the CLI may get, and those that the settings add."""
    switches = {**os.environ, **settings.claude_env}
    patterns = list(ENVIRONMENT_ALLOWED)
    for switch, provider_patterns in ENVIRONMENT_OF_PROVIDERS.items():
        if switches.get(switch, "").strip().lower() not in _OFF:
            patterns += provider_patterns
    # Variables that the settings name for the proxy's own secrets: no pattern passes them on. A login of the CLI has a
    # fixed name, and is passed on although a profile or a model uses it, too.
    secret_names = {profile.login_env for profile in settings.profiles.values()} - {*LOGINS}
    secret_names |= {model.api_key_env for model in settings.models.values()} - {*LOGINS}
    passed = {name: value for name, value in os.environ.items() if _fits(name, patterns) and name not in secret_names}
    # An empty user name would hide the one of the user database.
    passed = {name: value for name, value in passed.items() if value or name not in USER_NAMES}
    user: dict[str, str] = {}
    with contextlib.suppress(KeyError):  # the user has no entry, e.g. in containers
        user = dict.fromkeys(USER_NAMES, pwd.getpwuid(os.getuid()).pw_name)
    env = user | passed | settings.claude_env
    if "PATH" in env:
        env["PATH"] = absolute(env["PATH"])  # the CLI has another working directory
    redact.know(value for name, value in env.items() if _SECRET_NAME.search(name))
    return env


def _fits(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def config_dir_of(env: dict[str, str]) -> Path:
    """The directory for sessions of a CLI with this environment and our working directory. The CLI normalises the name
    to NFC."""
    home = Path(env.get("HOME") or Path.home())
    configured = env.get(CONFIG_DIR) or home / DEFAULT_CONFIG_DIR
    return Path(unicodedata.normalize("NFC", os.path.abspath(os.path.expanduser(configured))))


def config_dir(settings: Settings) -> Path:
    """The CLI's directory for sessions: the setting, else CLAUDE_CONFIG_DIR, else `~/.claude`. Absolute."""
    if settings.claude_config_dir is not None:
        return Path(unicodedata.normalize("NFC", str(settings.claude_config_dir)))
    return config_dir_of(inherited(settings))


def _with_config_dir(env: dict[str, str], config_dir: Path) -> dict[str, str]:
    """`env`, changed only if a CLI with another working directory would else use another directory than `config_dir`.

    On macOS the login's entry in the Keychain is named by a hash of CLAUDE_CONFIG_DIR, byte by byte, or without a hash
    if it is not set. So the variable is only set or changed for another directory, or if its value depends on the
    working directory; then the entry's name is set separately.
    """
    configured = env.get(CONFIG_DIR)
    if configured == "":  # the CLI takes it for its working directory, but names the Keychain's entry as if unset
        env = {name: value for name, value in env.items() if name != CONFIG_DIR}
    if config_dir != config_dir_of(env):
        return env | {CONFIG_DIR: str(config_dir)}
    if not configured or os.path.isabs(configured):
        return env
    login_dir = {LOGIN_DIR: configured} if sys.platform == "darwin" else {}
    return login_dir | env | {CONFIG_DIR: str(config_dir)}


def build(settings: Settings, *, tmpdir: Path, config_dir: Path) -> dict[str, str]:
    """The whole environment of one CLI. `tmpdir`: the agent's own, because the CLI opens sockets in it."""
    return common(settings, config_dir) | {TMPDIR: str(tmpdir)}


def common(settings: Settings, config_dir: Path) -> dict[str, str]:
    """The environment of all CLIs of these settings, without TMPDIR."""
    ours = {
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        # Off: a background sub-agent reports in a turn of its own between two of ours (run on 2.1.329).
        "CLAUDE_CODE_DISABLE_BACKGROUND_TASKS": "1",
        # Off (on by default since 2.1.295): a fork of the conversation reports in no turn of ours.
        "CLAUDE_CODE_FORK_SUBAGENT": "0",
        # Off: the CLI sends scheduled prompts when no client asks; the answer would be in no turn (2.1.332).
        "CLAUDE_CODE_DISABLE_CRON": "1",
        # Off: a CLI lists all others of this user to its model, which can speak in their conversations (2.1.332).
        "CLAUDE_CODE_HARBOR_KITE": "0",
        # Off: a CLI fetches the account's connectors (mail, files) from claude.ai at each start. Without
        # --strict-mcp-config every agent could use them (2.1.332).
        "ENABLE_CLAUDEAI_MCP_SERVERS": "false",
        # A CLI that cannot start gives the reason in a result, instead of only ending (2.1.274).
        "CLAUDE_CODE_STARTUP_FAILURE_RESULTS": "1",
        "CLAUDE_CODE_MAX_RETRIES": str(settings.cli_retries),
        # After so long the CLI retries a stalled stream (default 300 s, run on 2.1.329). Half of our own limit, so that
        # its retry comes first.
        "CLAUDE_ENABLE_BYTE_WATCHDOG": "1",
        "CLAUDE_BYTE_STREAM_IDLE_TIMEOUT_MS": str(int(settings.idle_timeout * 500)),
    }
    if settings.on_context_full == "error":
        ours |= NO_COMPACTION
    env = TOOL_DEFAULTS | _with_config_dir(inherited(settings), config_dir) | ours
    agents = Sandboxes(settings).prefix
    ceilings = [env.get(CEILINGS), str(agents.parent), str(agents)]
    return env | {CEILINGS: os.pathsep.join(filter(None, ceilings))}


def of_profile(env: Mapping[str, str], profile: Profile) -> dict[str, str]:
    """The environment with the profile's login and no other. Raises `ClaudeNotLoggedIn` if that is missing."""
    if profile.login_env is None:
        return dict(env)
    token = os.environ.get(profile.login_env)
    if not token:
        raise ClaudeNotLoggedIn(
            f"the profile's login has to be in {profile.login_env}, which is not set where `serve` was started: set it "
            "to what `claude setup-token` says, and start again"
        )
    redact.know([token])
    clouds = [f"{CLOUDS}*", *(own for owns in ENVIRONMENT_OF_PROVIDERS.values() for own in owns)]
    in_use = any(name.startswith(CLOUDS) for name in env)  # else such variables come from the settings
    others = {name for name in env if name in LOGINS or (in_use and _fits(name, clouds))}
    others |= {name for name in env if name.startswith("ANTHROPIC_") and _SECRET_NAME.search(name)}
    return {name: value for name, value in env.items() if name not in others} | {OAUTH_TOKEN: token}


def has_login(env: Mapping[str, str]) -> bool:
    """Whether this environment has a login, so that a CLI does not look for its own."""
    clouds = (value for name, value in env.items() if name.startswith(CLOUDS))
    return any(env.get(name) for name in LOGINS) or any(value.strip().lower() not in _OFF for value in clouds)


def keychain_may_be_closed() -> bool:
    """Whether the Keychain may be locked: on macOS over SSH, or if started by launchd instead of a Terminal."""
    service = os.environ.get("XPC_SERVICE_NAME", "0")
    by_launchd = service != "0" and not service.startswith("application.")
    return sys.platform == "darwin" and (by_launchd or "SSH_CONNECTION" in os.environ)


def interactive(settings: Settings, *, tmpdir: Path) -> dict[str, str]:
    """The environment of a CLI that a person uses in this terminal, e.g. for a login."""
    present = {name: os.environ[name] for name in INTERACTIVE if name in os.environ}
    return present | build(settings, tmpdir=tmpdir, config_dir=config_dir(settings))


def resume_command(settings: Settings, sandbox: Path, session_id: str) -> str:
    """The command with which a person continues a session."""
    env = common(settings, config_dir(settings))
    named = [f"{name}={shlex.quote(env[name])}" for name in (CONFIG_DIR, LOGIN_DIR) if name in env]
    program = shlex.quote(str(settings.claude_bin or "claude"))
    return " ".join(["cd", shlex.quote(str(sandbox)), "&&", *named, program, "--resume", shlex.quote(session_id)])


def login_command(settings: Settings) -> str:
    """The command that logs in the CLI of these settings, with this program named as it was started."""
    started = sys.argv[0]
    words = [PROGRAM]
    if Path(started).parts[-2:] == ("cli_session_proxy", "__main__.py"):
        words = [sys.executable, "-m", "cli_session_proxy"]
    elif Path(started).name == PROGRAM:
        # uv (`uvx`) puts the program on this process's PATH only; it sets UV.
        found = None if "UV" in os.environ else shutil.which(PROGRAM)
        if os.path.abspath(found or "") != os.path.abspath(started):
            words = [started]
    words.append("login")
    if settings.claude_bin is not None:
        words += ["--claude-bin", str(settings.claude_bin)]
    if settings.claude_config_dir is not None:
        words += ["--claude-config-dir", str(settings.claude_config_dir)]
    return shlex.join(words)
