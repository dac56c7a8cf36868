"""`serve` in a process that notes which functions of the package a turn calls: `trace` starts it and says when.

A line on stdin begins the noting, the next one ends it. Either is answered by a line on stdout that begins with MARK;
at the end the calls follow it as JSON.

A call is the turn's where it is made in its context: that begins with the bytes of a client (`BEGIN`), and goes on in
each task, callback and thread that is started from there, and in the task that reads the output of the warm process,
which an earlier turn of the same client started. Services (`SERVICES`) are beside it, whoever starts them: leases,
watchers, the reaper of processes. The noting stops at the acknowledgement (`END`): what follows is not waited for.
"""

from __future__ import annotations

import asyncio
import concurrent.futures.thread
import contextvars
import importlib
import json
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import CodeType, FrameType
from typing import Any, TypeVar

import cli_session_proxy

T = TypeVar("T")

PACKAGE = os.path.dirname(cli_session_proxy.__file__) + os.sep
MARK = "traced:"
BEGIN = "Connection.data_received"
END = "Answer.acknowledge"
PATIENCE = 30.0  # seconds
SERVICES = {
    "cli_session_proxy.tasks": "Tasks",
    "cli_session_proxy.backends.claude.process.pool": "ProcessTable",
}
IN_TURN = contextvars.ContextVar("in_turn", default=False)


class Notes:
    """Calls of the package's own functions by a turn, in order, in all threads."""

    def __init__(self) -> None:
        self.on = False
        self.ended = threading.Event()
        self.calls: list[CodeType] = []

    def profile(self, frame: FrameType, event: str, _arg: Any) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        if frame.f_code.co_qualname == BEGIN:
            IN_TURN.set(True)
        if self.on and IN_TURN.get():
            self.calls.append(frame.f_code)
            if frame.f_code.co_qualname == END:
                self.on = False
                self.ended.set()

    def obey(self) -> None:
        """On its own thread, until stdin ends."""
        sys.setprofile(None)
        for line in sys.stdin:
            if line == "end\n":  # the client may have its answer before that is acknowledged
                self.ended.wait(PATIENCE)
            self.on = line == "begin\n"
            calls = [(code.co_filename.removeprefix(PACKAGE), code.co_qualname) for code in self.calls]
            self.calls = []
            print(MARK, json.dumps(calls), flush=True)


class ThreadPool(ThreadPoolExecutor):
    """Its threads work in the context of whoever gives them work."""

    def submit(self, function: Callable[..., T], /, *given: Any, **named: Any) -> Future[T]:
        return super().submit(contextvars.copy_context().run, function, *given, **named)


def follow_the_store() -> None:
    """The same for the store's own threads: what they run, and what follows its end."""
    from cli_session_proxy.stores.sql import database  # noqa: PLC0415 - as below

    run, finish = database.ThreadPool.run, database.ThreadPool._finish
    contexts: dict[asyncio.Future[Any], contextvars.Context] = {}

    def ran(threads: database.ThreadPool, work: Callable[[], T]) -> asyncio.Future[T]:
        context = contextvars.copy_context()
        done = run(threads, partial(context.run, work))
        contexts[done] = contextvars.copy_context()
        return done

    def finished(threads: database.ThreadPool, done: asyncio.Future[Any], *outcome: Any) -> None:
        contexts.pop(done).run(finish, threads, done, *outcome)

    database.ThreadPool.run, database.ThreadPool._finish = ran, finished  # type: ignore[method-assign, assignment]


def beside(start: Callable[..., T]) -> Callable[..., T]:
    """The same, in a context that is no turn's."""

    def started(*given: Any) -> T:
        context = contextvars.copy_context()
        context.run(IN_TURN.set, False)
        return context.run(start, *given)

    return started


def main() -> None:
    concurrent.futures.ThreadPoolExecutor = concurrent.futures.thread.ThreadPoolExecutor = ThreadPool  # type: ignore[misc]
    follow_the_store()
    for module, owner in SERVICES.items():
        served = getattr(importlib.import_module(module), owner)
        served.serve = beside(served.serve)
    from cli_session_proxy.cli import main as run  # noqa: PLC0415 - after the profile is set: what it imports is ours

    run(["serve"])


if __name__ == "__main__":
    notes = Notes()
    threading.setprofile(notes.profile)
    sys.setprofile(notes.profile)
    threading.Thread(target=notes.obey, daemon=True).start()
    main()
