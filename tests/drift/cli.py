"""The program that stands for the CLI, and is replaced as an update replaces it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_SCRIPT = """#!{python} -IS
import sys
sys.path.insert(0, {folder!r})
import tomorrow
tomorrow.main({name!r}, {binary!r}, {own!r})
"""


class ChangingCli:
    """`path` is the real CLI until it `becomes` one of `tomorrow.CHANGES`. A process that runs stays what it was."""

    def __init__(self, folder: Path, binary: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "claude"
        self._binary = binary
        self._own = folder / "own"
        self.is_real()

    def is_real(self) -> None:
        self._replace(f'#!/bin/sh\nexec "{self._binary}" "$@"\n')

    def becomes(self, name: str) -> None:
        given = {"python": sys.executable, "folder": str(Path(__file__).parent), "name": name}
        self._replace(_SCRIPT.format(**given, binary=str(self._binary), own=str(self._own)))

    def _replace(self, program: str) -> None:
        new = self.path.with_name("claude.new")
        new.write_text(program)
        new.chmod(0o755)
        os.replace(new, self.path)
