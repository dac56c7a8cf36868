"""On Windows it says where it runs, instead of an ImportError.

Simulated: without fcntl, uvloop and fork, under Windows' name.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

# Other packages know Windows themselves and are there before the name changes.
AS_ON_WINDOWS = """
import asyncio, os, pathlib, sys
import httpx, pydantic_settings, rich.console, structlog, typer.main
for missing in ("fcntl", "uvloop", "termios", "pty", "resource", "pwd", "grp"):
    sys.modules[missing] = None
for missing in ("register_at_fork", "getuid", "fork", "killpg", "sched_getaffinity", "confstr"):
    delattr(os, missing)
sys.platform = "win32"
"""


def on_windows(code: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-c", AS_ON_WINDOWS + code]
    return subprocess.run(program, check=False, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("command", ["serve", "demo", "doctor", "login", "--help"])
@pytest.mark.sample(3)
def test_every_command_is_one_clear_line(command: str) -> None:
    done = on_windows(f"from cli_session_proxy.cli import main; main([{command!r}])")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: cli-session-proxy runs on Linux and macOS")
    assert "wsl --install" in line


def test_an_engine_of_ones_own_says_the_same_and_a_running_serve_can_be_asked() -> None:
    done = on_windows("""
from cli_session_proxy import ask
from cli_session_proxy.errors import ClaudeUnavailable, ConfigError
try:
    asyncio.run(ask("hello"))
except ConfigError as exc:
    print(exc)
try:
    asyncio.run(ask("hello", base_url="http://127.0.0.1:9"))
except ClaudeUnavailable as exc:
    print(exc)
""")
    assert (done.returncode, done.stderr) == (0, "")
    alone, asked = done.stdout.splitlines()
    assert "wsl --install" in alone
    assert "is `serve` there?" in asked
