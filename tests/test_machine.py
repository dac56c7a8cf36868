"""How much memory there is: the machine's, or what its control groups leave of it."""

from __future__ import annotations

import errno
import os
import re
import resource
import socket
import subprocess
import sys
from pathlib import Path
from typing import get_args

import psutil
import pytest

from cli_session_proxy import machine
from cli_session_proxy.backends.claude.process import guardian_program
from cli_session_proxy.settings import Settings

from .backends.claude.process.helpers import free_descriptors
from .conftest import ROOT

MB = 1024 * 1024


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "self").mkdir()
    (tmp_path / "meminfo").write_text(f"MemTotal:       {1000 * 1024} kB\nMemFree:        12 kB\n")
    return tmp_path


def limit(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_without_groups_it_is_the_machines(proc: Path, tmp_path: Path) -> None:
    assert machine.memory(proc, tmp_path / "none") == 1000 * MB


def test_a_path_has_one_place_whatever_is_mounted_where(proc: Path) -> None:
    """Of a folder below another mount, below one that hides it, with a name of odd characters, and without a row."""
    mounts = "1 0 8:1 / / rw - ext4\n2 1 8:1 /srv/a\\040b /data\\134x rw - ext4\n3 1 8:2 /@home /home rw - btrfs\n"
    mounts += "4 3 8:1 /srv /home/ada rw - ext4\n5 1 0:9 / /home rw - tmpfs\n6 1 0:4 net:[7] /run/n rw - nsfs\n"
    (proc / "self" / "mountinfo").write_text(mounts.replace("5 1", "5 3"))
    found = machine.Mounts(proc)
    assert found.place(Path("/srv/a b/c")) == found.place(Path(r"/data\x/c"))
    assert found.place(Path("/home/ada/c")) == Path("/0:9/ada/c")
    assert found.shown(Path("/run")) == {Path("/run"): Path("/8:1/run"), Path("/run/n"): Path("/0:4/net:[7]")}
    (proc / "self" / "mountinfo").write_text("")
    assert machine.Mounts(proc).place(Path("/a")) == Path("/a")
    (proc / "self" / "mountinfo").write_text("2 1 8:1 / /proc rw - proc\n3 3 8:3 / /tmp rw - rootfs\n")
    found = machine.Mounts(proc)
    assert found.place(Path("/tmp/x")) == Path("/8:3/x")
    assert found.place(Path("/var/x")) == Path("/var/x")


def test_a_port_of_localhost_is_free_beside_who_listens_at_one_address_only() -> None:
    both = ("127.0.0.1", "::1")
    with socket.socket() as four, socket.socket(socket.AF_INET6) as six:
        four.bind(("127.0.0.1", 0))
        port = four.getsockname()[1]
        four.listen()
        try:
            six.bind(("::1", port))
        except OSError:
            assert machine.free_for_others(both, port) is None  # no ::1 here, or somebody has it
            return
        six.listen()
        assert machine.free_for_others(both, port) is None
        six.close()
        assert machine.free_for_others(both, port) == "::1"
        four.close()
        assert machine.free_for_others(both, port) is None  # nothing listens


def test_a_port_that_its_server_shares_is_free_for_others() -> None:
    for shares in (False, True):
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shares)
            server.bind(("127.0.0.1", 0))
            server.listen()
            port = server.getsockname()[1]
            assert machine.free_for_others(["127.0.0.1"], port) == ("127.0.0.1" if shares else None)


def test_the_smallest_limit_of_the_groups_above_counts(proc: Path, tmp_path: Path) -> None:
    groups = tmp_path / "cgroup"
    (proc / "self" / "cgroup").write_text("0::/a/b\n")
    limit(groups / "a" / "b" / "memory.max", "max\n")
    limit(groups / "a" / "memory.max", f"{300 * MB}\n")
    assert machine.memory(proc, groups) == 300 * MB


def test_version_1_has_a_tree_of_its_own(proc: Path, tmp_path: Path) -> None:
    groups = tmp_path / "cgroup"
    (proc / "self" / "cgroup").write_text("7:blkio:/x\n4:memory:/x\n0::/\n")
    limit(groups / "memory" / "x" / "memory.limit_in_bytes", f"{200 * MB}\n")
    limit(groups / "memory" / "memory.limit_in_bytes", "9223372036854771712\n")
    assert machine.memory(proc, groups) == 200 * MB


def test_processes_are_bounded_by_the_user_and_by_the_groups(proc: Path, tmp_path: Path) -> None:
    groups = tmp_path / "cgroup"
    (proc / "self" / "cgroup").write_text("0::/a/b\n")
    of_user, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    assert machine.tasks(proc, groups) == (None if of_user == resource.RLIM_INFINITY else of_user)
    limit(groups / "a" / "b" / "pids.max", "max\n")
    limit(groups / "a" / "pids.max", "60\n")
    assert machine.tasks(proc, groups) == 60


def test_without_proc_it_is_what_the_system_says(macos: None) -> None:
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    assert machine.memory() == pages * size
    assert Settings().max_memory == pages * size // 2
    assert machine.cores() == os.cpu_count()


def test_like_macos_our_own_code_finds_no_proc_and_psutil_does(macos: None) -> None:
    assert guardian_program.status(os.getpid()) is None
    assert psutil.Process().status()


def test_where_nobody_says_it_is_not_guessed(macos: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: str) -> int:
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr(os, "sysconf", unknown)
    assert machine.memory() is None


@pytest.fixture
def affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", 64), ("150000 100000", 2), ("20000 100000", 1)])
def test_a_containers_quota_is_worth_so_many_cores(
    proc: Path, tmp_path: Path, affinity: None, quota: str, cores: int
) -> None:
    groups = tmp_path / "cgroup"
    (proc / "self" / "cgroup").write_text("0::/a/b\n")
    limit(groups / "a" / "b" / "cpu.max", "max 100000\n")
    limit(groups / "a" / "cpu.max", f"{quota}\n")
    assert machine.cores(proc, groups) == cores


def test_a_quota_of_version_1_counts_as_well(proc: Path, tmp_path: Path, affinity: None) -> None:
    groups = tmp_path / "cgroup"
    (proc / "self" / "cgroup").write_text("3:cpu,cpuacct:/x\n4:memory:/x\n0::/\n")
    limit(groups / "cpu" / "cpu.cfs_quota_us", "-1\n")
    limit(groups / "cpu" / "x" / "cpu.cfs_quota_us", "300000\n")
    limit(groups / "cpu" / "x" / "cpu.cfs_period_us", "100000\n")
    assert machine.cores(proc, groups) == 3


def test_without_groups_the_cores_are_those_we_may_run_on(tmp_path: Path, affinity: None) -> None:
    assert machine.cores(tmp_path, tmp_path) == 64


def test_a_system_is_known_by_its_platform_and_its_c_library(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine._system() == "linux"

    def as_musl_does(name: str) -> str | None:
        raise OSError(errno.EINVAL, name)

    monkeypatch.setattr(os, "confstr", as_musl_does)
    assert machine._system() == "musl"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert machine._system() == "macos"


# What a few turns with documents of 20 MB do: a block that is freed, then some, each with smaller ones behind it.
LARGE_TURNS = """
from cli_session_proxy.machine import return_freed_memory
import psutil
return_freed_memory()
block = bytearray(31 << 20)
del block
blocks, kept = [], []
for _ in range(10):
    blocks.append(b"x" * (20 << 20))
    kept.append(b"x" * 100_000)
before = psutil.Process().memory_info().rss
blocks.clear()
print(before - psutil.Process().memory_info().rss)
"""


@pytest.mark.skipif(machine.SYSTEM != "linux", reason="other C libraries decide by themselves")
def test_freed_memory_goes_back_to_the_system() -> None:
    freed = subprocess.run([sys.executable, "-c", LARGE_TURNS], capture_output=True, text=True, check=True, cwd=ROOT)
    assert int(freed.stdout) >= 190 * MB


OF_OTHERS = {
    "linux": {"lsof", "apk", "sntp"},
    "musl": {"apt", "timedatectl", "ss", "systemd", "lsof"},
    "macos": {"apt", "timedatectl", "ss", "systemd", "apk"},
}


@pytest.mark.parametrize("system", get_args(machine.System))
def test_each_system_is_told_commands_of_its_own(system: machine.System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "SYSTEM", system)
    tasks = set(get_args(machine.Task)) - ({"install bubblewrap"} if system == "macos" else set())
    for task in tasks:
        assert not set(machine.command_to(task, port=8787).split()) & OF_OTHERS[system]


def test_a_command_is_named_when_no_descriptor_is_free() -> None:
    with free_descriptors(0):
        assert machine.command_to("allow more open files")


def test_no_other_file_names_a_command_of_one_system() -> None:
    """So that a message on one system never names another one's."""
    of_one = re.compile(r"\b(?:apt(?:-get)? install|apk add|brew install|lsof -|ss -l|netstat -|timedatectl|sntp -)")
    files = [path for path in (ROOT / "cli_session_proxy").rglob("*.py") if of_one.search(path.read_text())]
    assert [path.name for path in files] == ["machine.py"]
