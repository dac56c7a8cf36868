"""A Claude CLI that misbehaves as FAKE_CLI says. Run with its own interpreter; see `conftest.fake`.

echo (default), noise, no-result, huge (an answer of FAKE_SIZE bytes in one line), deaf (never reads stdin), stubborn
(ignores TERM and the end of stdin), flood (stderr first), crash, tools (offers Bash), orphan (leaves a child that
holds its stdout), other-result (a result of another frame first), gate (answers when FAKE_GATE exists),
silent (says nothing until it is interrupted), forget (No conversation found), unclaimed (refuses claim_session),
death-signal (answers with its pid and the signal that it gets when its parent dies), hasty (answers the first byte of
its input, and reads no more), asking (asks FAKE_SIZE times for what nobody serves, and reads no answer), closed (the
same, after it has shut its stdin; then it answers "yes").
no-end (the model ends its answer, and no result follows), stubborn-turn (a turn that no interrupt ends), full-disk
(says at its end that it could not write its session), own-turn (prompts itself before it takes the second prompt),
queued (before it takes the first, which it has queued).
It takes MCP servers and asks them nothing. Its turns say that it is version FAKE_VERSION, where that is set.
Started with "--await-claim" it does not boot before FAKE_GATE exists, where that is set.
"""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time

MODE = os.environ.get("FAKE_CLI", "echo")
SIZE = int(os.environ.get("FAKE_SIZE", "0"))
ANSWERED: list[str] = []
SESSION = next((a.split("=", 1)[1] for a in sys.argv if a.startswith(("--session-id=", "--resume="))), "none")


def say(**frame: object) -> None:
    sys.stdout.write(json.dumps({**frame, "session_id": SESSION}) + "\n")
    sys.stdout.flush()


def forever() -> None:
    while True:
        time.sleep(3600)


def answer(frame: dict[str, object]) -> None:
    message = frame["message"]
    assert isinstance(message, dict)
    text = "".join(block.get("text", "") for block in message["content"])
    said = "x" * SIZE if MODE == "huge" else f"{len(text)} {text[:20]}"
    if MODE == "death-signal":
        number = ctypes.c_int()
        ctypes.CDLL(None).prctl(2, ctypes.byref(number), 0, 0, 0)  # PR_GET_PDEATHSIG
        said = f"{os.getpid()} {number.value}"
    tag = {"user_message_uuids": [frame["uuid"]]}
    if MODE == "queued":
        say(type="command_lifecycle", command_uuid=frame["uuid"], state="queued")
    if MODE == "queued" or (MODE == "own-turn" and ANSWERED):
        say(type="system", subtype="init", model="fake", tools=[])
        own = [{"type": "text", "text": "not yours"}]
        say(type="assistant", uuid="b1", message={"id": "m0", "model": "fake", "content": own})
        params = {"_meta": {"claudecode/toolUseId": "t0"}}
        call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
        say(type="control_request", request_id="r", request={"subtype": "mcp_message", "message": call})
        say(type="result", subtype="success", is_error=False, result="not yours", origin={"kind": "task-notification"})
    if MODE == "queued":
        say(type="command_lifecycle", command_uuid=frame["uuid"], state="started")
        tag = {}
    ANSWERED.append(text)
    tools = ["Bash"] if MODE == "tools" else []
    version = os.environ.get("FAKE_VERSION", "2.9.9")
    say(type="system", subtype="init", model="fake", claude_code_version=version, tools=tools, **tag)
    if MODE == "noise":
        sys.stdout.write("\nwarning: an old notice\n\x00\xff\n[1,2]\n" + "[" * 100_000 + "\n")
    if MODE == "other-result":
        say(type="result", subtype="success", is_error=False, result="not yours", user_message_uuids=["another"])
    if MODE == "tools":
        forever()
    if MODE in ("no-end", "postscript"):
        for event in ({"type": "message_start", "message": {"id": "m1"}}, {"delta": {"stop_reason": "end_turn"}}):
            say(type="stream_event", event={"type": "message_delta", **event})
        if MODE == "no-end":
            forever()
        for _ in range(2):
            say(type="postscript")
    say(type="assistant", uuid="a1", message={"id": "m1", "model": "fake", "content": [{"type": "text", "text": said}]})
    say(type="result", subtype="success", is_error=False, result=said, num_turns=1, **tag)


def respond(request_id: str, request: dict[str, object]) -> None:
    gate = os.environ.get("FAKE_GATE", "/")
    while request["subtype"] == "initialize" and not os.path.exists(gate):
        time.sleep(0.01)
    well = MODE != "refuses" and (MODE != "unclaimed" or request["subtype"] != "claim_session")
    how = {"subtype": "success"} if well else {"subtype": "error", "error": "_token=a" * 1_000_000}
    say(type="control_response", response={**how, "request_id": request_id})


def main() -> None:
    if "--version" in sys.argv:
        print("2.9.9 (Claude Code)")
        return
    if "--help" in sys.argv:
        print("  -p, --print   Print\n  --session-id <uuid>  x\n  -r, --resume [v]  x\n  --input-format <f>  x")
        print('  --permission-mode <mode>  x (choices: "acceptEdits",\n      "plan")\n  --tools <tools...>  x')
        print("  --effort <level>  x")
        return
    if MODE == "deaf":
        forever()
    if MODE == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if MODE == "crash":
        sys.exit("error: unknown option '--strict'")
    if MODE == "forget":
        sys.exit(f"No conversation found with session ID: {SESSION}")
    if MODE == "orphan":
        subprocess.Popen(["sleep", "3600"])
    if MODE == "hasty":
        os.read(0, 1)
        say(type="result", subtype="success", is_error=False, result="yes", num_turns=1)
        forever()
    if MODE in ("asking", "closed"):
        os.read(0, 1)
        if MODE == "closed":
            socket.socket(fileno=0).shutdown(socket.SHUT_RD)  # not `close`: uvloop has given it a second descriptor
        for _ in range(SIZE):
            say(type="control_request", request_id="r", request={"subtype": "s" * 100_000})
        if MODE == "closed":
            say(type="result", subtype="success", is_error=False, result="yes", num_turns=1)
        forever()
    if MODE == "flood":
        for _ in range(64):
            sys.stderr.write("e" * 65535 + "\n")
        sys.stderr.write("the last words")
        sys.stderr.flush()
    for line in sys.stdin.buffer:
        if MODE == "no-result":
            return
        while MODE == "gate" and not os.path.exists(os.environ["FAKE_GATE"]):
            time.sleep(0.01)
        frame = json.loads(line)
        if frame["type"] == "control_request" and frame["request"]["subtype"] != "interrupt":
            respond(frame["request_id"], frame["request"])
        elif frame["type"] == "control_request" and MODE != "stubborn-turn":
            say(type="result", subtype="error_during_execution", is_error=True, terminal_reason="aborted_streaming")
        elif MODE not in ("silent", "stubborn-turn"):
            began = time.monotonic()
            while MODE == "slow" and time.monotonic() < began + 3.0:
                pass
            answer(frame)
    if MODE == "full-disk":
        say(type="system", subtype="session_writes_lost", error_code="ENOSPC", lost=["transcript"])
    if MODE == "stubborn":
        forever()


main()
