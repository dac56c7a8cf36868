"""A proxy in a process of its own, that can be told to die at a named step of a turn.

`run` reads from its argument {"settings": …, "die_at": STEP | null, "runs": "asyncio" | "uvloop" | "thread",
"like": "here" | "macos"}.

It reads requests from stdin, one JSON object a line: {"say": […], "die": bool, …} with further fields of the request
("tools" as JSON), and answers with one JSON object a line. What is said are texts.
One request after the other; with {"wait": false} the next is read at once. {"decide": DECISION} answers the next tool
that waits for a person. With a profile that has `approve`, the CLI is taken to have passed its self-check.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import structlog
import uvloop

from cli_session_proxy.backends.claude.process.process import ClaudeProcess
from cli_session_proxy.backends.claude.sessions.manager import Sessions
from cli_session_proxy.domain.approvals import OUTCOMES, Decision, Verdict
from cli_session_proxy.domain.models import Tool
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.errors import ProxyError
from cli_session_proxy.settings import Settings
from cli_session_proxy.stores.sql.store import SqlStore
from tests.clis import checked
from tests.macos import like_macos
from tests.talking import request, text
from tests.until import until

# step -> the method it is at, and whether it is before or after it
STEPS: dict[str, tuple[type, str, bool]] = {
    "before journal": (SqlStore, "begin", True),
    "after journal": (SqlStore, "begin", False),
    "after send": (ClaudeProcess, "_write", False),
    "after result": (Sessions, "capture", True),
    "before commit": (SqlStore, "commit", True),
    "before acknowledge": (SqlStore, "commit", False),
}
# Of a turn in which a tool waits for a person.
WORDS: dict[str, tuple[type, str, bool]] = {
    "before the question is stored": (SqlStore, "note", True),
    "after the word is stored": (ClaudeProcess, "permit", True),
    "after the word is sent": (ClaudeProcess, "permit", False),
}
# Not on the way of every turn.
MORE_STEPS: dict[str, tuple[type, str, bool]] = {"waits for a limit": (SqlStore, "postpone", False)}
armed = False


def deadly(owner: type, name: str, *, before: bool) -> None:
    method = getattr(owner, name)

    def die() -> None:
        if armed:
            os.kill(os.getpid(), signal.SIGKILL)

    async def awaited(*args: Any, **more: Any) -> Any:
        if before:
            die()
        result = await method(*args, **more)
        die()
        return result

    def called(*args: Any, **more: Any) -> Any:
        if before:
            die()
        result = method(*args, **more)
        die()
        return result

    setattr(owner, name, awaited if inspect.iscoroutinefunction(method) else called)


async def answered(engine: Engine, order: dict[str, Any]) -> None:
    order["tools"] = tuple(Tool.from_json(tool) for tool in order.pop("tools", ()))
    try:
        answer = await engine.submit(request(*order.pop("say"), **order))
        turn = await answer.turn()
        answer.acknowledge()
        said = {"turn": turn.id, "text": text(turn), "continuity": turn.continuity, "output": turn.output}
    except ProxyError as exc:
        said = {"error": exc.code, "message": exc.message}
    print(json.dumps(said), flush=True)


async def decided(engine: Engine, decision: Decision) -> None:
    await until(lambda: bool(engine.asked("local")))
    (question,) = engine.asked("local")
    verdict = Verdict(OUTCOMES[decision], "local")
    await engine.approve("local", question.agent.agent_id, question.waiting.approval.id, verdict)


async def main() -> None:
    global armed
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    told = json.loads(sys.argv[1])
    if told["like"] == "macos":
        like_macos()
    if told["die_at"] is not None:
        owner, name, before = (STEPS | WORDS | MORE_STEPS)[told["die_at"]]
        deadly(owner, name, before=before)
    settings = Settings(**told["settings"])
    if any(profile.approve for profile in settings.profiles.values()):
        assert settings.claude_bin is not None
        await checked(settings.claude_bin, Path.cwd())
    engine = Engine(settings)
    await engine.start()
    stop = asyncio.Event()
    if told["runs"] != "thread":  # where signals are not handled
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    stopped = asyncio.create_task(stop.wait())
    print(json.dumps({"ready": os.getpid()}), flush=True)
    asked = []
    while not stop.is_set():
        reading = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
        await asyncio.wait({reading, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not reading.done() or not reading.result():
            break
        order = json.loads(reading.result())
        armed, wait = order.pop("die", False), order.pop("wait", True)
        decision: Decision | None = order.pop("decide", None)
        asked.append(asyncio.create_task(answered(engine, order) if decision is None else decided(engine, decision)))
        if wait:
            await asked[-1]
    stopped.cancel()
    await engine.stop()
    await asyncio.gather(*asked)
    os._exit(0)  # a thread may still wait for a line of stdin


def run() -> None:
    """As a host that embeds the engine, as `serve`, or as the LiteLLM provider does."""
    match json.loads(sys.argv[1])["runs"]:
        case "uvloop":
            uvloop.run(main())
        case "thread":
            thread = threading.Thread(target=asyncio.run, args=[main()])
            thread.start()
            thread.join()
        case _:
            asyncio.run(main())
