"""What the tests of this folder share: a turn in one call, and recorded frames."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cli_session_proxy.backends.claude.process.events import AssistantMessage, CliEvent, Result
from cli_session_proxy.backends.claude.process.process import ClaudeProcess

DATA = Path(__file__).parent / "data"


async def ask(process: ClaudeProcess, prompt: str | list[dict[str, Any]] = "hi") -> list[CliEvent]:
    content = [{"type": "text", "text": prompt}] if isinstance(prompt, str) else prompt
    return [event async for event in process.turn(str(uuid.uuid4()), content)]


def result(events: list[CliEvent]) -> Result:
    assert isinstance(events[-1], Result)
    return events[-1]


def said(events: list[CliEvent]) -> str:
    return "".join(
        block.get("text", "") for event in events if isinstance(event, AssistantMessage) for block in event.blocks
    )


def recorded(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text().splitlines()]


def is_gone(pid: int) -> bool:
    """Neither running nor a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def group(pgid: int) -> list[str]:
    """The states of the processes of a group that still run (an unreaped orphan is init's business)."""
    listed = subprocess.run(["ps", "-A", "-o", "pgid=,stat="], capture_output=True, text=True, check=True, timeout=10)
    rows = [line.split() for line in listed.stdout.splitlines()]
    return [state for number, state in rows if int(number) == pgid and not state.startswith("Z")]


async def unchecked(_arguments: object, _schema: dict[str, object]) -> str | None:
    """A `Check` for tools that are not strict."""
    return None


@contextmanager
def free_descriptors(number: int) -> Iterator[None]:
    """This process can open so many more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.open(os.devnull, os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (held[0] + 40, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(held[0]))
        for _ in range(number):
            os.close(held.pop())
        yield
    finally:
        for one in held:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
