"""`doctor` names each staged fault and its mend, and touches nothing."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from cli_session_proxy import cli, machine
from cli_session_proxy.backends.claude.process.environment import login_command
from cli_session_proxy.backends.claude.process.guardian import start_time
from cli_session_proxy.commands import doctor
from cli_session_proxy.commands.doctor import Checkup, examine
from cli_session_proxy.engine.ownership import Instances
from cli_session_proxy.settings import Profile, Settings
from cli_session_proxy.stores.sqlite.store import FILE

from ..test_cli import fill
from ..wrappers import KINDS, wrapped

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def settings(tmp_path: Path, claude_2: Path) -> Settings:
    env = {"ANTHROPIC_API_KEY": "sk-ant-fake-for-tests", "HOME": str(tmp_path / "home")}
    return Settings(
        port=0, var=tmp_path / "var", claude_config_dir=tmp_path / "config", claude_bin=claude_2, claude_env=env
    )


async def found(settings: Settings) -> dict[str, Checkup]:
    return {one.check: one async for one in examine(settings)}


async def fault(settings: Settings, check: str, level: str = "error") -> Checkup:
    """The one finding that is not ok."""
    every = await found(settings)
    assert [name for name, one in every.items() if one.level != "ok"] == [check]
    assert every[check].level == level
    assert every[check].mend
    return every[check]


def changed(settings: Settings, **values: object) -> Settings:
    return settings.model_copy(update=values)


async def test_a_sound_machine_is_ok_and_nothing_is_made(settings: Settings) -> None:
    every = await found(settings)
    assert [one for one in every.values() if one.level != "ok" or one.mend] == []
    assert "2.1" in every["claude"].says
    assert not settings.var.exists()


async def test_1_a_missing_cli(settings: Settings, tmp_path: Path) -> None:
    one = await fault(changed(settings, claude_bin=tmp_path / "none"), "claude")
    assert "npm install -g @anthropic-ai/claude-code" in one.mend


async def test_2_a_program_that_is_no_cli(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "claude").write_text("#!/bin/sh\necho hello\n")
    (tmp_path / "claude").chmod(0o755)
    one = await fault(changed(settings, claude_bin=tmp_path / "claude"), "claude")
    assert "--claude-bin" in one.mend


async def test_3_no_login(settings: Settings, claude_2: Path) -> None:
    one = await fault(changed(settings, claude_env={"HOME": settings.claude_env["HOME"]}), "login")
    assert login_command(changed(settings, claude_bin=claude_2)) in one.mend


async def test_4_an_old_cli(settings: Settings, claude_1: Path) -> None:
    one = await fault(changed(settings, claude_bin=claude_1), "capabilities", "warning")
    assert one.says.startswith("Claude CLI 1.0.120 works, but cannot keep a session's id, ")
    assert "offer the client's own tools" in one.says


async def test_4_a_cli_that_is_too_old_to_be_used(settings: Settings, tmp_path: Path) -> None:
    claude = tmp_path / "claude"  # 1.0.30 has no --session-id
    claude.write_text(
        "#!/bin/sh\ncase $1 in --version) echo '1.0.30 (Claude Code)';; *) echo '  -p, --print  x';; esac\n"
    )
    claude.chmod(0o755)
    one = await fault(changed(settings, claude_bin=claude), "claude")
    assert one.says.startswith(f"Claude CLI 1.0.30 at {claude} is too old, as it has no option --session-id")
    assert "version 1.0.60 and newer can" in one.says
    assert "npm install -g @anthropic-ai/claude-code" in one.mend


@pytest.mark.parametrize("kind", KINDS)
async def test_4_a_script_that_starts_a_new_cli_is_no_old_one(
    kind: str, settings: Settings, claude_2: Path, tmp_path: Path
) -> None:
    every = await found(changed(settings, claude_bin=wrapped(claude_2, tmp_path / "bin", kind)))
    assert [one for one in every.values() if one.level != "ok"] == []


async def test_5_a_config_dir_that_takes_no_files(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "config").write_text("a file")
    one = await fault(settings, "config dir")
    assert one.mend.startswith(f"mv {tmp_path}/config")
    assert "--claude-config-dir" in one.mend


async def test_6_a_sandbox_that_leads_elsewhere(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "var" / "sandbox").mkdir(parents=True)
    (tmp_path / "var" / "sandbox" / "agents").symlink_to(tmp_path)
    one = await fault(settings, "sandbox")
    assert one.mend.startswith("mv ")


async def test_7_a_full_disk(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: Usage(10**9, 10**9 - 10**6, 10**6))
    one = await fault(settings, "disk")
    assert "df -h" in one.mend
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: Usage(10**10, 0, 500 * doctor.MB))
    await fault(settings, "disk", "warning")


async def test_8_a_damaged_store(settings: Settings) -> None:
    settings.var.mkdir()
    (settings.var / FILE).write_bytes(b"not a database, but long enough to look like one" * 100)
    one = await fault(settings, "store")
    assert ".recover" in one.mend


async def test_9_a_store_of_a_newer_program(settings: Settings) -> None:
    await as_thread(fill, settings.var, "a")
    with closing(sqlite3.connect(settings.var / FILE)) as conn, conn:
        conn.execute("UPDATE meta SET value = '99' WHERE name = 'schema_version'")
    one = await fault(settings, "store")
    assert "upgrade" in one.mend


async def test_10_a_last_turn_in_the_future(settings: Settings) -> None:
    await as_thread(fill, settings.var, "a")
    with closing(sqlite3.connect(settings.var / FILE)) as conn, conn:
        conn.execute("UPDATE agents SET last_at = ?", [time.time() + 86400])
    one = await fault(settings, "clock")
    assert "future" in one.says


async def test_11_a_port_of_another_program(settings: Settings) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        one = await fault(changed(settings, port=taken.getsockname()[1]), "port")
    assert "--port" in one.mend


async def test_12_cli_processes_of_a_dead_proxy(settings: Settings) -> None:
    dead = Instances(settings.var)
    settings.var.mkdir()
    dead.enter()
    with started("-c", "input()") as stray:
        dead.on_spawn(stray.pid, start_time(stray.pid), settings.var)
        dead.on_spawn(os.getpid(), "another process that had this number", settings.var)
        assert (await found(settings))["processes"].level == "ok"
        assert dead._fd is not None
        os.close(dead._fd)  # its proxy dies
        one = await fault(settings, "processes", "warning")
        assert one.mend.startswith(f"kill {stray.pid} ")
        stray.communicate()


async def test_13_a_link_to_nowhere(settings: Settings, tmp_path: Path) -> None:
    links = settings.sandbox.model_copy(update={"links": {"skills": tmp_path / "none"}})
    one = await fault(changed(settings, sandbox=links), "sandbox")
    assert "[sandbox.links]" in one.mend


async def test_14_too_little_memory_for_one_process(settings: Settings) -> None:
    one = await fault(changed(settings, max_memory=1_000_000), "memory", "warning")
    assert "max_memory" in one.mend


async def test_a_proxy_on_this_var_is_no_fault(settings: Settings) -> None:
    with started("-m", "cli_session_proxy", "serve", "--port", "0", "--var", str(settings.var)) as server:
        try:
            assert server.stdout is not None
            first = await as_thread(server.stdout.readline)
            port = int(first.split("http://127.0.0.1:")[1].split()[0])
            here = await found(changed(settings, port=port))
            there = await found(changed(settings, port=port, var=settings.var.with_name("other")))
        finally:
            server.terminate()
    assert here["port"].level == "ok"
    assert "served on this var" in here["port"].says
    assert here["processes"].level == "ok"
    assert there["port"].level == "warning"


def started(*args: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, *args], stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)


async def as_thread(call: Callable[..., object], *args: object) -> str:
    return str(await asyncio.to_thread(call, *args))


def test_the_command_never_prints_a_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, claude_2: Path
) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-ant-fake-secret")
    options = ["--var", str(tmp_path / "var"), "--claude-config-dir", str(tmp_path / "c"), "--port", "0"]
    for args, code in (
        (["doctor", *options, "--claude-bin", str(claude_2)], 0),
        (["doctor", "--json", *options, "--claude-bin", str(tmp_path / "none")], 1),
    ):
        with pytest.raises(SystemExit) as caught:
            cli.main(args)
        assert caught.value.code == code
        out = capsys.readouterr().out
        assert "secret" not in out
    assert {one["check"]: one["level"] for one in json.loads(out)}["claude"] == "error"


async def test_on_macos_its_own_commands_are_named(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "SYSTEM", "macos")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        one = await fault(changed(settings, port=port), "port")
    assert f"lsof -nP -iTCP:{port} -sTCP:LISTEN" in one.mend


async def test_the_cli_of_a_confined_profile_is_tried_behind_the_boundary(settings: Settings, tmp_path: Path) -> None:
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not here")
    confined = Profile(tools=("Bash",), confined=True)
    fine = (await found(changed(settings, profiles={"coder": confined})))["boundary"]
    assert (fine.level, fine.says) == ("ok", "profile coder: the CLI runs confined")
    wide = confined.model_copy(update={"add_dirs": (tmp_path.parent,)})
    told = await fault(changed(settings, profiles={"coder": wide}), "boundary")
    assert "could so reach" in told.says
    # a CLI that needs what is not shown inside
    script = tmp_path / "claude"
    script.write_text(f'#!/bin/sh\nexec {settings.claude_bin} "$@"\n')
    script.chmod(0o755)
    told = await fault(changed(settings, profiles={"coder": confined}, claude_bin=script), "boundary")
    assert "does not run behind the boundary" in told.says
