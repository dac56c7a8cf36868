"""A sandbox for a CLI and everything that its tools start: bubblewrap (Linux), for profiles with `confined = true`.

Inside there is the system's software, read-only, and besides only:

    the agent's sandbox, its TMPDIR, `add_dirs`           to read and write
    its transcripts (projects/<folder>)                    to read and write, for the CLI itself
    a copy of the CLI's login (see `login`)                the same
    the targets of links, `mcp_config`, the CLI, node      to read
    the part of /etc that programs need (`ETC`), with a user list of this user alone

A mount's source is opened by name when the next CLI starts. So its name must not be in a folder that the agent can
write: the agent could replace it by a link to anything.

Not there: the proxy's `var` (the store, other agents, logs, the key), the home directory, other sessions' transcripts
and the user's settings, other processes. No CLI is started where a file that the settings name as secret
(`Settings.secret_files`) lies in a folder that is shown: to mount something over that file would not do, because such
a mount goes when the file is replaced. Before each start a program looks from inside the boundary, too. Nor is one
started where the agent could write a program that runs outside.

What stays open: the network, and with it whatever listens on loopback without asking for a password. The proxy itself
asks for a key (`serve` refuses to start without one), and no key is visible inside. The CLI's own login is in its
environment or its file, and so within reach of a shell that it starts. See `confine_program` for what else is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pwd
import re
import shutil
import signal
import site
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ....errors import SandboxError
from ....machine import Mounts, command_to, free_for_others, interpreter, links_to, tasks
from ....sandbox import make_private, short_tmpdirs
from ....settings import CONFIG_FILE, NO_PROFILE, Profile, Settings, paths_in
from ....tasks import in_thread_at
from ..transcript.files import make_project
from . import confine_program, descriptors
from .capability import Capability
from .login import write_private

PROGRAM = "bwrap"
CONFINE = (interpreter(), "-I", "-S", confine_program.__file__, PROGRAM)
ALLOW = "allow unprivileged user namespaces, or set confined = false"
INSTALL = f"install bubblewrap ({command_to('install bubblewrap')}), or set confined = false for this profile"

# New namespaces except for the network, no nested ones, no capabilities; it ends with the proxy.
BOUNDARY = (
    "--die-with-parent", "--unshare-user", "--disable-userns", "--unshare-pid", "--unshare-ipc", "--unshare-uts",
    "--unshare-cgroup-try", "--cap-drop", "ALL",
)  # fmt: skip
MOVE = "move it to a place that confined agents are not shown, or set confined = false"
# The most processes and threads inside, against fork bombs: or half of what there may be, so that one agent leaves some
# to the others. Counted per sandbox since Linux 5.14; not for root.
MOST_TASKS = 2048
TRIAL = 10.0  # seconds for a test program

# Folders of software; links among them (/bin → usr/bin) stay links. Software in other places (/opt, a home) is shown
# only if it is the CLI itself or a link's target.
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store")
# Folders below those that may have configuration with passwords (npmrc, database clients).
HIDDEN_SYSTEM = ("/usr/etc", "/usr/local/etc", "/usr/local/var")
# The part of /etc that programs need: names, certificates, the loader, time. The rest may have secrets.
ETC = (
    "alternatives", "bash.bashrc", "ca-certificates", "ca-certificates.conf", "crypto-policies", "debian_version",
    "fonts", "gai.conf", "host.conf", "hostname", "hosts", "inputrc", "java*/security", "java*/jvm*.cfg",
    "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "locale.alias", "localtime", "magic", "magic.mime", "mime.types",
    "networks", "nsswitch.conf", "os-release", "pki/ca-trust", "pki/tls/cert.pem", "pki/tls/certs",
    "pki/tls/openssl.cnf", "protocols", "resolv.conf", "services", "shells", "ssl/cert.pem", "ssl/certs",
    "ssl/openssl.cnf", "terminfo", "timezone",
)  # fmt: skip
# Size in bytes of each folder in memory: /tmp, /dev/shm, the home. TMPDIR and the agent's directory are on the disk.
IN_MEMORY = 256 * 1024 * 1024
# Runs inside, with paths as arguments: prints those that can be opened, and a last line that shows that it finished.
LOOK = 'for at; do if { [ -f "$at" ] || [ -S "$at" ]; } && [ -r "$at" ]; then echo "$at"; fi; done; echo looked'
# Variables that name files for the CLI: certificates, a cloud's credentials.
NAMED_FILES = (
    "SSL_CERT_FILE", "SSL_CERT_DIR", "NODE_EXTRA_CA_CERTS", "REQUESTS_CA_BUNDLE", "GOOGLE_APPLICATION_CREDENTIALS",
    "AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE", "AWS_CA_BUNDLE", "AWS_WEB_IDENTITY_TOKEN_FILE",
)  # fmt: skip
# Variables of this program's libraries and of git. They name certificates, settings, and folders of modules or keys.
OF_THIS_PROGRAM = (
    "OPENSSL_CONF", "CURL_CA_BUNDLE", "PGSSLROOTCERT", "PYTHONPYCACHEPREFIX", "GNUPGHOME", "GIT_CONFIG_GLOBAL",
    "GIT_CONFIG_SYSTEM",
)  # fmt: skip
# Folders with the login of a cloud's tools, if the CLI uses that cloud (else its variables are not passed on).
CLOUD_FOLDERS = {"AWS_": ".aws", "CLAUDE_CODE_USE_BEDROCK": ".aws", "CLAUDE_CODE_USE_VERTEX": ".config/gcloud"}
# Parts of the user's CLI directory, for profiles that load the user's settings.
USER_SETTINGS = ("settings.json", "CLAUDE.md", "agents", "commands", "skills", "plugins", "output-styles", "rules")
# Files beside them, of which an older CLI runs `apiKeyHelper` (1.0.120).
GLOBAL_SETTINGS = (".claude.json", ".config.json")
PROJECT_SETTINGS = ("settings.json", "settings.local.json")
# What a CLI reads of a project, by its name anywhere below the agent's directory.
INSTRUCTIONS = ("CLAUDE.md", "CLAUDE.local.md", "AGENTS.md", ".mcp.json")
# Files of the home that a CLI, its shell, git and what starts MCP servers read (2.1.332). With Bedrock a CLI runs the
# `credential_process` of AWS.
OF_HOME = (
    ".bash_login", ".bash_profile", ".bashrc", ".profile", ".zlogin", ".zprofile", ".zshenv", ".zshrc", ".gitconfig",
    ".config/git/config", ".config/anthropic/active_config", ".config/anthropic/configs/default.json", ".claude.json",
    ".aws/config", ".aws/credentials", ".config/gcloud/application_default_credentials.json", ".npmrc", ".ssh/config",
    ".config/uv/uv.toml", ".config/pip/pip.conf",
)  # fmt: skip
LOOKED_FOR = (PROGRAM, "git", "setpriv")  # programs that the proxy runs and PATH has
NODE = ("bin/node", "bin/npm", "bin/npx", "lib/node_modules")  # of the folder that node is installed in
# Folders with files named by pid (sockets, the register of running CLIs): private, because pids in sandboxes are small
# and equal.
SOCKETS, REGISTER = "cc-socks", "sessions"
# The URL of a server on loopback: its kind, host and port. And the port of each kind if none is named.
ON_LOOPBACK = re.compile(
    r"\b([a-z]+)://(?:[^/?#\s]*@)?((?:[\w-]+\.)*localhost|127(?:\.\d+){3}|\[::1\])\.?(?::(\d{1,5}))?(?![\w.-])",
    re.IGNORECASE,
)
PORTS = {"http": 80, "https": 443, "redis": 6379, "rediss": 6379, "postgres": 5432, "postgresql": 5432}


_works = False  # tried on this machine, with success


async def why_unavailable() -> str | None:
    """Why this machine cannot confine a program; None if it can. Found out by confining one, until that succeeds."""
    global _works  # noqa: PLW0603 - what a machine can do is one thing for the whole process
    if _works:
        return None
    if not sys.platform.startswith("linux"):
        return "confined profiles need Linux: there is no bubblewrap for this system; set confined = false"
    if shutil.which(PROGRAM) is None:
        return f"a confined profile needs bubblewrap, which is not installed: {INSTALL}"
    trial = ("--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--size", "4096", "--tmpfs", "/tmp", "true")  # noqa: S108
    code, _, error = await _run([*CONFINE, *BOUNDARY, *trial], TRIAL)
    if code is None:
        return f"bubblewrap did not end within {TRIAL:.0f} s: {INSTALL}"
    if "Unknown option" in error:
        return "a confined profile needs bubblewrap 0.8 or newer, which bounds what is inside: update it"
    if code != 0:
        return f"bubblewrap cannot make a boundary here ({error.strip()[-200:]}): {ALLOW}"
    _works = True
    return None


async def _run(
    argv: Sequence[str], seconds: float, env: Mapping[str, str] | None = None
) -> tuple[int | None, str, str]:
    """Run a short program. Returns its exit code, stdout and stderr. The code is None if the program was still running
    after `seconds`, and -1 if it could not be started. Raises `NoneFree`."""
    try:
        descriptors.check()
        child = await asyncio.create_subprocess_exec(
            *argv, start_new_session=True, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE, env=env,
        )  # fmt: skip
    except OSError as exc:
        if exc.errno in descriptors.NONE_FREE:
            raise descriptors.unavailable(exc) from exc
        return -1, "", exc.strerror or str(exc)
    both_streams = asyncio.ensure_future(child.communicate())
    try:
        await asyncio.wait({both_streams}, timeout=seconds)
        code = child.returncode  # before the kill below, which would set one
    finally:
        if not both_streams.done():  # a failed bubblewrap ends, but its child may hold the output open for ever
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        out, err = await both_streams
    return code, out.decode(errors="replace"), err.decode(errors="replace")


@dataclass(frozen=True, slots=True)
class ConfinedPlace:
    """Directories of one agent's CLI: `cwd` is its sandbox, `project` has its transcripts. Inside, `private` is mounted
    at the path of the CLI's own directory, `config_dir`."""

    cwd: Path
    tmpdir: Path
    config_dir: Path
    project: Path
    private: Path


async def wrapper(
    settings: Settings, profile: Profile, program: Path, place: ConfinedPlace, env: Mapping[str, str]
) -> tuple[str, ...]:
    """The words that start bubblewrap, to be put before the command line of a CLI of this confined profile.

    Creates the directories that bubblewrap binds. Raises `SandboxError` if the CLI cannot be confined, or a program
    inside could read a secret.
    """
    why = await why_unavailable()
    if why is not None:
        raise SandboxError(why)
    words, secrets = await in_thread_at(place.cwd, _wrapper, settings, profile, program, place, env)
    # Look from inside at each secret: the mounts alone do not prove that none is visible (links, bind mounts).
    look, seconds = (*words, "/bin/sh", "-c", LOOK, "look", *secrets), settings.spawn_timeout
    code, readable, error = await _run(look, seconds, env)
    if code != 0 or not readable.endswith("looked\n"):  # without its last line the look was not complete
        why = f"did not end within {seconds:g} s" if code is None else f"said {error.strip()[-200:]!r}"
        raise SandboxError(f"a confined CLI cannot be started: bubblewrap {why}")
    if (visible := readable.removesuffix("looked\n").splitlines()) != []:
        raise SandboxError(
            f"a confined agent could read {visible[0]} ({secrets[visible[0]]}), so its CLI is not started: {MOVE}"
        )
    return words


def as_read_by(cli: Capability, settings: Settings) -> Settings:
    """The settings for the checks of this CLI. One without `--setting-sources` (1.0.120) loads settings of all sources
    in every turn, also without a profile."""
    if "--setting-sources" in cli.flags:
        return settings
    every = Profile(setting_sources=("user", "project", "local"))
    return settings.model_copy(update={"profiles": {**settings.profiles, NO_PROFILE: every}})


async def why_cli_fails(
    settings: Settings, profile: Profile, program: Path, place: ConfinedPlace, env: Mapping[str, str]
) -> str | None:
    """Why the CLI of this confined profile does not start inside the boundary; None if it prints its version there."""
    try:
        words = await wrapper(settings, profile, program, place, env)
    except SandboxError as exc:
        return exc.message
    code, version, error = await _run([*words, str(program), "--version"], TRIAL, env)
    if code == 0 and version.strip():
        return None
    why = (error or version).strip()[-200:] or f"exit code {code}"
    return f"the Claude CLI does not run behind the boundary ({why}): show what it needs by a link of [sandbox.links]"


def _wrapper(
    settings: Settings, profile: Profile, program: Path, place: ConfinedPlace, env: Mapping[str, str]
) -> tuple[tuple[str, ...], dict[str, str]]:
    """The command line, and paths that must not be readable inside, each with a description."""
    try:
        boundary = _Boundary(settings, profile, program, place, env)
        mounts = boundary.mounts()
    except OSError as exc:
        raise SandboxError(
            f"a confined CLI cannot be prepared ({exc}): make --var and the config dir writable"
        ) from exc
    # From the top downwards: first hide a folder, then show parts of it.
    mounts.sort(key=lambda mount: len(mount.at.parts))
    words = (word for mount in mounts for word in mount.words())
    # /proc, too: there root could change kernel settings, even without capabilities in a namespace.
    closed = (word for at in ("/dev", "/proc", str(settings.var), "/") for word in ("--remount-ro", at))
    start = ("--proc", "/proc", "--dev", "/dev")
    prlimit = shutil.which("prlimit", path="/usr/bin:/bin")
    bounds = () if prlimit is None else (prlimit, f"--nproc={min(MOST_TASKS, (tasks() or 2 * MOST_TASKS) // 2)}", "--")
    command = (*CONFINE, *BOUNDARY, *start, *words, *closed, "--chdir", str(place.cwd), "--", *bounds)
    return command, boundary.secrets


@dataclass(frozen=True, slots=True)
class _Mount:
    """An option of bwrap that puts something at a path inside."""

    option: str
    at: Path
    source: Path | None = None  # None: an empty directory
    size: int = 1024 * 1024  # of that directory

    def words(self) -> Sequence[str]:
        if self.source is None:
            return ("--size", str(self.size), self.option, str(self.at))
        return (self.option, str(self.source), str(self.at))


class _Boundary:
    """The mounts of one agent's sandbox. Raises `SandboxError` if something secret would be visible."""

    def __init__(
        self, settings: Settings, profile: Profile, program: Path, place: ConfinedPlace, env: Mapping[str, str]
    ) -> None:
        self._settings, self._profile, self._program, self._place, self._env = settings, profile, program, place, env
        self._home = Path(env.get("HOME") or Path.home())
        self._project = place.project
        self._disks = Mounts()
        # Directories that all agents share: inside, there are only this agent's parts of them.
        self._shared = {
            settings.var: "--var",
            place.config_dir: "the CLI's directory",
            place.project.parent: "the CLI's transcripts",
            **({} if settings.sandbox_root is None else {settings.sandbox_root: "sandbox_root"}),
        }
        self._writable: list[Path] = []  # folders that the agent may write
        self._mounts: list[_Mount] = []
        self.secrets: dict[str, str] = {}  # paths that must not be readable inside, each with a description

    def mounts(self) -> list[_Mount]:
        self._check_servers()
        make_project(self._project)  # not empty, or another CLI removes it while it is bound
        make_private(self._place.private)
        self._mount_system()
        self._mount_own()
        self._mount_readable()
        self._find_secrets()
        self._mount_parents()
        self._remove_links()
        return self._mounts

    def _check_servers(self) -> None:
        """Refuse a server in whose place a program inside could listen: it would get all agents' words, and the key. A
        server that is named as `localhost` may hold one of two addresses only, of which 2.1.332 asks [::1] first."""
        named = dict(self._env) | self._settings.servers()
        own = self._place.config_dir / USER_SETTINGS[0]
        if any("user" in one.setting_sources for one in self._settings.profiles.values()) and own.is_file():
            with contextlib.suppress(OSError):  # no CLI of this user can read it either
                named[str(own)] = text = own.read_text("utf-8", "replace")
                with contextlib.suppress(ValueError, TypeError):  # no rule, as Bash(curl http://localhost:3000)
                    named[str(own)] = json.dumps(json.loads(text) | {"permissions": None})
        for name, text in named.items():
            for kind, host, port in ON_LOOPBACK.findall(text):
                addresses = ("127.0.0.1", "::1") if host.lower().endswith("localhost") else (host.strip("[]"),)
                number = int(port or PORTS.get(kind.lower(), 0))
                if 0 < number < 65536 and (free := free_for_others(addresses, number)) is not None:
                    raise SandboxError(
                        f"a confined agent could listen at {free} on port {number}, and receive what is meant for the "
                        f"server that {name} names as {host}: write its address, such as 127.0.0.1; if it shares its "
                        "port (SO_REUSEPORT), run it as another user"
                    )

    def _mount_system(self) -> None:
        """The system's software and the needed part of /etc, read-only."""
        for path in map(Path, SYSTEM):
            if path.is_symlink():
                self._mounts.append(_Mount("--symlink", path, Path(os.readlink(path))))
            elif path.is_dir():
                self._mounts.append(_Mount("--ro-bind", path, path))
        self._mounts += [_Mount("--tmpfs", path) for path in map(Path, HIDDEN_SYSTEM) if path.is_dir()]
        etc = Path("/etc")
        for path in sorted(path for name in ETC for path in etc.glob(name)):
            if path.is_symlink() and _in_system(path):  # node takes the time zone's name from this link
                self._mounts.append(_Mount("--symlink", path, Path(os.readlink(path))))
            elif path.exists():
                self._mounts.append(_Mount("--ro-bind", path, path))
        for name, line in _users(self._home).items():
            self._mounts.append(_Mount("--ro-bind", etc / name, self._own_file(name, line)))

    def _own_file(self, name: str, text: str) -> Path:
        """A file outside, with this text, to be mounted."""
        made = self._settings.var / "confined" / f"~{name}"
        make_private(made.parent)
        if not made.is_file() or made.read_text() != text:
            write_private(made, text.encode())
        return made

    def _mount_own(self) -> None:
        """The agent's own directories, and empty folders that hide everything around them."""
        place = self._place
        # Not over "/", which is the home of a container's user without a name: /proc and /dev would be gone.
        for path in {Path("/tmp"), Path("/dev/shm"), self._home} - {Path("/")}:  # noqa: S108 - its own
            self._mounts.append(_Mount("--tmpfs", path, size=IN_MEMORY))
        hidden = [one for one in (self._settings.var, self._settings.sandbox_root) if one is not None]
        self._mounts += [_Mount("--tmpfs", path) for path in hidden]
        self._mounts.append(_Mount("--bind", place.config_dir, place.private))
        # A mount point cannot be renamed inside. So `projects` is one, too: the next mount is below it.
        own = (place.tmpdir / SOCKETS, place.config_dir / REGISTER, self._project.parent)
        self._mounts += [_Mount("--tmpfs", path) for path in own]
        added = sorted(self._profile.add_dirs)
        for folder in (place.cwd, place.tmpdir, self._project, *added):
            if not any(folder.is_relative_to(above) for above in self._writable):
                if folder in added:
                    self._check_added(folder)
                self._writable.append(folder)
                self._mounts.append(_Mount("--bind", folder, folder))

    def _check_added(self, folder: Path) -> None:
        """Refuse a writable folder that contains secrets, programs, or the directories of all agents: a CLI reads the
        settings and instructions in every folder above its own."""
        self._check_names(_with_links(folder))
        mounted = self._shared | {self._home: "the home directory"}
        others = {path: what for path, what in self._settings.secret_files().items() if os.path.lexists(path)}
        if self._settings.config is None:  # a config file there would be read at the next start
            others[Path.cwd() / CONFIG_FILE] = "a file of settings"
        others |= self._programs_of_others()
        others[short_tmpdirs()] = "other agents' TMPDIR"
        real = folder.resolve()
        written = self._disks.shown(real).values()
        for path, what in (mounted | others).items():
            names = (*links_to(path), path.resolve())
            way = [self._disks.place(at) for at in names]
            reachable = path.is_relative_to(folder) or any(at.is_relative_to(one) for at in way for one in written)
            if path != self._home:
                reachable |= folder.is_relative_to(path) or any(one.is_relative_to(way[-1]) for one in written)
            if reachable:
                pairs = ((at, one) for at in (path, *names) for one in (folder, real))
                is_named = any(at.is_relative_to(one) or one.is_relative_to(at) for at, one in pairs)
                how = "" if is_named else ", which a mount shows there"
                raise SandboxError(
                    f"a confined agent may write {folder} (add_dirs), and could so reach {path} ({what}){how}: {MOVE}"
                )

    def _programs_of_others(self) -> dict[Path, str]:
        """Programs that run outside this sandbox or in another agent's, each with a description. They must not be
        writable inside."""
        found = dict.fromkeys((*_software(self._program, self._env), *links_to(self._program)), "the Claude CLI")
        # Of bubblewrap, node and git, and of what they load. The loader takes ";" as well, a shell does not. And files
        # that decide whom a CLI or the proxy trusts, or what it runs for a login (`credential_process` of AWS).
        lists = {
            "PATH": os.pathsep,
            "LD_LIBRARY_PATH": "[:;]",
            "LD_PRELOAD": "[: ]",
            "LD_AUDIT": ":",
            **dict.fromkeys((*NAMED_FILES, *OF_THIS_PROGRAM), "\0"),
            "SSL_CERT_DIR": os.pathsep,
        }
        for name, separator in lists.items():
            named = (os.environ.get(name, ""), self._env.get(name, ""))
            entries = [at for names in named if names for at in re.split(separator, names)]
            if name in ("LD_PRELOAD", "LD_AUDIT"):  # libraries without a folder are searched in LD_LIBRARY_PATH
                entries = [at for at in entries if os.sep in at]
            # Elsewhere than in the first two an empty entry means nothing. In these it is the working directory.
            paths = (os.path.abspath(at) for at in entries if at or name.endswith("PATH"))
            found |= dict.fromkeys(map(Path, paths), f"a path in {name}")
        programs = map(os.path.abspath, filter(None, map(shutil.which, LOOKED_FOR)))  # they may be links
        found |= dict.fromkeys(map(Path, programs), "a program in PATH")
        for home in filter(None, (os.environ.get("XDG_CONFIG_HOME"), self._env.get("XDG_CONFIG_HOME"))):
            found[Path(os.path.abspath(home), "git", "config")] = "a file in XDG_CONFIG_HOME"
        python = sysconfig.get_paths()
        own = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []  # loaded at the next start, if it exists
        ours = (sys.executable, python["stdlib"], python["purelib"], str(Path(__file__).parents[3]), *own)
        found |= dict.fromkeys(map(Path, (*ours, *map(os.path.abspath, sys.path))), "this program")
        homes = {self._home, Path.home()}
        found |= dict.fromkeys((home / name for home in homes for name in OF_HOME), "a file of the home")
        files = {path: what for path, what in self._settings.named_programs().items() if not path.is_dir()}
        profiles = self._settings.profiles.values()
        settings_files: list[Path] = []  # of unconfined CLIs: what these name runs outside
        outside = {source for one in profiles if not one.confined for source in one.setting_sources}
        if any({"project", "local"} & {*one.setting_sources} for one in profiles):
            links = self._settings.sandbox.links.items()
            read = {name: at for name, at in links if "/.claude" in f"/{name}" or Path(name).name in INSTRUCTIONS}
            linked = {Path(os.path.abspath(at.expanduser())): f"sandbox.links {name}" for name, at in read.items()}
            files |= linked
            if outside - {"user"}:  # a link leads to such a file, or to a folder with some
                settings_files += [file for at in linked for file in (at, *(at / name for name in PROJECT_SETTINGS))]
        if "user" in outside:
            names = (*USER_SETTINGS, *GLOBAL_SETTINGS)  # or links, as to a folder of dotfiles
            shown = [self._place.config_dir / name for name in names]
            found |= dict.fromkeys((at for one in shown for at in (one, *one.glob("*"))), "settings of the CLI")
            settings_files.append(shown[0])
        for file in settings_files:
            with contextlib.suppress(OSError):
                if file.suffix == ".json" and file.is_file():
                    text = file.read_text("utf-8", "replace")
                    files |= {path: "settings of the CLI" for path in paths_in(text) if not path.is_dir()}
        return found | files

    def _check_names(self, way: Sequence[Path]) -> None:
        """Refuse names that confined agents could replace by links: of a mount's source and the links on its way."""
        ways = {*way, *map(self._disks.place, way[1:])}
        for name, profile in self._settings.profiles.items():
            for folder in profile.add_dirs if profile.confined else ():
                real = Path(os.path.realpath(folder))
                for written in (folder, real, *self._disks.shown(real).values()):
                    if any(at != written and at.is_relative_to(written) for at in ways):
                        raise SandboxError(
                            f"agents of profile {name} write {folder}, and could replace {way[0]}: {MOVE}"
                        )

    def _mount_readable(self) -> None:
        """Read-only: the CLI, targets of links, files that the CLI's environment names."""
        env, place, profile = self._env, self._place, self._profile
        shown = [place.config_dir / name for name in USER_SETTINGS] if "user" in profile.setting_sources else []
        for at in (at for at in shown if not os.path.lexists(at)):  # every one must be a mount: see `Sandboxes.private`
            empty = None if not at.suffix else self._own_file(f"empty{at.suffix}", "{}" if at.suffix == ".json" else "")
            self._mounts.append(_Mount("--tmpfs" if empty is None else "--ro-bind", at, empty))
        shown += [*_software(self._program, env), *(Path(env[name]) for name in NAMED_FILES if env.get(name))]
        clouds = {folder for start, folder in CLOUD_FOLDERS.items() if any(name.startswith(start) for name in env)}
        shown += [self._home / folder for folder in sorted(clouds)]
        named = [*self._settings.sandbox.links.values()] + [one for one in (profile.mcp_config,) if one is not None]
        paths = (Path(os.path.abspath(one.expanduser())) for one in (*shown, *named))
        ways = {path: _with_links(path) for path in paths}
        # A writable folder is already visible, and a mount must not depend on a name that the agent can change.
        ways = {path: way for path, way in ways.items() if not any(map(self._is_writable, way[:-1]))}
        for way in ways.values():  # a file in a writable folder is not mounted
            self._check_names(way[:-1] if self._is_writable(way[-1]) else way)
        for at in (at for one in named for at in ways.get(Path(os.path.abspath(one.expanduser())), ())):
            for other, what in self._shared.items():
                real, there = (self._disks.place(path.resolve()) for path in (at, other))
                if at.is_relative_to(other) or real.is_relative_to(there):
                    raise SandboxError(f"a confined agent would be shown {at}, which lies in {other} ({what}): {MOVE}")
        for at in dict.fromkeys(way[-1] for way in ways.values()):
            if at.exists() and not _in_system(at) and not self._is_writable(at):
                self._mounts.append(_Mount("--ro-bind", at, at))
        made = {mount.at for mount in self._mounts}
        for link in dict.fromkeys(link for way in ways.values() for link in way[1:-1]):
            if link not in made and not self._is_visible(link):
                self._mounts.append(_Mount("--symlink", link, Path(os.readlink(link))))

    def _find_secrets(self) -> None:
        """Refuse to show secret files of the settings, and list them to be checked inside."""
        names = ("key", "chains.sqlite3", "logs/proxy.log")
        sources = [(one.at, one.source.resolve()) for one in self._mounts if one.source and one.option != "--symlink"]
        shown = {
            at / below.relative_to(source): place
            for at, source in sources
            for below, place in self._disks.shown(source).items()
        }

        def seen(path: Path) -> set[Path]:
            """The paths at which it is shown inside: by bind mounts and links outside there may be several."""
            real = self._disks.place(path.resolve())
            return {at / real.relative_to(place) for at, place in shown.items() if real.is_relative_to(place)}

        made = {mount.at for mount in self._mounts}
        for path in (*self._shared, self._home):
            self._mounts += [_Mount("--tmpfs", at) for at in seen(path) - made]
        var = self._settings.var
        self.secrets = {str(at / name): "of --var" for at in {var, var.resolve(), *seen(var)} for name in names}
        for path, what in self._settings.secret_files().items():
            if path.exists() and (visible := sorted(filter(self._is_visible, seen(path)))):
                raise SandboxError(
                    f"a confined agent could read {visible[0]} ({what}), so its CLI is not started: {MOVE}"
                )
            self.secrets |= dict.fromkeys(map(str, {path, path.resolve(), *seen(path)}), what)

    def _mount_parents(self) -> None:
        """Mount an empty folder at the parents of mounts below the CLI's own directory. The agent can write there, and
        could else replace such a parent by a link."""
        config_dir = self._place.config_dir
        deeper = {one.at.relative_to(config_dir) for one in self._mounts if one.at.is_relative_to(config_dir)}
        tops = {config_dir / below.parts[0] for below in deeper if len(below.parts) > 1}
        self._mounts += [_Mount("--tmpfs", at) for at in sorted(tops - {one.at for one in self._mounts})]

    def _remove_links(self) -> None:
        """Remove links on the way to mounts below the CLI's own directory and TMPDIR. The agent can write there, and
        bubblewrap creates missing folders wherever a link leads."""
        place = self._place
        for mount in self._mounts:
            for inside, outside in ((place.config_dir, place.private), (place.tmpdir, place.tmpdir)):
                if mount.at.is_relative_to(inside):
                    below = mount.at.relative_to(inside)
                    for path in (outside / part for part in (*reversed(below.parents), below)):
                        if path != outside and path.is_symlink():
                            path.unlink()

    def _innermost(self, path: Path) -> _Mount | None:
        """The innermost mount that the path is in."""
        over = [mount for mount in self._mounts if path.is_relative_to(mount.at) and mount.option != "--symlink"]
        return max(over, key=lambda mount: len(mount.at.parts), default=None)

    def _is_writable(self, path: Path) -> bool:
        over = self._innermost(path)
        return over is not None and over.at in self._writable

    def _is_visible(self, path: Path) -> bool:
        over = self._innermost(path)
        return over is not None and over.source is not None


def _in_system(path: Path) -> bool:
    """Whether it is in a system folder for software, links resolved."""
    real = Path(os.path.realpath(path))
    return any(map(real.is_relative_to, SYSTEM)) and not any(map(real.is_relative_to, HIDDEN_SYSTEM))


def _users(home: Path) -> dict[str, str]:
    """/etc/passwd and /etc/group with nobody but this user."""
    uid, gid = os.getuid(), os.getgid()
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:  # a container's uid without a name
        name = "agent"
    at = str(home).replace(":", "")
    return {
        "passwd": f"{name}:x:{uid}:{gid}::{at}:/bin/sh\nnobody:x:65534:65534::/nonexistent:/usr/sbin/nologin\n",
        "group": f"{name}:x:{gid}:\nnogroup:x:65534:\n",
    }


def _with_links(path: Path) -> list[Path]:
    """The path, the links on the way to its real path, and that real path."""
    return [path, *links_to(path), Path(os.path.realpath(path))]


def _software(program: Path, env: Mapping[str, str]) -> Iterable[Path]:
    """The CLI; for a script also its modules and interpreter."""
    yield program
    above = [parent for parent in Path(os.path.realpath(program)).parents if parent.name == "node_modules"]
    if above:
        yield above[-1]
    if (node := shutil.which("node", path=env.get("PATH"))) is not None:
        yield Path(node)
        prefix = Path(os.path.realpath(node)).parent.parent
        yield from (prefix / name for name in NODE if (prefix / name).exists())
