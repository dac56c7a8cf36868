"""The stage of a self-check: one CLI in its own folder, a scripted provider, and the observations so far.

Also compares the conversation in a request to the model with the expected one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import TypeVar

import psutil

from turnfault.provider.seen import Seen, parts, spoken
from turnfault.provider.upstream import Upstream

from ..backends.claude import transcript
from ..backends.claude.process import environment
from ..backends.claude.process.capability import Capability
from ..backends.claude.process.child import Launch
from ..backends.claude.process.events import AssistantMessage, CliEvent, PermissionRequest, ProcessDied, Result
from ..backends.claude.process.guardian import Guardian
from ..backends.claude.process.observed import NAMES, Name, Observation, Observed, Outcome
from ..backends.claude.process.process import ClaudeProcess
from ..backends.claude.transcript import Entry
from ..domain.approvals import Verdict
from ..domain.client_tools import ToolPolicy
from ..domain.models import JSON, Block, BlockDelta
from ..errors import ClaudeUnavailable, ProxyError
from ..sandbox import Sandboxes
from ..settings import Profile, Settings

T = TypeVar("T")

# Seconds. A step takes well below one. A CLI that sleeps for `ASLEEP` during a step, sampled every `LOOK`, has failed
# it. A CLI that is busy for that long runs on a slow machine: after `PATIENCE` the result is unknown.
ASLEEP, LOOK = 2.0, 0.1
PATIENCE = 25.0
# Seconds after the result within which the CLI must have written its transcript.
LATE = 3.0
POLL = 0.02
MODEL = "sonnet"
SYSTEM = "You are being checked."


class Differs(Exception):
    """The CLI did not do what was expected; the text says what it did."""


class Unable(Exception):
    """The result is unknown on this machine now; the text says why."""


@dataclass(slots=True)
class StageTurn:
    """One turn: the CLI's events, and its requests to the model."""

    uuid: str
    events: list[CliEvent] = field(default_factory=list)
    requests: list[Seen] = field(default_factory=list)

    @property
    def result(self) -> Result:
        """The turn's result. Raises `Differs` if the turn ended without one."""
        if not self.events or not isinstance(last := self.events[-1], Result):
            raise Differs(f"a turn had no result: {self.events[-1:]}")
        return last

    @property
    def blocks(self) -> list[Block]:
        return [block for event in self.events if isinstance(event, AssistantMessage) for block in event.blocks]

    def text(self, kind: str = "text") -> str:
        return "".join(str(block.get(kind, "")) for block in self.blocks if block.get("type") == kind)

    def streamed(self) -> str:
        """The text as it was streamed."""
        deltas = [event.delta for event in self.events if isinstance(event, BlockDelta)]
        return "".join(str(delta.get("text", "")) for delta in deltas if delta.get("type") == "text_delta")

    @property
    def request(self) -> Seen:
        """The turn's last request. Raises `Differs` if none reached the model."""
        if not self.requests:
            raise Differs(f"nothing reached the model; it said {self.result.text!r}")
        return self.requests[-1]


@dataclass
class Stage:
    """`cli` has the capabilities that its version should have, `hopeful` has all."""

    cli: Capability
    settings: Settings
    upstream: Upstream
    folder: Path
    until: float  # no step begins after this time of the loop
    guardian: Guardian = field(default_factory=Guardian)
    found: dict[Name, Observation] = field(default_factory=dict)
    runs: str | None = None  # the version that the CLI reports

    def __post_init__(self) -> None:
        everything: Observed = {name: Observation.of(name, "ok") for name in NAMES}
        self.hopeful = replace(self.cli, observed=everything)
        self.config_dir = environment.config_dir(self.settings)
        self.projects = transcript.Projects(self.settings, Sandboxes(self.settings), self.config_dir)

    def take(self, name: Name, outcome: Outcome) -> None:
        """Apply this outcome to both capabilities from now on."""
        seen: Observed = {name: Observation.of(name, outcome)}
        self.cli = replace(self.cli, observed={**self.cli.observed, **seen})
        self.hopeful = replace(self.hopeful, observed={**self.hopeful.observed, **seen})

    # --- observations

    def note(self, name: Name, outcome: Outcome, detail: str = "") -> None:
        """Note an observation. The first one of a name stands, unless it was "not tried"."""
        if name not in self.found or self.found[name].outcome == "not tried":
            self.found[name] = Observation.of(name, outcome, "" if outcome == "ok" else detail)

    @contextlib.asynccontextmanager
    async def observing(self, *names: Name, part: bool = False) -> AsyncIterator[None]:
        """Note the outcome of the body for these names. `part`: the body is part of the check; only note a failure."""
        outcome: Outcome = "ok"
        detail = ""
        try:
            yield
        except Unable as exc:
            outcome, detail = "not tried", str(exc)
        except Differs as exc:
            outcome, detail = "failed", str(exc)
        except ProcessDied as exc:
            killed = exc.returncode == -signal.SIGKILL and "exit code" in exc.why  # by another program, not by us
            why = f"{exc.why}: {exc.stderr.strip()[-200:]}" if exc.stderr.strip() else exc.why
            outcome, detail = ("not tried", f"something killed it ({why})") if killed else ("failed", why)
        except ProxyError as exc:
            lacked_resources = isinstance(exc, ClaudeUnavailable) and isinstance(exc.__cause__, OSError | RuntimeError)
            outcome, detail = "not tried" if lacked_resources else "failed", exc.message
        except OSError as exc:
            outcome, detail = "not tried", f"{exc.filename}: {exc.strerror}"
        if outcome != "ok" or not part:
            for name in names:
                self.note(name, outcome, detail)

    # --- a process

    def launch(
        self, cli: Capability, cwd: str = "one", *, session_id: str | None = None, resume: bool = False
    ) -> Launch:
        place, tmpdir = self.folder / cwd, self.folder / "tmp"
        for needed in (place, tmpdir):
            needed.mkdir(mode=0o700, exist_ok=True)
        env = environment.build(self.settings, tmpdir=tmpdir, config_dir=self.config_dir)
        return Launch(
            capability=cli, cwd=place, session_id=session_id or str(uuid.uuid4()), resume=resume, model=MODEL,
            profile=Profile(), env=tuple(sorted(env.items())), system_prompt=SYSTEM,
        )  # fmt: skip

    @contextlib.asynccontextmanager
    async def running(self, launch: Launch) -> AsyncIterator[ClaudeProcess]:
        if asyncio.get_running_loop().time() > self.until:
            raise Unable("no time was left")
        process = await ClaudeProcess.spawn(launch, self.settings, self.guardian)
        try:
            yield process
        finally:
            self.runs = process.runs or self.runs
            await process.close()

    async def bounded(self, process: ClaudeProcess, work: Coroutine[object, None, T]) -> T:
        """The result of `work`. Raises `Differs` if the CLI sleeps meanwhile, `Unable` if the machine is too slow."""
        task = asyncio.ensure_future(work)
        clock = asyncio.get_running_loop().time
        end, asleep = min(self.until, clock() + PATIENCE), 0.0
        try:
            while not task.done():
                before = clock()
                await asyncio.wait({task}, timeout=LOOK)
                slow = clock() - before > 2 * LOOK or _at_work(process.pid)
                asleep = 0.0 if slow else asleep + LOOK
                if asleep >= ASLEEP and not task.done():
                    raise Differs(f"it gave no answer, and slept for {ASLEEP:.0f} s")
                if clock() > end and not task.done():
                    raise Unable("no answer came in time, and it was at work all the time")
            return task.result()
        finally:
            task.cancel()
            await asyncio.wait({task})

    # --- a turn

    async def turn(
        self,
        process: ClaudeProcess,
        content: str | Sequence[Block],
        *,
        policy: ToolPolicy | None = None,
        results: Mapping[str, JSON] | None = None,
        frame_uuid: str | None = None,
        may_fail: bool = False,
        verdict: Verdict | None = None,
    ) -> StageTurn:
        """Send a prompt, or the results of called tools, and collect the events. Raises `Differs` if the turn fails.

        `verdict`: the answer if the CLI asks whether a tool may run.
        """
        blocks: Sequence[Block] = [{"type": "text", "text": content}] if isinstance(content, str) else content
        turn = StageTurn(frame_uuid or str(uuid.uuid4()))
        before = len(self.upstream.requests)

        async def collect() -> None:
            async with contextlib.aclosing(process.turn(turn.uuid, blocks, policy, results)) as events:
                async for event in events:
                    turn.events.append(event)
                    if isinstance(event, PermissionRequest) and verdict is not None:
                        process.permit(event, verdict)

        await self.bounded(process, collect())
        turn.requests = self.upstream.requests[before:]
        if isinstance(last := turn.events[-1], Result) and last.is_error and not may_fail:
            raise Differs(f"a turn ended as {last.subtype}: {last.text}")
        return turn

    # --- its files

    def transcript_of(self, launch: Launch) -> Path:
        """The path at which the proxy expects the session's transcript."""
        return self.projects.path(launch.cwd, launch.session_id)

    def written(self) -> list[str]:
        """All files below the CLI's directory, for an error message."""
        below = (Path(folder, name) for folder, _, names in os.walk(self.config_dir) for name in names)
        return sorted(str(path.relative_to(self.config_dir)) for path in below)


def _at_work(group: int) -> bool:
    """Whether a process of the group runs or waits for the disk."""
    for process in psutil.process_iter(["status"]):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            busy = process.info["status"] in (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP)
            if busy and os.getpgid(process.pid) == group:
                return True
    return False


async def until(true: Callable[[], bool], seconds: float) -> float | None:
    """Seconds until the condition held; None if it did not in time."""
    began = time.monotonic()
    while not true():
        if time.monotonic() - began > seconds:
            return None
        await asyncio.sleep(POLL)
    return time.monotonic() - began


# --- the conversation in a request, and the expected one

Texts = list[tuple[str, str]]

# The CLI adds a text that names the image's file, beside the image (2.1.329).
_IMAGE_NOTE = "[Image: source:"


def texts_in(request: Seen) -> Texts:
    """(role, text) of each block of the request's conversation, without the CLI's own additions."""
    return _texts(
        (str(message.get("role")), block)
        for message in request.messages
        if message.get("role") != "system"
        for block in parts(message.get("content"))
    )


def texts_of(role: str, blocks: Iterable[Block]) -> Texts:
    """(role, text) of each block of one message."""
    return _texts((role, block) for block in blocks)


def texts_of_path(entries: Iterable[Entry]) -> Texts:
    """(role, text) of each block of a path's records."""
    return _texts(pair for entry in entries for pair in entry.message_blocks())


def difference(expected: Sequence[tuple[str, str]], actual: Sequence[tuple[str, str]]) -> str | None:
    """The first difference, as a sentence; None if they are equal."""
    for number, (theirs, ours) in enumerate(zip_longest(actual, expected), 1):
        if theirs != ours:
            return f"block {number} is {_quoted(theirs)} instead of {_quoted(ours)}"
    return None


def _quoted(one: tuple[str, str] | None) -> str:
    return "nothing" if one is None else f"{one[0]}: {one[1][:120]!r}"


def _texts(blocks: Iterable[tuple[str, Block]]) -> Texts:
    return [(role, text) for role, block in blocks if (text := _text(block)) is not None]


def _text(block: Block) -> str | None:
    """A block as the model reads it. The CLI never sends an unsigned thought."""
    kind = block.get("type")
    if kind == "text":
        text = spoken(str(block.get("text", "")))
        if text is None or text.startswith(_IMAGE_NOTE):
            return None
        return f"text {text}".removesuffix("\n")  # the CLI appends one to a text beside an image (2.1.332)
    if kind == "thinking":
        return f"thinking {block.get('thinking')} {block.get('signature')}" if block.get("signature") else None
    if kind == "tool_use":
        return f"tool_use {block.get('id')} {block.get('name')} {_canonical(block.get('input'))}"
    if kind == "tool_result":
        text = " ".join(str(part.get("text", part.get("type"))) for part in parts(block.get("content")))
        return f"tool_result {block.get('tool_use_id')} {text}"
    return f"{kind} {_canonical(block.get('source'))}"


def _canonical(value: JSON | object) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)
