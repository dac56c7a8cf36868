"""As a service of `Type=notify`: systemd hears that it is ready, lives and ends; and what the unit gives it."""

from __future__ import annotations

import asyncio
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

SOON = 30
UNIT = ROOT / "deploy" / "cli-session-proxy.service"
CLUSTER = ROOT / "deploy" / "cluster.conf"
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


def test_systemd_takes_every_line_of_what_a_host_of_several_adds(tmp_path: Path) -> None:
    unit, more = tmp_path / UNIT.name, tmp_path / f"{UNIT.name}.d"
    more.mkdir()
    for path, text in ((unit, UNIT.read_text()), (more / "cluster.conf", CLUSTER.read_text())):
        path.write_text(re.sub(r"^ExecStart=/\S+", f"ExecStart={sys.executable}", text, flags=re.M))
    done = subprocess.run([analyzer(), "verify", str(unit)], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_unit_asks_for_a_key_and_for_signs_of_life() -> None:
    text = UNIT.read_text()
    assert re.search(r"^ExecStart=.* serve --make-key$", text, re.M)
    for line in ("Type=notify", "NotifyAccess=main", "NoNewPrivileges=yes", "CapabilityBoundingSet="):
        assert f"\n{line}\n" in text
    assert re.search(r"^WatchdogSec=\d+$", text, re.M)
