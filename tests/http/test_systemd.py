"""As a service of `Type=notify`: systemd hears that it is ready, lives and ends; and what the unit gives it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cli_session_proxy.http.systemd import Systemd

from ..conftest import ROOT, required
from . import unit_calls

SOON = 60
UNIT = ROOT / "deploy" / "cli-session-proxy.service"
CLUSTER = ROOT / "deploy" / "cluster.conf"
CONFINED = ROOT / "deploy" / "confined.conf"
# "systemd-analyze security" counts from 0 (nothing exposed) to 10.
EXPOSURE = 3.0


@contextmanager
def manager(path: str) -> Iterator[socket.socket]:
    """systemd's end of the socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(path)
        heard.settimeout(SOON)
        yield heard


def states(heard: socket.socket) -> dict[str, str]:
    return dict(line.split("=", 1) for line in heard.recv(4096).decode().split("\n"))


def test_systemd_hears_that_it_is_ready_that_it_lives_and_that_it_ends(short_tmp: Path) -> None:
    with manager(str(short_tmp / "notify")) as heard:
        env = {"PATH": os.environ["PATH"], "NOTIFY_SOCKET": str(short_tmp / "notify"), "WATCHDOG_USEC": "100000"}
        args = [sys.executable, "-m", "cli_session_proxy", "serve", "--port", "0", "--var", str(short_tmp / "var")]
        args += ["--claude-bin", "/no/claude", "--claude-config-dir", str(short_tmp / "config")]
        with subprocess.Popen(args, env=env, cwd=short_tmp, stdout=subprocess.DEVNULL) as server:
            try:
                assert states(heard)["READY"] == "1"
                assert (short_tmp / "var" / "serve.json").exists()
                assert [states(heard) for _ in range(3)] == [{"WATCHDOG": "1"}] * 3
                server.send_signal(signal.SIGTERM)
                told = states(heard)
                while told == {"WATCHDOG": "1"}:
                    told = states(heard)
                assert told["STOPPING"] == "1"
                assert server.wait(SOON) == 0
            finally:
                server.kill()


def test_a_name_without_a_file_is_one_too() -> None:
    name = f"cli-session-proxy-test-{os.getpid()}"
    with manager(f"\0{name}") as heard:
        Systemd.of({"NOTIFY_SOCKET": f"@{name}"}).tell(READY="1", STATUS="x")
        assert states(heard) == {"READY": "1", "STATUS": "x"}


@pytest.mark.parametrize(
    ("environ", "interval"),
    [
        ({"WATCHDOG_USEC": "60000000"}, 30.0), ({"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": str(os.getpid())}, 30.0),
        ({"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": "1"}, None), ({}, None), ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "x"}, None),
    ],
)  # fmt: skip
def test_signs_of_life_are_told_twice_as_often_as_they_are_asked_for(
    environ: dict[str, str], interval: float | None
) -> None:
    assert Systemd.of({"NOTIFY_SOCKET": "/x", **environ}).interval == interval
    assert Systemd.of(environ) == Systemd(None, None)


async def test_nobody_who_listens_is_no_error(tmp_path: Path) -> None:
    Systemd(None).tell(READY="1")
    Systemd(str(tmp_path / "nobody")).tell(READY="1")
    ready = asyncio.Event()
    ready.set()
    await asyncio.wait_for(Systemd(None).live(ready), SOON)


def analyzer() -> str:
    found = shutil.which("systemd-analyze")
    return str(required(Path(found) if found else None, "apt install systemd", what="systemd-analyze"))


def test_the_unit_leaves_little_exposed() -> None:
    done = subprocess.run(
        [analyzer(), "security", "--offline=true", str(UNIT)], check=True, capture_output=True, text=True
    )
    found = re.search(r"Overall exposure level for \S+: ([0-9.]+)", done.stdout)
    assert found
    assert float(found[1]) <= EXPOSURE


def test_systemd_takes_every_line_of_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    unit.write_text(re.sub(r"^ExecStart=\S+", f"ExecStart={sys.executable}", UNIT.read_text(), flags=re.M))
    done = subprocess.run([analyzer(), "verify", str(unit)], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("added", [CLUSTER, CONFINED], ids=["of several hosts", "for confined agents"])
def test_systemd_takes_every_line_of_a_drop_in(tmp_path: Path, added: Path) -> None:
    unit, more = tmp_path / UNIT.name, tmp_path / f"{UNIT.name}.d"
    more.mkdir()
    for path, text in ((unit, UNIT.read_text()), (more / added.name, added.read_text())):
        path.write_text(re.sub(r"^ExecStart=/\S+", f"ExecStart={sys.executable}", text, flags=re.M))
    done = subprocess.run([analyzer(), "verify", str(unit)], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_confined_agents_run_by_the_system_calls_that_the_unit_allows_with_its_drop_in(
    tmp_path: Path, claude_2: Path
) -> None:
    """As a user who has no privileges. systemd itself cannot be run here."""
    analyzer()
    if shutil.which("bwrap") is None or not unit_calls.NUMBERS.exists() or os.uname().machine != "x86_64":
        pytest.skip("needs bubblewrap, and the numbers of system calls")
    config, less = tmp_path / "proxy.toml", tmp_path / "less.conf"
    config.write_text('[profiles.coder]\ntools = ["Bash"]\nconfined = true\n')
    config.chmod(0o600)
    less.write_text(CONFINED.read_text().replace("capset ", ""))
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "ANTHROPIC_API_KEY": "sk-ant-fake-for-tests"}
    env |= {"ANTHROPIC_BASE_URL": "http://127.0.0.1:9", "CLI_SESSION_PROXY_CLAUDE_BIN": str(claude_2)}
    env |= {"CLI_SESSION_PROXY_CONFIG": str(config), "CLI_SESSION_PROXY_VAR": str(tmp_path / "var")}
    env |= {"CLI_SESSION_PROXY_CLAUDE_CONFIG_DIR": str(tmp_path / "claude"), "CLI_SESSION_PROXY_PORT": "0"}
    nobody = ["unshare", "--user", "--map-user=1000", "--map-group=1000", "setpriv", "--bounding-set=-all"]
    found = []
    for added in (less, CONFINED):
        done = subprocess.run(
            [*nobody, "--inh-caps=-all", sys.executable, unit_calls.__file__, str(UNIT), str(added), "--",
             sys.executable, "-m", "cli_session_proxy", "doctor", "--json"],
            env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        found.append(next(one for one in json.loads(done.stdout) if one["check"] == "boundary"))
    assert "capset" in str(found[0])
    assert (found[1]["level"], found[1]["says"]) == ("ok", "profile coder: the CLI runs confined")


def test_nothing_of_proc_is_covered_where_bubblewrap_mounts_another_one() -> None:
    """The kernel refuses it then. systemd covers parts of /proc by these; /proc/sys/kernel/hostname by the first."""
    for name in ("ProtectHostname", "ProtectKernelLogs", "ProtectKernelTunables"):
        assert f"\n{name}=no\n" in CONFINED.read_text()
    assert not re.search(r"^ProcSubset=", UNIT.read_text(), re.M)


def test_the_unit_asks_for_a_key_and_for_signs_of_life() -> None:
    text = UNIT.read_text()
    assert re.search(r"^ExecStart=.* serve --make-key$", text, re.M)
    # By default systemd stops the whole service if the kernel ends one of its processes for lack of memory.
    told = "OOMPolicy=continue"
    for line in ("Type=notify", "NotifyAccess=main", "NoNewPrivileges=yes", "CapabilityBoundingSet=", told):
        assert f"\n{line}\n" in text
    assert re.search(r"^WatchdogSec=\d+$", text, re.M)
