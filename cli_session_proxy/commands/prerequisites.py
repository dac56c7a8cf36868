"""What `serve` and `doctor` say before a turn: a missing login, an unsafe place. `login` runs the CLI's own login.

No credential is read here: the environment is searched for variable names, the CLI reports its login, and the CLI's
own login talks to the person at the terminal.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path

from ..backends.base import Login
from ..backends.claude.mounts import file_system
from ..backends.claude.process import capability, environment, logged_in
from ..backends.claude.process.child import ALWAYS_OFF
from ..backends.claude.process.failures import likely_model
from ..errors import ClaudeUnavailable, ConfigError
from ..http.binding import is_loopback
from ..http.keys import Keys
from ..sandbox import LOCAL_OWNER
from ..settings import MODELS, Settings

# Anthropic's own page. It changes, so it is linked and not quoted.
TERMS = "https://code.claude.com/docs/en/legal-and-compliance"

# Seconds for the CLI's own login to end after a signal, before it is killed.
LOGIN_GRACE = 5.0

Say = Callable[[str], None]


async def report(settings: Settings, keys: Keys) -> AsyncIterator[str]:
    """Lines for the person who started `serve`. A missing CLI is one of them, not an error."""
    for line in shared_login(settings, keys):
        yield line
    for profile, variable in sorted(settings.logins.items()):
        if not os.environ.get(variable):
            yield f"profile {profile}: its login has to be in {variable}, which is not set: its turns fail with 401"
    for says, mend in [*tools_off(settings), *unsafe_places(settings)]:
        yield f"{says}: {mend}"
    with tempfile.TemporaryDirectory(prefix="cli-session-proxy-") as tmpdir:
        config_dir = environment.config_dir(settings)
        env = environment.build(settings, tmpdir=Path(tmpdir), config_dir=config_dir)
        try:
            claude = await capability.probe(capability.find(settings), env)
        except ClaudeUnavailable as exc:
            yield f"claude: {exc.message}"
            return
        yield f"claude {claude.version} at {claude.path}"
        model = settings.default_model
        if not any(known in model for known in MODELS) and (meant := likely_model(model)):
            yield f"default_model is {model!r}{meant}"
        if (advice := (await logged_in.find_login(settings, claude.path, env)).advice) is not None:
            yield advice


async def login_of(settings: Settings) -> Login:
    """How the CLI of these settings is logged in. At most 0.3 s of a core."""
    env = environment.common(settings, environment.config_dir(settings))
    try:
        claude = capability.find(settings)
        if await capability.version(claude, env) is None:
            await capability.probe(claude, env)  # by its help: another program is refused
    except ClaudeUnavailable as exc:
        return Login("unknown", exc.message)
    return await logged_in.find_login(settings, claude, env)


async def refuse_others(settings: Settings) -> None:
    """Raise `ConfigError` if a personal subscription would serve other people.

    The CLI is asked (0.6 s of a core) only if others can reach the proxy.
    """
    others = serves_others(settings, Keys(settings))
    if others is None or settings.i_am_the_only_user:
        return
    env = environment.common(settings, environment.config_dir(settings))
    try:
        kind = "subscription" if settings.logins else await logged_in.login_kind(capability.find(settings), env)
    except ClaudeUnavailable:  # `report` says so
        return
    if kind == "subscription":
        raise ConfigError(
            f"{others}, and the CLI is logged in with a subscription, which is for the person who bought it: serving "
            f"other people with it breaks Anthropic's terms ({TERMS}). Give the CLI an API key (ANTHROPIC_API_KEY), "
            "Bedrock, Vertex or Foundry. If all of these are your own devices, say i_am_the_only_user = true"
        )


def serves_others(settings: Settings, keys: Keys) -> str | None:
    """How other people can reach the proxy, as the beginning of a sentence; None if nobody else can."""
    owners = keys.owners | ({LOCAL_OWNER} if settings.make_key else frozenset())
    if len(owners) > 1:
        return f"{len(owners)} keys name several people"
    if settings.trusted_header is not None:
        return "a gateway names whom it lets in"
    if settings.uds is None and not is_loopback(settings.host):
        return f"host {settings.host!r} lets other machines in"
    return None


def tools_off(settings: Settings) -> Iterator[tuple[str, str]]:
    """The profiles that name a tool which is always off, and what to do."""
    for name, profile in sorted(settings.profiles.items()):
        if off := sorted({tool.split("(")[0] for tool in profile.tools} & {*ALWAYS_OFF}):
            yield f"profile {name} names {', '.join(off)}, off in every profile", "leave that out of its `tools`"


def shared_login(settings: Settings, keys: Keys) -> Iterator[str]:
    """Advice for a proxy that others can reach, while it is unknown how the CLI is billed."""
    others = serves_others(settings, keys)
    by_use = logged_in.billed_by_use(environment.inherited(settings))
    if others is not None and not by_use and not settings.i_am_the_only_user:
        yield (
            f"{others}: a subscription is for the person who bought it, and with one this does not start; several "
            f"people need an API key, or each their own login and proxy (Anthropic's terms: {TERMS})"
        )


async def login(settings: Settings, options: Sequence[str], say: Say) -> bool:
    """Run the CLI's own login in this terminal, for the directory and in the environment that `serve` gives it.

    `options` are passed to the CLI. False if it failed. Raises `ClaudeUnavailable`.
    """
    claude = capability.find(settings)
    with tempfile.TemporaryDirectory(prefix="cli-session-proxy-") as tmpdir:
        env = environment.interactive(settings, tmpdir=Path(tmpdir))
        # CLIs before the command `auth` have `/login` inside a conversation.
        words = ("auth", "login", *options) if await logged_in.has_auth(claude, env) else ("/login", *options)
        say(f"running {claude} {' '.join(words)}; its login is for {environment.config_dir(settings)}")
        code = await _in_terminal(claude, words, env, tmpdir)
        if code != 0:
            say(f"the CLI's login ended with exit code {code}: run this again, or see `doctor`")
            return False
        served = environment.build(settings, tmpdir=Path(tmpdir), config_dir=environment.config_dir(settings))
        advice = (await logged_in.find_login(settings, claude, served)).advice
        say(advice or "logged in: `serve` needs nothing more")
        return advice is None or words[0] != "auth"


async def _in_terminal(claude: Path, words: Sequence[str], env: Mapping[str, str], cwd: str) -> int:
    """Run a CLI in this terminal; returns its exit code. Ctrl-C reaches both processes, and is left to the CLI."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, lambda: None)
    process = None
    try:
        process = await asyncio.create_subprocess_exec(claude, *words, env=dict(env), cwd=cwd)
        return await process.wait()
    except OSError as exc:
        raise ClaudeUnavailable(f"{claude} cannot be started ({exc.strerror}): {capability.INSTALL}") from exc
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        if process is not None and process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), LOGIN_GRACE)
            except TimeoutError:
                process.kill()
                await process.wait()


# --- unsafe places for a database: synced folders and network file systems

PROGRAM = Path(__file__).parent
# Folders that programs sync to other machines, even in the middle of a write and without locks.
SYNCED = {
    "Mobile Documents": "iCloud Drive", "CloudStorage": "a cloud's folder", "Dropbox": "Dropbox",
    "Google Drive": "Google Drive", "Nextcloud": "Nextcloud", "pCloud Drive": "pCloud",
}  # fmt: skip
ONEDRIVE = "OneDrive"  # also "OneDrive - Company"
# Folders that macOS can move into iCloud Drive.
IN_ICLOUD = ("Desktop", "Documents")
ICLOUD = Path("Library/Mobile Documents/com~apple~CloudDocs")
NETWORK = {
    "nfs": "NFS", "nfs4": "NFS", "smbfs": "SMB", "cifs": "SMB", "smb3": "SMB", "afpfs": "AFP", "webdav": "WebDAV",
    "9p": "a Windows drive", "drvfs": "a Windows drive", "fuse.sshfs": "sshfs",
}  # fmt: skip


def unsafe_places(settings: Settings) -> Iterator[tuple[str, str]]:
    """Directories in unsafe places, and how to fix it."""
    asked = ("var", settings.var, "choose another with --var"), ("the program", PROGRAM, "install it elsewhere")
    for what, path, mend in asked:
        if (why := why_unsafe(path)) is not None:
            yield f"{what} ({path}) lies {why}", mend


def why_unsafe(path: Path) -> str | None:
    """Why this directory is unsafe; None if no reason is known."""
    real = Path(os.path.realpath(path))
    for part in real.parts:
        if part in SYNCED or part.startswith(ONEDRIVE):
            return f"in {SYNCED.get(part, ONEDRIVE)}, which copies files while they are being written"
    home = Path.home()
    if sys.platform == "darwin" and real.is_relative_to(home):
        first = real.relative_to(home).parts[:1]
        if first and first[0] in IN_ICLOUD and (home / ICLOUD / first[0]).exists():
            return "in iCloud Drive, which copies files while they are being written"
    kind = NETWORK.get(file_system(real))
    return None if kind is None else f"on {kind}, where locks and synced writes may not hold"
