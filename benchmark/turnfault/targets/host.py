"""Runs somebody's class in a process of its own: `python host.py FILE.py:Class FOLDER`. Standard library only, since it
runs in the environment of what it hosts.

The class is made with (folder, base_url): what it keeps goes to `folder`, its model is at `base_url`. It has
`ask(agent, words) -> answer`, `async` or not; with a parameter `model` it is told which. A line of JSON in is a
question {"id", "agent", "words", "model"}, or {"id", "cancel": true} when its client has left; a line out is
{"id", "answer"} or {"id", "error"}, and {"ready": true} first.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import json
import os
import sys
from typing import Any


def loaded(spec: str) -> Any:
    """The class at `FILE.py:Class` or `module:Class`."""
    place, _, name = spec.rpartition(":")
    if not place.endswith(".py"):
        return getattr(importlib.import_module(place), name)
    found = importlib.util.spec_from_file_location("hosted", place)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules["hosted"] = module
    found.loader.exec_module(module)
    return getattr(module, name)


async def serve(spec: str, folder: str) -> None:
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what the class prints is logged

    def say(data: dict[str, Any]) -> None:
        out.write(json.dumps(data).encode() + b"\n")

    target = loaded(spec)(folder, os.environ["ANTHROPIC_BASE_URL"])
    takes_model = "model" in inspect.signature(target.ask).parameters
    running: dict[int, asyncio.Task[None]] = {}

    async def answer(asked: dict[str, Any]) -> None:
        more = {"model": asked["model"]} if takes_model else {}
        try:
            if inspect.iscoroutinefunction(target.ask):
                text = await target.ask(asked["agent"], asked["words"], **more)
            else:
                text = await asyncio.to_thread(target.ask, asked["agent"], asked["words"], **more)
            say({"id": asked["id"], "answer": str(text)})
        except Exception as exc:  # noqa: BLE001 - whatever it raises is what its caller gets
            print(f"{type(exc).__name__}: {exc}", file=sys.stderr, flush=True)
            say({"id": asked["id"], "error": type(exc).__name__})
        finally:
            del running[asked["id"]]

    reader = asyncio.StreamReader(limit=64 * 1024 * 1024)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    say({"ready": True})
    while line := await reader.readline():
        asked = json.loads(line)
        if asked.get("cancel"):
            if asked["id"] in running:
                running[asked["id"]].cancel()
        else:
            running[asked["id"]] = asyncio.ensure_future(answer(asked))


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], sys.argv[2]))
