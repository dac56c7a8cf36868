"""`--install-completion` in a real shell (a pty) with a home of its own: Tab completes commands and options."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from ..conftest import ROOT, required
from .test_chatting import in_terminal, left

# The program as an installation makes it: completion goes by its name.
PROGRAM = """\
#!{python}
from cli_session_proxy.cli import main

main()
"""


async def test_tab_completes_once_completion_is_installed(tmp_path: Path) -> None:
    bash = required(Path(shutil.which("bash") or "/bin/bash"), "apt-get install bash", what="bash")
    program = tmp_path / "bin" / "cli-session-proxy"
    program.parent.mkdir()
    program.write_text(PROGRAM.format(python=sys.executable))
    program.chmod(0o755)
    home = tmp_path / "home-of-the-shell"
    home.mkdir()
    env = {
        "PATH": f"{program.parent}:/usr/bin:/bin", "HOME": str(home), "PYTHONPATH": str(ROOT), "PS1": "ready> ",
        "TERM": "dumb", "HISTFILE": "/dev/null",
    }  # fmt: skip
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
