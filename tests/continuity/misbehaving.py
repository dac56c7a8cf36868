"""A CLI that misbehaves once: a small program before the real one, told by a file what to do next."""

from __future__ import annotations

import sys
from pathlib import Path

_PROGRAM = """#!{python} -IS
import json, os, pathlib, subprocess, sys

order = pathlib.Path({order!r})
argv = [{binary!r}, *sys.argv[1:]]


def ordered(*words):
    if order.exists() and (word := order.read_text()) in words:
        if word != "fork":
            order.unlink()
        return word
    return None


if "-p" not in argv:
    os.execv(argv[0], argv)
session = [one for one in argv if one.startswith("--resume=")]
word = ordered("exit_0", "garbage", "no_conversation", "fork") if session else None
if word == "exit_0":
    sys.stdin.readline()
    sys.exit(0)
if word == "no_conversation":
    fresh = "00000000-0000-4000-8000-00000000cafe"
    init = dict(type="system", subtype="init", session_id=fresh, tools=[], mcp_servers=[])
    print(json.dumps(init), flush=True)
    print("No conversation found with session ID: " + session[0][9:], file=sys.stderr, flush=True)
    sys.exit(1)
if word == "garbage":
    sys.stdout.write("Warning: \\x00\\x1b[31m not JSON\\n[[[[\\n42\\n\\n{{\\"type\\":\\n" + "x" * 100000 + "\\n")
    sys.stdout.flush()
if word == "fork":
    argv.append("--fork-session")
child = subprocess.Popen(argv, stdout=subprocess.PIPE)
for line in child.stdout:
    if b'"type":"result"' in line and (word := ordered("kill_before_result", "exit_0_before_result")):
        child.kill()
        child.wait()
        os._exit(137 if word == "kill_before_result" else 0)
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()
sys.exit(child.wait())
"""


class MisbehavingCli:
    """`path` stands for the CLI `binary`; it does the next ordered thing once, and is the real one otherwise."""

    def __init__(self, folder: Path, binary: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "claude"
        self._order = folder / "order"
        program = _PROGRAM.format(python=sys.executable, order=str(self._order), binary=str(binary))
        self.path.write_text(program)
        self.path.chmod(0o755)

    @classmethod
    def at(cls, folder: Path) -> MisbehavingCli:
        """The one that was made there."""
        cli = object.__new__(cls)
        cli.path, cli._order = folder / "claude", folder / "order"
        return cli

    def next(self, word: str) -> None:
        self._order.write_text(word)

    @property
    def done(self) -> bool:
        return not self._order.exists()
