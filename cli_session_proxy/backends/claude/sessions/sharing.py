"""Shared processes for one-shot questions: an unnamed request without tools that begins a conversation needs no session
of its own before its second turn.

A process answers such questions one after the other, for one owner, profile, model and system prompt, and is rewound to
its beginning after each. It has a directory of its own. Its transcript is emptied before each question and removed with
the process. The chain stores the exchange as usual; its session is written at the second turn.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ....errors import QueueFull
from ....sandbox import Sandboxes
from ....settings import Settings
from ....tasks import failures_logged
from ...base import Job
from .. import transcript
from ..process import capability as cli
from ..process import running
from ..process.pool import Pool
from ..process.process import ClaudeProcess, Launch
from ..transcript import files

# Questions per process, and its longest idle time in seconds.
USES, IDLE = 100, 30.0
# How many kinds of questions are remembered, and of each how many first questions.
MOST_KINDS, MOST_FIRSTS = 1024, 32
# A kind gets shared processes once so many first questions were not continued, if fewer than this share were continued.
NOT_CONTINUED, CONTINUED_SHARE = 2, 1 / 3
# Seconds for the CLI to note a rewind in its transcript (100 ms on 2.1.330).
NOTE_WAIT, NOTE_POLL = 1.0, 0.02
SOON = 0.03  # seconds until a process that has answered is given back
RETRY_AFTER = 1.0  # seconds

# Owner, profile, model, effort and the system prompt's SHA-256 (a prompt may be very large).
Kind = tuple[str, str | None, str, str | None, bytes]


@dataclass(eq=False, slots=True)
class SharedProcess:
    """A process that answers questions of several agents."""

    process: ClaudeProcess
    path: Path  # of its transcript
    group: _Group
    agent_key: int  # the last agent, whose question is in the transcript
    uses: int = 0
    total: float = 0.0  # the cost of all its turns in USD, as the CLI reports it


@dataclass(slots=True)
class SharedUse:
    """One turn on a shared process."""

    shared: SharedProcess
    session_id: str  # the agent's own, which is written at its second turn
    clean: bool = False  # the process wrote only records of this turn


@dataclass(slots=True)
class _FirstQuestion:
    """The question that began an agent's conversation."""

    agent_key: int
    at: float
    continued: bool = False  # a second turn followed


@dataclass(slots=True)
class _Group:
    """The processes of one kind."""

    kind: Kind
    idle: list[SharedProcess] = field(default_factory=list)
    count: int = 0  # all of them, the starting ones too
    starting: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class Sharing:
    """One per engine, on one event loop."""

    def __init__(self, settings: Settings, pool: Pool, sandboxes: Sandboxes, projects: transcript.Projects) -> None:
        self._settings = settings
        self._pool = pool
        self._sandboxes = sandboxes
        self._projects = projects
        self._groups: dict[Kind, _Group] = {}
        self._firsts: OrderedDict[Kind, deque[_FirstQuestion]] = OrderedDict()
        self._place: tuple[Path, Path] | None = None
        self._transcripts: set[Path] = set()  # transcripts of live processes

    # --- which turns share

    def is_for(self, job: Job) -> bool:
        """Whether this turn is a one-shot question for a shared process."""
        profile, agent = job.profile, job.agent
        if self._settings.share_processes == "never" or agent.named or job.parent is not None or agent.head is not None:
            return False
        own_files = profile.tools or profile.add_dirs or profile.mcp_config or profile.setting_sources
        if (
            own_files
            or profile.confined
            or job.offers
            or job.remedies
            or not job.prompt
            or not (job.system or "").strip()
        ):
            return False
        known = cli.known(cli.find(self._settings))
        if known is None or not known[1].was_seen("rewind_conversation") or not known[1].warm:
            return False
        return self._is_rarely_continued(job) or self._settings.share_processes == "always"

    def _is_rarely_continued(self, job: Job) -> bool:
        """Whether first questions of this kind are rarely continued, by past experience."""
        kind, now = kind_of(job), time.monotonic()
        firsts = self._firsts.setdefault(kind, deque(maxlen=MOST_FIRSTS))
        self._firsts.move_to_end(kind)
        while len(self._firsts) > MOST_KINDS:
            self._firsts.popitem(last=False)
        while firsts and firsts[0].at < now - self._settings.process_idle:
            firsts.popleft()
        others = [first for first in firsts if first.agent_key != job.agent.key]
        if len(others) == len(firsts):  # else this is another attempt of the same question
            firsts.append(_FirstQuestion(job.agent.key, now))
        continued = sum(first.continued for first in others)
        return len(others) - continued >= NOT_CONTINUED and continued < CONTINUED_SHARE * len(others)

    def record_second_turn(self, job: Job) -> None:
        """The agent of this second turn has continued its first question."""
        for first in self._firsts.get(kind_of(job), ()):
            if first.agent_key == job.agent.key:
                first.continued = True

    def place(self) -> tuple[Path, Path]:
        """The working directory and TMPDIR of shared processes."""
        self._place = self._place or self._sandboxes.agentless("shared")
        return self._place

    # --- a process for one question

    async def take(self, job: Job, launch: Callable[[str], Launch]) -> SharedProcess:
        """A process with an empty memory, in use. Raises QueueFull, and the errors of `Pool.checkout`."""
        kind = kind_of(job)
        group = self._groups.setdefault(kind, _Group(kind))
        try:
            async with asyncio.timeout(self._settings.spawn_timeout):
                while True:
                    while group.idle:
                        shared = group.idle.pop()
                        if await self._take_idle(shared, launch):
                            shared.agent_key = job.agent.key
                            return shared
                        self._decrement(group)
                    # Start another one only if none is free soon, and few are starting.
                    if group.count > group.starting and await self._idle_soon(group):
                        continue
                    if group.starting < self._settings.max_spawns and group.count < self._settings.max_processes:
                        return await self._start(group, launch, job.agent.key)
                    group.changed.clear()
                    await group.changed.wait()
        except TimeoutError as exc:
            why = "every Claude CLI is busy: try again later, or raise max_processes"
            raise QueueFull(why, retry_after=RETRY_AFTER) from exc

    @staticmethod
    async def _idle_soon(group: _Group) -> bool:
        """Wait a moment for a process to be given back: that happens after its client has the answer."""
        group.changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(SOON):
                await group.changed.wait()
                return True
        return False

    async def _take_idle(self, shared: SharedProcess, launch: Callable[[str], Launch]) -> bool:
        """Take it from the pool, and empty its transcript. False if the pool has ended it."""
        try:
            process = await self._pool.take_warm(launch(shared.process.launch.session_id))
        except BaseException:
            self._decrement(shared.group)  # it is in no list, so nobody else counts it
            raise
        if process is not shared.process:
            if process is not None:
                await self._pool.checkin(process)
            return False
        with suppress(FileNotFoundError):
            os.truncate(shared.path, 0)
        return True

    async def _start(self, group: _Group, launch: Callable[[str], Launch], agent_key: int) -> SharedProcess:
        group = self._groups.setdefault(group.kind, group)
        group.count, group.starting = group.count + 1, group.starting + 1
        try:
            process, _ = await self._pool.checkout(launch(str(uuid.uuid4())))
        except BaseException:
            self._decrement(group)
            raise
        finally:
            group.starting -= 1
            group.changed.set()
        shared = SharedProcess(process, self._projects.path(process.cwd, process.session_id), group, agent_key)
        self._transcripts.add(shared.path)
        process.gone.add_done_callback(lambda _: self._gone(shared))
        return shared

    def _decrement(self, group: _Group) -> None:
        """Count one process less in its group."""
        group.count -= 1
        group.changed.set()
        if not group.count and self._groups.get(group.kind) is group:
            del self._groups[group.kind]

    async def give_back(self, use: SharedUse, frame_uuid: str, *, at_once: bool) -> None:
        """The answer was stored: rewind the process to its beginning for the next question. `at_once`: also erase the
        question from its transcript now."""
        shared = use.shared
        shared.uses += 1
        group, process = shared.group, shared.process
        reusable = False
        try:
            if use.clean and shared.uses < USES and process.usable and await process.rewind(frame_uuid, frame_uuid):
                if at_once:
                    await self._empty_after_rewind(shared.path)
                await self._pool.checkin(process, stays=IDLE)
                reusable = not process.gone.done()
        finally:
            if not reusable:
                await self.end(use)
        if reusable:
            group.idle.append(shared)
            group.changed.set()

    async def end(self, use: SharedUse) -> None:
        """End a process that may be unclean, and remove its transcript."""
        try:
            await self._pool.discard(use.shared.process.launch.session_id)
            self._remove_transcript(use.shared.path)  # after its death: a cut answer may be written late
        finally:
            self._decrement(use.shared.group)

    async def forget(self, agent_key: int) -> None:
        """Erase this agent's question from all shared processes."""
        for group in list(self._groups.values()):
            for shared in [one for one in group.idle if one.agent_key == agent_key]:
                group.idle.remove(shared)
                await self.end(SharedUse(shared, ""))

    def _gone(self, shared: SharedProcess) -> None:
        self._remove_transcript(shared.path)
        if shared in shared.group.idle:
            shared.group.idle.remove(shared)
            self._decrement(shared.group)

    def _remove_transcript(self, path: Path) -> None:
        self._transcripts.discard(path)
        with failures_logged("shared_transcript_left", path=str(path)):
            files.remove(path)

    async def _empty_after_rewind(self, path: Path) -> None:
        """Empty the transcript after the CLI has noted the rewind there: the note has the prompt."""
        give_up = time.monotonic() + NOTE_WAIT
        while time.monotonic() < give_up:
            with suppress(OSError):
                if transcript.REWOUND in await asyncio.to_thread(path.read_bytes):
                    break
            await asyncio.sleep(NOTE_POLL)
        with suppress(FileNotFoundError):
            os.truncate(path, 0)

    # --- leftovers

    async def sweep(self) -> None:
        """Remove transcripts of killed proxies: those that no live CLI has open."""
        cwd, _ = self.place()
        for folder in self._projects.folders(cwd):
            for path in await asyncio.to_thread(files.sessions_in, folder):
                if path not in self._transcripts and await running.holder(self._projects.config_dir, path.stem) is None:
                    await asyncio.to_thread(files.remove, path)

    def close(self) -> None:
        """Remove the transcripts, after the processes have ended."""
        for path in list(self._transcripts):
            self._remove_transcript(path)


def kind_of(job: Job) -> Kind:
    system_hash = hashlib.sha256((job.system or "").encode("utf-8", "surrogatepass")).digest()
    return job.agent.owner, job.turn.profile, job.model, job.effort, system_hash
