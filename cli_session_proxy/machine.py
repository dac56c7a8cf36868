"""The resources and commands of this machine or container."""

from __future__ import annotations

import ctypes
import errno
import math
import os
import re
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from .errors import ConfigError

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
MOST_LINKS = 40  # links on the way to one file, as in the kernel

System = Literal["linux", "musl", "macos"]
Task = Literal["install the CLI", "install bubblewrap", "allow more open files", "see who listens", "set the clock"]
# The command for each task. A system without an entry uses Linux's command.
_COMMANDS: Mapping[Task, Mapping[System, str]] = {
    "install the CLI": {
        "linux": "npm install -g @anthropic-ai/claude-code",
        "musl": "apk add nodejs npm libgcc libstdc++ ripgrep && npm install -g @anthropic-ai/claude-code",
    },
    "install bubblewrap": {"linux": "apt install bubblewrap", "musl": "apk add bubblewrap"},
    "allow more open files": {
        "linux": "ulimit -n 4096, or LimitNOFILE in a systemd unit",
        "musl": "ulimit -n 4096",
        "macos": "ulimit -n 4096, or NumberOfFiles in a LaunchAgent",
    },
    "see who listens": {
        "linux": "ss -ltnp 'sport = :{port}'",
        "musl": "netstat -ltnp | grep ':{port} '",
        "macos": "lsof -nP -iTCP:{port} -sTCP:LISTEN",
    },
    "set the clock": {
        "linux": "timedatectl set-ntp true",
        "musl": "ntpd -q -p pool.ntp.org",
        "macos": "sudo sntp -sS time.apple.com",
    },
}


def _system() -> System:
    """By the C library of this process, as Debian can have both installed."""
    if sys.platform == "darwin":
        return "macos"
    try:
        return "linux" if os.confstr("CS_GNU_LIBC_VERSION") else "musl"
    except (OSError, ValueError, AttributeError):  # AttributeError: Windows, see `check_system`
        return "musl"


# This system, detected once.
SYSTEM = _system()


def command_to(task: Task, **values: object) -> str:
    """This system's command for a task, for a message."""
    commands = _COMMANDS[task]
    return commands.get(SYSTEM, commands["linux"]).format(**values)


def check_system() -> None:
    """Raises `ConfigError` on Windows: the engine needs flock, process groups and POSIX permissions."""
    if sys.platform == "win32":
        raise ConfigError(
            "cli-session-proxy runs on Linux and macOS; on Windows run it inside WSL (`wsl --install`, then install it "
            "there): programs of Windows reach it at the same address, http://127.0.0.1:8787"
        )


def absolute(path: str) -> str:
    """The PATH without relative folders, which would depend on the directory a program starts in."""
    return os.pathsep.join(filter(os.path.isabs, path.split(os.pathsep)))


def memory(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Bytes of memory: the machine's, or the lowest limit of our control groups. None if unknown."""
    try:
        words = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
        total = int(words["MemTotal"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        try:  # macOS, and a container without /proc
            total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (OSError, ValueError):
            return None
        if total <= 0:
            return None
    limits = (
        _numbers(group / "memory.max", group / "memory.limit_in_bytes") for group in _groups("memory", proc, cgroups)
    )
    return min([total, *(limit[0] for limit in limits if limit)])


def tasks(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """The most processes and threads: of this user, or the lowest limit of our control groups. None: no limit."""
    import resource  # noqa: PLC0415 - Windows has none, and must get as far as `check_system`

    allowed, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    limits = [_numbers(group / "pids.max") for group in _groups("pids", proc, cgroups)]
    limits += [[allowed]] if allowed != resource.RLIM_INFINITY else []
    return min((limit[0] for limit in limits if limit), default=None)


def cores(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Usable cores: the least of the machine's cores, our CPU affinity, and the quotas of our control groups."""
    free = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = []
    for group in _groups("cpu", proc, cgroups):
        share = _numbers(group / "cpu.max") or [
            *_numbers(group / "cpu.cfs_quota_us"),
            *_numbers(group / "cpu.cfs_period_us"),
        ]
        if len(share) == 2 and share[0] > 0:
            quotas.append(math.ceil(share[0] / share[1]))
    return min([free, *quotas])


def links_to(path: Path) -> Iterator[Path]:
    """The links on the way to the real path."""
    for _ in range(MOST_LINKS):
        link = next((at for at in (*reversed(path.parents), path) if at.is_symlink()), None)
        if link is None:
            return
        yield link
        path = Path(os.path.abspath(link.parent / os.readlink(link) / path.relative_to(link)))


class Mounts:
    """What is mounted where. Two paths of one folder (bind mounts) have one place: its disk, and the path there.

    Not known: the layers of an overlay, and one folder of a network that is mounted twice.
    """

    def __init__(self, proc: Path = PROC) -> None:
        self._mounts = {"": (Path("/"), Path("/"))}  # by id: the place, and the path at which it is mounted
        self._inner: dict[tuple[str, Path], str] = {}  # by the id of the mount around it, and that path
        try:
            lines = os.fsdecode((proc / "self" / "mountinfo").read_bytes()).split("\n")
        except OSError:  # macOS, and a container without /proc
            lines = []
        rows = [line.split(" ")[:5] for line in lines if line]
        ids = {number for number, *_ in rows}
        for number, outer, disk, *names in rows:
            root, at = (re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), name) for name in names)
            self._mounts[number] = Path(f"/{disk}/{root}"), Path(at)
            self._inner[outer if outer in ids and outer != number else "", Path(at)] = number

    def place(self, path: Path) -> Path:
        """The place of an absolute path that leads over no link."""
        mount = ""
        for at in (*reversed(path.parents), path):
            while (inner := self._inner.get((mount, at))) is not None:
                mount = inner
        place, at = self._mounts[mount]
        return place / path.relative_to(at)

    def shown(self, folder: Path) -> dict[Path, Path]:
        """The places that are seen in a folder, by their paths: its own, and those that are mounted below it."""
        below = (at for _, at in self._mounts.values() if str(at).startswith(f"{folder}/"))
        return {at: self.place(at) for at in (folder, *below)}


def free_for_others(addresses: Sequence[str], port: int) -> str | None:
    """An address of a server on loopback at which another program of this user could listen, too: the server listens
    at another one only, or shares its port (SO_REUSEPORT). None if there is none, or if no server listens."""
    free, is_used = None, False
    for address in addresses:
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):  # the first: a connection that was closed is nobody's
            try:
                with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
                    probe.setsockopt(socket.SOL_SOCKET, option, 1)
                    if ":" in address:
                        probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                    probe.bind((address, port))
            except OSError as exc:
                if exc.errno != errno.EADDRINUSE:  # there is no such address, or this user may not have the port
                    break
                is_used = True
            else:
                free = address
                break
    return free if is_used else None


def _groups(kind: str, proc: Path, cgroups: Path) -> Iterator[Path]:
    """Our control group and its parents: of cgroup v2, and of this controller in v1."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if kinds and kind not in kinds.split(","):
            continue
        root = cgroups / kind if kinds else cgroups
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            yield folder
            if folder == root:
                break


def _numbers(*files: Path) -> list[int]:
    """The numbers of the first file that holds only numbers."""
    for file in files:
        try:
            return [int(word) for word in file.read_text().split()]
        except (OSError, ValueError):  # no such group here, or "max"
            continue
    return []


# Bytes from which glibc maps a block of memory by itself, so that it goes back to the system when it is freed. Else
# glibc raises this to the size of the blocks it has seen: after documents of 20 MB it kept 310 MB with 105 MB in use.
MAPPED_ALONE = 1024 * 1024
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h


def return_freed_memory() -> None:
    """Let this process give freed memory back to the system. Elsewhere than with glibc nothing is done."""
    if SYSTEM == "linux":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, MAPPED_ALONE)
        libc.mallopt(_M_TRIM_THRESHOLD, 2 * MAPPED_ALONE)  # twice, as glibc sets it itself


def half_of_memory() -> int | None:
    total = memory()
    return None if total is None else total // 2


def interpreter() -> str:
    """The path of Python. In a frozen or embedding program `sys.executable` is that program."""
    name = Path(sys.executable or "").name
    embedded = getattr(sys, "frozen", False) or not name.startswith(("python", "pypy"))
    return (shutil.which("python3") or "python3") if embedded else sys.executable
