"""`--install-completion` in a real shell (a pty) with a home of its own: Tab completes commands and options."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from ..conftest import ROOT, required
from .test_chatting import in_terminal, left

# The program as an installation makes it: completion goes by its name.
PROGRAM = """\
#!{python}
from cli_session_proxy.cli import main

main()
"""


def installed(folder: Path, shell: Path) -> dict[str, str]:
    """The program in a folder of PATH, and a home for the shell. Returns the environment."""
    program = folder / "bin" / "cli-session-proxy"
    program.parent.mkdir()
    program.write_text(PROGRAM.format(python=sys.executable))
    program.chmod(0o755)
    # Without this folder fish reads all manual pages of the machine, in a process that outlives it.
    (folder / "home-of-the-shell" / ".local" / "share" / "fish" / "generated_completions").mkdir(parents=True)
    return {
        "PATH": f"{program.parent}:{shell.parent}:/usr/bin:/bin", "HOME": str(folder / "home-of-the-shell"),
        "PYTHONPATH": str(ROOT), "PS1": "ready> ", "TERM": "dumb", "HISTFILE": "/dev/null",
    }  # fmt: skip


async def test_tab_completes_once_completion_is_installed(tmp_path: Path) -> None:
    bash = required(Path(shutil.which("bash") or "/bin/bash"), "apt-get install bash", what="bash")
    env = installed(tmp_path, bash)
    home = Path(env["HOME"])
    async with in_terminal(env, bash, "--noprofile", "--norc", "-i") as terminal:
        await terminal.see("ready> ")
        terminal.type("cli-session-proxy --install-completion\n")
        await terminal.see("completion installed")
        await terminal.see("ready> ")
        terminal.type("exit\n")
        assert await left(terminal) == 0
    assert "cli-session-proxy" in (home / ".bashrc").read_text()
    async with in_terminal(env, bash, "--noprofile", "-i") as terminal:
        terminal.type("PS1=rea'dy> '\n")  # a system's bashrc has its own; what is echoed here is not the prompt
        await terminal.see("ready> ")
        terminal.type("cli-session-proxy migr\t")
        await terminal.see("migrate ")
        terminal.type("--gi\t")
        await terminal.see("--give-up ")
        terminal.type("\x15exit\n")
        assert await left(terminal) == 0


@pytest.mark.parametrize(
    ("name", "settings", "text"),
    [
        ("zsh", ".zshrc", "PS1='ready> '\n"),
        ("fish", ".config/fish/config.fish", "function fish_prompt; echo -n 'ready> '; end\n"),
    ],
)
async def test_tab_completes_in(name: str, settings: str, text: str, tmp_path: Path) -> None:
    shell = required(Path(shutil.which(name) or f"/usr/bin/{name}"), "make tools", what=name)
    env = installed(tmp_path, shell) | {"TERM": "xterm"}
    file = Path(env["HOME"]) / settings
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    async with in_terminal(env, shell, "-i") as terminal:
        await terminal.see("ready> ")
        terminal.type("cli-session-proxy --install-completion\n")
        await terminal.see("completion installed")
        await terminal.see("ready> ")
        terminal.type("exit\n")
        assert await left(terminal) == 0
    async with in_terminal(env, shell, "-i") as terminal:
        await terminal.see("ready> ")
        # What these shells draw is full of moves of the cursor: whether it was completed, the command tells. In zsh the
        # first Tab only loads what Typer installed.
        load = "cli-session-proxy mig\t\x15" if name == "zsh" else ""
        terminal.type(f"{load}cli-session-proxy migr\t--gi\t--help\n")
        await terminal.see("Usage: cli-session-proxy migrate")
        await terminal.see("ready> ")
        terminal.type("exit\n")
        assert await left(terminal) == 0
