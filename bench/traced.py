"""`serve` in a process that notes which functions of the package are called: `trace` starts it and says when.

A line on stdin begins the noting, the next one ends it. Either is answered by a line on stdout that begins with MARK;
at the end the calls follow it as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from types import CodeType, FrameType
from typing import Any

import cli_session_proxy

PACKAGE = os.path.dirname(cli_session_proxy.__file__) + os.sep
MARK = "traced:"


class Notes:
    """Calls of the package's own functions, in order, in all threads."""

    def __init__(self) -> None:
        self.on = False
        self.calls: list[CodeType] = []

    def profile(self, frame: FrameType, event: str, _arg: Any) -> None:
        if self.on and event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            self.calls.append(frame.f_code)

    def obey(self) -> None:
        """On its own thread, until stdin ends."""
        sys.setprofile(None)
        for _ in sys.stdin:
            self.on = not self.on
            calls = [(code.co_filename.removeprefix(PACKAGE), code.co_qualname) for code in self.calls]
            self.calls = []
            print(MARK, json.dumps(calls), flush=True)


def main() -> None:
    from cli_session_proxy.cli import main as run  # noqa: PLC0415 - after the profile is set: what it imports is ours

    run(["serve"])


if __name__ == "__main__":
    notes = Notes()
    threading.setprofile(notes.profile)
    sys.setprofile(notes.profile)
    threading.Thread(target=notes.obey, daemon=True).start()
    main()
