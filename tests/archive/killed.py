"""A program that archives one agent and is killed at one step, as by kill -9."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cli_session_proxy.archive import places
from cli_session_proxy.archive.archiving import Archiver
from cli_session_proxy.archive.places import Directory
from cli_session_proxy.archive.sealed import ArchiveKey
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.export import incoming, portable
from cli_session_proxy.settings import Settings

from ..memory_backend import MemoryBackend

STEPS = (
    "before anything", "while it is written", "before it is put", "while it is put", "before its name",
    "once it is put", "once it is read back", "before it is deleted", "once its files are gone", "once it is deleted",
)  # fmt: skip


def die(*_: Any, **__: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def before(owner: Any, name: str) -> None:
    setattr(owner, name, die)


def after(owner: Any, name: str) -> None:
    """Dies once the function has done its work."""
    real: Callable[..., Any] = getattr(owner, name)
    if asyncio.iscoroutinefunction(real):

        async def done(*given: Any, **named: Any) -> None:
            await real(*given, **named)
            die()

        setattr(owner, name, done)
        return

    def sync(*given: Any, **named: Any) -> None:
        real(*given, **named)
        die()

    setattr(owner, name, sync)


def run(var: Path, folder: Path, key: Path, step: str) -> None:
    """In a process of its own."""
    asyncio.run(_archive(Settings(var=var, claude_config_dir=var, archive_key_file=key), folder, step))


async def _archive(settings: Settings, folder: Path, step: str) -> None:
    engine = Engine(settings, backend=MemoryBackend())
    await engine.start()
    archiver = Archiver(engine, Directory(folder), ArchiveKey.of(settings))
    agent = await engine.store.agent("local", "a")
    assert agent is not None
    match step:
        case "before anything":
            die()
        case "while it is written":
            before(portable._Writer, "end")
        case "before it is put":
            before(Directory, "put")
        case "while it is put":
            before(places, "to_drive")
        case "before its name":
            before(Path, "replace")
        case "once it is put":
            after(Directory, "put")
        case "once it is read back":
            after(incoming, "check")
        case "before it is deleted":
            before(engine, "delete")
        case "once its files are gone":
            before(engine.store, "delete_agent")
        case "once it is deleted":
            after(engine, "delete")
    await archiver.archive(agent)
    await engine.stop()
