"""A CLI that says the same in other frames, as one of tomorrow may: a program that rewrites what the real one prints.

whole     `assistant` frames have another name; what is streamed keeps its own
frames    `assistant` and `stream_event` have other names: only the result holds the words
block     text is a block of another type
last      as `block`, from the first result of a tool on
mute      as `frames`, and the result has no text
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

Mode = Literal["whole", "frames", "block", "last", "mute"]

_PROGRAM = """#!{python} -IS
import json, os, signal, subprocess, sys

mode = {mode!r}
argv = [{binary!r}, *sys.argv[1:]]
if "-p" not in argv:
    os.execv(argv[0], argv)


tools_ran = False


def translated(frame):
    kind = frame.get("type")
    global tools_ran
    tools_ran = tools_ran or '"type": "tool_result"' in json.dumps(frame)
    if mode == "block" or (mode == "last" and tools_ran):
        return json.loads(
            json.dumps(frame).replace('"type": "text"', '"type": "prose"').replace('"text_delta"', '"prose_delta"')
        )
    if mode == "last":
        return frame
    if kind == "assistant" or (kind == "stream_event" and mode != "whole"):
        return frame | dict(type="of_tomorrow")
    return frame | dict(result="") if kind == "result" and mode == "mute" else frame


child = subprocess.Popen(argv, stdout=subprocess.PIPE)
signal.signal(signal.SIGTERM, lambda *_: child.terminate())
for line in child.stdout:
    try:
        line = json.dumps(translated(json.loads(line))).encode() + b"\\n"
    except ValueError:
        pass  # a notice
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()
sys.exit(child.wait())
"""


def translated(folder: Path, binary: Path, mode: Mode) -> Path:
    """The program's path."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "claude"
    program.write_text(_PROGRAM.format(python=sys.executable, binary=str(binary), mode=mode))
    program.chmod(0o755)
    return program
