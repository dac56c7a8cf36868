"""A CLI in front of which somebody meddles with transcripts at a named moment: a program before the real one.

Orders are done once, at their moment:

    start     before the real CLI is started with --resume, so after the proxy has verified the transcript
    loaded    before the first line of a resumed CLI is passed on: it has loaded its session by then
    result    before a turn's result is passed on: the CLI has written all of it
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

Moment = Literal["start", "loaded", "result"]

# The names in the comment are what the proxy looks for in a CLI's program text.
_PROGRAM = """#!{python} -IS
# "--system-prompt <" "--system-prompt-file <" client_composed only_if_model_is_current mcp_set_servers
import json, os, pathlib, re, signal, subprocess, sys, threading, time, uuid

orders = pathlib.Path({orders!r})
version, splits = {version!r}, {splits!r}
argv = [{binary!r}, *sys.argv[1:]]


def obey(moment):
    for file in sorted(orders.glob("*.json")):
        order = json.loads(file.read_text())
        if order["at"] != moment:
            continue
        if not order["always"]:
            file.unlink()
        for op, *args in order["ops"]:
            if op == "write":
                pathlib.Path(args[0]).write_text(args[1])
            elif op == "swap":
                spare = args[0] + ".swapped"
                os.rename(args[0], spare)
                os.rename(args[1], args[0])
                os.rename(spare, args[1])
            elif op == "delete":
                os.unlink(args[0])
            elif op == "replace":
                path = max(pathlib.Path(args[0]).glob("*/*.jsonl"), key=lambda one: one.stat().st_mtime_ns)
                data = path.read_bytes()
                assert args[1].encode() in data, path
                with path.open("r+b") as file:
                    file.write(data.replace(args[1].encode(), args[2].encode()))
            elif op == "late":
                path = max(pathlib.Path(args[0]).glob("*/*.jsonl"), key=lambda one: one.stat().st_mtime_ns)
                kept = path.with_suffix(".kept")
                os.rename(path, kept)
                threading.Timer(float(args[1]), os.rename, (kept, path)).start()
            elif op == "strange":
                path = max(pathlib.Path(args[0]).glob("*/*.jsonl"), key=lambda one: one.stat().st_mtime_ns)
                lines = path.read_text().splitlines()
                at = max(n for n, line in enumerate(lines) if '"type":"assistant"' in line)
                last = json.loads(lines[at])
                strange = last | dict(type="of_tomorrow", uuid=str(uuid.uuid4()), message=dict(content="words"))
                lines[at : at + 1] = [json.dumps(strange), json.dumps(last | dict(parentUuid=strange["uuid"]))]
                path.write_text("".join(line + "\\n" for line in lines))
            elif op == "touch":
                now = time.time_ns() // 1_000_000 * 1_000_000 + int(args[1])
                os.utime(args[0], ns=(now, now))


def split():
    # As CLIs below 2.1.30 do when they resume: each block is a record, all under new uuids, and the turn hangs on them.
    lines = transcript.read_text().splitlines()
    there = [json.loads(line) for line in lines[:known]]
    there = [one for one in there if "parentUuid" in one and not one.get("isSidechain")]
    said = [one.get("message", dict(content="")) for one in there]
    if all(isinstance(one["content"], str) or len(one["content"]) < 2 for one in said):
        return
    copies, parent = [], None
    for one, message in zip(there, said):
        content = message["content"]
        for block in [content] if isinstance(content, str) else [[block] for block in content]:
            more = dict(message=message | dict(content=block)) if "message" in one else dict()
            copies.append(json.dumps(one | more | dict(uuid=str(uuid.uuid4()), parentUuid=parent)))
            parent = json.loads(copies[-1])["uuid"]
    added = [line.replace('"parentUuid":"' + there[-1]["uuid"], '"parentUuid":"' + parent) for line in lines[known:]]
    transcript.write_text("".join(line + "\\n" for line in [*lines[:known], *copies, *added]))


if sys.argv[1:] == ["--version"] and version:
    print(version + " (Claude Code)")
    sys.exit(0)
if "-p" not in argv:
    os.execv(argv[0], argv)
resumes = any(one.startswith("--resume=") for one in argv)
if resumes:
    obey("start")
if resumes and splits:
    [session] = [one[9:] for one in argv if one.startswith("--resume=")]
    [transcript] = pathlib.Path(os.environ["CLAUDE_CONFIG_DIR"]).glob("projects/*/" + session + ".jsonl")
    known = len(transcript.read_text().splitlines())
child = subprocess.Popen(argv, stdout=subprocess.PIPE)
signal.signal(signal.SIGTERM, lambda *_: child.terminate())
for number, line in enumerate(child.stdout):
    if resumes and number == 0:
        obey("loaded")
    if b'"type":"result"' in line:
        obey("result")
        if resumes and splits:
            split()
            splits = False
    if version:
        line = re.sub(rb'"claude_code_version":"[0-9.]+"', b'"claude_code_version":"' + version.encode() + b'"', line)
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()
sys.exit(child.wait())
"""

Op = Sequence[str]


class MeddledCli:
    """`path` stands for the CLI `binary`. `version` is what it calls itself, where that is not its own. `splits`: it
    splits records at a resume."""

    def __init__(self, folder: Path, binary: Path, *, version: str = "", splits: bool = False) -> None:
        self._orders = folder / "orders"
        self._orders.mkdir(parents=True)
        self._number = 0
        self.path = folder / "claude"
        named = {"python": sys.executable, "orders": str(self._orders), "binary": str(binary)}
        program = _PROGRAM.format(**named, version=version, splits=splits)
        self.path.write_text(program)
        self.path.chmod(0o755)

    def order(self, at: Moment, *ops: Op, always: bool = False) -> None:
        self._number += 1
        told = {"at": at, "ops": ops, "always": always}
        (self._orders / f"{self._number:03}.json").write_text(json.dumps(told))

    def stop(self) -> None:
        for file in self._orders.glob("*.json"):
            file.unlink()

    @property
    def done(self) -> bool:
        return not list(self._orders.glob("*.json"))


def other_words(path: Path, old: str, new: str) -> Op:
    """The file with other words of the same length."""
    assert len(old) == len(new)
    data = path.read_text(encoding="utf-8")
    assert old in data
    return ("write", str(path), data.replace(old, new))


def shorter(path: Path, exchanges: int) -> Op:
    """The file with so many of its exchanges only."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    answers = [at for at, line in enumerate(lines) if re.match(r'.*"type":"assistant"', line)]
    return ("write", str(path), "".join(lines[: answers[exchanges - 1] + 1]))
