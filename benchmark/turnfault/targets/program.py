"""A program that lives between turns: started, ended, and killed with all that it started."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import signal
from pathlib import Path

import psutil

from ..errors import TargetError
from ..provider.upstream import Upstream
from .base import STOP, environment, kill


class Program:
    """`start` is its command, `stop` the one that ends it (None: SIGTERM). What it logs is in `folder`/log."""

    def __init__(self, start: str, upstream: Upstream, folder: Path, config: Path | None, stop: str | None) -> None:
        self._start = start
        self._stop = stop
        self._upstream = upstream
        self._folder = folder
        self._config = config or folder / "config"
        self.process: asyncio.subprocess.Process | None = None

    async def start(self, *, piped: bool = False) -> asyncio.subprocess.Process:
        """`piped`: stdin and stdout are pipes to us, and no module path of ours reaches its interpreter."""
        env = environment(self._folder / "home", self._upstream, self._config)
        if piped:
            env.pop("PYTHONPATH", None)
        pipe, limit = asyncio.subprocess.PIPE, 64 * 1024 * 1024
        try:
            with (self._folder / "log").open("ab") as log:
                self.process = await asyncio.create_subprocess_exec(
                    *shlex.split(self._start), env=env, cwd=self._folder, start_new_session=True, limit=limit,
                    stdin=pipe if piped else asyncio.subprocess.DEVNULL, stdout=pipe if piped else log, stderr=log,
                )  # fmt: skip
        except OSError as exc:
            raise TargetError(f"cannot start {self._start!r} (it runs in a folder of its own): {exc}") from exc
        return self.process

    def said(self) -> str:
        """The end of its log."""
        log = self._folder / "log"
        return log.read_text(errors="replace")[-500:] if log.exists() else ""

    async def end(self, *, by_kill: bool) -> None:
        if self.process is None:
            return
        below = self.below()
        if self._stop is not None and not by_kill:
            env = environment(self._folder / "home", self._upstream, self._config)
            stopping = await asyncio.create_subprocess_exec(*shlex.split(self._stop), env=env, cwd=self._folder)
            await stopping.wait()
        elif self.process.returncode is None:
            self.process.send_signal(signal.SIGKILL if by_kill else signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP):
                await self.process.wait()
        except TimeoutError:
            self.process.kill()
            await self.process.wait()
        kill(below)
        self.process = None

    def below(self) -> list[psutil.Process]:
        """The processes that it started."""
        if self.process is None or self.process.returncode is not None:
            return []
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.Error:
            return []

    def kill_clis(self) -> bool:
        found = []
        for one in self.below():
            with contextlib.suppress(psutil.Error):
                if any("claude" in Path(word).name or "claude-code" in word for word in one.cmdline()[:2]):
                    found.append(one)
        return kill(found)
