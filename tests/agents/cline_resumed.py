"""`cline --id` in a terminal: a prompt is typed once the conversation is shown; prints what is stored of the turn.

python cline_resumed.py CLINE FOLDER_OF_SESSIONS PROMPT
"""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

# Seconds for all of it; and from the text, or from an Enter that did nothing, to the next Enter: one that comes at once
# is taken for a part of a paste, and an empty prompt is not sent.
LONGEST = 200.0
TYPING = 2.0
# What it shows when it takes input, and of the conversation.
READY = b"Ask anything"
BEFORE = b"Remember: secret"


def messages(session: Path) -> list[dict[str, Any]]:
    try:
        found: list[dict[str, Any]] = json.loads((session / f"{session.name}.messages.json").read_text())["messages"]
    except (OSError, ValueError):  # it is being written
        return []
    return found


def main(binary: str, sessions: str, prompt: str) -> int:
    (session,) = (path for path in Path(sessions).iterdir() if path.is_dir())
    before = len(messages(session))
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(binary, [binary, "--id", session.name], {**os.environ, "TERM": "xterm-256color"})
    shown, typed, enter, until = b"", False, 0.0, time.monotonic() + LONGEST
    try:
        while time.monotonic() < until:
            if select.select([terminal], [], [], 0.1)[0]:
                shown += os.read(terminal, 65536)
            if not typed and READY in shown and BEFORE in shown:
                os.write(terminal, prompt.encode())
                typed, enter = True, time.monotonic() + TYPING
            said = messages(session)[before:]
            if typed and not said and time.monotonic() > enter:
                os.write(terminal, b"\r")
                enter += TYPING
            kinds = {block["type"] for block in said[-1]["content"]} if said else set()
            if kinds and said[-1]["role"] == "assistant" and "tool_use" not in kinds:
                print(json.dumps(said))
                return 0
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    print(shown.decode("utf-8", "replace"), file=sys.stderr)
    return 1


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
