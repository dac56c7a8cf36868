"""A boundary around a CLI and all that its tools start: bubblewrap (Linux), for profiles with `confined = true`.

Inside there is the system's own software, read-only, and of everything else:

    the agent's sandbox, its TMPDIR, `add_dirs`           to read and write
    its transcripts (projects/<folder>), the CLI's login   to read and write, for the CLI itself
    the targets of links, `mcp_config`, the CLI, node      to read

What is bound is opened by its name when the next CLI starts. So no such name lies in a folder that the agent can write:
it could put a link to anything in its place.

Not there: the proxy's `var` (the store, other agents, logs, the key), the home directory, other sessions' transcripts
and the user's settings, other processes. What stays open: the network, and with it whatever listens on loopback. The
CLI's own login is in its environment or its file, and so within reach of a shell that it starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ....errors import SandboxError
from ....sandbox import make_private
from ....settings import Profile, Settings
from ..transcript import project_dir

PROGRAM = "bwrap"
ALLOW = "allow unprivileged user namespaces, or set confined = false"
INSTALL = "install bubblewrap (apt install bubblewrap), or set confined = false for this profile"

# Namespaces of its own for all but the network, no capabilities, and an end together with the proxy.
BOUNDARY = (
    "--die-with-parent", "--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try",
    "--cap-drop", "ALL",
)  # fmt: skip
TRIAL = 10.0  # seconds for a program that does nothing

# Top-level folders of software and its configuration; a link among them (/bin → usr/bin) is made again as one.
SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc", "opt", "nix", "snap")
# Files that variables of the CLI's environment name: certificates, a cloud's credentials.
NAMED_FILES = (
    "SSL_CERT_FILE", "SSL_CERT_DIR", "NODE_EXTRA_CA_CERTS", "REQUESTS_CA_BUNDLE", "GOOGLE_APPLICATION_CREDENTIALS",
    "AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE", "AWS_CA_BUNDLE", "AWS_WEB_IDENTITY_TOKEN_FILE",
)  # fmt: skip
# Where a cloud's tools keep a login, if the CLI was told to use that cloud (else its variables are not passed on).
CLOUD_FOLDERS = {"AWS_": ".aws", "CLAUDE_CODE_USE_BEDROCK": ".aws", "CLAUDE_CODE_USE_VERTEX": ".config/gcloud"}
LOGIN = ".credentials.json"
# Of the user's own directory of the CLI, for profiles that load the user's settings.
USER_SETTINGS = ("settings.json", "CLAUDE.md", "agents", "commands", "skills", "plugins", "output-styles", "rules")
# What a CLI names by its pid, which is small and alike behind each boundary, is its own alone: its socket, and its
# entry in the register of running CLIs.
SOCKETS, REGISTER = "cc-socks", "sessions"
MOST_LINKS = 40  # on the way to one file, as the kernel has it


_works = False  # it was tried on this machine, and nothing was in its way


async def missing() -> str | None:
    """Why nothing can be confined on this machine; None where it can. Tried once, by confining a program."""
    global _works  # noqa: PLW0603 - what a machine can do is one thing for the whole process
    if _works:
        return None
    if not sys.platform.startswith("linux"):
        return "confined profiles need Linux: bubblewrap is not there for this system; set confined = false"
    if shutil.which(PROGRAM) is None:
        return f"a confined profile needs bubblewrap, which is not installed: {INSTALL}"
    child = await asyncio.create_subprocess_exec(
        PROGRAM, *BOUNDARY, "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "true", start_new_session=True,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(TRIAL):
            _, said = await child.communicate()
    except TimeoutError:
        return f"bubblewrap did not end within {TRIAL:.0f} s: {INSTALL}"
    finally:
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            await child.wait()
    if child.returncode != 0:
        why = said.decode(errors="replace").strip()[-200:]
        return f"bubblewrap cannot make a boundary here ({why}): {ALLOW}"
    _works = True
    return None


@dataclass(frozen=True, slots=True)
class Place:
    """What one agent's CLI works with. It finds `private` in the place of the CLI's own directory, `config_dir`."""

    cwd: Path
    tmpdir: Path
    config_dir: Path
    private: Path


async def wrapper(
    settings: Settings, profile: Profile, program: Path, place: Place, env: Mapping[str, str]
) -> tuple[str, ...]:
    """The beginning of the command line of a CLI of this confined profile.

    Makes the directories that it binds. Raises `SandboxError` where it cannot be confined.
    """
    why = await missing()
    if why is not None:
        raise SandboxError(why)
    return await asyncio.to_thread(_wrapper, settings, profile, program, place, env)


def _wrapper(
    settings: Settings, profile: Profile, program: Path, place: Place, env: Mapping[str, str]
) -> tuple[str, ...]:
    try:
        mounts = _mounts(settings, profile, program, place, env)
    except OSError as exc:
        raise SandboxError(
            f"a confined CLI cannot be prepared ({exc}): make --var and the config dir writable"
        ) from exc
    # From the top downwards: what is hidden first, then what of it is shown again.
    mounts.sort(key=lambda mount: len(mount.at.parts))
    base = (PROGRAM, *BOUNDARY, *_system(), "--proc", "/proc", "--dev", "/dev")
    return (*base, *(word for mount in mounts for word in mount.words()), "--chdir", str(place.cwd), "--")


@dataclass(frozen=True, slots=True)
class _Mount:
    """`how` is bwrap's option; a `source` of None is an empty directory."""

    how: str
    at: Path
    source: Path | None = None

    def words(self) -> Sequence[str]:
        return (self.how, *([] if self.source is None else [str(self.source)]), str(self.at))


def _system() -> Iterator[str]:
    for name in SYSTEM:
        path = Path("/", name)
        if path.is_symlink():
            yield from ("--symlink", os.readlink(path), str(path))
        elif path.is_dir():
            yield from ("--ro-bind", str(path), str(path))


def _mounts(settings: Settings, profile: Profile, program: Path, place: Place, env: Mapping[str, str]) -> list[_Mount]:
    project = project_dir(place.config_dir, place.cwd)
    project.mkdir(mode=0o700, parents=True, exist_ok=True)
    make_private(place.private)
    home = Path(env.get("HOME") or Path.home())
    mounts = [_Mount("--tmpfs", hidden) for hidden in (Path("/tmp"), home, settings.var)]  # noqa: S108 - its own
    mounts.append(_Mount("--bind", place.config_dir, place.private))
    mounts += [_Mount("--tmpfs", hidden) for hidden in (place.tmpdir / SOCKETS, place.config_dir / REGISTER)]
    written: list[Path] = []
    for folder in (place.cwd, place.tmpdir, project, *sorted(Path(os.path.abspath(at)) for at in profile.add_dirs)):
        if not any(folder.is_relative_to(above) for above in written):
            written.append(folder)
            mounts.append(_Mount("--bind", folder, folder))
    if (login := place.config_dir / LOGIN).is_file():
        mounts.append(_Mount("--bind", login, login))
    shown = [place.config_dir / name for name in USER_SETTINGS] if "user" in profile.setting_sources else []
    shown += [
        *_software(program, env, (home, settings.var)),
        *settings.sandbox.links.values(),
        Path("/etc/resolv.conf"),
    ]
    shown += [Path(env[name]) for name in NAMED_FILES if env.get(name)]
    shown += [home / folder for start, folder in CLOUD_FOLDERS.items() if any(name.startswith(start) for name in env)]
    shown += [] if profile.mcp_config is None else [profile.mcp_config]

    def is_written(path: Path) -> bool:
        """Its name lies in a folder that the agent writes, and that is not covered by another one."""
        over = [mount.at for mount in mounts if path.is_relative_to(mount.at)]
        return bool(over) and max(over, key=lambda at: len(at.parts)) in written

    for path in dict.fromkeys(Path(os.path.abspath(one.expanduser())) for one in shown):
        if not is_written(path) and not any(map(is_written, _links(path))):  # what is written there is seen already
            mounts += [mount for mount in _read_only(path) if not is_written(mount.at)]
    return mounts


def _links(path: Path) -> Iterator[Path]:
    """The links on the way to where this really lies."""
    for _ in range(MOST_LINKS):
        link = next((at for at in (*reversed(path.parents), path) if at.is_symlink()), None)
        if link is None:
            return
        yield link
        path = Path(os.path.abspath(link.parent / os.readlink(link) / path.relative_to(link)))


def _read_only(path: Path) -> Iterator[_Mount]:
    """The file or folder where it is named and where it really lies; nothing where it is not there."""
    for at in dict.fromkeys((Path(os.path.abspath(path)), Path(os.path.realpath(path)))):
        there = at.exists() and not at.is_symlink()
        if there and at.parts[1:2] and at.parts[1] not in SYSTEM:
            yield _Mount("--ro-bind", at, at)


def _software(program: Path, env: Mapping[str, str], hidden: Sequence[Path]) -> Iterator[Path]:
    """The CLI, its modules where it is a script, and the interpreter of one: no folder around what is hidden."""
    yield program
    above = [parent for parent in Path(os.path.realpath(program)).parents if parent.name == "node_modules"]
    if above:
        yield above[-1]
    if (node := shutil.which("node", path=env.get("PATH"))) is not None:
        yield Path(node)
        prefix = Path(os.path.realpath(node)).parent.parent
        if not any(place.is_relative_to(prefix) for place in hidden):
            yield prefix
