"""A real CLI behind a program that changes some things of what it is told, says or writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from typing import Any

from ..runtime import SHORT_LIVED

Frame = dict[str, Any]

ROOT = Path(__file__).parent.parent.parent


def tampered(real: Path, folder: Path, *how: str) -> Path:
    """The path of a `claude` that is the real one but for these: a change, or one of a control request's subtype."""
    folder.mkdir(exist_ok=True)
    script = folder / "claude"
    script.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        f"from {__name__} import main\nmain({str(real)!r}, {how!r})\n"
    )
    script.chmod(0o755)
    return script


def arguments(what: str, argv: list[str]) -> list[str]:
    resumed = next((word.partition("=")[2] for word in argv if word.startswith("--resume=")), None)
    if what == "counts":
        with (Path(sys.argv[0]).parent / "starts").open("a") as started:
            started.write(f"{os.getpid()}\n")
    if what == "tells":
        (Path(sys.argv[0]).parent / "environment").write_text(json.dumps(dict(os.environ)))
    if what == "no option":
        sys.exit("error: unknown option '--strict-mcp-config'")
    if what == "elsewhere":
        os.environ["CLAUDE_CONFIG_DIR"] += "/elsewhere"
    if what == "another folder":
        os.environ["CLAUDE_CODE_PROJECT_DIR_NAME"] = "sessions"
    if what == "hears others":
        del os.environ["CLAUDE_CODE_HARBOR_KITE"]
    if what == "bare":
        return [*argv, "--bare"]
    if what == "unasked":
        return [word for word in argv if not word.startswith(("--permission-prompt-tool=", "--settings="))]
    of_file = "--system-prompt-file="
    if what == "no prompt file" and any(word.startswith(of_file) for word in argv):
        sys.exit("error: unknown option '--system-prompt-file'")
    if what == "prompt file unread":
        return [word for word in argv if not word.startswith(of_file)]
    if what == "new names" and resumed and "check-shown" in (written := session(resumed).read_text()):
        lines = [json.loads(line) for line in written.splitlines()]
        if any(len(line.get("message", {}).get("content", ())) == 2 for line in lines):
            session(resumed).write_text(written.replace(lines[-1]["uuid"], str(uuid.uuid4())))
    if what == "new id" and resumed:
        return [*argv, "--fork-session"]
    if what == "no image" and resumed:
        file = session(resumed)
        records = [json.loads(line) for line in file.read_text().splitlines()]
        for record in records:
            content = record.get("message", {}).get("content")
            if isinstance(content, list):
                record["message"]["content"] = [block for block in content if block.get("type") != "image"]
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return argv


def session(session_id: str) -> Path:
    return next(Path(os.environ["CLAUDE_CONFIG_DIR"], "projects").rglob(f"{session_id}.jsonl"))


def told(what: str, which: str, frame: Frame) -> tuple[Frame | None, Frame | None]:
    """What goes on to the CLI, and what is answered at once."""
    asked = frame.get("request", {}).get("subtype") if frame.get("type") == "control_request" else None
    if what == "as commands":
        frame.pop("client_composed", None)
    if frame.get("type") == "user":
        content = frame["message"]["content"]
        if what == "one block":
            del content[:-1]
        if what == "sums the prompt up" and "check-compacted" in str(content):
            frame["message"]["content"] = "Continue."
    if asked is None or asked != which:
        return frame, None
    response: Frame = {"request_id": frame["request_id"], "subtype": "error", "error": "not any more"}
    if what == "lies":
        response |= {"subtype": "success", "response": {"rewound": True}}
    return None, None if what == "silent" else {"type": "control_response", "response": response}


def said(what: str, frame: Frame) -> Frame:
    kind = frame.get("type")
    if kind == "result":
        if what == "no tag":
            frame.pop("user_message_uuids", None)
        if what == "other words":
            frame["result"] = f"{frame.get('result')} And more."
        if what == "does not heal" and "check-sealed" in str(frame.get("result")):
            frame |= {"is_error": True, "result": "API Error: 400 Invalid `signature` in `thinking` block"}
        if what == "no result":
            frame["type"] = "outcome"
        if what == "broken parents":
            file = session(frame["session_id"])
            lines = file.read_text().splitlines()
            at = next(n for n in reversed(range(len(lines))) if '"type":"assistant"' in lines[n])
            lines[at] = json.dumps(json.loads(lines[at]) | {"parentUuid": str(uuid.uuid4())}, separators=(",", ":"))
            file.write_text("\n".join(lines) + "\n")
        if what == "late" and "check-first" in (file := session(frame["session_id"])).read_text():
            held = file.rename(file.with_suffix(".held"))
            threading.Timer(0.5, held.rename, (file,)).start()
    if what == "tools" and frame.get("subtype") == "init":
        frame["tools"] = [*frame.get("tools", ()), "Bash"]
    return frame


def main(real: str, changes: tuple[str, ...]) -> None:
    if set(sys.argv[1:]) & {"--version", "--help"}:
        os.execv(real, [real, *sys.argv[1:]])
    argv = sys.argv[1:]
    for change in changes:
        argv = arguments(change, argv)
    cli = subprocess.Popen(
        [real, *argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **SHORT_LIVED}
    )
    assert cli.stdin is not None
    assert cli.stdout is not None
    to_cli, lock = cli.stdin, threading.Lock()

    def say(frame: Frame) -> None:
        with lock:
            sys.stdout.write(json.dumps(frame) + "\n")
            sys.stdout.flush()

    def pass_on() -> None:
        for line in sys.stdin:
            passed: Frame | None = json.loads(line)
            for change in changes:
                if passed is None:
                    break
                what, _, which = change.partition(":")
                passed, answer = told(what, which, passed)
                if answer is not None:
                    say(answer)
            if passed is not None:
                to_cli.write(json.dumps(passed).encode() + b"\n")
                to_cli.flush()
        to_cli.close()

    threading.Thread(target=pass_on, daemon=True).start()
    for line in cli.stdout:
        frame = json.loads(line)
        for change in changes:
            frame = said(change, frame)
        say(frame)
    os._exit(cli.wait())
