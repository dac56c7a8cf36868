"""Processes without a CLI behind them: they start, answer, die and end when a test says so.

A `Stage` stands in for `ClaudeProcess` where the pool starts its processes, and watches what must always hold.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from cli_session_proxy.backends.claude.process import pool as pools
from cli_session_proxy.backends.claude.process.capability import Capability
from cli_session_proxy.backends.claude.process.child import Launch
from cli_session_proxy.errors import ClaudeUnavailable
from cli_session_proxy.settings import Profile

CLI = Capability(Path("/nowhere/claude"), "2.9.9", (2, 9, 9), frozenset({"--system-prompt-snapshot"}), frozenset())


def launch(session_id: str | None = None, **options: Any) -> Launch:
    given: dict[str, Any] = {"resume": False, "model": "default", "system_prompt": "Be terse.", "env": ()}
    return Launch(
        capability=CLI,
        cwd=Path("/nowhere"),
        session_id=session_id or str(uuid.uuid4()),
        profile=Profile(),
        **{**given, **options},
    )


class Gate:
    """Open, until a test shuts it: then whoever comes waits, and is counted."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._came = asyncio.Event()

    def shut(self) -> None:
        self._open.clear()
        self._came.clear()

    def open(self) -> None:
        self._open.set()

    async def reached(self) -> None:
        await asyncio.wait_for(self._came.wait(), 60)

    async def passed(self) -> None:
        if not self._open.is_set():
            self._came.set()
            await self._open.wait()


class Actor:
    """One process. It is alive from the moment its start begins until its end is over."""

    def __init__(self, stage: Stage, wanted: Launch, ended: Callable[[], None]) -> None:
        self.launch = wanted
        self.pid = next(stage.pids)
        self.start_time = "1"
        self.session_id = wanted.session_id
        self.last_used = stage.now()
        self.started = asyncio.Event()
        self.busy = False
        self.waiting = False
        self.returncode: int | None = None
        self.writes_lost: str | None = None
        self.unkillable = False
        self.fault: Exception | None = None  # why it cannot be closed properly
        self.closes_at_once = False
        self._stage = stage
        self._ended = ended
        self._spoiled = False
        self._closing: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        return self.returncode is None

    @property
    def cwd(self) -> Path:
        return self.launch.cwd

    @property
    def usable(self) -> bool:
        return self.alive and not self.busy and not self._spoiled and self._closing is None and not self.waiting

    @property
    def died(self) -> bool:
        return not self.alive and not self.busy and not self._spoiled and self._closing is None

    def die(self) -> None:
        """By itself, or by somebody's hand."""
        if self.returncode is None:
            self.returncode = -9
            self.started.set()
            self._ended()

    def kill(self) -> None:
        self._spoiled = True
        self.die()

    async def adapt(self, wanted: Launch) -> bool:
        if not await self._asked("adapt"):
            return False
        self.launch = wanted
        return True

    async def boot(self) -> bool | None:
        return await self._asked("boot")

    async def claim(self, wanted: Launch) -> bool | None:
        taken = await self._asked("claim")
        if taken:
            self.launch = Launch(**{**_fields(wanted), "session_id": self.session_id})
        return taken

    async def _asked(self, what: str) -> bool | None:
        if not self.usable:
            return None
        self.busy = self._spoiled = True
        try:
            await self._stage.gates[what].passed()
        finally:
            self.busy = False
        answer = self._stage.answers[what] if self.alive else None
        self._spoiled = answer is None
        if answer is not None:
            self.started.set()
        return answer

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.create_task(self._end())
        cancelled: asyncio.CancelledError | None = None
        while not self._closing.done():
            try:
                await asyncio.shield(self._closing)
            except asyncio.CancelledError as exc:
                cancelled = exc
        self._closing.result()
        if cancelled is not None:
            raise cancelled

    async def _end(self) -> None:
        if not self.closes_at_once:
            await self._stage.gates["close"].passed()
        if self.unkillable:
            self._stage.living.discard(self)
            raise ClaudeUnavailable(f"Claude CLI process {self.pid} cannot be killed: look at the machine")
        self.die()
        self._stage.living.discard(self)
        if self.fault is not None:
            raise self.fault


def _fields(wanted: Launch) -> dict[str, Any]:
    return {name: getattr(wanted, name) for name in Launch.__slots__}


class Stage:
    """`living` are the processes from the begin of their start to the end of their end."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.pids = itertools.count(10**9)  # no pid of this machine
        self.now = now
        self.gates = {what: Gate() for what in ("spawn", "adapt", "boot", "claim", "close")}
        self.answers: dict[str, bool | None] = {"adapt": True, "boot": True, "claim": True}
        self.living: set[Actor] = set()
        self.ever: list[Actor] = []
        self.on_exit: list[int] = []
        self.most = 0
        self.doubled = False  # a session had two processes at once

    async def spawn(
        self, wanted: Launch, settings: object, guardian: object, ended: Callable[[], None] = lambda: None
    ) -> Actor:
        actor = Actor(self, wanted, ended)
        self.living.add(actor)
        self.ever.append(actor)
        self.most = max(self.most, len(self.living))
        self.doubled |= len({one.session_id for one in self.living}) < len(self.living)
        try:
            await self.gates["spawn"].passed()
        except BaseException:
            self.living.discard(actor)
            raise
        return actor

    @contextmanager
    def set(self) -> Iterator[Stage]:
        clock = SimpleNamespace(monotonic=self.now)
        with (
            mock.patch.object(pools, "ClaudeProcess", SimpleNamespace(spawn=self.spawn)),
            mock.patch.object(pools, "time", clock),
        ):
            yield self
