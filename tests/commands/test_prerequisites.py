"""What `serve` says before a turn: the CLI's login, an unsafe directory. What `login` starts."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from cli_session_proxy.backends.claude.process.environment import login_command
from cli_session_proxy.commands import prerequisites
from cli_session_proxy.commands.prerequisites import report
from cli_session_proxy.http.keys import Keys
from cli_session_proxy.settings import Profile, Settings

# A CLI that records how it is started, asks for a code, and then knows that it is logged in.
RECORDER = """#!{python}
import json, os, sys
from pathlib import Path

if "--version" in sys.argv:
    print("1.0.99 (Claude Code)")
    raise SystemExit
if "--help" in sys.argv:
    print("Usage: claude auth [options] [command]" if {auth} else "Usage: claude [options] [command] [prompt]")
    raise SystemExit
config = Path(os.environ.get("CLAUDE_CONFIG_DIR") or Path.home() / ".claude")
if sys.argv[1:3] == ["auth", "status"]:
    (Path(__file__).parent / "asked.json").write_text(json.dumps(dict(os.environ)))
    print(json.dumps({{"loggedIn": (config / "token").exists()}}))
    raise SystemExit
how = {{
    "argv": sys.argv[1:], "env": dict(os.environ), "group": os.getpgid(0) == os.getpgid(os.getppid()),
    "terminal": [os.isatty(fd) for fd in range(3)],
}}
(Path(__file__).parent / "how.json").write_text(json.dumps(how))
code = input("Paste code here: ")
if code == "wrong":
    raise SystemExit(1)
config.mkdir(exist_ok=True)
(config / "token").write_text(code)
"""


async def said(tmp_path: Path, claude: Path, **env: str) -> list[str]:
    settings = Settings(
        var=tmp_path / "var", claude_bin=claude, claude_config_dir=tmp_path / "config",
        # nowhere: whatever the CLI may want to ask, it asks nobody
        claude_env={"ANTHROPIC_BASE_URL": "http://127.0.0.1:9", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", **env},
    )  # fmt: skip
    return [line async for line in report(settings, Keys(settings))]


async def test_a_missing_login_is_told_with_what_to_do(tmp_path: Path, claude_2: Path) -> None:
    version, advice = await said(tmp_path, claude_2)
    assert version.startswith("claude 2.1.")
    assert str(claude_2) in version
    assert "no Claude login" in advice
    assert f"`cli-session-proxy login --claude-bin {claude_2} --claude-config-dir {tmp_path}/config`" in advice


@pytest.mark.parametrize("started", [{"SSH_CONNECTION": "10.0.0.1 1 10.0.0.2 22"}, {"XPC_SERVICE_NAME": "com.cli"}, {}])
async def test_where_the_keychain_may_be_closed_a_token_is_the_advice(
    started: dict[str, str], tmp_path: Path, claude_2: Path, macos: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    monkeypatch.setenv("XPC_SERVICE_NAME", "application.com.apple.Terminal.1152921500311879701.1152921500311892571")
    for name, value in started.items():
        monkeypatch.setenv(name, value)
    _, advice = await said(tmp_path, claude_2)
    assert advice.startswith("no Claude login: ")
    assert ("`claude setup-token`" in advice) is bool(started)
    assert ("login --claude-bin" in advice) is not bool(started)


async def test_an_old_cli_cannot_tell(tmp_path: Path, claude_1: Path) -> None:
    version, advice = await said(tmp_path, claude_1)
    assert version.startswith("claude 1.0.120")
    assert "cannot tell" in advice
    assert "cli-session-proxy login" in advice


@pytest.mark.parametrize(
    "env",
    [
        {"ANTHROPIC_API_KEY": "sk-ant-fake"},
        {"CLAUDE_CODE_OAUTH_TOKEN": "sk-ant-fake"},
        {"CLAUDE_CODE_USE_BEDROCK": "1"},
    ],
)
async def test_a_login_by_the_environment_is_enough(tmp_path: Path, claude_2: Path, env: dict[str, str]) -> None:
    (line,) = await said(tmp_path, claude_2, **env)
    assert line.startswith("claude 2.1.")


@pytest.mark.parametrize(("model", "meant"), [("sonet", "`sonnet`"), ("claude-sonnet-4-5", None), ("my-own", None)])
async def test_a_misspelt_default_model_is_told_at_the_start(
    tmp_path: Path, claude_2: Path, model: str, meant: str | None
) -> None:
    settings = Settings(
        var=tmp_path / "var", claude_bin=claude_2, claude_config_dir=tmp_path / "config", default_model=model,
        claude_env={"ANTHROPIC_API_KEY": "sk-ant-fake"},
    )  # fmt: skip
    told = [line async for line in report(settings, Keys(settings)) if "default_model" in line]
    assert told == ([] if meant is None else [f"default_model is {model!r}: did you mean {meant}?"])


async def test_a_profile_that_names_a_tool_that_is_always_off_is_told_at_the_start(tmp_path: Path) -> None:
    profiles = {"coder": Profile(tools=("Bash", "Workflow", "Monitor(x)")), "writer": Profile(tools=("Write",))}
    settings = Settings(var=tmp_path / "var", claude_bin=tmp_path / "nothing", profiles=profiles)
    told = [line async for line in report(settings, Keys(settings)) if line.startswith("profile")]
    assert told == ["profile coder names Monitor, Workflow, off in every profile: leave that out of its `tools`"]


async def test_a_directory_that_is_synced_is_told_at_the_start(tmp_path: Path) -> None:
    told = await said(tmp_path / "Dropbox", tmp_path / "nothing")
    (line,) = [one for one in told if "Dropbox, which copies files" in one]
    assert line.endswith("choose another with --var")


async def test_a_missing_cli_is_a_line_not_an_error(tmp_path: Path) -> None:
    (line,) = await said(tmp_path, tmp_path / "nothing")
    assert "--claude-bin" in line


@pytest.mark.parametrize(
    ("started", "on_path", "expected"),
    [
        ("{venv}/bin/cli-session-proxy", True, "cli-session-proxy login"),
        ("{venv}/bin/cli-session-proxy", False, "{venv}/bin/cli-session-proxy login"),
        ("{venv}/lib/cli_session_proxy/__main__.py", True, "{python} -m cli_session_proxy login"),
        ("some-host", True, "cli-session-proxy login"),
    ],
)
def test_the_instruction_can_be_typed_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: str, on_path: bool, expected: str
) -> None:
    program = tmp_path / "bin" / "cli-session-proxy"
    program.parent.mkdir()
    program.touch(0o755)
    monkeypatch.setenv("PATH", str(program.parent) if on_path else "/nowhere")
    monkeypatch.setattr(sys, "argv", [started.format(venv=tmp_path)])
    assert login_command(Settings()) == expected.format(venv=tmp_path, python=sys.executable)


def test_uvx_has_the_program_on_its_own_path_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "cli-session-proxy"
    program.touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("UV", "/usr/bin/uv")
    monkeypatch.setattr(sys, "argv", [str(program)])
    assert login_command(Settings()) == f"{program} login"


# --- directories where a database should not lie


@pytest.mark.parametrize(
    ("below", "says"),
    [
        ("Library/Mobile Documents/com~apple~CloudDocs/code/var", "iCloud"), ("Library/CloudStorage/Box/var", "cloud"),
        ("Dropbox/var", "Dropbox"), ("OneDrive - Work/var", "OneDrive"), ("code/var", None),
    ],
)  # fmt: skip
def test_folders_that_are_synced(below: str, says: str | None, tmp_path: Path) -> None:
    found = prerequisites.why_unsafe(tmp_path / below)
    assert (found is None) is (says is None)
    assert (says or "") in (found or "")


def test_the_desktop_that_macos_keeps_in_icloud(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert prerequisites.why_unsafe(Path.home() / "Desktop" / "var") is None
    (Path.home() / prerequisites.ICLOUD / "Desktop").mkdir(parents=True)
    assert "iCloud" in (prerequisites.why_unsafe(Path.home() / "Desktop" / "var") or "")
    assert prerequisites.why_unsafe(Path.home() / "Documents" / "var") is None


@pytest.mark.parametrize(("kind", "says"), [("nfs4", "NFS"), ("smbfs", "SMB"), ("9p", "Windows"), ("apfs", None)])
def test_file_systems_of_a_network(
    kind: str, says: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = [SimpleNamespace(mountpoint="/", fstype="nfs"), SimpleNamespace(mountpoint=str(tmp_path), fstype=kind)]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounts)  # noqa: A006 - psutil's name
    found = prerequisites.why_unsafe(tmp_path / "var")
    assert (found is None) is (says is None)
    assert (says or "") in (found or "")


# --- the command


class Terminal:
    """A terminal with a program in it, as a person has it."""

    def __init__(self, process: Process, master: int) -> None:
        self.process = process
        self._master = master
        self._shown = b""

    async def shows(self, pattern: str) -> str:
        """What it shows, once the pattern is there."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(60):
            while not re.search(pattern, self.text):
                self._shown += await loop.run_in_executor(None, os.read, self._master, 4096)
        return self.text

    @property
    def text(self) -> str:
        return self._shown.decode(errors="replace").replace("\r\n", "\n")

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    async def ended(self) -> int:
        """Exit code, when it has shown the rest."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(60):
            code = await self.process.wait()
            try:
                while more := await loop.run_in_executor(None, os.read, self._master, 4096):
                    self._shown += more
            except OSError:  # how Linux says that nobody has the other side open
                pass
            return code


@asynccontextmanager
async def terminal(*command: str | Path, env: dict[str, str], cwd: Path) -> AsyncIterator[Terminal]:
    master, slave = pty.openpty()
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", TAKES_TERMINAL, *command, stdin=slave, stdout=slave, stderr=slave, env=env, cwd=cwd
        )
        os.close(slave)
        try:
            yield Terminal(process, master)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    finally:
        os.close(master)


# A session of its own whose controlling terminal is stdin, so that Ctrl-C is a signal to all in it.
TAKES_TERMINAL = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-m", "cli_session_proxy", *sys.argv[1:]])
"""


def recorder(folder: Path, *, auth: bool = True) -> Path:
    folder.mkdir()
    claude = folder / "claude"
    claude.write_text(RECORDER.format(python=sys.executable, auth=auth))
    claude.chmod(0o755)
    return claude


def how(claude: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((claude.parent / "how.json").read_text())
    return found


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {"PATH": os.defpath, "HOME": str(tmp_path / "home"), "TERM": "xterm", "LANG": "C.UTF-8", "SECRET": "no"}


async def test_login_runs_the_clis_own_in_this_terminal_where_serve_looks_for_it(
    tmp_path: Path, env: dict[str, str]
) -> None:
    claude = recorder(tmp_path / "its place")
    config = tmp_path / "config"
    options = ("--claude-bin", claude, "--claude-config-dir", config, "--", "--console")
    display = {"DISPLAY": ":7", "BROWSER": "firefox", "USER": "somebody"}
    async with terminal("login", *options, env=env | display, cwd=tmp_path) as shown:
        await shown.shows("Paste code here: ")
        shown.type("1234\n")
        assert await shown.ended() == 0, shown.text
    was = how(claude)
    assert was["argv"] == ["auth", "login", "--console"]
    assert was["terminal"] == [True, True, True]
    assert was["group"]  # in the foreground: the keys are its own
    assert was["env"]["CLAUDE_CONFIG_DIR"] == str(config)
    assert was["env"].items() >= display.items()
    assert was["env"]["TERM"] == "xterm"
    assert "SECRET" not in was["env"]
    assert was["env"]["USER"] == "somebody"
    asked = json.loads((claude.parent / "asked.json").read_text())
    assert asked["USER"] == "somebody"
    assert not {"DISPLAY", "BROWSER", "TERM"} & set(asked)  # as `serve` will ask, which has no terminal
    assert (config / "token").read_text() == "1234"
    assert "logged in" in shown.text
    assert str(config) in shown.text
    assert "1234" not in shown.text.replace("Paste code here: 1234", "")  # the terminal's own echo


async def test_without_a_config_dir_it_is_the_users_own_login(tmp_path: Path, env: dict[str, str]) -> None:
    claude = recorder(tmp_path / "bin")
    async with terminal("login", env=env | {"PATH": f"{claude.parent}:{os.defpath}"}, cwd=tmp_path) as shown:
        await shown.shows("Paste code here: ")
        shown.type("1234\n")
        assert await shown.ended() == 0, shown.text
    assert "CLAUDE_CONFIG_DIR" not in how(claude)["env"]  # set, it would hide the keychain's login on macOS
    assert (tmp_path / "home" / ".claude" / "token").exists()


async def test_a_login_that_fails_is_exit_code_1_and_says_so(tmp_path: Path, env: dict[str, str]) -> None:
    claude = recorder(tmp_path / "bin")
    async with terminal("login", "--claude-bin", claude, env=env, cwd=tmp_path) as shown:
        await shown.shows("Paste code here: ")
        shown.type("wrong\n")
        assert await shown.ended() == 1
    assert "exit code 1" in shown.text
    assert "Traceback" not in shown.text


async def test_a_missing_cli_is_one_line(tmp_path: Path, env: dict[str, str]) -> None:
    async with terminal("login", "--claude-bin", tmp_path / "none", env=env, cwd=tmp_path) as shown:
        assert await shown.ended() == 1
    (line,) = [line for line in shown.text.splitlines() if "error" in line]
    assert "--claude-bin" in line


async def test_a_cli_before_auth_is_started_with_its_own_command(tmp_path: Path, env: dict[str, str]) -> None:
    claude = recorder(tmp_path / "bin", auth=False)
    async with terminal("login", "--claude-bin", claude, env=env, cwd=tmp_path) as shown:
        await shown.shows("Paste code here: ")
        shown.type("1234\n")
        assert await shown.ended() == 0
    assert how(claude)["argv"] == ["/login"]
    assert "cannot tell" in shown.text


async def test_the_real_cli_asks_for_a_code_and_ctrl_c_ends_it(
    tmp_path: Path, claude_2: Path, env: dict[str, str]
) -> None:
    """It reaches nobody: no browser on its PATH, its API on a closed loopback port, a directory of its own."""
    for_claude = {
        "ANTHROPIC_BASE_URL": "http://127.0.0.1:9", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "HOME": str(tmp_path / "home"), "PATH": str(tmp_path),
    }  # fmt: skip
    env = env | {"CLI_SESSION_PROXY_CLAUDE_ENV": json.dumps(for_claude)}
    options = ("--claude-bin", claude_2, "--claude-config-dir", tmp_path / "config")
    async with terminal("login", *options, env=env, cwd=tmp_path) as shown:
        await shown.shows("oauth/authorize")
        shown.type("\x03")
        assert await shown.ended() == 1
    assert "Traceback" not in shown.text
